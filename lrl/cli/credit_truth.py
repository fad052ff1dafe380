"""Compare estimated advantages with the exact ones on FrozenLake, and write the table, the numbers and a figure.

lrl credit_truth --json assets/results/credit_truth.json --figure assets/pictures/credit_truth.png
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from lrl.cli.arguments import command_parser, subcommand


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.1, 0.03], help="of softmax policies")
    parser.add_argument("--num_groups", type=int, default=128, help="groups per seed")
    parser.add_argument("--group_size", type=int, default=16, help="episodes per group")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0 on")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount per turn")
    parser.add_argument("--gae_lambda", type=float, default=0.95, help="per turn")
    parser.add_argument("--machine", default="2-core x86-64 virtual machine", help="its description, for the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the correlations to a PNG")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, and write the files that the options name."""
    from lrl.cli.run_directory import commit
    from lrl.evaluation.tabular_rollouts import TOKENS
    from lrl.reports.credit_scores import credit_table, draw_scores
    from lrl.reports.credit_truth import TruthConfig, measure
    from lrl.reports.table import result_text
    from lrl.whole_file import write_whole

    names = ("num_groups", "group_size", "seeds", "gamma", "gae_lambda")
    config = TruthConfig(
        temperatures=tuple(arguments.temperatures), **{name: getattr(arguments, name) for name in names}
    )
    command = f"python -m lrl credit_truth {shlex.join(arguments.words)}".strip()
    about = {"title": "Advantages scored against the truth", "command": command, "commit": commit()}
    result = about | {"machine": arguments.machine, "settings": vars(config)} | measure(config)
    for tokens in TOKENS:
        heading = f"{tokens} token{'s' * (tokens > 1)} per turn"
        print(f"{heading}\n\n{credit_table(result, tokens)}\n")
        print(f"{heading}, averaged\n\n{credit_table(result, tokens, averaged=True)}\n")
    if arguments.json is not None:
        with write_whole(arguments.json) as file:
            file.write(result_text(result))
    if arguments.figure is not None:
        draw_scores(result, arguments.figure)


main = subcommand(make_parser, run)
