"""A check on one batch, before timing: equal losses and gradients, or in 16 bits a gradient as near to float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lrl.algorithms.grpo import GRPOModule
from lrl.lm.attention import SOUND
from lrl.types import TurnBatch

LENGTH = 0.1
"""How much farther from 1 than TRL's the length of a gradient in 16 bits may be: a wrong factor would change it."""


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


def gradient(loss: Tensor, model: Any) -> Tensor:
    """Return the gradient of a loss with respect to all trained weights, flat."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained(model))])


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


def first_rows(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the first rows of a batch of TRL."""
    total = len(inputs["prompt_ids"])
    return {
        name: value[:rows] if isinstance(value, Tensor) and value.ndim and len(value) == total else value
        for name, value in inputs.items()
    }


def compare_first_batch(module: GRPOModule, trainer: Any, tolerance: float | None = 1e-5) -> dict[str, float]:
    """Compare loss and gradient on TRL's first batch, with trained weights slightly off those that sampled it.

    Args:
        module: The algorithm of lrl.
        trainer: That of TRL, with the same weights.
        tolerance: Of the loss, and of the gradient; None in 16 bits, where losses may differ by 1e-2 and two ways of
            computing the same gradient differ by rounding: there the gradient of lrl on eight rows must be no farther
            than :data:`SOUND` times that of TRL from the gradient of TRL in float32, and its length along that
            one no farther from 1 than that of TRL by :data:`LENGTH`.

    Raises:
        AssertionError: If they differ.
    """
    inputs = first_batch(trainer)
    if tolerance is None:
        inputs = first_rows(inputs, 8)
    batch = as_turns(inputs)
    with torch.no_grad():
        batch = batch.replace(old_logprobs=module.policy.evaluate(batch).logprobs)
    batch = batch.replace(ref_logprobs=module.policy.reference_logprobs(batch))
    inputs = inputs | {"old_per_token_logps": batch.old_logprobs}
    policy: Any = module.policy
    models = policy.language_model.model, trainer.model
    with moved(*models):
        losses: Any = module.training_step(batch), trainer.compute_loss(models[1], inputs)
        grads = [gradient(*pair) for pair in zip(losses, models, strict=True)]
        notes = {"loss_ours": losses[0].item(), "loss_theirs": losses[1].item()}
        notes["gradient_norm"] = grads[0].norm().item()
        near = 1e-2 if tolerance is None else tolerance
        torch.testing.assert_close(losses[0], losses[1], atol=near, rtol=near)
        if tolerance is not None:
            torch.testing.assert_close(grads[0], grads[1], atol=tolerance, rtol=10 * tolerance)
            return notes
        wide = copy.deepcopy(models[1]).float()
        exact = gradient(trainer.compute_loss(wide, inputs), wide)
    errors = [float((grad.float() - exact).norm() / exact.norm()) for grad in grads]
    assert errors[0] <= SOUND * errors[1], f"the gradient of lrl is {errors[0]:.3f} from float32, TRL's {errors[1]:.3f}"
    lengths = [float(grad.float() @ exact / exact.square().sum()) for grad in grads]
    message = f"along the gradient in float32, lrl's has the length {lengths[0]:.3f}, TRL's {lengths[1]:.3f}"
    assert abs(lengths[0] - 1) <= abs(lengths[1] - 1) + LENGTH, message
    for side, error, length in zip(("ours", "theirs"), errors, lengths, strict=True):
        notes |= {f"gradient_error_{side}": error, f"gradient_length_{side}": length}
    return notes
