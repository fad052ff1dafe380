"""An actor that now and then takes a random action, so that demonstrations show how to recover from a mistake.

The noise is in the demonstrator's trajectory, not in the actions to be learned from it: DART (arXiv:1703.09327).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from lrl.codecs.codec import InvalidActionError
from lrl.functional.random import token_uniforms
from lrl.policies.actor import Actor
from lrl.policies.wrapper import ActorWrapper
from lrl.prompts.response_format import get_response_format
from lrl.types import Decisions, History, PastTurn, RandomKeys, SamplingConfig


@final
class NoisyActor(ActorWrapper):
    """Another actor, a share of whose actions is replaced by random legal ones.

    Which were replaced, and what the actor had chosen, is in :attr:`~lrl.types.Decisions.replaced`. Of native actions
    the choice is kept only where the codec names each of them, since other texts depend on how numbers are written.

    Args:
        actor: connected and configured; it responds in text or acts natively.
        random_share: probability of a random action in each turn.

    Raises:
        ValueError: the share is no probability below 1.
    """

    def __init__(self, actor: Actor, random_share: float) -> None:
        super().__init__(actor)
        if not 0 <= random_share < 1:
            raise ValueError(f"random_share is {random_share}; it must be in [0, 1).")
        self.random_share = random_share

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
                if self.response_format is None:
                    actions[row] = self.codec.random_action(which)
                else:
                    render = get_response_format(self.response_format).render
                    actions[row] = render(self.codec.random_action_text(which))
                    memory[row] = _with_response(memory[row], actions[row])
        return replace(decisions, actions=actions, memory=memory, replaced=replaced)

    def _action_text(self, action: Any) -> str | None:
        """Return an action, native or that of a response, in the codec's own words.

        Returns None for a response without a legal action, and for a native action without a name.
        """
        assert self.codec is not None
        if self.response_format is None:
            return None if self.codec.action_texts is None else self.codec.action_to_text(action)
        try:
            return self.codec.action_to_text(
                self.codec.text_to_action(get_response_format(self.response_format).extract(action))
            )
        except InvalidActionError:
            return None


def _with_response(history: History, response: str) -> History:
    """Return a history whose last turn has another response."""
    return (*history[:-1], PastTurn(history[-1].observation, response)) if history else history
