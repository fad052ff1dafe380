"""Sources of demonstrations: the interface, experts with known Q-values, concatenation, and data augmentation."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import ActType, ObsType

from lrl.codecs.babyai import COLORS, HELD_OUT, OBJECTS
from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.prompt_env import RowSource
from lrl.functional.random import counter_hash, permutation
from lrl.policies.policy import Policy
from lrl.ranges import PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Demonstration, LazySequence


class Demonstrations(ABC):
    """Abstract source of demonstrations."""

    has_native_turns: bool = False
    """Whether :meth:`load` returns native observations and actions for a policy that acts natively.

    Native values belong to the spaces of the environment, in contrast to texts.
    """

    @property
    def sources(self) -> Sequence[Demonstrations]:
        """The sources that these demonstrations consist of; by default only this one."""
        return (self,)

    def prepare_data(self) -> None:  # noqa: B027 (most sources have nothing to download)
        """Download the data set if needed. Called once per machine, before all other methods.

        Failures are reported by :meth:`load`.
        """

    def validate(self, env: EnvFactory) -> None:  # noqa: B027 (most sources have nothing to compare)
        """Check that the demonstrations fit an environment. Called before :meth:`load`.

        Raises:
            ValueError: If observations or actions do not fit the environment.
        """

    def check_held_out(self, training: Demonstrations) -> None:  # noqa: B027 (most sources have no check)
        """Check that none of these held-out demonstrations are training demonstrations. Called at loading.

        Raises:
            ValueError: If a demonstration is also a training demonstration.
        """

    @abstractmethod
    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Return observations with the demonstrated responses.

        Args:
            codec: codec of the environment.
            policy: policy that formats responses; its model need not be loaded yet.

        Raises:
            ValueError: If the demonstrations are missing, damaged or too few, or cannot be written as text.
        """


class LazyDemonstrations(LazySequence[Demonstration]):
    """Abstract sequence of demonstrations that are not all in memory."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that identifies the demonstrations, for the cache of their tokens."""

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return all indices in a shuffled order, int64 ``(turn,)``.

        The turns of an episode should be close together, so that each stored episode is read once per epoch.
        """
        return permutation(len(self), "demonstrations", seed, epoch)


class Reasoning:
    """Writes the reasoning of demonstrated responses, for response formats with reasoning.

    Args:
        texts: templates, one of which is sampled per response; ``{seen}`` is replaced by the codec's summary of the
            observation, ``{ahead}`` by the object directly ahead (BabyAI only), ``{action}`` by the action.

    Raises:
        ValueError: If ``texts`` is empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not texts:
            raise ValueError(
                'demonstrations.reasoning is []; it must have at least one text (use [""] for no reasoning).'
            )
        self.texts = tuple(texts)

    def write_response(
        self, policy: Policy, codec: TextCodec, observation: str, action_text: str, random_bits: int
    ) -> str:
        """Return a response in the format of ``policy``, with the template that ``random_bits`` select."""
        template = self.texts[random_bits % len(self.texts)].replace("{action}", action_text)
        template = template.replace("{seen}", codec.summary(observation))
        if "{ahead}" in template:
            template = template.replace("{ahead}", codec.ahead(observation))
        return policy.write(action_text, template)


@register
class ExpertDemonstrations(Demonstrations):
    """Demonstrates an action with the highest Q-value in every row, or the row's action if there are no Q-values.

    Ties are broken at random.

    Args:
        rows: states with the actions of an expert.
        reasoning: templates of the text before the action, for response formats with reasoning; see :class:`Reasoning`.
        repeat: number of demonstrations per row, each with its own random choices.
        seed: seed of the random choices.
    """

    def __init__(
        self,
        rows: RowSource,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        repeat: PositiveInt = 1,
        seed: int = 0,
    ) -> None:
        check_arguments(ExpertDemonstrations.__init__, locals(), "demonstrations")
        self.rows, self.reasoning, self.repeat, self.seed = rows, Reasoning(reasoning), repeat, seed

    def load(self, codec: TextCodec, policy: Policy) -> list[Demonstration]:
        """Return one demonstration per row and repetition."""
        rows = self.rows.rows()
        random_bits = counter_hash("demonstration", self.seed, np.arange(len(rows) * self.repeat))
        demonstrations = []
        for index, bits in enumerate(random_bits.tolist()):
            row = rows[index % len(rows)]
            actions = row.best_actions or (row.action,)
            action_text = codec.action_to_text(actions[bits % len(actions)])
            # The upper bits choose the template, so that it is independent of the action, which the lower bits choose.
            response = self.reasoning.write_response(policy, codec, row.observation, action_text, bits >> 32)
            demonstrations.append(Demonstration(row.observation, response))
        return demonstrations


