"""The value head: a critic on the hidden states of a language model that it shares with the actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lrl.models.networks import ACTIVATIONS, at_least_float32, mlp, seeded_init

VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file that ``lrl merge --value_head`` writes, and that ``init_from`` reads."""
VALUE_HEAD_FOLDER = "value_head"
"""Folder of that file in the folder of a model: vLLM would take every ``*.safetensors`` beside the model for a part."""


@dataclass(frozen=True, kw_only=True)
class ValueHeadConfig:
    """A critic on the hidden state from which a token is predicted: it depends on all tokens before that one."""

    hidden_sizes: Sequence[int] = ()
    """Sizes of the hidden layers; none is a linear head."""
    activation: str = "relu"
    """The activation between layers."""
    per_token: bool = True
    """Whether each token of a response has a value of its own; else all have that of the prompt's last token."""
    adapter: bool = False
    """Whether the critic has an adapter of its own in the language model, of the shape of ``language_model.lora``, that
    starts at zero. Values then need a pass of their own."""
    detach: bool = False
    """Whether the value loss stops at the head. ``trainer.gradient_clip_val`` still clips one norm over both."""
    init_seed: int | None = None
    """Seed of the weights; null takes the run's seed."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"value_head.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")
        if self.adapter and self.detach:
            raise ValueError("value_head.adapter and detach are both true: the adapter would learn nothing; unset one.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"value_head.activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}."
            )


class ValueHead(nn.Module):
    """Computes values from hidden states, never in half precision, whatever the language model computes in.

    Args:
        config: the shape of the head.
        hidden_size: size of the hidden states.
    """

    def __init__(self, config: ValueHeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.per_token, self.detach = config.per_token, config.detach
        with seeded_init(config.init_seed):
            self.layers = mlp((hidden_size, *config.hidden_sizes, 1), config.activation, 0.01)

    def view(self, states: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        """Return values ``(turn, token)`` as a function of indices of turns ``(turn,)``.

        Args:
            states: ``(turn, token, hidden)``, which do not change with the head.
            mask: bool ``(turn, token)``.
        """
        return lambda index: self(states[index], mask[index])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Compute values ``(turn, token)``, 0 where masked.

        Args:
            states: ``(turn, token, hidden)``.
            mask: bool ``(turn, token)``.
        """
        if self.detach:
            states = states.detach()
        if not self.per_token:
            states = states[:, :1]
        with torch.autocast(states.device.type, enabled=False):
            weights = next(self.layers.parameters())
            values = at_least_float32(self.layers(states.to(weights.dtype)).squeeze(-1))
        return values.expand(mask.shape) * mask

    def save(self, folder: Path) -> None:
        """Write the weights into the folder of a model, as :data:`VALUE_HEAD_FILE` in a folder of their own."""
        from safetensors.torch import save_file

        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        (folder / VALUE_HEAD_FOLDER).mkdir()
        save_file(state, folder / VALUE_HEAD_FOLDER / VALUE_HEAD_FILE, metadata={"format": "pt"})
