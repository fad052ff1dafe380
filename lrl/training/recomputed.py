"""Second computations of what a run computes, by separate code: forward passes, gradients and optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lrl.diagnosis.losses import GRADIENT_ERROR
from lrl.functional.random import token_bits
from lrl.lm.decoding import DecodeLoop
from lrl.lm.forward import head_inputs, without_gradient
from lrl.lm.logprobs import sample_tokens
from lrl.policies.policy import Policy
from lrl.policies.text import TextPolicy
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.types import RandomKeys, Rollout, TurnBatch

_COMPARED = 1_000_000
"""Number of weights whose gradients are computed again, unless the first tensor has more."""
_STEPPED = 8
"""Number of tensors of weights, the smallest ones, whose optimiser step is computed again."""


def texts(
    policy: TextPolicy, batch: TurnBatch, observations: Sequence[str], responses: Sequence[str], system: str = ""
) -> dict[str, Tensor | None]:
    """Return whether prompts contain the observation and the system message, and tokens are the response.

    Each is bool ``(turn,)``.
    """
    tokenizer = policy.language_model.tokenizer
    ids, mask = batch.inputs["response_ids"].tolist(), batch.inputs["prompt_mask"]
    lengths = _sampled_lengths(policy, batch)
    in_prompt, decoded, with_system = list[bool](), list[bool](), list[bool]()

    def squeezed(text: str) -> str:
        """Return a text as the tokenizer decodes it, without whitespace and the tokens before a text."""
        ids, prefix = tokenizer.encode_observation(text), tokenizer.encode_observation("")
        own = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
        return "".join(str(tokenizer.tokenizer.decode(own)).split())

    message, example = squeezed(system), [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    if message not in "".join(tokenizer.template.render(example).split()):
        message = ""  # the chat template changes it
    for turn, (observation, response) in enumerate(zip(observations, responses, strict=True)):
        prompt = str(tokenizer.tokenizer.decode(batch.inputs["prompt_ids"][turn][mask[turn]].tolist()))
        seen = "".join(prompt.split())
        in_prompt.append(squeezed(observation) in seen)  # unknown characters are replaced in both
        with_system.append(message in seen)
        decoded.append(tokenizer.response_text(ids[turn][: lengths[turn]]) == response)
    found = {"in_prompt": in_prompt, "decoded": decoded, "with_system": with_system}
    arrays: dict[str, Tensor | None] = {name: torch.tensor(values) for name, values in found.items()}
    arrays["stopped_at"] = None if tokenizer.stops(policy.stop_text) is None else torch.tensor(_stops_of(policy, batch))
    return arrays


def _stops_of(policy: TextPolicy, batch: TurnBatch) -> list[int]:
    """Return the number of tokens of each response up to the first end token or stop text, else that of its row."""
    tokenizer, width = policy.language_model.tokenizer, batch.response_mask.shape[1]
    rows = batch.inputs["response_ids"][:, :width].tolist()
    return [next((n for n in range(1, width + 1) if tokenizer.ends(row[:n], policy.stop_text)), width) for row in rows]


def _sampled_lengths(policy: TextPolicy, batch: TurnBatch) -> list[int]:
    """Return the number of sampled tokens of each turn: up to the first that ends a response, or all trained ones."""
    if policy.language_model.tokenizer.stops(policy.stop_text) is not None:
        return _stops_of(policy, batch)
    ids, mask = batch.inputs["response_ids"][:, : batch.response_mask.shape[1]], batch.response_mask
    stops = torch.tensor(sorted(policy.language_model.tokenizer.stop_ids(policy.stop_text)), device=ids.device)
    ends, place = torch.isin(ids, stops), torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return torch.where(ends.any(1), ends.int().argmax(1) + 1, (mask * place).amax(1)).tolist()


def evaluated(policy: Policy, batch: TurnBatch) -> dict[str, Tensor | None]:
    """Return log-probabilities, entropies and values of the current weights, float64 ``(turn, token)``, on the CPU.

    See :class:`~lrl.diagnosis.sample.Sample` for their names.
    """
    shape = batch.response_mask.shape
    names = ("logprobs", "entropy", "values")
    out: dict[str, Tensor | None] = dict.fromkeys(names)
    with without_gradient(policy):
        for some in policy.passes(batch, False):
            part = policy.evaluate(batch[some])
            for name in names:
                computed = getattr(part, name)
                if computed is not None:
                    whole = out[name]
                    whole = torch.zeros(shape, dtype=torch.float64) if whole is None else whole
                    whole[some.cpu()] = computed.double().cpu()
                    out[name] = whole
    return {"evaluated": out["logprobs"], "entropy": out["entropy"], "evaluated_values": out["values"]}


@torch.no_grad()
def plain(
    policy: TextPolicy, batch: TurnBatch, turns: Sequence[int], keys: Sequence[RandomKeys] = ()
) -> dict[str, Tensor | None]:
    """Compute log-probabilities, entropies and values by one forward pass per turn, without padding and caches.

    Args:
        policy: policy whose weights have not changed since the turns were sampled.
        batch: the turns.
        turns: indices of the turns that are computed; the others get NaN.
        keys: keys of the random numbers of these turns, and others that are tried for turns with other tokens; empty
            draws no tokens.

    Returns:
        ``plain_logprobs``, ``next_logprobs``, ``previous_logprobs``, ``plain_entropy``, ``plain_values``, ``drawn`` and
        ``drawn_by``, see :class:`~lrl.diagnosis.sample.Sample`. Values are NaN if the critic has its own adapter.
    """
    width = batch.response_mask.shape[1]
    logprobs = torch.full(batch.response_mask.shape, torch.nan, dtype=torch.float64)
    entropy, values, drawn = logprobs.clone(), logprobs.clone(), torch.full(logprobs.shape, -1)
    by = torch.zeros(len(batch), len(keys), dtype=torch.bool)
    shifted, bits = {1: logprobs.clone(), -1: logprobs.clone()}, [token_bits(one, width) for one in keys]
    lengths = _sampled_lengths(policy, batch)
    head = None if policy.language_model.has_critic_adapter else policy.value_head
    model: Any = policy.language_model.model
    was_training = model.training
    model.eval()
    try:
        for number, turn in enumerate(turns):
            prompt = batch.inputs["prompt_ids"][turn][batch.inputs["prompt_mask"][turn]]
            response = batch.inputs["response_ids"][turn, :width]
            ids = torch.cat([prompt, response])[None]
            with head_inputs(model) as states:
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
            if head is not None:
                before = states[0][0, len(prompt) - 1 : -1].to(next(head.parameters()).dtype)
                values[turn] = head.layers(before)[:, 0].cpu()
            of_all, length = torch.log_softmax(logits / policy.sampling.temperature, -1), lengths[turn]
            for index, one in enumerate(bits):
                tokens = sample_tokens(of_all[:length].float(), one[number, :length].to(of_all.device))
                if index == 0:
                    drawn[turn, :length] = tokens.cpu()
                by[turn, index] = torch.equal(tokens, response[:length])
                if by[turn, 0]:
                    break
            logprobs[turn] = of_all.gather(-1, response[:, None])[:, 0].cpu()
            for offset, of_other in shifted.items():
                of_other[turn] = of_all.gather(-1, response.roll(-offset)[:, None])[:, 0].cpu()
            entropy[turn] = -(of_all.exp() * of_all).sum(-1).cpu()
    finally:
        model.train(was_training)
    return {
        "plain_logprobs": logprobs,
        "next_logprobs": shifted[1],
        "previous_logprobs": shifted[-1],
        "plain_entropy": entropy,
        "plain_values": values,
        "drawn": drawn if keys else None,
        "drawn_by": by if keys else None,
    }


def spread_turns(turns: int, limit: int) -> list[int]:
    """Return the indices of at most ``limit`` turns at equal distances, with the first and the last."""
    return sorted({round(index) for index in np.linspace(0, turns - 1, min(limit, turns))})


def draws_plainly(policy: TextPolicy) -> bool:
    """Return whether each token is sampled from the whole distribution, so that it follows from its random number."""
    return type(policy.generator) is DecodeLoop and policy.sampling.top_k is None and policy.sampling.top_p is None


def random_keys(rollout: Rollout, times: Tensor, columns: Tensor, seed: int, collection: int) -> dict[str, RandomKeys]:
    """Return the right keys of the random numbers of some turns, and wrong keys, which several turns share.

    Args:
        rollout: the collection.
        times: times of the turns, int64 ``(row,)``.
        columns: environments of the turns, int64 ``(row,)``.
        seed: seed of the run.
        collection: index of the collection.

    Returns:
        The right keys first, with an empty name; the names of the others say what they do not depend on.
    """
    env, time, group = columns.numpy(), times.numpy(), rollout.group[columns].numpy()
    size = int((rollout.group == rollout.group[0]).sum())
    envs = {"": env, "the group": env % size, "the index in the group": group, "the environment": 0 * env}
    turns = {"": time, "the episode": rollout.turn[times, columns].numpy(), "the turn": 0 * time}
    out, known = dict[str, RandomKeys](), set[tuple[Any, ...]]()
    for number in sorted({collection, 0}, reverse=True):
        for (of_env, one), (of_turn, other) in product(envs.items(), turns.items()):
            missing = [name for name in (of_env, of_turn, "the collection" * (number != collection)) if name]
            same = (number, tuple(one), tuple(other))
            if same not in known:
                keys = RandomKeys(seed=seed, purpose="rollout", collection=number, env=one, turn=other)
                out[" and ".join(missing)] = keys
            known.add(same)
    return out


def moved_logprobs(module: GradientModule, batch: TurnBatch) -> Tensor:
    """Return how much log-probabilities of tokens have changed since they were sampled, float64 ``(turn, token)``."""
    logprobs = evaluated(module.policy, batch)["evaluated"]
    assert logprobs is not None
    return logprobs - batch.old_logprobs.double().cpu()


# -- gradients and optimiser steps -------------------------------------------------------------------------------------


def compared_gradients(trainer: L.Trainer, module: GradientModule, batch: TurnBatch) -> dict[str, Any]:
    """Compute the gradient of some weights for a minibatch again, before the optimiser step.

    Args:
        trainer: trainer of the module.
        module: module with the gradients.
        batch: the minibatch.

    Returns:
        Empty in half precision or on several devices, and where an optimiser step has several minibatches. Else
        ``gradient_error``, the norm of the difference from the gradient that the optimiser gets, as a share of the norm
        of the new one, and ``gradient_factor``, the multiple of the new one that is nearest to the other. If they
        differ, also ``token_weights``, see :func:`_token_weights`.
    """
    one_device = trainer.world_size == 1 and trainer.accumulate_grad_batches == 1
    if not one_device or trainer.precision not in ("32-true", "64-true"):
        return {}
    if not len(batch) or not module.automatic_optimization:
        return {}
    weights, size = list[nn.Parameter](), 0
    groups = trainer.optimizers[0].param_groups
    for weight in reversed([one for group in groups for one in group["params"] if one.requires_grad]):
        if (weight.grad is None or weight.grad.any()) and (not weights or size + weight.numel() <= _COMPARED):
            weights.append(weight)
            size += weight.numel()
    if not weights:
        return {}
    given = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    used = torch.cat([one.cpu().double().reshape(-1) for one in given])
    expected = _gradient(module, batch, weights, batch.response_mask)
    norm = float(expected.norm())
    if norm < 1e-7 or not (used.isfinite().all() and expected.isfinite().all()):  # rounding may be larger
        return {}
    out: dict[str, Any] = {
        "gradient_error": float((used - expected).norm()) / norm,
        "gradient_factor": float(used @ expected) / norm**2,
    }
    if out["gradient_error"] > GRADIENT_ERROR:
        out["token_weights"] = _token_weights(module, batch, weights, used)
    return out


@dataclass(frozen=True)
class WeightBefore:
    """A weight before an optimiser step, with the state of AdamW."""

    weight: nn.Parameter
    values: Tensor
    mean: Tensor
    square: Tensor
    count: int
    rate: float
    decay: float

    def change(self) -> Tensor:
        """Return the change in a step of AdamW with its usual coefficients (arXiv:1711.05101), float64."""
        assert self.weight.grad is not None
        gradient = self.weight.grad.double()
        mean = (0.9 * self.mean + 0.1 * gradient) / (1 - 0.9**self.count)
        square = (0.999 * self.square + 0.001 * gradient.square()) / (1 - 0.999**self.count)
        return -self.rate * (mean / (square.sqrt() + 1e-8) + self.decay * self.values)


def weights_before(trainer: L.Trainer, module: GradientModule) -> list[WeightBefore]:
    """Return some small weights before an optimiser step, which are not rounded to 16 bits.

    Empty if the optimiser is not the AdamW of the configuration on one device in full precision.
    """
    config, optimizer = module.optimizer, trainer.optimizers[0]
    one_device = trainer.world_size == 1 and trainer.accumulate_grad_batches == 1
    if config.factory is not None or not one_device or trainer.precision not in ("32-true", "64-true"):
        return []
    out: list[WeightBefore] = []
    groups = [(weight, float(group["lr"])) for group in optimizer.param_groups for weight in group["params"]]
    wide = (torch.float32, torch.float64)
    trained = [(weight, rate) for weight, rate in groups if weight.grad is not None and weight.dtype in wide]
    for weight, rate in sorted(trained, key=lambda one: one[0].numel())[:_STEPPED]:
        values, state = weight.detach().double(), optimizer.state.get(weight, {})
        mean, square = (
            state[name].detach().double() if name in state else torch.zeros_like(values)
            for name in ("exp_avg", "exp_avg_sq")
        )
        count = int(state.get("step", 0)) + 1
        out.append(WeightBefore(weight, values.clone(), mean.clone(), square.clone(), count, rate, config.weight_decay))
    return out


def compared_step(before: Sequence[WeightBefore]) -> dict[str, float]:
    """Compare the changes of some weights in an optimiser step with those of AdamW for the same gradients.

    Args:
        before: the weights, whose gradients are still set.

    Returns:
        ``step_error``, the norm of the difference as a share of the norm of the expected change, and ``step_factor``,
        the multiple of the expected change that is nearest to the actual one. Empty if hardly anything should change.
    """
    if not before or any(one.weight.grad is None for one in before):
        return {}
    actual = torch.cat([(one.weight.detach().double() - one.values).reshape(-1) for one in before])
    expected = torch.cat([one.change().reshape(-1) for one in before])
    size, values = float(expected.norm()), torch.cat([one.values.reshape(-1) for one in before])
    if size <= 1e-5 * float(values.norm()):  # rounding may be larger
        return {}
    return {"step_error": float((actual - expected).norm()) / size, "step_factor": float(actual @ expected) / size**2}


def _gradient(module: GradientModule, batch: TurnBatch, weights: Sequence[nn.Parameter], trained: Tensor) -> Tensor:
    """Return the gradient of the loss of some tokens of a minibatch, float64 ``(number,)``.

    Args:
        module: module that is trained.
        batch: the minibatch, over whose tokens the loss is averaged.
        weights: the weights of the gradient.
        trained: the tokens, bool ``(turn, token)``; the losses of others are 0.
    """
    sizes, total = (len(batch), batch.response_mask.sum()), [torch.zeros_like(one).float() for one in weights]
    with torch.enable_grad():
        for number, turns in enumerate(module.passes(batch)):
            part = batch[turns]
            evaluation = module.policy.evaluate(part, module.dropout_seed and module.dropout_seed + number)
            tokens = module.loss(part, evaluation)
            tokens = replace(tokens, loss=torch.where(trained[turns], tokens.loss, 0.0))
            loss = module.reduced(tokens, part.response_mask | trained[turns], sizes)
            for sum_of, gradient in zip(total, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                if gradient is not None:
                    sum_of += gradient
    return torch.cat([one.cpu().double().reshape(-1) for one in total])


def _token_weights(
    module: GradientModule, batch: TurnBatch, weights: Sequence[nn.Parameter], used: Tensor
) -> dict[str, float]:
    """Return the weights of some kinds of tokens in a gradient by least squares; empty if they do not explain it.

    Kinds with hardly any gradient are left out. ``padding`` is the first position after a response.

    Args:
        module: module that is trained.
        batch: the minibatch.
        weights: the weights of the gradient.
        used: the gradient that the optimiser gets, float64 ``(number,)``.
    """
    mask = batch.response_mask
    place, length = mask.cumsum(1) - 1, mask.sum(1, keepdim=True)
    kinds = {"padding": ~mask & (place.roll(1, 1) == length - 1) & mask.roll(1, 1)}
    for start, from_start in enumerate(("first", "second", "later")):
        for end, from_end in enumerate(("last", "second last", "earlier")):
            here = (place.clamp(max=2) == start) & ((length - 1 - place).clamp(max=2) == end)
            kinds[f"{from_start} and {from_end}"] = mask & here
    parts = dict[str, Tensor]()
    for kind, tokens in kinds.items():
        part = _gradient(module, batch, weights, tokens) if tokens.any() else None
        if part is not None and part.isfinite().all():
            parts[kind] = part
    least = 0.05 * min(float(used.norm()), max(float(part.norm()) for part in parts.values()))
    parts = {kind: part for kind, part in parts.items() if float(part.norm()) > least}
    columns = torch.stack(list(parts.values()), 1)
    solution = torch.linalg.lstsq(columns, used[:, None]).solution
    if float((columns @ solution - used[:, None]).norm()) > GRADIENT_ERROR * float(used.norm()):
        return {}
    return dict(zip(parts, solution[:, 0].tolist(), strict=True))


def gradient_norm(module: L.LightningModule) -> float:
    """Return the norm of the gradients of all weights, 0 without gradients."""
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def scheduled_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float | None:
    """Return the learning rate after some optimiser steps; None if it does not follow from the configuration.

    This is a second implementation of :func:`lrl.training.optimizer.learning_rate_factor`, with which it is compared.

    Args:
        optimizer: configuration of the optimiser.
        step: number of steps so far.
        steps: number of steps of the whole run.
    """
    if optimizer.factory is not None or optimizer.update_kl is not None:
        return None
    warmup = math.ceil(optimizer.warmup * steps)
    if step < warmup:
        return optimizer.lr * step / warmup
    left = (steps - step) / max(steps - warmup, 1)
    decay = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
    return optimizer.lr * decay[optimizer.schedule]
