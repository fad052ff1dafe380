"""Runs of two ranks that end with the weights of one process, under DDP and FSDP2.

One process and two ranks train on the same data:

- Rollouts: with n environments, rank r of 2 plays environments r n/2 to (r + 1) n/2 - 1 of the one process. The seed of
  a reset and the random number of a token depend on the global index of the environment, not on the rank.
- SFT: rank r trains on rows r, r + 2, ... of each batch of the one process.
- Minibatches: a rank shuffles and divides its own turns. With one minibatch per pass they are all turns, as in the one
  process. With several, one process would divide all turns together; here its minibatch is the union of the minibatches
  of both ranks (:class:`UnionOfRanks`), because the gradient of two ranks is that of this union.

Two ranks add numbers in another order, so the weights are equal up to rounding. All weights are float64, where rounding
is far below the effect of a wrong divisor or a missing row. The optimiser is SGD without clipping, because AdamW and
clipping would hide a wrong divisor; two cases have AdamW and clipping.

`python tests/distributed/ranks.py --json assets/results/ranks.json` compares all cases, the test suite some of them.
"""

import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from tiny_runs import (
    FEW_ITERATIONS,
    FLOAT64,
    demonstrations,
    from_settings,
    grpo,
    make_trainer,
    merged,
    network,
    rollout_data,
    save_tiny_model,
    text_policy,
    trpo,
)

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.functional.distributed import full_state_dict
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.training.checkpoint import CollectionCheckpoint, checkpoint_folder
from lrl.types import TurnBatch

WORLD_SIZE = 2
COLLECTIONS = 3
"""Collections of a case in the report; the test suite trains on ``FEW``."""
FEW = 2
EXACT, ROUNDED = 1e-12, 1e-7
"""Largest differences between a weight of two ranks and of one process. The second is that of GRPO, whose returns are
float32, and of AdamW, which magnifies gradients that are 0 except for rounding."""
BOTH, DDP = ("ddp", "fsdp2"), ("ddp",)
DOUBLE, SGD = FLOAT64["model"], {"optimizer": FLOAT64["optimizer"]}
ADAM = {"optimizer": {"lr": 1e-2, "factory": None}}


@dataclass(frozen=True)
class Case:
    """A run whose weights are compared."""

    algorithm: str
    module: dict[str, Any] = field(default_factory=dict)
    """Changes of the module's settings."""
    data: dict[str, Any] = field(default_factory=dict)
    """Changes of the data module's settings."""
    strategies: tuple[str, ...] = BOTH
    clip: float | None = None
    """Largest norm of the gradient; None does not clip."""
    shows: str = ""
    """What must have happened in the run, see :func:`check_shown`."""

    @property
    def tolerance(self):
        """Largest difference between a weight of two ranks and of one process."""
        adam = self.module.get("optimizer", {}).get("factory", "") is None
        return ROUNDED if adam or self.algorithm == "grpo" else EXACT


ONE_UPDATE = {"num_epochs": 1, "num_minibatches": 1}
PASSES = {"num_epochs": 3}
PARTS = {"num_minibatches": 3}
FEW_TURNS = {"num_groups": 4, "group_size": 1, "num_minibatches": 9}
EVERYTHING = {"num_minibatches": 2, "num_epochs": 2}
LORA = {"model": {"lora": LoRAConfig(r=2, alpha=4)}}
CASES = {
    "sft": Case("sft"),
    "sft, a critic that is not trained": Case("sft_critic", strategies=("fsdp2",)),
    "ppo": Case("ppo"),
    "grpo": Case("grpo", shows="lengths"),
    "reinforce_pp": Case("reinforce_pp", shows="lengths"),
    "trpo": Case("trpo", strategies=DDP),
    "grpo, loss per token": Case("grpo", {"loss_normalisation": "token"}, PARTS, shows="lengths"),
    "grpo, constant divisor": Case("grpo", {"loss_normalisation": "constant"}, PARTS, shows="lengths"),
    "grpo, batch_std": Case("grpo", {"advantage_scale": "batch_std"}),
    "grpo, target_kl": Case("grpo", {"target_kl": 1e-3}, PASSES, shows="skips"),
    "ppo, target_kl": Case("ppo", {"target_kl": 1e-3}, PASSES, shows="skips"),
    "reinforce_pp, target_kl": Case("reinforce_pp", {"target_kl": 1e-3}, PASSES, shows="skips"),
    "ppo, adaptive KL coefficient": Case("ppo", {"kl": {"target": 0.01, "horizon": 100}}, shows="adapts"),
    "ppo, adaptive learning rate": Case(
        "ppo", merged(ADAM, {"optimizer": {"update_kl": 1e-3}}), EVERYTHING, shows="adapts"
    ),
    "ppo, AdamW and clipping": Case("ppo", ADAM, PASSES, clip=0.1),
    "ppo, init_seed null": Case("ppo_at_random"),
    "grpo, LoRA": Case("grpo", LORA),
    "ppo, LoRA and a critic with its own adapter": Case("ppo_adapter", data=PASSES, strategies=DDP),
    "ppo, normalised observations, init_seed null": Case("network", strategies=DDP, shows="statistics"),
    "ppo, whitened hidden states, init_seed null": Case("head", strategies=DDP, shows="statistics"),
    "ppo, minibatches": Case("ppo", data=EVERYTHING),
    "grpo, an empty minibatch on one rank": Case("grpo", data=FEW_TURNS | PASSES, shows="empty"),
    "ppo, an empty minibatch on one rank": Case("ppo_episodes", data=FEW_TURNS, shows="empty"),
    "reinforce_pp, an empty minibatch on one rank": Case("reinforce_pp", data=FEW_TURNS, shows="empty"),
}
SAMPLE = ("sft", "ppo", "grpo", "trpo", "reinforce_pp, an empty minibatch on one rank")
"""Cases that the test suite runs as well."""
RESUMED = "ppo, AdamW and clipping"
"""Case that is resumed on another number of devices."""


