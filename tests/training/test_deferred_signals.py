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


def test_a_signal_waits_and_comes_once(heard):
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


def test_where_a_step_fails_there_is_nothing_to_save(heard):
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


def test_the_signal_that_a_cluster_is_told_to_send_waits_too():
    usual = requeue_signals(SimpleNamespace(strategy=SimpleNamespace(cluster_environment=None)))
    assert usual == {signal.SIGUSR1, signal.SIGUSR2}
    slurm = SLURMEnvironment(requeue_signal=signal.SIGHUP)
    assert requeue_signals(SimpleNamespace(strategy=SimpleNamespace(cluster_environment=slurm))) == {
        *usual,
        signal.SIGHUP,
    }
