"""Collect a fixed number of turns from every environment; episodes continue in the next collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from gymnasium.vector import VectorEnv
from torch import Tensor

from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.rollouts.episodes import CollectionPlan
from lrl.rollouts.runner import EnvRunner, Step
from lrl.rollouts.stacking import final_values, stack_steps
from lrl.types import History, PastTurn, Rollout


@final
class FixedHorizonCollector:
    """Collects ``num_steps`` turns from each environment, and resets those whose episode ends.

    Args:
        policy: decides in all environments.
        envs: vectorised environments with ``AutoresetMode.DISABLED``.
        seed: seed of the run.
        env: global indices of these environments, int64 ``(env,)``.
        total: number of environments over all ranks.
    """

    def __init__(self, policy: Policy, envs: VectorEnv, seed: int, env: np.ndarray, total: int) -> None:
        self.policy, self.seed, self.env, self.total = policy, seed, env, total
        self.runner = EnvRunner(policy, envs)
        self._episode = np.zeros(len(env), dtype=np.int64)
        """Index of the current episode of each environment."""
        self._actions: list[list[Any]] = [[] for _ in env]
        """Actions of the current episodes."""
        self._start, self._collection = self._live_episodes(), -1
        """The live episodes when the current collection began, and its index."""

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Play ``plan.num_steps`` turns; the last one need not end an episode."""
        assert plan.num_steps is not None
        self._reset()
        self._start, self._collection = self._live_episodes(), plan.collection
        steps: list[Step] = []
        values: list[Tensor] = []
        for turn in range(plan.num_steps):
            step = self.runner.turn(plan.keys(self.env, turn), max_turns=plan.max_turns)
            steps.append(step)
            values.append(final_values(self.policy, self.runner, step, last=turn + 1 == plan.num_steps))
            for actions, action, ended in zip(self._actions, step.decisions.actions, step.ended, strict=True):
                if ended:
                    actions.clear()
                else:
                    actions.append(action)
            self._episode = self._episode + step.ended
            self._reset()
        return stack_steps(steps, plan.group, values if self.policy.has_critic else None)

    def _reset(self, idle: np.ndarray | None = None) -> None:
        """Begin the next episode where one has ended, except where ``idle``."""
        numbers = seeds("reset", self.seed, self._episode, self.env), self._episode * self.total + self.env
        self.runner.reset(*numbers, idle=idle)

    # -- resume ---------------------------------------------------------------------------------------------------

    def _live_episodes(self) -> tuple[np.ndarray, list[list[Any]], list[History]]:
        return self._episode, [list(actions) for actions in self._actions], list(self.runner.memory)

    def state(self, collection: int) -> dict[str, Any]:
        """Return the live episodes as plain data: their indices, the actions so far, and what the policy remembers.

        Args:
            collection: the last completed collection. A later one that has begun is collected again after a resume, so
                the state is then that at its beginning.
        """
        episode, actions, memory = self._live_episodes() if self._collection == collection else self._start
        return {
            "episode": episode.tolist(),
            "actions": [[_plain(action) for action in played] for played in actions],
            "memory": [[[turn.observation, turn.response] for turn in history] for history in memory],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replay the live episodes with the same seeds and actions.

        Episodes differ in length, and all environments are stepped together. So each is reset when as many turns are
        left to replay as its episode has. Until then it is idle, or takes any actions, whose results are dropped.

        Raises:
            ValueError: the number of environments has changed.
        """
        if len(state["episode"]) != len(self.env):
            raise ValueError(
                f"ckpt_path holds the episodes of {len(state['episode'])} environments per device, here are "
                f"{len(self.env)}; resume with the same data.num_envs."
            )
        self._episode = np.array(state["episode"], dtype=np.int64)
        self._actions = [[self._native(action) for action in actions] for actions in state["actions"]]
        lengths = np.array([len(actions) for actions in self._actions])
        for remaining in range(lengths.max(), 0, -1):
            self.runner.ended |= lengths == remaining
            self._reset(idle=lengths < remaining)
            rows = np.flatnonzero(lengths >= remaining)
            self.runner.step([self._actions[row][-remaining] for row in rows], rows)
        self.runner.ended |= lengths == 0
        self._reset()
        self.runner.memory = [tuple(PastTurn(*turn) for turn in history) for history in state["memory"]]
        self._start = self._live_episodes()

    def _native(self, action: Any) -> Any:
        """Return an action of :meth:`state` as the environment takes it."""
        return action if isinstance(action, str) else np.asarray(action, self.runner.envs.single_action_space.dtype)


def _plain(action: Any) -> Any:
    return action if isinstance(action, str) else np.asarray(action).tolist()
