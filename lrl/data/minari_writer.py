"""Play episodes and keep them as a Minari data set: native observations and actions, and what a codec needs beside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from lrl.codecs.codec import TextCodec
from lrl.data.minari_storage import DatasetWriter
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.native import NativeStart, NativeStep
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy
from lrl.policies.actor import Actor
from lrl.policies.baselines.random_actions import NoisyActor, RandomAnswer
from lrl.types import SamplingConfig

_CHUNK = 64
"""Episodes that are written together."""


@dataclass
class RecordedEpisode:
    """One episode as it is played; answers that were no legal action are not part of it."""

    index: int
    seed: int
    context: Any
    observations: list[Any]
    """Native, one more than there are steps."""
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminations: list[bool] = field(default_factory=list)
    truncations: list[bool] = field(default_factory=list)
    success: bool = False
    random_steps: list[int] = field(default_factory=list)
    """Where :class:`~lrl.policies.baselines.random_actions.NoisyActor` put an action in."""
    advised: list[str | None] = field(default_factory=list)
    """The action, in words, that it did not take there."""

    def add(self, step: NativeStep, terminated: bool, truncated: bool, answer: Any = None) -> None:
        """One more step. Copied: an environment may go on writing into what it has handed out."""
        if isinstance(answer, RandomAnswer):
            self.random_steps.append(len(self.actions))
            self.advised.append(answer.advised)
        self.actions.append(copy.deepcopy(step.action))
        self.observations.append(copy.deepcopy(step.observation))
        self.rewards.append(step.reward)
        self.terminations.append(terminated)
        self.truncations.append(truncated)

    def end(self, success: bool) -> None:
        """Close it. Too many illegal answers end an episode that the native environment would have gone on with."""
        self.success = success
        if self.actions and not (self.terminations[-1] or self.truncations[-1]):
            self.truncations[-1] = True


class EpisodeRecorder(VectorWrapper):
    """Vectorised environments that hand over each episode at its end.

    Args:
        envs: of :class:`~lrl.envs.text.TextEnv` or :class:`~lrl.envs.native.NativeEnv`. A reset's options say under
            ``episode`` which episode each plays.
        on_episode: takes the episodes, in the order of their ends; each once, though idle environments are reset again.
    """

    def __init__(self, envs: VectorEnv, on_episode: Callable[[RecordedEpisode], None]) -> None:
        super().__init__(envs)
        self.set_attr("records", True)
        self._on_episode = on_episode
        self._running: dict[int, RecordedEpisode] = {}
        self._begun: set[int] = set()

    def set_attr(self, name: str, values: Any) -> None:
        """Of every environment."""
        vectorised: Any = self.env  # Gymnasium does not type set_attr, and its wrapper does not pass it on
        vectorised.set_attr(name, values)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes where the mask says so."""
        assert options is not None
        observations, infos = self.env.reset(seed=seed, options=options)
        for slot in np.flatnonzero(infos["_native"]).tolist():
            index, start = int(options["episode"][slot]), infos["native"][slot]
            if index not in self._begun:
                self._begun.add(index)
                self._running[slot] = _begin(index, int(seed[slot]), start)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step, and record what was legal."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        legal = infos.get("_native", np.zeros(self.num_envs, dtype=bool))
        for slot, episode in list(self._running.items()):
            if legal[slot]:
                ended = bool(terminated[slot]), bool(truncated[slot])
                episode.add(infos["native"][slot], *ended, actions[slot])
            if terminated[slot] or truncated[slot]:
                episode.end(bool(infos["success"][slot]))
                self._on_episode(self._running.pop(slot))
        return observations, rewards, terminated, truncated, infos


def _begin(index: int, seed: int, start: NativeStart) -> RecordedEpisode:
    return RecordedEpisode(index, seed, start.context, [copy.deepcopy(start.observation)])


