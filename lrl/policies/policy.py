"""The interface that every algorithm is written against."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.lm.config import LanguageModelConfig
from lrl.lm.forward import without_gradient
from lrl.lm.heads import ValueHead, ValueHeadConfig
from lrl.lm.layouts import pad_prompts
from lrl.lm.model import LanguageModel
from lrl.lm.networks import RunningStatistics
from lrl.policies.actor import Actor
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import Evaluation, History, Inputs, NativeTurn, TurnBatch

# The component that policies with a language model share: prompts and the critic.


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


class Policy(Actor):
    """An actor that can be trained: it evaluates its decisions, with gradient, and has a reference and maybe a critic.

    A policy with a language model puts it into :attr:`trunk`, and the methods here use it.
    """

    trunk: LanguageModelTrunk | None = None
    """The language model and what belongs to it; None for a small network."""

    has_critic: bool = False
    """Whether the policy has a value function."""

    demonstration_losses: Sequence[Literal["completion", "all"]] = ()
    """The values of ``data.loss_on`` under which demonstrations can train the policy; none where they cannot."""

    needs_distribution: bool = False
    """Whether :meth:`evaluate` must return the distribution of each token, which takes memory for the whole vocabulary;
    set by algorithms that read it."""

    _reference: Sequence[nn.Module] = ()
    """Copies of small networks at the start of the run, which are no submodules: checkpoints do not hold them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert the copied reference as the policy: at equal weights both must round alike."""
        for part in self._reference:
            part._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @abstractmethod
    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute log-probabilities and entropy of the turns of a batch, with gradient, each ``(turn, token)``.

        Args:
            batch: turns that were taken, or demonstrated.
            dropout_seed: seeds the dropout; None switches it off, as RL needs: its first ratio is 1.
        """

    def passes(self, batch: TurnBatch, gradient: bool = False) -> list[Tensor]:
        """Divide the turns of a batch among passes whose memory does not grow with the number of turns.

        Args:
            batch: turns that were taken.
            gradient: whether a backward pass follows each.

        Returns:
            Indices of turns, one int64 ``(turn,)`` for each pass, which together name every turn once. One pass keeps
            their order. A small network takes all turns at once.
        """
        return [torch.arange(len(batch), device=batch.response_mask.device)]

    def in_passes(self, batch: TurnBatch, compute: Callable[[TurnBatch], Tensor]) -> Tensor:
        """Return what ``compute`` returns for a batch, ``(turn, ...)``, calling it once for each of :meth:`passes`.

        Neither gradients nor dropout are on meanwhile.
        """
        passes = self.passes(batch)
        with without_gradient(self):
            if len(passes) == 1:
                return compute(batch)
            parts = torch.cat([compute(batch[turns]) for turns in passes])
        return torch.empty_like(parts).index_copy_(0, torch.cat(passes), parts)

    def check_gradients(self) -> None:  # noqa: B027 (most policies can be trained by gradients)
        """Raise if gradients cannot train the policy.

        Raises:
            ValueError: they cannot.
        """

    # -- the critic ----------------------------------------------------------------------------------------------

    @property
    def has_critic_adapter(self) -> bool:
        """Return whether the critic reads the language model through an adapter of its own."""
        return self.trunk is not None and self.trunk.language_model.has_critic_adapter

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights that belong to the critic alone."""
        return [] if self.trunk is None else self.trunk.critic_parameters()

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Estimate the values of states in which no decision was made yet, ``(row,)``, no gradient.

        Args:
            observations: one per row.
            memory: one history per row.

        Raises:
            ValueError: the policy has no critic.
        """
        if self.trunk is None or self.trunk.value_head is None:
            raise ValueError(f"model.policy is a {type(self).__name__} without critic; it must have one.")
        return self.trunk.values([self.encode(*row) for row in zip(observations, memory, strict=True)])

    def critic_view(self, batch: TurnBatch) -> Callable[[Tensor], Tensor]:
        """Return values as a function of the critic's own weights; what these rest on is computed once.

        Args:
            batch: turns that were taken.

        Returns:
            A function from indices of turns ``(turn,)`` to values ``(turn, token)``, with gradient.
        """

        def values(index: Tensor) -> Tensor:
            out = self.evaluate(batch[index]).values
            assert out is not None
            return out

        return values

    # -- the reference -------------------------------------------------------------------------------------------

    def build_reference(self, warm_started: bool) -> None:
        """Keep the current weights as the reference.

        Called after :meth:`configure` and ``init_from``, and before a checkpoint is restored.

        Args:
            warm_started: whether the weights came from another run (``init_from``), not from the base alone.
        """
        assert self.trunk is not None
        self.trunk.language_model.build_reference(warm_started)

    @abstractmethod
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute the log-probabilities ``(turn, token)`` under the policy at the start of this run, no gradient."""

    @property
    def fingerprint(self) -> str:
        """A hash of the base weights that checkpoints rest on; empty where there is no base."""
        return "" if self.trunk is None else self.trunk.language_model.fingerprint

    # -- running statistics --------------------------------------------------------------------------------------

    def learn_statistics(
        self,
        batch: TurnBatch,
        collection: int,
        reduce: Callable[[Tensor], Tensor] | None = None,
        parts: Sequence[RunningStatistics] | None = None,
    ) -> None:
        """Add a collection to the running statistics, which take effect at :meth:`settle_statistics`; idempotent.

        Args:
            batch: the collected turns.
            collection: index of the collection in the run.
            reduce: sums a tensor over ranks; None for a single process.
            parts: the statistics to add to; None for all.
        """
        for part in self._statistics() if parts is None else parts:
            part.learn(self.statistics_input(batch.inputs, part.reads), collection, reduce)

    def statistics_input(self, inputs: Inputs, name: str) -> Tensor:
        """Return the input ``(turn, size)`` of this name, which running statistics learn from."""
        return inputs[name]

    def settle_statistics(self, collection: int) -> None:
        """Let statistics learned before ``collection`` take effect; called at its start."""
        for part in self._statistics():
            part.settle(collection)

    @property
    def empty_statistics(self) -> list[RunningStatistics]:
        """The running statistics that have seen nothing yet, in this run or in the one that it started from."""
        return [part for part in self._statistics() if part.is_empty]

    def _statistics(self) -> list[RunningStatistics]:
        """Return the modules that normalise by running statistics."""
        return [part for part in self.children() if isinstance(part, RunningStatistics)]

    # -- prompts and demonstrations ------------------------------------------------------------------------------

    def encode(self, observation: Any, history: History) -> list[int]:
        """Return the token ids of the prompt for one observation.

        Raises:
            ValueError: the policy reads no prompts, or the prompt is too long even without any history.
        """
        if self.trunk is None or self.prompt is None or self.codec is None:
            raise ValueError(f"model.policy is a {type(self).__name__}, which reads no prompts.")
        return self.trunk.encode(self.prompt, self.codec, observation, history)

    def encode_all(self, turns: Sequence[tuple[Any, History]]) -> list[list[int]]:
        """Return what :meth:`encode` returns for many observations with their history, encoded together.

        Raises:
            ValueError: the policy reads no prompts, or one is too long even without any history.
        """
        if self.trunk is None or self.prompt is None or self.codec is None:
            return [self.encode(*turn) for turn in turns]
        return self.trunk.encode_all(self.prompt, self.codec, turns)

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the prompt that the language model reads, special tokens included; empty where there is none."""
        if self.trunk is None or self.prompt is None:
            return ""
        return self.trunk.language_model.tokenizer.decode(self.encode(observation, history))

    def write(self, action_text: str, reasoning: str) -> str:
        """Return a response in the format that the prompt asks for.

        Raises:
            ValueError: the policy does not respond in text.
        """
        if self.prompt is None:
            raise ValueError(f"model.policy is a {type(self).__name__}, which does not respond in text.")
        return get_response_format(self.prompt.response_format).render(action_text, reasoning)

    def encode_response(self, response: str) -> list[int]:
        """Return the ids of a demonstrated response, as :meth:`act` would have sampled them.

        Raises:
            ValueError: demonstrations cannot train this policy, or not this one.
        """
        raise ValueError(f"model.policy is a {type(self).__name__}, which demonstrations cannot train.")

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Return what :meth:`encode_response` returns for many responses, encoded together."""
        return [self.encode_response(response) for response in responses]

    def encode_turns(self, turns: Sequence[NativeTurn]) -> Inputs:
        """Return the inputs that :meth:`evaluate` needs for demonstrated native actions, each ``(turn, ...)``.

        Raises:
            ValueError: the policy does not act natively.
        """
        raise ValueError(f"model.policy is a {type(self).__name__}, which does not act natively.")
