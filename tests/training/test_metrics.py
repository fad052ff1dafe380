"""Means of what a collection records: one metric of torchmetrics."""

import pytest
import torch
from torchmetrics import Metric

from lrl.training.metrics import MetricMeans


@pytest.fixture
def means():
    return MetricMeans()


def settled(**recorded):
    """A metric in which values were recorded and counted."""
    means = MetricMeans()
    for name, values in recorded.items():
        means.record(name, torch.tensor(values))
    means.settle()
    return means


def test_a_mean_is_over_all_values_of_a_name_whatever_their_shapes(means):
    assert isinstance(means, Metric)
    means.record("train/loss", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    means.record("train/entropy", torch.tensor(7))
    means.record("train/loss", torch.tensor([[True]]))  # twice before anything is counted
    means.record("train/nothing", torch.zeros(0))
    means.settle()
    means.record("train/loss", torch.tensor(9.0))
    assert means.flush() == {"train/entropy": 7.0, "train/loss": 20 / 6}
    assert means.flush() == {}


def test_what_is_not_settled_is_not_in_the_state(means):
    means.record("a", torch.tensor([1.0, 3.0]))
    assert means.state() == {}
    means.settle()
    means.record("a", torch.tensor(100.0))
    state = means.state()
    means.reset()
    means.record("b", torch.tensor(5.0))  # of a collection that is not the saved one
    means.load(state)
    assert means.flush() == {"a": 2.0}


def test_a_state_survives_a_checkpoint_exactly_and_goes_on(tmp_path):
    means = settled(a=[1.0, 1e-9], b=[0.1, 0.2, 0.3])
    torch.save(means.state(), tmp_path / "state.pt")
    again = MetricMeans()
    again.load(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (means, again):
        each.record("c", torch.tensor(4.0))
        each.record("b", torch.tensor(0.7))
    assert again.flush() == means.flush() != {}


def test_the_states_are_no_part_of_the_module_that_is_saved():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.means = settled(a=[1.0])

    module = Module()
    module.means.state()
    assert not module.state_dict()
    moved = module.to(torch.device("meta")).means
    assert moved.totals.device == moved.counts.device == moved.device == torch.device("meta")


@pytest.mark.parametrize("convert", [torch.nn.Module.half, lambda module: module.to(torch.bfloat16)])
def test_sums_stay_in_double_precision_whatever_the_weights_become(convert):
    means = settled(a=[1.0, 1e-9])
    means.state()
    convert(torch.nn.ModuleList([means]))
    means.record("b", torch.tensor(0.1))
    assert means.flush() == {"a": (1 + 1e-9) / 2, "b": pytest.approx(0.1)}


def test_ranks_that_recorded_different_names_or_nothing_are_reduced_together(monkeypatch):
    ranks = [settled(b=[1.0, 2.0], a=[5.0]), settled(c=[10.0], b=[6.0]), MetricMeans()]
    names = [["b", "a"], ["c", "b"], []]
    for rank in ranks:
        rank.state()  # adds what was settled
    monkeypatch.setattr("lrl.training.metrics.all_gather_objects", lambda own: names)
    for rank in ranks:
        rank._arrange(["a", "b", "c"])
    states = {name: [getattr(rank, name).clone() for rank in ranks] for name in ("totals", "counts")}
    for rank in ranks:
        gathered = iter(states.values())  # in the order of the states
        rank.distributed_available_fn = lambda: True
        rank.dist_sync_fn = lambda tensor, group=None, gathered=gathered: next(gathered)
        assert rank.flush() == {"a": 5.0, "b": 3.0, "c": 10.0}


def test_recording_in_inference_mode_does_not_stop_recording_outside(means):
    with torch.inference_mode():
        means.record("a", torch.tensor(1.0))
        means.settle()
        means.state()  # as a checkpoint that is written while validating
    means.record("a", torch.tensor(3.0))
    assert means.flush() == {"a": 2.0}


def test_adding_many_records_at_once_changes_no_bit():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    often, seldom = MetricMeans(), MetricMeans()
    for value in values:
        for means in (often, seldom):
            means.record("a", value)
            means.record("b", 1e9 * value)
            means.settle()
        often.state()
        assert len(seldom._settled) <= 501
    assert often.flush() == seldom.flush()
