"""Mutated configurations and command lines, and what the command line says to each.

python tests/fuzzing.py --log runs/fuzz.jsonl --json assets/results/fuzz.json --machine '2-core x86-64 virtual machine'

Each case runs in this process as far as the first collection of a run, or, for a command that does not train, to its
end. It is one line of ``--log``; a further call continues after the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from commands import run_words
from mutations import DATASETS, FILES, ROOT, Case, command_case, configuration_case, configurations

from lrl.cli.run_directory import commit


class Reached(BaseException):
    """Raised in place of the first collection."""


class OutOfTime(BaseException):
    """Raised in a case that takes too long."""


def _raise(error: type[BaseException]) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


def _refused(*_: Any, **__: Any) -> Any:
    raise OSError(101, "Network is unreachable")


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Let runs end before their first collection, and commands before they serve, connect or start processes."""
    import torch.distributed
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    import lrl.cli.run_seeds

    run = subprocess.run

    def run_others(command: Any, *args: Any, **settings: Any) -> Any:
        if command[1:3] == ["-m", "lrl"]:
            raise Reached
        return run(command, *args, **settings)

    reached = _raise(Reached)
    patches = [
        mock.patch.object(_FitLoop, "on_advance_start", reached),
        mock.patch.object(_EvaluationLoop, "run", reached),
        mock.patch.object(_MultiProcessingLauncher, "launch", reached),
        mock.patch.object(_SubprocessScriptLauncher, "launch", reached),
        mock.patch.object(torch.distributed, "init_process_group", reached),
        mock.patch.object(subprocess, "run", run_others),
        mock.patch.object(lrl.cli.run_seeds.subprocess, "run", run_others),
        mock.patch.object(socket, "getaddrinfo", _refused),
        mock.patch.object(socket.socket, "connect", _refused),
        mock.patch("uvicorn.run", reached),
        mock.patch("lrl.search.experiments.ProcessPoolExecutor", reached),
        mock.patch("lrl.cli.run_seeds.ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs)),
        mock.patch("uvicorn.Server.run", reached),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise after some seconds of CPU time, or ten times as many by the clock."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, lambda *_: _raise(OutOfTime)())
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def outcome(case: Case, seconds: float | None = 8) -> dict[str, Any]:
    """Run a case in the current folder, and return its verdict and what it wrote to standard error.

    Args:
        case: the case.
        seconds: CPU time after which it is ended; None does not limit it.
    """
    if case.text is not None:
        Path("case.yaml").write_text(case.text, encoding="utf-8", errors="surrogatepass")
    before, started = set(os.listdir()), time.process_time()
    status, error = 0, ""
    try:
        with contextlib.nullcontext() if seconds is None else _limited(seconds):
            status, _, error = run_words(case.words)
    except Reached:
        pass
    except OutOfTime:
        status = -1
    verdict, sentence = judged(case, status, error)
    for name in ("lake", "pole"):
        shutil.rmtree(Path("minari", "lrl", name), ignore_errors=True)
    for name in set(os.listdir()) - before:
        shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.remove(name)
    return {"verdict": verdict, "sentence": sentence[-3000:], "seconds": round(time.process_time() - started, 2)}


_LOGGED = re.compile(r"run directory |trainer.strategy fsdp: |no --ckpt_path: |the job was restarted")
"""Beginnings of lines that are no errors."""


def judged(case: Case, status: int, error: str) -> tuple[str, str]:
    """Return the verdict on a command, and its error."""
    lines = [line for line in error.splitlines() if line and not _LOGGED.match(line)]
    if status == -1:
        return "out of time", ""
    if "Traceback (most recent call last)" in error or status not in (0, 2):
        return "traceback", error
    if status == 0:
        return "accepted", "\n".join(lines)
    if len(lines) != 1 or not re.match(r"[\w. ]+: ", lines[0]):
        return "several lines", error
    if case.names and not any(name.lower() in lines[0].lower() for name in case.names if name):
        return "unnamed", lines[0]
    return "error", lines[0]


def write_files(folder: Path) -> None:
    """Write the files and folders that are no configurations."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name in ("folder", "folder.yaml"):
        (folder / name).mkdir(exist_ok=True)


def prepare(folder: Path) -> None:
    """Make the files, runs and data sets that cases read, and change to their folder."""
    resource.setrlimit(resource.RLIMIT_DATA, (7 * 2**30, resource.RLIM_INFINITY))
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "MINARI_DATASETS_PATH": str(folder / "minari"), "WANDB_MODE": "offline"}
    write_files(Path())
    network, text = ("cartpole/ppo_mlp.yaml", "num_steps=8"), ("frozen_lake/grpo.yaml", "num_groups=1")
    for seed, (name, (config, size)) in enumerate({"run": network, "other": network, "adapted": text}.items()):
        if not Path(name).exists():
            small = ["--data.init_args.validation.episodes=2", f"--data.init_args.{size}", "--trainer.max_epochs=1"]
            words = ["lrl", "fit", f"--config={config}", f"--seed_everything={seed}", f"--run_directory={name}"]
            done = run_words([*words, *small, "--trainer.check_val_every_n_epoch=1"])
            assert done.returncode == 0, done.stderr
    for dataset, env in DATASETS.items():
        if not Path("minari", dataset).exists():
            words = ["lrl", "collect", "--policy=random", f"--env_id={env}", f"--dataset_id={dataset}"]
            done = run_words([*words, "--episodes=8", "--num_envs=1", "--max_episode_steps=12"])
            assert done.returncode == 0, done.stderr


# The campaign.


def campaign(log: Path, seed: int, counts: dict[str, int], part: int) -> bool:
    """Run up to ``part`` cases that the log does not have; return whether cases are left."""
    done, begun = set(), {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        row = json.loads(line)
        (done.add if "verdict" in row else lambda key, row=row: begun.update({key: row}))((row["of"], row["number"]))
    configs, version = configurations(), commit()
    left = [(of, number) for of, count in counts.items() for number in range(count) if (of, number) not in done]
    with log.open("a", encoding="utf-8") as file, stopping():
        for index, (of, number) in enumerate(left[:part]):
            case = configuration_case(number, seed, configs) if of == "configurations" else command_case(number, seed)
            row = {"of": of, "commit": version} | asdict(case)
            if (of, number) in begun:  # this case ended the process
                row |= {"verdict": "process ended", "sentence": "", "seconds": 0}
            else:
                file.write(json.dumps({"of": of, "number": number}) + "\n")
                file.flush()
                row |= outcome(case)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if index % 20 == 19:
                gc.collect()
            if index == 19:
                gc.freeze()  # modules and caches, which later collections need not visit
    return len(left) > part


def summary(log: Path) -> dict[str, Any]:
    """Return the number of cases with each verdict, in all and by kind, and the cases that are faults."""
    rows = [row for row in map(json.loads, log.read_text(encoding="utf-8").splitlines()) if "verdict" in row]
    report: dict[str, Any] = {"cases_by_commit": Counter(row["commit"] for row in rows)}
    report["cpu_seconds"] = round(sum(row["seconds"] for row in rows))
    for of in ("configurations", "commands"):
        own = [row for row in rows if row["of"] == of]
        kinds = {
            kind: Counter(row["verdict"] for row in own if row["kind"] == kind) for kind in {r["kind"] for r in own}
        }
        verdicts = Counter(row["verdict"] for row in own)
        report[of] = (
            {"cases": len(own)} | {"verdicts": dict(verdicts.most_common())} | {"kinds": dict(sorted(kinds.items()))}
        )
    faults = [row for row in rows if row["verdict"] not in ("accepted", "error")]
    names = ("of", "number", "kind", "key", "value", "verdict")
    report["faults"] = [
        {name: row[name][:60] if isinstance(row[name], str) else row[name] for name in names}
        | {"last_line": (row["sentence"].strip().splitlines() or [""])[-1][:200]}
        for row in faults
    ]
    return report


def main() -> None:
    """Run the cases that the log does not contain, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--machine", default="", help="description of the machine, written to --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "lrl-fuzz"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", type=int, default=10_000)
    parser.add_argument("--commands", type=int, default=2_000)
    parser.add_argument("--part", type=int, default=500, help="cases of one process")
    options = parser.parse_args()
    log = options.log.resolve()
    counts = {"commands": options.commands, "configurations": options.configurations}
    prepare(options.folder.resolve())
    if campaign(log, options.seed, counts, options.part):
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if options.json is not None:
        os.chdir(ROOT)
        command = shlex.join(["python", "tests/fuzzing.py", *sys.argv[1:]])
        about = {"command": command, "machine": options.machine, "seed": options.seed}
        options.json.write_text(json.dumps(about | summary(log), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
