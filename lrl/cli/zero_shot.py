"""Evaluate an untrained language model beside random actions: writing its action, reasoning first, and choosing.

lrl zero_shot --model smollm2-135m --json assets/results/zero_shot_smollm2.json

The file is written after each policy; a second call evaluates what is missing in it, for example after an
interruption or with further ``--env_id``. Its rows are those of ``lrl evaluate --json`` without single episodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.cli.arguments import command_parser, subcommand
from lrl.envs.factory import GymnasiumEnvs

if TYPE_CHECKING:
    from lrl.evaluation.load import Loaded

POLICIES = {
    "random": None,
    "chooses": ("direct", 0, True),
    "chooses, 3 examples": ("direct", 3, True),
    "writes": ("direct", 0, False),
    "writes, 3 examples": ("direct", 3, False),
    "reasons": ("think_answer", 0, False),
    "reasons, 3 examples": ("think_answer", 3, False),
}
"""Response format, number of few-shot examples and whether the model chooses, by label."""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--model", required=True, help="hub name, folder or GGUF file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--env_id", nargs="+", default=["FrozenLake-v1"])
    parser.add_argument("--env_kwargs", type=json.loads, nargs="+", default=[{}], help="JSON objects for each of them")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--num_envs", type=int, default=200, help="in parallel; the result does not depend on it")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="of a response with reasoning; 12 without")
    parser.add_argument("--machine", default="", help="the machine's description, for the file")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate what the report lacks, and write it after each row."""
    from lrl.evaluation.report import write_json

    report = read_report(arguments)
    settings = {name: getattr(arguments, name) for name in ("model", "dtype", "episodes", "seed", "max_new_tokens")}
    for name, value in settings.items():
        if report.setdefault("settings", settings).get(name) != value:
            raise ValueError(
                f"--{name} is {value!r}, but {arguments.json} was measured with {report['settings'].get(name)!r}; give "
                "another file."
            )
    command = f"{arguments.prog} {shlex.join(arguments.words)}"
    report["command"] = " && ".join(dict.fromkeys([*filter(None, [report["command"]]), command]))
    known = {(row["env_id"], json.dumps(row["env_kwargs"]), row["policy"]) for row in report["environments"]}
    for env_id, env_kwargs, label in product(arguments.env_id, arguments.env_kwargs, arguments.policies):
        if (env_id, json.dumps(env_kwargs), label) not in known:
            row = evaluated(label, env_id, env_kwargs, arguments)
            report["environments"].append(row)
            print(label, {name: row[name] for name in row if not name.startswith("failed")}, flush=True)
            write_json(report, arguments.json)


def read_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the report that is to be extended, or one without rows.

    Raises:
        ValueError: the file is something else.
    """
    if arguments.json.exists():
        report = json.loads(arguments.json.read_text())
        if "environments" not in report:
            raise ValueError(f"--json is {str(arguments.json)!r}, which `lrl zero_shot` did not write.")
        return report
    from lrl.cli.run_directory import commit

    return {"command": "", "commit": commit(), "machine": arguments.machine, "figure": "success", "environments": []}


def evaluated(label: str, env_id: str, env_kwargs: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate one policy in one environment; of the episodes only the failed seeds are kept."""
    from lrl.evaluation.episodes import evaluate_policy

    envs = GymnasiumEnvs(env_id, env_kwargs)
    policy = loaded(label, envs, arguments).policy
    sampling = policy.sampling_at(0.0)
    results = evaluate_policy(policy, envs, arguments.episodes, arguments.seed, arguments.num_envs, sampling)
    row: dict[str, Any] = results.report(env_id, label) | {"env_kwargs": env_kwargs}
    failed = [episode["seed"] for episode in row.pop("per_episode") if not episode["success"]]
    return row | {"length_ci95": list(results.intervals()["length"]), "failed_seeds": failed}


def loaded(label: str, envs: GymnasiumEnvs, arguments: argparse.Namespace) -> Loaded:
    """Load the policy of a label."""
    from lrl.evaluation.load import load_baseline, load_model

    settings = POLICIES[label]
    if settings is None:
        return load_baseline(label, envs)
    response_format, num_examples, choose = settings
    prompt = {"response_format": response_format, "num_examples": num_examples}
    tokens = arguments.max_new_tokens if response_format != "direct" else 12
    return load_model(arguments.model, envs, prompt, choose, dtype=arguments.dtype, max_new_tokens=tokens)


main = subcommand(make_parser, run)