class RecordedEnvs(EnvFactory):
    """Another factory's environments, recorded.

    Args:
        env: makes them.
        on_episode: see :class:`EpisodeRecorder`.
    """

    def __init__(self, env: EnvFactory, on_episode: Callable[[RecordedEpisode], None]) -> None:
        self.env, self.on_episode = env, on_episode

    @property
    def codec(self) -> TextCodec:
        """Of the environments."""
        return self.env.codec

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """See :meth:`EnvFactory.make`."""
        return EpisodeRecorder(self.env.make(num_envs, response_format), self.on_episode)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was played, and how much of it was kept."""

    results: EpisodeResults
    """Of all episodes that were played."""
    episodes: int
    """Kept; an episode without a legal action has no step to keep."""
    steps: int
    """Kept."""


def collect(
    policy: Actor,
    env: GymnasiumEnvs,
    dataset_id: str,
    episodes: int,
    seed: int,
    num_envs: int = 1,
    *,
    name: str,
    commit: str,
    sampling: SamplingConfig | None = None,
    random_share: float = 0.0,
    successful_only: bool = False,
    on_episode: Callable[[], None] | None = None,
) -> Collected:
    """Play episodes ``0 .. episodes - 1``, each to its end, and write them as a Minari data set in this order.

    What is written are native observations and actions, whether the policy answers in text or acts natively. The data
    set does not depend on ``num_envs``, up to rounding in a network's matrix products. It is written whole or not at
    all.

    Args:
        policy: connected and configured.
        env: where it plays.
        dataset_id: Minari's name of the data set.
        episodes: how many are played.
        seed: of the first episode; episode ``i`` is reset with ``seed + i``.
        num_envs: environments side by side, which pays where a language model decides.
        name: of the policy, for the metadata.
        commit: of the code, for the metadata.
        sampling: how the policy decides; None takes its own way.
        random_share: of turns in which a random action is taken instead; such steps are kept, and marked as no
            demonstrations. Only for a policy that answers in text.
        successful_only: keep only what the environment calls a success.
        on_episode: called at the end of each episode.

    Raises:
        ValueError: the name is malformed or taken, a number is not positive, or there is nothing to keep.
    """
    native = env.make_native()
    native.close()
    if random_share or policy.response_format is not None:
        policy = NoisyActor(policy, random_share)
    with DatasetWriter(dataset_id, native.observation_space, native.action_space, native.spec) as writer:
        kept = _InOrder(writer, successful_only)
        results = evaluate_policy(
            policy, RecordedEnvs(env, kept.take), episodes, seed, num_envs, sampling, on_episode=on_episode
        )
        kept.write()
        if not kept.returns:
            raise ValueError(
                f"--episodes is {episodes}, of which none can be kept: {int(results.successes.sum())} were successful "
                f"and {int((results.lengths > results.invalid_actions).sum())} had a legal action."
            )
        about = {"policy": name, "commit": commit, "random_share": random_share, "successful_only": successful_only}
        writer.finish(_metadata(kept, results, env, about))
    return Collected(results=results, episodes=len(kept.returns), steps=kept.steps)


class _InOrder:
    """Writes episodes in the order of their seeds, whatever the order of their ends."""

    def __init__(self, writer: DatasetWriter, successful_only: bool) -> None:
        self.writer, self.successful_only = writer, successful_only
        self.steps = self._next = 0
        self.returns: list[float] = []
        """Of the episodes that are kept, native rewards only."""
        self._ended: dict[int, RecordedEpisode] = {}
        self._chunk: list[RecordedEpisode] = []

    def take(self, episode: RecordedEpisode) -> None:
        """Keep an episode until those before it have ended."""
        self._ended[episode.index] = episode
        while self._next in self._ended:
            ended = self._ended.pop(self._next)
            self._next += 1
            if ended.actions and (ended.success or not self.successful_only):
                self._chunk.append(ended)
        if len(self._chunk) >= _CHUNK:
            self.write()

    def write(self) -> None:
        """Write what is due."""
        self.writer.add([vars(episode) for episode in self._chunk])
        self.returns += [sum(episode.rewards) for episode in self._chunk]
        self.steps += sum(len(episode.actions) for episode in self._chunk)
        self._chunk = []


def _metadata(kept: _InOrder, results: EpisodeResults, env: GymnasiumEnvs, about: dict[str, Any]) -> dict[str, Any]:
    """Minari's own fields, and ours under ``lrl``."""
    mean = float(np.mean(kept.returns))
    description = f"{about['policy']} in {env.id}: {len(kept.returns)} episodes, mean return {mean:.4g}"
    ours = about | {
        "return_mean": mean,
        "seed": results.seed,
        "played_episodes": len(results),
        "played_success_rate": float(results.successes.mean()),
        "env_kwargs": env.kwargs,
        "reset_options": env.reset_options,
    }
    return {"algorithm_name": about["policy"], "description": description, "lrl": ours}
