"""Where the time of a collection and its update goes: playing, reference, values and update.

Runs a configuration for a few collections. The CPU seconds of each phase are medians over the collections after the
first; with one thread they hardly depend on other load. One more collection runs under PyTorch's profiler, which gives
the share of the wall-clock time inside PyTorch's operators: matrix products and attention, and all others. The rest of
a phase is Python: environments, tokenizers, Lightning, bookkeeping, and in that collection the profiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, record_function

from lrl.algorithms import ppo
from lrl.cli.main import LRLCLI
from lrl.policies.policy import Policy
from lrl.training import collect, gradient_module

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "addmv", "linear", "mkldnn", "scaled_dot_product", "onednn")
"""Parts of the names of operators that compute matrix products or attention."""
PHASES = ("playing", "reference", "values", "update")


class Clock:
    """Attributes time to the innermost phase that is open."""

    def __init__(self) -> None:
        self.open, self.since = ["update"], (time.process_time(), time.perf_counter())
        self.seconds: dict[str, float] = defaultdict(float)
        """CPU seconds of this process."""
        self.wall: dict[str, float] = defaultdict(float)

    def switch(self) -> None:
        """Add the time since the last call to the open phase."""
        now = time.process_time(), time.perf_counter()
        self.seconds[self.open[-1]] += now[0] - self.since[0]
        self.wall[self.open[-1].partition("/")[0]] += now[1] - self.since[1]
        self.since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; ``playing/environment`` is a part of ``playing``."""
        self.switch()
        self.open.append(name)
        with record_function(f"lrl/{name}"):
            yield
        self.switch()
        self.open.pop()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Measure a method or a function."""
        inner: Callable[..., Any] = getattr(owner, name)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return inner(*args, **kwargs)

        setattr(owner, name, outer)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard what is written to standard error, where the profiler prints that it starts and stops."""
    before, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(null)


class Collections(L.Callback):
    """Ends a measurement at the start of each collection but the first."""

    def __init__(self, clock: Clock, profiled: int) -> None:
        self.clock, self.profiled = clock, profiled
        self.rows: list[dict[str, Any]] = []
        self.profiler: Any = None
        self.wall: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what was measured; under the profiler the next collection."""
        self.clock.switch()
        if self.profiler is not None:
            with quiet_stderr():
                self.profiler.stop()
        rollout = trainer.datamodule.rollout  # pyright: ignore[reportAttributeAccessIssue]
        row = {"turns": rollout.num_turns, "tokens": int(rollout.response_mask.sum()), **self.clock.seconds}
        self.rows.append(row)
        if len(self.rows) == self.profiled:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            with quiet_stderr():
                self.profiler.start()
        self.wall = dict(self.clock.wall)
        self.clock.since = time.process_time(), time.perf_counter()
        self.clock.seconds.clear()
        self.clock.wall.clear()


def operators(profiler: Any) -> dict[str, list[float]]:
    """Return for each phase the seconds in matrix products and attention, and in other operators."""
    events = [
        (event.start_ns(), -event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.name().startswith(("lrl/", "aten::", "mkldnn")) or "Backward" in event.name()
    ]
    found: dict[str, list[float]] = {phase: [0.0, 0.0] for phase in PHASES}
    enclosing: list[tuple[int, str, bool, str]] = []  # end, phase, whether it is a product, name
    for start, length, name in sorted(events):
        while enclosing and start >= enclosing[-1][0]:
            enclosing.pop()
        phase, outer = ("update", "") if not enclosing else (enclosing[-1][1], enclosing[-1][3])
        if name.startswith("lrl/"):
            phase = name[4:].partition("/")[0]
        product = name.startswith(("aten::", "mkldnn")) and any(part in name for part in PRODUCTS)
        if not name.startswith("lrl/"):
            found[phase][not product] -= length / 1e9
            if outer and not outer.startswith("lrl/"):
                found[phase][not enclosing[-1][2]] += length / 1e9
        enclosing.append((start - length, phase, product, name))
    return found


def measure(options: argparse.Namespace, config: str) -> dict[str, Any]:
    """Run a configuration, and return its row."""
    clock = Clock()
    collections = Collections(clock, options.collections)
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in MEASURED]
    for owner, name, phase in MEASURED:
        clock.wrap(owner, name, phase)
    module: Any = gradient_module.GradientModule
    configure = module.configure_callbacks
    module.configure_callbacks = lambda self: [*configure(self), collections]
    count = options.collections + 1
    changes = {"trainer.max_epochs": count, "trainer.check_val_every_n_epoch": count + 1}
    changes |= {"trainer.limit_val_batches": 0}
    changes |= dict(one.split("=", 1) for one in options.set)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.pop("LRL_RUN_DIRECTORY", None)  # set by the previous run
            changes["run_directory"] = f"{folder}/run"
            LRLCLI(["fit", "--config", config, *(f"--{name}={value}" for name, value in changes.items())])
    finally:
        module.configure_callbacks = configure
        for owner, name, original in replaced:
            setattr(owner, name, original)
    return summary(collections)


def _policies() -> list[type[Policy]]:
    from lrl.policies.head import HeadPolicy
    from lrl.policies.mlp import MLPPolicy
    from lrl.policies.scoring import ScoringPolicy
    from lrl.policies.text import TextPolicy

    return [HeadPolicy, MLPPolicy, ScoringPolicy, TextPolicy]


MEASURED = [
    (collect.EpisodeCollector, "collect", "playing"),
    (collect.FixedHorizonCollector, "collect", "playing"),
    (collect.EnvRunner, "step", "playing/environments"),
    (collect.EnvRunner, "reset", "playing/environments"),
    (collect, "final_values", "values"),
    (gradient_module, "values_of", "values"),
    (ppo, "fit_values", "values"),
    *((policy, "act", "playing/policy") for policy in _policies()),
    *((policy, "reference_logprobs", "reference") for policy in _policies()),
]
"""Owner, function and phase of everything that is measured; what remains is the update."""


def summary(collections: Collections) -> dict[str, Any]:
    """Return medians over all collections but the first and the profiled one, and the shares of operators."""
    rows = collections.rows[1:-1]
    seconds = {
        phase: statistics.median(
            sum(row.get(name, 0.0) for name in row if str(name).partition("/")[0] == phase) for row in rows
        )
        for phase in PHASES
    }
    totals = [sum(value for name, value in row.items() if name not in ("turns", "tokens")) for row in rows]
    rates = [row["turns"] / total for row, total in zip(rows, totals, strict=True)]
    last = collections.rows[-1]
    profiled = {phase: collections.wall.get(phase, 0.0) for phase in PHASES}
    parts = operators(collections.profiler)
    return {
        "turns": [row["turns"] for row in rows],
        "tokens": [row["tokens"] for row in rows],
        "turns_per_second": rates,
        "seconds": seconds,
        "environments": statistics.median(row.get("playing/environments", 0.0) for row in rows),
        "profiled": {"turns": last["turns"], "seconds": profiled, "operators": parts},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py phases``."""
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--collections", type=int, default=3, help="collections, of which the first is a warm-up")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each configuration, and yield a report after each of them."""
    rows = dict[str, Any]()
    for config in options.configs:
        rows[config] = row = measure(options, config)
        print(config, f"{statistics.median(row['turns_per_second']):.1f} turns/s", row, flush=True)
        yield {"phases": rows}
