"""The command ``lrl sweep``."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from lrl.cli.command import command
from lrl.cli.run_seeds import check_commands, check_errors, remaining_runs, run_of_seed, train_all, write_plan
from lrl.ranges import PositiveInt

_OWN = ("config", "seed_everything", "run_directory", "ckpt_path", "resume")
"""Keys that the command itself sets."""
_NAME_LENGTH = 40
"""Maximum number of characters of a value in the name of a folder."""


def sweep(
    *options: str,
    config: tuple[str, ...],
    set: tuple[str, ...] | None = None,
    seeds: PositiveInt = 3,
    jobs: PositiveInt = 1,
    folder: Path | None = None,
    metric: str | None = None,
    slurm: bool = False,
) -> None:
    """Train with every combination of the values of settings, each on several seeds, and print a table of the results.

    lrl sweep --config cartpole/ppo_mlp.yaml --set model.init_args.optimizer.lr=2e-4,1e-3 --seeds 3 --jobs 2
    lrl sweep --config cartpole/ppo_mlp.yaml --set 'model.init_args.policy.init_args.hidden_sizes=[64,64],[256]'

    Each run is a process with one thread; its directory is FOLDER/SETTINGS/seed<k>. Seeds follow the rule of
    `lrl run_seeds`. If the command is repeated, it skips the runs that have finished, and resumes those that were
    interrupted. Values can be added to it. Options that are not listed here are passed on to `lrl fit`; in them and in
    the values `{seed}` is replaced by the seed of the run.

    Args:
        options: options of `lrl fit`.
        config: the experiment's file; further ones are overlays.
        set: a key of the configuration and its values, as KEY=VALUE,VALUE; the option may be given several times. A
            list is one value, such as [64,64], and a text with a comma is put in quotes.
        seeds: number of seeds.
        jobs: number of runs at a time.
        folder: where to write the run directories; default: runs/<env>/<algorithm>-sweep.
        metric: metric of the table; default: the most important one that the runs have in common.
        slurm: print a Slurm script with a job array of the runs that have not finished, instead of running them.

    Raises:
        ValueError: If a key or value is not valid, the folder is in use or contains a run of another command, or a run
            fails; in the last case the other runs are finished first.
    """
    from lrl.evaluation.statistics import headline_seed

    settings = parsed_settings(set or ())
    if slurm and metric is not None:
        raise ValueError(f"--metric is {metric!r}, but --slurm prints no table; leave one of them out.")
    if folder is None:
        folder = Path("runs", Path(config[0]).parent.name, f"{Path(config[0]).stem}-sweep")
    places = _places(settings)
    runs = dict(
        run_of_seed(folder / place, config, [*options, *own], headline_seed(index))
        for index in range(seeds)
        for place, own in places.items()
    )
    if not all(run.exists() for run in runs):
        _check(config, options, settings)
    if slurm:
        print(_job_array(remaining_runs(runs)))
        write_plan(runs, folder)
        return
    errors = train_all(runs, folder, jobs, "sweep")
    trained = [run for run in runs if (run / "config.yaml").is_file()]
    if len(errors) == len(runs):
        check_errors(errors, len(runs))
    if trained:
        from lrl.cli.table import summary_table

        print(summary_table(trained, metric))
    check_errors(errors, len(runs))


def parsed_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting by its key.

    Args:
        texts: settings as ``KEY=VALUE,VALUE``.

    Raises:
        ValueError: If a text has another form, or a key or value is given twice.
    """
    settings: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        found = _split_values(values)
        if not key or "" in found:
            raise ValueError(f"set is {text!r}; it must be KEY=VALUE,VALUE, with all brackets and quotes closed.")
        if key in _OWN:
            raise ValueError(f"set is {text!r}, but the command itself sets {key}; it must be another key.")
        twice = next((value for value in found if found.count(value) > 1), None)
        if key in settings or twice is not None:
            raise ValueError(f"set is {text!r}, in which {twice or key} is given twice; give it once.")
        settings[key] = found
    return settings


def _split_values(text: str) -> list[str]:
    """Split a text at the commas that are not in brackets or quotes; a bracket or quote that is not closed gives ""."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and values[-1].rstrip()[-1:] in ("", "[", "{", ",", ":"):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if depth or quote:
        return [""]
    return [str(yaml.safe_load(value)) if value[:1] in ("'", '"') else value for value in values]


def _places(settings: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the options of each combination of values by the name of its folder, such as ``lr=2e-4,gamma=0.9``."""
    from lrl.evaluation.comparison import short_names

    columns = []
    for (key, values), name in zip(settings.items(), short_names(key.split(".") for key in settings).values()):
        shown = [re.sub(r"[^\w.+-]+", "-", re.sub(r"[]['\"{}\s]", "", value))[:_NAME_LENGTH] for value in values]
        shown = [f"{one}.{place}" if shown.count(one) > 1 else one for place, one in enumerate(shown)]
        columns.append([(f"{name}={one}", f"--{key}={value}") for one, value in zip(shown, values)])
    chosen = [tuple(zip(*combination)) or ((), ()) for combination in itertools.product(*columns)]
    return {",".join(names): list(own) for names, own in chosen}


def _check(config: Sequence[str], options: Sequence[str], settings: Mapping[str, Sequence[str]]) -> None:
    """Check each value of each setting, together with the first values of the others.

    Raises:
        ValueError: If a key or value is not valid.
    """
    first = {key: values[0] for key, values in settings.items()}
    tried = [first, *(first | {key: value} for key, values in settings.items() for value in values[1:])]
    commands = [
        run_of_seed(Path(), config, [*options, *(f"--{key}={value}" for key, value in one.items())], 0)[1]
        for one in tried
    ]
    check_commands(commands)


def _job_array(runs: Mapping[Path, Sequence[str]]) -> str:
    """Return a Slurm script whose n-th task trains the n-th run.

    Args:
        runs: arguments of ``lrl`` by run directory.

    Raises:
        ValueError: If there is no run.
    """
    if not runs:
        raise ValueError("all runs have finished; there is nothing to submit.")
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=lrl-sweep",
        f"#SBATCH --array=0-{len(runs) - 1}",
        "#SBATCH --ntasks=1",
        "#SBATCH --signal=SIGUSR1@120",
        "#SBATCH --requeue",
        "set -euo pipefail",
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(
            f"  {task}) srun {shlex.join([sys.executable, '-m', 'lrl', *args])} ;;"
            for task, args in enumerate(runs.values())
        ),
        "esac",
    ]
    return "\n".join(lines)


main = command(sweep)