@register
@final
class ConcatDemonstrations(Demonstrations):
    """Combines several sources of demonstrations of one environment, and shuffles all demonstrations together.

    For example, an expert's own episodes can be combined with its advice in episodes of another policy.

    Args:
        sources: the sources.

    Raises:
        ValueError: If ``sources`` is empty.
    """

    def __init__(self, sources: list[Demonstrations]) -> None:
        check_arguments(ConcatDemonstrations.__init__, locals(), "demonstrations")
        if not sources:
            raise ValueError("demonstrations.sources is []; it must contain at least one source.")
        self._sources = tuple(sources)
        self.has_native_turns = all(source.has_native_turns for source in sources)

    @property
    def sources(self) -> Sequence[Demonstrations]:
        """All sources, with nested ``ConcatDemonstrations`` replaced by their parts."""
        return [part for source in self._sources for part in source.sources]

    def prepare_data(self) -> None:
        """Download the data sets of all sources."""
        for source in self._sources:
            source.prepare_data()

    def validate(self, env: EnvFactory) -> None:
        """Check that all demonstrations fit an environment.

        Raises:
            ValueError: If observations or actions of a source do not fit the environment.
        """
        for source in self._sources:
            source.validate(env)

    def check_held_out(self, training: Demonstrations) -> None:
        """Check that none of these held-out demonstrations are training demonstrations.

        Raises:
            ValueError: If a demonstration is also a training demonstration.
        """
        for source in self._sources:
            source.check_held_out(training)

    def load(self, codec: TextCodec, policy: Policy) -> LazyDemonstrations:
        """Return the demonstrations of all sources, one source after another."""
        return _Concatenated([source.load(codec, policy) for source in self._sources])


