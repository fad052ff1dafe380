"""The interface between a policy that responds in text and whatever generates the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lrl.types import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Sampled responses, one per prompt."""

    ids: Tensor
    """int64 ``(row, token)``, right-padded with 0."""
    mask: Tensor
    """bool ``(row, token)``: every sampled token, the one that ended the response included."""
    logprobs: Tensor
    """``(row, token)`` under the sampled distribution (after temperature, top-k and top-p); 0 where masked."""


class Generator(Protocol):
    """Samples a response for each prompt: the built-in decode loop, a server, an inference engine.

    What ends a response (the end-of-turn token, the last tag of the response format) is the generator's to know.
    """

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig) -> Responses:
        """Sample one response per prompt.

        Args:
            prompts: token ids, one sequence per row.
            uniforms: int64 ``(row, max_new_tokens)``, 64 uniformly distributed bits for each token that may be
                sampled. A generator that takes its randomness from them alone gives the same responses whatever else
                is in the batch.
            sampling: the distribution to sample from, and the maximum number of tokens.
        """
        ...
