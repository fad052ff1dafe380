"""A minibatch for which memory runs out is repeated in smaller passes, with the same gradient."""

import dataclasses
import logging

import lightning as L
import pytest
import torch
from tiny_runs import (
    FEW_ITERATIONS,
    demonstrations,
    grpo,
    make_trainer,
    network,
    rollout_data,
    save_tiny_model,
    sft,
    trpo,
)

from lrl.training.checkpoint import CollectionCheckpoint

MOST = 3
"""Number of turns for which there is enough memory."""


class OutOfMemory(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, logprobs):
        return logprobs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Gradients(L.Callback):
    """Records the gradient of each optimiser step."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self.steps.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))


def out_of_memory(policy, where, most=MOST):
    """Let memory run out in passes with gradient of more than ``most`` turns."""
    evaluate = policy.evaluate

    def limited(batch, *args):
        evaluation = evaluate(batch, *args)
        if len(batch) <= most or not torch.is_grad_enabled():
            return evaluation
        if where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return dataclasses.replace(evaluation, logprobs=OutOfMemory.apply(evaluation.logprobs))

    policy.evaluate = limited


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


ONE_UPDATE = {"num_groups": 2, "num_minibatches": 1, "num_epochs": 1}
MADE = {
    "GRPO": (grpo, lambda: rollout_data("prompts", num_minibatches=1)),
    "PPO": (network, lambda: rollout_data("network")),
    "SFT": (sft, demonstrations),
    "TRPO": (
        lambda folder: trpo(folder, **FEW_ITERATIONS),
        lambda: rollout_data("prompts", num_minibatches=1, num_epochs=1),
    ),
}


def fit(folder, name, root, where=None, **settings):
    make, data = MADE[name]
    module, gradients = make(folder), Gradients()
    if where is not None:
        out_of_memory(module.policy, where)
    trainer = make_trainer(root, gradients, CollectionCheckpoint(1), max_epochs=1, **settings)
    trainer.fit(module, datamodule=data())
    return trainer, gradients.steps


@pytest.mark.parametrize("name", MADE)
def test_a_minibatch_for_which_memory_runs_out_has_the_same_gradient_in_smaller_passes(folder, tmp_path, name, caplog):
    whole, expected = fit(folder, name, tmp_path / "whole")
    for where in ("forward", "backward"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lrl"):
            trainer, steps = fit(folder, name, tmp_path / where, where)
        module = trainer.lightning_module
        assert 1 < module.pass_limit.turns <= MOST
        said = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
        assert len(said) == 1 and said[0].startswith("memory ran out in minibatch 1 of collection 1 for a pass of ")
        assert said[0].endswith(f"from now on a pass has at most {module.pass_limit.turns} turns")
        for ours, theirs in zip(steps, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
        for weight, theirs in zip(module.parameters(), whole.lightning_module.parameters(), strict=True):
            torch.testing.assert_close(weight, theirs, rtol=1e-3, atol=1e-4)
        for (_, row), (_, others) in zip(trainer.logger.rows, whole.logger.rows, strict=True):
            assert row == pytest.approx(others, rel=1e-3, abs=1e-5)
        saved = torch.load(tmp_path / where / "checkpoints" / "last.ckpt", weights_only=True)["lrl"]
        assert saved["pass_turns"] == module.pass_limit.turns, "a resumed run makes the same passes"


def test_too_little_memory_for_one_turn_ends_the_run_with_one_sentence(folder, tmp_path):
    module = network(folder)
    out_of_memory(module.policy, "forward", most=0)
    trainer = make_trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    sentence = r"^memory ran out in minibatch 1 of collection 1, in a pass of 1 turns \(CUDA out of memory.*need less.$"
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(module, datamodule=rollout_data("network"))


def test_memory_that_runs_out_on_one_of_several_ranks_is_one_sentence(folder, monkeypatch):
    module = network(folder)
    monkeypatch.setattr(type(module), "world_size", 2)

    def compute():
        module.pass_limit.split([torch.arange(7)])
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(ValueError, match="memory ran out in minibatch 1 of collection 1, in a pass of 7 turns"):
        module.within_memory(compute)
