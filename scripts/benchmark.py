"""Compare the speed of lrl with other libraries, alternating between the two within one run.

python scripts/benchmark.py grpo --json assets/results/benchmark_grpo.json
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "grpo": "one GRPO step against TRL's GRPOTrainer: completions per second",
    "sft": "supervised fine-tuning against TRL's SFTTrainer: tokens per second, padding not counted",
    "evaluate": "batched evaluation against one episode at a time: env steps per second",
    "decode": "decoding against Hugging Face generate: responses per second",
    "score": "scoring all legal actions at once against a row per action: env steps per second",
    "ppo_mlp": "a whole PPO run of a small network against Stable-Baselines3: env steps per second",
    "trpo_mlp": "whole TRPO runs of a small network against sb3-contrib: env steps per second, and returns",
    "fisher": "Fisher-vector products in Gauss-Newton form against double backward: products per second",
    "head": "a language model with a Gaussian head: seconds of a rollout and of a TRPO update",
    "demonstrations": "reading a large data set: rows per second to batches of tokens, and peak memory",
    "text": "the cost of text in an environment, without a model: microseconds per step",
    "search_rollouts": "episodes of one proposal of a policy search: env steps per second, and per CPU second",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="benchmark", required=True)
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in BENCHMARKS}
    for name, text in BENCHMARKS.items():
        subparser = subparsers.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        modules[name].add_arguments(subparser)
        subparser.add_argument("--threads", type=int, default=None, help="torch threads, for both libraries")
        subparser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    modules[options.benchmark].main(options)


if __name__ == "__main__":
    main()
