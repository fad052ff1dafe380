"""Actors that are not trained: random, constant and expert baselines, an actor with noise, and a human."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.toy_text import Desc, FrozenLakeCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.frozen_lake import transition_table
from lrl.envs.prompt_env import PromptEnvs
from lrl.envs.tabular import optimal_q
from lrl.envs.text import AdvisedObservation
from lrl.functional.random import token_uniforms
from lrl.policies.actor import Actor, ActorWrapper
from lrl.prompts import get_response_format
from lrl.types import Decisions, History, PastTurn, RandomKeys, SamplingConfig

_MAX_CONSTANTS = 8
"""Number of actions up to which each is a constant baseline."""
_POSITION = re.compile(r"row (\d+) column (\d+)")


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
    """Return the action that the environment's own expert, which knows the whole state, recommends in an observation.

    :meth:`ExpertActor.prepare` makes the environments add this action to their observations.

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
    """Computes an optimal policy of the map in the observation by value iteration, and returns its first best action.

    Args:
        is_slippery: whether a move can go to one of the two sides instead.
    """

    def __init__(self, is_slippery: bool = True) -> None:
        self.is_slippery = is_slippery
        self._best_actions: dict[Desc, list[int]] = {}

    def __call__(self, observation: str) -> int:
        """Return the index of the best action in the state that the observation describes."""
        state, desc = read_drawing(observation)
        if desc not in self._best_actions:
            table = transition_table(desc, self.is_slippery)
            self._best_actions[desc] = optimal_q([table])[0].argmax(-1).tolist()
        return self._best_actions[desc][state]


def read_drawing(observation: str) -> tuple[int, Desc]:
    """Return the state index and the map of a FrozenLake observation.

    This is the inverse of :func:`lrl.codecs.toy_text.render_map`. The observation does not show the cell of the agent.
    This cell is the start if no other cell is the start, and ice otherwise.

    Raises:
        ValueError: If the observation contains no map.
    """
    match = _POSITION.search(observation)
    if match is None:
        raise ValueError(f"observation is {observation!r}; the expert needs a line 'row R column C' and a map.")
    rows = [line.replace(" ", "") for line in observation[match.end() :].strip().splitlines()]
    agent_cell = "F" if any("S" in line for line in rows) else "S"
    row, column = int(match[1]), int(match[2])
    return row * len(rows[0]) + column, tuple(line.replace("A", agent_cell) for line in rows)


