"""Runs that are killed at random moments and resumed: they must end bit-identical to runs that were not.

python tests/kills.py --log runs/kills.jsonl --json assets/results/kills.json --machine '2-core x86-64 virtual machine'

Each case is a run by the command line in a process of its own, which another process kills (SIGKILL) after a random
time within a chosen moment of a random collection. What the process was doing then is read from a file that both map
into memory. The run is resumed in its directory in a third process. Then its last checkpoint, the rows of its metrics,
the files that it appends to and the states of the global random number generators are compared with those of an
uninterrupted run. Each case is one line of ``--log``; a further call continues after the last one.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import mmap
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

LIBRARIES = ("gymnasium", "lightning.pytorch", "transformers.models.llama.modeling_llama", "lrl.cli.main", "commands")
ROOT = Path(__file__).parents[1]
MOMENTS = ("collection", "update", "checkpoint write", "validation", "search", "other")
ATTEMPTS = 8
"""Number of times that a case is repeated with another delay if the run ended before it was killed."""

_DATA, _TRAINER = "--data.init_args", "--trainer"
_POLE = [f"{_DATA}.num_envs=4", f"{_DATA}.num_steps=16", f"{_DATA}.validation.num_envs=4"]
_LAKE = f"{_DATA}.validation.num_envs=4"
_EACH = [f"{_DATA}.validation.episodes=4", f"{_TRAINER}.check_val_every_n_epoch=1", f"{_TRAINER}.accelerator=cpu"]
RUNS = {
    "GRPO": ["frozen_lake/grpo.yaml", _LAKE, f"{_DATA}.num_groups=4", f"{_DATA}.group_size=4", f"{_DATA}.num_epochs=2"],
    "PPO": ["cartpole/ppo_mlp.yaml", *_POLE, f"{_DATA}.num_epochs=4", f"{_DATA}.num_minibatches=2"],
    "TRPO": ["cartpole/trpo_mlp.yaml", *_POLE],
    "SFT": ["frozen_lake/sft.yaml", _LAKE, f"{_DATA}.demonstrations.init_args.repeat=2", f"{_DATA}.batch_size=6"],
    "search": ["cartpole/search.yaml", f"{_DATA}.num_rollouts=4", f"{_DATA}.num_iterations=4", f"{_DATA}.warmup=1"],
}
"""Configuration and options of a run of four collections (search: five policies) for each algorithm."""
TARGETS = dict.fromkeys(RUNS, MOMENTS[:4]) | {"SFT": MOMENTS[1:4], "search": (*MOMENTS[2:4], "search")}
"""Moments in which the runs of each algorithm are killed, in turn."""
_COLLECTIONS = 4


class Moment:
    """Stores what a process is doing in a file, which other processes read while it runs and after its end."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(64))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 64)

    def write(self, name: str, collection: int) -> None:
        self._memory[:64] = f"{name}|{collection}|".encode().ljust(64, b"\0")

    def read(self) -> tuple[str, int]:
        name, collection, *_ = (self._memory[:64].decode(errors="replace") + "|-1|").split("|")
        return name.strip("\0") or "start", int(collection or -1)


def observe(moment: Moment, spent: dict[str, list[float]], generators: Path) -> None:
    """Write what the run in this process is doing, the seconds of each visit, and at its end all global generators."""
    from lrl.search.module import PromptedSearchModule
    from lrl.training.checkpoint import CollectionCheckpoint
    from lrl.training.collect import VectorEnvRollouts
    from lrl.training.gradient_module import GradientModule
    from lrl.training.module import PolicyModule

    stack = ["other"]

    def enter(name: str, collection: int) -> None:
        stack.append(name)
        spent.setdefault(name, []).append(-time.monotonic())
        moment.write(name, collection)

    def leave(collection: int) -> None:
        spent[stack.pop()][-1] += time.monotonic()
        moment.write(stack[-1], collection)

    def inside(name: str, kind: type, method: str) -> None:
        function = getattr(kind, method)

        @functools.wraps(function)  # Lightning reads the signature
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            collection = self.current_epoch if hasattr(self, "current_epoch") else args[0].current_epoch
            enter(name, collection)
            result = function(self, *args, **kwargs)
            leave(collection)
            return result

        setattr(kind, method, call)

    def before(module: Any, batch: Any, batch_idx: int) -> None:
        enter("update", module.current_epoch)
        start(module, batch, batch_idx)

    def after(module: Any, *args: Any) -> None:
        finish(module, *args)
        leave(module.current_epoch)

    def end(*args: Any) -> None:
        import numpy as np
        import torch

        ended(*args)
        states = torch.get_rng_state().tolist(), np.random.get_state()[1:], random.getstate()
        generators.write_text(repr(states))

    inside("checkpoint write", CollectionCheckpoint, "write")
    inside("collection", VectorEnvRollouts, "_collect")
    inside("validation", PolicyModule, "evaluate_held_out")
    inside("search", PromptedSearchModule, "_propose")
    inside("search", PromptedSearchModule, "training_step")
    start, finish, ended = (
        GradientModule.on_train_batch_start,
        GradientModule.on_train_batch_end,
        CollectionCheckpoint.on_train_end,
    )
    GradientModule.on_train_batch_start, GradientModule.on_train_batch_end = before, after
    CollectionCheckpoint.on_train_end = end