def save_model(folder):
    """Save a random GPT-2, which computes in the data type of its weights throughout; Llama's norms use float32.

    It has no dropout, whose masks SFT draws for each rank separately.
    """
    from transformers import AutoModelForCausalLM

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    save_tiny_model(folder, "gpt2", tie_word_embeddings=False, **dropout)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # actions are about equally probable, through a hidden coordinate that is constant
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 1.5
        model.lm_head.weight[:, 1:] *= 0.3
        model.lm_head.weight[model.config.eos_token_id, 0] += 1.0  # half of the responses are one action
    model.save_pretrained(folder)
    return folder


def module_of(algorithm, folder, changes):
    """Return the module of a case; its random initial weights depend on the state of torch's generator."""
    from lrl.algorithms.ppo import PPOValueHeadModule
    from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule
    from lrl.algorithms.sft import SFTModule
    from lrl.policies.head import HeadPolicy

    if algorithm == "trpo":
        return trpo(folder, **merged(FEW_ITERATIONS, changes))
    changes = merged(SGD, changes)
    if algorithm == "network":
        return network(folder, **changes)
    if algorithm == "grpo":
        return grpo(folder, "all", **merged({"model": DOUBLE}, changes))
    if algorithm in ("sft", "sft_critic"):
        head = ValueHeadConfig(hidden_sizes=(8,), init_seed=0) if algorithm == "sft_critic" else None
        return from_settings(SFTModule, text_policy(folder, value_head=head, **DOUBLE), **changes)
    if algorithm == "reinforce_pp":
        return from_settings(REINFORCEPlusPlusModule, text_policy(folder, "all", **DOUBLE), kl_coef=0.1, **changes)
    if algorithm == "head":
        policy = HeadPolicy(LanguageModelConfig(name=folder, **DOUBLE), (8,), whiten_states=0.1, freeze_trunk=True)
    else:
        adapter, seed = algorithm == "ppo_adapter", None if algorithm == "ppo_at_random" else 0
        head = ValueHeadConfig(hidden_sizes=(8,), init_seed=seed, adapter=adapter)
        lora = LORA["model"] if adapter else {}
        policy = text_policy(folder, "all", value_head=head, **DOUBLE, **lora)
        changes = merged({"kl": {"coef": 0.1}, "ent_coef": 0.01}, changes)
    return from_settings(PPOValueHeadModule, policy, **changes)


