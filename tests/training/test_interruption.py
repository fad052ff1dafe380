"""SIGTERM and Ctrl-C end a run with a checkpoint, from which it goes on bit for bit."""

import os
import signal
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from tiny_runs import demonstrations, make_trainer, module_of, rollout_data, save_tiny_model, sft

from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.guards import Interruption

STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Send(L.Callback):
    """Sends a signal to this process in the second collection."""

    def __init__(self, number, moment):
        self.number, self.moment = number, moment

    def send(self, trainer, moment):
        if trainer.current_epoch == 1 and moment == self.moment:
            self.moment = None
            os.kill(os.getpid(), self.number)

    def on_fit_start(self, trainer, pl_module):
        act = pl_module.policy.act

        def sending(*args, **kwargs):
            decided = act(*args, **kwargs)
            self.send(trainer, "validating" if trainer.validating else "collecting")
            return decided

        pl_module.policy.act = sending

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.send(trainer, "update")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.send(trainer, f"minibatch {batch_idx}")

    def on_train_epoch_end(self, trainer, pl_module):
        self.send(trainer, "epoch_end")


def fit(folder, kind, root, *callbacks, ckpt_path=None, every_minutes=None, **options):
    if kind == "sft":
        module, data, changes = sft(folder), demonstrations(), {"accumulate_grad_batches": 2}
    else:
        module, data, changes = module_of(folder, kind), rollout_data(kind), {"limit_val_batches": 1} | options
    trainer = make_trainer(root, CollectionCheckpoint(10, every_minutes=every_minutes), *callbacks, **changes)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def end(folder, kind, root, number, moment):
    """Run until a signal ends the run, and return the checkpoint that it wrote."""
    handlers = [signal.getsignal(number) for number in STATUS]
    with pytest.raises(SystemExit) as ended:
        fit(folder, kind, root, Send(number, moment))
    assert ended.value.code == STATUS[number]
    assert [signal.getsignal(number) for number in STATUS] == handlers
    return root / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Uninterrupted runs by kind."""
    return {kind: fit(folder, kind, tmp_path_factory.mktemp(kind)) for kind in ("continuing", "network", "sft")}


CASES = [
    ("continuing", signal.SIGTERM, "collecting"),
    ("continuing", signal.SIGTERM, "update"),
    ("network", signal.SIGINT, "collecting"),
    ("network", signal.SIGINT, "update"),
    ("network", signal.SIGTERM, "validating"),
    ("network", signal.SIGINT, "epoch_end"),
    ("sft", signal.SIGTERM, "minibatch 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number", "moment"), CASES)
def test_an_interrupted_run_names_its_checkpoint_and_resumes_bit_identically(
    folder, whole, tmp_path, caplog, kind, number, moment
):
    last = end(folder, kind, tmp_path, number, moment)
    assert f"{signal.Signals(number).name}: wrote {os.path.relpath(last)}" in caplog.text
    saved = torch.load(last, weights_only=True)["loops"]["fit_loop"]
    trained = saved["epoch_loop.batch_progress"]["current"]["processed"]
    parts = 3 if kind == "sft" else 4
    expected = {"update": 1, "minibatch 0": 2, "validating": parts, "epoch_end": parts, "collecting": parts}
    assert trained == expected[moment]
    assert_same_end(fit(folder, kind, tmp_path, ckpt_path=last), whole[kind])


def assert_same_end(resumed, whole):
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (resumed, whole)]
    for position, state in states[1].items():
        assert all(torch.equal(states[0][position][name], value) for name, value in state.items())
    rows = resumed.logger.rows
    assert rows and rows == whole.logger.rows[-len(rows) :]


class KilledError(BaseException):
    """Ends a run like a killed process, because nothing handles it."""


class Fall(L.Callback):
    """Kills the run at a minibatch of the second collection."""

    def __init__(self, minibatch):
        self.minibatch = minibatch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == self.minibatch:
            raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "written"), [("continuing", 2), ("network", 2), ("sft", 2)])
def test_a_run_that_is_killed_between_minibatches_resumes_from_the_last_checkpoint(
    folder, whole, tmp_path, kind, written
):
    with pytest.raises(KilledError):
        fit(folder, kind, tmp_path, Fall(2), every_minutes=1e-9)
    last = tmp_path / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_progress"]["current"]["processed"] == 1
    assert saved["epoch_loop.batch_progress"]["current"]["processed"] == written
    assert_same_end(fit(folder, kind, tmp_path, ckpt_path=last), whole[kind])


def validations(trainer):
    return [(step, row) for step, row in trainer.logger.rows if any(name.startswith("val/") for name in row)]


@pytest.mark.slow
def test_a_resumed_run_does_not_skip_a_validation_between_minibatches(folder, tmp_path):
    options = {"every_minutes": 1e-9, "val_check_interval": 2}
    expected = validations(fit(folder, "network", tmp_path / "whole", **options))
    with pytest.raises(KilledError):
        fit(folder, "network", tmp_path, Fall(2), **options)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert (
        torch.load(last, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 1
    )
    went_on = validations(fit(folder, "network", tmp_path, ckpt_path=last, **options))
    assert len(expected) == 6 and went_on == expected[2:]


def test_short_collections_are_checkpointed_only_at_their_end(folder, tmp_path, monkeypatch):
    """These checkpoints can be resumed on any number of devices."""
    clock = iter(range(10**6))
    monkeypatch.setattr("lrl.training.checkpoint.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(KilledError):
        fit(folder, "network", tmp_path, Fall(3), every_minutes=3.5 / 60)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_progress"]["current"]["processed"] == 1
    assert saved["epoch_loop.batch_progress"]["current"]["processed"] in (0, 4)


def test_no_checkpoint_is_written_between_minibatches_before_its_time(folder, tmp_path):
    with pytest.raises(KilledError):
        fit(folder, "network", tmp_path, Fall(2), every_minutes=1e9)
    assert not (tmp_path / "checkpoints").exists()


def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(monkeypatch):
    sent, interruption = [], Interruption()
    monkeypatch.setattr(signal, "signal", lambda number, handler: sent.append((number, handler)))
    monkeypatch.setattr(signal, "raise_signal", lambda number: sent.append(number))
    interruption._note(signal.SIGTERM, None)
    interruption._note(signal.SIGTERM, None)
    assert not sent
    interruption._note(signal.SIGINT, None)
    assert sent == [(signal.SIGINT, signal.SIG_DFL), signal.SIGINT]


def test_a_signal_does_not_damage_the_progress_bar_of_a_terminal(monkeypatch):
    written, interruption = [], Interruption()
    monkeypatch.setattr(os, "isatty", lambda number: True)
    monkeypatch.setattr(os, "write", lambda number, text: written.append(text))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    for _ in range(2):
        interruption._note(signal.SIGINT, None)
    assert written[0].startswith(b"\nSIGINT: ") and written[0].endswith(b"\n\n\n") and written[1] == b"\x1b[?25h\n"


def test_an_error_before_any_signal_is_raised():
    with pytest.raises(ZeroDivisionError):
        Interruption().attempt(lambda: 1 / 0)
    assert Interruption().attempt(lambda: 3) == 3
