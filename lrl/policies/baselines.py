"""Actors without training, as baselines: random, constant and expert, the expert with noise, and a human."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.toy_text import Desc, FrozenLakeCodec
from lrl.envs.frozen_lake import transition_table
from lrl.envs.tabular import optimal_q
from lrl.envs.text import AdvisedObservation
from lrl.functional.random import token_uniforms
from lrl.policies.actor import Actor, ActorWrapper
from lrl.prompts import get_response_format
from lrl.types import Decisions, History, PastTurn, RandomKeys, SamplingConfig

_CELL = re.compile(r"row (\d+) column (\d+)")


Expert = Callable[[Any], int]
"""Function from an observation to the index of the best action."""


def expert_for(codec: TextCodec) -> Expert:
    """Return the expert for environments with this codec.

    Raises:
        ValueError: If no expert is known for this codec.
    """
    if isinstance(codec, FrozenLakeCodec):
        return FrozenLakeExpert(codec.is_slippery)
    if codec.has_expert:
        return advised_action
    name = type(codec).__name__
    raise ValueError(f"policy is 'expert', but no expert is known for {name}; policy must be another actor.")


def advised_action(observation: AdvisedObservation) -> int:
    """Return the action of an expert that is part of the environment and has access to its whole state.

    :meth:`ExpertActor.prepare` makes the environments add this action to observations.

    Raises:
        ValueError: If the observation contains no advised action.
    """
    if not isinstance(observation, AdvisedObservation):
        raise ValueError(
            "policy is 'expert', but the observation contains no advised action; call prepare(envs) first."
        )
    return int(observation.expert_action)


@final
class FrozenLakeExpert:
    """Solves the map in the observation by value iteration; of equally good actions it takes the first.

    Args:
        is_slippery: whether moves can slip to the sides.
    """

    def __init__(self, is_slippery: bool = True) -> None:
        self.is_slippery = is_slippery
        self._solved: dict[Desc, list[int]] = {}

    def __call__(self, observation: str) -> int:
        """Return the best action in the state that the observation shows."""
        state, desc = read_drawing(observation)
        if desc not in self._solved:
            table = transition_table(desc, self.is_slippery)
            self._solved[desc] = optimal_q([table])[0].argmax(-1).tolist()
        return self._solved[desc][state]


def read_drawing(observation: str) -> tuple[int, Desc]:
    """Return state and map of a FrozenLake observation. This is the inverse of :func:`lrl.codecs.toy_text.render_map`.

    The observation does not show the cell under the agent. It is the start if the map shows no start, else ice.

    Raises:
        ValueError: If the observation contains no map.
    """
    match = _CELL.search(observation)
    if match is None:
        raise ValueError(f"observation is {observation!r}; the expert needs a line 'row R column C' and a map.")
    drawn = [line.replace(" ", "") for line in observation[match.end() :].strip().splitlines()]
    under = "F" if any("S" in line for line in drawn) else "S"
    row, column = int(match[1]), int(match[2])
    return row * len(drawn[0]) + column, tuple(line.replace("A", under) for line in drawn)


class FixedActor(Actor):
    """Abstract base class of actors that choose the text of an action and write it in a response format.

    A turn counts as one token.

    Args:
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    probability: float = 1.0
    """Probability of a chosen action; nan if there are infinitely many."""

    def __init__(self, response_format: str = "think_answer") -> None:
        super().__init__()
        self._format, self._format_name = get_response_format(response_format), response_format

    @abstractmethod
    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the text of an action for each row."""

    @property
    def response_format(self) -> str:
        """Name of the response format."""
        return self._format_name

    @property
    def text(self) -> TextCodec:
        """The codec of the environment."""
        assert self.codec is not None, "connect() comes first"
        return self.codec

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Respond with the chosen actions; ``sampling`` has no effect, and the history is returned unchanged."""
        actions = [self._format.render(text) for text in self.choose(observations, keys)]
        shape = (len(actions), 1)
        return Decisions(
            actions=actions,
            inputs={},
            response_mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.full(shape, math.log(self.probability)),
            memory=memory,
        )