class UnionOfRanks(RolloutDataModule):
    """Rollouts of one process whose minibatch ``i`` consists of the minibatches ``i`` of two ranks.

    Each rank has the turns of half of the environments, in the same order, and divides them as it would alone.
    """

    def _parts(self, batch):
        """Return the turns of each rank, int64 ``(turn,)``."""
        times, envs = self.rollout.active.shape
        env = self.rollout.flatten(torch.arange(envs).expand(times, envs))
        return [torch.nonzero(env // (envs // WORLD_SIZE) == rank)[:, 0] for rank in range(WORLD_SIZE)]

    def _members(self, batch, index):
        epoch, position = divmod(index, self.num_minibatches)
        orders = [(own, self._order(batch[own], epoch, self.collection)) for own in self._parts(batch)]
        return torch.cat([own[order.tensor_split(self.num_minibatches)[position]] for own, order in orders])

    def sample(self, *sizes):
        whole, samples = self._batch, []
        for own in self._parts(whole):
            self._batch = whole[own]
            samples.append(super().sample(*sizes))
        self._batch = whole
        inputs = {name: torch.cat([part.inputs[name] for part in samples]) for name in whole.inputs}
        others = {
            name: None if value is None else torch.cat([part.fields()[name] for part in samples])
            for name, value in whole.fields().items()
            if name != "inputs"
        }
        return TurnBatch(inputs=inputs, **others)


def data_of(algorithm, changes):
    """Return the data module of a case."""
    from lrl.codecs.numbers import NumberFormat
    from lrl.envs.factory import GymnasiumEnvs

    if algorithm in ("sft", "sft_critic"):
        return demonstrations()
    kind = "continuing" if algorithm in ("ppo", "ppo_at_random", "ppo_adapter", "trpo") else "episodes"
    changes = ONE_UPDATE | changes
    if algorithm == "head":
        numbers = NumberFormat(kind="integers", ranges=[(-2.0, 664.0)])  # few numbers, which the tokenizer has
        env = GymnasiumEnvs("CartPole-v1", numbers=numbers, max_episode_steps=9)
        return RolloutDataModule(env, num_envs=12, num_steps=4, **changes)
    return rollout_data("network" if algorithm == "network" else kind, **changes)


class Facts(L.Callback):
    """Records what happened in a run: its first weights, turns, skipped minibatches, coefficients and rates."""

    def __init__(self):
        self.start, self.turns, self.skipped, self.adapted = {}, [], [], []

    def on_train_start(self, trainer, pl_module):
        trained = {name for name, _ in pl_module.named_parameters()}
        self.start = {name: weight for name, weight in whole_weights(pl_module).items() if name in trained}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.turns.append(len(batch))
        self.skipped.append(pl_module.skip_updates)
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.adapted.append((getattr(pl_module, "kl_coef", None), *rates))


@contextmanager
def in_float64():
    """Create weights in float64: Lightning's precision ``64-true`` does not exist for FSDP2."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class KeepFirst(L.Callback):
    """Copies the checkpoint of the first collection, as a run that is killed in the second leaves it."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.early_weights = whole_weights(pl_module)
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            last = checkpoint_folder(trainer) / "last.ckpt"
            (shutil.copytree if last.is_dir() else shutil.copyfile)(last, self.path)


@in_float64()
def run(name, folder, root, strategy=None, keep=None, ckpt_path=None, collections=FEW):
    """Train a case, in this process alone or, with a strategy, as one of two ranks; return what the ranks compare.

    Args:
        name: name of the case.
        folder: folder of the model.
        root: run directory.
        strategy: strategy of two ranks.
        keep: where to copy the checkpoint of the first collection.
        ckpt_path: checkpoint of a collection, after which the run continues.
        collections: number of collections, or of passes over demonstrations.
    """
    case, facts = CASES[name], Facts()
    torch.manual_seed(5)  # as seed_everything does, on every rank
    module, data = module_of(case.algorithm, folder, case.module), data_of(case.algorithm, case.data)
    if strategy is None and getattr(data, "num_minibatches", 1) > 1:
        data.__class__ = UnionOfRanks
    trainer = make_trainer(
        root,
        facts,
        *([] if keep is None else [CollectionCheckpoint(1), KeepFirst(keep)]),
        max_epochs=collections,
        enable_checkpointing=keep is not None,
        gradient_clip_val=case.clip,
        **{} if strategy is None else {"strategy": strategy, "devices": WORLD_SIZE},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    rollout = getattr(data, "rollout", None)
    facts = {name: getattr(facts, name) for name in ("start", "turns", "skipped", "adapted")}
    facts |= {"responses": rollout and rollout.responses, "rows": trainer.logger.rows}
    return {"weights": whole_weights(trainer.lightning_module), **facts}


def whole_weights(module):
    """Return a copy of the trained weights; all ranks must call it."""
    return {name: weight.detach().clone() for name, weight in full_state_dict(module.state_dict()).items()}


def check_shown(name, alone, ranks):
    """Check that what a case is about has happened in its run.

    ``skips``: some minibatches, not all, were skipped after ``target_kl``. ``adapts``: a coefficient or learning rate
    changed. ``empty``: a minibatch was empty on one rank only. ``lengths``: the ranks played different numbers of
    turns. ``statistics``: running statistics were learned.
    """
    sizes = [tuple(sizes) for sizes in zip(*(rank["turns"] for rank in ranks), strict=True)]
    statistics = [float(weight.sum()) for weight_name, weight in alone["weights"].items() if "counting" in weight_name]
    shown = {
        "": True,
        "skips": 0 < sum(alone["skipped"]) < len(alone["skipped"]),
        "adapts": len(set(alone["adapted"])) > 1,
        "empty": any(min(pair) == 0 < max(pair) for pair in sizes),
        "lengths": any(first != second for first, second in sizes),
        "statistics": any(statistics),
    }
    assert shown[CASES[name].shows], f"{name}: the run does not show what it is meant to show"
    assert [sum(pair) for pair in sizes] == alone["turns"], f"{name}: the ranks trained on other turns"
    if alone["responses"]:
        assert alone["responses"] == side_by_side([rank["responses"] for rank in ranks]), f"{name}: other responses"
    for rank in ranks:
        assert rank["weights"].keys() == alone["weights"].keys()
        assert rank["skipped"] == alone["skipped"] and len(rank["rows"]) == len(alone["rows"])


def side_by_side(parts):
    """Return responses per time and environment, given those of each rank, which may have played longer."""
    times = max(map(len, parts))
    padded = [part + [[""] * len(part[0])] * (times - len(part)) for part in parts]
    return [[*first, *second] for first, second in zip(*padded, strict=True)]


def difference(first, second):
    """Return the largest absolute difference between the weights of ``first`` and those of the same names."""
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
