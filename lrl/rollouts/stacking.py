"""Stack the steps of a collection to a :class:`~lrl.types.Rollout`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def stack_steps(steps: Sequence[Step], group: np.ndarray, values: Sequence[Tensor] | None) -> Rollout:
    """Stack steps along the time axis.

    Args:
        steps: at least one.
        group: global group index of each environment, int64 ``(env,)``.
        values: of :func:`final_values` for each step, or None without a critic.

    Returns:
        A rollout whose tensors are ``(time, env, ...)``, zero where an environment took no turn.
    """
    num_envs = len(group)

    def stack(pick: Callable[[Step], Tensor]) -> Tensor:
        return scatter([(step.rows, pick(step)) for step in steps], num_envs)

    names, valued = steps[0].decisions.inputs, steps[0].decisions.values is not None
    return Rollout(
        inputs={name: stack(lambda s, name=name: s.decisions.inputs[name]) for name in names},
        response_mask=stack(lambda s: s.decisions.response_mask),
        logprobs=stack(lambda s: s.decisions.logprobs),
        values=stack(lambda s: s.decisions.values) if valued else None,
        rewards=stack(lambda s: torch.from_numpy(s.rewards).float()),
        terminated=stack(lambda s: torch.from_numpy(s.terminated)),
        truncated=stack(lambda s: torch.from_numpy(s.truncated)),
        active=stack(lambda s: torch.ones(len(s.rows), dtype=torch.bool)),
        turn=stack(lambda s: torch.from_numpy(s.turn)),
        group=torch.from_numpy(group),
        observations=[_spread(s.rows, [_text(o) for o in s.observations], num_envs) for s in steps],
        responses=[_spread(s.rows, s.decisions.actions, num_envs) for s in steps],
        metrics=turn_metrics(steps),
        final_values=None
        if values is None
        else scatter([(s.rows, v) for s, v in zip(steps, values, strict=True)], num_envs),
    )


def scatter(rows_and_tensors: Sequence[tuple[np.ndarray, Tensor]], num_envs: int) -> Tensor:
    """Stack tensors ``(row, ...)`` to one ``(time, env, ...)``, zero where an environment is in no row.

    Trailing axes of different length are padded on the right.

    Args:
        rows_and_tensors: for each time the environments, int64 ``(row,)``, and their tensor.
        num_envs: size of the ``env`` axis.
    """
    first = rows_and_tensors[0][1]
    if all(len(rows) == num_envs and tensor.shape == first.shape for rows, tensor in rows_and_tensors):
        return torch.stack([tensor for _, tensor in rows_and_tensors])
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for _, tensor in rows_and_tensors), strict=True)]
    out = torch.zeros(len(rows_and_tensors), num_envs, *shape, dtype=first.dtype, device=first.device)
    for time, (rows, tensor) in enumerate(rows_and_tensors):
        window = (time, torch.from_numpy(rows).to(first.device), *(slice(size) for size in tensor.shape[1:]))
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


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else ""


def _spread(rows: np.ndarray, items: Sequence[Any], num_envs: int) -> list[Any]:
    """Return one text or native action for each environment; an empty text where it took no turn."""
    out: list[Any] = [""] * num_envs
    for row, item in zip(rows, items, strict=True):
        out[row] = item
    return out
