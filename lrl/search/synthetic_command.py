"""Write synthetic optimisation histories to learn searching from, or compare searchers on held-out functions.

lrl synthetic_search --write data/histories.jsonl --functions 20000
lrl synthetic_search --functions 105 --iterations 40 --checkpoint runs/synthetic/sft/x --json search.json

The functions are random quadratics, ridges, plateaus and steps of 2 to 24 real parameters, and of tables of 6 to 48
actions. Those that searchers are compared on are never written, with --held_out neither. Values are exact ones of the
proposal that each search chose: 0 is the best possible, -1 about that of a random proposal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path

from lrl.cli.arguments import command_parser, subcommand


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write demonstrations of a teacher, compare nothing")
    parser.add_argument("--held_out", action="store_true", help="with --write: of other functions, for val/loss")
    parser.add_argument("--generations", type=int, help="with --write: generations the teacher is ahead, by default 6")
    parser.add_argument(
        "--functions", type=int, default=49, help="number of functions; multiples of 7 have equal numbers of each kind"
    )
    parser.add_argument("--warmup", type=int, help="random proposals before each search, by default 5")
    parser.add_argument("--iterations", type=int, help="proposals of each search, by default 40")
    parser.add_argument("--checkpoint", help="a run that learned to search, compared as well")
    parser.add_argument("--temperature", type=float, help="of that run's responses, by default 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--machine", help="its description, for that file, by default 2-core x86-64 virtual machine")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Write the demonstrations, or compare.

    Raises:
        ValueError: a number is too small, or an option would be ignored.
    """
    fewest = 1 if arguments.write is not None else 2  # an interval needs two
    for name, least in (("functions", fewest), ("warmup", 1), ("iterations", 1), ("generations", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}; it must be at least {least}.")
    _check_used(arguments)
    if arguments.write is not None:
        write(arguments)
    else:
        compare(arguments)


def _check_used(arguments: argparse.Namespace) -> None:
    """Raise for an option that would be ignored, and fill in the defaults of the others."""
    writing, comparing = (
        ("held_out", "generations"),
        ("warmup", "iterations", "checkpoint", "temperature", "json", "machine"),
    )
    ignored, how = (writing, "without") if arguments.write is None else (comparing, "with")
    for name in ignored:
        if getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name} is given {how} --write, where it would be ignored.")
    if arguments.temperature is not None and arguments.checkpoint is None:
        raise ValueError("--temperature is given without --checkpoint, whose responses it is of.")
    defaults = {"generations": 6, "warmup": 5, "iterations": 40, "temperature": 1.0}
    for name, value in (defaults | {"machine": "2-core x86-64 virtual machine"}).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def write(arguments: argparse.Namespace) -> None:
    """Write the demonstrations, one JSON object per line, and print their number."""
    from lrl.files import write_whole
    from lrl.search.synthetic import TeacherConfig, demonstrated, demonstrations

    teacher, count = TeacherConfig(generations=arguments.generations), 0
    functions = demonstrated(arguments.functions, arguments.held_out)
    with write_whole(arguments.write) as file:
        for row in demonstrations(arguments.seed, functions, teacher, arguments.held_out):
            file.write(json.dumps(row) + "\n")
            count += 1
    print(f"wrote {count} demonstrations to {arguments.write}")


def compare(arguments: argparse.Namespace) -> None:
    """Print a Markdown table, one row per searcher."""
    from lrl.cli.run_directory import commit
    from lrl.search.experiments import write_report
    from lrl.search.in_context import InContextSearcher, chat_model_of
    from lrl.search.searchers import CMAES, RandomSearch, Searcher
    from lrl.search.synthetic_comparison import compare_searchers, synthetic_table

    searchers: dict[str, partial[Searcher]] = {"random_search": partial(RandomSearch), "cma_es": partial(CMAES)}
    if arguments.checkpoint is not None:
        searchers["in_context"] = partial(
            InContextSearcher, chat_model_of(arguments.checkpoint), warmup=0, temperature=arguments.temperature
        )
    sizes = {"num_functions": arguments.functions, "warmup": arguments.warmup, "iterations": arguments.iterations}
    figures = compare_searchers(searchers, arguments.seed, **sizes, on_function=partial(_progress, arguments.functions))
    about = {"command": f"{arguments.prog} {shlex.join(arguments.words)}", "commit": commit()}
    about["machine"] = arguments.machine
    about |= {"checkpoint": arguments.checkpoint, "seed": arguments.seed, **sizes}
    report = about | {"searchers": figures}
    print(synthetic_table({"searchers": report}))
    if arguments.json is not None:
        write_report(report, arguments.json)


def _progress(total: int, index: int) -> None:
    """Report every tenth function on a terminal."""
    if sys.stderr.isatty() and (index + 1) % 10 == 0:
        sys.stderr.write(f"{index + 1} of {total} functions\n")


main = subcommand(make_parser, run)
