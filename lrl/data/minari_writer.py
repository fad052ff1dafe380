"""Collection of episodes as Minari data sets, and statistics of their observations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import Range, Ranges
from lrl.codecs.space_formats import flatten
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter
from lrl.envs.native import NativeStep, close_env
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy
from lrl.policies.actor import Actor
from lrl.policies.baselines import ExpertActor, NoisyActor
from lrl.prompts import get_response_format
from lrl.rollouts.runner import Step
from lrl.types import RandomKeys, SamplingConfig


@final
class Advisor:
    """Returns greedy actions of one actor in the states that another actor reaches, for DAgger (arXiv:1011.0686).

    Args:
        actor: connected and configured advisor. It acts natively, or is an
            :class:`~lrl.policies.baselines.ExpertActor`, which reads the policy's text observations.
        policy: the actor whose actions are executed.

    Raises:
        ValueError: If the advisor responds in text and is not an ``ExpertActor``, or is an ``ExpertActor`` and the
            policy has no text observations.
    """

    def __init__(self, actor: Actor, policy: Actor) -> None:
        if actor.response_format is not None and not isinstance(actor, ExpertActor):
            raise ValueError(
                f"advisor is a {type(actor).__name__}, which responds in text; it must be expert, or a run that acts "
                "natively."
            )
        if actor.response_format is not None and policy.response_format is None:
            raise ValueError("advisor is expert, but policy acts natively; it must be a run that acts natively.")
        self.actor = actor

    def advise(self, shown: Sequence[Any], native: Sequence[Any], episodes: np.ndarray, turn: np.ndarray) -> list[Any]:
        """Return the advisor's native actions.

        Args:
            shown: observations that the policy received, one per row.
            native: native observations of the same states.
            episodes: indices of the episodes, int64 ``(row,)``.
            turn: index of the current turn of each episode, int64 ``(row,)``.
        """
        actor, codec = self.actor, self.actor.codec
        assert codec is not None, "connect() must be called before"
        observations = native if actor.response_format is None else shown
        keys = RandomKeys(seed=0, purpose="advice", collection=0, env=episodes, turn=turn)
        actions = actor.act(observations, [()] * len(observations), keys, actor.sampling_at(0.0)).actions
        if actor.response_format is None:
            return list(actions)
        extract = get_response_format(actor.response_format).extract
        return [codec.text_to_action(extract(response)) for response in actions]


_CHUNK = 64
"""Number of episodes that are written together."""


@dataclass
class RecordedEpisode:
    """Holds the steps of one episode; turns without a legal action are omitted."""

    index: int
    """Index of the episode among the played ones."""
    seed: int
    """Seed with which the episode was reset."""
    context: Any = None
    """What the codec must know about the episode to write its observations, such as the map; None if nothing."""
    observations: list[Any] = field(default_factory=list)
    """Native observations: the first one, and the one after each step."""
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminations: list[bool] = field(default_factory=list)
    truncations: list[bool] = field(default_factory=list)
    success: bool = False
    random_steps: list[int] = field(default_factory=list)
    """Indices of steps whose action :class:`~lrl.policies.baselines.NoisyActor` sampled at random."""
    advised_actions: dict[int, Any] = field(default_factory=dict)
    """Native actions by step: with an advisor its actions, otherwise the policy's own at the steps in ``random_steps``.

    An illegal action of the policy is left out.
    """
    has_advisor: bool = False
    """Whether an advisor chose the advised actions, in which case there is one for every step."""

    def add(self, step: NativeStep, terminated: bool, truncated: bool) -> None:
        """Add a step.

        Args:
            step: step of the native environment.
            terminated: whether the episode terminated.
            truncated: whether it was truncated.
        """
        if not self.actions:
            self.context, self.observations = step.context, [step.before]
        self.actions.append(step.action)
        self.observations.append(step.observation)
        self.rewards.append(step.reward)
        self.terminations.append(terminated)
        self.truncations.append(truncated)

    def end(self, success: bool) -> None:
        """End the episode.

        If invalid actions ended the episode, none of the recorded steps terminated or truncated it. The last recorded
        step is then marked as truncated.
        """
        self.success = success
        if self.actions and not (self.terminations[-1] or self.truncations[-1]):
            self.truncations[-1] = True


@final
class _RecordedEnvs(EnvFactory):
    """Factory of environments that report native steps in their infos and are prepared for an advisor."""

    def __init__(self, env: EnvFactory, advisor: Advisor | None) -> None:
        self.env, self.advisor, self.success_at = env, advisor, env.success_at

    @property
    def codec(self) -> TextCodec:
        """The codec of the environments."""
        return self.env.codec

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """Make environments that record their native steps."""
        envs: Any = self.env.make(num_envs, response_format)  # Gymnasium does not type set_attr
        envs.set_attr("records", True)
        if self.advisor is not None:
            self.advisor.actor.prepare(envs)
        return envs


@dataclass(frozen=True, kw_only=True)
class CollectionSummary:
    """Describes a collected data set."""

    results: EpisodeResults
    """Results of all episodes that were played."""
    episodes: int
    """Number of episodes written; episodes without a legal action are not written."""
    steps: int
    """Number of steps written."""


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
    advisor: Actor | None = None,
    advisor_name: str | None = None,
    successful_only: bool = False,
    on_episode: Callable[[], None] | None = None,
) -> CollectionSummary:
    """Play episodes ``0 .. episodes - 1`` to their end, and write them as a Minari data set in this order.

    Observations and actions are native, even if the policy responds in text. The data set does not depend on
    ``num_envs``, except for rounding in a network's matrix products. After an error or an interruption, the episodes
    that have ended are kept under another name, which the error or a warning reports.

    Args:
        policy: connected and configured policy.
        env: factory of the environments.
        dataset_id: Minari's name of the data set.
        episodes: number of episodes to play.
        seed: seed of the first episode; episode ``i`` is reset with ``seed + i``.
        num_envs: number of parallel environments; several are faster with a language model.
        name: name of the policy, for the metadata.
        commit: commit of the code, for the metadata.
        sampling: replaces the policy's sampling settings; None keeps them.
        random_share: share of turns with a random action; these steps are written, but are not demonstrations.
        advisor: connected and configured advisor, whose greedy action is stored in addition for each step.
        advisor_name: name of the advisor, for the metadata.
        successful_only: whether to write only successful episodes.
        on_episode: called at the end of each episode.

    Raises:
        ValueError: If the name is malformed or taken, a number is not positive, the advisor cannot advise this policy,
            no episode can be written, or the data set cannot be written.
    """
    advice = None if advisor is None else Advisor(advisor, policy)
    native = env.make_native()
    close_env(native)
    if random_share or policy.response_format is not None:
        policy = NoisyActor(policy, random_share)
    with DatasetWriter(dataset_id, native.observation_space, native.action_space, native.spec) as writer:
        recorder, envs = _Recorder(writer, seed, successful_only, advice), _RecordedEnvs(env, advice)
        try:
            results = evaluate_policy(
                policy, envs, episodes, seed, num_envs, sampling, on_episode=on_episode, on_step=recorder.add
            )
            recorder.write()
        except BaseException:  # also keep the episodes after an interruption
            recorder.write_singly()
            raise
        if not recorder.returns:
            raise ValueError(
                f"episodes is {episodes}, but none can be written: {int(results.successes.sum())} were successful "
                f"(successful_only is {successful_only}) and {int((results.lengths > results.invalid_actions).sum())} "
                "had a legal action."
            )
        about = {"policy": name, "commit": commit, "random_share": random_share, "successful_only": successful_only}
        about |= {} if advisor_name is None else {"advisor": advisor_name}
        about |= {"temperature": policy.sampling.temperature if sampling is None else sampling.temperature}
        writer.finish(_metadata(recorder, results, env, about))
    return CollectionSummary(results=results, episodes=len(recorder.returns), steps=recorder.steps)


@final
class _Recorder:
    """Records episodes and writes them in the order of their seeds, even if they end in another order."""

    def __init__(self, writer: DatasetWriter, seed: int, successful_only: bool, advisor: Advisor | None) -> None:
        self.writer, self.seed, self.successful_only, self.advisor = writer, seed, successful_only, advisor
        self.steps = self._next = 0
        self.returns: list[float] = []
        """Returns of the written episodes, from native rewards only."""
        self._running: dict[int, RecordedEpisode] = {}
        self._ended: dict[int, RecordedEpisode] = {}
        self._chunk: list[RecordedEpisode] = []

    def add(self, episodes: np.ndarray, step: Step) -> None:
        """Record a step.

        Args:
            episodes: index of the episode of each row, int64 ``(row,)``.
            step: the step; rows with an illegal action have no native step.
        """
        native: Any = step.infos.get("native", [None] * len(episodes))
        for index in episodes.tolist():
            new = RecordedEpisode(index, self.seed + index, has_advisor=self.advisor is not None)
            self._running.setdefault(index, new)
        self._advise(episodes, step, native)
        for row, index in enumerate(episodes.tolist()):
            episode, native_step = self._running[index], native[row]
            if isinstance(native_step, NativeStep):
                if row in step.decisions.replaced:
                    episode.random_steps.append(len(episode.actions))
                    if not episode.has_advisor and step.decisions.replaced[row] is not None:
                        episode.advised_actions[len(episode.actions)] = step.decisions.replaced[row]
                episode.add(native_step, bool(step.terminated[row]), bool(step.truncated[row]))
            if step.ended[row]:
                episode.end(bool(step.infos["success"][row]))
                self._ended[index] = self._running.pop(index)
        while self._next in self._ended:
            ended = self._ended.pop(self._next)
            self._next += 1
            if self._is_kept(ended):
                self._chunk.append(ended)
        if len(self._chunk) >= _CHUNK:
            self.write()

    def _advise(self, episodes: np.ndarray, step: Step, native: Sequence[Any]) -> None:
        """Record the advisor's actions in the states in which a legal action was taken."""
        rows = [row for row, native_step in enumerate(native) if isinstance(native_step, NativeStep)]
        if self.advisor is None or not rows:
            return
        running = [self._running[index] for index in episodes[rows].tolist()]
        shown, before = [step.observations[row] for row in rows], [native[row].before for row in rows]
        actions = self.advisor.advise(shown, before, episodes[rows], step.turn[rows])
        for episode, action in zip(running, actions, strict=True):
            episode.advised_actions[len(episode.actions)] = action

    def write(self) -> None:
        """Write the buffered episodes."""
        self.writer.add([vars(episode) for episode in self._chunk])
        self.returns += [sum(episode.rewards) for episode in self._chunk]
        self.steps += sum(len(episode.actions) for episode in self._chunk)
        self._chunk = []

    def write_singly(self) -> None:
        """Write all ended episodes one by one, skipping those that cannot be written."""
        ended = [*self._chunk, *(self._ended[index] for index in sorted(self._ended))]
        for episode in ended:
            if self._is_kept(episode):
                with suppress(Exception):  # the error that interrupted the collection is raised afterwards
                    self.writer.add([vars(episode)])

    def _is_kept(self, episode: RecordedEpisode) -> bool:
        return bool(episode.actions) and (episode.success or not self.successful_only)


