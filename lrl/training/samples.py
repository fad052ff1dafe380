"""Samples of collections: what training uses, and what separate computations give for the same turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis.losses import PROBE, REFERENCE_PROBE
from lrl.diagnosis.sample import Sample
from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.policy import Policy
from lrl.policies.text import TextPolicy
from lrl.training.environment_facts import facts, named, starts
from lrl.training.gradient_module import GradientModule
from lrl.training.recomputed import draws_plainly, evaluated, plain, random_keys, spread_turns, texts
from lrl.training.replay import Replay, final_values_of, replay
from lrl.types import Evaluation, RandomKeys, Rollout, TurnBatch

_PLAIN_TURNS = 8
"""Maximum number of turns whose log-probabilities are computed again."""
_SETTINGS = (
    "credit",
    "advantage_scale",
    "loss_normalisation",
    "kl",
    "kl_coef",
    "ent_coef",
    "vf_coef",
    "group_baseline",
    "target_kl",
)


def rows_of(batch: TurnBatch) -> list[int]:
    """Return a hash of all numbers of each turn."""
    if not len(batch):
        return []
    fields = [tensor for tensor in batch.fields().values() if isinstance(tensor, Tensor)]
    arrays = [array_of(tensor.reshape(len(batch), -1)) for tensor in (*batch.inputs.values(), *fields)]
    flat = np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays], axis=1)
    return [hash(row.tobytes()) for row in flat]


def sample_of(
    module: GradientModule, data: RolloutDataModule, limit: int, again: Replay | None
) -> tuple[Sample, TurnBatch]:
    """Return a sample of the current collection with the settings of the run, and its turns; see :func:`take_sample`.

    Args:
        module: module that is trained, before the first optimiser step on the collection.
        data: data module with the collection.
        limit: maximum number of turns; more if the first group has more.
        again: plays some episodes again; None plays none.
    """
    assert data.rollout is not None
    assert data.batch is not None
    prompt, about = getattr(module.policy, "prompt", None), (data.collection, data.rollout, data.batch, limit)
    system = "" if prompt is None else prompt.system_text(data.env.codec)
    sample, part = take_sample(module, *about, again, data.seed, system)
    held_out = data.validation
    settings = dict(sample.settings)
    if held_out.env is None and held_out.episodes:
        settings["validation_seeds"] = [held_out.seed, held_out.episodes]
    if isinstance(data.env, GymnasiumEnvs) and module.policy.response_format is not None:
        settings["invalid_penalty"] = data.env.invalid_penalty
    if not settings["weighted"] and module._trainer is not None and module.trainer.world_size == 1:
        known = data.batch.advantages[data.batch.response_mask].double()
        settings["advantage_moments"] = [float(known.mean()), float(known.std())]
    settings["starts"] = starts(data.rollout)
    if again is not None:
        if again.facts is None:
            try:
                again.facts = facts(data.env, module.policy.response_format, again)
            except Exception as error:  # a second environment must not end the run
                logging.getLogger("lrl").warning("start states are not compared, because this failed: %s", error)
                again.facts = {}
        settings |= again.facts
    settings["minibatches"] = data.minibatches_per_collection
    settings["missing_turns"] = data.rollout.num_turns - len(data.batch)
    arrays = dict(sample.arrays)
    names = (
        [] if module.policy.response_format is None else [name.lower() for name in data.env.codec.action_texts or ()]
    )
    if names and "valid" in arrays:
        lower = [response.lower() for response in sample.responses]
        arrays["names_action"] = np.array([any(name in text for name in names) for text in lower])
        settings["action_names"] = names
    if module.policy.response_format is not None and "valid" in arrays:
        known = named(data.env.codec, module.policy.response_format, sample.responses)
        arrays |= {} if known is None else {"named": known}
    return replace(sample, settings=settings, arrays=arrays), part


def demonstrated_sample(module: GradientModule, batch: TurnBatch) -> Sample:
    """Return a batch of demonstrations as a sample, whose advantages are the weights of its tokens.

    Args:
        module: module that is trained, before the first optimiser step.
        batch: some demonstrations, on the device of the module.
    """
    policy, turns = module.policy, torch.arange(len(batch))
    arrays: dict[str, Tensor | None] = {
        "env": turns,
        "time": torch.zeros_like(turns),
        "turn": torch.zeros_like(turns),
        "mask": batch.response_mask,
        "advantages": batch.advantages,
        "gradients": probes(module, batch)["gradients"],
    }
    pieces: list[list[str]] = []
    if isinstance(policy, TextPolicy):
        ids = arrays["ids"] = batch.inputs["response_ids"][:, : batch.response_mask.shape[1]]
        arrays |= plain(policy, batch, spread_turns(len(batch), _PLAIN_TURNS))
        arrays |= evaluated(policy, batch)
        arrays["logprobs"] = arrays["evaluated"]
        pieces = _pieces(policy, ids)
    return Sample(
        collection=0,
        settings=settings_of(module),
        observations=[],
        responses=[],
        pieces=pieces,
        arrays={name: array_of(tensor) for name, tensor in arrays.items() if tensor is not None},
    )


def _pieces(policy: TextPolicy, ids: Tensor) -> list[list[str]]:
    """Return the text of each token."""
    decode = policy.language_model.tokenizer.tokenizer.convert_ids_to_tokens
    return [[str(piece) for piece in decode(row)] for row in ids.tolist()]  # pyright: ignore


def take_sample(
    module: GradientModule,
    collection: int,
    rollout: Rollout,
    batch: TurnBatch,
    limit: int,
    again: Replay | None = None,
    seed: int | None = None,
    system: str = "",
) -> tuple[Sample, TurnBatch]:
    """Return a sample of a collection, and its turns on the device of the module.

    Args:
        module: module that is trained, before the first optimiser step on the collection.
        collection: index of the collection.
        rollout: the collection.
        batch: its turns with their advantages, in the order of :meth:`Rollout.flatten`.
        limit: maximum number of turns; more if the first group has more.
        again: plays some episodes again; None plays none.
        seed: seed of the random numbers of tokens; None draws none again.
        system: content of the system message.
    """
    rollout, batch = rollout.to(torch.device("cpu")), batch.to("cpu")
    chosen, by_index = _chosen_envs(rollout, limit)
    number = torch.zeros_like(rollout.turn)
    number[rollout.active] = torch.arange(rollout.num_turns)
    times, columns = torch.nonzero(rollout.active & chosen, as_tuple=True)
    turns = number[times, columns]
    part = batch[turns]
    part_on_device = part.to(module.device)
    tokens = part.inputs.get("response_ids")
    arrays = _recorded(rollout, part, times, columns)
    arrays["by_index"] = by_index[columns]
    arrays |= probes(module, part_on_device)
    arrays |= evaluated(module.policy, part_on_device)
    arrays |= reported(rollout, turns, times, columns)
    pieces: list[list[str]] = []
    keys, settings = dict[str, RandomKeys](), settings_of(module)
    cells = list(zip(times.tolist(), columns.tolist(), strict=True))
    observations = [str(rollout.observations[time][env]) for time, env in cells]
    actions = [rollout.responses[time][env] for time, env in cells]
    if isinstance(module.policy, TextPolicy) and tokens is not None:
        arrays["ids"] = tokens[:, : part.response_mask.shape[1]]
        compared = spread_turns(len(part), _PLAIN_TURNS)
        if seed is not None and draws_plainly(module.policy) and not settings["half_precision"]:
            keys = random_keys(rollout, times[compared], columns[compared], seed, collection)
            settings["random_keys"] = list(keys)
        arrays |= plain(module.policy, part_on_device, compared, list(keys.values()))
        arrays |= texts(module.policy, part, observations, actions, system)
        pieces = _pieces(module.policy, tokens[:, : part.response_mask.shape[1]])
    sample = Sample(
        collection=collection,
        settings=settings,
        observations=observations,
        responses=[str(action) for action in actions],
        pieces=pieces,
        arrays={name: array_of(tensor) for name, tensor in arrays.items() if tensor is not None},
    )
    return _replayed(module.policy, sample, actions, again), part_on_device


def _replayed(policy: Policy, sample: Sample, actions: Sequence[Any], again: Replay | None) -> Sample:
    """Return a sample with what its episodes give when they are played again."""
    if again is None or "origin" not in sample:
        return sample
    try:
        replayed, after = replay(sample, actions, again)
    except Exception as error:  # a second environment must not end the run
        logging.getLogger("lrl").warning("episodes are not played again, because this failed: %s", error)
        return sample
    replayed["replay_final_values"] = final_values_of(policy, sample, after)
    return replace(sample, arrays={**sample.arrays, **replayed})


def _recorded(rollout: Rollout, part: TurnBatch, times: Tensor, columns: Tensor) -> dict[str, Tensor | None]:
    """Return what a rollout and its batch recorded of some turns; None for what they did not record."""
    return {
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
        "origin": None if rollout.origin is None else rollout.origin[times, columns],
        "values": part.old_values,
        "returns": part.returns,
        "ref_logprobs": part.ref_logprobs,
    }


def _chosen_envs(rollout: Rollout, limit: int) -> tuple[Tensor, Tensor]:
    """Return the environments of a sample, and those of them that were chosen by their index, each bool ``(env,)``.

    The first groups have at most half of the turns, and at least one group is taken. Groups in which an episode is cut
    before it terminates, which show how it is bootstrapped, then those in which a response is invalid, and then the
    others, fill the rest.
    """
    invalid = torch.zeros_like(rollout.turn)
    valid = rollout.metrics.get("action_valid")
    if valid is not None and len(valid) == rollout.num_turns:
        invalid[rollout.active] = (valid == 0).to(invalid)
    groups, index = torch.unique(rollout.group, return_inverse=True)
    cuts, invalids, turns = (
        torch.zeros(len(groups), dtype=torch.long).index_add(0, index, counts)
        for counts in (rollout.cut.sum(0), invalid.sum(0), rollout.lengths)
    )
    first = turns.cumsum(0) <= limit // 2
    first[0] = True
    by_cuts = torch.argsort(2 * (cuts == 0).long() + (invalids == 0), stable=True)
    order = torch.cat([torch.nonzero(first)[:, 0], by_cuts[~first[by_cuts]]])
    fits = turns[order].cumsum(0) <= limit
    chosen = first.clone()
    chosen[order[fits]] = True
    return chosen[index], first[index]


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, floating-point numbers as float64."""
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
    clip = getattr(module, "clip_range", None)
    high = (getattr(module, "clip_low", None), getattr(module, "clip_high", None))
    settings["clip"] = (
        list(getattr(module, "clip", high if high[0] is not None else (clip, clip) if clip else ())) or None
    )
    settings["fits_critic"] = getattr(getattr(module, "critic", None), "fit", None) is not None
    if trainer is not None:
        _configured(Path(trainer.default_root_dir) / "config.yaml", settings)
    settings["weighted"] = isinstance(module.policy, TextPolicy) and module.policy.importance_cap is not None
    return settings


