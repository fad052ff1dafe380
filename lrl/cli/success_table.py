"""Evaluate policies in several environments, and print a Markdown table with 95% intervals.

One policy: return, length and success. Several: the success (or another figure) of each, side by side.

lrl success_table --policy expert --env_id lrl/BabyAI-{GoTo,Pickup}Local-v0 --json table.json
lrl success_table --checkpoint before=runs/babyai/sft/x after=runs/babyai/ppo/y --env_id lrl/BabyAI-GoToLocal-v0
lrl success_table --policy expert --env_id lrl/BabyAI-GoToLocal-v0 --env_kwargs '{"num_distractors": '{0,3,5}'}'
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.cli.arguments import command_parser, fabric_of, subcommand
from lrl.evaluation.report import environments_table

if TYPE_CHECKING:
    from lrl.evaluation.load import Loaded


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--checkpoint", nargs="+", metavar="[LABEL=]RUN", help="checkpoints or run directories")
    subject.add_argument("--policy", help="a baseline: random, constant or expert")
    parser.add_argument("--env_id", nargs="+", required=True)
    parser.add_argument("--env_kwargs", type=json.loads, nargs="+", default=[{}], help="JSON objects for each of them")
    parser.add_argument("--episodes", type=int, default=200, help="in each environment")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--num_envs", type=int, default=16, help="in parallel; the result does not depend on it")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--accelerator", default="auto", help="one device of this kind plays")
    parser.add_argument("--precision", help="of Fabric, for example bf16-mixed; default: that of the weights")
    parser.add_argument(
        "--merge_adapters", action="store_true", help="play with the adapters merged: faster, the same up to rounding"
    )
    parser.add_argument("--figure", choices=("success", "return"), default="success", help="shown of several policies")
    parser.add_argument("--machine", default="", help="the machine's description, for the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.set_defaults(devices="1", strategy="auto")  # for fabric_of
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate everywhere, print the table and write the file."""
    rows = evaluate_all(arguments)
    if arguments.json is not None:
        write_report(rows, arguments)


def evaluate_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate every policy in every environment, printing each line of the table when it is known."""
    from lrl.lm.merging import merge_adapters_of

    rows: list[dict[str, Any]] = []
    settings = list(dict.fromkeys(name for env_kwargs in arguments.env_kwargs for name in env_kwargs))
    printed = 0
    subjects = [(arguments.policy,) * 2] if arguments.policy else labelled(arguments.checkpoint)
    if arguments.merge_adapters:  # what cannot be merged is an error before anything is played
        for label, path in subjects[1:]:
            merge_adapters_of(load(path, arguments.env_id[0], arguments.env_kwargs[0], arguments).policy, label)
    for env_id, env_kwargs in product(arguments.env_id, arguments.env_kwargs):
        rows += [row(subject, env_id, env_kwargs, arguments) for subject in subjects]
        lines = environments_table(rows, settings, arguments.figure).split("\n")
        print("\n".join(lines[printed:]), flush=True)
        printed = len(lines)
    return rows


def write_report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the figures with the command, the commit and the machine as JSON."""
    from lrl.cli.run_directory import commit
    from lrl.evaluation.report import write_json

    command = f"python -m lrl success_table {shlex.join(arguments.words)}"
    about = {"command": command, "commit": commit(), "machine": arguments.machine}
    write_json(about | {"figure": arguments.figure, "environments": rows}, arguments.json)


def labelled(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return label and path of each ``[label=]path``.

    Raises:
        ValueError: two have the same label.
    """
    pairs = [(text, text) if Path(text).exists() or "=" not in text else text.split("=", 1) for text in texts]
    labels = [label for label, _ in pairs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"--checkpoint names {twice!r} twice; give each a label of its own: LABEL=RUN.")
    return [(label, path) for label, path in pairs]


def row(
    subject: tuple[str, str], env_id: str, env_kwargs: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Evaluate one policy in one environment; of the episodes only the failed seeds are kept.

    Args:
        subject: label, and path or name of the policy.
        env_id: registered name of the environment.
        env_kwargs: what it is made with.
        arguments: the parsed command line.
    """
    from lrl.evaluation.episodes import evaluate_policy
    from lrl.lm.merging import merge_adapters_of

    label, path = subject
    fabric = fabric_of(arguments)
    policy, envs, _ = load(path, env_id, env_kwargs, arguments)
    if arguments.merge_adapters:
        merge_adapters_of(policy, label)
    fabric.strategy.precision.convert_module(policy.to(fabric.device))  # in place; nothing with a mixed precision
    sampling = policy.sampling_at(arguments.temperature)
    with fabric.autocast():
        results = evaluate_policy(policy, envs, arguments.episodes, arguments.seed, arguments.num_envs, sampling)
    report: dict[str, Any] = results.report(env_id, label) | {"env_kwargs": env_kwargs}
    failed = [episode["seed"] for episode in report.pop("per_episode") if not episode["success"]]
    return report | {"length_ci95": list(results.intervals()["length"]), "failed_seeds": failed}


def load(subject: str, env_id: str, env_kwargs: dict[str, Any], arguments: argparse.Namespace) -> Loaded:
    """Load one policy in one environment."""
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.evaluation.load import load_baseline, load_policy, saved_numbers

    if arguments.policy:
        return load_baseline(subject, GymnasiumEnvs(env_id, env_kwargs))
    return load_policy(subject, GymnasiumEnvs(env_id, env_kwargs, numbers=saved_numbers(subject)))


main = subcommand(make_parser, run)
