"""A policy that now and then takes a random action, so that demonstrations hold what to do after a mistake.

Noise in the demonstrator's way, and not in what is learned from it: DART (arXiv:1703.09327).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gymnasium.vector import VectorEnv
from torch import Tensor

from lrl.codecs.codec import InvalidActionError
from lrl.functional.random import token_uniforms
from lrl.policies.policy import Policy
from lrl.prompts.response_format import get_response_format
from lrl.types import Decisions, Evaluation, History, PastTurn, RandomKeys, SamplingConfig, TurnBatch


class RandomAnswer(str):
    """An answer that nobody would give; a plain text to whoever reads it.

    Attributes:
        advised: the text of the action that it was given instead of; None where that was no legal action.
    """

    advised: str | None = None


class NoisyPolicy(Policy):
    """Another policy, a share of whose answers is replaced by random legal actions.

    Args:
        policy: connected and configured.
        random_share: probability of a random action in each turn.

    Raises:
        ValueError: the share is no probability below 1.
    """

    def __init__(self, policy: Policy, random_share: float) -> None:
        super().__init__()
        if not 0 <= random_share < 1:
            raise ValueError(f"random_share is {random_share}; it must be in [0, 1).")
        if policy.response_format is None:
            raise ValueError(
                f"random_share is {random_share}, but {type(policy).__name__} acts natively; it must be 0 for a policy "
                "that does not answer in text."
            )
        self.policy, self.random_share, self.codec = policy, random_share, policy.codec
        self._response_format = policy.response_format
        self._format = get_response_format(policy.response_format)

    @property
    def response_format(self) -> str:
        """The other policy's."""
        return self._response_format

    def configure(self) -> None:
        """The other policy is."""

    def prepare(self, envs: VectorEnv) -> None:
        """As the other policy does."""
        self.policy.prepare(envs)

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Ask the other policy, then replace."""
        assert self.codec is not None
        decisions = self.policy.act(observations, memory, keys, sampling)
        actions, memory = list(decisions.actions), list(decisions.memory)
        draws = token_uniforms(replace(keys, purpose=f"noise of {keys.purpose}"), 2).tolist()
        for row, (whether, which) in enumerate(draws):
            if whether < self.random_share:
                answer = RandomAnswer(self._format.render(self.codec.random_action_text(which)))
                answer.advised = self._action_text(str(actions[row]))
                actions[row], memory[row] = answer, _answered(memory[row], answer)
        return replace(decisions, actions=actions, memory=memory)

    def _action_text(self, answer: str) -> str | None:
        """What an answer says, in the codec's own words."""
        assert self.codec is not None
        try:
            return self.codec.action_to_text(self.codec.text_to_action(self._format.extract(answer)))
        except InvalidActionError:
            return None

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Always a ValueError."""
        raise ValueError("model.policy is a NoisyPolicy, which cannot be trained; it must be the policy inside.")

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Always a ValueError."""
        raise ValueError("model.policy is a NoisyPolicy, which cannot be trained; it must be the policy inside.")

    def build_reference(self, warm_started: bool) -> None:
        """There is none."""


def _answered(history: History, answer: str) -> History:
    """A history whose last turn was answered otherwise."""
    return (*history[:-1], PastTurn(history[-1].observation, str(answer))) if history else history
