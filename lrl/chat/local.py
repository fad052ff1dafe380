"""Chat models in this process: a language model of ours, or any generator of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

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
    """A language model that responds in this process; loaded by :meth:`connect`, or the first :meth:`complete`.

    The random numbers of a response follow from its seed, so it depends on nothing else in the batch, up to rounding.

    Args:
        language_model: which causal LM. Where a generator is given, only its tokenizer is loaded.
        generator: samples the tokens; null decodes with the language model.
        stop_text: text that ends a response, besides the end of the turn; a generator that is given has its own.
        batch_size: conversations that are computed at once.
        device: where the language model computes; ``auto`` is the first GPU, or the CPU.
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
            self._tokenizer, self._context_length = self._load_tokenizer(), context_length(self._load_config())
        self._model: LanguageModel | None = None

    def connect(self) -> None:
        """Load the model.

        Raises:
            ValueError: it cannot be loaded.
        """
        self._load()

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether a conversation and its response are no longer than the model was made for.

        Args:
            conversation: messages, oldest first.
            sampling: has the maximum number of tokens of a response.
            response: a text for which a response must have room, with the token that ends it.
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
            conversations: messages, oldest first; the tokenizer's chat template makes a prompt of them.
            sampling: how tokens are sampled, and the maximum number of tokens of a response.
            seeds: of each response.

        Raises:
            ValueError: the model cannot be loaded, or a conversation and its response may take more tokens than it has
                positions.
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
                cut = length == sampling.max_new_tokens and not tokenizer.ends(ids[:length], self.stop_text)
                completions.append(
                    Completion(
                        text=tokenizer.response_text(ids[:length]),
                        finish_reason="length" if cut else "stop",
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

    def _load_tokenizer(self) -> ChatTokenizer:
        check_available(self.config.name)
        return ChatTokenizer.from_pretrained(self.config.name, self.config.chat_template, self.config.trust_remote_code)

    def _load_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.config.name, trust_remote_code=self.config.trust_remote_code)


def seeded_bits(seeds: Sequence[int], num_tokens: int) -> Tensor:
    """Return 64 random bits for each token that may be sampled, int64 ``(row, token)``; a row depends on its seed."""
    rows = np.asarray(seeds, dtype=np.int64).reshape(-1, 1)
    return torch.from_numpy(counter_hash("chat", rows, np.arange(num_tokens)[None]).view(np.int64))
