"""Callback that records what training uses, and reports mistakes that it shows while the run goes on."""

from __future__ import annotations

import logging
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis.detectors import Finding, diagnose_samples, sampled_distribution
from lrl.diagnosis.sample import Sample, write_sample
from lrl.functional.distributed import shards_parameters
from lrl.lm.forward import without_gradient
from lrl.policies.text import TextPolicy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.types import Evaluation, Rollout, TurnBatch

_FIRST = 3
"""Number of collections at the start of a run that are always recorded."""
_PLAIN_TURNS = 16
"""Maximum number of turns whose log-probabilities are computed again."""
_SETTINGS = ("credit", "advantage_scale", "loss_normalisation", "kl", "kl_coef", "ent_coef", "group_baseline")


@register
class Diagnosis(L.Callback):
    """Records a sample of the turns of some collections, and warns of mistakes that they show.

    The samples are files in ``samples`` in the run directory, from which ``lrl report`` repeats the diagnosis. It is
    recorded before the first optimiser step on a collection, when all probability ratios are 1. A warning does not
    change the run. Algorithms that do not learn by minibatches of a rollout, such as TRPO and SFT, are not recorded,
    nor are sharded weights.

    Args:
        every_n_collections: one in this many collections is recorded, and the first three.
        turns: maximum number of turns to record; more if a single group has more.
    """

    def __init__(self, every_n_collections: PositiveInt = 10, turns: PositiveInt = 256) -> None:
        check_arguments(Diagnosis.__init__, locals(), "Diagnosis")
        self.every_n_collections, self.turns = every_n_collections, turns
        self.samples: list[Sample] = []
        """The samples of this process, the latest last."""
        self._reported: set[str] = set()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the collection before its first optimiser step."""
        data: Any = getattr(trainer, "datamodule", None)
        if not self._records(trainer, pl_module, data):
            return
        assert isinstance(pl_module, GradientModule)
        with trainer.precision_plugin.forward_context():
            sample = take_sample(pl_module, data.collection, data.rollout, data.batch, self.turns)
        write_sample(sample, Path(trainer.default_root_dir))
        self.samples.append(sample)
        for finding in [*diagnose_samples([sample]), *sampled_distribution(self.samples)]:
            self._report(finding)

    def _records(self, trainer: L.Trainer, module: Any, data: Any) -> bool:
        """Return whether the current collection is to be recorded by this process, and has not been trained on yet."""
        if not (trainer.is_global_zero and isinstance(module, GradientModule) and isinstance(data, RolloutDataModule)):
            return False
        if data.trained_minibatches or data.rollout is None or not module.automatic_optimization:
            return False
        wanted = data.collection < _FIRST or data.collection % self.every_n_collections == 0
        return wanted and not shards_parameters(trainer.strategy)

    def _report(self, finding: Finding) -> None:
        if finding.cause not in self._reported:
            self._reported.add(finding.cause)
            logging.getLogger("lrl").warning("%s: %s; %s", finding.cause, finding.evidence, finding.remedy)


def take_sample(module: GradientModule, collection: int, rollout: Rollout, batch: TurnBatch, limit: int) -> Sample:
    """Return a sample of a collection.

    Args:
        module: module that is trained, before the first optimiser step on the collection.
        collection: index of the collection.
        rollout: the collection.
        batch: its turns with their advantages, in the order of :meth:`Rollout.flatten`.
        limit: maximum number of turns; more if the first group has more.
    """
    rollout, batch = rollout.to(torch.device("cpu")), batch.to("cpu")
    chosen = _first_envs(rollout, limit)
    number = torch.zeros_like(rollout.turn).masked_fill(rollout.active, 1).cumsum(0)  # placeholder shape (time, env)
    number[rollout.active] = torch.arange(rollout.num_turns)
    times, columns = torch.nonzero(rollout.active & chosen, as_tuple=True)
    turns = number[times, columns]
    part = batch[turns]
    part_on_device = part.to(module.device)
    gradients = token_gradients(module, part_on_device)
    tokens = part.inputs.get("response_ids")
    is_text = isinstance(module.policy, TextPolicy) and tokens is not None
    arrays: dict[str, Tensor | None] = {
        "env": columns,
        "time": times,
        "group": rollout.group[columns],
        "turn": rollout.turn[times, columns],
        "rewards": rollout.rewards[times, columns],
        "final_values": None if rollout.final_values is None else rollout.final_values[times, columns],
        "terminated": rollout.terminated[times, columns],
        "truncated": rollout.truncated[times, columns],
        "cut": rollout.cut[times, columns],
        "mask": part.response_mask,
        "logprobs": part.old_logprobs,
        "advantages": part.advantages,
        "gradients": gradients,
        "values": part.old_values,
        "returns": part.returns,
        "ref_logprobs": part.ref_logprobs,
    }
    pieces: list[list[str]] = []
    if is_text:
        assert tokens is not None
        assert isinstance(module.policy, TextPolicy)
        arrays["ids"] = tokens[:, : part.response_mask.shape[1]]
        arrays |= plain_logprobs(module.policy, part_on_device, _PLAIN_TURNS)
        arrays["evaluated"] = evaluated_logprobs(module.policy, part_on_device, _PLAIN_TURNS)
        decode = module.policy.language_model.tokenizer.tokenizer.convert_ids_to_tokens
        pieces = [[str(piece) for piece in decode(row)] for row in arrays["ids"].tolist()]  # pyright: ignore
    cells = list(zip(times.tolist(), columns.tolist(), strict=True))
    return Sample(
        collection=collection,
        settings=settings_of(module),
        observations=[str(rollout.observations[time][env]) for time, env in cells],
        responses=[str(rollout.responses[time][env]) for time, env in cells],
        pieces=pieces,
        arrays={name: _array(tensor) for name, tensor in arrays.items() if tensor is not None},
    )


def _first_envs(rollout: Rollout, limit: int) -> Tensor:
    """Return the environments of the first groups that have at most ``limit`` turns together, bool ``(env,)``."""
    groups, index = torch.unique(rollout.group, return_inverse=True)
    turns = torch.zeros(len(groups), dtype=torch.long).index_add(0, index, rollout.lengths)
    chosen = turns.cumsum(0) <= limit
    chosen[0] = True
    return chosen[index]


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def settings_of(module: GradientModule) -> dict[str, Any]:
    """Return the settings on which the numbers of a sample depend."""
    settings: dict[str, Any] = {"algorithm": type(module).__name__, "policy": type(module.policy).__name__}
    trainer = module._trainer
    settings["half_precision"] = trainer is not None and trainer.precision not in ("32-true", "64-true")
    for name in _SETTINGS:
        value = getattr(module, name, None)
        if value is not None:
            settings[name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(module.policy, TextPolicy):
        tokenizer = module.policy.language_model.tokenizer
        settings["stop_ids"] = sorted(tokenizer.stop_ids(module.policy.stop_text))
        settings["temperature"] = module.policy.sampling.temperature
        settings["half_precision"] |= bool(module.policy.language_model.recomputes)
    return settings


def token_gradients(module: GradientModule, batch: TurnBatch) -> Tensor:
    """Return the derivative of the loss with respect to the log-probability of each token, ``(turn, token)``.

    The log-probabilities are those recorded while sampling, so that all ratios are 1.
    """
    with torch.enable_grad():
        leaf = batch.old_logprobs.detach().clone().requires_grad_()
        zeros = torch.zeros_like(leaf)
        values = None if batch.old_values is None else batch.old_values.detach()
        tokens = module.loss(batch, Evaluation(logprobs=leaf, entropy=zeros, values=values))
        loss = module.reduced(tokens, batch.response_mask)
        (gradient,) = torch.autograd.grad(loss, [leaf])
    return gradient


def evaluated_logprobs(policy: TextPolicy, batch: TurnBatch, limit: int) -> Tensor:
    """Return the log-probabilities that training computes, ``(turn, token)``; NaN for turns after ``limit``."""
    some = batch[torch.arange(min(limit, len(batch)), device=batch.response_mask.device)]
    out = torch.full(batch.response_mask.shape, torch.nan, dtype=torch.float64)
    with without_gradient(policy):
        out[: len(some)] = policy.evaluate(some).logprobs.double().cpu()
    return out


@torch.no_grad()
def plain_logprobs(policy: TextPolicy, batch: TurnBatch, limit: int) -> dict[str, Tensor]:
    """Compute log-probabilities by one forward pass per turn, without padding, caches or shared rows.

    Args:
        policy: policy whose weights have not changed since the turns were sampled.
        batch: the turns.
        limit: number of turns; those after it get NaN.

    Returns:
        ``plain_logprobs``, ``plain_entropy`` and ``plain_variance``, see :class:`Sample`.
    """
    shape = batch.response_mask.shape
    names = ("plain_logprobs", "plain_entropy", "plain_variance")
    out = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in names}
    model: Any = policy.language_model.model
    was_training = model.training
    model.eval()
    for turn in range(min(limit, len(batch))):
        prompt = batch.inputs["prompt_ids"][turn][batch.inputs["prompt_mask"][turn]]
        response = batch.inputs["response_ids"][turn, : shape[1]]
        ids = torch.cat([prompt, response])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        logprobs = torch.log_softmax(logits / policy.sampling.temperature, -1)
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).sum(-1)
        values = (
            logprobs.gather(-1, response[:, None])[:, 0],
            entropy,
            (probabilities * logprobs.square()).sum(-1) - entropy.square(),
        )
        for name, value in zip(names, values, strict=True):
            out[name][turn] = value.cpu()
    model.train(was_training)
    return out
