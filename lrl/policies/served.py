"""Actor whose responses come from a chat model, behind a server or in this process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from lrl.chat.model import ChatModel
from lrl.functional.random import counter_hash, seeds
from lrl.policies.actor import Actor, without_tokens
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


@final
class ServedPolicy(Actor):
    """Requests one response per environment from a chat model. It cannot be trained.

    The seed of a response is computed from the run's seed, the episode, the turn and the number of the attempt; at
    temperature 0, from the prompt and the attempt. If the chat model responds deterministically to a request and its
    seed, episodes therefore depend neither on the order of the responses nor on the number of parallel environments.

    Wrap it in a :class:`~lrl.policies.retrying.RetryingActor` to sample responses without a legal action again.

    Args:
        chat_model: the model that responds.
        prompt: template of the conversations.
        sampling: sampling settings, unless others are passed to :meth:`act`.
    """

    greedy_is_reproducible = True
    writes_text = True
    asks_chat_model = True
    prompt: PromptTemplate

    def __init__(self, chat_model: ChatModel, prompt: PromptTemplate, sampling: SamplingConfig) -> None:
        super().__init__()
        self.chat_model, self.prompt, self.sampling = chat_model, prompt, sampling

    @property
    def response_format(self) -> str:
        """Name of the response format that the prompt asks for."""
        return self.prompt.response_format

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Request one response per row; the decisions have no tokens.

        Raises:
            ValueError: If the chat model cannot be reached or rejects a request.
        """
        return self.act_again(observations, memory, keys, sampling, 0, sampling.temperature == 0)

    def act_again(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig,
        attempt: int,
        greedy: bool,
    ) -> Decisions:
        """Request one response per row with the seeds of this attempt; see :meth:`Actor.act_again`."""
        assert self.codec is not None, "connect() comes first"
        conversations = [self.prompt.messages(self.codec, *row) for row in zip(observations, memory, strict=True)]
        if greedy:  # equal conversations have equal seeds
            request_ids = np.array(
                [zlib.crc32(json.dumps(messages).encode()) for messages in conversations], dtype=np.int64
            )
        else:
            request_ids = counter_hash(keys.purpose, keys.seed, keys.collection, keys.env, keys.turn).view(np.int64)
        completions = self.chat_model.complete(conversations, sampling, seeds("chat", request_ids, attempt).tolist())
        stop = self.prompt.stop or get_response_format(self.prompt.response_format).stop
        responses = [_until(completion.text, stop) for completion in completions]
        extend = self.prompt.extend_history
        histories = [extend(self.codec, *row) for row in zip(memory, observations, responses, strict=True)]
        return without_tokens(responses, histories)

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the conversation that is sent to the chat model, one line per message with its role."""
        assert self.codec is not None, "connect() comes first"
        messages = self.prompt.messages(self.codec, observation, history)
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def report(self) -> dict[str, Any]:
        """Return the counts of requests and tokens of the chat model, which a result file contains."""
        return self.chat_model.report()


def _until(text: str, stop: str | None) -> str:
    """Return a text up to and including the first ``stop``; the whole text if ``stop`` is None or does not occur."""
    return text if stop is None else "".join(text.partition(stop)[:2])
