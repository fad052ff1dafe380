"""Searches on the tasks of ProPS without a trainer: one record for each task, method and seed, and reports of them.

Networks that are trained by gradients have records of the same form.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lrl.evaluation.pictures import Series
from lrl.evaluation.report import result_text
from lrl.evaluation.statistics import bootstrap_interval, headline_seed, json_bounds
from lrl.files import write_whole
from lrl.search.in_context import InContextSearcher, UnplayableError, chat_model_of
from lrl.search.policies import LinearPolicy, SearchedPolicy, TabularPolicy
from lrl.search.rollouts import fresh_seeds, make_batched, play_parameters, proposal_seeds
from lrl.search.searchers import CMAES, AugmentedRandomSearch, CrossEntropyMethod, RandomSearch, Searcher, Trial
from lrl.search.tasks import IN_CONTEXT, NETWORKS, TASKS, SearchBudget, SearchTask

METHODS: dict[str, Callable[[], Searcher]] = {
    "random_search": RandomSearch,
    "cross_entropy": CrossEntropyMethod,
    "cma_es": CMAES,
    "ars": AugmentedRandomSearch,
}
"""Searchers by name, which use their default settings on all tasks."""
UNPLAYABLE = "unplayable"
"""Entry with the reason in the record of a task that a method cannot play; such a record contains no figures."""
_NETWORK_SEEDS = 3
"""Number of seeds of a network on each task."""


@dataclass(frozen=True)
class SearchRun:
    """One method on one task with one seed."""

    task: str
    """Name of the task, a key of :data:`~lrl.search.tasks.TASKS`."""
    method: str
    """Name of the method: a key of :data:`METHODS`, one of :data:`NETWORKS`, or :data:`IN_CONTEXT`."""
    index: int
    """Index of the seed, see :func:`~lrl.evaluation.statistics.headline_seed`."""

    def file(self, folder: Path) -> Path:
        """Return the path of the record in a folder of records."""
        return folder / self.task / f"{self.method}_{self.index}.json"


def make_policy(task: SearchTask) -> SearchedPolicy:
    """Return the policy of a task, which is connected to the spaces."""
    policy = LinearPolicy() if task.policy == "linear" else TabularPolicy()
    policy.connect_spaces(*task.env_factory().spaces)
    return policy


def search(run: SearchRun, budget: SearchBudget) -> dict[str, Any]:
    """Search with one method, and return the record.

    Args:
        run: the task, the method and the seed.
        budget: budget of the run.

    Returns:
        See :func:`record_of`. The records of :data:`IN_CONTEXT` also contain ``warmup``, the number of random proposals
        at the beginning, and ``failed``, the number of random proposals because no reply was usable. If the model
        cannot play the task, the record has :data:`UNPLAYABLE` and no figures.

    Raises:
        ValueError: If the checkpoint of :data:`IN_CONTEXT` does not exist, or contains another kind of policy.
    """
    task, seed, started = TASKS[run.task], headline_seed(run.index), time.perf_counter()
    policy = make_policy(task)
    space = policy.parameter_space()
    if run.method == IN_CONTEXT:
        assert budget.checkpoint is not None, "the command checks that a checkpoint is given"
        searcher: Searcher = InContextSearcher(chat_model_of(budget.checkpoint))
    else:
        searcher = METHODS[run.method]()
    try:
        searcher.setup(space, seed, budget.iterations)
    except UnplayableError as error:
        return {**_about(run, budget), UNPLAYABLE: str(error)}
    envs = make_batched(task.env_factory(), budget.rollouts)
    trials, counts = list[Trial](), {"warmup": 0, "failed": 0}
    for proposal in range(budget.iterations):
        counts["warmup"] += isinstance(searcher, InContextSearcher) and searcher.is_random
        episodes = proposal_seeds(seed, proposal, budget.rollouts)
        trials.append(play_parameters(policy, envs, searcher.ask(), episodes, task.max_steps))
        counts["failed"] += int(searcher.metrics.get("failed", 0))
        searcher.tell(trials[-1])
    values, seconds = np.array([trial.value for trial in trials]), time.perf_counter() - started
    best = trials[int(values.argmax())].parameters
    fresh = play_parameters(policy, envs, best, fresh_seeds(seed, budget.fresh_episodes), task.max_steps)
    envs.close()
    return record_of(
        run,
        budget,
        values,
        fresh.returns,
        seconds,
        episodes=budget.episodes,
        env_steps=sum(trial.env_steps for trial in trials),
        parameters=best.tolist(),
        space=asdict(space) | {"actions": None if space.actions is None else list(space.actions)},
        **(counts if run.method == IN_CONTEXT else {}),
    )


def record_of(
    run: SearchRun, budget: SearchBudget, values: np.ndarray, fresh: np.ndarray, seconds: float, **others: Any
) -> dict[str, Any]:
    """Return the record of a finished run.

    ``best_iteration`` is the highest mean return of a proposal, which the paper reports. ``fresh`` is the mean return
    of the chosen policy, which in a search is the first proposal with that return, on fresh episodes.

    Args:
        run: the task, the method and the seed.
        budget: budget of the run.
        values: mean return of each proposal, ``(proposal,)``.
        fresh: returns of the fresh episodes of the chosen policy, ``(episode,)``.
        seconds: duration of the run without the fresh episodes.
        others: further entries.
    """
    return {
        **_about(run, budget),
        **others,
        "best_iteration": float(values.max()),
        "best_proposal": int(values.argmax()),
        "fresh": float(fresh.mean()),
        "fresh_ci95": json_bounds(bootstrap_interval(fresh)),
        "seconds": round(seconds, 2),
        "values": [round(value, 6) for value in values.tolist()],
    }


def _about(run: SearchRun, budget: SearchBudget) -> dict[str, Any]:
    settings = {"seed": headline_seed(run.index), "env_id": TASKS[run.task].env_id}
    return {**asdict(run), **budget.entries(run.method), **settings}


def planned(tasks: Sequence[str], methods: Sequence[str], num_seeds: int | None = None) -> list[SearchRun]:
    """Return all runs, ordered by the index of the seed.

    Args:
        tasks: names of :data:`~lrl.search.tasks.TASKS`.
        methods: names of :data:`METHODS` or :data:`NETWORKS`, or :data:`IN_CONTEXT`.
        num_seeds: number of seeds; None uses the number of each task for searches, and three for networks.

    Raises:
        ValueError: If a name is unknown.
    """
    for option, names, known in (("tasks", tasks, TASKS), ("methods", methods, (*METHODS, *NETWORKS, IN_CONTEXT))):
        for name in names:
            if name not in known:
                raise ValueError(f"{option} has {name!r}; it must be one of {', '.join(known)}.")
    pairs = [(task, method) for task in tasks for method in methods]
    seeds = {pair: num_seeds or (_NETWORK_SEEDS if pair[1] in NETWORKS else TASKS[pair[0]].num_seeds) for pair in pairs}
    most = max(seeds.values(), default=0)
    return [SearchRun(*pair, index) for index in range(most) for pair in pairs if index < seeds[pair]]


def read_record(run: SearchRun, budget: SearchBudget, folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished run; None if it has not finished.

    Args:
        run: the task, the method and the seed.
        budget: budget that the record must have.
        folder: folder of the records.

    Raises:
        ValueError: If the record has another budget.
    """
    file = run.file(folder)
    if not file.exists():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    _check_budget(run, budget, record, str(file), "give another folder")
    return record


