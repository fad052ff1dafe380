"""The command ``lrl run_seeds``."""

from __future__ import annotations

from pathlib import Path

from lrl.cli.command import command


def run_seeds(*options: str, config: str, folder: Path, count: int = 10, jobs: int = 1) -> None:
    """Train on several seeds that follow a rule: the first 32 bits of the SHA-256 of "lrl-0", "lrl-1", ...

    lrl run_seeds --config configs/frozen_lake/grpo.yaml --count 40 --folder runs/headline/grpo --jobs 2

    Options that are not listed here are passed on to `lrl fit`, with the run's seed in place of `{seed}`, so that
    `--model.init_args.init_from 'runs/weak/seed{seed}'` starts each run from an earlier one on its seed. Finished runs
    are kept, so the command can be repeated.

    Args:
        options: options of `lrl fit`.
        config: the experiment's file.
        folder: where to write one run directory per seed.
        count: number of seeds.
        jobs: number of processes at a time, of one thread each.
    """
    from lrl.evaluation import statistics

    statistics.run_seeds(config, count, folder, jobs, options)


main = command(run_seeds)
