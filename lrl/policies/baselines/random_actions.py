"""An actor that now and then takes a random action, so that demonstrations show how to recover from a mistake.

The noise is in the demonstrator's trajectory, not in the actions to be learned from it: DART (arXiv:1703.09327).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from gymnasium.vector import VectorEnv

from lrl.codecs.codec import InvalidActionError
from lrl.functional.random import token_uniforms
from lrl.policies.actor import Actor
from lrl.prompts.response_format import get_response_format
from lrl.types import Decisions, History, PastTurn, RandomKeys, SamplingConfig


@final
class NoisyActor(Actor):
    """Another actor, a share of whose actions is replaced by random legal ones.

    Which were replaced, and what the actor had chosen, is in :attr:`~lrl.types.Decisions.replaced`.

    Args:
        actor: connected and configured.
        random_share: probability of a random action in each turn.

    Raises:
        ValueError: the share is no probability below 1, or the actor acts natively.
    """

    def __init__(self, actor: Actor, random_share: float) -> None:
        super().__init__()
        if not 0 <= random_share < 1:
            raise ValueError(f"random_share is {random_share}; it must be in [0, 1).")
        if actor.response_format is None:
            raise ValueError(
                f"random_share is {random_share}, but {type(actor).__name__} acts natively; it must be 0 for a policy "
                "that does not respond in text."
            )
        self.actor, self.random_share, self.codec = actor, random_share, actor.codec
        self._response_format = actor.response_format
        self._format = get_response_format(actor.response_format)

    @property
    def response_format(self) -> str:
        """The response format of the other actor."""
        return self._response_format

    def prepare(self, envs: VectorEnv) -> None:
        """Prepare the environments for the other actor."""
        self.actor.prepare(envs)

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Let the other actor decide, then replace some of its actions."""
        assert self.codec is not None
        decisions = self.actor.act(observations, memory, keys, sampling)
        actions, memory = list(decisions.actions), list(decisions.memory)
        replaced: dict[int, str | None] = {}
        uniforms = token_uniforms(replace(keys, purpose=f"noise of {keys.purpose}"), 2).tolist()
        for row, (whether, which) in enumerate(uniforms):
            if whether < self.random_share:
                replaced[row] = self._action_text(actions[row])
                actions[row] = self._format.render(self.codec.random_action_text(which))
                memory[row] = _with_response(memory[row], actions[row])
        return replace(decisions, actions=actions, memory=memory, replaced=replaced)

    def _action_text(self, response: str) -> str | None:
        """Return the action of a response in the codec's own words; None where it is not legal."""
        assert self.codec is not None
        try:
            return self.codec.action_to_text(self.codec.text_to_action(self._format.extract(response)))
        except InvalidActionError:
            return None


def _with_response(history: History, response: str) -> History:
    """Return a history whose last turn has another response."""
    return (*history[:-1], PastTurn(history[-1].observation, response)) if history else history
