"""Exact success probability of a policy on FrozenLake, from its actions in each state and the transition table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.toy_text import Desc, FrozenLakeCodec, get_desc
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.native import close_env
from lrl.envs.tabular import TransitionTable, optimal_q, optimal_success, reachable_states, success_probability
from lrl.policies.actor import Actor
from lrl.prompts import get_response_format
from lrl.types import RandomKeys, SamplingConfig

_CHUNK = 1024
"""Maximum number of states in one call of the policy."""

_TIE = 1e-9
"""Q-values with a smaller difference count as equal, because value iteration stops with an error of this size."""

_PATIENCE = 100
"""Number of consecutive resets to known maps after which an environment is assumed to have no other map."""


@dataclass(frozen=True, kw_only=True)
class Lake:
    """Represents one map of an environment."""

    desc: Desc
    """The map, one text per row."""
    table: TransitionTable
    """Transition table of the map."""
    steps: int
    """Time limit of an episode, in steps."""

    @property
    def start(self) -> int:
        """The initial state of every episode."""
        return "".join(self.desc).index("S")

    @property
    def states(self) -> list[int]:
        """Non-terminal states that an agent can reach, in ascending order."""
        return reachable_states(self.table, self.start)

    @property
    def optimum(self) -> float:
        """Success probability of the optimal policy, which may depend on the remaining time."""
        return optimal_success(self.table, self.steps, self.start)

    @property
    def q_values(self) -> np.ndarray:
        """Q-values of the optimal stationary policy, float64 ``(state, action)``."""
        return optimal_q([self.table])[0]

    @property
    def best_stationary(self) -> float:
        """Success probability of the greedy policy with respect to :attr:`q_values`."""
        return self.success(np.eye(self.table.num_actions)[self.q_values.argmax(-1)])

    def success(self, decisions: np.ndarray) -> float:
        """Return the probability of success within the time limit.

        Args:
            decisions: action probabilities ``(state, action)``; if a row sums to less than 1, the rest is the
                probability of invalid responses, which count as failures.
        """
        return success_probability(self.table, decisions, self.steps, self.start)


@dataclass(frozen=True, kw_only=True)
class ExactResults:
    """Holds the exact results of a policy on some maps."""

    lakes: Sequence[Lake]
    """The maps."""
    decisions: Sequence[np.ndarray]
    """For each map, action probabilities ``(state, action)``; 0 in states that cannot be reached."""

    @property
    def success(self) -> np.ndarray:
        """Success probability of the policy on each map, float64 ``(map,)``."""
        return np.array([lake.success(d) for lake, d in zip(self.lakes, self.decisions, strict=True)])

    @property
    def optimum(self) -> np.ndarray:
        """Success probability of the optimal policy on each map, float64 ``(map,)``."""
        return np.array([lake.optimum for lake in self.lakes])


def wrong_states(lake: Lake, greedy: np.ndarray, sampled: np.ndarray) -> list[str]:
    """Describe the states in which the greedy action is not optimal, in ascending order.

    The greedy action of a policy that writes text need not be its most probable action: several texts can name the same
    action, and the most probable first token can lead to an improbable text.

    Args:
        lake: the map.
        greedy: action probabilities ``(state, action)`` of greedy decoding; a row of zeros is an invalid response.
        sampled: action probabilities ``(state, action)`` of sampling; if a row sums to less than 1, the rest is the
            probability of invalid responses.

    Returns:
        For each state its position, the greedy action and the optimal actions, with the probabilities of sampling them.
    """
    q, names, wrong = lake.q_values, FrozenLakeCodec().action_texts, list[str]()
    for state in lake.states:
        best = np.flatnonzero(q[state] >= q[state].max() - _TIE)
        chosen, shares = (np.append(row[state], 1 - row[state].sum()) for row in (greedy, sampled))  # last: invalid
        action = int(chosen.argmax())
        if action in best:
            continue
        row, column = divmod(state, len(lake.desc[0]))
        wrong.append(
            f"row {row} column {column}: {[*names, 'an invalid response'][action]} has {shares[action]:.2f}, "
            f"{' or '.join(names[action] for action in best)} (best) {sampled[state, best].sum():.2f}"
        )
    return wrong


def is_frozen_lake(envs: EnvFactory) -> TypeGuard[GymnasiumEnvs]:
    """Return whether the environment is FrozenLake, in which a policy can be evaluated exactly."""
    return isinstance(envs, GymnasiumEnvs) and isinstance(envs.codec.unwrapped, FrozenLakeCodec)


def lakes_of(envs: EnvFactory, num_maps: int = 1, seed: int = 10_000) -> list[Lake]:
    """Return the different maps on which episodes are played, in the order of their seeds.

    Args:
        envs: a FrozenLake.
        num_maps: maximum number of maps; the environment may have fewer.
        seed: seed of the first episode.

    Raises:
        ValueError: If the environment is not FrozenLake.
    """
    if not is_frozen_lake(envs):
        name = getattr(envs, "id", type(envs).__name__)
        raise ValueError(f"env is {name!r}, which has no transition table; exact success needs a FrozenLake.")
    native, lakes = envs.make_native(), dict[Desc, Lake]()
    steps = native.spec.max_episode_steps if native.spec and native.spec.max_episode_steps else 100
    misses = 0
    while len(lakes) < num_maps and misses < _PATIENCE:
        native.reset(seed=seed)
        seed, desc = seed + 1, get_desc(native)
        misses = misses + 1 if desc in lakes else 0
        if desc not in lakes:
            table = TransitionTable.from_gymnasium(native.unwrapped.P)  # pyright: ignore[reportAttributeAccessIssue]
            lakes[desc] = Lake(desc=desc, table=table, steps=steps)
    close_env(native)
    return list(lakes.values())


def exact_evaluation(
    policy: Actor, lakes: Sequence[Lake], sampling: SamplingConfig | None = None, samples: int = 1, seed: int = 0
) -> ExactResults:
    """Estimate a policy's action probabilities in every state of every map, with an empty history.

    Args:
        policy: connected and configured policy; if it acts natively, its observations are the indices of the states.
        lakes: maps, see :func:`lakes_of`.
        sampling: sampling settings; None decodes greedily.
        samples: number of responses per state, whose frequencies are the probabilities.
        seed: seed of the responses.
    """
    states = [(number, state) for number, lake in enumerate(lakes) for state in lake.states]
    assert policy.codec is not None
    # A policy that plays in an environment at a URL has another codec than FrozenLake's.
    codec = policy.codec if isinstance(policy.codec.unwrapped, FrozenLakeCodec) else FrozenLakeCodec()
    form = None if policy.response_format is None else get_response_format(policy.response_format)
    observations = [
        state if form is None else codec.observation_to_text(state, lakes[number].desc) for number, state in states
    ]
    sampling = policy.sampling_at(0.0) if sampling is None else sampling
    decisions = [np.zeros((lake.table.num_states, lake.table.num_actions)) for lake in lakes]
    for begin in range(0, len(states) * samples, _CHUNK):
        chunk = np.arange(begin, min(begin + _CHUNK, len(states) * samples))
        row = chunk // samples
        keys = RandomKeys(seed=seed, purpose="exact", collection=0, env=row, turn=chunk % samples)
        asked = [observations[index] for index in row.tolist()]
        for index, action in zip(row, policy.act(asked, [()] * len(chunk), keys, sampling).actions, strict=True):
            number, state = states[index]
            with suppress(InvalidActionError):  # an invalid response is no decision
                chosen = int(action) if form is None else codec.text_to_action(form.extract(action))
                decisions[number][state, chosen] += 1 / samples
    return ExactResults(lakes=lakes, decisions=decisions)
