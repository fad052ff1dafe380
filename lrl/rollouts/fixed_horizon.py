"""A fixed number of turns from every environment; episodes go on from one collection to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from lrl.envs.text import text_of
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.rollouts.episodes import CollectionPlan, Step, assemble, numeric_infos, rows_of
from lrl.types import Decisions, History, PastTurn, RandomKeys, Rollout

Figures = dict[str, np.ndarray]


class ContinuingCollector:
    """Plays ``num_steps`` turns in each environment, resetting what ends, and goes on where it stopped.

    Args:
        policy: decides for all environments.
        envs: a vectorised environment with ``AutoresetMode.DISABLED``.
        seed: of the run.
        env: global indices of these environments, int64 ``(env,)``.
        total: environments over all ranks.
    """

    def __init__(self, policy: Policy, envs: gym.vector.VectorEnv, seed: int, env: np.ndarray, total: int) -> None:
        self.policy, self.envs, self.seed, self.env, self.total = policy, envs, seed, env, total
        self._episode = np.zeros(len(env), dtype=np.int64)
        """How many episodes each environment has begun before this one."""
        self._actions: list[list[Any]] = [[] for _ in env]
        """Of the running episodes."""
        self._memory: list[History] = [()] * len(env)
        self._returns, self._lengths = np.zeros(len(env)), np.zeros(len(env), dtype=np.int64)
        self._observations: Any = None
        self._before, self._begun = self._progress(), -1
        """Where the collection that was begun last started, and its index."""
        policy.prepare(envs)

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Play; the last turn of an environment need not end an episode."""
        assert plan.num_steps is not None
        everyone = np.arange(len(self.env))
        if self._observations is None:
            self._reset(np.ones(len(self.env), dtype=bool))
        self._before, self._begun = self._progress(), plan.collection
        steps, final_values = [], []
        for step in range(plan.num_steps):
            seen, turn = self._seen(), self._lengths.copy()
            keys = RandomKeys(
                seed=plan.seed,
                purpose="rollout",
                collection=plan.collection,
                env=self.env,
                turn=np.full(len(self.env), step),
            )
            decisions = self.policy.act(seen, self._memory, keys)
            rewards, terminated, truncated, infos = self._step(decisions, plan)
            final_values.append(self._values_behind(terminated, truncated, step + 1 == plan.num_steps))
            texts = [text_of(observation) for observation in seen]
            steps.append(
                Step(
                    rows=everyone,
                    observations=texts,
                    decisions=decisions,
                    rewards=rewards,
                    terminated=terminated,
                    truncated=truncated,
                    infos=infos,
                    turn=turn,
                )
            )
            self._restart(terminated | truncated)
        rollout = assemble(steps, plan)
        return rollout if final_values[0] is None else rollout.replace(final_values=torch.stack(final_values))

    def _step(
        self, decisions: Decisions, plan: CollectionPlan
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        text = isinstance(decisions.actions[0], str)
        actions: Any = tuple(decisions.actions) if text else np.asarray(decisions.actions)
        self._observations, rewards, terminated, truncated, infos = self.envs.step(actions)
        self._observations = rows_of(self._observations, self.envs)
        for played, action in zip(self._actions, decisions.actions, strict=True):
            played.append(action)
        self._memory = list(decisions.memory)
        self._returns, self._lengths = self._returns + rewards, self._lengths + 1
        if plan.max_turns is not None:
            truncated = truncated | ((self._lengths >= plan.max_turns) & ~terminated)
        figures: dict[str, np.ndarray] = numeric_infos(infos, len(self.env))
        figures |= {"episode_return": self._returns, "episode_length": self._lengths.astype(np.float64)}
        return rewards, terminated, truncated, figures

    def _values_behind(self, terminated: np.ndarray, truncated: np.ndarray, last: bool) -> Tensor | None:
        """What the states are worth that no turn of this collection follows, ``(env,)``; None without critic."""
        if not self.policy.has_critic:
            return None
        rows = np.flatnonzero(~terminated & (truncated | last))
        out = torch.zeros(len(self.env), dtype=torch.float32)
        if len(rows):
            observations = [self._observations[int(row)] for row in rows]
            values = self.policy.state_values(observations, [self._memory[row] for row in rows])
            out[torch.from_numpy(rows)] = values.float().cpu()
        return out

    def _seen(self) -> Sequence[Any]:
        return self._observations

    def _restart(self, ended: np.ndarray) -> None:
        if not ended.any():
            return
        for row in np.flatnonzero(ended):
            self._memory[row], self._actions[row] = (), []
        self._episode, self._lengths = self._episode + ended, np.where(ended, 0, self._lengths)
        self._returns = np.where(ended, 0.0, self._returns)
        self._reset(ended)

    def _reset(self, mask: np.ndarray) -> None:
        options: dict[str, Any] = {"episode": self._episode * self.total + self.env}
        if not mask.all():
            options["reset_mask"] = mask
        reset_seeds: Any = [int(seed) for seed in seeds("reset", self.seed, self._episode, self.env)]
        observations, _ = self.envs.reset(seed=reset_seeds, options=options)
        new = rows_of(observations, self.envs)
        if mask.all() or self._observations is None:
            self._observations = new
        elif isinstance(new, np.ndarray) and isinstance(self._observations, np.ndarray):
            self._observations = np.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, self._observations)
        else:
            self._observations = [n if m else o for n, o, m in zip(new, self._observations, mask, strict=True)]

    # -- resume ---------------------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        actions = [list(played) for played in self._actions]
        return {"episode": self._episode, "actions": actions, "memory": list(self._memory), "returns": self._returns}

    def state(self, collection: int) -> dict[str, Any]:
        """The running episodes as plain data: how many came before, the actions so far, what the policy remembers.

        Args:
            collection: the last one that counts. If another was begun, it is played again after a resume: the state is
                that at its beginning.
        """
        now = self._progress() if self._begun == collection else self._before
        return {
            "episode": now["episode"].tolist(),
            "returns": now["returns"].tolist(),
            "actions": [[_plain(action) for action in played] for played in now["actions"]],
            "memory": [[[turn.observation, turn.response] for turn in history] for history in now["memory"]],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Play the running episodes up to where they were, with the same seeds and actions.

        Episodes differ in length, and all environments are stepped together: each is reset when as many turns are
        left as its episode has. What it does before that, nobody looks at.

        Raises:
            ValueError: there are more or fewer environments now.
        """
        if len(state["episode"]) != len(self.env):
            raise ValueError(
                f"ckpt_path holds the episodes of {len(state['episode'])} environments per device, here are "
                f"{len(self.env)}; resume with the same data.num_envs."
            )
        self._episode = np.array(state["episode"], dtype=np.int64)
        self._actions = [list(played) for played in state["actions"]]
        self._lengths = np.array([len(played) for played in self._actions], dtype=np.int64)
        self._reset(np.ones(len(self.env), dtype=bool))
        longest = int(self._lengths.max())
        idle = next((played[0] for played in self._actions if played), None)
        ended = np.zeros(len(self.env), dtype=bool)
        for time in range(longest):
            begins = self._lengths == longest - time
            if time and (begins | ended).any():
                self._reset(begins | ended)
            places = time - (longest - self._lengths)
            actions = [
                played[place] if place >= 0 else idle
                for played, place in zip(self._actions, places.tolist(), strict=True)
            ]
            ended = self._replay(actions) & (places < 0)
        if longest and (ended | (self._lengths == 0)).any():
            self._reset(ended | (self._lengths == 0))
        self._memory = [tuple(PastTurn(*turn) for turn in history) for history in state["memory"]]
        self._returns = np.array(state["returns"])
        self._before = self._progress()

    def _replay(self, actions: Sequence[Any]) -> np.ndarray:
        space: Any = self.envs.single_action_space
        given: Any = tuple(actions) if isinstance(actions[0], str) else np.asarray(actions, dtype=space.dtype)
        observations, _, terminated, truncated, _ = self.envs.step(given)
        self._observations = rows_of(observations, self.envs)
        return terminated | truncated


def _plain(action: Any) -> Any:
    return action if isinstance(action, str) else np.asarray(action).tolist()
