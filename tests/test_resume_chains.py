"""A run that is interrupted several times, anywhere, ends bit-identical to one that was not interrupted."""

import atexit
import functools
import os
import random
import signal
import tempfile
from contextlib import suppress

import lightning as L
import pytest
import torch
from tiny_runs import PARTS, demonstrations, make_trainer, network, rollout_data, save_tiny_model, sft

from lrl.training.checkpoint import CollectionCheckpoint

EPOCHS = 4


class KilledError(BaseException):
    """Ends a run like a killed process, because nothing handles it."""


class Cut(L.Callback):
    """Interrupts a run once, in a given collection.

    Args:
        moment: hook or phase in which the run is interrupted.
        epoch: index of the collection.
        part: minibatch in the hooks of minibatches, call of ``act`` while collecting and validating.
        how: ``save`` writes a checkpoint inside the hook, as the handler of Slurm's signal does, and is killed;
            ``signal`` sends SIGTERM; ``error`` raises one; ``kill`` writes nothing; ``torn`` is killed while writing.
    """

    def __init__(self, moment, epoch, part, how):
        self.moment, self.epoch, self.part, self.how = moment, epoch, part, how
        self.calls, self.done = 0, False

    def reach(self, trainer, moment, part=0):
        here = trainer.current_epoch == self.epoch and moment == self.moment and part == self.part
        if self.done or not here:
            return
        self.done = True
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.how == "error":
            raise ZeroDivisionError
        path = os.path.join(trainer.default_root_dir, "checkpoints", "last.ckpt")
        if self.how == "save":
            trainer.save_checkpoint(path)
        if self.how == "torn":
            with open(os.path.join(os.path.dirname(path), ".last.ckpt.draft"), "w") as draft:
                draft.write("half")
        raise KilledError

    def on_fit_start(self, trainer, pl_module):
        act, prepare = pl_module.policy.act, pl_module.prepare

        def counted_act(*args, **kwargs):
            decided = act(*args, **kwargs)
            phase = "validating" if trainer.validating else "collecting"
            self.calls = self.calls + 1 if phase == self.moment and trainer.current_epoch == self.epoch else 0
            self.reach(trainer, phase, self.calls - 1)
            return decided

        def then_prepare(rollout):
            self.reach(trainer, "collected")
            return prepare(rollout)

        pl_module.policy.act, pl_module.prepare = counted_act, then_prepare

    def on_train_epoch_start(self, trainer, pl_module):
        self.reach(trainer, "epoch_start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.reach(trainer, "batch_start", batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.reach(trainer, "step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reach(trainer, "batch_end", batch_idx)

    def on_validation_start(self, trainer, pl_module):
        self.reach(trainer, "validation_start")

    def on_validation_batch_end(self, *args):
        self.reach(args[0], "validation_batch_end")

    def on_validation_end(self, trainer, pl_module):
        self.reach(trainer, "validation_end")

    def on_train_epoch_end(self, trainer, pl_module):
        self.reach(trainer, "epoch_end")


MOMENTS = [
    ("epoch_start", 1), ("collecting", 3), ("collected", 1), ("batch_start", PARTS), ("batch_end", PARTS),
    ("validation_start", 1), ("validating", 3), ("validation_batch_end", 1), ("validation_end", 1), ("epoch_end", 1),
]  # fmt: skip
"""Moments, and how many parts each has."""


VARIANTS = {
    "plain": {"limit_val_batches": 1},
    "inside": {"limit_val_batches": 1, "val_check_interval": 2},
    "rarely": {"limit_val_batches": 1, "check_val_every_n_epoch": 3},
    "steps": {"limit_val_batches": 1, "max_steps": 1000},
    "accumulated": {"limit_val_batches": 1, "accumulate_grad_batches": 2},
    "limited": {"limit_val_batches": 1, "limit_train_batches": 3},
    "demonstrations": {"limit_val_batches": 1},
}
"""Settings of the trainer under which Lightning counts and resumes in different ways; the last trains by SFT."""


def chains(count, seed):
    """Random chains of one to four interruptions, in the order of a run, and the settings of the trainer."""
    draw = random.Random(seed)
    for number in range(count):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        ways = ["signal", "error", "kill", "torn"]
        if variant != "accumulated":  # what is saved between accumulated minibatches lacks their gradients
            ways += ["save", "save", "save"]
        links = []
        for _ in range(draw.randint(1, 4)):
            moment, parts = draw.choice(MOMENTS)
            links.append((moment, draw.randrange(EPOCHS), draw.randrange(parts), draw.choice(ways)))
        yield variant, sorted(links, key=lambda link: link[1])


@functools.cache
def tiny_model():
    """Return the folder of a language model of hidden size 16."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return save_tiny_model(folder.name)


def fit(variant, root, *callbacks, often=1e-9, **changes):
    """Train from the last checkpoint of a directory, or from the start if there is none.

    Args:
        often: minutes between checkpoints, also within a collection; None writes them at the end of the run only.
    """
    last = root / "checkpoints" / "last.ckpt"
    settings = {"max_epochs": EPOCHS} | VARIANTS[variant] | changes
    trainer = make_trainer(root, *callbacks, CollectionCheckpoint(1 if often else 100, every_minutes=often), **settings)
    resumed = {"ckpt_path": last, "weights_only": True} if last.exists() else {}
    made = (network, None, rollout_data("network"))
    if variant == "demonstrations":
        made = (sft, tiny_model(), demonstrations())
    module = made[0](made[1], optimizer={"schedule": "constant"})  # a schedule would depend on where the run was to end
    trainer.fit(module, datamodule=made[2], **resumed)
    return trainer


def resume(variant, root, **changes):
    """Train from the last checkpoint, which must exist, and must not be that of the start."""
    saved = torch.load(root / "checkpoints" / "last.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_loop.batch_progress"]["total"]["processed"] > 0
    return fit(variant, root, often=None, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the uninterrupted run with some settings, trained at its first use."""
    return functools.cache(lambda variant: fit(variant, tmp_path_factory.mktemp("whole")))


def check(variant, chain, root, whole):
    """Interrupt a run at each link of a chain, let it end, and compare it with the uninterrupted one."""
    (root / "checkpoints").mkdir()
    for link in chain:
        with suppress(KilledError, ZeroDivisionError, SystemExit):
            fit(variant, root, Cut(*link))
    assert_same(fit(variant, root), whole(variant))


def assert_same_weights(ended, expected):
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (ended, expected))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items()), "other weights"