class FixedActor(Actor):
    """Abstract base class of actors that choose an action as text and respond in a response format.

    A turn has one token, whose log-probability is that of the chosen action.

    Args:
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    probability: float = 1.0
    """Probability of the chosen action; NaN if there are infinitely many actions."""

    def __init__(self, response_format: str = "think_answer") -> None:
        super().__init__()
        self._format, self._format_name = get_response_format(response_format), response_format

    @abstractmethod
    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the text of one action per row.

        Args:
            observations: current observations, one per row.
            keys: counters that determine the random numbers.
        """

    @property
    def response_format(self) -> str:
        """Name of the response format."""
        return self._format_name

    @property
    def connected_codec(self) -> TextCodec:
        """The codec of the environment, which must have been set by :meth:`connect`."""
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
    """Takes every action with equal probability, and always responds in a valid format."""

    def connect(self, codec: TextCodec) -> None:
        """Set the codec.

        Raises:
            ValueError: If actions cannot be sampled.
        """
        super().connect(codec)
        codec.random_action_text(0.0)
        self.probability = math.nan if codec.action_texts is None else 1 / len(codec.action_texts)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Sample one action per row."""
        return [self.connected_codec.random_action_text(uniform) for uniform in token_uniforms(keys, 1)[:, 0].tolist()]


@final
class ConstantActor(FixedActor):
    """Takes the same action in every state.

    Args:
        action: text of the action; None selects the codec's default: the first action, or zeros for numeric actions.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    greedy_is_reproducible = True

    def __init__(self, action: str | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.action = action

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the constant action for every row.

        Raises:
            ValueError: If ``action`` is not legal in the environment.
        """
        if self.action is None:
            return [self.connected_codec.default_action_text] * len(observations)
        codec = self.connected_codec
        try:
            return [codec.action_to_text(codec.text_to_action(self.action))] * len(observations)
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
        """Set the codec, and select the expert for it if no expert was given.

        Raises:
            ValueError: If no expert is given and none is known for this codec.
        """
        super().connect(codec)
        if self.expert is None:
            self.expert = expert_for(codec)
        # An expert in the environment may use state that is not part of the text.
        self.greedy_is_reproducible = self.expert is not advised_action

    def prepare(self, envs: VectorEnv) -> None:
        """Make the environments add the action of their own expert to observations, if this expert is used."""
        if self.expert is advised_action:
            vectorised: Any = envs  # Gymnasium does not type set_attr
            vectorised.set_attr("advises", True)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the expert's action for every row."""
        assert self.expert is not None, "connect() comes first"
        return [self.connected_codec.action_to_text(self.expert(observation)) for observation in observations]


@final
class UnreadableActor(FixedActor):
    """Responds with a text that contains no action and has no response format."""

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the same text for every row."""
        return ["?"] * len(observations)

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Respond with the text alone."""
        decisions = super().act(observations, memory, keys, sampling)
        return replace(decisions, actions=self.choose(observations, keys))


def baseline_actors(env: EnvFactory) -> Iterator[tuple[str, FixedActor]]:
    """Yield the actors without weights that an environment allows, by name."""
    texts = env.codec.action_texts or ()
    constant = [ConstantActor(text) for text in texts] if 0 < len(texts) <= _MAX_CONSTANTS else [ConstantActor()]
    for actor in (RandomActor(), ExpertActor(), UnreadableActor(), *constant):
        try:
            actor.connect(env.codec)
            action = (actor.action or env.codec.default_action_text) if isinstance(actor, ConstantActor) else ""
        except ValueError:
            continue  # this environment has no such actor
        if isinstance(env, PromptEnvs) and isinstance(actor, ExpertActor) and actor.expert is advised_action:
            continue  # a data set has no state from which an environment could compute an action
        name = f"constant {action!r}" if action else type(actor).__name__.removesuffix("Actor").lower()
        yield name, actor


@final
class NoisyActor(ActorWrapper):
    """Replaces a share of another actor's actions by random legal actions, to record demonstrations.

    As in DART (arXiv:1703.09327), the random actions lead to states from which the actor recovers, and the
    demonstrations contain the actions that the actor itself chose. They are stored in
    :attr:`~lrl.types.Decisions.replaced`.

    Args:
        actor: the wrapped actor, connected and configured; it responds in text or acts natively.
        random_share: probability with which an action is replaced, in [0, 1).

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
        for row, (replace_uniform, action_uniform) in enumerate(uniforms):
            if replace_uniform < self.random_share:
                replaced[row] = self._native_action(actions[row])
                if self.response_format is None:
                    actions[row] = self.codec.random_action(action_uniform)
                else:
                    render = get_response_format(self.response_format).render
                    actions[row] = render(self.codec.random_action_text(action_uniform))
                    if memory[row]:
                        *past, last = memory[row]
                        memory[row] = (*past, PastTurn(last.observation, actions[row]))
        return replace(decisions, actions=actions, memory=memory, replaced=replaced)

    def _native_action(self, action: Any) -> Any:
        """Return the native action in a native action or a response; None if a response contains no legal action."""
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
        """Print the observation of the first row, and read its action from the keyboard.

        Raises:
            EOFError: If the user enters an empty line.
        """
        print(f"\n{observations[0]}")
        response = input("> ").strip()
        if not response:
            raise EOFError
        return [response]
