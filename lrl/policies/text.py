"""The language model that writes its action, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lrl.functional.distributions import Categorical
from lrl.functional.masking import selected_logprobs
from lrl.functional.random import seeded, token_bits
from lrl.models.decode_loop import DecodeLoop
from lrl.models.generator import Generator
from lrl.models.language_model import LanguageModel, LanguageModelConfig
from lrl.models.prompt_sharing import Layout
from lrl.models.tokenizer import ChatTokenizer
from lrl.models.value_head import ValueHead, ValueHeadConfig
from lrl.policies.policy import Policy
from lrl.prompts.response_format import response_format
from lrl.prompts.template import PromptTemplate
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch

_LOGITS = 2**26
"""How many logits are computed at once where no gradient is needed."""


class TextPolicy(Policy):
    """Generates a turn as text; every sampled token counts.

    Args:
        language_model: which causal LM.
        prompt: how an observation becomes a prompt.
        sampling: the distribution that training samples from. Only the temperature may be changed: top-k and top-p
            would need the sampled support at training time.
        max_prompt_tokens: a longer prompt loses its oldest history first.
        pack_tokens: lay several turns out in one row of this many tokens when they are evaluated, none seeing another;
            null shares equal prompts instead. Pays where prompts differ in length.
        value_head: a critic on the trunk; null has none.
        generator: writes the responses; null decodes with the language model itself.
    """

    answers_by_text = True

    def __init__(
        self,
        language_model: LanguageModelConfig,
        prompt: PromptTemplate,
        sampling: SamplingConfig,
        max_prompt_tokens: int = 1024,
        pack_tokens: int | None = None,
        value_head: ValueHeadConfig | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0; training samples, so it must be positive.")
        if sampling.top_k is not None or sampling.top_p is not None:
            raise ValueError("sampling.top_k and sampling.top_p must be null in training; give them to an evaluation.")
        self.language_model = LanguageModel(language_model)
        self.prompt, self.sampling, self.max_prompt_tokens = prompt, sampling, max_prompt_tokens
        self.pack_tokens = pack_tokens
        self.critic, self.value_head = value_head, None
        self.has_critic = value_head is not None
        self.dropped_turns = 0
        self.generator: Generator = generator or DecodeLoop(self.language_model, self.stop_text)

    @property
    def response_format(self) -> str:
        """As the prompt asks for."""
        return self.prompt.response_format

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer; there after :meth:`configure`."""
        return self.language_model.tokenizer

    def configure(self) -> None:
        """Load the language model, and draw the value head's weights."""
        self.language_model.configure()
        if self.critic is not None and self.value_head is None:
            self.value_head = ValueHead(self.critic, self.language_model.hidden_size)
            if self.critic.adapter:
                self.language_model.add_critic_adapter()

    def build_reference(self, warm_started: bool) -> None:
        """Keep the current weights as the reference."""
        self.language_model.build_reference(warm_started)

    @property
    def fingerprint(self) -> str:
        """Of the causal LM, as it was loaded."""
        return self.language_model.fingerprint

    @property
    def stop_text(self) -> str | None:
        """The text that ends an answer."""
        return response_format(self.prompt.response_format).stop

    def encode(self, observation: str, history: History) -> list[int]:
        """Token ids of the prompt for one observation."""
        assert self.codec is not None
        ids, dropped = self.tokenizer.encode_prompt(
            self.prompt, self.codec, observation, history, self.max_prompt_tokens
        )
        self.dropped_turns += dropped
        return ids

    def encode_response(self, response: str) -> list[int]:
        """Token ids of an answer as it would have been sampled: the token that ends it included."""
        ids = self.tokenizer.encode_text(response)
        stops = self.tokenizer.stop_ids(self.stop_text)
        return ids if ids and ids[-1] in stops else [*ids, self.tokenizer.end_id]

    def write(self, action_text: str, reasoning: str) -> str:
        """An answer in the prompt's format."""
        return response_format(self.prompt.response_format).render(action_text, reasoning)

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Write one answer per row."""
        assert self.codec is not None
        sampling = self.sampling if sampling is None else sampling
        prompts = [self.encode(text, history) for text, history in zip(observations, memory, strict=True)]
        was_training = self.training
        self.eval()
        responses = self.generator.generate(prompts, token_bits(keys, sampling.max_new_tokens), sampling)
        inputs = pad_prompts(prompts, responses.ids.device) | {"response_ids": responses.ids}
        logprobs = responses.logprobs
        if sampling is self.sampling and self.language_model.recomputes:
            logprobs = self._teacher_forced(inputs, responses.mask)
        self.train(was_training)
        lengths = responses.mask.sum(1).tolist()
        texts = [self.tokenizer.decode(ids[:n]) for ids, n in zip(responses.ids.tolist(), lengths)]
        memory = [self.prompt.remember(self.codec, *row) for row in zip(memory, observations, texts, strict=True)]
        return Decisions(actions=texts, inputs=inputs, response_mask=responses.mask, logprobs=logprobs, memory=memory)

    @torch.no_grad()
    def _teacher_forced(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Log-probabilities ``(turn, token)`` as :meth:`evaluate` has them, of a few turns at a time."""
        vocabulary = self.language_model.model.get_output_embeddings().weight.shape[0]
        size = max(1, _LOGITS // (vocabulary * mask.shape[1]))
        parts = []
        for start in range(0, len(mask), size):
            part = {name: tensor[start : start + size] for name, tensor in inputs.items()}
            seen = mask[start : start + size]
            logits = self.language_model.logits(self._layout(part, seen))
            parts.append(
                selected_logprobs(logits / self.sampling.temperature, part["response_ids"][:, : seen.shape[1]])
            )
        return torch.cat(parts) * mask

    def _layout(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Layout:
        return self.language_model.lay_out(inputs, mask, pack_tokens=self.pack_tokens)

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Teacher-forced log-probabilities at the sampling temperature; dropout off unless a seed names it.

        The mode stays as it is set here: layers that compute their activations again do so in the backward pass.
        """
        self.train(dropout_seed is not None)
        layout = self._layout(batch.inputs, batch.response_mask)
        mask, values = batch.response_mask, None
        with seeded(dropout_seed, self.language_model.device):
            if self.value_head is None:
                logits = self.language_model.logits(layout)
            else:
                logits, states = self.language_model.logits_and_states(layout)
                values = self.value_head(states, mask)
        distribution = Categorical(logits / self.sampling.temperature)
        logprobs = distribution.logprobs(batch.inputs["response_ids"][:, : mask.shape[1]])
        return Evaluation(
            logprobs=logprobs * mask, entropy=distribution.entropy() * mask, values=values, distribution=distribution
        )

    def critic_view(self, batch: TurnBatch, chunk_size: int | None = None) -> Callable[[Tensor], Tensor]:
        """A head on a trunk that it shares reads states that do not change with it."""
        if self.value_head is None or self.language_model.has_critic_adapter:
            return super().critic_view(batch, chunk_size)
        self.eval()
        states = torch.cat([self._states(part) for part in batch.split(chunk_size)])
        return self.value_head.view(states, batch.response_mask)

    @torch.no_grad()
    def _states(self, batch: TurnBatch) -> Tensor:
        """What each token's logits are made from, ``(turn, token, hidden)``."""
        layout = self._layout(batch.inputs, batch.response_mask)
        return self.language_model.logits_and_states(layout)[1]

    def critic_parameters(self) -> list[nn.Parameter]:
        """The value head's, and those of its adapter."""
        own = [] if self.value_head is None else list(self.value_head.parameters())
        return [*own, *self.language_model.critic_parameters()]

    @torch.no_grad()
    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """The value head's, at the last token of each prompt."""
        if self.value_head is None:
            return super().state_values(observations, memory)
        prompts = [self.encode(text, history) for text, history in zip(observations, memory, strict=True)]
        return prompt_values(self.language_model, self.value_head, prompts)

    @torch.no_grad()
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Log-probabilities under the policy as it was when this run started."""
        self.eval()
        layout = self.language_model.lay_out(batch.inputs, batch.response_mask)
        logits = self.language_model.reference_logits(layout) / self.sampling.temperature
        return selected_logprobs(logits, batch.inputs["response_ids"]) * batch.response_mask

    def with_sampling(self, **changes: Any) -> SamplingConfig:
        """This policy's sampling with some values changed, for evaluation."""
        return replace(self.sampling, **changes)


def prompt_values(model: LanguageModel, head: ValueHead, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Values ``(row,)`` of the states that prompts end in, without dropout."""
    inputs = pad_prompts(prompts, model.device)
    inputs["response_ids"] = inputs["prompt_ids"].new_zeros(len(prompts), 1)
    mask = torch.ones(len(prompts), 1, dtype=torch.bool, device=model.device)
    was_training = model.training
    model.eval()
    _, states = model.logits_and_states(model.lay_out(inputs, mask))
    model.train(was_training)
    return head(states, mask)[:, 0]


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """``prompt_ids`` and ``prompt_mask`` ``(row, prompt)``, right-padded with 0."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([list(p) + [0] * (width - len(p)) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return {"prompt_ids": ids, "prompt_mask": torch.arange(width, device=device)[None] < lengths[:, None]}
