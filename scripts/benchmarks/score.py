"""Scoring the legal actions with their prompt shared, against repeating the prompt behind each candidate.

The other side is what GLAM and TWOSOME do: one batched forward pass over rows of prompt and candidate, logits at the
candidates' tokens only. The same model, prompts and six actions; the probabilities are compared before anything is
timed. Every prompt of a batch is another one, so nothing is gained by equal prompts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from benchmarks.timing import Comparison, alternate, finish, quiet

from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.language_model import LanguageModelConfig
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts.template import PromptTemplate
from lrl.types import RandomKeys


class Both:
    """One policy, some observations, and two ways to choose."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        envs = GymnasiumEnvs(options.env_id)
        system = PromptTemplate(response_format="direct")
        self.policy = ScoringPolicy(LanguageModelConfig(name=options.model), system, max_prompt_tokens=2048)
        self.policy.connect(envs.codec)
        self.policy.configure()
        self.policy.eval()
        env = envs.make(options.num_envs, "direct")
        seeds: Any = list(range(options.num_envs))  # Gymnasium types one seed only
        texts, _ = env.reset(seed=seeds)
        self.observations = list(texts)
        env.close()
        self.prompts = [self.policy.encode(text, ()) for text in self.observations]

    def ours(self) -> float:
        """Choices per second of :meth:`ScoringPolicy.act`."""
        rows = np.arange(len(self.observations))
        keys = RandomKeys(seed=0, purpose="benchmark", collection=0, env=rows, turn=np.zeros_like(rows))
        started = time.perf_counter()
        for _ in range(self.options.steps):
            self.policy.act(self.observations, [()] * len(rows), keys)
        return self.options.steps * len(rows) / (time.perf_counter() - started)

    def theirs(self) -> float:
        """Choices per second with a row for each candidate, prompts encoded as ours are."""
        generator = torch.Generator().manual_seed(0)
        started = time.perf_counter()
        for _ in range(self.options.steps):
            prompts = [self.policy.encode(text, ()) for text in self.observations]
            torch.multinomial(torch.softmax(self.repeated(prompts), -1), 1, generator=generator)
        return self.options.steps * len(self.observations) / (time.perf_counter() - started)

    @torch.no_grad()
    def repeated(self, prompts: list[list[int]]) -> torch.Tensor:
        """Scores ``(row, candidate)`` from rows of prompt and candidate, right-padded."""
        candidates = [self.policy.tokenizer.encode_text(text) for text in self.policy.action_texts]
        rows = [prompt + candidate for prompt in prompts for candidate in candidates]
        width, longest = max(map(len, rows)), max(map(len, candidates))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
        starts = torch.tensor([len(prompt) - 1 for prompt in prompts for _ in candidates])
        sizes = torch.tensor([len(candidate) for _ in prompts for candidate in candidates])
        model: Any = self.policy.language_model.model
        hidden = model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        columns = (starts[:, None] + torch.arange(longest)).clamp(max=width - 2)
        picked = hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[-1]))
        logprobs = torch.log_softmax(model.lm_head(picked).float(), -1)
        told = logprobs.gather(-1, ids.gather(1, columns + 1)[:, :, None])[:, :, 0]
        sums = (told * (torch.arange(longest)[None] < sizes[:, None])).sum(1)
        return sums.view(len(prompts), len(candidates))

    def check(self) -> float:
        """The largest difference of a probability.

        Raises:
            AssertionError: they are not those of the same policy.
        """
        inputs = self.policy.act(self.observations, [()] * len(self.observations), _keys(len(self.observations))).inputs
        with torch.no_grad():
            own = torch.softmax(self.policy.scores(inputs["prompt_ids"], inputs["prompt_mask"]), -1)
        difference = float((own - torch.softmax(self.repeated(self.prompts), -1)).abs().max())
        assert difference < 1e-4, difference
        return difference


def _keys(rows: int) -> RandomKeys:
    index = np.arange(rows)
    return RandomKeys(seed=0, purpose="benchmark", collection=0, env=index, turn=np.zeros_like(index))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``benchmark.py score``."""
    parser.add_argument("--model", default="assets/tiny-lm")
    parser.add_argument("--env_id", default="lrl/BabyAI-GoToLocal-v0")
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=6)


def main(options: argparse.Namespace) -> None:
    """Compare."""
    quiet()
    both = Both(options)
    notes = {"largest_difference": both.check(), "prompt_tokens": float(np.mean([len(p) for p in both.prompts]))}
    print(f"prompts of {notes['prompt_tokens']:.0f} tokens, probabilities differ by {notes['largest_difference']:.1e}")
    ours, theirs = alternate(both.ours, both.theirs, options.repeats)
    name = f"{len(both.policy.action_texts)} actions, prompts of {notes['prompt_tokens']:.0f} tokens"
    comparison = Comparison(name=name, unit="env steps", ours=ours, theirs=theirs, notes=notes)
    settings = {"num_envs": options.num_envs, "env_id": options.env_id, "dtype": "float32"}
    finish([comparison], bar=5.0, path=options.json, title="scoring against a row per candidate", settings=settings)