def _metadata(
    recorder: _Recorder, results: EpisodeResults, env: GymnasiumEnvs, about: Mapping[str, str | float]
) -> dict[str, Any]:
    """Return Minari's metadata, and further metadata under the key ``lrl``."""
    mean = float(np.mean(recorder.returns))
    description = f"{about['policy']} in {env.id}: {len(recorder.returns)} episodes, mean return {mean:.4g}"
    ours = dict(about) | {
        "return_mean": mean,
        "seed": results.seed,
        "played_episodes": len(results),
        "played_success_rate": float(results.successes.mean()),
        "env_kwargs": env.kwargs,
        "reset_options": env.reset_options,
    }
    return {"algorithm_name": about["policy"], "description": description, "lrl": ours}


# Ranges and statistics of observed numbers, which scale or normalise the numbers in text observations.


def observation_ranges(dataset_id: str) -> Ranges:
    """Return the minimum and maximum of every observed number, for ``env.numbers.ranges``.

    As part of the configuration they are saved with the policy, so that training and evaluation use the same scale.

    Args:
        dataset_id: Minari's name of a local data set.

    Returns:
        One ``(low, high)`` per dimension of a Box; a constant number ``c`` has ``(c - 0.5, c + 0.5)``. For a Dict or
        Tuple, a dict from the key of each Box to such a list.

    Raises:
        ValueError: If the data set is missing, empty or damaged, or its observations contain no Box.
    """
    ranges: dict[str, list[Range]] = {}
    for path, episodes in _statistics_of_episodes(dataset_id).items():
        low, high = episodes["min"].min(0), episodes["max"].max(0)
        margin = np.where(low == high, 0.5, 0.0)
        ranges[path] = [*zip((low - margin).tolist(), (high + margin).tolist(), strict=True)]
    return ranges.get("", ranges)


