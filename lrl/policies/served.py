"""The actor that plays through a chat model: a server, or a model in this process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any, final

import numpy as np
import torch

from lrl.chat.model import ChatModel, Message
from lrl.functional.random import counter_hash, seeds
from lrl.policies.actor import Actor
from lrl.policies.retrying import InvalidRetryConfig, TurnCounts
from lrl.prompts.response_format import get_response_format
from lrl.prompts.template import PromptTemplate
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


@final
class ServedPolicy(Actor):
    """Plays by asking a chat model, for all environments at once; nothing in it is trained.

    The seed of a response follows from the run's seed, the episode, the turn and the number of the try, at temperature
    0 from the prompt and the try. So the order in which responses arrive, and how many environments run side by side,
    change nothing, as far as the chat model's responses follow from the request.

    Args:
        chat_model: responds.
        prompt: how an observation becomes a conversation.
        sampling: the distribution that responses are sampled from.
        invalid_retries: how often a response without a legal action is sampled again.

    Attributes:
        counts: what was asked so far.
    """

    greedy_is_reproducible = True
    writes_text = True
    prompt: PromptTemplate

    def __init__(
        self,
        chat_model: ChatModel,
        prompt: PromptTemplate,
        sampling: SamplingConfig,
        invalid_retries: InvalidRetryConfig = InvalidRetryConfig(),
    ) -> None:
        super().__init__()
        if invalid_retries.max_retries and invalid_retries.temperature == 0:
            raise ValueError(
                "invalid_retries.temperature is 0, at which a response would be the same again; it must be positive."
            )
        self.chat_model, self.prompt, self.sampling = chat_model, prompt, sampling
        self.invalid_retries, self.counts = invalid_retries, TurnCounts()

    @property
    def response_format(self) -> str:
        """The response format that the prompt asks for."""
        return self.prompt.response_format

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Ask for one response per row, and again for those without a legal action; no token counts as sampled.

        Raises:
            ValueError: the chat model cannot be reached, or rejects a request.
        """
        assert self.codec is not None, "connect() comes first"
        sampling = self.sampling if sampling is None else sampling
        conversations = [self.prompt.messages(self.codec, *row) for row in zip(observations, memory, strict=True)]
        names = _names(conversations) if sampling.temperature == 0 else _row_names(keys)
        responses = self._ask(conversations, sampling, seeds("chat", names, 0))
        again, wrong = replace(sampling, temperature=self.invalid_retries.temperature), self._invalid(responses)
        self.counts.asked += len(responses)
        self.counts.asked_again += len(wrong) if self.invalid_retries.max_retries else 0
        for attempt in range(1, self.invalid_retries.max_retries + 1):
            if not wrong:
                break
            self.counts.further_responses += len(wrong)
            further = self._ask([conversations[row] for row in wrong], again, seeds("chat", names[wrong], attempt))
            for row, response in zip(wrong, further, strict=True):
                responses[row] = response
            wrong = self._invalid(responses)
        self.counts.still_invalid += len(wrong)
        extend = self.prompt.extend_history
        memory = [extend(self.codec, *row) for row in zip(memory, observations, responses, strict=True)]
        none = torch.zeros(len(responses), 0)
        return Decisions(actions=responses, inputs={}, response_mask=none.bool(), logprobs=none, memory=memory)

    def without_retries(self) -> ServedPolicy:
        """Return a policy that asks the same chat model, takes every response as it is, and counts for itself."""
        policy = copy(self)
        policy.invalid_retries, policy.counts = InvalidRetryConfig(max_retries=0), TurnCounts()
        return policy

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the conversation that the chat model is sent, one message after the other."""
        assert self.codec is not None, "connect() comes first"
        messages = self.prompt.messages(self.codec, observation, history)
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def report(self) -> dict[str, Any]:
        """Return what was asked, and what the chat model says that it took, by name, for a JSON file."""
        report = getattr(self.chat_model, "report", None)
        return {**asdict(self.counts), **({} if report is None else report())}

    def _ask(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, numbers: np.ndarray
    ) -> list[str]:
        """Return responses, each cut after the text that ends one; ``numbers`` are the seeds, int64 ``(row,)``."""
        completions = self.chat_model.complete(conversations, sampling, numbers.tolist())
        stop = self.prompt.stop or get_response_format(self.prompt.response_format).stop
        return [_until(completion.text, stop) for completion in completions]

    def _invalid(self, responses: Sequence[str]) -> list[int]:
        """Return the rows whose response holds no legal action."""
        return [row for row, response in enumerate(responses) if not self.action_text(response)]


def _until(text: str, stop: str | None) -> str:
    """Return a text up to the first ``stop``, that included."""
    before, found, _ = (text, "", "") if stop is None else text.partition(stop)
    return before + found


def _names(conversations: Sequence[Sequence[Message]]) -> np.ndarray:
    """Return a number for each conversation, equal for equal ones, int64 ``(row,)``."""
    return np.array([zlib.crc32(json.dumps(messages).encode()) for messages in conversations], dtype=np.int64)


def _row_names(keys: RandomKeys) -> np.ndarray:
    """Return a number for each turn of each episode, int64 ``(row,)``."""
    return counter_hash(keys.purpose, keys.seed, keys.collection, keys.env, keys.turn).view(np.int64)
