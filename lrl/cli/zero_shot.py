"""The command ``lrl zero_shot``."""

from __future__ import annotations

import json as json_format
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.cli.command import command, command_line
from lrl.cli.success_table import report_row
from lrl.ranges import PositiveInt, Seed

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
"""Response format, number of few-shot examples, and whether the model chooses among the actions, by label."""


def zero_shot(
    *,
    model: str,
    json: Path,
    dtype: str = "float32",
    env_id: list[str] | None = None,
    env_kwargs: list[dict[str, Any]] | None = None,
    policies: list[str] | None = None,
    episodes: PositiveInt = 200,
    seed: Seed = 10_000,
    num_envs: PositiveInt = 200,
    max_new_tokens: PositiveInt = 64,
    machine: str = "",
) -> None:
    """Evaluate a pretrained language model that lrl has not trained, and compare it with random actions.

    The model writes an action, reasons and then writes an action, or chooses the most probable legal action.

    lrl zero_shot --model smollm2-135m --json assets/results/zero_shot_smollm2.json

    The file is written after each policy; a second call evaluates the policies that the file does not have yet, for
    example after an interruption or with further --env_id. Its rows have the fields of lrl evaluate --json, except the
    results of single episodes.

    Args:
        model: hub name, folder or GGUF file.
        json: the file to write, or to extend.
        dtype: data type of the weights.
        env_id: registered names of environments; default: FrozenLake-v1.
        env_kwargs: JSON objects of arguments; each environment is played with each of them.
        policies: labels of the policies that are evaluated, such as "writes"; default: all seven.
        episodes: number of episodes, one seed each.
        seed: seed of the first episode.
        num_envs: number of episodes that are played in parallel; the result does not depend on it.
        max_new_tokens: maximum number of tokens of a response with reasoning; others have at most 12.
        machine: description of the machine, written to --json.

    Raises:
        ValueError: If a name in ``policies`` is unknown, or the file is not such a report or has other settings.
    """
    from lrl.evaluation.episodes import evaluate_policy
    from lrl.evaluation.report import write_json

    for label in policies or ():
        if label not in POLICIES:
            raise ValueError(f"--policies has {label!r}; it must be one of {'; '.join(POLICIES)}.")
    settings = {"model": model, "dtype": dtype, "episodes": episodes, "seed": seed, "max_new_tokens": max_new_tokens}
    report = _read_report(json, settings, machine)
    commands = filter(None, [report["command"], command_line("lrl zero_shot")])
    report["command"] = " && ".join(dict.fromkeys(commands))
    known = {(row["env_id"], json_format.dumps(row["env_kwargs"]), row["policy"]) for row in report["environments"]}
    for name, given, label in product(env_id or ["FrozenLake-v1"], env_kwargs or [{}], policies or POLICIES):
        if (name, json_format.dumps(given), label) not in known:
            policy, envs, _ = _load(label, model, name, given, dtype, max_new_tokens)
            results = evaluate_policy(policy, envs, episodes, seed, num_envs, policy.sampling_at(0.0))
            row = report_row(results, name, label, given)
            report["environments"].append(row)
            known.add((name, json_format.dumps(given), label))
            print(label, {key: row[key] for key in row if not key.startswith("failed")}, flush=True)
            write_json(report, json)


def _read_report(path: Path, settings: dict[str, Any], machine: str) -> dict[str, Any]:
    """Return the report in a file, or a new one without rows if there is no file.

    Raises:
        ValueError: If the file is not a report of `lrl zero_shot`, or was measured with other settings.
    """
    from lrl.cli.run_directory import commit
    from lrl.evaluation.report import read_result

    if not path.exists():
        about = {"command": "", "commit": commit(), "machine": machine, "figure": "success"}
        return about | {"environments": [], "settings": settings}
    report = read_result(path, "--json")
    if not {"environments", "settings", "command"} <= set(report):
        raise ValueError(f"--json is {str(path)!r}, which is not a report of `lrl zero_shot`; give another file.")
    for name, value in settings.items():
        if (measured := report["settings"].get(name)) != value:
            raise ValueError(f"--{name} is {value!r}, but {path} was measured with {measured!r}; give another file.")
    return report


def _load(label: str, model: str, env_id: str, env_kwargs: dict[str, Any], dtype: str, max_new_tokens: int) -> Loaded:
    """Load the policy of a label."""
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.evaluation.load import load_baseline, load_model

    settings, envs = POLICIES[label], GymnasiumEnvs(env_id, env_kwargs)
    if settings is None:
        return load_baseline(label, envs)
    response_format, num_examples, choose = settings
    prompt = {"response_format": response_format, "num_examples": num_examples}
    tokens = max_new_tokens if response_format != "direct" else 12
    return load_model(model, envs, prompt, choose, dtype=dtype, max_new_tokens=tokens)


main = command(zero_shot)