@final
class _Concatenated(LazyDemonstrations):
    """Concatenates several sequences of demonstrations."""

    def __init__(self, parts: Sequence[Sequence[Demonstration]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def item(self, index: int) -> Demonstration:
        """Return one demonstration."""
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]

    @property
    def fingerprint(self) -> str:
        """The fingerprints of all parts."""
        return repr([fingerprint_of(part) for part in self._parts])

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return every index once, int64 ``(turn,)``; the shuffled parts are randomly interleaved."""
        # The own order of a part keeps the turns of an episode together.
        part_of = np.repeat(np.arange(len(self._parts)), list(map(len, self._parts)))
        part_of = part_of[permutation(len(self), "parts", seed, epoch)]
        shuffled = np.empty(len(self), dtype=np.int64)
        for number, part in enumerate(self._parts):
            shuffled[part_of == number] = self._starts[number] + shuffled_indices(part, seed, epoch)
        return shuffled


def shuffled_indices(demonstrations: Sequence[Demonstration], seed: int, epoch: int) -> np.ndarray:
    """Return every index once, int64 ``(turn,)``, in the shuffled order of an epoch."""
    if isinstance(demonstrations, LazyDemonstrations):
        return demonstrations.shuffled_indices(seed, epoch)
    return permutation(len(demonstrations), "demonstrations", seed, epoch)


def fingerprint_of(demonstrations: Sequence[Demonstration]) -> str:
    """Return a text that identifies the demonstrations, for the cache of their tokens."""
    if isinstance(demonstrations, LazyDemonstrations):
        return demonstrations.fingerprint
    return hashlib.sha256(repr(list(demonstrations)).encode("utf-8", "surrogatepass")).hexdigest()


# Data augmentation: transformed copies of demonstrated episodes.

_KINDS = ("key", "ball", "box")
_FIRST_KIND = OBJECTS.index(_KINDS[0])
_MIRRORED_ACTIONS = {0: 1, 1: 0}
"""Turning left and turning right are exchanged."""


class Augmentation(ABC, Generic[ObsType, ActType]):
    """Abstract transformation of whole episodes under which the demonstrated actions stay (nearly) correct."""

    def connect(self, action_space: gym.Space) -> None:  # noqa: B027 (many augmentations do not need it)
        """Set the action space of the data set. Called before :meth:`augment`.

        Raises:
            ValueError: If the augmentation does not support this action space.
        """

    @abstractmethod
    def augment(
        self, observations: Sequence[ObsType], actions: Sequence[ActType], rng: np.random.Generator
    ) -> tuple[list[ObsType], list[ActType]]:
        """Return the native observations and actions of one episode after a random transformation.

        Args:
            observations: native observation before each step.
            actions: native actions of the steps, followed by the advised actions of some steps. An advised action is
                the one that an advisor chose, or the policy's action that was replaced by a random action. There
                may therefore be more actions than observations.
            rng: source of random numbers.
        """


@register
class BabyAISymmetry(Augmentation[dict[str, Any], int]):
    """Permutes the colours and kinds of objects in the view and the mission, and mirrors each episode at random.

    An episode is mirrored with probability 1/2. Doors keep their kind. Missions with held-out combinations of colour
    and kind (:data:`lrl.codecs.babyai.HELD_OUT`) are not produced.
    """

    def augment(
        self, observations: Sequence[dict[str, Any]], actions: Sequence[int], rng: np.random.Generator
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Apply a random symmetry to observations (MiniGrid's dictionaries) and actions (0 to 5)."""
        while True:  # until the mission names no held-out combination
            colors, kinds = rng.permutation(len(COLORS)), rng.permutation(len(_KINDS))
            words = {COLORS[old]: COLORS[new] for old, new in enumerate(colors)}
            words |= {_KINDS[old]: _KINDS[new] for old, new in enumerate(kinds)}
            missions = [_replace_words(observation["mission"], words) for observation in observations]
            if not any(pair in HELD_OUT for pair in pairwise(re.findall(r"\w+", missions[0]))):
                break
        mirrored = bool(rng.integers(2))
        changed = [
            dict(observation, image=_transform_image(observation["image"], colors, kinds, mirrored), mission=mission)
            for observation, mission in zip(observations, missions, strict=True)
        ]
        return changed, [_MIRRORED_ACTIONS.get(int(action), action) if mirrored else action for action in actions]


@register
class GaussianNoise(Augmentation[np.ndarray, np.ndarray]):
    """Adds Gaussian noise to continuous actions, for policies that write numbers as tokens.

    In expectation over the noise, the target of the cross-entropy loss is a discretised Gaussian around the
    demonstrated number instead of this number alone, as in HL-Gauss (arXiv:2403.03950). Numbers outside the action
    space are clipped to it, so half of the samples for a number exactly at a bound stay at that bound. Each copy of an
    episode has its own noise, which does not change from epoch to epoch. A policy that acts natively does not need this
    augmentation, because its action distribution already has a standard deviation.

    Args:
        actions: standard deviation of the noise, in the unit of the actions.

    Raises:
        ValueError: If ``actions`` is not a positive, finite number.
    """

    def __init__(self, actions: PositiveFloat) -> None:
        check_arguments(GaussianNoise.__init__, locals(), "demonstrations.augmentation")
        if not math.isfinite(actions):
            raise ValueError(f"demonstrations.augmentation.actions is {actions}; it must be finite.")
        self.actions = actions
        self._space: spaces.Box | None = None

    def connect(self, action_space: gym.Space) -> None:
        """Set the action space; actions with noise are clipped to its bounds.

        Raises:
            ValueError: If the actions are not vectors of real numbers.
        """
        if not (isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)):
            raise ValueError(
                f"demonstrations.augmentation is GaussianNoise, which needs an action space of real numbers (a Box), "
                f"but the action space is {action_space}; set demonstrations.augmentation to null."
            )
        self._space = action_space

    def augment(
        self, observations: Sequence[np.ndarray], actions: Sequence[np.ndarray], rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return unchanged observations, and actions with noise."""
        assert self._space is not None, "connect() must be called before"
        low, high = self._space.low, self._space.high
        changed = (action + self.actions * rng.standard_normal(low.shape) for action in actions)
        return list(observations), [np.clip(action, low, high).astype(self._space.dtype) for action in changed]


def _replace_words(mission: str, words: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: words.get(word[0], word[0]), mission)


def _transform_image(image: np.ndarray, colors: np.ndarray, kinds: np.ndarray, mirrored: bool) -> np.ndarray:
    """Return MiniGrid's view ``(column, row, 3)`` with permuted colours and kinds, mirrored if ``mirrored``."""
    image = image.copy()
    kind, color = image[..., 0], image[..., 1]
    is_object = (kind >= _FIRST_KIND) & (kind < _FIRST_KIND + len(_KINDS))
    is_colored = is_object | (kind == OBJECTS.index("door"))
    color[is_colored] = colors[color[is_colored]]
    kind[is_object] = _FIRST_KIND + kinds[kind[is_object] - _FIRST_KIND]
    return np.ascontiguousarray(image[::-1]) if mirrored else image
