"""The language model that chooses among the legal actions by the probability of their text.

Nothing is generated, so nothing illegal can be said: the candidates' texts behind the prompt are scored, and a softmax
over the scores is the policy (GLAM, arXiv:2302.02662; TWOSOME, arXiv:2401.14151). A turn is one token: the choice. Its
id is the action's place among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.functional.distributions import Categorical
from lrl.functional.masking import selected_logprobs
from lrl.functional.random import seeded, token_bits
from lrl.models.candidate_scoring import Normalisation, check_distinct, divisors
from lrl.models.language_model import LanguageModel, LanguageModelConfig
from lrl.models.sampling import sample_tokens, sampling_dtype, sampling_logprobs
from lrl.models.tokenizer import ChatTokenizer
from lrl.models.value_head import ValueHead, ValueHeadConfig
from lrl.policies.policy import Policy
from lrl.policies.text import pad_prompts, prompt_values
from lrl.prompts.response_format import response_format as format_named
from lrl.prompts.template import PromptTemplate
from lrl.types import Decisions, Evaluation, History, Inputs, RandomKeys, SamplingConfig, TurnBatch


class ScoringPolicy(Policy):
    """Probabilities of the legal actions' texts, for environments with finitely many actions.

    The score of a candidate is the log-probability of its tokens behind the prompt, without an end token, so that
    candidates of one token need no more than the prompt's own forward pass. Equal prompts are computed once; candidates
    share their prompt, and while acting prompts share what they begin with.

    Args:
        language_model: which causal LM.
        prompt: how an observation becomes a prompt; its response format must be ``direct``.
        temperature: divides the scores.
        normalisation: ``sum`` of the tokens' log-probabilities (GLAM), or their mean per ``token`` or per ``word``
            (TWOSOME), which does not favour short texts.
        max_prompt_tokens: a longer prompt loses its oldest history first.
        length_groups: passes over prompts, each over those of like length: less padding.
        value_head: a critic on the trunk; null has none.
    """

    answers_by_text = True

    def __init__(
        self,
        language_model: LanguageModelConfig,
        prompt: PromptTemplate,
        temperature: float = 1.0,
        normalisation: Normalisation = "sum",
        max_prompt_tokens: int = 1024,
        length_groups: int = 1,
        value_head: ValueHeadConfig | None = None,
    ) -> None:
        super().__init__()
        if prompt.response_format != "direct":
            raise ValueError(
                f"prompt.response_format is {prompt.response_format!r}; it must be direct, actions alone are scored."
            )
        if temperature <= 0:
            raise ValueError(f"policy.temperature is {temperature}; training samples, so it must be positive.")
        if normalisation not in ("sum", "token", "word"):
            raise ValueError(f"policy.normalisation is {normalisation!r}; it must be sum, token or word.")
        if length_groups < 1:
            raise ValueError(f"policy.length_groups is {length_groups}; it must be at least 1.")
        self.language_model = LanguageModel(language_model)
        self.prompt = prompt
        self.normalisation: Normalisation = normalisation
        self.max_prompt_tokens, self.length_groups = max_prompt_tokens, length_groups
        self.sampling = SamplingConfig(temperature=temperature, max_new_tokens=1)
        self.critic, self.value_head, self.has_critic = value_head, None, value_head is not None
        self.dropped_turns = 0
        self.action_texts: tuple[str, ...] = ()
        self._tokens: list[list[int]] = []

    @property
    def response_format(self) -> str:
        """``direct``."""
        return self.prompt.response_format

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer; there after :meth:`configure`."""
        return self.language_model.tokenizer

    def connect(self, codec: TextCodec) -> None:
        """Take the codec's actions as candidates.

        Raises:
            ValueError: they are not finite.
        """
        super().connect(codec)
        if codec.action_texts is None:
            name = type(codec).__name__
            raise ValueError(
                f"model.policy is a ScoringPolicy, but the actions of {name} are not finitely many; "
                "it must be a TextPolicy there."
            )
        self.action_texts = codec.action_texts

    def configure(self) -> None:
        """Load the language model.

        Raises:
            ValueError: its tokenizer cannot tell two actions apart, or has no token for one.
        """
        self.language_model.configure()
        self._tokens = [self.tokenizer.encode_text(text) for text in self.action_texts]
        check_distinct(self.action_texts, self._tokens, self.language_model.config.name)
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

    def encode(self, observation: str, history: History) -> list[int]:
        """Token ids of the prompt for one observation."""
        assert self.codec is not None
        ids, dropped = self.tokenizer.encode_prompt(
            self.prompt, self.codec, observation, history, self.max_prompt_tokens
        )
        self.dropped_turns += dropped
        return ids

    def encode_response(self, response: str) -> list[int]:
        """The id of an answer: the place of its action among the candidates.

        Raises:
            ValueError: it is no legal action.
        """
        assert self.codec is not None
        try:
            action = self.codec.text_to_action(format_named(self.response_format).extract(response))
        except InvalidActionError as error:
            raise ValueError(
                f"data.demonstrations answer {response!r}, which a ScoringPolicy cannot choose: {error}; "
                "it must be the action alone."
            ) from error
        return [self.action_texts.index(self.codec.action_to_text(action))]

    def write(self, action_text: str, reasoning: str) -> str:
        """An answer in the prompt's format."""
        return format_named(self.response_format).render(action_text, reasoning)

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Choose one action per row."""
        assert self.codec is not None
        prompts = [self.encode(text, history) for text, history in zip(observations, memory, strict=True)]
        inputs = pad_prompts(prompts, self.language_model.device)
        was_training = self.training
        self.eval()
        if self.language_model.share and not (sampling is None and self.language_model.recomputes):
            ids, mask = self._candidates()
            sums, states = self.language_model.candidate_logprobs(prompts, ids, mask, self.length_groups)
            scores = sums / self._lengths(mask)
        else:
            scores, states = self._scores_and_states(inputs["prompt_ids"], inputs["prompt_mask"])
        mask = torch.ones(len(prompts), 1, dtype=torch.bool, device=scores.device)
        values = None
        if self.value_head is not None and not self.language_model.has_critic_adapter:
            values = self.value_head(cast(Tensor, states)[:, None], mask)
        self.train(was_training)
        logprobs = sampling_logprobs(scores, self.sampling if sampling is None else sampling)
        choice = sample_tokens(logprobs, token_bits(keys, 1)[:, 0].to(scores.device))
        texts = [self.action_texts[index] for index in choice.tolist()]
        return Decisions(
            actions=texts,
            inputs=inputs | {"response_ids": choice[:, None]},
            response_mask=mask,
            values=values,
            logprobs=logprobs.gather(-1, choice[:, None]),
            memory=[self.prompt.remember(self.codec, *row) for row in zip(memory, observations, texts, strict=True)],
        )

    def scores(self, prompt_ids: Tensor, prompt_mask: Tensor, reference: bool = False) -> Tensor:
        """Normalised log-probabilities ``(turn, candidate)`` behind right-padded prompts ``(turn, prompt)``.

        With ``reference`` by the policy as it was when this run started, without gradient.
        """
        return self._scores_and_states(prompt_ids, prompt_mask, reference)[0]

    def _scores_and_states(
        self, prompt_ids: Tensor, prompt_mask: Tensor, reference: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`scores`, and the hidden states ``(turn, hidden)`` at the prompts' ends if they are wanted."""
        prompt_ids = prompt_ids * prompt_mask
        keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompt_ids], dim=1)
        unique, index = torch.unique(keyed, dim=0, return_inverse=True)
        # Ordered by length. Ranks that share weights make as many passes each: fewer prompts than passes are repeated.
        order = torch.arange(max(len(unique), self.length_groups), device=unique.device) % len(unique)
        parts = [self._score_unique(unique[part], reference) for part in order.tensor_split(self.length_groups)]
        sums = torch.cat([part for part, _ in parts])
        states = None if parts[0][1] is None else torch.cat([cast(Tensor, part) for _, part in parts])[index]
        return (sums / self._lengths(self._candidates()[1]))[index], states

    def _score_unique(self, unique: Tensor, reference: bool) -> tuple[Tensor, Tensor | None]:
        """Sums of log-probabilities behind prompts ``(prompt, 1 + token)`` that their lengths stand before."""
        ids, mask = self._candidates()
        lengths, prompts, count = unique[:, 0], unique[:, 1 : 1 + int(unique[:, 0].max())], len(ids)
        columns = torch.arange(prompts.shape[1], device=prompts.device)[None] < lengths[:, None]
        if ids.shape[1] == 1:  # the prompt's last column tells it all
            response, response_mask = prompts.new_zeros(len(prompts), 1), columns.new_zeros(len(prompts), 1)
        else:
            prompts, columns = prompts.repeat_interleave(count, 0), columns.repeat_interleave(count, 0)
            response, response_mask = ids.repeat(len(unique), 1), mask.repeat(len(unique), 1)
        inputs = {"prompt_ids": prompts, "prompt_mask": columns, "response_ids": response}
        layout = self.language_model.lay_out(inputs, response_mask)
        states = None
        if reference:
            logits = self.language_model.reference_logits(layout)
        elif self.value_head is None:
            logits = self.language_model.logits(layout)
        else:
            logits, states = self.language_model.logits_and_states(layout)
            states = states.view(len(unique), -1, *states.shape[1:])[:, 0, 0]
        if ids.shape[1] == 1:
            sums = torch.log_softmax(logits[:, 0].to(sampling_dtype(logits)), dim=-1)[:, ids[:, 0]]
        else:
            each = selected_logprobs(logits, response) * response_mask
            sums = each.sum(-1).view(len(unique), count)
        return sums, states

    def _candidates(self) -> tuple[Tensor, Tensor]:
        """Ids and mask ``(candidate, token)`` of the actions' texts."""
        padded = pad_prompts(self._tokens, self.language_model.device)
        return padded["prompt_ids"], padded["prompt_mask"]

    def _lengths(self, mask: Tensor) -> Tensor:
        return divisors(self.normalisation, self.action_texts, mask)

    def choices(self, inputs: Inputs, reference: bool = False) -> Tensor:
        """Log-probabilities ``(turn, candidate)`` of all actions behind ``inputs``, at the temperature of training."""
        scores = self.scores(inputs["prompt_ids"], inputs["prompt_mask"], reference)
        return torch.log_softmax(scores / self.sampling.temperature, dim=-1)

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

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Log-probability of each choice and entropy over the candidates, ``(turn, 1)``."""
        self.train(dropout_seed is not None)
        with seeded(dropout_seed, self.language_model.device):
            scores, states = self._scores_and_states(batch.inputs["prompt_ids"], batch.inputs["prompt_mask"])
        distribution = Categorical(scores[:, None] / self.sampling.temperature)
        values = None
        if self.value_head is not None and states is not None:
            values = self.value_head(states[:, None], batch.response_mask)
        logprobs = distribution.logprobs(batch.inputs["response_ids"])
        return Evaluation(logprobs=logprobs, entropy=distribution.entropy(), values=values, distribution=distribution)

    def critic_view(self, batch: TurnBatch, chunk_size: int | None = None) -> Callable[[Tensor], Tensor]:
        """A head on a trunk that it shares reads states that do not change with it."""
        if self.value_head is None or self.language_model.has_critic_adapter:
            return super().critic_view(batch, chunk_size)
        self.eval()
        with torch.no_grad():
            prompts = ((part.inputs["prompt_ids"], part.inputs["prompt_mask"]) for part in batch.split(chunk_size))
            states = torch.cat([cast(Tensor, self._scores_and_states(*part)[1]) for part in prompts])
        return self.value_head.view(states[:, None], batch.response_mask)

    @torch.no_grad()
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Log-probabilities under the policy as it was when this run started."""
        self.eval()
        return self.choices(batch.inputs, reference=True).gather(-1, batch.inputs["response_ids"])
