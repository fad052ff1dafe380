"""Interface of trainable policies, which every algorithm uses, and their shared implementation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, final

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.lm.config import LanguageModelConfig
from lrl.lm.forward import without_gradient
from lrl.lm.heads import (
    ActionHead,
    RunningStatistics,
    ValueHead,
    ValueHeadConfig,
    at_least_float32,
    is_numbers,
    vectors,
    without_autocast,
)
from lrl.lm.layouts import pad_prompts
from lrl.lm.model import LanguageModel
from lrl.lm.prefill import distinct_prompts, prefill
from lrl.policies.actor import Actor
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import Evaluation, History, Inputs, NativeTurn, Rollout, TurnBatch


@final
class LanguageModelTrunk:
    """A language model with the encoding of its prompts and a value head on its hidden states.

    It is not a torch module. The policy registers :attr:`language_model` and :attr:`value_head` as its own submodules,
    so that these are the first parts of the names of weights in checkpoints.

    Args:
        config: specifies the causal LM.
        max_prompt_tokens: maximum number of tokens of a prompt. The oldest turns of history are removed from a longer
            prompt.
        value_head: configures a critic on the hidden states; None creates none.
    """

    def __init__(
        self, config: LanguageModelConfig, max_prompt_tokens: int = 1024, value_head: ValueHeadConfig | None = None
    ) -> None:
        self.language_model = LanguageModel(config)
        self.max_prompt_tokens, self.value_head_config = max_prompt_tokens, value_head
        self.value_head: ValueHead | None = None

    def configure(self) -> None:
        """Load the language model and initialise the value head; further calls do nothing."""
        self.language_model.configure()
        if self.value_head_config is not None and self.value_head is None:
            self.value_head = ValueHead(self.value_head_config, self.language_model.hidden_size)
            if self.value_head_config.adapter:
                self.language_model.add_critic_adapter()

    def encode_all(
        self, prompt: PromptTemplate, codec: TextCodec, turns: Sequence[tuple[str, History]]
    ) -> list[list[int]]:
        """Return the token ids of several prompts, which are encoded together.

        Args:
            prompt: template of the prompts.
            codec: the codec of the environment.
            turns: observation and history of each prompt.

        Raises:
            ValueError: If a prompt is too long even without history.
        """
        return self.language_model.tokenizer.encode_prompts(prompt, codec, turns, self.max_prompt_tokens)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights of the value head, and of the critic's adapter if there is one."""
        own = [] if self.value_head is None else list(self.value_head.parameters())
        return [*own, *self.language_model.critic_parameters()]

    @property
    def has_fixed_states(self) -> bool:
        """True if there is a value head whose inputs do not change while only the critic is trained."""
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
        if model.kept is not None and not model.has_critic_adapter:  # prompts may continue those of the previous turn
            unique, index = distinct_prompts(prompts)
            model.prepare_decoding(max(map(len, prompts)), 0)
            with without_gradient(model):
                states = prefill(model.model, unique, True, model.kept, keep=False).states[index]
                return self.value_head(states[:, None], mask)[:, 0]
        # With frozen lower layers, rows end with the prompt; otherwise one token follows it.
        after = mask & (model.lower is None)
        passes, parts = model.passes(inputs, after.sum(1), logits=False), list[Tensor]()
        with without_gradient(model):
            for turns in passes:
                layout = model.lay_out({name: tensor[turns] for name, tensor in inputs.items()}, after[turns])
                states = model.critic_states(layout) if model.has_critic_adapter else model.token_states(layout)
                parts.append(self.value_head(states, mask[turns])[:, 0])
        values = torch.cat(parts)
        return torch.empty_like(values).index_copy_(0, torch.cat(passes), values)


