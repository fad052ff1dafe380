"""The language model that reads its observation as text and answers through a head of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from lrl.models.action_heads import ActionHead, check_spaces, is_numbers, vector_size, vectors
from lrl.models.language_model import LanguageModel, LanguageModelConfig
from lrl.models.networks import RunningNorm, RunningWhitening, at_least_float32, drawn_from, mlp, value_view
from lrl.policies.policy import Policy
from lrl.policies.text import pad_prompts
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


class HeadPolicy(Policy):
    """The observation's text through a causal LM, whose last states go through a small network: one token per turn.

    A softmax over a Discrete action space; for a Box a Gaussian whose standard deviation does not depend on the state.
    The text is the codec's alone: no system text, no history, no chat template. The critic is a network of its own on
    the observation's numbers, as it is in an :class:`~lrl.policies.mlp.MLPPolicy`.

    Args:
        language_model: which causal LM; ``random_init`` draws its weights.
        hidden_sizes: of the head.
        activation: of head and critic: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        output_gain: the last layer's weights are orthogonal times this.
        pooling: the head reads the ``last`` token's state, or the ``mean`` of all tokens' states.
        whiten_states: whitens what the head reads by running statistics; the least standard deviation, as a share of
            the largest, that is stretched in full. Null leaves states as they are.
        max_text_tokens: a longer observation is an error: to leave out numbers would be worse.
        freeze_trunk: train the head alone, on states that were read once, in the rollout.
        critic_hidden_sizes: of the value network; null has none.
        normalise_observations: of the value network, by running mean and standard deviation.
        observation_clip: largest absolute value of a normalised observation, and of a whitened state.
        initial_log_std: of the Gaussian.
        init_seed: of head and critic; null draws them from the run's seed.
    """

    def __init__(
        self,
        language_model: LanguageModelConfig,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        output_gain: float = 0.1,
        pooling: Literal["last", "mean"] = "last",
        whiten_states: float | None = None,
        max_text_tokens: int = 128,
        freeze_trunk: bool = False,
        critic_hidden_sizes: Sequence[int] | None = (64, 64),
        normalise_observations: bool = True,
        observation_clip: float = 5.0,
        initial_log_std: float = 0.0,
        init_seed: int | None = None,
    ) -> None:
        super().__init__()
        for name, sizes in (("hidden_sizes", hidden_sizes), ("critic_hidden_sizes", critic_hidden_sizes or ())):
            if any(size < 1 for size in sizes):
                raise ValueError(f"policy.{name} is {list(sizes)}; all must be positive.")
        if pooling not in ("last", "mean"):
            raise ValueError(f"policy.pooling is {pooling!r}; it must be last or mean.")
        if max_text_tokens < 1:
            raise ValueError(f"policy.max_text_tokens is {max_text_tokens}; it must be at least 1.")
        if observation_clip <= 0:
            raise ValueError(f"policy.observation_clip is {observation_clip}; it must be positive.")
        if whiten_states is not None and not 0 < whiten_states <= 1:
            raise ValueError(f"policy.whiten_states is {whiten_states}; it must be above 0 and at most 1, or null.")
        if freeze_trunk and language_model.lora is not None:
            raise ValueError("policy.freeze_trunk is true and language_model.lora set; unset one of them.")
        mlp((1, 1), activation)
        self.language_model = LanguageModel(language_model)
        self.hidden_sizes, self.activation, self.output_gain = tuple(hidden_sizes), activation, output_gain
        self.pooling, self.whiten_states = pooling, whiten_states
        self.max_text_tokens, self.freeze_trunk = max_text_tokens, freeze_trunk
        self.critic_hidden_sizes, self.has_critic = critic_hidden_sizes, critic_hidden_sizes is not None
        self.normalise_observations, self.observation_clip = normalise_observations, observation_clip
        self.initial_log_std, self.init_seed = initial_log_std, init_seed
        self.layers: nn.Sequential | None = None
        self._spaces: tuple[gym.Space, gym.Space] | None = None
        self._reference: list[nn.Module] = []

    @property
    def response_format(self) -> None:
        """It acts natively."""
        return None

    @property
    def fingerprint(self) -> str:
        """Of the causal LM, as it was loaded."""
        return self.language_model.fingerprint

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Take what the head puts out and the critic reads.

        Raises:
            ValueError: the actions are neither Discrete nor a Box, or a critic should read what are no numbers.
        """
        check_spaces("HeadPolicy", observation_space, action_space, numbers=False)
        if self.codec is not None and self.codec.needs_context:
            raise ValueError(
                f"model.policy is a HeadPolicy, but {type(self.codec).__name__} cannot write what is seen here from "
                "the observation alone; it must be a TextPolicy or a ScoringPolicy."
            )
        if self.has_critic and not is_numbers(observation_space):
            raise ValueError(
                f"policy.critic_hidden_sizes is {self.critic_hidden_sizes}, but observations are {observation_space}; "
                "it must be null where they are no numbers."
            )
        self._spaces = observation_space, action_space

    def configure(self) -> None:
        """Load the language model; draw head and critic."""
        if self.layers is not None:
            return
        assert self._spaces is not None, "connect_spaces() comes first"
        self.language_model.configure()
        self._freeze()
        self.head = ActionHead(self._spaces[1], self.initial_log_std)
        size = vector_size(self._spaces[0]) if self.has_critic else 0
        sizes = (self.language_model.hidden_size, *self.hidden_sizes, self.head.size)
        with drawn_from(self.init_seed):
            self.layers = mlp(sizes, self.activation, self.output_gain)
            own = self.critic_hidden_sizes
            self.critic = None if own is None else mlp((size, *own, 1), self.activation)
        normalises = self.normalise_observations and self.has_critic
        self.norm = RunningNorm(size, self.observation_clip) if normalises else nn.Identity()
        floor, width = self.whiten_states, self.language_model.hidden_size
        self.whitening = nn.Identity() if floor is None else RunningWhitening(width, self.observation_clip, floor)

    def _freeze(self) -> None:
        """What is not to be trained, and what nothing is read from: the vocabulary's own head."""
        if self.freeze_trunk:
            self.language_model.requires_grad_(False)
        words, head = (getattr(self.language_model.model, f"get_{end}_embeddings")() for end in ("input", "output"))
        if head.weight is not words.weight:
            head.requires_grad_(False)

    def build_reference(self, warm_started: bool) -> None:
        """Keep a trunk that is trained as a language model does, and a copy of what stands behind it."""
        if not self.freeze_trunk:
            self.language_model.build_reference(warm_started)
        parts = self.whitening, self.layers, self.head
        self._reference = [copy.deepcopy(part).requires_grad_(False) for part in parts if part is not None]

    def encode(self, observation: Any) -> list[int]:
        """Token ids of one native observation.

        Raises:
            ValueError: there are more than ``max_text_tokens``.
        """
        assert self.codec is not None
        text = observation if isinstance(observation, str) else self.codec.observation_to_text(observation)
        ids = self.language_model.tokenizer.encode_text(text)
        if len(ids) > self.max_text_tokens:
            raise ValueError(
                f"policy.max_text_tokens is {self.max_text_tokens}; an observation takes {len(ids)}: {text[:60]!r}..."
            )
        return ids

    def outputs(self, inputs: Any, reference: bool = False) -> Tensor:
        """Logits or means ``(turn, action)``.

        Args:
            inputs: ``text_ids`` and ``text_mask`` ``(turn, column)``, right-padded; of a frozen trunk ``states``.
            reference: whether by the policy as it was when this run started; then without gradient.
        """
        if reference:
            with torch.no_grad():
                whitening, layers, _ = (part.to(self.language_model.device) for part in self._reference)
                return self._answers(self._states(inputs, reference), whitening, layers)
        return self._answers(self._states(inputs), self.whitening, self.layers)

    def _states(self, inputs: Any, reference: bool = False) -> Tensor:
        """What the trunk makes of the text ``(turn, hidden)``."""
        if "states" in inputs and self.freeze_trunk:
            return inputs["states"]
        ids, mask = inputs["text_ids"], inputs["text_mask"]
        as_it_was = reference and not self.freeze_trunk
        with self.language_model.reference() if as_it_was else nullcontext() as model:
            states = self._pool(self.language_model.states(ids, mask, model), mask)
        self._check_precision(states)
        return at_least_float32(states)

    def _check_precision(self, states: Tensor) -> None:
        """Whitening stretches rounding, and a trunk that is trained is read twice."""
        halved = torch.is_autocast_enabled(states.device.type) or states.dtype in (torch.bfloat16, torch.float16)
        if self.whiten_states is not None and not self.freeze_trunk and halved:
            raise ValueError(
                f"policy.whiten_states is {self.whiten_states} on a trunk that is trained in 16 bits; it must be null, "
                "or freeze_trunk true, or the precision 32 bits."
            )

    def _answers(self, states: Tensor, whitening: Any, layers: Any) -> Tensor:
        """Of the head."""
        with torch.autocast(states.device.type, enabled=False):  # a probability in half precision is none
            weights = next(layers.parameters())
            return at_least_float32(layers(whitening(states).to(weights.dtype)))

    def _pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """One state ``(turn, hidden)`` of all tokens'."""
        lengths = mask.sum(1)
        if self.pooling == "mean":
            return (states * mask[..., None]).sum(1) / lengths[:, None]
        return states[torch.arange(len(states), device=states.device), lengths - 1]

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Draw one action per row; at temperature 0 the best one, or the mean. The value network is not asked here."""
        sampling = SamplingConfig() if sampling is None else sampling
        padded = pad_prompts([self.encode(observation) for observation in observations], self.language_model.device)
        text = {"text_ids": padded["prompt_ids"], "text_mask": padded["prompt_mask"]}
        was_training = self.training
        self.eval()
        states = self._states(text)
        native, actions, logprobs = self.head.sample(self._answers(states, self.whitening, self.layers), keys, sampling)
        self.train(was_training)
        inputs = {} if self.freeze_trunk else text
        if self.freeze_trunk or self.whiten_states is not None:
            inputs["states"] = states
        if self.has_critic:
            inputs["observation"] = self._vectors(observations)
        return Decisions(
            actions=native,
            inputs=inputs | {"action": actions},
            response_mask=torch.ones(len(logprobs), 1, dtype=torch.bool, device=logprobs.device),
            logprobs=logprobs,
            memory=memory,
        )

    def _vectors(self, observations: Sequence[Any]) -> Tensor:
        assert self._spaces is not None
        assert self.critic is not None
        weights: Any = self.critic[0].weight
        return vectors(self._spaces[0], observations, weights)

    def _values(self, observed: Tensor) -> Tensor:
        """``(row, 1)``."""
        assert self.critic is not None
        with torch.autocast(observed.device.type, enabled=False):
            return at_least_float32(self.critic(self.norm(observed)))

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Of states in which nothing was decided yet, ``(row,)``, no gradient."""
        if not self.has_critic:
            return super().state_values(observations, memory)
        with torch.no_grad():
            return self._values(self._vectors(observations))[:, 0]

    def critic_parameters(self) -> list[nn.Parameter]:
        """The value network's."""
        return [] if self.critic is None else list(self.critic.parameters())

    def critic_view(self, batch: TurnBatch, chunk_size: int | None = None) -> Callable[[Tensor], Tensor]:
        """The value network needs no trunk."""
        assert self.critic is not None
        return value_view(self.critic, self.norm(batch.inputs["observation"]))

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Of turns that were taken; nothing is dropped out."""
        self.eval()
        distribution = self.head.distribution(self.outputs(batch.inputs))
        return Evaluation(
            logprobs=self.head.logprobs(distribution, batch.inputs["action"]),
            entropy=distribution.entropy(),
            values=self._values(batch.inputs["observation"]) if self.has_critic else None,
            distribution=distribution,
        )

    @torch.no_grad()
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Under the policy as it was when this run started."""
        head: Any = self._reference[-1].to(batch.response_mask.device)
        return head.logprobs(head.distribution(self.outputs(batch.inputs, reference=True)), batch.inputs["action"])
