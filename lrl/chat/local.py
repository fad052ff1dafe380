"""Chat models that run in this process: the built-in decoding loop, or any other generator of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from lrl.chat.model import ChatModel, Completion, Message
from lrl.functional.random import counter_hash
from lrl.lm.attention import context_length
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import DecodeLoop, Generator
from lrl.lm.files import check_available
from lrl.lm.model import LanguageModel
from lrl.lm.tokenizer import ChatTokenizer
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import SamplingConfig


@register
@final
class LocalChatModel(ChatModel):
    """A language model that responds in this process. It is loaded by :meth:`connect` or the first :meth:`complete`.

    The random numbers of a response depend only on its seed. A response therefore does not depend on the other
    conversations of its batch, except by rounding errors.

    Args:
        language_model: specifies the causal LM. If ``generator`` is set, only its tokenizer is loaded.
        generator: samples the tokens; null selects the built-in decoding loop.
        stop_text: text that ends a response, in addition to the end-of-turn token; used only by the built-in decoding
            loop, and to tell whether a response is complete.
        batch_size: number of conversations per batch.
        device: device of the language model; ``auto`` selects the first GPU, or the CPU if there is none.
    """

    def __init__(
        self,
        language_model: LanguageModelConfig,
        generator: Generator | None = None,
        stop_text: str | None = None,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        check_arguments(type(self).__init__, {"batch_size": batch_size}, "chat_model")
        self.name, self.config, self.stop_text = language_model.name, language_model, stop_text
        self.batch_size, self.device = batch_size, device
        self._generator, self._tokenizer, self._context_length = generator, None, None
        if generator is not None:
            from transformers import AutoConfig

            self._tokenizer = _load_tokenizer(language_model)
            config = AutoConfig.from_pretrained(self.name, trust_remote_code=language_model.trust_remote_code)
            self._context_length = context_length(config)
        self._model: LanguageModel | None = None

    def connect(self) -> None:
        """Load the model; further calls do nothing.

        Raises:
            ValueError: If the model cannot be loaded.
        """
        self._load()

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether a conversation and its response fit into the model's context.

        Args:
            conversation: messages, oldest first.
            sampling: specifies the maximum number of tokens of a response.
            response: a text that must fit into the maximum number of tokens, together with an end token.
        """
        tokenizer, _ = self._load()
        if response and len(tokenizer.encode_texts([response])[0]) >= sampling.max_new_tokens:
            return False
        length = self._context_length if self._model is None else self._model.context_length
        return length is None or len(tokenizer.encode_chat(conversation)) + sampling.max_new_tokens <= length

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to each conversation, in the same order.

        Args:
            conversations: messages, oldest first, which the tokenizer's chat template converts to a prompt.
            sampling: sampling settings, with the maximum number of tokens of a response.
            seeds: one seed per response.

        Raises:
            ValueError: If the model cannot be loaded, or if a conversation and a response of maximum length exceed the
                model's context.
        """
        tokenizer, generator = self._load()
        prompts = [tokenizer.encode_chat(messages) for messages in conversations]
        bits = seeded_bits(seeds, sampling.max_new_tokens)
        completions = []
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, start + self.batch_size)
            responses = generator.generate(prompts[batch], bits[batch], sampling)
            lengths = responses.mask.sum(1).tolist()
            for prompt, ids, length in zip(prompts[batch], responses.ids.tolist(), lengths, strict=True):
                is_cut = length == sampling.max_new_tokens and not tokenizer.ends(ids[:length], self.stop_text)
                completions.append(
                    Completion(
                        text=tokenizer.response_text(ids[:length]),
                        finish_reason="length" if is_cut else "stop",
                        prompt_tokens=len(prompt),
                        completion_tokens=length,
                    )
                )
        return completions

    def _load(self) -> tuple[ChatTokenizer, Generator]:
        """Return the tokenizer and the generator; the first call loads them."""
        if self._generator is None:
            model = LanguageModel(self.config)
            model.configure()
            auto = "cuda" if torch.cuda.is_available() else "cpu"
            model.requires_grad_(False).eval().to(auto if self.device == "auto" else self.device)
            self._tokenizer, self._generator = model.tokenizer, DecodeLoop(model, self.stop_text)
            self._model = model
        assert self._tokenizer is not None
        return self._tokenizer, self._generator


def _load_tokenizer(config: LanguageModelConfig) -> ChatTokenizer:
    """Load only the tokenizer of a language model.

    Raises:
        ValueError: If the language model is not available.
    """
    check_available(config.name)
    return ChatTokenizer.from_pretrained(config.name, config.chat_template, config.trust_remote_code)


def seeded_bits(seeds: Sequence[int], num_tokens: int) -> Tensor:
    """Return 64 random bits per token, int64 ``(row, token)``; each row depends only on its seed."""
    rows = np.asarray(seeds, dtype=np.int64).reshape(-1, 1)
    return torch.from_numpy(counter_hash("chat", rows, np.arange(num_tokens)[None]).view(np.int64))
