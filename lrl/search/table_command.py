"""Search for small policies on the tasks of ProPS with random search, CEM, CMA-ES and ARS, beside PPO and TRPO.

lrl search_table --folder runs/search_table --jobs 2
lrl search_table --folder runs/search_table --tasks frozen_lake maze --methods cma_es --seeds 3
lrl search_table --folder runs/search_table --methods ppo trpo --jobs 2
lrl search_table --folder runs/search_table --methods in_context --checkpoint runs/synthetic/sft/x
lrl search_table --folder runs/search_table --finished assets/results/search_table.json --methods cma_es
lrl search_table --folder runs/search_table --show --json runs/search_table.json --picture runs/search_table.png

Every search has the same budget, the same prior and the same seeds. PPO and TRPO train networks for as many episodes
or for --max_env_steps, whichever ends first, on three seeds by default. A record is written when a task, method and
seed has finished; a second call runs what is missing. The Markdown tables have the published figures beside both rules:
the best iteration, which is the paper's (of a network: the best mean of --rollouts consecutive training episodes), and
the chosen policy (of a network: the last one) on fresh episodes. Others have what was played, and in_context minus
random_search seed by seed.

in_context is the search of a language model that learned it from synthetic functions: the run of --checkpoint. Its
first proposals are random: five, and as many more as it takes until two returns differ. It is asked for each parameter
by itself, all at once.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from lrl.cli.arguments import command_parser, subcommand


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the records, one file each")
    parser.add_argument("--tasks", nargs="+", help="default: all 15")
    parser.add_argument("--methods", nargs="+", help="default: all six, and in_context with --checkpoint")
    parser.add_argument("--checkpoint", help="the run of a language model that learned to search, for in_context")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds; default: 10 for searches where episodes are short, else 3"
    )
    parser.add_argument("--iterations", type=int, default=400, help="proposals of a search")
    parser.add_argument("--rollouts", type=int, default=20, help="episodes of a proposal")
    parser.add_argument("--max_env_steps", type=int, default=1_000_000, help="of the training of a network, at most")
    parser.add_argument("--fresh_episodes", type=int, default=100, help="of the chosen policy")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes at a time, of one thread each")
    parser.add_argument("--show", action="store_true", help="run nothing, print what has finished")
    parser.add_argument(
        "--finished", type=Path, metavar="FILE", help="an earlier --json, whose runs are copied to --folder"
    )
    parser.add_argument("--machine", default="", help="the machine's description, for the records")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all records to one file, with the best so far of each"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the best so far against episodes, to a PNG")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing, print the tables, and write one file of all records."""
    from lrl.cli.run_directory import commit
    from lrl.search.experiments import (
        SearchBudget,
        planned,
        read_record,
        read_report,
        restore_records,
        search_all,
        search_report,
        write_report,
    )
    from lrl.search.networks import search_or_train
    from lrl.search.pictures import draw_progress
    from lrl.search.tables import search_tables
    from lrl.search.tasks import TASKS

    command = f"{arguments.prog} {shlex.join(arguments.words)}"
    names = ("iterations", "rollouts", "fresh_episodes", "max_env_steps", "checkpoint")
    budget = SearchBudget(**{name: getattr(arguments, name) for name in names})
    runs = planned(arguments.tasks or list(TASKS), _methods(arguments), arguments.seeds)
    about = {"commit": commit(), "machine": arguments.machine}
    if arguments.finished is not None:
        count = restore_records(read_report(arguments.finished), runs, budget, arguments.folder)
        print(f"{count} of {len(runs)} runs were copied from {arguments.finished} to {arguments.folder}.", flush=True)
    if not arguments.show:
        search_all(runs, budget, arguments.folder, arguments.jobs, about, _print_record, search_or_train)
    records = {run: read_record(run, budget, arguments.folder) for run in runs}
    print(search_tables(records))
    if arguments.json is not None:
        write_report(search_report(records, {"command": command, **about}), arguments.json)
    if arguments.picture is not None:
        draw_progress(records, arguments.picture)


def _methods(arguments: argparse.Namespace) -> list[str]:
    """Return the methods that are asked for.

    Raises:
        ValueError: the language model of ``in_context`` is missing, or would be ignored.
    """
    from lrl.search.experiments import IN_CONTEXT, METHODS, NETWORKS

    searched = [] if arguments.checkpoint is None else [IN_CONTEXT]
    methods = arguments.methods or [*METHODS, *searched, *NETWORKS]
    if IN_CONTEXT in methods and not searched:
        raise ValueError(f"--methods has {IN_CONTEXT}; give the run that learned to search by --checkpoint.")
    if searched and IN_CONTEXT not in methods:
        raise ValueError(f"--checkpoint is given, but --methods has no {IN_CONTEXT}, which alone reads it.")
    return methods


def _print_record(record: dict[str, Any]) -> None:
    """Print one line for a run that has finished."""
    from lrl.search.experiments import UNPLAYABLE

    if UNPLAYABLE in record:
        print(f"{record['task']} {record['method']} {record['index']}: {UNPLAYABLE}, {record[UNPLAYABLE]}", flush=True)
        return
    figures = " ".join(f"{name} {record[name]:.4g}" for name in ("best_iteration", "fresh", "seconds"))
    print(f"{record['task']} {record['method']} {record['index']}: {figures}", flush=True)


main = subcommand(make_parser, run)
