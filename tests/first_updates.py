"""Figures of the first two updates of every algorithm, compared with ``tests/golden/first_updates.json``.

A change of behaviour on purpose records them again, with its reason in the commit::

    python tests/first_updates.py
"""

import json
import sys
import tempfile
from pathlib import Path

from tiny_runs import FEW_ITERATIONS, grpo, make_trainer, network, ppo, rollout_data, save_tiny_model, sft, text_policy
from tiny_runs import trpo as trpo_of

from lrl.training.optimizer import OptimizerConfig

GOLDEN = Path(__file__).parent / "golden" / "first_updates.json"
NAMES = ("loss", "value_loss", "approx_kl", "kl", "kl_to_reference", "ratio_error", "entropy", "improvement")
ONE = {"num_epochs": 1, "num_minibatches": 1}


def reinforce_pp(folder):
    """REINFORCE++ with a reference."""
    from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule

    return REINFORCEPlusPlusModule(text_policy(folder), optimizer=OptimizerConfig(lr=1e-2), kl_coef=0.1)


def trpo(folder):
    """TRPO with two iterations in float64: ten iterations of conjugate gradients amplify rounding to three digits."""
    return trpo_of(folder, **FEW_ITERATIONS)


RUNS = {
    "grpo": (grpo, "prompts"),
    "grpo_episodes": (grpo, "episodes"),
    "ppo_text": (ppo, "continuing"),
    "ppo_network": (network, "network"),
    "trpo": (trpo, "continuing"),
    "reinforce_pp": (reinforce_pp, "prompts"),
    "sft": (sft, None),
}


def figures(kind, folder, root):
    """Loss, divergences, ratio error and the like of two updates, by name."""
    from tiny_runs import demonstrations

    make, data = RUNS[kind]
    module = make(folder, log_every=1) if kind == "sft" else make(folder)
    trainer = make_trainer(root, max_epochs=2)
    trainer.fit(module, datamodule=demonstrations() if data is None else rollout_data(data, **ONE))
    rows = [row for _, row in trainer.logger.rows if "train/entropy" in row][:2]
    return [{name: row[f"train/{name}"] for name in NAMES if f"train/{name}" in row} for row in rows]


def main():
    """Record the first updates."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "tiny")
        recorded = {kind: figures(kind, model, Path(folder) / kind) for kind in RUNS}
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
