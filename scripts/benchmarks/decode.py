"""Greedy decoding, or sampling, against Hugging Face's ``generate``, prefill included.

Each prompt has a group of responses with the maximum number of tokens, because no token ends a response. Equal prompts
have equal greedy responses, which lrl computes once; with ``--temperature 1`` all responses differ. ``--llama_cpp
FILE`` compares with llama.cpp on a quantised file of the same model instead.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.timing import add_device_arguments, compare, compared, configure_on, now
from transformers import GenerationConfig

from lrl.functional.random import token_bits
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import DecodeLoop
from lrl.lm.loading import load_base
from lrl.lm.model import LanguageModel
from lrl.types import RandomKeys, SamplingConfig

SHAPES = {"4 prompts, groups of 8": (4, 8), "32 prompts": (32, 1)}
"""Number of distinct prompts and of responses to each, by the name of the comparison."""


class Decoding:
    """The same prompts for both implementations.

    Args:
        options: options of the command line.
        prompts: number of distinct prompts.
        group: responses to each.
    """

    def __init__(self, options: argparse.Namespace, prompts: int, group: int) -> None:
        self.options, self.model = options, LanguageModel(LanguageModelConfig(name=options.model, dtype=options.dtype))
        configure_on(options.device, self.model)
        self.loop = DecodeLoop(self.model, None)
        self.model.tokenizer.stop_ids = lambda stop_text=None: {-1}  # no token ends a response
        words = np.random.default_rng(0).integers(100, self.model.vocabulary - 100, (prompts, options.prompt_tokens))
        self.distinct, self.group = words.tolist(), group
        self.prompts = [row for row in self.distinct for _ in range(group)]
        if options.llama_cpp is None:
            self.their_model = load_base(self.model.config).to(options.device)  # attention as transformers chooses
            self.their_model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
        else:
            self.server = llama_server(options, len(self.prompts))
        self.sampling = SamplingConfig(temperature=options.temperature, max_new_tokens=options.max_new_tokens)
        self.calls = 0

    def ours(self) -> float:
        """Return responses per second of lrl."""
        return len(self.prompts) / self.our_seconds(self.sampling)

    def our_seconds(self, sampling: SamplingConfig) -> float:
        """Return the seconds that lrl needs for all responses, including the prompts."""
        self.calls += 1
        number = np.arange(len(self.prompts))
        keys = RandomKeys(seed=0, purpose="benchmark", collection=self.calls, env=number, turn=0 * number)
        bits = token_bits(keys, sampling.max_new_tokens)
        started = now()
        self.ids = self.loop.generate(self.prompts, bits, sampling).ids
        return now() - started

    def theirs(self) -> float:
        """Return responses per second of ``generate``."""
        return len(self.prompts) / self.their_seconds(self.sampling)

    def their_seconds(self, sampling: SamplingConfig) -> float:
        """Return the seconds that ``generate`` needs for all responses, including the prompts."""
        sample = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        settings = sample if sampling.temperature else {"do_sample": False}
        ids = torch.tensor(self.prompts, device=self.options.device)
        started = now()
        with torch.no_grad():
            out = self.their_model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_new_tokens, **settings
            )
        self.their_ids = out[:, ids.shape[1] :]
        return now() - started

    def llama_cpp(self) -> float:
        """Return responses per second of llama.cpp, which processes each prompt once for its group.

        Raises:
            RuntimeError: If a response has fewer than the maximum number of tokens.
        """
        temperature = self.sampling.temperature
        whole = {"top_k": 0 if temperature else 1, "top_p": 1.0, "min_p": 0.0}  # by default it sorts the vocabulary
        settings = {"n_predict": self.sampling.max_new_tokens, "temperature": temperature, **whole}
        request = {"prompt": self.distinct, "n": self.group, "ignore_eos": True, "cache_prompt": False, **settings}
        started = time.perf_counter()
        answer = self.server.handle_completions(request)
        seconds = time.perf_counter() - started
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if reasons != ["length"] * len(self.prompts):
            raise RuntimeError(f"llama.cpp did not answer every prompt in full; its responses ended for: {reasons}.")
        return len(self.prompts) / seconds


def llama_server(options: argparse.Namespace, responses: int) -> Any:
    """Return llama.cpp with a slot for each response, as many threads as torch has, and no cache between requests."""
    library = importlib.import_module("xllamacpp")
    settings = library.CommonParams()
    settings.model.path = str(options.llama_cpp)
    settings.n_parallel, settings.cache_ram_mib, settings.verbosity = responses, 0, 0
    settings.n_ctx = responses * (options.prompt_tokens + options.max_new_tokens + 1)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    return library.Server(settings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py decode``."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt_tokens", type=int, default=100)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama_cpp", type=Path, metavar="FILE", help="a GGUF file, for llama.cpp instead of generate")
    add_device_arguments(parser)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare both numbers of prompts."""
    rows = []
    for name, (prompts, group) in SHAPES.items():
        decoding = Decoding(options, prompts, group)
        theirs = decoding.theirs if options.llama_cpp is None else decoding.llama_cpp
        rows.append(compare(name, "responses", decoding.ours, theirs, options.repeats))
        if not options.temperature and options.llama_cpp is None:
            rows[-1]["equal_tokens"] = float((decoding.ids == decoding.their_ids).float().mean())
            print(f"{name}: {rows[-1]['equal_tokens']:.1%} of the tokens are equal")
    how = "greedy" if options.temperature == 0 else "sampled"
    peer = "generate" if options.llama_cpp is None else f"llama.cpp on {options.llama_cpp.name}"
    title = f"decoding against {peer}, {options.model}, {options.dtype}, {how}"
    yield compared(title, 2.0 if options.llama_cpp is None else None, rows)