def train(words: list[str], folder: Path, out: Path) -> None:
    """Run a command in this process, which is used for nothing else, and write its result to ``out``."""
    from commands import run_words

    os.chdir(folder)
    spent: dict[str, list[float]] = {}
    observe(Moment(folder / "moment"), spent, folder / "generators.txt")
    done = run_words(["lrl", *words], OMP_NUM_THREADS="1")
    out.write_text(json.dumps({"status": done.returncode, "error": done.stderr[-3000:], "spent": spent}))


def command(algorithm: str, often: bool) -> list[str]:
    """Return the command of a run; with ``often``, it also writes checkpoints between its optimiser steps."""
    config, *options = RUNS[algorithm]
    words = ["fit", f"--config={config}", *options, *_EACH, "--run_directory=run"]
    if algorithm != "search":
        words.append(f"{_TRAINER}.max_epochs={_COLLECTIONS}")
    minutes = 1e-9 if often else 10
    callbacks = [
        {"class_path": "CollectionCheckpoint", "init_args": {"every_n_collections": 1, "every_minutes": minutes}}
    ]
    callbacks += [{"class_path": "Transcripts", "init_args": {"every_n_collections": 1}}]
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "flush_logs_every_n_steps": 1}}
    return [*words, f"{_TRAINER}.callbacks={json.dumps(callbacks)}", f"{_TRAINER}.logger={json.dumps(logger)}"]


class Campaign:
    """Runs in processes that share their imports.

    Args:
        folder: folder of the runs.
        context: start method of the processes.
    """

    def __init__(self, folder: Path, context: Any) -> None:
        self.folder, self._context = folder, context
        self._whole: dict[tuple[str, bool], dict[str, Any]] = {}

    def _start(self, words: list[str], folder: Path) -> Any:
        (folder / "done.json").unlink(missing_ok=True)
        process = self._context.Process(target=train, args=(words, folder, folder / "done.json"))
        process.start()
        return process

    def _finish(self, words: list[str], folder: Path) -> dict[str, Any]:
        process = self._start(words, folder)
        process.join()
        done = json.loads((folder / "done.json").read_text())
        done["ended"] = "nothing was trained" in done["error"]  # it was killed after its last checkpoint
        assert done["status"] == 0 or done["ended"], done["error"]
        return done

    def whole(self, algorithm: str, often: bool) -> tuple[Path, dict[str, list[float]]]:
        """Return the folder of an uninterrupted run and the durations of its moments, trained at its first use."""
        folder = self.folder / f"whole-{algorithm}-{'often' if often else 'rarely'}"
        if (algorithm, often) not in self._whole:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._whole[algorithm, often] = self._finish(command(algorithm, often), folder)["spent"]
        return folder, self._whole[algorithm, often]

    def kill(self, number: int, seed: int) -> dict[str, Any]:
        """Kill a run, resume it, and compare it with the uninterrupted one."""
        algorithm = algorithm_of(number)
        turn = number // len(RUNS)
        target = TARGETS[algorithm][turn % len(TARGETS[algorithm])]
        often = random.Random(f"{seed}/{number}").random() < 0.5
        whole, spent = self.whole(algorithm, often)
        folder = self.folder / "killed"
        for attempt in range(ATTEMPTS):
            draw = random.Random(f"{seed}/{number}/{attempt}")
            collection, delay = draw.randrange(1, _COLLECTIONS), draw.random() * statistics.median(spent[target][1:])
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            process = self._start(command(algorithm, often), folder)
            moment = Moment(folder / "moment")
            while moment.read() != (target, collection) and process.is_alive():
                time.sleep(0.0002)
            time.sleep(delay)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            if process.exitcode == -signal.SIGKILL:
                break
        else:
            raise RuntimeError(f"case {number} ended {ATTEMPTS} times before it was killed")
        name, place = moment.read()
        last = folder / "run" / "checkpoints" / "last.ckpt"
        words = command(algorithm, often)
        if last.exists():
            words.append("--ckpt_path=run/checkpoints/last.ckpt")
        else:
            shutil.rmtree(folder / "run", ignore_errors=True)
        ended = self._finish(words, folder)["ended"]
        case = {"number": number, "algorithm": algorithm, "target": target, "moment": name, "collection": place}
        case |= {"often": often, "attempts": attempt + 1, "resumed": words[-1].startswith("--ckpt_path")}
        found = [name for name in differences(whole, folder) if not (ended and name == "generators.txt")]
        return case | {"ended": ended, "differences": found}


