"""What text costs in BabyAI, without a model: microseconds per step that a text environment takes over the native one.

Both play the same episodes with the same random actions, in turns; the difference is the text layer: the format of the
answer, the name of the action, the sentences.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from benchmarks.timing import alternate, machine, quiet

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.native import NativeEnv
from lrl.envs.text import TextEnv
from lrl.prompts.response_format import response_format

BAR = 60.0
"""Microseconds per step."""


class Walk:
    """One environment, and the actions to take in it."""

    def __init__(self, env: Any, actions: list[Any]) -> None:
        self.env, self.actions = env, actions

    def __call__(self) -> float:
        """Steps per second; resets are not counted."""
        taken = 0.0
        self.env.reset(seed=0)
        for action in self.actions:
            started = time.perf_counter()
            *_, terminated, truncated, _ = self.env.step(action)
            taken += time.perf_counter() - started
            if terminated or truncated:
                self.env.reset()
        return len(self.actions) / taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--env_id", default="lrl/BabyAI-GoToLocal-v0")
    parser.add_argument("--response_format", default="think_answer")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    quiet()
    envs, form = GymnasiumEnvs(options.env_id), response_format(options.response_format)
    actions = np.random.default_rng(0).integers(6, size=options.steps).tolist()
    answers = [form.render(envs.codec.action_to_text(action), "I look around") for action in actions]
    text = Walk(TextEnv(envs.make_native(), envs.codec, options.response_format), answers)
    rates, native_rates = alternate(text, Walk(NativeEnv(envs.make_native()), actions), options.repeats)
    costs = [1e6 / own - 1e6 / other for own, other in zip(rates, native_rates, strict=True)]
    print(f"text environment   {1e6 / statistics.median(rates):6.1f} us/step")
    print(f"native environment {1e6 / statistics.median(native_rates):6.1f} us/step")
    spread = f"{min(costs):.1f} to {max(costs):.1f}"
    print(f"text layer         {statistics.median(costs):6.1f} us/step ({spread}); bar {BAR:g}")
    if options.json is None:
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {"command": "python " + shlex.join(sys.argv), "commit": commit, "machine": machine(), "bar_us": BAR}
    figures = {"text_layer_us": costs, "text_steps_per_second": rates, "native_steps_per_second": native_rates}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(about | figures, indent=2) + "\n")
