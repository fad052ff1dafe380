"""Compare the speed of lrl with other libraries, or measure parts of it.

python scripts/benchmark.py grpo --json assets/results/benchmark_grpo.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "grpo": "one GRPO step against TRL's GRPOTrainer: completions per second",
    "sft": "supervised fine-tuning against TRL's SFTTrainer: tokens per second without padding",
    "evaluate": "batched evaluation against one episode at a time: environment steps per second",
    "decode": "decoding against Hugging Face generate: responses per second",
    "score": "scoring all legal actions at once against one row per action: environment steps per second",
    "ppo_mlp": "a whole PPO run of a small network against Stable-Baselines3: environment steps per second",
    "trpo_mlp": "whole TRPO runs of a small network against sb3-contrib: environment steps per second, and returns",
    "fisher": "Fisher-vector products in Gauss-Newton form against double backward: products per second",
    "head": "a language model with a Gaussian head: seconds of a rollout and of a TRPO update",
    "demonstrations": "reading a large data set: rows per second to batches of tokens, and peak memory",
    "text": "the cost of text in an environment, without a model: microseconds per step",
    "search_rollouts": "episodes of one proposal of a policy search: environment steps per second, and per CPU second",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark; its ``main`` yields a report, or several as it proceeds, which replace each other."""
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
    _silence_libraries()
    for report in modules[options.benchmark].main(options):
        if options.json is not None:
            from benchmarks.timing import provenance

            settings = {name: value for name, value in vars(options).items() if name not in ("benchmark", "json")}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            document = {**provenance(), "settings": settings, **report}
            options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


def _silence_libraries() -> None:
    """Turn off progress bars and warnings, which would appear between the lines of a table."""
    from transformers.utils.logging import disable_progress_bar

    warnings.filterwarnings("ignore")
    disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "trl", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
