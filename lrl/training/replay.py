"""Episodes of a sample played again, from their seeds and actions, by a loop that shares no code with training.

Environments of :class:`~lrl.envs.factory.GymnasiumEnvs` are played without the wrappers of this package. What these
wrappers add, such as the penalty of an invalid response, is written here a second time, and so are the rewards that
follow from the Q-values of a data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from lrl.codecs.codec import InvalidActionError, clip_to_space
from lrl.diagnosis.sample import Sample
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.prompt_env import PromptEnvs
from lrl.policies.policy import Policy
from lrl.prompts import get_response_format
from lrl.rewards.expert_q import OptimalActionReward, QGapReward
from lrl.rewards.reward import TIE_TOLERANCE

_EPISODES, _TURNS = 32, 128
"""Numbers of episodes and of turns; no more episodes are played again when both are reached."""
_REPEATED = 2
"""Number of these episodes that are played twice, to see whether the environment is deterministic."""
_NUMBERS = 64
"""Maximum number of numbers of a native observation that is compared with its text."""
_VALUES = 16
"""Maximum number of states after a cut whose values are computed again."""


@dataclass(frozen=True)
class Outcome:
    """Holds the outcome of a turn."""

    before: Any
    """Observation before the turn."""
    reward: float
    terminated: bool
    truncated: bool
    after: Any
    """Observation after the turn."""
    native: Any
    """Native observation before the turn; None if it is not known."""
    valid: float
    """Whether the response was a legal action; NaN if it is not known."""


class Replay:
    """Plays episodes again.

    Args:
        factory: factory of the training environment.
        response_format: name of the format of responses; None for native observations and actions.
        max_turns: number of turns after which episodes are truncated; None uses only the limit of the environment.
    """

    def __init__(self, factory: EnvFactory, response_format: str | None, max_turns: int | None = None) -> None:
        self.factory, self.max_turns = factory, max_turns
        self._format = None if response_format is None else get_response_format(response_format)
        self._single: Any = factory.make_native() if isinstance(factory, GymnasiumEnvs) else None
        self.facts: dict[str, Any] | None = None
        """What :func:`~lrl.training.environment_facts.facts` returns for the environment, once it is known."""
        self._vector: Any = None if self._single is not None else factory.make(1, response_format)

    @property
    def native_observation_space(self) -> Any:
        """Observation space of the environment of Gymnasium; None for other environments."""
        return None if self._single is None else self._single.observation_space

    def close(self) -> None:
        """Close the environment."""
        (self._vector if self._single is None else self._single).close()

    def play(self, origin: np.ndarray, actions: Sequence[Any]) -> Iterator[Outcome]:
        """Play one episode, and yield the outcomes of its turns, until it ends.

        Args:
            origin: seed, number and noise seed of the episode, int64 ``(3,)``.
            actions: actions of the turns, as vectorised environments take them.
        """
        seed, episode, noise = origin.tolist()
        for number, (before, native, outcome) in enumerate(self._turns(seed, episode, noise, actions)):
            after, reward, terminated, truncated, valid = outcome
            late = self.max_turns is not None and number + 1 >= self.max_turns and not terminated
            yield Outcome(before, float(reward), bool(terminated), bool(truncated or late), after, native, valid)
            if terminated or truncated or late:
                return

    def _turns(self, seed: int, episode: int, noise: int, actions: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
        if self._single is None:
            yield from self._vector_turns(seed, episode, noise, actions)
            return
        assert isinstance(self.factory, GymnasiumEnvs)
        env, codec, invalid = self._single, self.factory.codec, 0
        native, seen = self._reset(seed)
        text = seen
        if noise >= 0:
            env.unwrapped.np_random = seeding.np_random(noise)[0]
        context = None if self._format is None else codec.context(env)
        for action in actions:
            before, native_before = seen, native
            try:
                chosen = action
                if self._format is not None:
                    chosen = clip_to_space(env.action_space, codec.text_to_action(self._format.extract(action)))[0]
                native, reward, terminated, truncated, _ = env.step(chosen)
                invalid = 0
                seen = text = native if self._format is None else codec.observation_to_text(native, context)
            except InvalidActionError as error:
                invalid += 1
                seen = f"Invalid action: {error}.\n{text}"
                reward, truncated = self.factory.invalid_penalty, False
                terminated = invalid >= self.factory.max_invalid
            yield before, native_before, (seen, reward, terminated, truncated, invalid == 0)

    def start(self, seed: int) -> Any:
        """Return the first observation of an episode in an environment of Gymnasium, as the policy sees it."""
        return self._reset(seed)[1]

    def _reset(self, seed: int) -> tuple[Any, Any]:
        """Reset the environment of Gymnasium; return its native observation, and the one that the policy sees."""
        assert isinstance(self.factory, GymnasiumEnvs)
        native, _ = self._single.reset(seed=seed, options=self.factory.reset_options or None)
        if self._format is None:
            return native, native
        return native, self.factory.codec.observation_to_text(native, self.factory.codec.context(self._single))

    def _vector_turns(
        self, seed: int, episode: int, noise: int, actions: Sequence[Any]
    ) -> Iterator[tuple[Any, Any, Any]]:
        if noise >= 0:
            self._vector.set_attr("noise_seed", [noise])
        seen, _ = self._vector.reset(seed=[seed], options={"episode": np.array([episode])})
        for action in actions:
            before = seen[0]
            native = self._vector.rows[0].native_observation if isinstance(self.factory, PromptEnvs) else None
            batched = (action,) if isinstance(action, str) else np.asarray(action)[None]
            reward = self._expected_reward(action)
            seen, rewards, terminated, truncated, _ = self._vector.step(batched)
            first = rewards[0] if reward is None else reward
            yield before, native, (seen[0], first, terminated[0], truncated[0], math.nan)

    def _expected_reward(self, action: Any) -> float | None:
        """Return the reward of an action for the current row; None if it does not follow from Q-values."""
        if not isinstance(self.factory, PromptEnvs):
            return None
        rewards, q = self.factory.rewards, self._vector.rows[0].q_values
        if not all(isinstance(reward, OptimalActionReward | QGapReward) for reward in rewards):
            return None
        try:
            text = action if self._format is None else self._format.extract(action)
            chosen = int(action if self._format is None else self.factory.codec.text_to_action(text))
        except InvalidActionError:
            return sum(reward.weight * getattr(reward, "invalid", 0.0) for reward in rewards)
        gap, spread, total = max(q) - q[chosen], max(q) - min(q), 0.0
        for reward in rewards:
            best = float(gap <= TIE_TOLERANCE * abs(max(q)))
            if isinstance(reward, QGapReward):
                best = math.exp(-gap / (reward.temperature * spread)) if spread > TIE_TOLERANCE else 1.0
            total += reward.weight * best
        return total


def replay(sample: Sample, actions: Sequence[Any], again: Replay) -> tuple[dict[str, np.ndarray], dict[int, Any]]:
    """Play some episodes of a sample again.

    Args:
        sample: turns with their origin.
        actions: the action of each turn.
        again: plays the episodes.

    Returns:
        ``replay_rewards`` and others, see :class:`Sample`, and the observation after each turn that was played.
    """
    names = ("rewards", "terminated", "truncated", "observed", "repeats", "valid")
    out = {f"replay_{name}": np.full(len(sample), np.nan) for name in names}
    after: dict[int, Any] = {}
    natives: dict[int, Any] = {}
    for number, turns in enumerate(_whole_episodes(sample)):
        if number >= _EPISODES and len(after) >= _TURNS:
            break
        played = [list(again.play(sample["origin"][turns[0]], [actions[turn] for turn in turns]))]
        if number < _REPEATED:
            played.append(list(again.play(sample["origin"][turns[0]], [actions[turn] for turn in turns])))
        for turn, outcome, second in zip(turns.tolist(), played[0], played[-1], strict=False):
            recorded = sample.observations[turn]
            same = not recorded or str(outcome.before) == recorded
            values = (
                outcome.reward,
                outcome.terminated,
                outcome.truncated,
                same,
                _equal(outcome, second),
                outcome.valid,
            )
            for name, value in zip(names, values, strict=True):
                out[f"replay_{name}"][turn] = float(value)
            after[turn] = outcome.after
            numbers = _flat(outcome.native)
            if numbers is not None:
                natives.setdefault(len(numbers), np.full((len(sample), len(numbers)), np.nan))[turn] = numbers
    out["unreset"] = np.full(len(sample), np.nan)
    for turns in sample.envs():
        for turn, following in pairwise(map(int, turns)):
            if turn in after and sample["turn"][following] == 0 and out["replay_observed"][following] == 0:
                shown = sample.observations[following]
                out["unreset"][following] = float(bool(shown) and shown == str(after[turn]))
    if len(natives) == 1:
        out["replay_native"] = next(iter(natives.values()))
    return out, after


def final_values_of(policy: Policy, sample: Sample, after: Mapping[int, Any]) -> np.ndarray:
    """Return the values of the states after turns that are cut, ``(turn,)``; NaN where they are not computed.

    Args:
        policy: policy whose weights have not changed since the turns were sampled.
        sample: the turns.
        after: observation after each turn that was played again.
    """
    out = np.full(len(sample), np.nan)
    cut = [int(turn) for turn in np.flatnonzero(sample["cut"]) if int(turn) in after][:_VALUES]
    prompt = getattr(policy, "prompt", None)
    if cut and policy.has_critic and not (prompt is not None and prompt.history):
        out[cut] = policy.state_values([after[turn] for turn in cut], [()] * len(cut)).double().cpu().numpy()
    return out


def _flat(native: Any) -> np.ndarray | None:
    """Return an observation of a Box or Discrete space as numbers, float64 ``(number,)``; None for other spaces."""
    if not isinstance(native, int | np.integer | np.ndarray):
        return None
    numbers = np.array(native, dtype=np.float64).reshape(-1)
    return numbers if len(numbers) <= _NUMBERS else None


def _equal(one: Outcome, other: Outcome) -> bool:
    ends = (one.reward, one.terminated, one.truncated) == (other.reward, other.terminated, other.truncated)
    return ends and _same(one.before, other.before)


def _same(one: Any, other: Any) -> bool:
    """Return whether two observations are equal."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return str(one) == str(other)


def _whole_episodes(sample: Sample) -> Iterator[np.ndarray]:
    """Yield the turns of each episode that begins in the sample: the first of each environment, the last, and others.

    The last ones show how the end of a collection is treated.
    """
    episodes: list[list[np.ndarray]] = []
    for turns in sample.envs():
        starts = [place for place, turn in enumerate(turns) if sample["turn"][turn] == 0]
        episodes.append([turns[start:end] for start, end in pairwise([*starts, len(turns)])])
    ordered = [[*of_env[:1], *of_env[1:][-1:], *of_env[1:-1]] for of_env in episodes]
    for number in range(max(map(len, ordered), default=0)):
        yield from (of_env[number] for of_env in ordered if number < len(of_env))
