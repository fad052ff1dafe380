"""Progress of a run: a display on the terminal, and logged lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lrl.evaluation.episodes import EpisodeResults
from lrl.evaluation.load import env_id
from lrl.evaluation.report import results_table, write_json
from lrl.registry import register

_LINES = 20
"""Number of lines that a run logs, at equal distances."""
_LONG_PASS = 100
"""Minimum number of batches of a pass within which lines are logged."""
_WIDTH = 120
"""Maximum number of characters in a logged line if there is no terminal."""
_TRAINING = {
    "rollout/return": "return",
    "search/best_return": "best",
    "rollout/success_rate": "success",
    "rollout/invalid_action_rate": "invalid",
    "train/loss": "loss",
    "train/entropy": "entropy",
}
"""Labels of the training metrics that are shown, by name. A line that is too short for all has the first ones."""
_VALIDATION = {
    "val/return": "return",
    "val/success_rate": "success",
    "val/exact_success": "exact success",
    "val/invalid_action_rate": "invalid",
    "val/loss": "loss",
    "val/r2": "R2",
}
"""Labels of the validation metrics that are shown."""


@register
class ConsoleProgress(L.Callback):
    """Shows the progress of a run on a terminal, and logs a line at every twentieth of the run.

    The terminal shows what the run does, a bar over collections, the minutes that have passed and that remain, and the
    GPU memory; below are the figures of the last collection and of the last validation. Validation figures are logged
    in lines of their own when they are new, at most once per twentieth of the run. If standard output or standard error
    is not a terminal, there are only the logged lines.

    If a run has fewer than twenty passes over demonstrations, with at least 100 batches each, a line is also logged
    within passes, at every twentieth of the run, with the metrics that were logged last.

    If ``data.max_env_steps`` is expected to end the run, the number of collections is estimated for the bar, and lines
    show the number of env steps.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._phase = self._memory = ""
        self._rows: dict[str, tuple[str, ...]] = {}
        """Figures below the bar: of the last collection and of the last validation."""
        self._began = self._advanced = time.monotonic()
        self._earlier = 0.0
        """Minutes of training before this launch, of a run that is resumed."""
        self._first = self._done = self._total = 0.0
        """Numbers of collections: before this launch, so far, and of the whole run, which is 0 if it is not known."""
        self._reported = self._env_steps = 0
        self._validated = 0
        """Number of collections at the last validation; 0 if its figures have been logged or skipped."""
        self._logged = {"collection": -1, "validation": -1}
        """The twentieth of the run in which each kind of line was last logged; -1 before the first."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        self._reported, self._validated, self._rows = trainer.current_epoch, 0, {}
        self._logged = {"collection": -1, "validation": -1}
        self._began, self._first = time.monotonic(), trainer.current_epoch
        self._earlier = getattr(pl_module, "clocks", {}).get("minutes", 0.0)
        self._advance(trainer.current_epoch, limit := _num_collections(trainer, pl_module))
        self._begin_phase(trainer)
        spent = getattr(getattr(trainer, "datamodule", None), "spent", False)
        if trainer.ckpt_path and trainer.is_global_zero and not spent:
            total = f"/{limit}" if limit else ""
            logging.getLogger("lrl").info("continues with collection %d%s", trainer.current_epoch + 1, total)
        console = Console(stderr=True, soft_wrap=True)  # lines with paths stay whole
        terminal = sys.stdout.isatty() and sys.stderr.isatty() and console.is_interactive
        if trainer.is_global_zero and terminal:
            self._live = Live(get_renderable=self._display, console=console, refresh_per_second=2, transient=True)
            self._live.start(refresh=True)
            _log_to_stderr()  # which Live has replaced, to print lines above the bar

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Show that weights are updated."""
        self._phase = "updating"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a line within a long pass over demonstrations, if one is due."""
        demonstrations = "optimizer_steps" in getattr(pl_module, "clocks", {})
        if not demonstrations or not trainer.is_global_zero:
            return
        passes, batches = _num_collections(trainer, pl_module), trainer.num_training_batches
        if not 0 < passes < _LINES or not _LONG_PASS <= batches < float("inf") or batch_idx + 1 >= batches:
            return
        done, total = trainer.current_epoch * int(batches) + batch_idx + 1, passes * int(batches)
        self._advance(done / batches, passes)
        figures = _figures(trainer, _TRAINING)
        if done * _LINES // total > (done - 1) * _LINES // total and figures:
            self._log(f"batch {done}/{total}", *figures)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the number of env steps before the next collection increases it."""
        self._env_steps = int(getattr(pl_module, "clocks", {}).get("env_steps", 0))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the previous epoch, whose metrics are logged after every callback's ``on_train_epoch_end``."""
        self._report(trainer, pl_module, trainer.current_epoch)
        self._begin_phase(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show that the policy is validated."""
        self._phase = "validating"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that there are new figures; they are reported with the collection."""
        self._validated = trainer.current_epoch + 1

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, last: bool = False) -> None:
        """Move the bar to ``done`` epochs, and log the lines that are due."""
        if done <= self._reported or not trainer.is_global_zero:
            return
        self._reported, limit, self._memory = done, _num_collections(trainer, pl_module), _gpu_memory(trainer)
        budget = getattr(getattr(trainer, "datamodule", None), "max_env_steps", None)
        expected = -(-done * budget // self._env_steps) if budget and self._env_steps else limit
        total = min(limit or expected, expected)
        self._advance(done, total)
        shares = (done, limit), (self._env_steps, budget)
        twentieth = max(part * _LINES // whole if whole else 0 for part, whole in shares)
        of_limit = f"/{limit}" if limit and limit == total else ""
        clock = [f"env steps {self._env_steps}{f'/{budget}' if budget else ''}"] if self._env_steps else []
        figures = _figures(trainer, _TRAINING)
        self._rows["collection"] = f"collection {done}", *figures
        if twentieth > self._logged["collection"] or done == limit or last:
            self._log(f"collection {done}{of_limit}", *clock, *figures)
            self._logged["collection"] = twentieth
        if self._validated and (figures := _figures(trainer, _VALIDATION)):
            self._rows["validation"] = f"validation {self._validated}", *figures
            if twentieth > self._logged["validation"] or last:
                self._log(f"validation {self._validated}{of_limit}", *figures)
                self._logged["validation"] = twentieth
        self._validated = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the last epoch and remove the bar."""
        self._report(trainer, pl_module, trainer.current_epoch, last=True)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            _log_to_stderr()

    def _begin_phase(self, trainer: L.Trainer) -> None:
        """Show what an epoch begins with."""
        collects = getattr(getattr(trainer, "datamodule", None), "collects", False)
        self._phase = "collecting" if collects else "updating"

    def _advance(self, done: float, total: float) -> None:
        """Store the numbers of collections so far and of the whole run, and when this was."""
        self._done, self._total, self._advanced = done, total, time.monotonic()

    def _log(self, head: str, *figures: str) -> None:
        """Log a line with the elapsed minutes and as many figures as fit the terminal."""
        minutes = f"{self._earlier + (time.monotonic() - self._began) / 60:.1f} min"
        width = self._live.console.width if self._live else _WIDTH
        logging.getLogger("lrl").info("%s", _line(width, head, minutes, *figures, self._memory))

    def _display(self) -> Group:
        """Return the bar and the figures below it; the thread of ``Live`` calls it twice per second."""
        now, done = time.monotonic(), self._done - self._first
        times = f"{self._earlier + (now - self._began) / 60:.1f} min"
        if done > 0 and self._total:
            left = (self._total - self._done) * (self._advanced - self._began) / done - (now - self._advanced)
            times += f", {max(0.0, left) / 60:.1f} left"
        count = f"{int(self._done)}/{self._total:.0f}" if self._total else f"{int(self._done)}"
        bar = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        progress = ProgressBar(self._total or None, self._done)
        bar.add_row(f"{self._phase:<10}", progress, count, times, self._memory)
        width = self._live.console.width if self._live else _WIDTH
        return Group(bar, *(Text(_line(width, *figures), no_wrap=True) for figures in tuple(self._rows.values())))


def _line(width: int, head: str, *figures: str) -> str:
    """Return a line with a head and the first figures that fit a number of characters."""
    line = head
    for figure in filter(None, figures):
        if len(line) + 2 + len(figure) > width:
            break
        line += f"  {figure}"
    return line


def _figures(trainer: L.Trainer, labels: Mapping[str, str]) -> list[str]:
    """Return the figures that a run has, as label and value; rates of invalid actions only if they are above 0."""
    found = {
        label: float(trainer.callback_metrics[name])
        for name, label in labels.items()
        if name in trainer.callback_metrics
    }
    return [f"{label} {_number(value)}" for label, value in found.items() if value or label != "invalid"]


def _number(value: float) -> str:
    """Return a value with three decimals, or fewer if it is large."""
    size = abs(value)
    return f"{value:.{3 if size < 10 else 1 if size < 1000 else 0}f}"


def _gpu_memory(trainer: L.Trainer) -> str:
    """Return the largest memory that this process has reserved on its GPU and the size of that; empty without a GPU."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return ""
    used, total = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    return f"GPU {used / 2**30:.1f}/{total / 2**30:.0f} GiB"


def _log_to_stderr() -> None:
    """Let the messages of lrl on the terminal go to the current ``sys.stderr``."""
    for handler in logging.getLogger("lrl").handlers:
        if type(handler) is logging.StreamHandler:  # not a file
            handler.setStream(sys.stderr)


def _num_collections(trainer: L.Trainer, pl_module: L.LightningModule) -> int:
    """Return the number of collections of the whole run; 0 if neither the trainer nor the module limits it."""
    limits = (trainer.max_epochs, getattr(pl_module, "max_collections", None))
    return min((limit for limit in limits if limit is not None and limit > 0), default=0)


PREDICTIONS = "predictions.json"
"""Name of the file that ``predict`` writes into the run directory."""


class HeldOutTable(L.Callback):
    """Prints a table of results after held-out episodes; ``lrl validate``, ``test`` and ``predict`` add it."""

    def __init__(self) -> None:
        self._results: EpisodeResults | None = None

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, *_: Any, **__: Any
    ) -> None:
        """Store the results; the table is printed later, after other callbacks have logged their metrics."""
        self._results = outputs if isinstance(outputs, EpisodeResults) else None

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        self._print(trainer)

    on_test_end = on_validation_end

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table, and write all episodes to the run directory."""
        self._print(trainer)
        if self._results is not None and trainer.is_global_zero:
            data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            report = self._results.report(env_id(data.validation_env), _policy_name(trainer))
            write_json(report, Path(trainer.default_root_dir) / PREDICTIONS)

    def _print(self, trainer: L.Trainer) -> None:
        if self._results is None or not trainer.is_global_zero:
            return
        from rich.console import Console

        results, data = self._results, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        seeds = f"seeds {results.seed} to {results.seed + len(results) - 1}"
        where = f"{_policy_name(trainer)} in {env_id(data.validation_env)}"
        exact = trainer.callback_metrics.get("val/exact_success")
        lines = [results.success_rule, "" if exact is None else f"exact success: {float(exact):.4f}"]
        title = f"{where}\n{len(results)} episodes ({seeds}), 95% intervals"
        Console().print(results_table({"policy": results}, title, "\n".join(filter(None, lines))))


def _policy_name(trainer: L.Trainer) -> str:
    return str(trainer.ckpt_path or "policy before training")
