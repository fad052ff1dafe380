"""Whole episodes from a vectorised environment, in groups that start from the same state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import iterate
from torch import Tensor

from lrl.envs.text import text_of
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.types import Decisions, History, RandomKeys, Rollout

_OF_EPISODES = ("success", "episode_return", "episode_length")


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """What one collection on one rank consists of. Everything random follows from it."""

    seed: int
    """The run's seed."""
    collection: int
    """Index of the collection in the run."""
    num_groups: int
    """Groups on this rank."""
    group_size: int
    """Episodes that start from the same state."""
    rank: int = 0
    share_noise: bool = False
    """Whether the episodes of a group also share the environment's noise."""
    max_turns: int | None = None
    """Cut (truncate) episodes after this many turns; None leaves it to the environment."""
    num_steps: int | None = None
    """Turns per environment, in episodes that go on from one collection to the next; None plays whole episodes."""

    @property
    def num_envs(self) -> int:
        """Environments on this rank."""
        return self.num_groups * self.group_size

    @property
    def env(self) -> np.ndarray:
        """Global environment indices, int64 ``(env,)``."""
        return self.rank * self.num_envs + np.arange(self.num_envs)

    @property
    def group(self) -> np.ndarray:
        """Global group indices, int64 ``(env,)``."""
        return self.env // self.group_size

    def episode(self, world_size: int) -> np.ndarray:
        """A number for each group that no other group of the run has, int64 ``(env,)``."""
        return self.collection * self.num_groups * world_size + self.group


@dataclass(frozen=True, kw_only=True)
class Step:
    """One time step of the active environments."""

    rows: np.ndarray
    observations: list[str]
    decisions: Decisions
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    infos: Mapping[str, Any]
    turn: np.ndarray
    """Index of the turn in its episode, int64 ``(row,)``."""


