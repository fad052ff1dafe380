"""Policy with a small network (head) on the hidden states of a language model that reads observations as text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import gymnasium as gym
import torch
from torch import Tensor, nn

from lrl.lm.attention import HALVED, compute_dtype, max_positions
from lrl.lm.config import LanguageModelConfig
from lrl.lm.fixed_batches import LRUCache, Shape, fixed_batches, place_matters
from lrl.lm.forward import arbitrary_ids, without_gradient
from lrl.lm.heads import (
    ActionHead,
    ObservationCriticConfig,
    RunningNorm,
    RunningWhitening,
    at_least_float32,
    is_numbers,
    mlp,
    seeded_init,
    vector_size,
    without_autocast,
)
from lrl.lm.layouts import pad_prompts
from lrl.policies.policy import LanguageModelTrunk, NativePolicy, check_spaces
from lrl.ranges import LeftOpenUnitInterval, PositiveInt, Seed, check_arguments
from lrl.registry import register
from lrl.types import Decisions, Evaluation, History, Inputs, NativeTurn, RandomKeys, SamplingConfig, TurnBatch

_MIB = 2**20


@final
class TextStateCache:
    """Cache of hidden states of a frozen language model, one per text.

    As in :mod:`lrl.lm.frozen_states`, states are computed in batches of fixed shapes. A state therefore has the same
    bits when it is computed again, after it was dropped or after a run was resumed.

    Args:
        max_mib: maximum size of the cache in MiB; beyond it, the least recently used states are dropped. None disables
            the cache.
    """

    def __init__(self, max_mib: int | None) -> None:
        self._cached = None if max_mib is None else LRUCache[Tensor](max_mib * _MIB)
        self._weights: tuple[Any, ...] = ()
        self._place_matters: dict[tuple[torch.dtype, Shape], bool] = {}

    def states(self, model: Any, compute: Callable[[Inputs], Tensor], texts: Inputs) -> Tensor:
        """Return the hidden states ``(row, hidden)`` of texts, from the cache or computed.

        It must be called inside :func:`~lrl.lm.forward.without_gradient`.

        Args:
            model: the frozen model. If its weights have changed since the last call, the cache is emptied.
            compute: computes the states of texts, without the cache.
            texts: ``text_ids``, int64, and ``text_mask``, bool, each ``(row, column)``, right-padded.
        """
        if self._cached is None:
            return compute(texts)
        weights = tuple((id(part), part.data_ptr(), part._version) for part in model.parameters())
        if weights != self._weights:
            self._cached.clear()
            self._place_matters.clear()
            self._weights = weights
        ids, device, dtype = texts["text_ids"], texts["text_ids"].device, compute_dtype(model)
        rows = [tuple(row[:length]) for row, length in zip(ids.tolist(), texts["text_mask"].sum(1).tolist())]
        cached = {row: self._cached.get((dtype, row)) for row in rows}
        found = {row: states for row, states in cached.items() if states is not None}
        missing = [row for row in cached if row not in found]

        def alone(shape: Shape) -> bool:
            """Return whether a text must be computed alone, because its row in a batch changes its bits."""
            if (dtype, shape) not in self._place_matters:
                embeddings = model.get_input_embeddings().weight
                arbitrary = arbitrary_ids(shape.rows, shape.width, len(embeddings), device)
                self._place_matters[dtype, shape] = place_matters(lambda ids: compute(_unpadded(ids)), arbitrary)
            return self._place_matters[dtype, shape]

        for batch in fixed_batches([len(row) for row in missing], device, alone, limit=max_positions(model)):
            lengths = torch.tensor([len(missing[n]) for n in batch.members], device=device)
            batch_ids = batch.rectangle(missing, device)
            mask = torch.arange(batch.shape.width, device=device) < lengths[:, None]
            states = compute({"text_ids": batch_ids, "text_mask": mask})
            found |= {missing[n]: states[row].clone() for row, n in enumerate(batch.texts)}
        for row, states in found.items():
            self._cached.put((dtype, row), states, states.numel() * states.element_size() + 8 * len(row))
        return torch.stack([found[row] for row in rows])


def _unpadded(ids: Tensor) -> Inputs:
    """Return texts without padding as the inputs of :meth:`HeadPolicy.evaluate`."""
    return {"text_ids": ids, "text_mask": torch.ones_like(ids, dtype=torch.bool)}


_STATE_CLIP = 5.0
"""Largest absolute value of a component of a whitened state; larger ones are clipped."""
_OUTPUT_GAIN = 0.1
"""Gain of the orthogonal initial weights of the head's last layer."""


