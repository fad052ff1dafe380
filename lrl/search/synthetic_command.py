"""The command ``lrl synthetic_search``."""

from __future__ import annotations

import json as json_format
import sys
from functools import partial
from pathlib import Path

from lrl.cli.command import command, command_line
from lrl.ranges import PositiveInt, Seed


def synthetic_search(
    *,
    write: Path | None = None,
    held_out: bool = False,
    functions: PositiveInt = 49,
    seed: Seed = 0,
    iterations: PositiveInt | None = None,
    checkpoint: str | None = None,
    json: Path | None = None,
) -> None:
    """Write optimisation histories on which a model learns to search, or compare searchers on held-out functions.

    lrl synthetic_search --write data/histories.jsonl --functions 20000
    lrl synthetic_search --functions 105 --iterations 40 --checkpoint runs/synthetic/sft/x --json search.json

    The functions are random quadratics, ridges, plateaus and steps of 2 to 24 real parameters, and three kinds of
    functions of a table with 6 to 48 entries, each of which is an action. There are three disjoint sets of functions:
    for training, for the validation loss (--held_out) and for the comparison of searchers; the last ones are never
    written. The printed value is that of the proposal that each search chose, without measurement errors: 0 is the
    best possible value, and a random proposal has about -1.

    Args:
        write: write demonstrations of a teacher to this file, and compare nothing.
        held_out: with --write, write demonstrations of the functions for the validation loss instead of those for
            training.
        functions: number of functions; a multiple of 7 gives equal numbers of the seven kinds.
        seed: seed of the functions and searches.
        iterations: number of proposals of each search after five random ones; default: 40.
        checkpoint: a run that learned to search, which is compared with the other searchers.
        json: write all figures to this file.

    Raises:
        ValueError: If an option would be ignored, or there are fewer than two functions to compare searchers on.
    """
    compared = {"iterations": iterations, "checkpoint": checkpoint, "json": json}
    ignored, how = ({"held_out": held_out or None}, "without") if write is None else (compared, "with")
    for name, value in ignored.items():
        if value is not None:
            raise ValueError(f"--{name} is given {how} --write, where it would be ignored.")
    if write is not None:
        _write(write, functions, seed, held_out)
    elif functions < 2:  # an interval needs two
        raise ValueError(f"--functions is {functions}; it must be at least 2.")
    else:
        _compare(functions, seed, iterations or 40, checkpoint, json)


def _write(path: Path, functions: int, seed: int, held_out: bool) -> None:
    """Write the demonstrations, one JSON object per line, and print their number."""
    from lrl.files import write_whole
    from lrl.search.synthetic import demonstrated, demonstrations

    count = 0
    with write_whole(path) as file:
        for row in demonstrations(seed, demonstrated(functions, held_out), held_out):
            file.write(json_format.dumps(row) + "\n")
            count += 1
    print(f"wrote {count} demonstrations to {path}")


def _compare(functions: int, seed: int, iterations: int, checkpoint: str | None, json: Path | None) -> None:
    """Print a Markdown table, one row per searcher."""
    from rich.console import Console
    from rich.progress import track

    from lrl.cli.run_directory import commit
    from lrl.search.experiments import write_report
    from lrl.search.in_context import InContextSearcher, chat_model_of
    from lrl.search.searchers import CMAES, RandomSearch, Searcher
    from lrl.search.synthetic_comparison import compare_searchers, synthetic_table

    searchers: dict[str, partial[Searcher]] = {"random_search": partial(RandomSearch), "cma_es": partial(CMAES)}
    if checkpoint is not None:
        searchers["in_context"] = partial(InContextSearcher, chat_model_of(checkpoint), warmup=0)
    shown = track(range(functions), "functions", console=Console(stderr=True), disable=not sys.stderr.isatty())
    report = {
        "command": command_line("lrl synthetic_search"),
        "commit": commit(),
        "checkpoint": checkpoint,
        "seed": seed,
        "num_functions": functions,
        "warmup": 5,
        "iterations": iterations,
        "searchers": compare_searchers(searchers, seed, shown, 5, iterations),
    }
    print(synthetic_table({"searchers": report}))
    if json is not None:
        write_report(report, json)


main = command(synthetic_search)
