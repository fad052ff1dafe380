"""Train one experiment on several seeds that follow a rule: the first 32 bits of the SHA-256 of "lrl-0", "lrl-1", ...

lrl run_seeds --config configs/frozen_lake/grpo.yaml --count 40 --folder runs/headline/grpo --jobs 2

Options that are not listed here are passed on to `lrl fit`, with the run's seed in place of `{seed}`, so that
`--model.init_args.init_from 'runs/weak/seed{seed}'` starts each run from an earlier one on its seed. Finished runs are
kept, so the command can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lrl.cli.arguments import command_parser, exit_on_user_error
from lrl.evaluation.statistics import run_seeds


def main(prog: str, args: Sequence[str]) -> None:
    """Train on every seed; a user's error is printed as one sentence, with exit status 2.

    Args:
        prog: name of the program, for its help and its errors.
        args: the words of the command line after that name.
    """
    parser = command_parser(prog, __doc__)
    parser.add_argument("--config", required=True, help="the experiment's file")
    parser.add_argument("--count", type=int, default=10, help="number of seeds")
    parser.add_argument("--folder", type=Path, required=True, help="where to write one run directory per seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes at a time, of one thread each")
    arguments, options = parser.parse_known_args(args)
    with exit_on_user_error(parser):
        run_seeds(arguments.config, arguments.count, arguments.folder, arguments.jobs, options)
