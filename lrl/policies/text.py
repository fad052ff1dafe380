"""Policy whose language model generates a response as text, which contains the action."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lrl.chat.generator import ServedGenerator
from lrl.codecs.codec import InvalidActionError
from lrl.functional.random import seeded, token_bits
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import DecodeLoop, Generator
from lrl.lm.forward import without_gradient
from lrl.lm.heads import ValueHead, ValueHeadConfig
from lrl.lm.layouts import Layout, pad_prompts
from lrl.policies.policy import LanguageModelTrunk, Policy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


@register
@final
class TextPolicy(Policy):
    """A language model that generates its response as text; every sampled token contributes to the loss.

    Args:
        language_model: specifies the causal LM.
        prompt: template of the prompts.
        sampling: sampling settings in training. ``top_k`` and ``top_p`` must be null, because training would have to
            store which tokens could be sampled.
        max_prompt_tokens: maximum number of tokens of a prompt. The oldest turns of history are removed from a longer
            prompt.
        pack_tokens: number of tokens of a packed row in training. A packed row contains several turns and computes
            their common prefix once; null chooses the length with the lowest cost.
        value_head: configures a critic on the hidden states; null creates none.
        generator: samples the responses, such as a :class:`~lrl.chat.generator.ServedGenerator`; null selects the
            built-in decoding loop.

    Raises:
        ValueError: If the temperature is 0, or if ``top_k`` or ``top_p`` is set.
    """

    greedy_is_reproducible = True
    writes_text = True
    demonstration_losses = ("completion", "all")
    prompt: PromptTemplate
    trunk: LanguageModelTrunk
    value_head: ValueHead | None

    def __init__(
        self,
        language_model: LanguageModelConfig,
        prompt: PromptTemplate,
        sampling: SamplingConfig,
        max_prompt_tokens: PositiveInt = 1024,
        pack_tokens: PositiveInt | None = None,
        value_head: ValueHeadConfig | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        check_arguments(TextPolicy.__init__, locals(), "policy")
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0; training samples, so it must be positive.")
        if sampling.top_k is not None or sampling.top_p is not None:
            raise ValueError(
                "sampling.top_k and sampling.top_p must be null in training; only evaluation supports them."
            )
        self.trunk = LanguageModelTrunk(language_model, max_prompt_tokens, value_head)
        self.language_model, self.value_head = self.trunk.language_model, self.trunk.value_head
        self.prompt, self.sampling, self.pack_tokens = prompt, sampling, pack_tokens
        self.has_critic = value_head is not None
        self.generator: Generator = generator or DecodeLoop(self.language_model, self.stop_text)
        if isinstance(generator, ServedGenerator):
            generator.connect(self.language_model, self.stop_text)

    @property
    def response_format(self) -> str:
        """Name of the response format that the prompt asks for."""
        return self.prompt.response_format

    @property
    def stop_text(self) -> str | None:
        """Text that ends a response; None if only the end-of-turn token ends it."""
        return self.prompt.stop or get_response_format(self.prompt.response_format).stop

    def configure(self) -> None:
        """Load the language model and initialise the value head."""
        self.trunk.configure()
        self.value_head = self.trunk.value_head
        self.language_model.tokenizer.check(self.prompt)
        self.language_model.prepare_history(self.prompt, self.codec)
        self._check_responses()

    @property
    def defers_logprobs(self) -> bool:
        """True if log-probabilities are computed again at the end of a collection: with history, in 16 bits."""
        return bool(self.prompt.history) and self.language_model.share and self.language_model.recomputes

    @property
    def importance_cap(self) -> float | None:
        """Largest importance weight of a token; None without a server, or if its log-probabilities are trained on."""
        if isinstance(self.generator, ServedGenerator) and self.language_model.recomputes:
            return self.generator.importance_cap
        return None

    def _check_responses(self) -> None:
        """Log a warning if the tokenizer cannot represent an action, or if no action fits in ``max_new_tokens``.

        The responses that are checked contain an action and no reasoning.
        """
        if self.codec is None:
            return
        response_format = get_response_format(self.response_format)
        actions = self.codec.action_texts or (self.codec.default_action_text,)
        responses, tokenizer = [*map(response_format.render, actions)], self.language_model.tokenizer
        encoded = tokenizer.encode_texts([*map(tokenizer.continuation, responses)])
        for response, ids in zip(responses, encoded, strict=True):
            decoded = tokenizer.response_text(ids)
            try:
                self.codec.text_to_action(response_format.extract(decoded))
            except InvalidActionError as error:
                logging.getLogger("lrl").warning(
                    f"the tokenizer of language_model.name {self.language_model.config.name!r} cannot represent the "
                    f"response {response!r}: it becomes {decoded!r}, which is not valid ({error})."
                )
                break
        tokens = [*map(len, encoded)]
        if min(tokens) > self.sampling.max_new_tokens:
            shortest = responses[tokens.index(min(tokens))]
            logging.getLogger("lrl").warning(
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}, but a response such as {shortest!r} has "
                f"{min(tokens)} tokens and is truncated; it must be at least {min(tokens)}."
            )

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Return the token ids of demonstrated responses, each with the token that ends it.

        Tokens after the first one that ends a response are omitted, because sampling stops there. A stop text of
        several tokens is not such a token: the end token follows it, although sampling stops at this text.

        Raises:
            ValueError: If the chat template puts an opening tag at the end of prompts, and a response does not begin
                with this tag.
        """
        tokenizer = self.language_model.tokenizer
        stops = tokenizer.stop_ids(self.stop_text)
        encoded = tokenizer.encode_texts([*map(tokenizer.continuation, responses)])
        ends = [next((place for place, token in enumerate(ids, 1) if token in stops), None) for ids in encoded]
        return [[*ids, tokenizer.end_id] if end is None else ids[:end] for ids, end in zip(encoded, ends, strict=True)]

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Generate one response per row."""
        assert self.codec is not None
        prompts = [self.encode(*row) for row in zip(observations, memory, strict=True)]
        with without_gradient(self):
            self.language_model.keep_prompts(keys if self.prompt.history else None)
            self.language_model.record_states(keys)
            responses = self.generator.generate(prompts, token_bits(keys, sampling.max_new_tokens), sampling)
            inputs = pad_prompts(prompts, responses.ids.device) | {"response_ids": responses.ids}
            logprobs = responses.logprobs
            is_weighted = sampling is self.sampling and self.importance_cap is not None
            if sampling is self.sampling and self.language_model.recomputes and not self.defers_logprobs:
                logprobs = self._teacher_forced(inputs, responses.mask)
        lengths, decode = responses.mask.sum(1).tolist(), self.language_model.tokenizer.response_text
        texts = [decode(ids[:n]) for ids, n in zip(responses.ids.tolist(), lengths)]
        memory = [self.prompt.extend_history(self.codec, *row) for row in zip(memory, observations, texts, strict=True)]
        return Decisions(
            actions=texts,
            inputs=inputs,
            response_mask=responses.mask,
            logprobs=logprobs,
            memory=memory,
            behaviour_logprobs=responses.logprobs if is_weighted else None,
        )

    def _teacher_forced(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Compute log-probabilities ``(turn, token)`` of given tokens, in passes whose memory is bounded.

        It must be called inside :func:`~lrl.lm.forward.without_gradient`, like :meth:`_logprobs`.

        Args:
            inputs: prompts and responses, each ``(turn, ...)``.
            mask: true for the tokens of responses, bool ``(turn, token)``.
        """
        zeros = torch.zeros_like(mask, dtype=torch.float32)
        turns = TurnBatch(inputs=inputs, response_mask=mask, old_logprobs=zeros, advantages=zeros)

        def logprobs(part: TurnBatch) -> Tensor:
            """Return the log-probabilities ``(turn, token)`` of the turns of one pass."""
            layout = self._layout(part.inputs, part.response_mask)
            return self._logprobs(layout, part.inputs["response_ids"], part.response_mask)

        return self.in_passes(turns, logprobs) * mask

    def _logprobs(self, layout: Layout, ids: Tensor, mask: Tensor, model: Any = None) -> Tensor:
        """Compute log-probabilities ``(turn, token)`` of tokens.

        Args:
            layout: rows with the turns.
            ids: tokens of the responses, int64 ``(turn, token)``.
            mask: true for the tokens of responses, bool ``(turn, token)``.
            model: the model to use; None uses the policy's own.
        """
        ids = ids[:, : mask.shape[1]]
        if self.language_model.in_chunks(mask):
            return self._in_chunks(self.language_model.token_states(layout, model), layout, ids, mask, model)[0]
        return self.language_model.distribution(layout, self.sampling.temperature, model)[0].logprobs(ids)

    def _in_chunks(
        self, states: Tensor, layout: Layout, ids: Tensor, mask: Tensor, model: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies, each ``(turn, token)``, from states ``(turn, token, hidden)``.

        Equal tokens that are predicted at the same position of a row, as in groups that share a prompt, are computed
        once.
        """
        keys = layout.kept[mask] * self.language_model.vocabulary
        distinct, index = torch.unique(keys + ids[mask], return_inverse=True)
        number = torch.arange(len(index), device=index.device)
        first = number.new_full((len(distinct),), len(index)).scatter_reduce(0, index, number, "amin")
        of_distinct = self.language_model.token_logprobs(
            states[mask][first], ids[mask][first], self.sampling.temperature, model
        )
        logprobs, entropy = (part.new_zeros(mask.shape).masked_scatter(mask, part[index]) for part in of_distinct)
        return logprobs, entropy

    def _layout(self, inputs: Mapping[str, Tensor], mask: Tensor) -> Layout:
        """Return the rows that contain the given turns."""
        return self.language_model.lay_out(inputs, mask, pack_tokens=self.pack_tokens)

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute log-probabilities, entropy and values of past turns, at the sampling temperature of training.

        The train or eval mode that is set here is not reset at the end, because gradient checkpointing runs the layers
        again in the backward pass.
        """
        self.train(dropout_seed is not None)
        layout = self._layout(batch.inputs, batch.response_mask)
        mask, values = batch.response_mask, None
        ids = batch.inputs["response_ids"][:, : mask.shape[1]]
        if not self.needs_distribution and self.language_model.in_chunks(mask):
            with seeded(dropout_seed, self.language_model.device):
                states = self.language_model.token_states(layout)
                if self.value_head is not None:
                    critic = self.language_model.has_critic_adapter
                    values = self.value_head(self.language_model.critic_states(layout) if critic else states, mask)
            logprobs, entropy = self._in_chunks(states, layout, ids, mask)
            return Evaluation(logprobs=logprobs, entropy=entropy, values=values)
        with seeded(dropout_seed, self.language_model.device):
            distribution, states = self.language_model.distribution(layout, self.sampling.temperature)
            if self.value_head is not None:
                critic = self.language_model.has_critic_adapter
                values = self.value_head(self.language_model.critic_states(layout) if critic else states, mask)
        logprobs = distribution.logprobs(ids)
        return Evaluation(
            logprobs=logprobs * mask, entropy=distribution.entropy() * mask, values=values, distribution=distribution
        )

    def passes(self, batch: TurnBatch, gradient: bool = False) -> list[Tensor]:
        """Divide turns among forward passes; turns with equal prompts are in the same pass, where they share rows."""
        logits = self.needs_distribution or not self.language_model.chunks
        sizes = batch.response_mask.sum(1)
        return self.language_model.passes(batch.inputs, sizes, gradient=gradient, logits=logits)

    def critic_view(self, batch: TurnBatch) -> Callable[[Tensor], Tensor]:
        """Return a function that computes values while only the critic is trained; see :meth:`Policy.critic_view`."""
        if not self.trunk.has_fixed_states:
            return super().critic_view(batch)
        states = self.in_passes(batch, self._states)
        assert self.value_head is not None
        return self.value_head.view(states, batch.response_mask)

    def _states(self, batch: TurnBatch) -> Tensor:
        """Compute the hidden states ``(turn, token, hidden)`` that predict each token."""
        return self.language_model.token_states(self._layout(batch.inputs, batch.response_mask))

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute log-probabilities ``(turn, token)`` under the reference policy, without gradient."""
        return self.in_passes(batch, self._reference_logprobs)

    def _reference_logprobs(self, batch: TurnBatch) -> Tensor:
        ids, mask = batch.inputs["response_ids"], batch.response_mask
        layout = self.language_model.lay_out(batch.inputs, mask)
        with self.language_model.reference() as model:
            return self._logprobs(layout, ids, mask, model) * mask