@final
class RandomActor(FixedActor):
    """Takes every action with equal probability, always in a valid format."""

    def connect(self, codec: TextCodec) -> None:
        """Set the codec.

        Raises:
            ValueError: If actions cannot be sampled.
        """
        super().connect(codec)
        codec.random_action_text(0.0)
        self.probability = math.nan if codec.action_texts is None else 1 / len(codec.action_texts)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Sample an action per row from one uniform number."""
        return [self.text.random_action_text(uniform) for uniform in token_uniforms(keys, 1)[:, 0].tolist()]


@final
class ConstantActor(FixedActor):
    """Takes the same action in every state.

    Args:
        action: text of the action; None selects the first action, or zero if actions are numbers.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    greedy_is_reproducible = True

    def __init__(self, action: str | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.action = action

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Repeat the action for each row.

        Raises:
            ValueError: If the environment has no such action.
        """
        if self.action is None:
            return [self.text.default_action_text] * len(observations)
        try:
            return [self.text.action_to_text(self.text.text_to_action(self.action))] * len(observations)
        except InvalidActionError as error:
            raise ValueError(f"policy.action is {self.action!r}, which is not legal: {error}.") from error


@final
class ExpertActor(FixedActor):
    """Takes the best action according to an expert.

    Args:
        expert: function from an observation to the index of the best action; None selects the expert that
            :func:`expert_for` returns for the environment's codec.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, expert: Expert | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.expert = expert

    def connect(self, codec: TextCodec) -> None:
        """Set the codec, and look up its expert if none is given.

        Raises:
            ValueError: If no expert is given and none is known for this codec.
        """
        super().connect(codec)
        if self.expert is None:
            self.expert = expert_for(codec)
        self.greedy_is_reproducible = self.expert is not advised_action  # which depends on more than the text

    def prepare(self, envs: VectorEnv) -> None:
        """Make the environments add their expert's action to observations, if that expert is used."""
        if self.expert is advised_action:
            vectorised: Any = envs  # Gymnasium does not type set_attr
            vectorised.set_attr("advises", True)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Ask the expert, row by row."""
        assert self.expert is not None, "connect() comes first"
        return [self.text.action_to_text(self.expert(observation)) for observation in observations]


@final
class NoisyActor(ActorWrapper):
    """Replaces a share of another actor's actions by random legal actions.

    Demonstrations recorded with it show how to recover from mistakes: as in DART (arXiv:1703.09327), the noise changes
    the trajectory, while the actor's own actions are learned. :attr:`~lrl.types.Decisions.replaced` holds the replaced
    actions.

    Args:
        actor: the wrapped actor, connected and configured; it responds in text or acts natively.
        random_share: probability of a random action in each turn.

    Raises:
        ValueError: If the share is not in [0, 1).
    """

    def __init__(self, actor: Actor, random_share: float) -> None:
        super().__init__(actor)
        if not 0 <= random_share < 1:
            raise ValueError(f"random_share is {random_share}; it must be in [0, 1).")
        self.random_share = random_share

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Let the wrapped actor decide, then replace some of its actions."""
        assert self.codec is not None
        decisions = self.actor.act(observations, memory, keys, sampling)
        actions, memory = list(decisions.actions), list(decisions.memory)
        replaced: dict[int, Any] = {}
        uniforms = token_uniforms(replace(keys, purpose=f"noise of {keys.purpose}"), 2).tolist()
        for row, (whether, which) in enumerate(uniforms):
            if whether < self.random_share:
                replaced[row] = self._native_action(actions[row])
                if self.response_format is None:
                    actions[row] = self.codec.random_action(which)
                else:
                    render = get_response_format(self.response_format).render
                    actions[row] = render(self.codec.random_action_text(which))
                    if memory[row]:
                        *past, last = memory[row]
                        memory[row] = (*past, PastTurn(last.observation, actions[row]))
        return replace(decisions, actions=actions, memory=memory, replaced=replaced)

    def _native_action(self, action: Any) -> Any:
        """Return the native action of a response or a native action; None for a response without a legal action."""
        if self.response_format is None:
            return action
        assert self.codec is not None
        try:
            return self.codec.text_to_action(get_response_format(self.response_format).extract(action))
        except InvalidActionError:
            return None


class HumanActor(FixedActor):
    """Asks the user at the keyboard for every action (``lrl watch --human``)."""

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """Print the observation and read the action.

        Raises:
            EOFError: If the line is empty.
        """
        print(f"\n{observations[0]}")
        response = input("> ").strip()
        if not response:
            raise EOFError
        return [response]
