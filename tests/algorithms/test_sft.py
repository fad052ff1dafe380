"""Tests of supervised fine-tuning on a language model of 10,000 weights."""

import math
from dataclasses import replace

import pytest
import sft_runs
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sft_runs import SaveInside, logged, weights
from tiny_runs import from_settings, merged, rollout_data, save_tiny_model, text_policy

from lrl.algorithms.sft import SFTModule
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.evaluation.exact import exact_evaluation, lakes_of
from lrl.lm.config import LoRAConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def sft(folder, pack_tokens=None, temperature=1.0, response_format="direct", model=None, **changes):
    policy = text_policy(folder, temperature=temperature, **model or {})
    policy.pack_tokens = pack_tokens
    policy.prompt = replace(policy.prompt, response_format=response_format)
    return from_settings(SFTModule, policy, **merged({"optimizer": {"lr": 3e-3}}, changes))


def data(**changes):
    settings = {"batch_size": 8, "validation": {"episodes": 0}} | changes
    experts = settings.pop("demonstrations", ExpertDemonstrations(ExpertQRows(), repeat=3))
    return from_settings(DemonstrationsDataModule, experts, GymnasiumEnvs("FrozenLake-v1"), **settings)


def fit(module, root, source=None, callbacks=(), ckpt_path=None, **changes):
    return sft_runs.fit(module, root, data() if source is None else source, callbacks, ckpt_path, **changes)


@pytest.mark.learning
def test_sft_clones_the_expert_and_with_a_flipped_sign_it_does_not(folder, tmp_path, monkeypatch):
    def success():
        module = sft(folder, pack_tokens=128)
        fit(module, tmp_path, data(batch_size=11), max_epochs=60)
        return float(exact_evaluation(module.policy, lakes_of(GymnasiumEnvs("FrozenLake-v1"))).success[0])

    assert success() > 0.74
    step = SFTModule.training_step
    monkeypatch.setattr(SFTModule, "training_step", lambda self, batch: -step(self, batch))
    assert success() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("pack_tokens", [None, 96])
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_accumulated_batches_take_the_step_of_one_large_batch(folder, tmp_path, loss_on, pack_tokens):
    experts = ExpertDemonstrations(ExpertQRows(), ("", "0 1 2 3 0 1 2 3"), repeat=2)
    settings = {"model": {"dtype": "float64"}, "response_format": "final_answer"}
    sgd = {"optimizer": {"factory": lambda ws: torch.optim.SGD(ws, lr=0.1), "schedule": "constant", "warmup": 0.0}}
    source = data(demonstrations=experts, loss_on=loss_on, batch_size=4)
    module = sft(folder, pack_tokens, **settings, **sgd)
    fit(module, tmp_path, source, accumulate_grad_batches=6, max_epochs=1, gradient_clip_val=None)
    assert source.num_batches() == 6 and source.clocks["optimizer_steps"] == 1
    assert len({source.num_tokens(0, index) for index in range(6)}) > 1
    expected = step_by_hand(source, sft(folder, **settings))
    torch.testing.assert_close(weights(module), expected, atol=1e-7, rtol=0)  # weights of tokens are float32


def step_by_hand(source, module):
    """One gradient step on the mean over all tokens of all batches."""
    module.configure_model()
    batches = [source.batch(0, index) for index in range(source.num_batches())]
    total = sum((module.policy.evaluate(batch).logprobs * batch.response_mask).sum() for batch in batches)
    mean = -total / sum(int(batch.response_mask.sum()) for batch in batches)
    grads = torch.autograd.grad(mean, list(module.parameters()))
    assert max(float(grad.abs().max()) for grad in grads) > 1e-2
    stepped = [weight - 0.1 * grad for weight, grad in zip(module.parameters(), grads, strict=True)]
    return torch.cat([weight.detach().flatten() for weight in stepped])


def test_an_epoch_that_is_no_multiple_of_the_accumulation_still_weighs_tokens_equally(folder, tmp_path):
    source = data(batch_size=8)
    fit(sft(folder), tmp_path, source, accumulate_grad_batches=3, max_epochs=1)
    assert source.num_batches() == 5 and source.clocks["optimizer_steps"] == 2
    last = [source.batch(0, index) for index in (3, 4)]
    assert sum(float(batch.advantages.sum()) for batch in last) / 3 == pytest.approx(1)


def test_the_sampling_temperature_does_not_affect_training(folder, tmp_path, caplog):
    hot, usual = sft(folder, temperature=3.0), sft(folder)
    fit(hot, tmp_path)
    fit(usual, tmp_path)
    assert "sampling.temperature 3 is ignored" in caplog.text
    assert torch.equal(weights(hot), weights(usual))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_resumed_inside_a_pass_ends_bit_identical(folder, tmp_path, accumulate):
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    inside = SaveInside(tmp_path)
    whole = fit(sft(folder, log_every=2), tmp_path, callbacks=[inside], **settings)
    assert len(inside.saved) == 3 * (4 // accumulate + 1)
    for checkpoint in inside.saved[1::3]:
        resumed = fit(sft(folder, log_every=2), tmp_path, ckpt_path=checkpoint, **settings)
        assert torch.equal(weights(resumed.lightning_module), weights(whole.lightning_module))
        assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :]


