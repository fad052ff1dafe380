"""A run that was stopped and resumed ends as one that was not: bit for bit."""

import copy
import dataclasses
import functools
import inspect
import signal
from collections import Counter as Counts
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from tiny_runs import (
    COLLECTIONS,
    OPTIONS,
    PARTS,
    Counter,
    grpo,
    make_trainer,
    module_of,
    rollout_data,
    run_until_stopped,
    save_tiny_model,
)

from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.sources import ExpertDemonstrations
from lrl.data.transitions import TransitionsDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.prefill import KeptPrompts
from lrl.openenv.factory import OpenEnvEnvs
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.ranges import PositiveInt
from lrl.rewards.expert_q import QGapReward
from lrl.search.module import SearchDataModule
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.resume import FREE_SETTINGS, check_settings, described, settings_of
from lrl.types import PastTurn, SamplingConfig

KINDS = sorted(OPTIONS)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=KINDS)
def whole(request, folder, tmp_path_factory):
    """An uninterrupted run."""
    counter = Counter()
    root = tmp_path_factory.mktemp("whole")
    return request.param, fit(folder, request.param, root, CollectionCheckpoint(1), counter), counter


def fit(folder, kind, root, *callbacks, ckpt_path=None, data=None, **changes):
    writes = any(isinstance(callback, Checkpoint) for callback in callbacks)
    trainer = make_trainer(root, *callbacks, enable_checkpointing=writes, **changes)
    module = module_of(folder, kind)
    trainer.fit(
        module,
        datamodule=rollout_data(kind, **data or {}),
        ckpt_path=ckpt_path,
        weights_only=True if ckpt_path else None,
    )
    return trainer


def assert_ends_alike(trainer, whole):
    """Weights, optimiser, schedule, clocks, and every row that was logged since."""
    ours, theirs = (t.lightning_module.state_dict() for t in (trainer, whole))
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (t.optimizers[0].state_dict() for t in (trainer, whole))
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][name], value) for name, value in state.items())
    ours, theirs = (t.lr_scheduler_configs[0].scheduler.state_dict() for t in (trainer, whole))
    assert ours == theirs
    for clock in ("env_steps", "episodes", "tokens"):
        assert trainer.datamodule.clocks[clock] == whole.datamodule.clocks[clock] > 0
    assert getattr(trainer.lightning_module, "kl_coef", 0) == getattr(whole.lightning_module, "kl_coef", 0)
    rows = trainer.logger.rows
    assert rows and rows == whole.logger.rows[-len(rows) :]


@pytest.mark.slow
def test_three_collections_are_trained_part_by_part(whole):
    _, trainer, counter = whole
    expected = []
    for epoch in range(COLLECTIONS):
        expected += [f"c{epoch}", *(f"u{epoch}.{part}" for part in range(PARTS)), f"e{epoch}"]
    assert counter.events == expected
    for _, row in trainer.logger.rows:
        assert 0 < row["rollout/invalid_action_rate"] < 1
        assert row["train/ratio_error"] > 0 and "train/kl_to_reference" in row


# -- killed -----------------------------------------------------------------------------------------------------------


KILLS = [
    *(("continuing", moment) for moment in ("rollout", "update", "write")),
    ("episodes", "update"),
    ("prompts", "rollout"),
]
"""Kinds of runs and moments; ``assets/results/kills.json`` has all moments of every algorithm."""


@pytest.mark.distributed
@pytest.mark.parametrize(("whole", "moment"), KILLS, indirect=["whole"])
def test_a_killed_run_that_is_resumed_ends_bit_identical(whole, folder, processes, tmp_path, moment):
    kind, reference, _ = whole
    child = processes.Process(target=run_until_stopped, args=(folder, kind, tmp_path, moment))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert (last.with_name(".last.ckpt.draft").exists()) == (moment == "write")

    counter = Counter()
    trainer = fit(folder, kind, tmp_path, CollectionCheckpoint(1), counter, ckpt_path=last)
    assert counter.events[0] == "c1" and counter.events.count("u1.0") == 1
    assert_ends_alike(trainer, reference)


# -- saved off a collection boundary, as by a job that Slurm restarts ------------------------------------------------