def algorithm_of(number: int) -> str:
    """Return the algorithm of a case."""
    return list(RUNS)[number % len(RUNS)]


def differences(whole: Path, resumed: Path) -> list[str]:
    """Return the names of what two runs ended with that is not bit-identical."""
    import torch

    found = []
    states = [torch.load(one / "run/checkpoints/last.ckpt", weights_only=True) for one in (whole, resumed)]
    found += unequal(*states, "")
    rows = [list(csv.DictReader((one / "run/metrics.csv").open(newline=""))) for one in (whole, resumed)]
    for row in (row for table in rows for row in table):
        for name in [name for name in row if name.startswith("throughput/") or name in _CLOCKED]:
            del row[name]
    found += ["metrics.csv"] * (rows[0] != rows[1])
    for name in ("run/transcripts.jsonl", "run/transcripts.txt", "run/proposals.jsonl", "generators.txt"):
        ours, theirs = ((one / name).read_bytes() if (one / name).exists() else None for one in (whole, resumed))
        found += [name] * (ours != theirs)
    return found


_CLOCKED = ("clock/minutes", "search/proposal_seconds")
_OWN = (".lrl.config", ".lrl.lengths.run.log", ".lrl.clocks.minutes", ".clocks.minutes", ".minutes")
"""Ends of the names of entries of checkpoints that depend on the wall clock or on the command."""
_REWRITTEN = ".val_loop.batch_progress."
"""Part of the names of Lightning's counters of validations, to which a resume gives other numbers of the same state."""


def unequal(one: Any, other: Any, name: str) -> list[str]:
    """Return the names of the parts of two nested values that differ."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        found = [unequal(one.get(key, _MISSING), other.get(key, _MISSING), f"{name}.{key}") for key in keys]
        return [part for parts in found for part in parts]
    return [] if bytes_of(one) == bytes_of(other) or name.endswith(_OWN) or _REWRITTEN in name else [name]


_MISSING = object()


def bytes_of(value: Any) -> Any:
    """Return the type, the shape and the bits of a tensor; other values unchanged."""
    if hasattr(value, "untyped_storage"):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    return repr(value)


# The campaign.


def summary(log: Path) -> dict[str, Any]:
    """Return the numbers of kills by algorithm and moment, and the cases that were not bit-identical."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    counts: dict[str, Counter[str]] = {name: Counter() for name in RUNS}
    for row in rows:
        counts[row["algorithm"]][row["moment"]] += 1
    ordered = {name: {one: found[one] for one in MOMENTS if found[one]} for name, found in counts.items()}
    return {
        "commits": Counter(row["commit"] for row in rows),
        "kills": len(rows),
        "identical": sum(not row["differences"] for row in rows),
        "by_algorithm_and_moment": ordered,
        "by_moment": {one: sum(found[one] for found in counts.values()) for one in MOMENTS},
        "resumed_from_a_checkpoint": sum(row["resumed"] for row in rows),
        "killed_after_the_last_checkpoint": sum(row["ended"] for row in rows),
        "different": [row for row in rows if row["differences"]],
    }


def main() -> None:
    """Run the cases that the log does not contain, and write the counts."""
    from lrl.cli.run_directory import commit

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--machine", default="", help="description of the machine, written to --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "lrl-kills"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--only", choices=RUNS, help="run the cases of one algorithm, beside other calls")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(list(LIBRARIES))
    campaign = Campaign(options.folder.resolve(), multiprocessing.get_context("forkserver"))
    options.log.parent.mkdir(parents=True, exist_ok=True)
    with options.log.open("a+", encoding="utf-8") as file:
        file.seek(0)
        done = {json.loads(line)["number"] for line in file}
        for number in reversed(range(options.kills)):
            if number not in done and options.only in (None, algorithm_of(number)):
                row = campaign.kill(number, options.seed) | {"commit": commit()}
                file.write(json.dumps(row) + "\n")
                file.flush()
    if options.json is not None:
        command = shlex.join(["python", "tests/kills.py", *sys.argv[1:]])
        about = {"command": command, "machine": options.machine, "seed": options.seed}
        options.json.write_text(json.dumps(about | summary(options.log), indent=2) + "\n")


if __name__ == "__main__":
    main()
