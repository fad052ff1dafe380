"""Means and maxima of what a collection records, and what a run records."""

import csv
import errno
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from matplotlib.image import imsave
from network_runs import KEYS
from network_runs import network as mlp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import batch_of, grpo, make_trainer, network, on_two_ranks, rollout_data, save_tiny_model

from lrl.algorithms.grpo import GRPOModule
from lrl.algorithms.reward_model import RewardModelModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.faults import DiskFullError
from lrl.policies.mlp import MLPPolicy
from lrl.training.metrics import MetricMeans, TrackioLogger, log_figure, log_row, log_transcripts
from lrl.training.optimizer import OptimizerConfig
from lrl.training.transcripts import Transcripts


@pytest.fixture
def means():
    return MetricMeans()


def settled(**recorded):
    """Return a metric with recorded and settled values."""
    means = MetricMeans()
    for name, values in recorded.items():
        means.record(name, torch.tensor(values))
    means.settle()
    return means


def test_a_mean_is_over_all_values_of_a_name_of_any_shape(means):
    means.record("train/loss", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    means.record("train/entropy", torch.tensor(7))
    means.record("train/loss", torch.tensor([[True]]))  # twice before anything is counted
    means.record("train/nothing", torch.zeros(0))
    means.settle()
    means.record("train/loss", torch.tensor(9.0))
    assert means.flush() == {"train/entropy": 7.0, "train/loss": 20 / 6}
    assert means.flush() == {}


def test_a_maximum_is_the_largest_settled_value(means):
    for value in ([1.0, 4.0], [2.0], []):
        means.record_maximum("m", torch.tensor(value))
    means.settle()
    state = means.state()
    means.record_maximum("m", torch.tensor(9.0))
    assert state == {"m": (4.0, 0)}
    means.load(state)
    assert means.flush() == {"m": 4.0} and means.flush() == {}


def test_records_that_are_not_settled_are_not_in_the_state(means):
    means.record("a", torch.tensor([1.0, 3.0]))
    assert means.state() == {}
    means.settle()
    means.record("a", torch.tensor(100.0))
    state = means.state()
    means.reset()
    means.record("b", torch.tensor(5.0))  # of a collection that is not the saved one
    means.load(state)
    assert means.flush() == {"a": 2.0}


def test_the_state_of_metrics_is_restored_exactly_from_a_checkpoint(tmp_path):
    means = settled(a=[1.0, 1e-9], b=[0.1, 0.2, 0.3])
    means.record_maximum("m", torch.tensor([0.3, 0.1]))
    means.settle()
    torch.save(means.state(), tmp_path / "state.pt")
    again = MetricMeans()
    again.load(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (means, again):
        each.record("c", torch.tensor(4.0))
        each.record("b", torch.tensor(0.7))
        each.record_maximum("m", torch.tensor(0.2))
    assert again.flush() == means.flush() != {}


def test_ranks_that_recorded_different_names_or_nothing_are_reduced_together():
    ranks = [settled(b=[1.0, 2.0], a=[5.0]), settled(c=[10.0], b=[6.0]), MetricMeans()]
    ranks[0].record_maximum("m", torch.tensor(1.0))
    ranks[1].record_maximum("m", torch.tensor(3.0))
    ranks[1].record_maximum("n", torch.tensor(-1.0))
    for rank in ranks:
        rank.settle()
    states = [rank.state() for rank in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrl.training.metrics.all_gather_objects", lambda own: states)
        for rank in ranks:
            assert rank.flush() == {"a": 5.0, "b": 3.0, "c": 10.0, "m": 3.0, "n": -1.0}


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


@pytest.mark.parametrize("size", [5, 5000])
def test_metrics_that_are_derived_from_several_minibatches_at_once_change_no_bit(size):
    generator = torch.Generator().manual_seed(0)
    at_once, each = MetricMeans(), MetricMeans()
    for count in (size, size, 0, size - 1):
        values = torch.randn(2, count, generator=generator)
        at_once.record_derived(sum_and_maximum, values)
        each.record("sum", values.sum(0))
        each.record_maximum("m_max", values[0])
        for means in (at_once, each):
            means.settle()
    expected = each.flush()
    assert at_once.flush() == expected and set(expected) == {"sum", "m_max"}


def sum_and_maximum(values):
    return {"sum": values.sum(0), "m_max": values[0]}


def test_tensorboard_stores_a_row_as_one_event_with_all_metrics(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="", prefix="run")
    for step in (3, 4):
        log_row(logger, {"train/loss": 0.5 * step, "val/return": 2.0}, step)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("run-train/loss")] == [(3, 1.5), (4, 2.0)]
    assert [event.value for event in events.Scalars("run-val/return")] == [2.0, 2.0]
    assert len({event.wall_time for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}) == 2


# -- what a run records ----------------------------------------------------------------------------------------------


def test_the_update_is_measured_with_the_weights_after_the_last_minibatch(tmp_path):
    """Before the update the policy is the sampling policy, so the estimate of the minibatch is 0."""
    module, data = grpo(save_tiny_model(tmp_path / "tiny")), rollout_data("prompts", num_epochs=1, num_minibatches=1)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, datamodule=data)
    ((_, row),) = trainer.logger.rows
    turns = data.minibatch(0)
    with torch.no_grad():
        log_ratio = (module.policy.evaluate(turns).logprobs - turns.old_logprobs)[turns.response_mask]
    assert row["train/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert row["train/update_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-5)
    assert row["train/update_kl"] > 1e-4


def test_the_update_is_measured_in_passes_of_bounded_memory(tmp_path, monkeypatch):
    """The memory of one pass, as an update's, must not grow with the length of its turns."""
    module, data = grpo(save_tiny_model(tmp_path / "tiny")), rollout_data("prompts", num_epochs=1, num_minibatches=1)
    evaluate, sizes = module.policy.evaluate, []

    def counted(batch, *args):
        sizes.append(len(batch) if not torch.is_grad_enabled() else 0)
        return evaluate(batch, *args)

    module.policy.evaluate = counted
    monkeypatch.setattr("lrl.lm.forward._LIMIT", 2**16)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, datamodule=data)
    assert sum(sizes) == len(data.minibatch(0)) and 0 < max(sizes) < sum(sizes)
    turns = data.minibatch(0)
    with torch.no_grad():
        log_ratio = (evaluate(turns).logprobs - turns.old_logprobs)[turns.response_mask]
    ((_, row),) = trainer.logger.rows
    assert row["train/update_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-4)


def test_the_ratio_error_of_the_first_minibatch_and_the_maximum_are_logged_separately(tmp_path):
    module, data = network(tmp_path), rollout_data("network", num_epochs=2, num_minibatches=2)
    trainer = make_trainer(tmp_path, Transcripts(), max_epochs=2)
    trainer.fit(module, datamodule=data)
    first = json.loads((tmp_path / "transcripts.jsonl").read_text().splitlines()[0])["turns"][0]
    assert re.fullmatch(r"-?[\d.e-]+(, -?[\d.e-]+)*", first["observation"])  # the numbers that the network read
    for _, row in trainer.logger.rows:
        assert row["train/lr"] > 0
        assert row["train/ratio_error"] < 1e-5 < 1e-3 < row["train/ratio_error_max"]
        assert row["train/update_kl"] > 0


def test_the_update_is_measured_too_if_a_limit_ends_the_run_within_a_collection(tmp_path):
    module, data = network(tmp_path), rollout_data("network", num_epochs=1, num_minibatches=2)
    measure, measured = module._measure_update, []
    module._measure_update = lambda: measured.append(module.trainer.current_epoch) or measure()
    trainer = make_trainer(tmp_path, max_epochs=2, max_steps=3)
    trainer.fit(module, datamodule=data)
    assert measured == [0, 1] and all(row["train/update_kl"] > 0 for _, row in trainer.logger.rows)


# -- a learning rate that is adapted to the update ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "rate"), [(1e-5, 0.3), (0.0049, 0.3), (0.0051, 0.2), (0.0199, 0.2), (0.0201, 0.2 / 1.5), (1.0, 0.2 / 1.5)]
)
def test_the_learning_rate_falls_after_large_updates_and_rises_after_small_ones(kl, rate):
    assert OptimizerConfig(lr=0.1, update_kl=0.01).adapted(0.2, kl) == pytest.approx(rate)