class Policy(Actor):
    """Abstract base class of trainable actors.

    A policy computes log-probabilities of past turns with gradient, keeps its weights at the start of the run as a
    reference, and may have a critic. A policy with a language model stores it in :attr:`trunk`.
    """

    trunk: LanguageModelTrunk | None = None
    """The language model with its value head; None if the policy is a small network."""

    has_critic: bool = False
    """Whether the policy has a value function."""

    demonstration_losses: Sequence[Literal["completion", "all"]] = ()
    """Values of ``data.loss_on`` that the policy supports; empty if it cannot be trained on demonstrations."""

    needs_distribution: bool = False
    """Whether :meth:`evaluate` must return the distribution of each token. Only algorithms that use it set this: a
    distribution over a vocabulary needs much memory."""

    importance_cap: float | None = None
    """Largest importance weight of a token, if the log-probabilities of the generator differ from those that are
    trained on; None if tokens have no weights. Available after :meth:`configure`."""

    copied_reference: Sequence[nn.Module] = ()
    """Copies of small networks at the start of the run. They are not submodules and thus not in checkpoints."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the reference together with the policy, so that equal weights give equal results."""
        for part in self.copied_reference:
            part._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @abstractmethod
    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute log-probabilities, entropy and values of past turns, each ``(turn, token)``, with gradient.

        Args:
            batch: sampled or demonstrated turns.
            dropout_seed: seed of dropout; None disables dropout. RL disables it, so that the probability ratio of the
                first update is 1.
        """

    def passes(self, batch: TurnBatch, gradient: bool = False) -> list[Tensor]:
        """Divide the turns of a batch among forward passes whose memory does not grow with the number of turns.

        Args:
            batch: sampled turns.
            gradient: whether a backward pass follows each forward pass.

        Returns:
            Indices of the turns of each pass, int64 ``(turn,)``; every turn is in one pass. A single pass has the turns
            in their order. The default is a single pass, which suits a small network.
        """
        return [torch.arange(len(batch), device=batch.response_mask.device)]

    def in_passes(self, batch: TurnBatch, compute: Callable[[TurnBatch], Tensor]) -> Tensor:
        """Return ``compute(batch)``, ``(turn, ...)``, computed pass by pass (see :meth:`passes`) without gradient.

        Args:
            batch: sampled turns.
            compute: returns one row ``(...)`` per turn of its argument.
        """
        passes = self.passes(batch)
        with without_gradient(self):
            if len(passes) == 1:
                return compute(batch)
            parts = torch.cat([compute(batch[turns]) for turns in passes])
        return torch.empty_like(parts).index_copy_(0, torch.cat(passes), parts)

    def check_gradients(self) -> None:  # noqa: B027 (most policies can be trained by gradients)
        """Check that the policy can be trained by gradients.

        Raises:
            ValueError: If the policy is not differentiable.
        """

    def end_episodes(self) -> None:
        """Drop the KV cache that is kept from turn to turn."""
        if self.trunk is not None:
            self.trunk.language_model.keep_prompts(None)

    # -- log-probabilities of a collection -------------------------------------------------------------------------

    @property
    def defers_logprobs(self) -> bool:
        """True if :meth:`complete`, not :meth:`act`, computes the log-probabilities that a collection is trained on."""
        return False

    def complete(self, rollout: Rollout, passes: Sequence[Tensor]) -> Rollout:
        """Return a collection with the log-probabilities, and the values, of the passes of the first updates.

        Called at the end of a collection if :attr:`defers_logprobs`. Then the turns of an episode share their tokens.
        As the passes are those of the updates, rounding is equal, and the first ratio is exactly 1.

        Args:
            rollout: the collection.
            passes: indices of the turns of each pass, int64 ``(turn,)``; every turn is in one pass.
        """
        self.end_episodes()  # frees memory
        turns, found = rollout.turns(), list[Tensor]()
        with without_gradient(self):
            for part in (turns[members] for members in passes):
                out = self.evaluate(part)
                outputs = [out.logprobs] if out.values is None else [out.logprobs, out.values]
                found.append(torch.stack([at_least_float32(one) * part.response_mask for one in outputs]))
        logprobs, *values = torch.cat(found, dim=1)[:, torch.argsort(torch.cat(list(passes)))]
        rollout = rollout.to(logprobs.device)
        changes = {"values": rollout.unflatten(values[0])} if values else {}
        return rollout.replace(logprobs=rollout.unflatten(logprobs), **changes)

    # -- the critic ----------------------------------------------------------------------------------------------

    @property
    def has_critic_adapter(self) -> bool:
        """True if the critic uses a separate adapter of the language model."""
        return self.trunk is not None and self.trunk.language_model.has_critic_adapter

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights that only the critic uses."""
        return [] if self.trunk is None else self.trunk.critic_parameters()

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Compute the values ``(row,)`` of states, such as those after the last turns of a rollout, without gradient.

        Args:
            observations: observations of the states, one per row.
            memory: histories of the episodes before these observations, one per row.

        Raises:
            ValueError: If the policy has no critic.
        """
        if self.trunk is None or self.trunk.value_head is None:
            raise ValueError(f"model.policy is a {type(self).__name__} without critic; it must have a critic.")
        return self.trunk.values([self.encode(*row) for row in zip(observations, memory, strict=True)])

    def critic_view(self, batch: TurnBatch) -> Callable[[Tensor], Tensor]:
        """Return a function that computes values of a batch while only the critic's weights are trained.

        If the inputs of the critic do not change during this training, they are computed once, before it.

        Args:
            batch: sampled turns.

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
            warm_started: whether the run started from the weights of another run (``init_from``).
        """
        assert self.trunk is not None
        self.trunk.language_model.build_reference(warm_started)

    @abstractmethod
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute log-probabilities ``(turn, token)`` under the reference policy, without gradient."""

    @property
    def fingerprint(self) -> str:
        """Hash of the base model's weights, which checkpoints do not contain; empty if there is no base model."""
        return "" if self.trunk is None else self.trunk.language_model.fingerprint

    # -- running statistics --------------------------------------------------------------------------------------

    def learn_statistics(
        self,
        batch: TurnBatch,
        collection: int,
        reduce: Callable[[Tensor], Tensor] | None = None,
        parts: Sequence[RunningStatistics] | None = None,
    ) -> None:
        """Add the turns of a collection to the running statistics.

        A second call for the same collection changes nothing. The new statistics are used after
        :meth:`settle_statistics`.

        Args:
            batch: the collected turns.
            collection: index of the collection in the run.
            reduce: sums a tensor over ranks; None if there is one rank.
            parts: the statistics to which the turns are added; None selects all.
        """
        for part in self._statistics() if parts is None else parts:
            part.learn(self.statistics_input(batch.inputs, part.reads), collection, reduce)

    def statistics_input(self, inputs: Inputs, name: str) -> Tensor:
        """Return the tensor ``(turn, size)`` from which running statistics are computed.

        Args:
            inputs: inputs of :meth:`evaluate`.
            name: name of the tensor.
        """
        return inputs[name]

    def settle_statistics(self, collection: int) -> None:
        """Use the statistics of all earlier collections from now on; called at the start of ``collection``."""
        for part in self._statistics():
            part.settle(collection)

    @property
    def empty_statistics(self) -> list[RunningStatistics]:
        """The running statistics without data, either from this run or from the run whose weights it started from."""
        return [part for part in self._statistics() if part.is_empty]

    def _statistics(self) -> list[RunningStatistics]:
        """Return the modules that normalise by running statistics."""
        return [part for part in self.children() if isinstance(part, RunningStatistics)]

    # -- prompts and demonstrations ------------------------------------------------------------------------------

    def encode(self, observation: Any, history: History) -> list[int]:
        """Return the token ids of the prompt for one observation; see :meth:`encode_all`."""
        return self.encode_all([(observation, history)])[0]

    def encode_all(self, turns: Sequence[tuple[Any, History]]) -> list[list[int]]:
        """Return the token ids of several prompts, which are encoded together.

        Args:
            turns: observation and history of each prompt.

        Raises:
            ValueError: If the policy uses no prompts, or if a prompt is too long even without history.
        """
        if self.trunk is None or self.prompt is None or self.codec is None:
            raise ValueError(f"model.policy is a {type(self).__name__}, which uses no prompts.")
        return self.trunk.encode_all(self.prompt, self.codec, turns)

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the prompt as text, including special tokens; empty if the policy uses no prompts."""
        if self.trunk is None or self.prompt is None:
            return ""
        return self.trunk.language_model.tokenizer.decode(self.encode(observation, history))

    def write(self, action_text: str, reasoning: str) -> str:
        """Return a response in the response format of the prompt.

        Args:
            action_text: the text of the action.
            reasoning: text before the action, if the format has reasoning.

        Raises:
            ValueError: If the policy does not respond in text.
        """
        if self.prompt is None:
            raise ValueError(f"model.policy is a {type(self).__name__}, which does not respond in text.")
        return get_response_format(self.prompt.response_format).render(action_text, reasoning)

    def encode_response(self, response: str) -> list[int]:
        """Return the token ids of one demonstrated response; see :meth:`encode_responses`."""
        return self.encode_responses([response])[0]

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Return the token ids of demonstrated responses, each with its end token.

        Raises:
            ValueError: If the policy cannot be trained on demonstrated responses, or cannot generate one of them.
        """
        raise ValueError(f"model.policy is a {type(self).__name__}, which demonstrations cannot train.")

    def encode_turns(self, turns: Sequence[NativeTurn]) -> Inputs:
        """Return the inputs of :meth:`evaluate` for demonstrated native actions, each ``(turn, ...)``.

        Args:
            turns: native observations and actions.

        Raises:
            ValueError: If the policy does not act natively.
        """
        raise ValueError(f"model.policy is a {type(self).__name__}, which does not act natively.")

    @property
    def action_std(self) -> Tensor | None:
        """The standard deviations ``(dimension,)`` of the Gaussian from which actions are sampled, if it is one."""
        return None


