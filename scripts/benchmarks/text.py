"""The cost of text without a model: additional microseconds per step of a text environment over the native one.

Both play the same episodes with the same random actions, alternately. The difference is the cost of the text layer: the
response format, the text of actions and the text of observations.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from benchmarks.timing import alternate

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.native import NativeEnv
from lrl.envs.text import TextEnv
from lrl.prompts import get_response_format

ENVS = ("CartPole-v1", "lrl/BabyAI-GoToLocal-v0")


def steps_per_second(env: Any, actions: list[Any]) -> float:
    """Take the actions in an environment; return steps per second, without resets."""
    taken = 0.0
    env.reset(seed=0)
    for action in actions:
        started = time.perf_counter()
        *_, terminated, truncated, _ = env.step(action)
        taken += time.perf_counter() - started
        if terminated or truncated:
            env.reset()
    return len(actions) / taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py text``."""
    parser.add_argument("--env_id", nargs="+", default=ENVS)
    parser.add_argument("--response_format", default="think_answer")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)


def measure(env_id: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one environment."""
    envs, form = GymnasiumEnvs(env_id), get_response_format(options.response_format)
    texts = [envs.codec.random_action_text(uniform) for uniform in np.random.default_rng(0).random(options.steps)]
    text_env = TextEnv(envs.make_native(), envs.codec, options.response_format)
    text = partial(steps_per_second, text_env, [form.render(t, "I see") for t in texts])
    native_env = NativeEnv(envs.make_native())
    native = partial(steps_per_second, native_env, [envs.codec.text_to_action(t) for t in texts])
    rates, native_rates = alternate(text, native, options.repeats)
    costs = [1e6 / own - 1e6 / other for own, other in zip(rates, native_rates, strict=True)]
    middle = {name: 1e6 / statistics.median(each) for name, each in (("text", rates), ("native", native_rates))}
    print(
        f"{env_id}: {middle['text']:.1f} us/step in text, {middle['native']:.1f} native; the text layer takes "
        f"{statistics.median(costs):.1f} ({min(costs):.1f} to {max(costs):.1f}); {1e6 / middle['text']:.0f} steps/s"
    )
    speeds = {"steps_per_second": rates, "native_steps_per_second": native_rates}
    return {"env_id": env_id, "text_layer_us": costs, **speeds}


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each environment."""
    yield {"environments_in_text": [measure(env_id, options) for env_id in options.env_id]}
