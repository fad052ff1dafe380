"""The command ``lrl success_table``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lrl.cli.command import command, command_line
from lrl.cli.options import DeviceOptions, PlayOptions, exactly_one

if TYPE_CHECKING:
    from lrl.evaluation.episodes import EpisodeResults
    from lrl.evaluation.load import Loaded


def success_table(
    *,
    env_id: list[str],
    checkpoint: list[str] | None = None,
    policy: str | None = None,
    env_kwargs: list[dict[str, Any]] | None = None,
    play: PlayOptions,
    accelerator: str = "auto",
    precision: str | None = None,
    merge_adapters: bool = False,
    figure: Literal["success", "return"] = "success",
    machine: str = "",
    json: Path | None = None,
) -> None:
    """Evaluate policies in several environments, and print a Markdown table with 95% intervals.

    The table of one policy has its return, length and success. A table of several policies has the metric that --figure
    names, for each policy.

    lrl success_table --policy expert --env_id lrl/BabyAI-{GoTo,Pickup}Local-v0 --json table.json
    lrl success_table --checkpoint before=runs/babyai/sft/x after=runs/babyai/ppo/y --env_id lrl/BabyAI-GoToLocal-v0
    lrl success_table --policy expert --env_id lrl/BabyAI-GoToLocal-v0 --env_kwargs '{"num_distractors": '{0,3,5}'}'

    Args:
        env_id: registered names of environments.
        checkpoint: checkpoints or run directories, each as RUN or LABEL=RUN.
        policy: a baseline: random, constant or expert.
        env_kwargs: JSON objects of arguments; each environment is played with each of them.
        play: episodes in each environment.
        accelerator: kind of the device; only one is used.
        precision: precision for Lightning Fabric, for example bf16-mixed; default: the precision of the weights.
        merge_adapters: merge the adapters into the weights first, which is faster; results are the same up to rounding.
        figure: metric that is shown for several policies.
        machine: description of the machine, written to the --json file.
        json: write all results to this file, after each environment; "complete" is false until the last one.
    """
    from lrl.cli.run_directory import commit
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.envs.native import close_env
    from lrl.evaluation.report import environments_table, write_json
    from lrl.lm.merging import merge_adapters_of

    exactly_one(checkpoint=checkpoint, policy=policy)
    subjects = labelled(checkpoint) if checkpoint else [(str(policy), None)]
    fabric = DeviceOptions(accelerator=accelerator, precision=precision).fabric()
    env_kwargs = env_kwargs or [{}]
    if merge_adapters:  # before any episode, reports a model whose adapters cannot be merged
        for label, path in subjects[1:]:
            merge_adapters_of(_load(label, path, env_id[0], env_kwargs[0]).policy, label)
    environments = list(product(env_id, env_kwargs))
    for name, given in environments:  # before any episode, reports an environment that cannot be created
        close_env(GymnasiumEnvs(name, given).make_native())
    rows: list[dict[str, Any]] = []
    settings, printed = list(dict.fromkeys(name for given in env_kwargs for name in given)), 0
    for name, given in environments:
        for label, path in subjects:
            loaded = _load(label, path, name, given)
            if merge_adapters:
                merge_adapters_of(loaded.policy, label)
            rows.append(report_row(play.play(fabric, loaded), name, label, given))
        if json is not None:  # after each environment, because the next one may fail
            about = {"command": command_line("lrl success_table"), "commit": commit(), "machine": machine}
            complete = len(rows) == len(environments) * len(subjects)
            write_json(about | {"figure": figure, "complete": complete, "environments": rows}, json)
        lines = environments_table(rows, settings, figure).split("\n")
        print("\n".join(lines[printed:]), flush=True)  # prints each line of the table as soon as it is known
        printed = len(lines)


def labelled(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return label and path of each ``[label=]path``.

    Raises:
        ValueError: If a path is empty, or two paths have the same label.
    """
    pairs = [(text, text) if Path(text).exists() or "=" not in text else text.split("=", 1) for text in texts]
    empty = next((text for text, (_, path) in zip(texts, pairs) if not path), None)
    if empty is not None:
        raise ValueError(f"--checkpoint is {empty!r}; it must be RUN or LABEL=RUN.")
    labels = [label for label, _ in pairs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"--checkpoint names {twice!r} twice; give each its own label: LABEL=RUN.")
    return [(label, path) for label, path in pairs]


def report_row(results: EpisodeResults, env_id: str, label: str, env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of one policy in one environment, and the seeds of the failed episodes.

    Args:
        results: all episodes.
        env_id: registered name of the environment.
        label: label of the policy.
        env_kwargs: arguments of the environment.
    """
    from lrl.evaluation.statistics import json_bounds

    report: dict[str, Any] = results.report(env_id, label) | {"env_kwargs": env_kwargs}
    failed = [episode["seed"] for episode in report.pop("per_episode") if not episode["success"]]
    return report | {"length_ci95": json_bounds(results.intervals()["length"]), "failed_seeds": failed}


def _load(label: str, path: str | None, env_id: str, env_kwargs: dict[str, Any]) -> Loaded:
    """Load the policy of a checkpoint in one environment, or the baseline ``label`` if ``path`` is None."""
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.evaluation.load import load_baseline, load_policy, saved_numbers

    if path is None:
        return load_baseline(label, GymnasiumEnvs(env_id, env_kwargs))
    return load_policy(path, GymnasiumEnvs(env_id, env_kwargs, numbers=saved_numbers(path)))


main = command(success_table)