def test_an_adapted_learning_rate_has_limits_and_ignores_updates_without_effect():
    config = OptimizerConfig(lr=0.1, update_kl=0.01)
    assert config.adapted(0.2, 0.0) == config.adapted(0.2, -1e-8) == config.adapted(0.2, 1e-7) == 0.2
    assert config.adapted(0.9, 1e-3) == pytest.approx(1.0) and config.adapted(1.2e-3, 1.0) == pytest.approx(1e-3)


def test_a_run_adapts_its_learning_rate_to_each_measured_update_and_keeps_it_when_it_resumes(tmp_path):
    def run(folder, max_epochs, ckpt_path=None):
        folder = tmp_path / folder
        module = network(tmp_path, optimizer={"lr": 1e-2, "schedule": "constant", "update_kl": 1e-3})
        trainer = make_trainer(folder, max_epochs=max_epochs, enable_checkpointing=False)
        data = rollout_data("network", num_epochs=2, num_minibatches=2)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
        trainer.save_checkpoint(folder / "end.ckpt")
        return [row for _, row in trainer.logger.rows], trainer.optimizers[0].param_groups[0]["lr"]

    rows, last = run("whole", 4)
    expected = 1e-2
    for row in rows:
        assert row["train/lr"] == pytest.approx(expected)
        expected = OptimizerConfig(lr=1e-2, update_kl=1e-3).adapted(expected, row["train/update_kl"])
    assert last == pytest.approx(expected) and len({row["train/lr"] for row in rows}) > 1
    run("parts", 2)
    resumed, resumed_last = run("parts", 4, ckpt_path=tmp_path / "parts" / "end.ckpt")
    assert resumed_last == last and [row["train/lr"] for row in resumed] == [row["train/lr"] for row in rows[2:]]


