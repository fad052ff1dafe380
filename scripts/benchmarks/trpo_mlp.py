"""Whole TRPO runs of a small network on HalfCheetah against sb3-contrib, network and batch equal.

lrl runs the documented command with ``configs/half_cheetah/trpo_mlp.yaml``, including its parsing, logging and
checkpoints; sb3-contrib runs ``TRPO("MlpPolicy").learn`` without a logger, on observations that are normalised and
clipped in the same way. Both take the same number of environment steps and then play 20 held-out episodes without
noise, whose returns are kept. Both critics take ten passes of Adam over minibatches of 128. The KL divergence is a mean
over the six dimensions of an action in sb3-contrib and a sum in lrl, so ``max_kl`` and damping are divided by six.

The remaining differences are the line search (lrl halves the step and requires a tenth of the predicted improvement,
sb3-contrib multiplies it by 0.8 and accepts any improvement), Adam's epsilon, and the direction of the divergence in
the line search.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.timing import WholeRuns, compare, compared

from lrl.evaluation.statistics import headline_seed


class Both(WholeRuns):
    """Runs of lrl and of sb3-contrib."""

    def train(self, seed: int) -> float:
        """Train with sb3-contrib, and return the mean return of held-out episodes."""
        from sb3_contrib import TRPO  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.vec_env import VecNormalize  # pyright: ignore[reportMissingImports]

        policy = self.model["policy"]["init_args"]
        clip = policy["observation_clip"]
        make = lambda number, seed: make_vec_env("HalfCheetah-v5", n_envs=number, seed=seed)  # noqa: E731
        envs = VecNormalize(make(self.data["num_envs"], seed), norm_reward=False, clip_obs=clip)
        dimensions = math.prod(envs.action_space.shape or ())
        model = TRPO(
            "MlpPolicy",
            envs,
            n_steps=self.data["num_steps"],
            gamma=self.model["credit"]["gamma"],
            gae_lambda=self.model["credit"]["gae_lambda"],
            target_kl=self.model["max_kl"] / dimensions,
            cg_damping=self.model["natural_gradient"]["damping"] / dimensions,
            cg_max_steps=self.model["natural_gradient"]["cg_iterations"],
            policy_kwargs={"net_arch": list(policy["hidden_sizes"]), "activation_fn": torch.nn.Tanh},
            seed=seed,
            device="cpu",
        )
        started = time.perf_counter()
        model.learn(self.steps)
        self.trained("theirs", started)
        held_out = VecNormalize(make(20, 10_000), norm_reward=False, clip_obs=clip, training=False)
        held_out.obs_rms = envs.obs_rms
        return _play(model, held_out)


def _play(model: Any, envs: Any) -> float:
    """Return the mean return over one episode in each environment; HalfCheetah's episodes have 1,000 steps."""
    seen, returns = envs.reset(), np.zeros(envs.num_envs)
    for _ in range(1000):
        seen, rewards, _, _ = envs.step(model.predict(seen, deterministic=True)[0])
        returns += rewards
    return float(returns.mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py trpo_mlp``."""
    parser.add_argument("--env_steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--theirs_only", type=int, help="only sb3-contrib, on this many headline seeds")


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare whole runs, or run sb3-contrib only."""
    both = Both("configs/half_cheetah/trpo_mlp.yaml", options.env_steps, "val/return")
    if options.theirs_only:
        yield from _theirs(both, options.theirs_only)
        return
    name = f"HalfCheetah-v5, {both.steps} env steps"
    row = compare(name, "env steps", both.ours, both.theirs, options.repeats, warm=True, returns=both.returns)
    yield compared("TRPO on a network against sb3-contrib", 1.0, [row], settings=both.model)


def _theirs(both: Both, count: int) -> Iterator[dict[str, Any]]:
    """Run sb3-contrib on headline seeds, and yield a report after each of them."""
    torch.set_num_threads(1)
    seeds, returns, minutes = list[int](), list[float](), list[float]()
    for seed in map(headline_seed, range(count)):
        started = time.perf_counter()
        returns.append(both.train(seed))
        minutes.append(round((time.perf_counter() - started) / 60, 2))
        seeds.append(seed)
        print(f"seed {seed}: {returns[-1]:.0f} after {minutes[-1]} minutes", flush=True)
        yield {
            "title": f"sb3-contrib's TRPO on HalfCheetah-v5, {both.steps} env steps, return of 20 held-out episodes",
            "settings": both.model,
            "seeds": seeds,
            "returns": returns,
            "minutes": minutes,
        }
