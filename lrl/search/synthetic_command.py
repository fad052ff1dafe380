"""The command ``lrl synthetic_search``."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lrl.cli.command import command, command_line
from lrl.cli.options import changed
from lrl.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Seed


@dataclass(frozen=True, kw_only=True)
class DemonstrationOptions:
    """Options of demonstrations that --write writes."""

    held_out: bool = False
    """Write demonstrations of other functions, for val/loss."""
    generations: NonNegativeInt | None = None
    """Generations that the teacher is ahead; default: 6."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Options of the comparison of searchers."""

    warmup: PositiveInt | None = None
    """Random proposals before each search; default: 5."""
    iterations: PositiveInt | None = None
    """Proposals of each search; default: 40."""
    checkpoint: str | None = None
    """A run that learned to search, compared as well."""
    temperature: NonNegativeFloat | None = None
    """Temperature of the responses of that run; default: 1."""
    json: Path | None = None
    """Write all figures to this file."""
    machine: str | None = None
    """Description of the machine, for that file; default: 2-core x86-64 virtual machine."""


def synthetic_search(
    *,
    write: Path | None = None,
    functions: PositiveInt = 49,
    seed: Seed = 0,
    demonstrations: DemonstrationOptions,
    comparison: ComparisonOptions,
) -> None:
    """Write synthetic optimisation histories to learn searching from, or compare searchers on held-out functions.

    lrl synthetic_search --write data/histories.jsonl --functions 20000
    lrl synthetic_search --functions 105 --iterations 40 --checkpoint runs/synthetic/sft/x --json search.json

    The functions are random quadratics, ridges, plateaus and steps of 2 to 24 real parameters, and of tables of 6 to 48
    actions. Those that searchers are compared on are never written, with --held_out neither. Values are exact ones of
    the proposal that each search chose: 0 is the best possible, -1 about that of a random proposal.

    Args:
        write: write demonstrations of a teacher to this file, and compare nothing.
        functions: number of functions; multiples of 7 have equal numbers of each kind.
        seed: seed of the functions and searches.
        demonstrations: how demonstrations are made.
        comparison: how searchers are compared.
    """
    ignored, how = (demonstrations, "without") if write is None else (comparison, "with")
    for name in changed(ignored):
        raise ValueError(f"--{name} is given {how} --write, where it would be ignored.")
    if comparison.temperature is not None and comparison.checkpoint is None:
        raise ValueError(
            "--temperature is given without --checkpoint, whose responses are sampled at it; give both or neither."
        )
    if write is not None:
        _write(write, functions, seed, demonstrations)
    elif functions < 2:  # an interval needs two
        raise ValueError(f"--functions is {functions}; it must be at least 2.")
    else:
        _compare(functions, seed, comparison)


def _write(path: Path, functions: int, seed: int, options: DemonstrationOptions) -> None:
    """Write the demonstrations, one JSON object per line, and print their number."""
    from lrl.files import write_whole
    from lrl.search.synthetic import GENERATIONS, demonstrated, demonstrations

    generations = GENERATIONS if options.generations is None else options.generations
    count = 0
    with write_whole(path) as file:
        for row in demonstrations(seed, demonstrated(functions, options.held_out), generations, options.held_out):
            file.write(json_format.dumps(row) + "\n")
            count += 1
    print(f"wrote {count} demonstrations to {path}")


def _compare(functions: int, seed: int, options: ComparisonOptions) -> None:
    """Print a Markdown table, one row per searcher."""
    from lrl.cli.run_directory import commit
    from lrl.search.experiments import write_report
    from lrl.search.in_context import InContextSearcher, chat_model_of
    from lrl.search.searchers import CMAES, RandomSearch, Searcher
    from lrl.search.synthetic_comparison import compare_searchers, synthetic_table

    searchers: dict[str, partial[Searcher]] = {"random_search": partial(RandomSearch), "cma_es": partial(CMAES)}
    if options.checkpoint is not None:
        temperature = 1.0 if options.temperature is None else options.temperature
        chat_model = chat_model_of(options.checkpoint)
        searchers["in_context"] = partial(InContextSearcher, chat_model, warmup=0, temperature=temperature)
    sizes = {"num_functions": functions, "warmup": options.warmup or 5, "iterations": options.iterations or 40}
    figures = compare_searchers(searchers, seed, **sizes, on_function=partial(_progress, functions))
    report = {"command": command_line("lrl synthetic_search"), "commit": commit()}
    report["machine"] = options.machine or "2-core x86-64 virtual machine"
    report |= {"checkpoint": options.checkpoint, "seed": seed, **sizes, "searchers": figures}
    print(synthetic_table({"searchers": report}))
    if options.json is not None:
        write_report(report, options.json)


def _progress(total: int, index: int) -> None:
    """Report every tenth function on a terminal."""
    if sys.stderr.isatty() and (index + 1) % 10 == 0:
        sys.stderr.write(f"{index + 1} of {total} functions\n")


main = command(synthetic_search)
