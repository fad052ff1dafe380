"""The component that policies with a language model share: prompts and the critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.models.forward import without_gradient
from lrl.models.language_model import LanguageModel, LanguageModelConfig
from lrl.models.padding import pad_prompts
from lrl.models.value_head import ValueHead, ValueHeadConfig
from lrl.prompts.template import PromptTemplate
from lrl.types import History


@final
class LanguageModelTrunk:
    """A language model with its prompts and the value head on its hidden states.

    Not a module: the policy registers :attr:`language_model` and :attr:`value_head` under these names, which are the
    names of the weights in checkpoints.

    Args:
        config: which causal LM.
        max_prompt_tokens: a longer prompt loses its oldest history first.
        value_head: a critic on the hidden states; None has none.
    """

    def __init__(
        self, config: LanguageModelConfig, max_prompt_tokens: int = 1024, value_head: ValueHeadConfig | None = None
    ) -> None:
        self.language_model = LanguageModel(config)
        self.max_prompt_tokens, self.value_head_config = max_prompt_tokens, value_head
        self.value_head: ValueHead | None = None
        self.dropped_turns = 0
        """Turns of history that prompts have lost so far for being too long."""

    def configure(self) -> None:
        """Load the language model and initialise the value head; a second call does nothing."""
        self.language_model.configure()
        if self.value_head_config is not None and self.value_head is None:
            self.value_head = ValueHead(self.value_head_config, self.language_model.hidden_size)
            if self.value_head_config.adapter:
                self.language_model.add_critic_adapter()

    def encode(self, prompt: PromptTemplate, codec: TextCodec, observation: str, history: History) -> list[int]:
        """Return the token ids of the prompt for one observation, and count the turns of history that it lost.

        Raises:
            ValueError: it is too long even without any history.
        """
        ids, dropped = self.language_model.tokenizer.encode_prompt(
            prompt, codec, observation, history, self.max_prompt_tokens
        )
        self.dropped_turns += dropped
        return ids

    def encode_all(
        self, prompt: PromptTemplate, codec: TextCodec, turns: Sequence[tuple[str, History]]
    ) -> list[list[int]]:
        """Return what :meth:`encode` returns for many observations with their history, encoded together.

        Raises:
            ValueError: one is too long even without any history.
        """
        encoded = self.language_model.tokenizer.encode_prompts(prompt, codec, turns, self.max_prompt_tokens)
        self.dropped_turns += sum(dropped for _, dropped in encoded)
        return [ids for ids, _ in encoded]

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights of the value head and of its adapter."""
        own = [] if self.value_head is None else list(self.value_head.parameters())
        return [*own, *self.language_model.critic_parameters()]

    @property
    def has_fixed_states(self) -> bool:
        """Return whether training the value head alone leaves the hidden states that it reads unchanged."""
        return self.value_head is not None and not self.language_model.has_critic_adapter

    def values(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Compute the values ``(row,)`` at the last token of each prompt, without dropout.

        Args:
            prompts: token ids, one sequence per row.
        """
        assert self.value_head is not None
        model = self.language_model
        inputs = pad_prompts(prompts, model.device)
        inputs["response_ids"] = inputs["prompt_ids"].new_zeros(len(prompts), 1)
        mask = torch.ones(len(prompts), 1, dtype=torch.bool, device=model.device)
        after = mask & (model.lower is None)  # a token after the prompt changes nothing
        passes, parts = model.passes(inputs, after.sum(1), logits=False), list[Tensor]()
        with without_gradient(model):
            for turns in passes:
                layout = model.lay_out({name: tensor[turns] for name, tensor in inputs.items()}, after[turns])
                states = model.critic_states(layout) if model.has_critic_adapter else model.token_states(layout)
                parts.append(self.value_head(states, mask[turns])[:, 0])
        values = torch.cat(parts)
        return torch.empty_like(values).index_copy_(0, torch.cat(passes), values)
