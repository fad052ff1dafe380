"""Batched evaluation against one episode at a time through Hugging Face's ``generate``, on slippery FrozenLake.

Both have the same episodes, seeds, prompts and limits. At temperature 0 both must take the same turns, which is checked
on the episodes that both play. The other side does what a simple script does for each turn: render the chat, call
``generate`` for one prompt, parse the response, and step. Without past turns in the prompt, FrozenLake has 11 different
prompts, each of which lrl computes once; with past turns, most prompts of a batch differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from benchmarks.timing import compare, compared

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import History, PastTurn, SamplingConfig


class Both:
    """One policy in one environment, evaluated in two ways."""

    def __init__(self, options: argparse.Namespace, history: int, temperature: float) -> None:
        self.options, self.temperature = options, temperature
        self.envs = GymnasiumEnvs("FrozenLake-v1", kwargs={"map_name": "4x4", "is_slippery": True})
        prompt = PromptTemplate(history=history)
        sampling = SamplingConfig(max_new_tokens=options.max_new_tokens)
        self.policy = TextPolicy(LanguageModelConfig(name=options.model), prompt, sampling, max_prompt_tokens=2048)
        self.policy.connect(self.envs.codec)
        self.policy.configure()
        self.batched: EpisodeResults | None = None
        self.one_by_one: list[tuple[float, int]] = []

    def ours(self) -> float:
        """Return turns per second of lrl's evaluation."""
        options = self.options
        sampling = self.policy.sampling_at(self.temperature)
        started = time.perf_counter()
        self.batched = evaluate_policy(
            self.policy, self.envs, options.episodes, options.seed, options.num_envs, sampling=sampling
        )
        return self.batched.lengths.sum() / (time.perf_counter() - started)

    def theirs(self) -> float:
        """Return turns per second of one episode at a time."""
        env = self.envs.make(1, self.policy.response_format)
        started = time.perf_counter()
        seeds = range(self.options.seed, self.options.seed + self.options.single_episodes)
        self.one_by_one = [self._episode(env, seed) for seed in seeds]
        seconds = time.perf_counter() - started
        env.close()
        return sum(length for _, length in self.one_by_one) / seconds

    def _episode(self, env: Any, seed: int) -> tuple[float, int]:
        """Play one episode; return its return and length."""
        history: History = ()
        (observation,), _ = env.reset(seed=[seed])
        total, length, ended = 0.0, 0, False
        while not ended:
            response = self._answer(observation, history)
            history = self.policy.prompt.truncate_history((*history, PastTurn(observation, response)))
            (observation,), rewards, terminated, truncated, _ = env.step((response,))
            total, length, ended = total + float(rewards[0]), length + 1, bool(terminated[0] or truncated[0])
        return total, length

    @torch.no_grad()
    def _answer(self, observation: str, history: History) -> str:
        """Call ``generate`` once, with the stop token of the response format."""
        model, chat = self.policy.language_model.model, self.policy.language_model.tokenizer
        messages = self.policy.prompt.messages(self.envs.codec, observation, history)
        prompt = chat.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        drawn: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        ids = model.generate(
            **prompt,
            **drawn,
            max_new_tokens=self.options.max_new_tokens,
            pad_token_id=chat.pad_id,
            eos_token_id=sorted(chat.stop_ids(self.policy.stop_text)),
        )
        return chat.decode(ids[0, prompt["input_ids"].shape[1] :].tolist())

    def check(self) -> None:
        """Check that both play the same episodes at temperature 0.

        Raises:
            AssertionError: If returns or lengths differ.
        """
        if self.temperature > 0:
            return
        assert self.batched is not None
        both = min(len(self.one_by_one), len(self.batched))
        returns, lengths = (np.array(values)[:both] for values in zip(*self.one_by_one, strict=True))
        np.testing.assert_allclose(returns, self.batched.returns[:both])
        np.testing.assert_array_equal(lengths, self.batched.lengths[:both])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py evaluate``."""
    parser.add_argument("--model", default="assets/tiny-lm")
    parser.add_argument("--episodes", type=int, default=192)
    parser.add_argument("--num_envs", type=int, default=64)
    parser.add_argument("--single_episodes", type=int, default=5, help="episodes that are played one at a time")
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("--history", type=int, nargs="+", default=[0, 2], help="past turns in the prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare all settings."""
    rows = []
    for history, temperature in product(options.history, options.temperature):
        both = Both(options, history, temperature)
        both.ours()
        both.theirs()
        both.check()
        name = f"past turns {history}, temperature {temperature:g}"
        row = compare(name, "env steps", both.ours, both.theirs, options.repeats, warm=True)
        assert both.batched is not None
        length = float(both.batched.lengths.mean())
        rows.append(row | {"length_mean": length, "history": history, "temperature": temperature})
    yield compared("evaluation against one at a time", 10.0, rows, dtype="float32")
