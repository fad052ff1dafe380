"""The command ``lrl search_table``."""

from __future__ import annotations

from pathlib import Path

from lrl.cli.command import command, command_line
from lrl.ranges import PositiveInt
from lrl.search.tasks import IN_CONTEXT, NETWORKS, TASKS, SearchBudget


def search_table(
    *,
    folder: Path,
    tasks: list[str] | None = None,
    methods: list[str] | None = None,
    budget: SearchBudget,
    seeds: PositiveInt | None = None,
    jobs: PositiveInt = 1,
    show: bool = False,
    finished: Path | None = None,
    machine: str = "",
    json: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Search for small policies on the tasks of ProPS with random search, CEM, CMA-ES and ARS, beside PPO and TRPO.

    lrl search_table --folder runs/search_table --jobs 2
    lrl search_table --folder runs/search_table --tasks frozen_lake maze --methods cma_es --seeds 3
    lrl search_table --folder runs/search_table --methods ppo trpo --jobs 2
    lrl search_table --folder runs/search_table --methods in_context --checkpoint runs/synthetic/sft/x
    lrl search_table --folder runs/search_table --finished assets/results/search_table.json --methods cma_es
    lrl search_table --folder runs/search_table --show --json runs/search_table.json --picture runs/search_table.png

    All searches have the same budget, the same distribution of random parameters and the same seeds. PPO and TRPO train
    networks for as many episodes or for --max_env_steps, whichever ends first, on three seeds by default. A record is
    written when a run (one task, method and seed) has finished; a second call makes the missing runs only.

    Two Markdown tables show the published figures beside ours. The first has the return of the best iteration, which is
    the rule of the paper (for a network: the best mean of --rollouts consecutive training episodes). The second has the
    return of the chosen policy (for a network: the last one) on fresh episodes. Further tables show the numbers of
    episodes and steps, and the difference between in_context and random_search on the same seeds.

    The method in_context is a search by the language model of --checkpoint, which learned to search on synthetic
    functions. Its first proposals are random: five, and further ones until two returns differ. The model gets a
    separate prompt for each parameter, and all of these prompts at once.

    Args:
        folder: folder of the records, one file each.
        tasks: names of tasks; default: all 15.
        methods: names of methods; default: all six, and in_context with --checkpoint.
        budget: budget of every run.
        seeds: number of seeds; default: 10 for searches where episodes are short, else 3.
        jobs: number of processes at a time, of one thread each.
        show: print the tables of finished runs, without running anything.
        finished: a file that an earlier --json wrote, whose runs are copied to --folder.
        machine: description of the machine, for the records.
        json: write all records to this file, with the best return so far after each improvement.
        picture: draw the best return so far against episodes to this PNG.

    Raises:
        ValueError: If a task or method is unknown, the options contradict each other, or a record has another budget.
    """
    from lrl.cli.run_directory import commit
    from lrl.evaluation.report import read_result
    from lrl.search import experiments
    from lrl.search.pictures import draw_progress
    from lrl.search.tables import search_tables

    searched = [] if budget.checkpoint is None else [IN_CONTEXT]
    methods = methods or [*experiments.METHODS, *searched, *NETWORKS]
    if IN_CONTEXT in methods and not searched:
        raise ValueError("--methods has in_context; give the run that learned to search by --checkpoint.")
    if searched and IN_CONTEXT not in methods:
        raise ValueError("--checkpoint is given, but --methods has no in_context, the only method that uses it.")
    runs = experiments.planned(tasks or list(TASKS), methods, seeds)
    about = {"commit": commit(), "machine": machine}
    if finished is not None:
        kept = experiments.report_records(read_result(finished, "finished"), str(finished))
        count = experiments.restore_records(kept, runs, budget, folder)
        print(f"{count} of {len(runs)} runs were copied from {finished} to {folder}.", flush=True)
    if not show:
        for record in experiments.search_all(runs, budget, folder, jobs, about):
            figures = " ".join(
                f"{name} {record[name]:.4g}" for name in ("best_iteration", "fresh", "seconds") if name in record
            )
            said = figures or f"{experiments.UNPLAYABLE}, {record[experiments.UNPLAYABLE]}"
            print(f"{record['task']} {record['method']} {record['index']}: {said}", flush=True)
    records = {run: experiments.read_record(run, budget, folder) for run in runs}
    print(search_tables(records))
    if json is not None:
        report = experiments.search_report(records, {"command": command_line("lrl search_table"), **about})
        experiments.write_report(report, json)
    if picture is not None:
        draw_progress(records, picture)


main = command(search_table)