def test_a_learning_rate_with_a_schedule_or_without_rollouts_cannot_be_adapted(tmp_path):
    with pytest.raises(ValueError, match=r"model\.optimizer\.schedule must be constant"):
        OptimizerConfig(update_kl=0.01, schedule="linear")
    with pytest.raises(ValueError, match=r"model\.optimizer\.warmup 0"):
        OptimizerConfig(update_kl=0.01, warmup=0.1)
    with pytest.raises(ValueError, match="only rollouts"):
        RewardModelModule(optimizer=OptimizerConfig(update_kl=0.01))
    with pytest.raises(ValueError, match=r"update_kl is 0\.01 and model\.optimizer\.factory is set"):
        OptimizerConfig(update_kl=0.01, factory=torch.optim.SGD)


# -- the limit of the divergence within a collection -------------------------------------------------------------------


@pytest.mark.parametrize(("target_kl", "stops"), [(0.15, True), (0.25, False)])
def test_target_kl_is_compared_with_the_mean_over_the_tokens_of_all_ranks(target_kl, stops, monkeypatch):
    """A log-ratio of 0.6 at every token is 0.222 nats."""
    monkeypatch.setattr(GRPOModule, "world_size", 2)
    env = GymnasiumEnvs("CartPole-v1")
    modules = [GRPOModule(mlp(env, scale=1.0), target_kl=target_kl) for _ in range(2)]
    turns = batch_of(modules[0].policy.act([np.zeros(4)] * 3, [()] * 3, KEYS, modules[0].policy.sampling))
    turns = turns.replace(old_logprobs=turns.old_logprobs - 0.6)

    def step(rank, reduce):
        modules[rank].reduce_sum = reduce
        modules[rank].step(turns if rank == 0 else turns[:0])
        return modules[rank].skip_updates

    assert on_two_ranks(step) == [stops, stops]
    for module in modules:
        module._means.settle()
    counts = [{name: count for name, (_, count) in module._means.state().items()} for module in modules]
    assert counts[0]["train/approx_kl"] == 3 and "train/approx_kl" not in counts[1]
    assert counts[0]["train/loss"] == counts[1]["train/loss"] == 1