class NativePolicy(Policy):
    """Abstract base class of policies with native actions, whose critic is a separate network on observations.

    Attributes:
        critic: the value network; None before :meth:`configure`, and if there is none.
        norm: normalisation of the critic's inputs; set by :meth:`configure`.
        head: the action distribution; set by :meth:`configure`.
        spaces: observation space and action space; set by :meth:`connect_spaces`.
    """

    demonstration_losses = ("completion",)
    norm: nn.Module
    head: ActionHead

    def __init__(self) -> None:
        super().__init__()
        self.critic: nn.Sequential | None = None
        self.spaces: tuple[gym.Space, gym.Space] | None = None

    @property
    def response_format(self) -> None:
        """None: actions are native."""
        return None

    @property
    def action_std(self) -> Tensor | None:
        """The standard deviations ``(dimension,)`` of the Gaussian from which actions are sampled, if it is one."""
        return None if self.head.log_std is None else self.head.log_std.detach().exp()

    def vectors(self, observations: Sequence[Any], network: Any) -> Tensor:
        """Return observations as a tensor ``(row, size)``.

        Args:
            observations: native observations, one per row.
            network: a sequential network, whose weights determine data type and device.
        """
        assert self.spaces is not None, "connect_spaces() comes first"
        return vectors(self.spaces[0], observations, network[0].weight)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights of the value network."""
        return [] if self.critic is None else list(self.critic.parameters())

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Compute the values ``(row,)`` of states without gradient; the history is not used."""
        if self.critic is None:
            return super().state_values(observations, memory)
        with torch.no_grad():
            return self.values(self.norm(self.vectors(observations, self.critic)))[:, 0]

    def critic_view(self, batch: TurnBatch) -> Callable[[Tensor], Tensor]:
        """Return a function that computes values without a pass of the actor; see :meth:`Policy.critic_view`."""
        seen = self.norm(batch.inputs["observation"])
        return lambda index: self.values(seen[index])

    def values(self, seen: Tensor) -> Tensor:
        """Compute values ``(row, 1)`` of normalised observations ``(row, size)``.

        Autocast is disabled, because it would round the values to 16 bits and would use cached copies of weights that a
        fit changes.
        """
        assert self.critic is not None
        with without_autocast(seen.device):
            return at_least_float32(self.critic(seen))


def check_spaces(policy: str, observation_space: gym.Space, action_space: gym.Space, numbers: bool) -> None:
    """Check that a policy with native actions supports the spaces of an environment.

    Args:
        policy: class name of the policy, for error messages.
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        numbers: whether observations must be numeric.

    Raises:
        ValueError: If observations must be numeric and are not, or if actions are neither Discrete nor a Box.
    """
    if numbers and not is_numbers(observation_space):
        raise ValueError(
            f"model.policy is an {policy}, but observations are {observation_space}; they must be numeric."
        )
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        raise ValueError(
            f"model.policy is an {policy}, but actions are {action_space}; they must be Discrete or a Box."
        )