class Collector:
    """Plays the episodes of a plan.

    Args:
        policy: decides for the environments that are still running.
        envs: a vectorised environment with ``AutoresetMode.DISABLED``.
        world_size: ranks that collect at the same time.
    """

    def __init__(self, policy: Policy, envs: gym.vector.VectorEnv, world_size: int = 1) -> None:
        self.policy, self.envs, self.world_size = policy, envs, world_size
        policy.prepare(envs)

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Reset every environment and play until each episode has ended."""
        observations: Sequence[Any] = self._reset(plan)
        active = np.ones(plan.num_envs, dtype=bool)
        memory: list[History] = [()] * plan.num_envs
        steps: list[Step] = []
        final_values: list[tuple[np.ndarray, Tensor]] = []
        while active.any():
            rows = np.flatnonzero(active)
            keys = RandomKeys(
                seed=plan.seed,
                purpose="rollout",
                collection=plan.collection,
                env=plan.env[rows],
                turn=np.full(len(rows), len(steps)),
            )
            seen = [observations[int(row)] for row in rows]
            decisions = self.policy.act(seen, [memory[row] for row in rows], keys)
            observations, rewards, terminated, truncated, infos = self.envs.step(self._spread(decisions, rows, plan))
            observations = rows_of(observations, self.envs)
            finished = terminated | truncated
            if plan.max_turns is not None and len(steps) + 1 >= plan.max_turns:
                truncated = truncated | (active & ~terminated)
            texts = [text_of(observation) for observation in seen]
            steps.append(
                Step(
                    rows=rows,
                    observations=texts,
                    decisions=decisions,
                    rewards=rewards[rows],
                    terminated=terminated[rows],
                    truncated=truncated[rows],
                    infos={name: value[rows] for name, value in numeric_infos(infos, plan.num_envs).items()},
                    turn=keys.turn,
                )
            )
            for row, history in zip(rows, decisions.memory, strict=True):
                memory[row] = history
            final_values.append((rows, self._values_behind(rows, observations, memory, truncated & ~terminated)))
            active = active & ~(terminated | truncated)
            if finished.any() and active.any():
                # A finished environment must not be stepped: it starts over and is masked from now on.
                observations = self._reset(plan, finished, observations)
        rollout = assemble(steps, plan)
        return rollout.replace(final_values=scatter(final_values, plan.num_envs)) if self.policy.has_critic else rollout

    def _values_behind(
        self, rows: np.ndarray, observations: Sequence[Any], memory: list[History], truncated: np.ndarray
    ) -> Tensor:
        """What the states are worth in which episodes of ``rows`` were cut, ``(row,)``; 0 elsewhere."""
        values = torch.zeros(len(rows), dtype=torch.float32)
        cut = np.flatnonzero(truncated[rows])
        if len(cut) and self.policy.has_critic:
            picked = rows[cut]
            seen = [observations[int(row)] for row in picked]
            values[torch.from_numpy(cut)] = (
                self.policy.state_values(seen, [memory[row] for row in picked]).float().cpu()
            )
        return values

    def _reset(self, plan: CollectionPlan, mask: np.ndarray | None = None, kept: Any = None) -> Sequence[Any]:
        options: dict[str, Any] = {"episode": plan.episode(self.world_size)}
        if mask is not None:
            options["reset_mask"] = mask
        noise = plan.group if plan.share_noise else plan.env
        noise_seeds = seeds("noise", plan.seed, plan.collection, noise)
        envs: Any = self.envs  # Gymnasium types neither set_attr nor one seed per environment
        envs.set_attr("noise_seed", [int(s) for s in noise_seeds])
        reset_seeds = seeds("reset", plan.seed, plan.collection, plan.group)
        observations, _ = envs.reset(seed=[int(s) for s in reset_seeds], options=options)
        observations = rows_of(observations, self.envs)
        return observations if mask is None else [new if m else old for new, old, m in zip(observations, kept, mask)]

    def _spread(self, decisions: Decisions, rows: np.ndarray, plan: CollectionPlan) -> Any:
        """Actions for all environments; the masked ones repeat the first action, which nobody looks at."""
        actions = [decisions.actions[0]] * plan.num_envs
        for row, action in zip(rows, decisions.actions, strict=True):
            actions[row] = action
        return tuple(actions) if isinstance(actions[0], str) else np.asarray(actions)


def rows_of(observations: Any, envs: gym.vector.VectorEnv) -> Sequence[Any]:
    """Observations of all environments as a sequence, one per environment."""
    if isinstance(envs.single_observation_space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return list(iterate(envs.observation_space, observations))
    return observations


def numeric_infos(infos: Mapping[str, Any], num_envs: int) -> dict[str, np.ndarray]:
    """What the environment reports as numbers, one per environment."""
    return {
        name: np.asarray(value, dtype=np.float64)
        for name, value in infos.items()
        if not name.startswith("_")
        and isinstance(value, np.ndarray)
        and value.shape == (num_envs,)
        and value.dtype.kind in "bfiu"
    }


def assemble(steps: Sequence[Step], plan: CollectionPlan) -> Rollout:
    """Stack the steps of a collection to ``(time, env, ...)``."""

    def stack(pick: Any) -> Tensor:
        return scatter([(step.rows, pick(step)) for step in steps], plan.num_envs)

    names = steps[0].decisions.inputs
    values = None if steps[0].decisions.values is None else stack(lambda s: s.decisions.values)
    return Rollout(
        inputs={name: stack(lambda s, name=name: s.decisions.inputs[name]) for name in names},
        response_mask=stack(lambda s: s.decisions.response_mask),
        logprobs=stack(lambda s: s.decisions.logprobs),
        values=values,
        rewards=stack(lambda s: torch.from_numpy(s.rewards).float()),
        terminated=stack(lambda s: torch.from_numpy(s.terminated)),
        truncated=stack(lambda s: torch.from_numpy(s.truncated)),
        active=stack(lambda s: torch.ones(len(s.rows), dtype=torch.bool)),
        turn=stack(lambda s: torch.from_numpy(s.turn)),
        group=torch.from_numpy(plan.group),
        observations=[spread_texts(s.rows, s.observations, plan.num_envs) for s in steps],
        responses=[spread_texts(s.rows, s.decisions.actions, plan.num_envs) for s in steps],
        metrics=turn_metrics(steps),
    )


def scatter(parts: Sequence[tuple[np.ndarray, Tensor]], num_envs: int) -> Tensor:
    """Tensors ``(row, ...)`` with their rows to one ``(time, env, ...)``, zero where nothing was given.

    Trailing axes of different length are padded on the right.
    """
    first = parts[0][1]
    if all(len(rows) == num_envs and tensor.shape == first.shape for rows, tensor in parts):
        return torch.stack([tensor for _, tensor in parts])
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for _, tensor in parts), strict=True)]
    out = torch.zeros(len(parts), num_envs, *shape, dtype=first.dtype, device=first.device)
    for time, (rows, tensor) in enumerate(parts):
        window = (time, torch.from_numpy(rows).to(first.device), *(slice(size) for size in tensor.shape[1:]))
        out[window] = tensor
    return out


def spread_texts(rows: np.ndarray, texts: Sequence[Any], num_envs: int) -> list[Any]:
    """One text, or native action, per environment; an empty text where inactive."""
    out: list[Any] = [""] * num_envs
    for row, text in zip(rows, texts, strict=True):
        out[row] = text
    return out


def turn_metrics(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Figures that the environment reports: of every turn, but ``success`` and the like of every episode."""
    names = sorted({name for step in steps for name in step.infos})
    figures: dict[str, Tensor] = {}
    for name in names:
        of_turns = [
            step.infos[name][step.terminated | step.truncated] if name in _OF_EPISODES else step.infos[name]
            for step in steps
            if name in step.infos
        ]
        figures[name] = torch.from_numpy(np.concatenate(of_turns)).float()
    return figures
