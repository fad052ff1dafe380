"""Stack the steps of a collection to a :class:`~lrl.types.Rollout`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrl.envs.text import text_of
from lrl.policies.policy import Policy
from lrl.rollouts.runner import EnvRunner, Step
from lrl.types import Rollout

_OF_EPISODES = ("success", "episode_return", "episode_length")
"""Metrics of whole episodes, taken from their last turn."""


def final_values(policy: Policy, runner: EnvRunner, step: Step, last: bool = False) -> Tensor:
    """Return the values of the states in which episodes were cut, float32 ``(row,)``; 0 where none was.

    Args:
        policy: its critic; without one all are 0.
        runner: has just taken the step, and has not been reset since.
        step: one turn of a rollout.
        last: whether it is the rollout's last turn, which cuts every episode that goes on.
    """
    values = torch.zeros(len(step.rows), dtype=torch.float32)
    cut = np.flatnonzero(~step.terminated & (step.truncated | last))
    if len(cut) and policy.has_critic:
        values[torch.from_numpy(cut)] = policy.state_values(*runner.seen(step.rows[cut])).float().cpu()
    return values


def stack_steps(
    steps: Sequence[Step], group: np.ndarray, values: Sequence[Tensor] | None, states: bool = False
) -> Rollout:
    """Stack steps along the time axis.

    Args:
        steps: at least one.
        group: global group index of each environment, int64 ``(env,)``.
        values: of :func:`final_values` for each step, or None without a critic.
        states: whether to number the observations, by :func:`observation_key`.

    Returns:
        A rollout whose tensors are ``(time, env, ...)``, zero where an environment took no turn.
    """
    num_envs, decisions = len(group), [step.decisions for step in steps]

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        return scatter([step.rows for step in steps], tensors, num_envs)

    estimates = [decision.values for decision in decisions if decision.values is not None]
    return Rollout(
        inputs={name: stack([decision.inputs[name] for decision in decisions]) for name in decisions[0].inputs},
        response_mask=stack([decision.response_mask for decision in decisions]),
        logprobs=stack([decision.logprobs for decision in decisions]),
        values=stack(estimates) if estimates else None,
        rewards=stack([torch.from_numpy(step.rewards).float() for step in steps]),
        terminated=stack([torch.from_numpy(step.terminated) for step in steps]),
        truncated=stack([torch.from_numpy(step.truncated) for step in steps]),
        active=stack([torch.ones(len(step.rows), dtype=torch.bool) for step in steps]),
        turn=stack([torch.from_numpy(step.turn) for step in steps]),
        group=torch.from_numpy(group),
        observations=[_spread(step.rows, [text_of(seen) for seen in step.observations], num_envs) for step in steps],
        responses=[_spread(step.rows, step.decisions.actions, num_envs) for step in steps],
        metrics=turn_metrics(steps),
        final_values=None if values is None else stack(values),
        state=stack([_keys(step.observations) for step in steps]) if states else None,
    )


def scatter(rows: Sequence[np.ndarray], tensors: Sequence[Tensor], num_envs: int) -> Tensor:
    """Stack tensors ``(row, ...)`` to one ``(time, env, ...)``, zero where an environment is in no row.

    Trailing axes of different length are padded on the right.

    Args:
        rows: for each time the environments, int64 ``(row,)``.
        tensors: for each time one tensor ``(row, ...)``.
        num_envs: size of the ``env`` axis.
    """
    first, times = tensors[0], list(zip(rows, tensors, strict=True))
    if all(len(envs) == num_envs and tensor.shape == first.shape for envs, tensor in times):
        return torch.stack(list(tensors))
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    out = torch.zeros(len(times), num_envs, *shape, dtype=first.dtype, device=first.device)
    for time, (envs, tensor) in enumerate(times):
        window = (time, torch.from_numpy(envs).to(first.device), *(slice(size) for size in tensor.shape[1:]))
        out[window] = tensor
    return out


def turn_metrics(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the numbers that environments report, each float32 ``(turn,)``, or ``(episode,)`` for whole episodes."""
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for step in steps:
        reported = {name: column for name, column in step.infos.items() if column.dtype.kind in "bfiu"}
        reported |= {"episode_return": step.episode_return, "episode_length": step.turn + 1}
        for name, column in reported.items():
            columns[name].append(column[step.ended] if name in _OF_EPISODES else column)
    return {name: torch.from_numpy(np.concatenate(columns[name])).float() for name in sorted(columns)}


def observation_key(observation: Any) -> int:
    """Return a 64-bit number that is the same for equal observations, in every process and on every machine.

    Args:
        observation: a text, a number, an array, or a dict or tuple of those.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(observation):
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _parts(observation: Any) -> Iterator[bytes]:
    """Yield what makes up an observation, in an order that does not depend on how it was put together."""
    if isinstance(observation, str):
        yield text_of(observation).encode()
    elif isinstance(observation, Mapping):
        for name in sorted(observation):
            yield str(name).encode()
            yield from _parts(observation[name])
    elif isinstance(observation, tuple):
        for part in observation:
            yield from _parts(part)
    else:
        yield (np.asarray(observation) + 0).tobytes()  # -0.0 equals 0.0


def _keys(observations: Sequence[Any]) -> Tensor:
    return torch.tensor([observation_key(observation) for observation in observations], dtype=torch.int64)


def _spread(rows: np.ndarray, items: Sequence[Any], num_envs: int) -> list[Any]:
    """Return one text or native action for each environment; an empty text where it took no turn."""
    out: list[Any] = [""] * num_envs
    for row, item in zip(rows, items, strict=True):
        out[row] = item
    return out
