"""A check that both libraries compute the same loss and gradient on one batch, run before timing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lrl.algorithms.grpo import GRPOModule
from lrl.turn_batch import TurnBatch


def first_batch(trainer: Any) -> dict[str, Tensor]:
    """Return the batch that TRL samples for its first step, with its loss and gradients."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def as_turns(inputs: dict[str, Tensor]) -> TurnBatch:
    """Return TRL's batch in the layout of lrl: prompts padded on the right."""
    mask = inputs["completion_mask"].bool()
    order = torch.argsort(inputs["prompt_mask"], dim=1, descending=True, stable=True)
    ours = {
        "prompt_ids": inputs["prompt_ids"].gather(1, order),
        "prompt_mask": inputs["prompt_mask"].gather(1, order).bool(),
        "response_ids": inputs["completion_ids"] * mask,
    }
    nothing = torch.zeros(mask.shape)
    advantages = inputs["advantages"][:, None] * mask
    return TurnBatch(inputs=ours, response_mask=mask, old_logprobs=nothing, advantages=advantages)


def trained(model: Any) -> list[Tensor]:
    """Return the weights that are trained: all, or those of adapters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


@contextmanager
def moved(*models: Any, size: float = 0.01) -> Iterator[None]:
    """Shift the weights of both models away from reference and sampling policy, and restore them afterwards."""
    kept = [[weight.detach().clone() for weight in trained(model)] for model in models]
    with torch.no_grad():
        for model in models:
            generator = torch.Generator().manual_seed(0)
            for weight in trained(model):
                weight.add_(size * torch.randn(weight.shape, generator=generator))
    yield
    with torch.no_grad():
        for model, weights in zip(models, kept, strict=True):
            for weight, old in zip(trained(model), weights, strict=True):
                weight.copy_(old)


def compare_first_batch(module: GRPOModule, trainer: Any, tolerance: float = 1e-5) -> dict[str, float]:
    """Compare loss and gradient on TRL's first batch, with trained weights slightly off those that sampled it.

    Args:
        module: the algorithm of lrl.
        trainer: that of TRL, with the same weights.
        tolerance: of the loss, and of the gradient's direction.

    Raises:
        AssertionError: they differ.
    """
    inputs = first_batch(trainer)
    batch = as_turns(inputs)
    with torch.no_grad():
        batch = batch.replace(old_logprobs=module.policy.evaluate(batch).logprobs)
    batch = batch.replace(ref_logprobs=module.policy.reference_logprobs(batch))
    inputs = inputs | {"old_per_token_logps": batch.old_logprobs}
    policy: Any = module.policy
    models = policy.language_model.model, trainer.model
    with moved(*models):
        losses: Any = module.training_step(batch), trainer.compute_loss(models[1], inputs)
        grads = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained(model))])
            for loss, model in zip(losses, models, strict=True)
        ]
    torch.testing.assert_close(losses[0], losses[1], atol=tolerance, rtol=tolerance)
    if tolerance > 1e-5:  # in 16 bits single entries of the gradient differ more
        assert torch.cosine_similarity(*grads, dim=0) > 1 - tolerance
    else:
        torch.testing.assert_close(grads[0], grads[1], atol=tolerance, rtol=10 * tolerance)
    return {"loss_ours": losses[0].item(), "loss_theirs": losses[1].item(), "gradient_norm": grads[0].norm().item()}