class SaveAt(Callback):
    """Callback that saves one checkpoint, at a given moment of the second collection."""

    def __init__(self, path, moment, part=0):
        self.path, self.moment, self.part = path, moment, part

    def save(self, trainer, moment, part=0):
        if trainer.current_epoch == 1 and (moment, part) == (self.moment, self.part) and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_fit_start(self, trainer, pl_module):
        decide, credit = pl_module.policy.act, pl_module.prepare
        turns = Counts()

        def act(*args, **kwargs):
            self.save(trainer, "collecting", turns[trainer.current_epoch])
            turns[trainer.current_epoch] += 1
            return decide(*args, **kwargs)

        pl_module.policy.act = act

        def prepare(rollout):
            credited = credit(rollout)
            self.save(trainer, "credited")
            return credited

        pl_module.prepare = prepare

    def on_train_epoch_start(self, trainer, pl_module):
        self.save(trainer, "epoch_start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.save(trainer, "batch_start", batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.save(trainer, "backward", trainer.datamodule.trained_minibatches)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.save(trainer, "batch_end", batch_idx)

    def on_validation_start(self, trainer, pl_module):
        self.save(trainer, "validation_start")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.save(trainer, "validation_batch_end")

    def on_validation_end(self, trainer, pl_module):
        self.save(trainer, "validation_end")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch_end")


class SaveLast(SaveAt, Checkpoint):
    """Saves after :class:`VectorEnvRollouts` has collected or counted: Lightning calls checkpoint callbacks last."""


MOMENTS = [
    ("collecting", 0, SaveAt),
    ("collecting", 2, SaveAt),
    ("credited", 0, SaveAt),
    ("epoch_start", 0, SaveAt),
    ("epoch_start", 0, SaveLast),
    ("batch_start", 0, SaveAt),
    ("batch_start", 2, SaveAt),
    ("backward", 1, SaveAt),
    ("batch_end", 0, SaveLast),
    ("batch_end", 1, SaveAt),
    ("batch_end", PARTS - 1, SaveAt),
    ("batch_end", PARTS - 1, SaveLast),
    ("validation_start", 0, SaveAt),
    ("validation_batch_end", 0, SaveAt),
    ("validation_end", 0, SaveAt),
    ("epoch_end", 0, SaveAt),
]


RARELY = [moment for moment in MOMENTS if "validation" not in moment[0]]
"""Moments that there are in an epoch without validation."""


CASES = [("episodes", *moment, 1) for moment in MOMENTS]
CASES += [
    ("episodes", *moment, 3)
    for moment in RARELY
    if moment[0] in ("collecting", "epoch_end") or moment[:2] in (("batch_start", 2), ("batch_end", PARTS - 1))
]
CASES += [
    (kind, *moment, 1)
    for kind in ("continuing", "network")
    for moment in MOMENTS
    if moment[0] in ("collecting", "credited", "epoch_start", "validation_end", "epoch_end")
    or moment[:2] in (("batch_start", 2), ("batch_end", PARTS - 1))
]


def settings(every):
    """Return the settings of a run with validation every few collections."""
    return {"limit_val_batches": 1, "check_val_every_n_epoch": every}


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """Return an uninterrupted run of a kind, with a checkpoint of each moment, trained at its first use."""

    @functools.cache
    def run(kind, every):
        root = tmp_path_factory.mktemp("saved")
        cases = [case[1:4] for case in CASES if (case[0], case[4]) == (kind, every)]
        paths = {case: root / f"{number}.ckpt" for number, case in enumerate(cases)}
        savers = [saver(path, moment, part) for (moment, part, saver), path in paths.items()]
        return fit(folder, kind, root, *savers, **settings(every)), paths

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moment", "part", "saver", "every"), CASES)
def test_a_checkpoint_from_inside_a_collection_resumes_bit_identical(
    folder, saved, tmp_path, kind, moment, part, saver, every
):
    whole, paths = saved(kind, every)
    counter = Counter()
    path = paths[moment, part, saver]
    resumed = fit(folder, kind, tmp_path, counter, ckpt_path=path, **settings(every))
    assert_ends_alike(resumed, whole)
    left = [f"u1.{n}" for n in range(PARTS)]
    assert [event for event in counter.events if event.startswith("u")][-PARTS:] == [f"u2.{n}" for n in range(PARTS)]
    done = {"batch_start": part, "backward": part, "batch_end": part + 1, "epoch_end": PARTS}
    done |= dict.fromkeys(("validation_start", "validation_batch_end", "validation_end"), PARTS)
    assert [event for event in counter.events if event.startswith("u1")] == left[done.get(moment, 0) :]
    ends = [event for event in counter.events if event.startswith("e")]
    assert ends == ["e1", "e2"] if moment != "epoch_end" else ends == ["e2"]
    validated = [row for _, row in resumed.logger.rows if "val/return" in row]
    before = moment not in ("validation_end", "epoch_end")
    assert len(validated) == (1 + before if every == 1 else 1)


def test_the_prompts_of_these_runs_continue_those_of_the_turn_before(folder, tmp_path, monkeypatch):
    continued, take = [], KeptPrompts.take

    def counted(kept, model, prompts):
        continued.append(len(prompts))
        return take(kept, model, prompts)

    monkeypatch.setattr(KeptPrompts, "take", counted)
    fit(folder, "continuing", tmp_path, max_epochs=1, data={"num_epochs": 1, "num_minibatches": 1})
    assert sum(continued) >= 12


@pytest.mark.filterwarnings("ignore:model.optimizer.schedule")
def test_a_run_whose_budget_of_steps_is_spent_ends_at_once_when_it_is_resumed(folder, tmp_path):
    whole = fit(folder, "prompts", tmp_path, CollectionCheckpoint(1), data={"max_env_steps": 24})
    assert whole.current_epoch == 2 < COLLECTIONS
    counter = Counter()
    again = fit(
        folder, "prompts", tmp_path, CollectionCheckpoint(1), counter, data={"max_env_steps": 24},
        ckpt_path=tmp_path / "checkpoints" / "last.ckpt",
    )  # fmt: skip
    assert counter.events == [] and again.datamodule.clocks["env_steps"] == 24
    ours, theirs = (t.lightning_module.state_dict() for t in (again, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_resume_with_other_random_numbers_raises(folder, tmp_path):
    fit(folder, "continuing", tmp_path, CollectionCheckpoint(1), max_epochs=1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="seed_everything is 5, in the checkpoint it was 0; resume with the same"):
        fit(folder, "continuing", tmp_path, ckpt_path=last, data={"seed": 5})


LORA = {"model": {"lora": LoRAConfig(r=2, alpha=4)}}


@pytest.mark.slow
def test_a_run_is_resumed_only_with_its_own_distribution(folder, tmp_path):
    def run(ckpt_path=None, max_epochs=2, **changes):
        trainer = make_trainer(tmp_path, CollectionCheckpoint(1), max_epochs=max_epochs)
        resumed = {"ckpt_path": ckpt_path, "weights_only": True} if ckpt_path else {}
        trainer.fit(grpo(folder, **LORA | changes), datamodule=rollout_data("prompts"), **resumed)

    run(max_epochs=1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=r"^model.policy.language_model.lora.alpha is 64, in the checkpoint it"):
        run(last, model={"lora": LoRAConfig(r=2, alpha=64)})
    with pytest.raises(
        ValueError, match=r"^model.policy.sampling.temperature is 0.3, in the checkpoint it was 1.0; resume"
    ):
        run(last, temperature=0.3)
    with pytest.raises(ValueError, match=r"^model.policy.language_model.lora is None, in the checkpoint it was {"):
        run(last, model={})
    run(last, optimizer={"lr": 1e-3}, kl={"coef": 0.2}, model=LORA["model"] | {"share_prompts": False})


def changed(part, key, value):
    """An object and a copy of it whose argument, or that of what it holds, is another."""
    other = copy.deepcopy(part)
    *path, name = key.split(".")
    owner = functools.reduce(getattr, path, other)
    object.__setattr__(owner, name, value)  # settings are frozen
    return part, other


def language_policies(folder):
    model, direct = LanguageModelConfig(name=folder), PromptTemplate(response_format="direct")
    text = TextPolicy(model, direct, SamplingConfig())
    scoring, head = ScoringPolicy(model, direct, value_head=ValueHeadConfig()), HeadPolicy(model)
    for policy in (text, scoring, head):
        policy.language_model.configure()
    return {"text": text, "scoring": scoring, "head": head}


@pytest.fixture(scope="module")
def policies(folder):
    """Policies of every class, by name."""
    network = MLPPolicy((4,))
    network.connect_spaces(*GymnasiumEnvs("CartPole-v1").spaces)
    network.configure()
    return language_policies(folder) | {"mlp": network, "linear": LinearPolicy(), "tabular": TabularPolicy()}


POLICY_CHANGES = [
    ("text", "sampling.max_new_tokens", 5),
    ("text", "trunk.max_prompt_tokens", 7),
    ("text", "prompt.system", "Be brief."),
    ("text", "prompt.response_format", "think_answer"),
    ("text", "prompt.history", 3),
    ("text", "prompt.stop", "!"),
    ("text", "prompt.hide_invalid_in_context", True),
    ("text", "prompt.examples", (PastTurn("S", "LEFT"),)),
    ("text", "language_model.config.chat_template", "plain"),
    ("text", "language_model.config.quantization", "nf4"),
    ("scoring", "temperature", 0.5),
    ("scoring", "normalisation", "word"),
    ("scoring", "trunk.value_head_config.detach", True),
    ("head", "whiten_states", 0.9),
    ("head", "max_text_tokens", 9),
    ("head", "activation", "relu"),
    ("head", "critic_config.observation_clip", 1.0),
    ("mlp", "observation_clip", 2.0),
    ("mlp", "activation", "gelu"),
    ("linear", "scale", 1.0),
    ("linear", "decimals", 3),
]


@pytest.mark.parametrize(("kind", "key", "value"), POLICY_CHANGES)
def test_every_setting_that_changes_a_policy_is_compared(policies, kind, key, value):
    before, after = (SimpleNamespace(policy=policy) for policy in changed(policies[kind], key, value))
    saved = {"settings": settings_of(before, None)}
    check_settings(saved, settings_of(SimpleNamespace(policy=copy.deepcopy(before.policy)), None))
    name = key.replace("trunk.", "").replace("_config", "").replace("config.", "")
    with pytest.raises(ValueError, match=rf"^model\.policy\.{name}"):
        check_settings(saved, settings_of(after, None))


def data_modules():
    env = GymnasiumEnvs("CartPole-v1", reset_options={"low": -0.1})
    return {
        "rollouts": RolloutDataModule(env, num_envs=PositiveInt(4)),  # as a configuration is parsed
        "groups": RolloutDataModule(PromptEnvs(ExpertQRows(), [QGapReward()]), num_groups=4),
        "demonstrations": DemonstrationsDataModule(ExpertDemonstrations(ExpertQRows()), env),
        "search": SearchDataModule(env),
        "transitions": TransitionsDataModule("some/data-v0"),
    }


DATA_CHANGES = [
    ("rollouts", "env.id", "Acrobot-v1"),
    ("rollouts", "env.kwargs", {"is_slippery": False}),
    ("rollouts", "env.invalid_penalty", -1.0),
    ("rollouts", "env.reset_options", {"low": -0.2}),
    ("rollouts", "num_minibatches", 2),
    ("rollouts", "num_steps", 3),
    ("groups", "num_groups", 8),
    ("groups", "env.rewards", (QGapReward(temperature=1.0),)),
    ("groups", "env.rows_source", ExpertQRows(gamma=0.5)),
    ("demonstrations", "batch_size", 8),
    ("demonstrations", "loss_on", "all"),
    ("demonstrations", "demonstrations.repeat", 2),
    ("search", "warmup", 9),
    ("transitions", "gamma", 0.5),
]


@pytest.mark.parametrize(("kind", "key", "value"), DATA_CHANGES)
def test_every_setting_of_the_data_that_is_trained_on_is_compared(tmp_path, kind, key, value):
    before, after = changed(data_modules()[kind], key, value)
    torch.save({"settings": settings_of(SimpleNamespace(), before)}, tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    check_settings(saved, settings_of(SimpleNamespace(), copy.deepcopy(before)))
    with pytest.raises(ValueError, match=rf"^data\.{key.split('.')[0]}"):
        check_settings(saved, settings_of(SimpleNamespace(), after))


def test_every_argument_of_a_policy_and_of_data_is_compared_or_free(policies):
    """New arguments are compared on resume unless they are listed as free, so none can be missed under another name."""
    modules = data_modules()
    envs = {"env": modules["rollouts"].env, "prompts": modules["groups"].env}
    envs["openenv"] = OpenEnvEnvs(url="http://127.0.0.1:1")
    configs = [LanguageModelConfig, LoRAConfig, PromptTemplate, SamplingConfig, ValueHeadConfig]
    for root, parts in (("policy", policies), ("data", modules), ("env", envs)):
        for part in parts.values():
            arguments = set(inspect.signature(type(part)).parameters)
            compared = set(described(root, part))
            free = {key.partition(".")[2] for key in FREE_SETTINGS if key.startswith(f"{root}.")}
            unset = {"num_groups", "num_envs"} if root == "data" else set()  # one of them is always null
            assert arguments <= compared | free | unset, type(part)
    known = {f"{field.name}" for config in configs for field in dataclasses.fields(config)}
    assert {key.partition(".")[2] for key in FREE_SETTINGS if key.startswith("language_model.")} <= known


@pytest.mark.slow
def test_the_reference_after_a_resume_is_the_policy_that_the_run_started_from(whole, folder, tmp_path):
    kind, reference, _ = whole
    trainer = fit(
        folder,
        kind,
        tmp_path,
        CollectionCheckpoint(1),
        max_epochs=COLLECTIONS + 1,
        ckpt_path=f"{reference.default_root_dir}/checkpoints/last.ckpt",
    )
    model = trainer.lightning_module.policy.language_model
    fresh = grpo(folder).policy
    fresh.configure()
    kept = model.copied_reference[0].state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in fresh.language_model.model.state_dict().items())
    assert not torch.equal(kept["lm_head.weight"], model.model.lm_head.weight)