@pytest.mark.slow
def test_dropout_is_on_in_training_off_in_validation_and_resumed_bit_identically(folder, tmp_path):
    def run(dropout, **changes):
        held_out = data(validation_demonstrations=ExpertDemonstrations(ExpertQRows(), seed=1))
        module = sft(folder, model={"lora": LoRAConfig(r=4, dropout=dropout)})
        return fit(module, tmp_path, held_out, max_epochs=2, limit_val_batches=None, **changes)

    inside = SaveInside(tmp_path)
    whole, plain = run(0.5, callbacks=[inside]), run(0.0)
    assert not torch.equal(weights(whole.lightning_module), weights(plain.lightning_module))
    assert logged(whole, "train/loss")[1] > logged(plain, "train/loss")[1]
    module, batches = whole.lightning_module, list(whole.datamodule.validation_batches())
    nll = -sum(float(module.policy.evaluate(batch).logprobs.detach().sum()) for batch in batches)
    assert logged(whole, "val/loss")[-1] == pytest.approx(nll / sum(int(b.response_mask.sum()) for b in batches))
    torch.rand(7)  # the state of torch's own generator plays no part
    resumed = run(0.5, ckpt_path=inside.saved[2])
    assert torch.equal(weights(resumed.lightning_module), weights(module))
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_resumed_after_the_last_step_of_a_pass_validates_and_logs_first(folder, tmp_path, every):
    def run(**changes):
        held_out = data(validation_demonstrations=ExpertDemonstrations(ExpertQRows(), seed=1))
        settings = {"max_epochs": 2, "limit_val_batches": None, "check_val_every_n_epoch": every}
        return fit(sft(folder), tmp_path, held_out, **settings, **changes)

    inside = SaveInside(tmp_path)
    whole = run(callbacks=[inside])
    resumed = run(ckpt_path=inside.saved[4])
    assert resumed.logger.rows == whole.logger.rows
    assert torch.equal(weights(resumed.lightning_module), weights(whole.lightning_module))


@pytest.mark.slow
def test_a_run_resumed_between_passes_ends_bit_identical(folder, tmp_path):
    whole = fit(sft(folder, optimizer={"schedule": "constant"}), tmp_path, max_epochs=3)
    part = fit(sft(folder, optimizer={"schedule": "constant"}), tmp_path, max_epochs=2)
    part.save_checkpoint(tmp_path / "between.ckpt")
    resumed = fit(
        sft(folder, optimizer={"schedule": "constant"}), tmp_path, ckpt_path=tmp_path / "between.ckpt", max_epochs=3
    )
    assert torch.equal(weights(resumed.lightning_module), weights(whole.lightning_module))


@pytest.mark.slow
def test_a_learning_rate_that_is_adapted_to_the_divergence_raises(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model\.optimizer\.update_kl is 0\.01; it must be null"):
        fit(sft(folder, optimizer={"schedule": "constant", "warmup": 0.0, "update_kl": 0.01}), tmp_path, max_epochs=1)


def test_metrics_are_logged_per_pass_or_as_often_as_asked_with_the_clocks(folder, tmp_path):
    per_pass = fit(sft(folder), tmp_path, max_epochs=2)
    assert logged(per_pass, "clock/optimizer_steps") == [5, 10]
    often = fit(sft(folder, log_every=2), tmp_path, max_epochs=2)
    assert logged(often, "clock/optimizer_steps") == [2, 4, 5, 6, 8, 10]
    for trainer in (per_pass, often):
        assert [step for step, _ in trainer.logger.rows] == logged(trainer, "clock/optimizer_steps")
    assert logged(often, "clock/tokens")[-1] == logged(per_pass, "clock/tokens")[-1] == 2 * 40 * 2
    assert logged(often, "train/loss")[-1] < logged(often, "train/loss")[0]
    accumulated = fit(sft(folder, log_every=1), tmp_path, max_epochs=1, accumulate_grad_batches=2)
    assert logged(accumulated, "clock/optimizer_steps") == [1, 2, 3]


@pytest.mark.slow
def test_the_held_out_loss_is_the_mean_over_tokens_and_stops_the_run_early(folder, tmp_path):
    held_out = ExpertDemonstrations(ExpertQRows(), seed=1)
    source = data(validation_demonstrations=held_out, batch_size=4)
    stop = EarlyStopping("val/loss", patience=2, min_delta=10.0)
    trainer = fit(sft(folder), tmp_path, source, [stop], max_epochs=50, limit_val_batches=None)
    assert trainer.current_epoch == 3 and len(logged(trainer, "val/loss")) == 3
    module = trainer.lightning_module
    batches = list(source.validation_batches())
    nll = -sum(float(module.policy.evaluate(batch).logprobs.detach().sum()) for batch in batches)
    assert logged(trainer, "val/loss")[-1] == pytest.approx(nll / sum(int(b.response_mask.sum()) for b in batches))


def test_success_in_the_environment_stops_the_run_early_as_well(folder, tmp_path):
    stop = EarlyStopping("val/success_rate", mode="max", patience=1, min_delta=2.0)
    source = data(validation={"episodes": 3})
    trainer = fit(sft(folder), tmp_path, source, [stop], max_epochs=50, limit_val_batches=None)
    assert trainer.current_epoch == 2 and len(logged(trainer, "val/success_rate")) == 2


def test_the_learning_rate_rises_then_falls_as_half_a_cosine(folder, tmp_path):
    trainer = fit(sft(folder, optimizer={"warmup": 0.2, "lr": 1e-3}, log_every=1), tmp_path, max_epochs=2)
    rates = logged(trainer, "train/lr")
    expected = [0, 0.5] + [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_data_that_do_not_fit_raise_one_sentence(folder, tmp_path):
    with pytest.raises(ValueError, match="data is a RolloutDataModule"):
        fit(sft(folder), tmp_path, rollout_data("prompts"))
    with pytest.raises(ValueError, match="model.log_every is 0"):
        sft(folder, log_every=0)
