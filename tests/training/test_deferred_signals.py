"""Signals wait while weights move, and are dropped where a step fails."""

import signal
from types import SimpleNamespace

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lrl.training.guards import DeferredSignals, requeue_signals


@pytest.fixture
def heard():
    before, heard = signal.getsignal(signal.SIGUSR1), []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_a_deferred_signal_is_raised_once(heard):
    steps = DeferredSignals({signal.SIGUSR1})
    with steps:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert not heard
    assert heard == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    with steps:
        pass
    assert heard == [signal.SIGUSR1] * 2


def test_a_failed_step_leaves_no_state_to_save(heard):
    steps = DeferredSignals({signal.SIGUSR1})

    def fail():
        with steps:
            signal.raise_signal(signal.SIGUSR1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not heard
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_the_requeue_signal_of_a_cluster_is_deferred():
    usual = requeue_signals(SimpleNamespace(strategy=SimpleNamespace(cluster_environment=None)))
    assert usual == {signal.SIGUSR1, signal.SIGUSR2}
    slurm = SLURMEnvironment(requeue_signal=signal.SIGHUP)
    assert requeue_signals(SimpleNamespace(strategy=SimpleNamespace(cluster_environment=slurm))) == {
        *usual,
        signal.SIGHUP,
    }