@register
@final
class HeadPolicy(NativePolicy):
    """A small network (head) on a language model's hidden state of the last token of an observation.

    A turn is one token. The action distribution is a softmax for a Discrete action space, and a Gaussian for a Box; the
    standard deviation of the Gaussian does not depend on the state. The language model reads only the text of the
    observation, without system message, history and chat template. The critic is a separate network on the numbers of
    the observation, as in an :class:`~lrl.policies.mlp.MLPPolicy`.

    Args:
        language_model: specifies the causal LM; with ``random_init`` it has random weights.
        hidden_sizes: sizes of the hidden layers of the head.
        activation: activation of head and critic: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        whiten_states: smallest standard deviation, as a share of the largest one, of the principal components of the
            hidden states that are scaled to unit variance, by running statistics. Null does not whiten states.
        max_text_tokens: maximum number of tokens of an observation. A longer observation raises an error, because
            truncation could remove numbers.
        freeze_trunk: whether the language model is frozen. Hidden states are then computed once: in the rollout, or in
            the first pass over demonstrations.
        critic: configures the value network; null creates none.
        initial_log_std: initial logarithm of the standard deviation of the Gaussian.
        init_seed: seed of the initial weights of head and critic; null selects the run's seed.

    Raises:
        ValueError: If a setting is out of range, or if ``freeze_trunk`` is combined with LoRA.
    """

    trunk: LanguageModelTrunk

    def __init__(
        self,
        language_model: LanguageModelConfig,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        whiten_states: LeftOpenUnitInterval | None = None,
        max_text_tokens: PositiveInt = 128,
        freeze_trunk: bool = False,
        critic: ObservationCriticConfig | None = ObservationCriticConfig(),
        initial_log_std: float = 0.0,
        init_seed: Seed | None = None,
    ) -> None:
        check_arguments(HeadPolicy.__init__, locals(), "policy")
        super().__init__()
        if any(size < 1 for size in hidden_sizes):
            raise ValueError(f"policy.hidden_sizes is {list(hidden_sizes)}; all must be positive.")
        if freeze_trunk and language_model.lora is not None:
            raise ValueError("policy.freeze_trunk is true, but language_model.lora is set; one of them must be unset.")
        mlp((1, 1), activation)  # raises if the activation is unknown
        self.trunk = LanguageModelTrunk(language_model)
        self.language_model = self.trunk.language_model
        self.hidden_sizes, self.activation = tuple(hidden_sizes), activation
        self.max_text_tokens, self.freeze_trunk, self.whiten_states = max_text_tokens, freeze_trunk, whiten_states
        self.critic_config, self.has_critic = critic, critic is not None
        self.initial_log_std, self.init_seed = initial_log_std, init_seed
        self.layers: nn.Sequential | None = None
        self.copied_reference: list[nn.Module] = []
        self._state_cache = TextStateCache(language_model.state_cache_mb)

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which determine the number of outputs of the head and of inputs of the critic.

        Raises:
            ValueError: If the action space is neither Discrete nor a Box, if the codec needs information besides the
                observation, or if there is a critic and observations are not numeric.
        """
        check_spaces("HeadPolicy", observation_space, action_space, numbers=False)
        if self.codec is not None and self.codec.needs_context:
            raise ValueError(
                f"model.policy is a HeadPolicy, but {type(self.codec).__name__} cannot write its text from the "
                "observation alone; it must be a TextPolicy or a ScoringPolicy."
            )
        if self.has_critic and not is_numbers(observation_space):
            raise ValueError(
                f"policy.critic is {self.critic_config}, but observations are {observation_space}; it must be null "
                "where they are not numeric."
            )
        self.spaces = observation_space, action_space

    def configure(self) -> None:
        """Load the language model, and initialise head and critic; further calls do nothing."""
        if self.layers is not None:
            return
        assert self.spaces is not None, "connect_spaces() comes first"
        self.trunk.configure()
        self._freeze()
        config, width = self.critic_config, self.language_model.hidden_size
        size = 0 if config is None else vector_size(self.spaces[0])
        self.head = ActionHead(self.spaces[1], self.initial_log_std)
        with seeded_init(self.init_seed):
            self.layers = mlp((width, *self.hidden_sizes, self.head.size), self.activation, _OUTPUT_GAIN)
            self.critic = None if config is None else mlp((size, *config.hidden_sizes, 1), self.activation)
        self.norm = nn.Identity()
        if config is not None and config.normalise_observations:
            self.norm = RunningNorm(size, config.observation_clip)
        floor = self.whiten_states
        self.whitening = nn.Identity() if floor is None else RunningWhitening(width, _STATE_CLIP, floor)

    def _freeze(self) -> None:
        """Freeze the language model if ``freeze_trunk`` is set, and its output embeddings, which are not used."""
        if self.freeze_trunk:
            self.language_model.requires_grad_(False)
        model: Any = self.language_model.model
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.get_output_embeddings().requires_grad_(False)

    def build_reference(self, warm_started: bool) -> None:
        """Keep the current weights as the reference: a copy of the head, and the language model unless it is frozen."""
        if not self.freeze_trunk:
            super().build_reference(warm_started)
        modules = self.whitening, self.layers, self.head
        copies = [copy.deepcopy(module) for module in modules if module is not None]
        self.copied_reference = [module.requires_grad_(False) for module in copies]

    def encode_observation(self, observation: Any) -> list[int]:
        """Return the token ids of one native observation.

        Raises:
            ValueError: If the observation has more than ``max_text_tokens`` tokens, or none.
        """
        assert self.codec is not None
        text = observation if isinstance(observation, str) else self.codec.observation_to_text(observation)
        ids = self.language_model.tokenizer.encode_observation(text)
        if not ids:
            raise ValueError(
                f"an observation has the text {text!r}, which the tokenizer of {self.language_model.config.name!r} "
                "converts to no tokens; a HeadPolicy needs at least one."
            )
        if len(ids) > self.max_text_tokens:
            raise ValueError(
                f"policy.max_text_tokens is {self.max_text_tokens}; an observation has {len(ids)} tokens: "
                f"{text[:60]!r}..."
            )
        return ids

    def outputs(self, inputs: Inputs, reference: bool = False) -> Tensor:
        """Compute the outputs of the head, ``(turn, action)``: logits, or the means of a Gaussian.

        Args:
            inputs: ``text_ids`` and ``text_mask``, each ``(turn, column)``, right-padded. If the language model is
                frozen, ``states``, ``(turn, hidden)``, are used instead.
            reference: whether to use the weights at the start of this run, without gradient.
        """
        if reference:
            with without_gradient(self):
                whitening, layers, _ = self.copied_reference
                return self._head_outputs(self._states(inputs, reference), whitening, layers)
        return self._head_outputs(self._states(inputs), self.whitening, self.layers)

    def _states(self, inputs: Inputs, reference: bool = False) -> Tensor:
        """Compute the hidden states ``(turn, hidden)`` of the last token of each text."""
        if "states" in inputs and self.freeze_trunk:
            return inputs["states"]
        ids, mask = inputs["text_ids"], inputs["text_mask"]
        with self.language_model.reference() if reference and not self.freeze_trunk else nullcontext() as model:
            columns = self.language_model.states(ids, mask, model)
        states = columns[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
        self._check_precision(states)
        return at_least_float32(states)

    def _check_precision(self, states: Tensor) -> None:
        """Check that 16-bit states ``(turn, hidden)`` are not whitened while the language model is trained.

        Raises:
            ValueError: If they are, because whitening amplifies their rounding errors.
        """
        is_16_bit = torch.is_autocast_enabled(states.device.type) or states.dtype in HALVED
        if self.whiten_states is not None and not self.freeze_trunk and is_16_bit:
            raise ValueError(
                f"policy.whiten_states is {self.whiten_states}, and the language model is trained in 16 bits; "
                "whiten_states must be null, freeze_trunk true, or the precision 32 bits."
            )

    def _head_outputs(self, states: Tensor, whitening: Any, layers: Any) -> Tensor:
        """Compute logits or means ``(turn, action)`` from states ``(turn, hidden)``."""
        with without_autocast(states.device):  # 16 bits are too imprecise for log-probabilities
            weights = next(layers.parameters())
            return at_least_float32(layers(whitening(states).to(weights.dtype)))

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Sample one action per row, or take the most probable one (of a Gaussian, the mean) at temperature 0."""
        text = self._text(observations)
        with without_gradient(self):
            states = self._states(text)
            outputs = self._head_outputs(states, self.whitening, self.layers)
            native, actions, logprobs = self.head.sample(outputs, keys, sampling)
        inputs = {} if self.freeze_trunk else text
        if self.freeze_trunk or self.whiten_states is not None:
            inputs["states"] = states
        if self.has_critic:
            inputs["observation"] = self.vectors(observations, self.critic)
        return Decisions(
            actions=native,
            inputs=inputs | {"action": actions},
            response_mask=torch.ones(len(logprobs), 1, dtype=torch.bool, device=logprobs.device),
            logprobs=logprobs,
            memory=memory,
        )

    def _text(self, observations: Sequence[Any]) -> dict[str, Tensor]:
        """Return the token ids of observations and their mask, each ``(row, column)``."""
        padded = pad_prompts([self.encode_observation(seen) for seen in observations], self.language_model.device)
        return {"text_ids": padded["prompt_ids"], "text_mask": padded["prompt_mask"]}

    def encode_turns(self, turns: Sequence[NativeTurn]) -> Inputs:
        """Return the inputs of :meth:`evaluate`: texts, demonstrated actions, and observations if there is a critic."""
        observations = [turn.observation for turn in turns]
        inputs = self._text(observations) | self.head.encode([turn.action for turn in turns])
        return inputs | {"observation": self.vectors(observations, self.critic)} if self.has_critic else inputs

    def statistics_input(self, inputs: Inputs, name: str) -> Tensor:
        """Return an input ``(turn, size)`` of running statistics; missing hidden states are computed."""
        return self._with_states(inputs, name == "states")[name]

    def _with_states(self, inputs: Inputs, needed: bool) -> Inputs:
        """Return ``inputs``, with hidden states added if they are needed; those of sampled turns are already there."""
        if not needed or "states" in inputs:
            return inputs
        with without_gradient(self):
            if not self.freeze_trunk:
                return {**inputs, "states": self._states(inputs)}
            return {**inputs, "states": self._state_cache.states(self.language_model.model, self._states, inputs)}

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute log-probabilities and entropy of the actions, each ``(turn, 1)``; dropout is always off."""
        self.eval()
        distribution = self.head.distribution(self.outputs(self._with_states(batch.inputs, self.freeze_trunk)))
        return Evaluation(
            logprobs=self.head.logprobs_of(distribution, batch.inputs),
            entropy=distribution.entropy(),
            values=self.values(self.norm(batch.inputs["observation"])) if self.has_critic else None,
            distribution=distribution,
        )

    def passes(self, batch: TurnBatch, gradient: bool = False) -> list[Tensor]:
        """Divide turns among forward passes; if the language model is frozen, all turns are in one pass."""
        if self.freeze_trunk or "text_ids" not in batch.inputs:
            return super().passes(batch, gradient)
        texts = {"prompt_ids": batch.inputs["text_ids"], "prompt_mask": batch.inputs["text_mask"]}
        sizes = texts["prompt_mask"].new_zeros(len(batch), dtype=torch.long)
        return self.language_model.passes(texts, sizes, gradient=gradient, logits=False, shared=False)

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute log-probabilities ``(turn, 1)`` under the policy at the start of this run."""
        return self.in_passes(batch, self._reference_logprobs)

    def _reference_logprobs(self, batch: TurnBatch) -> Tensor:
        head: Any = self.copied_reference[-1]
        return head.logprobs_of(head.distribution(self.outputs(batch.inputs, reference=True)), batch.inputs)