def test_initial_weights_without_a_seed_of_their_own_are_the_same_on_one_rank_and_on_several():
    """A strategy for several ranks seeds torch's generator again before the weights are made."""
    weights = []
    for seeded_again in (False, True):
        torch.manual_seed(3)
        policy, env = MLPPolicy((8,)), GymnasiumEnvs("CartPole-v1")
        module = GRPOModule(policy)
        policy.connect(env.codec)
        policy.connect_spaces(*env.spaces)
        if seeded_again:
            torch.manual_seed(3)
        module.configure_model()
        weights.append(policy.actor[0].weight)
    assert torch.equal(*weights)


class RecordedWandbLogger(WandbLogger):
    """Records what it is given, and starts no run."""

    def __init__(self):
        self.given = []

    def log_table(self, *args, **options):
        self.given.append((args, options))

    def log_image(self, *args, **options):
        self.given.append((args, options))


NEW = {"loss": 2.0, "val/return": 1.0}


@pytest.mark.parametrize(
    ("row", "failing"), [({"loss": 2.0}, "writerows"), (NEW, "writerows"), (NEW, "writeheader"), (NEW, "copyfile")]
)
def test_a_disk_that_is_full_during_a_row_leaves_the_earlier_rows(tmp_path, monkeypatch, row, failing):
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    log_row(logger, {"loss": 1.0}, 0)
    file = tmp_path / "metrics.csv"
    before = file.read_bytes()
    place = shutil if failing == "copyfile" else csv.DictWriter
    write = getattr(place, failing)

    def full_disk(*arguments):
        write(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place, failing, full_disk)
        with pytest.raises(
            DiskFullError, match=rf"a row of metrics in '{file}' was not written \(\[Errno 28\] No space"
        ):
            log_row(logger, row, 1)
    logger.finalize("failed")
    assert file.read_bytes() == before and [*tmp_path.glob("*.csv*")] == [file]


def test_transcripts_and_pictures_reach_tensorboard_and_weights_and_biases(tmp_path):
    board, wandb = TensorBoardLogger(tmp_path, name="", version=""), RecordedWandbLogger()
    loggers = [CSVLogger(tmp_path), board, wandb]
    imsave(tmp_path / "policy.png", np.linspace(0, 1, 48).reshape(4, 4, 3))
    log_transcripts(loggers, "=== collection 11", 10)
    log_figure(loggers, tmp_path / "policy.png", 7)
    board.experiment.flush()
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,), (picture,) = events.Tensors("transcripts/text_summary"), events.Images("policy")
    assert (text.step, picture.step, picture.width) == (10, 7, 4)
    assert b"=== collection 11" in text.tensor_proto.string_val[0]
    assert wandb.given == [
        (("transcripts",), {"columns": ["collection", "episode"], "data": [[11, "=== collection 11"]]}),
        (("policy",), {"images": [str(tmp_path / "policy.png")]}),
    ]


TRACKIO = """
calls = []
class Run:
    def log(self, metrics, step=None):
        calls.append(("log", metrics, step))
def init(project, name=None, *, space_id, config, embed, auto_log_gpu, auto_log_cpu):
    print("* Trackio project initialized")
    calls.append(("init", project, name, config))
    return Run()
def finish():
    calls.append(("finish",))
"""


def test_trackio_gets_the_configuration_and_the_rows_without_printing(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(TRACKIO)  # a module with the functions of trackio 0.43 that the logger calls
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    logger = TrackioLogger("lakes", "seed0")
    logger.finalize("success")
    logger.log_hyperparams({"seed_everything": 3})
    log_row(logger, {"train/loss": 0.5}, 7)
    log_row(logger, {"train/loss": 0.25}, 9)
    logger.finalize("success")
    import trackio

    monkeypatch.delitem(sys.modules, "trackio")
    assert trackio.calls == [
        ("init", "lakes", "seed0", {"seed_everything": 3}),
        ("log", {"train/loss": 0.5}, 7),
        ("log", {"train/loss": 0.25}, 9),
        ("finish",),
    ]
    assert (logger.name, logger.version) == ("lakes", "seed0") and capsys.readouterr().out == ""
