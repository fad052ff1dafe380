"""Short runs and the SHA-256 of their final weights: proof that a change of structure changed no behaviour.

    python tests/recorded_runs.py                      # this checkout
    python tests/recorded_runs.py --baseline COMMIT    # that commit first, then this checkout, then both compared

Every algorithm that trains a policy and every kind of policy occurs, two searches, DDP with two ranks, and a run that
is resumed. Each command comes from
the checkout that is run, so that keys of the configuration may move. All run on one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SMALL = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2", "--data.init_args.validation.episodes=8"]
RL = [*SMALL, "--data.init_args.num_epochs=2", "--data.init_args.num_minibatches=2"]
HORIZON = ["--data.init_args.num_envs=4", "--data.init_args.num_steps=32"]
BABYAI = [*RL, "--model.init_args.init_from=null", "--data.init_args.num_groups=4"]
NUMBERS = ["--model.init_args.init_from=null", "--data.init_args.num_groups=2", "--data.init_args.max_turns=5"]
SFT_NUMBERS = [
    f"--data.init_args.{source}.init_args.num_functions=7" for source in ("demonstrations", "validation_demonstrations")
]
TWO_RANKS = ["--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.strategy=ddp"]

RUNS: Mapping[str, list[str]] = {
    "grpo_text": ["frozen_lake/grpo", *RL, "--data.init_args.group_size=4"],
    "grpo_episodes": ["frozen_lake/grpo_episodes", *RL, "--data.init_args.group_size=16"],
    "sft": ["frozen_lake/sft", *SMALL],
    "ppo_mlp": ["cartpole/ppo_mlp", *RL, *HORIZON],
    "ppo_text": ["cartpole/ppo_text", *RL, *HORIZON],
    "ppo_scoring": ["cartpole/ppo_scoring", *RL, *HORIZON],
    "ppo_reasoning": ["babyai/ppo_reasoning", *BABYAI],
    "ppo_bandit": ["babyai/ppo_bandit", *BABYAI],
    "trpo_text": ["frozen_lake/trpo_text", *SMALL, "--data.init_args.group_size=4"],
    "trpo_head": ["cartpole/trpo_head", *SMALL, *HORIZON],
    "trpo_mlp": ["half_cheetah/trpo_mlp", *SMALL, *HORIZON],
    "grpo_scoring": ["frozen_lake/grpo_scoring", *RL, "--data.init_args.group_size=4"],
    "grpo_numbers": ["half_cheetah/grpo_online", *RL, *NUMBERS],
    "reinforce_pp": ["frozen_lake/reinforce_pp", *RL, "--data.init_args.group_size=4"],
    "sft_numbers": ["synthetic/sft", *SFT_NUMBERS],
    "search": ["cartpole/search", "--data.init_args.num_iterations=5", "--trainer.max_epochs=5"],
    "props": ["cartpole/props", "--data.init_args.num_iterations=3", "--trainer.max_epochs=23"],
    "two_ranks": ["cartpole/ppo_mlp", *RL, *HORIZON, *TWO_RANKS],
    "resumed": ["cartpole/ppo_mlp", *RL, *HORIZON, "--trainer.max_epochs=4"],
}
"""The configuration, and what the command line changes of it."""


def run(tree: Path, name: str, command: list[str], folder: Path) -> str:
    """Train and return the digest of the weights in the last checkpoint, or what went wrong."""
    whole = [sys.executable, "-m", "lrl", "fit", "--config", f"configs/{command[0]}.yaml", *command[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    parts = [["--trainer.max_epochs=2"], []] if name == "resumed" else [[]]
    checkpoint = ""
    for number, part in enumerate(parts):
        run_directory = folder / f"{name}{number}"
        resume = [f"--ckpt_path={checkpoint}"] if checkpoint else []
        done = subprocess.run(
            [*whole, *part, *resume, f"--run_directory={run_directory}"],
            cwd=tree,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            return f"failed: {done.stdout.strip().splitlines()[-1:]}"
        checkpoint = str(run_directory / "checkpoints" / "last.ckpt")
    return digest(checkpoint)


def digest(checkpoint: str) -> str:
    """Return the SHA-256 of a checkpoint's weights, independent of their names."""
    import torch

    weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"].values()
    parts = sorted(hashlib.sha256(weight.contiguous().view(torch.uint8).numpy()).digest() for weight in flat(weights))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def flat(weights):
    """Tensors of any shape as one-dimensional ones; empty ones have no bytes."""
    return [weight.detach().reshape(-1) for weight in weights if hasattr(weight, "reshape")]


def digests(tree: Path, names: list[str], jobs: int) -> dict[str, str]:
    """Run all commands in a checkout, with the definitions of that checkout."""
    source = "import json, recorded_runs as r; print(json.dumps(dict(r.RUNS)))"
    asked = subprocess.run(
        [sys.executable, "-c", source], env=os.environ | {"PYTHONPATH": str(tree / "tests")}, stdout=-1, check=True
    )
    runs = json.loads(asked.stdout)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        chosen = [name for name in runs if not names or name in names]
        return dict(zip(chosen, pool.map(lambda n: run(tree, n, runs[n], Path(folder)), chosen), strict=True))


def main() -> int:
    """Compare the weights of runs with recorded ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs; all where none is named")
    parser.add_argument("--baseline", help="a commit, or the file that --json wrote on this machine")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to keep the digests")
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    before: dict[str, str] = {}
    if arguments.baseline and Path(arguments.baseline).is_file():
        before = json.loads(Path(arguments.baseline).read_text())
    elif arguments.baseline:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "baseline"
            subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, arguments.baseline], cwd=here, check=True)
            before = digests(tree, arguments.names, arguments.jobs)
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=here, check=True)
    after = digests(here, arguments.names, arguments.jobs)
    if arguments.json:
        arguments.json.write_text(json.dumps(after, indent=1))
    different = 0
    for name, value in after.items():
        same = not before or before.get(name) == value
        different += not same or value.startswith("failed")
        print(f"{name:16s} {value} {'' if same else 'WAS ' + before.get(name, 'absent')}")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