@lru_cache(maxsize=1)
def _arguments(path: Path, time: int) -> dict[str, Any]:
    """Return the arguments of the algorithm in a configuration, which is read again only if its time has changed."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")).get("model") or {}).get("init_args") or {}


def _configured(path: Path, settings: dict[str, Any]) -> None:
    """Replace settings of the module by those in the configuration of the run, which they should equal.

    Args:
        path: configuration of the run; nothing is replaced if there is none.
        settings: settings of the module, changed in place.
    """
    if not path.exists():
        return
    given = _arguments(path, path.stat().st_mtime_ns)
    for name in ("ent_coef", "vf_coef", "loss_normalisation", "advantage_scale", "kl_coef", "target_kl"):
        if name in settings and given.get(name) is not None and not (name == "vf_coef" and settings["fits_critic"]):
            settings[name] = given[name]
    for name in ("credit", "kl"):
        if isinstance(settings.get(name), Mapping) and isinstance(given.get(name), Mapping):
            known = {key: value for key, value in given[name].items() if value is not None and key in settings[name]}
            settings[name] = {**settings[name], **known}
            adapted = name != "kl" or settings[name].get("target") is not None
            if not adapted and "kl_coef" in settings and "coef" in known:
                settings["kl_coef"] = known["coef"]
    if settings["clip"] is not None and given.get("clip_range") is not None:
        low, high = given["clip_range"], given.get("clip_range_high")
        settings["clip"] = [low, low if high is None else high]


def probes(module: GradientModule, batch: TurnBatch) -> dict[str, Tensor | None]:
    """Return derivatives of the loss with respect to what a policy computes; see :class:`Sample`.

    The log-probabilities are those recorded while sampling, so that all ratios are 1, unless stated.
    """
    masked = batch.response_mask

    def derivatives(
        change: float, advantages: Tensor | None = None, ref: float | None = 0.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return derivatives by log-probability, entropy and value.

        Args:
            change: what is added to the log-probabilities.
            advantages: advantages instead of those of the batch; None keeps them.
            ref: what the log-probabilities exceed those of the reference by; None keeps the reference.
        """
        logprobs = (batch.old_logprobs + change * masked).detach().requires_grad_()
        entropy = torch.zeros_like(logprobs).requires_grad_()
        values = None if batch.old_values is None else batch.old_values.detach().clone().requires_grad_()
        changed = batch if advantages is None else batch.replace(advantages=advantages)
        if batch.ref_logprobs is not None and ref is not None:
            changed = changed.replace(ref_logprobs=logprobs.detach() - ref)
        with torch.enable_grad():
            tokens = module.loss(changed, Evaluation(logprobs=logprobs, entropy=entropy, values=values))
            leaves = [leaf for leaf in (logprobs, entropy, values) if leaf is not None]
            found = torch.autograd.grad(module.reduced(tokens, masked), leaves, allow_unused=True)
        filled = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
        return filled[0], filled[1], filled[2] if values is not None else None

    nothing = torch.zeros_like(batch.advantages)
    whole, entropy, value = derivatives(0.0, ref=None)
    without = {change: derivatives(change, nothing)[0] for change in (0.0, PROBE, -PROBE)}
    surrogates = {change: derivatives(change)[0] - without[change] for change in without}
    return {
        "gradients": whole,
        "surrogate": surrogates[0.0],
        "surrogate_above": surrogates[PROBE],
        "surrogate_below": surrogates[-PROBE],
        "kl_gradients": None if batch.ref_logprobs is None else derivatives(0.0, nothing, ref=REFERENCE_PROBE)[0],
        "offset_gradients": without[0.0],
        "entropy_gradients": entropy,
        "value_gradients": value,
    }


def reported(rollout: Rollout, turns: Tensor, times: Tensor, columns: Tensor) -> dict[str, Tensor | None]:
    """Return what the environment reports of turns and episodes, each ``(turn,)``; see :class:`Sample`.

    Args:
        rollout: the collection.
        turns: indices of the turns among all turns of the collection.
        times: times of the turns.
        columns: environments of the turns.
    """
    ends = rollout.terminated | rollout.truncated
    valid, success = (rollout.metrics.get(name) for name in ("action_valid", "success"))
    out: dict[str, Tensor | None] = {}
    if valid is not None and len(valid) == rollout.num_turns:
        out["valid"] = valid[turns]
    if success is not None and len(success) == int(ends.sum()):
        spread = torch.full(ends.shape, torch.nan, dtype=torch.float64)
        spread[ends] = success.double().cpu()
        out["success"] = spread[times, columns]
    return out
