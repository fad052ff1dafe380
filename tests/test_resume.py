"""A run that was stopped and resumed ends as one that was not: bit for bit."""

import functools
import signal

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

from lrl.callbacks.checkpoint import CollectionCheckpoint

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
    assert getattr(trainer.lightning_module, "kl_coef.value", 0) == getattr(whole.lightning_module, "kl_coef.value", 0)
    rows = trainer.logger.rows
    assert rows and rows == whole.logger.rows[-len(rows) :]


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


@pytest.mark.distributed
@pytest.mark.parametrize("moment", ["rollout", "update", "write"])
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


# -- saved off a collection boundary, as a requeued job does ----------------------------------------------------------


class SaveAt(Callback):
    """Saves once, somewhere in the second collection."""

    def __init__(self, path, moment, part=0):
        self.path, self.moment, self.part = path, moment, part

    def save(self, trainer, moment, part=0):
        if trainer.current_epoch == 1 and (moment, part) == (self.moment, self.part) and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_fit_start(self, trainer, pl_module):
        decide, credit = pl_module.policy.act, pl_module.prepare

        def act(*args, **kwargs):
            self.save(trainer, "collecting")
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


class SaveFirst(SaveAt):
    """Is asked before the callback that counts parts."""

    def setup(self, trainer, pl_module, stage):
        trainer.callbacks.sort(key=lambda callback: callback is not self)


MOMENTS = [
    ("collecting", 0, SaveAt),
    ("credited", 0, SaveAt),
    ("epoch_start", 0, SaveFirst),
    ("epoch_start", 0, SaveAt),
    ("batch_start", 0, SaveAt),
    ("batch_start", 2, SaveAt),
    ("backward", 1, SaveAt),
    ("batch_end", 0, SaveAt),
    ("batch_end", 1, SaveFirst),
    ("batch_end", PARTS - 1, SaveFirst),
    ("batch_end", PARTS - 1, SaveAt),
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
    """With validation after every so many collections."""
    return {"limit_val_batches": 1, "check_val_every_n_epoch": every}


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """An uninterrupted run of a kind that saves at all its moments, and where; made when it is first asked for."""

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


def test_other_random_numbers_are_refused(folder, tmp_path):
    fit(folder, "continuing", tmp_path, CollectionCheckpoint(1), max_epochs=1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(
        ValueError, match="seed_everything is 5, in the run of ckpt_path it was 0; resume with the same"
    ):
        fit(folder, "continuing", tmp_path, ckpt_path=last, data={"seed": 5})


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