def observation_statistics(dataset_id: str) -> Ranges:
    """Return mean and standard deviation of every observed number, for ``env.numbers.statistics``.

    Args:
        dataset_id: Minari's name of a local data set, for example one of random actions.

    Returns:
        One ``(mean, deviation)`` per dimension of a Box; the deviation of a constant number is 1. For a Dict or Tuple,
        a dict from the key of each Box to such a list.

    Raises:
        ValueError: If the data set is missing, empty or damaged, or its observations contain no Box.
    """
    statistics: dict[str, list[Range]] = {}
    for path, episodes in _statistics_of_episodes(dataset_id).items():
        weights = episodes["count"][:, 0]
        mean = np.average(episodes["mean"], 0, weights)
        variance = np.average(episodes["var"] + (episodes["mean"] - mean) ** 2, 0, weights)  # law of total variance
        deviation = np.sqrt(variance)
        deviation = np.where(deviation > _CONSTANT * np.abs(mean), deviation, 1.0)
        statistics[path] = [*zip(mean.tolist(), deviation.tolist(), strict=True)]
    return statistics.get("", statistics)


_CONSTANT = 1e-9
"""Standard deviation, relative to the mean, up to which a number counts as constant in spite of rounding."""


def _statistics_of_episodes(dataset_id: str) -> dict[str, dict[str, np.ndarray]]:
    """Return statistics of the numbers that were observed in each episode.

    Returns:
        For each Box the statistics ``count``, ``min``, ``max``, ``mean`` and ``var``, each float64
        ``(episode, dimension)``. The key is the path of the Box, which is empty if the Box is the whole space.
    """
    reader = DatasetReader(dataset_id)
    space = reader.observation_space
    boxes = [path for path, leaf in flatten(space, space) if isinstance(leaf, spaces.Box)]
    if not boxes:
        raise ValueError(
            f"dataset_id is {dataset_id!r}, whose observation space is {space}; the space must be a Box or contain one."
        )
    found: dict[str, dict[str, list[np.ndarray]]] = {path: defaultdict(list) for path in boxes}
    for index in np.flatnonzero(reader.lengths).tolist():
        steps = [dict(flatten(space, observation)) for observation in reader.episode(index).observations]
        for path in boxes:
            values = np.reshape([step[path] for step in steps], (len(steps), -1)).astype(np.float64)
            found[path]["count"].append(np.full(values.shape[1], len(values)))
            for name in ("min", "max", "mean", "var"):
                found[path][name].append(getattr(values, name)(0))
    return {path: {name: np.array(rows) for name, rows in episodes.items()} for path, episodes in found.items()}