def _check_budget(run: SearchRun, budget: SearchBudget, record: Mapping[str, Any], name: str, remedy: str) -> None:
    for entry, value in budget.entries(run.method).items():
        if record.get(entry) != value:
            raise ValueError(f"{entry} is {value}, but {name} was made with {record.get(entry)}; {remedy}.")


def restore_records(
    records: Mapping[SearchRun, dict[str, Any] | None], runs: Sequence[SearchRun], budget: SearchBudget, folder: Path
) -> int:
    """Copy records of an earlier report into a folder, for runs without a record there; return the number of copies.

    Args:
        records: records of the report.
        runs: result of :func:`planned`.
        budget: budget of the runs.
        folder: folder of the records.

    Raises:
        ValueError: If one of the records has another budget, in which case nothing is written.
    """
    found = {run: record for run in runs if (record := records.get(run)) and not run.file(folder).exists()}
    for run, record in found.items():
        _check_budget(run, budget, record, f"finished has {run.task} {run.method} {run.index}, which", "leave it out")
    for run, record in found.items():
        _write(record, run.file(folder))
    return len(found)


def search_all(
    runs: Sequence[SearchRun], budget: SearchBudget, folder: Path, jobs: int = 1, about: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Run all searches and trainings that have no record yet, and yield each new record when it is written.

    Args:
        runs: result of :func:`planned`.
        budget: budget of all runs.
        folder: folder of the records.
        jobs: number of processes, each with one thread.
        about: further entries of each record.

    Raises:
        ValueError: If a record has another budget.
    """
    todo = [run for run in runs if read_record(run, budget, folder) is None]
    if jobs == 1:
        yield from (_finish(run, budget, folder, about) for run in todo)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that are started below
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_finish, run, budget, folder, about) for run in todo]):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # otherwise all other runs would finish before the error is reported
            raise


def _finish(run: SearchRun, budget: SearchBudget, folder: Path, about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Search or train, and write the record."""
    from lrl.search.networks import train  # it imports this module

    record = (train if run.method in NETWORKS else search)(run, budget) | dict(about or {})
    _write(record, run.file(folder))
    return record


def _write(record: dict[str, Any], file: Path) -> None:
    """Write a record as JSON, completely or not at all."""
    with write_whole(file) as lines:
        lines.write(json.dumps(record) + "\n")


Records = Mapping[SearchRun, dict[str, Any] | None]
"""Record of each planned run; None if it has not finished."""


def is_random(record: Mapping[str, Any]) -> bool:
    """Return whether most proposals of a language model were random because no reply was usable."""
    return record.get("failed", 0) > record.get("iterations", 0) / 2


def best_so_far(record: Mapping[str, Any]) -> Series:
    """Return the best mean return so far against episodes, at each improvement and at the end.

    Args:
        record: record of a search or a network, with ``values``, or an entry of :func:`search_report`.
    """
    if "best_so_far" in record:
        kept = record["best_so_far"]
        return Series(clock=np.array(kept["episodes"], dtype=np.float64), values=np.array(kept["values"]))
    best = np.maximum.accumulate(np.array(record["values"], dtype=np.float64))
    last = len(best) - 1
    kept = [place for place in range(len(best)) if place in (0, last) or best[place] > best[place - 1]]
    return Series(clock=(np.array(kept, dtype=np.float64) + 1) * record["rollouts"], values=best[kept])


def search_report(records: Records, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of all records, which :func:`report_records` reads.

    It contains the best value so far at each improvement, ``best_so_far``, instead of the ``values`` of all proposals.

    Args:
        records: records of all planned runs.
        about: further entries of the report.
    """
    planned = Counter((run.task, run.method) for run in records)
    seeds = [{"task": task, "method": method, "seeds": count} for (task, method), count in planned.items()]
    searches = []
    for run, record in records.items():
        if record is None:
            continue
        kept = {name: value for name, value in record.items() if name != "values"} | vars(run)
        if "values" in record:
            series = best_so_far(record)
            kept["best_so_far"] = {"episodes": series.clock.astype(int).tolist(), "values": series.values.tolist()}
        searches.append(kept)
    return {**about, "planned": seeds, "searches": searches}


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a report as JSON, completely or not at all, with one line for each list of numbers."""
    with write_whole(path) as file:
        file.write(result_text(dict(report)))


def report_records(report: Mapping[str, Any], name: str = "the report") -> Records:
    """Return the record of each planned run of a report.

    Args:
        report: result of :func:`search_report`.
        name: name of the report in error messages.

    Raises:
        ValueError: If the mapping is not a report of `lrl search_table`.
    """
    if not {"planned", "searches"} <= set(report):
        raise ValueError(f"{name!r} is not a report of `lrl search_table`: it needs the keys 'planned' and 'searches'.")
    try:
        found = {SearchRun(one["task"], one["method"], one["index"]): one for one in report["searches"]}
        planned = [(one["task"], one["method"], range(one["seeds"])) for one in report["planned"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name!r} has entries in another format; give a report of `lrl search_table`.") from error
    runs = [SearchRun(task, method, index) for task, method, indices in planned for index in indices]
    return {run: found.get(run) for run in runs}
