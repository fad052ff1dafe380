"""Fisher-vector products: the Gauss-Newton form against differentiating the divergence twice.

As in TRPO, one graph is used for ten products. They are measured for the embedded language model with a Gaussian head
on HalfCheetah's observations, for the same model writing FrozenLake's actions, and for a small network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.timing import compare, compared

PRODUCTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py fisher``."""
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare both forms for each policy."""
    comparisons = []
    for name in ("mlp", "head", "text"):
        ours, theirs = (_measure(name, fisher, options.turns) for fisher in ("gauss_newton", "double_backward"))
        comparisons.append(compare(f"{name}, {options.turns} turns", "product", ours, theirs, options.repeats))
    yield compared("Fisher products, Gauss-Newton against double backward", 1.0, comparisons)


def _measure(name: str, fisher: Any, turns: int) -> Any:
    from lrl.algorithms.trpo import NaturalGradientConfig, TRPOModule

    policy, env = _policy(name)
    module = TRPOModule(policy, natural_gradient=NaturalGradientConfig(product=fisher))
    batch, parameters = _batch(module, env, turns), module.actor_parameters()
    vector = torch.randn(sum(weight.numel() for weight in parameters), generator=torch.Generator().manual_seed(0))

    def measure() -> float:
        started = time.perf_counter()
        product = module._product(batch, parameters)
        for _ in range(PRODUCTS):
            product(vector)
        return PRODUCTS / (time.perf_counter() - started)

    return measure


def _policy(name: str) -> tuple[Any, Any]:
    from lrl.codecs.numbers import NumberFormat
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.lm.config import LanguageModelConfig
    from lrl.lm.heads import ValueHeadConfig
    from lrl.policies.head import HeadPolicy
    from lrl.policies.mlp import MLPPolicy
    from lrl.policies.text import TextPolicy
    from lrl.prompts import PromptTemplate
    from lrl.types import SamplingConfig

    model = LanguageModelConfig(attention="eager")  # besides SDPA's math kernel, only this kind has a second derivative
    env = GymnasiumEnvs("HalfCheetah-v5", numbers=NumberFormat(kind="integers"))
    policy: Any
    if name == "text":
        env = GymnasiumEnvs("FrozenLake-v1")
        prompt = PromptTemplate(response_format="direct")
        policy = TextPolicy(model, prompt, SamplingConfig(max_new_tokens=4), value_head=ValueHeadConfig())
    else:
        policy = MLPPolicy((64, 64), activation="tanh") if name == "mlp" else HeadPolicy(model)
    policy.connect(env.codec)
    if policy.response_format is None:
        policy.connect_spaces(*env.spaces)
    policy.configure()
    return policy, env


def _batch(module: Any, env: Any, turns: int) -> Any:
    from lrl.training.collect import CollectionPlan, FixedHorizonCollector

    plan = CollectionPlan(seed=0, collection=0, num_groups=10, group_size=1, num_steps=turns // 10)
    envs = env.make(10, module.policy.response_format)
    rollout = FixedHorizonCollector(module.policy, envs, 0, plan.env, 10).collect(plan)
    envs.close()
    return module.prepare(rollout)