def assert_same(ended, expected):
    """Compare weights, clocks and the rows that were logged."""
    assert_same_weights(ended, expected)
    clocks = [{k: v for k, v in t.datamodule.clocks.items() if k != "minutes"} for t in (ended, expected)]
    assert clocks[0] == clocks[1]
    steps = [trainer.fit_loop.epoch_loop._batches_that_stepped for trainer in (ended, expected)]
    assert steps[0] == steps[1], "LearningRateMonitor would log another step"
    logged = ended.logger.rows
    assert not logged or logged == expected.logger.rows[-len(logged) :]


KNOWN = [
    ("plain", [("collecting", 1, 1, "save"), ("epoch_start", 2, 0, "kill")]),
    ("plain", [("collecting", 1, 0, "signal"), ("validating", 1, 1, "signal"), ("batch_end", 2, 1, "save")]),
    ("inside", [("validating", 0, 1, "save"), ("collecting", 1, 2, "save"), ("batch_end", 2, 1, "save")]),
    ("steps", [("collecting", 1, 2, "save"), ("batch_start", 1, 3, "save"), ("collected", 2, 0, "signal")]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "chain"), KNOWN, ids=str)
def test_a_run_interrupted_several_times_ends_bit_identical(whole, tmp_path, variant, chain):
    check(variant, chain, tmp_path, whole)


class Stop(L.Callback):
    """Stops the run after some minibatches, as Lightning's timer does."""

    def __init__(self, minibatches):
        self.left = minibatches

    def on_train_batch_end(self, trainer, *_):
        self.left -= 1
        trainer.should_stop = self.left == 0


@pytest.mark.parametrize("minibatches", [1, PARTS - 1, PARTS, PARTS + 2])
@pytest.mark.parametrize("limit", ["max_steps", "should_stop"])
def test_a_run_that_a_limit_ended_continues_where_it_stopped(whole, tmp_path, limit, minibatches):
    stops, changes = ([], {"max_steps": minibatches}) if limit == "max_steps" else ([Stop(minibatches)], {})
    stopped = fit("plain", tmp_path, *stops, often=None, **changes)
    assert stopped.fit_loop.epoch_loop.batch_progress.total.processed == minibatches
    assert_same(resume("plain", tmp_path), whole("plain"))


def test_a_checkpoint_saved_after_a_limit_ended_the_run_goes_on_with_the_rest_of_the_pass(whole, tmp_path):
    stopped = fit("plain", tmp_path, often=None, max_steps=PARTS + 1)
    stopped.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")  # now Lightning has counted the pass as finished
    assert_same_weights(resume("plain", tmp_path), whole("plain"))  # the first part of the pass has a row of its own


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_a_run_is_not_stopped_between_accumulated_minibatches(whole, tmp_path, minibatches):
    stopped = fit("accumulated", tmp_path, Stop(minibatches), often=None)
    assert stopped.fit_loop.epoch_loop.batch_progress.total.processed == 2 * ((minibatches + 1) // 2)
    assert_same(resume("accumulated", tmp_path), whole("accumulated"))


@pytest.mark.parametrize("often", [None, 1e-9])
def test_a_run_that_max_time_ended_continues_with_the_rest_of_the_pass(whole, tmp_path, monkeypatch, often):
    seconds = iter(range(100))
    monkeypatch.setattr(L.pytorch.callbacks.Timer, "time_elapsed", lambda *_: next(seconds))
    stopped = fit("plain", tmp_path, often=often, max_time={"seconds": 6})
    assert stopped.fit_loop.epoch_loop.batch_progress.total.processed % PARTS > 0
    assert_same(resume("plain", tmp_path, max_time={"days": 1}), whole("plain"))


@pytest.mark.parametrize("moment", ["collecting", "batch_start", "validating", "epoch_end"])
def test_an_error_leaves_a_checkpoint_of_the_last_whole_step(whole, tmp_path, moment):
    with pytest.raises(ZeroDivisionError):
        fit("plain", tmp_path, Cut(moment, 1, 1 if moment in ("batch_start", "validating") else 0, "error"), often=None)
    assert_same(resume("plain", tmp_path), whole("plain"))


@pytest.mark.parametrize("moment", ["collected", "step"])
def test_an_error_during_a_change_of_weights_keeps_the_previous_checkpoint(tmp_path, moment):
    with pytest.raises(ZeroDivisionError):
        fit("plain", tmp_path, Cut(moment, 1, 0, "error"), often=None)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.reference
@pytest.mark.parametrize(("variant", "chain"), list(chains(126, seed=0)), ids=str)
def test_random_chains_of_interruptions_end_bit_identical(whole, tmp_path, variant, chain):
    check(variant, chain, tmp_path, whole)
