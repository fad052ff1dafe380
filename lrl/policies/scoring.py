"""Policy that chooses among the legal actions by the log-probabilities of their texts.

The score of an action is the log-probability of its text as a continuation of the prompt, and the policy is a softmax
over the scores (GLAM, arXiv:2302.02662; TWOSOME, arXiv:2401.14151). Since no text is generated, there are no invalid
responses. A turn is one token, whose id is the index of the chosen action.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from lrl.codecs.codec import TextCodec
from lrl.functional.distributions import Categorical
from lrl.functional.random import seeded, token_bits
from lrl.lm.attention import compute_dtype
from lrl.lm.config import LanguageModelConfig
from lrl.lm.forward import without_gradient
from lrl.lm.heads import ValueHead, ValueHeadConfig
from lrl.lm.layouts import Candidates, pad_prompts
from lrl.lm.logprobs import candidate_logprobs, prefix_sums, sample_tokens, sampling_logprobs
from lrl.policies.policy import LanguageModelTrunk, Policy
from lrl.prompts import PromptTemplate
from lrl.ranges import PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


@register
@final
class ScoringPolicy(Policy):
    """A softmax over the log-probabilities of the actions' texts, for environments with finitely many actions.

    The texts are called candidates. Their log-probabilities do not include an end token. If every candidate is one
    token, only the prompt is computed. Equal prompts are computed once, the candidates share the computation of their
    prompt, and in rollouts prompts share the computation of their common prefix.

    Args:
        language_model: specifies the causal LM.
        prompt: template of the prompts; its response format must be ``direct``.
        temperature: divisor of the scores.
        normalisation: ``sum`` adds the log-probabilities of a text's tokens (GLAM); ``token`` and ``word`` divide the
            sum by the number of tokens or words (TWOSOME), so that short texts are not favoured.
        max_prompt_tokens: maximum number of tokens of a prompt. The oldest turns of history are removed from a longer
            prompt.
        pack_tokens: number of tokens of a packed row. A packed row contains several prompts and computes their common
            prefix once; null chooses the length with the lowest cost.
        value_head: configures a critic on the hidden states; null creates none.

    Raises:
        ValueError: If a setting is out of range, or if the response format is not ``direct``.
    """

    greedy_is_reproducible = True
    demonstration_losses = ("completion",)
    prompt: PromptTemplate
    trunk: LanguageModelTrunk
    value_head: ValueHead | None

    def __init__(
        self,
        language_model: LanguageModelConfig,
        prompt: PromptTemplate,
        temperature: PositiveFloat = 1.0,
        normalisation: Literal["sum", "token", "word"] = "sum",
        max_prompt_tokens: PositiveInt = 1024,
        pack_tokens: PositiveInt | None = None,
        value_head: ValueHeadConfig | None = None,
    ) -> None:
        super().__init__()
        check_arguments(ScoringPolicy.__init__, locals(), "policy")
        if prompt.response_format != "direct":
            raise ValueError(
                f"prompt.response_format is {prompt.response_format!r}; it must be direct, because only actions "
                "are scored."
            )
        self.trunk = LanguageModelTrunk(language_model, max_prompt_tokens, value_head)
        self.language_model, self.value_head = self.trunk.language_model, self.trunk.value_head
        self.prompt, self.pack_tokens = prompt, pack_tokens
        self.normalisation = normalisation
        self.temperature, self.sampling = temperature, SamplingConfig(temperature=temperature, max_new_tokens=1)
        self.has_critic = value_head is not None
        self.action_texts: tuple[str, ...] = ()
        self._candidate_ids: list[list[int]] = []
        self._built: Candidates | None = None

    @property
    def response_format(self) -> str:
        """Name of the response format that the prompt asks for: ``direct``."""
        return self.prompt.response_format

    def connect(self, codec: TextCodec) -> None:
        """Set the codec, whose action texts are the candidates.

        Raises:
            ValueError: If the environment has infinitely many actions.
        """
        super().connect(codec)
        if codec.action_texts is None:
            name = type(codec).__name__
            raise ValueError(
                f"model.policy is a ScoringPolicy, but the actions of {name} are not finitely many; "
                "it must be a TextPolicy."
            )
        self.action_texts = codec.action_texts
        if self._candidate_ids:  # the policy is configured already, for other actions perhaps
            self._encode_actions()

    def configure(self) -> None:
        """Load the language model and initialise the value head."""
        self.trunk.configure()
        self.value_head = self.trunk.value_head
        self.language_model.tokenizer.check(self.prompt)
        self.language_model.prepare_history(self.prompt, self.codec)
        self._encode_actions()
        if self.pack_tokens is not None and not self.language_model.share:
            logging.getLogger("lrl").warning("policy.pack_tokens is ignored: turns of this model cannot share rows.")

    def _encode_actions(self) -> None:
        """Encode the texts of the actions.

        Raises:
            ValueError: If two actions have the same tokens, or if an action has no tokens.
        """
        self._candidate_ids = [self.language_model.tokenizer.encode_text(text) for text in self.action_texts]
        self._built = None
        name, texts = self.language_model.config.name, dict[tuple[int, ...], str]()
        for text, ids in zip(self.action_texts, self._candidate_ids, strict=True):
            other = texts.setdefault(tuple(ids), text)
            if not ids or other != text:
                problem = f"converts {other!r} and {text!r} to the same tokens" if ids else f"has no token for {text!r}"
                raise ValueError(
                    f"language_model.name is {name!r}, which {problem}; its vocabulary must contain the words of all "
                    "actions."
                )

    @property
    def defers_logprobs(self) -> bool:
        """True if log-probabilities are computed again at the end of a collection: with history, in 16 bits."""
        return bool(self.prompt.history) and self.language_model.share and self.language_model.recomputes

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Return one id per response, the index of its action among the candidates.

        Raises:
            ValueError: If a response is not a legal action.
        """
        texts = [self.action_text(response) for response in responses]
        if "" in texts:
            raise ValueError(
                f"data.demonstrations have the response {responses[texts.index('')]!r}, which a ScoringPolicy cannot "
                "choose; it must be a legal action alone."
            )
        return [[self.action_texts.index(text)] for text in texts]

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Sample one action per row, or take the most probable one at temperature 0."""
        assert self.codec is not None
        prompts = [self.encode(*row) for row in zip(observations, memory, strict=True)]
        inputs = pad_prompts(prompts, self.language_model.device)
        with without_gradient(self):
            model = self.language_model
            has_history = bool(self.prompt.history)  # then the cache of prompts saves more than states of lower layers
            recomputed = sampling is self.sampling and model.recomputes
            if model.share and (has_history or (model.lower is None and not recomputed)):
                model.keep_prompts(keys if has_history else None)
                candidates = self._candidates()
                model.prepare_decoding(max(len(prompt) for prompt in prompts), candidates.ids.shape[1])
                dtype = compute_dtype(model.model)
                model.record_states(keys)
                sums, states = candidate_logprobs(model.model, prompts, candidates, dtype, model.kept, model.recording)
                scores = sums / self._divisors()
            else:
                model.keep_prompts(None)
                scores, states = self._scores_and_states(inputs["prompt_ids"], inputs["prompt_mask"])
            mask, values = torch.ones(len(prompts), 1, dtype=torch.bool, device=scores.device), None
            if self.value_head is not None and self.trunk.has_fixed_states:
                values = self.value_head(cast(Tensor, states)[:, None], mask)
        logprobs = sampling_logprobs(scores, sampling)
        choice = sample_tokens(logprobs, token_bits(keys, 1)[:, 0].to(scores.device))
        texts = [self.action_texts[index] for index in choice.tolist()]
        return Decisions(
            actions=texts,
            inputs=inputs | {"response_ids": choice[:, None]},
            response_mask=mask,
            values=values,
            logprobs=logprobs.gather(-1, choice[:, None]),
            memory=[
                self.prompt.extend_history(self.codec, *row) for row in zip(memory, observations, texts, strict=True)
            ],
        )

    def scores(self, prompt_ids: Tensor, prompt_mask: Tensor, reference: bool = False) -> Tensor:
        """Compute normalised log-probabilities ``(turn, candidate)`` of the actions' texts.

        Args:
            prompt_ids: right-padded token ids, int64 ``(turn, prompt)``.
            prompt_mask: True for tokens of prompts, bool ``(turn, prompt)``.
            reference: whether to use the weights at the start of this run, without gradient.
        """
        return self._scores_and_states(prompt_ids, prompt_mask, reference)[0]

    def _scores_and_states(
        self, prompt_ids: Tensor, prompt_mask: Tensor, reference: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute :meth:`scores`, and for a value head the hidden states ``(turn, hidden)`` after the prompts."""
        prompt_ids = prompt_ids * prompt_mask
        # The length is part of the key, because a prompt may differ from another one only by tokens with id 0.
        lengths_and_ids = torch.cat([prompt_mask.sum(1, keepdim=True), prompt_ids], dim=1)
        unique, index = torch.unique(lengths_and_ids, dim=0, return_inverse=True)
        sums, states = self._score_unique(unique, reference)
        return (sums / self._divisors())[index], None if states is None else states[index]

    def _score_unique(self, unique: Tensor, reference: bool) -> tuple[Tensor, Tensor | None]:
        """Compute sums of the candidates' log-probabilities, ``(prompt, candidate)``, and states ``(prompt, hidden)``.

        Args:
            unique: the length of each prompt, followed by its tokens, int64 ``(prompt, 1 + token)``.
            reference: whether to use the weights at the start of this run.
        """
        candidates, model, response = self._candidates(), self.language_model, None
        lengths, prompts, count = unique[:, 0], unique[:, 1 : 1 + int(unique[:, 0].max())], len(candidates.ids)
        columns = torch.arange(prompts.shape[1], device=prompts.device)[None] < lengths[:, None]
        # One row per prompt with all its candidates. Candidates of one token need only the logits after the prompt.
        if model.share or candidates.ids.shape[1] == 1:
            empty, empty_mask = prompts.new_zeros(len(prompts), 1), columns.new_zeros(len(prompts), 1)
            inputs = {"prompt_ids": prompts, "prompt_mask": columns, "response_ids": empty}
            layout = model.lay_out(inputs, empty_mask, self.pack_tokens, candidates)
        else:  # one row per prompt and candidate
            response, response_mask = (part.repeat(len(unique), 1) for part in candidates[:2])
            repeated = {"prompt_ids": prompts.repeat_interleave(count, 0), "response_ids": response}
            layout = model.lay_out(repeated | {"prompt_mask": columns.repeat_interleave(count, 0)}, response_mask)
        states = None
        if reference:
            logits = model.reference_logits(layout)
        elif self.value_head is None:
            logits = model.logits(layout)
        else:
            logits, states = model.logits_and_states(layout)
            states = states.view(len(unique), -1, *states.shape[1:])[:, 0, 0]
        if response is None:
            return prefix_sums(logits, candidates), states
        each = Categorical(logits).logprobs(response) * response_mask
        return each.sum(-1).view(len(unique), count), states

    def _candidates(self) -> Candidates:
        """Return the tokens of the candidates on the device of the weights."""
        device = self.language_model.device
        if self._built is None or self._built.ids.device != device:
            with torch.inference_mode(False):  # else tensors built in a validation could not be used in training
                self._built = Candidates.of(self._candidate_ids, device)
        return self._built

    def _divisors(self) -> Tensor:
        """Return the divisor of each candidate's log-probability, ``(candidate,)``; see ``normalisation``."""
        if self.normalisation == "sum":
            return torch.ones(len(self._candidate_ids), device=self.language_model.device)
        sizes = [*map(len, self._candidate_ids if self.normalisation == "token" else map(str.split, self.action_texts))]
        return torch.tensor(sizes, device=self.language_model.device)

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute the log-probability of each choice and the entropy over the candidates, each ``(turn, 1)``."""
        self.train(dropout_seed is not None)
        with seeded(dropout_seed, self.language_model.device):
            scores, states = self._scores_and_states(batch.inputs["prompt_ids"], batch.inputs["prompt_mask"])
        distribution = Categorical(scores[:, None], self.sampling.temperature)
        values = None
        if self.value_head is not None and states is not None:
            values = self.value_head(states[:, None], batch.response_mask)
        logprobs = distribution.logprobs(batch.inputs["response_ids"])
        return Evaluation(logprobs=logprobs, entropy=distribution.entropy(), values=values, distribution=distribution)

    def passes(self, batch: TurnBatch, gradient: bool = False) -> list[Tensor]:
        """Divide turns among forward passes; equal prompts are in the same pass, where they are computed once."""
        prompts = {name: batch.inputs[name] for name in ("prompt_ids", "prompt_mask")}
        after = 0 if max(map(len, self._candidate_ids), default=0) == 1 else sum(map(len, self._candidate_ids))
        if after and not self.language_model.share:  # the prompt is computed again for each candidate
            after += (len(self._candidate_ids) - 1) * prompts["prompt_ids"].shape[1]
        sizes = torch.full((len(batch),), after, device=prompts["prompt_ids"].device)
        return self.language_model.passes(prompts, sizes, gradient=gradient)

    def critic_view(self, batch: TurnBatch) -> Callable[[Tensor], Tensor]:
        """Return a function that computes values while only the critic is trained; see :meth:`Policy.critic_view`."""
        if not self.trunk.has_fixed_states:
            return super().critic_view(batch)

        def states_of(turns: TurnBatch) -> Tensor:
            """Return the hidden states ``(turn, hidden)`` from which the critic computes values."""
            prompts = turns.inputs["prompt_ids"], turns.inputs["prompt_mask"]
            return cast(Tensor, self._scores_and_states(*prompts)[1])

        states = self.in_passes(batch, states_of)
        assert self.value_head is not None
        return self.value_head.view(states[:, None], batch.response_mask)

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute log-probabilities ``(turn, 1)`` of the chosen actions under the reference policy."""
        return self.in_passes(batch, self._reference_logprobs)

    def _reference_logprobs(self, batch: TurnBatch) -> Tensor:
        scores = self.scores(batch.inputs["prompt_ids"], batch.inputs["prompt_mask"], reference=True)
        logprobs = Categorical(scores, self.sampling.temperature).all_logprobs
        return logprobs.gather(-1, batch.inputs["response_ids"])
