"""Generator that samples with vLLM in this process; needs the extra ``vllm`` and a GPU that vLLM supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import Responses
from lrl.lm.files import check_available, locate
from lrl.lm.tokenizer import ChatTokenizer
from lrl.types import SamplingConfig


@final
class VLLMGenerator:
    """Samples responses with vLLM, for evaluation only: training does not update the weights that vLLM loads.

    The row of ``uniforms`` determines the seed of a request. A response does not depend on other rows, except where the
    results of vLLM's kernels depend on the batch.

    Args:
        language_model: Specifies the causal LM; its name, data type and chat template are used.
        stop_text: The closing tag of the response format; None if it has none.
        options: Further arguments of ``vllm.LLM``, such as ``gpu_memory_utilization``.

    Raises:
        ValueError: If vLLM is not installed.
    """

    def __init__(
        self,
        language_model: LanguageModelConfig,
        stop_text: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.stop_text, self.options = language_model, stop_text, dict(options or {})
        _vllm()

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, loaded at the first use."""
        check_available(self.config.name)
        return ChatTokenizer.from_pretrained(self.config.name, self.config.chat_template, self.config.trust_remote_code)

    @cached_property
    def engine(self) -> Any:
        """The ``vllm.LLM``, loaded at the first use."""
        known: dict[str, Any] = {
            "model": locate(self.config.name),
            "dtype": self.config.dtype,
            "trust_remote_code": self.config.trust_remote_code,
            # Log-probabilities after temperature, top-k and top-p; by default vLLM returns those before them.
            "logprobs_mode": "processed_logprobs",
        }
        return _vllm().LLM(**known | self.options)

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig) -> Responses:
        """Sample one response per prompt.

        Args:
            prompts: Token ids, one sequence per row.
            uniforms: Random bits, int64 ``(row, max_new_tokens)``; the first number of a row seeds its request.
            sampling: The distribution to sample from, and the maximum number of tokens.
        """
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [self._params(int(seed) & 0x7FFFFFFF, sampling) for seed in uniforms[:, 0].tolist()]
        outputs = [request.outputs[0] for request in self.engine.generate(requests, params, use_tqdm=False)]
        rows = [list(output.token_ids) for output in outputs]
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
        mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
        logprobs = torch.zeros(len(rows), width)
        for index, (row, output) in enumerate(zip(rows, outputs)):
            chosen = [known[token].logprob for token, known in zip(row, output.logprobs, strict=True)]
            logprobs[index, : len(row)] = torch.tensor(chosen)
        return Responses(ids=ids, mask=mask, logprobs=logprobs)

    def _params(self, seed: int, sampling: SamplingConfig) -> Any:
        """Return ``vllm.SamplingParams`` of one request."""
        return _vllm().SamplingParams(
            temperature=sampling.temperature,
            top_k=0 if sampling.top_k is None else sampling.top_k,  # 0: all tokens
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop=None if self.stop_text is None else [self.stop_text],
            include_stop_str_in_output=True,
            stop_token_ids=sorted(self.tokenizer.stop_ids(self.stop_text)),
            skip_special_tokens=False,  # the tags of a response format may be special tokens
            logprobs=0,  # only that of the sampled token
        )


def _vllm() -> Any:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"use_vllm needs the package vllm, which cannot be imported ({error}); install the extra, 'lrl[vllm]'."
        ) from error
    return vllm
