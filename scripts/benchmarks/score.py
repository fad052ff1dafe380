"""Scoring the legal actions with prompts shared, against repeating the prompt in front of each candidate.

The other side does what GLAM, lamorel and TWOSOME do: one batched forward pass over rows of prompt and candidate.
Unlike them, it computes logits at the candidates' tokens only. Both sides play the same episodes with the same model,
seeds and random numbers, and differ in the forward pass of the scores only. Equal probabilities are checked before the
timing, and equal episodes after each repeat.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmarks.timing import compare, compared
from torch import Tensor

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy
from lrl.lm.attention import compute_dtype
from lrl.lm.config import LanguageModelConfig
from lrl.lm.layouts import Candidates, pad_prompts
from lrl.lm.logprobs import candidate_logprobs
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.types import RandomKeys


class Both:
    """Two implementations of the same policy with the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.envs = GymnasiumEnvs(options.env_id, max_episode_steps=options.steps)
        self.policy, self.repeating = self._policy(share_prompts=True), self._policy(share_prompts=False)
        replaced: Any = self.repeating
        replaced.scores = self.repeated
        tokens = [self.policy.language_model.tokenizer.encode_text(text) for text in self.policy.action_texts]
        self.texts = Candidates.of(tokens, torch.device("cpu"))
        self.candidates, self.mask = self.texts.ids, self.texts.mask
        self.prompt_tokens: list[int] = []
        self.played: list[EpisodeResults] = []

    def _policy(self, share_prompts: bool) -> ScoringPolicy:
        prompt = PromptTemplate(response_format="direct", history=self.options.history)
        model = LanguageModelConfig(name=self.options.model, share_prompts=share_prompts)
        policy = ScoringPolicy(model, prompt, max_prompt_tokens=2048)
        policy.connect(self.envs.codec)
        policy.configure()
        return policy.eval()

    def play(self, policy: ScoringPolicy) -> float:
        """Return env steps per second of one of the policies, which both must play the same episodes."""
        count, seed = self.options.num_envs, self.options.seed
        self.played.append(evaluate_policy(policy, self.envs, count, seed, count, policy.sampling))
        assert (self.played[-1].returns == self.played[0].returns).all()
        assert (self.played[-1].lengths == self.played[0].lengths).all()
        return self.played[-1].env_steps_per_second

    @torch.no_grad()
    def repeated(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """Return scores ``(row, candidate)`` from right-padded rows of prompt and candidate."""
        lengths, (count, longest) = prompt_mask.sum(1), self.candidates.shape
        self.prompt_tokens += lengths.tolist()
        columns = (lengths[:, None] + torch.arange(longest)).repeat_interleave(count, 0)
        ids = torch.nn.functional.pad(prompt_ids, (0, longest)).repeat_interleave(count, 0)
        candidate_ids, counts = self.candidates.repeat(len(lengths), 1), self.mask.repeat(len(lengths), 1)
        ids.scatter_(1, columns, candidate_ids)
        seen = torch.arange(ids.shape[1])[None] < columns[:, :1] + counts.sum(1, keepdim=True)
        model: Any = self.repeating.language_model.model
        hidden = model.model(input_ids=ids, attention_mask=seen.long()).last_hidden_state
        picked = hidden.gather(1, (columns - 1)[:, :, None].expand(-1, -1, hidden.shape[-1]))
        logprobs = torch.log_softmax(model.lm_head(picked).float(), -1)
        sums = (logprobs.gather(-1, candidate_ids[:, :, None])[:, :, 0] * counts).sum(1)
        return sums.view(len(lengths), count)

    def check(self) -> float:
        """Return the largest difference of a probability in the first states of episodes.

        Raises:
            AssertionError: If the policies differ.
        """
        count = self.options.num_envs
        envs = self.envs.make(count, self.policy.response_format)
        seeds: Any = list(range(self.options.seed, self.options.seed + count))
        texts, _ = envs.reset(seed=seeds)
        envs.close()
        prompts = [self.policy.encode(text, ()) for text in texts]
        rows = np.arange(count)
        keys = RandomKeys(seed=0, purpose="check", collection=0, env=rows, turn=np.zeros_like(rows))
        theirs = torch.softmax(self.repeated(*pad_prompts(prompts, torch.device("cpu")).values()), -1)
        model = self.policy.language_model.model
        acting, _ = candidate_logprobs(model, prompts, self.texts, compute_dtype(model))
        decisions = self.policy.act(texts, [()] * count, keys, self.policy.sampling)
        with torch.no_grad():
            evaluating = self.policy.scores(decisions.inputs["prompt_ids"], decisions.inputs["prompt_mask"])
        difference = max(float((own - theirs).abs().max()) for own in (acting.softmax(-1), evaluating.softmax(-1)))
        assert difference < 1e-5, difference
        return difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py score``."""
    parser.add_argument("--model", default="assets/tiny-lm")
    parser.add_argument("--env_id", default="lrl/BabyAI-GoToLocal-v0")
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="turns after which an episode is cut")
    parser.add_argument("--history", type=int, default=0, help="past turns in the prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=6)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Check that both are the same policy, and compare them."""
    both = Both(options)
    difference = both.check()
    ours, theirs = (partial(both.play, policy) for policy in (both.policy, both.repeating))
    row = compare("", "env steps", ours, theirs, options.repeats, largest_difference=difference)
    tokens = float(np.mean(both.prompt_tokens))
    print(f"prompts of {tokens:.0f} tokens, probabilities differ by {difference:.1e}")
    name = f"{len(both.policy.action_texts)} actions, prompts of {tokens:.0f} tokens"
    row |= {"name": name, "prompt_tokens": tokens}
    yield compared("scoring against a row per candidate", 5.0, [row], dtype="float32")
