"""Means and maxima of metrics over a collection and over ranks, and what loggers get."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from lrl.faults import appending, writing
from lrl.files import require
from lrl.functional.distributed import all_gather_objects
from lrl.registry import register
from lrl.types import Derive, Metrics

State = dict[str, tuple[float, int]]
"""For each name the sum and the number of recorded values, or the maximum and 0; empty if nothing was recorded."""
_Record = tuple[str, Tensor, int]
"""Name, values ``(1, value)`` and their number, or name, values and 0 for a maximum."""
_Underived = tuple[Derive, Tensor]
"""A function and its argument ``(row, value)``, from which it computes metrics."""

_PENDING = 500
"""Maximum number of records whose values stay on their device; they are read together, because reading waits for it."""
_SMALL = 4096
"""Maximum size of a record that is kept as it is and reduced together with others, because a call takes longer than the
sum itself."""


class MetricMeans:
    """Computes means or maxima by name, over all ranks, of the values recorded since the last :meth:`flush`.

    All recorded values have the same weight in a mean, whatever their rank and minibatch.
    """

    def __init__(self) -> None:
        self._totals: State = {}
        self._recorded: list[_Record | _Underived] = []
        """Records since the last :meth:`settle`."""
        self._settled: list[_Record | _Underived] = []
        """Settled records whose values have not been read from their device yet."""

    def record(self, name: str, values: Tensor) -> None:
        """Record values of any shape for a mean; they take effect at the next :meth:`settle`.

        They must not be changed in place afterwards.
        """
        self._record(name, values, values.numel())

    def record_maximum(self, name: str, values: Tensor) -> None:
        """Record values of any shape for a maximum; they take effect at the next :meth:`settle`.

        They must not be changed in place afterwards.
        """
        self._record(name, values, 0)

    def record_derived(self, derive: Derive, values: Tensor) -> None:
        """Record the metrics of ``derive(values)``, which is called once for records of several minibatches."""
        if values.shape[1] > _SMALL:
            for name, metric in derive(values).items():
                self._record(name, metric, 0 if name.endswith("_max") else metric.numel())
        elif values.numel():
            self._recorded.append((derive, values.detach()))

    def _record(self, name: str, values: Tensor, count: int) -> None:
        if values.numel():
            values = values.detach().reshape(1, -1)
            small = values.shape[1] <= _SMALL
            self._recorded.append((name, values if small else _reduced(values, count)[:, None], count))

    def settle(self) -> None:
        """Let the recorded values take effect."""
        self._settled.extend(self._recorded)
        self._recorded.clear()
        if len(self._settled) > _PENDING:
            self.state()

    def drop_unsettled(self) -> None:
        """Drop the records since the last :meth:`settle`."""
        self._recorded.clear()

    def state(self) -> State:
        """Return the settled records of this rank."""
        settled, self._settled = _derived(self._settled), []
        device = next((values.device for _, values, _ in settled if values.device.type != "cpu"), "cpu")
        alike: dict[Any, list[int]] = {}
        for index, (name, values, count) in enumerate(settled):
            alike.setdefault((name, values.shape, values.dtype, values.device, count), []).append(index)
        reduced = [
            _reduced(torch.cat([settled[index][1] for index in same]), settled[same[0]][2]).to(device)
            for same in alike.values()
        ]
        numbers = torch.cat(reduced).tolist() if reduced else []
        positions = [index for same in alike.values() for index in same]
        for index, value in sorted(zip(positions, numbers, strict=True)):  # in the order in which they were recorded
            _add(self._totals, settled[index][0], value, settled[index][2])
        return dict(self._totals)

    def load(self, state: State) -> None:
        """Restore the result of :meth:`state`."""
        self.reset()
        self._totals.update(state)

    def flush(self) -> dict[str, float]:
        """Return the means and maxima, and reset them; all ranks must call it, even if they recorded nothing."""
        self.settle()
        totals: State = {}
        for state in all_gather_objects(self.state()):
            for name, (value, count) in state.items():
                _add(totals, name, value, count)
        self.reset()
        return {name: value / max(count, 1) for name, (value, count) in sorted(totals.items())}

    def reset(self) -> None:
        """Drop all records."""
        for records in (self._totals, self._recorded, self._settled):
            records.clear()


def derived(metrics: Metrics) -> dict[str, Tensor]:
    """Return the metrics of a :class:`~lrl.types.TokenLoss` by name."""
    out = dict[str, Tensor]()
    for name, values in metrics.items():
        out.update({name: values} if isinstance(name, str) else name(values))
    return out


def _derived(records: list[_Record | _Underived]) -> list[_Record]:
    """Replace each function with its argument by records of the metrics; equal shapes are computed together."""
    out: list[list[_Record]] = [[record] if len(record) == 3 else [] for record in records]
    alike: dict[Any, list[int]] = {}
    for index, (derive, values, *_) in enumerate(records):
        if not out[index]:
            alike.setdefault((derive, values.shape, values.dtype, values.device), []).append(index)
    for (derive, shape, *_), same in alike.items():
        for name, metric in derive(torch.cat([records[index][1] for index in same], dim=1)).items():
            count = 0 if name.endswith("_max") else shape[1]
            for index, values in zip(same, metric.reshape(len(same), 1, -1), strict=True):
                out[index].append((name, values, count))
    return [record for group in out for record in group]


def _reduced(values: Tensor, count: int) -> Tensor:
    """Return the sum of each row, or, if ``count`` is 0, the maximum; float64 ``(row,)`` of values ``(row, value)``."""
    return values.sum(1, dtype=torch.float64) if count else values.amax(1).double()


def _add(totals: State, name: str, value: float, count: int) -> None:
    """Add a sum of ``count`` values to the total of a name, or, if ``count`` is 0, a maximum."""
    if count == 0:
        totals[name] = max(totals.get(name, (value, 0))[0], value), 0
    else:
        total, number = totals.get(name, (0.0, 0))
        totals[name] = total + value, number + count


@register
class TrackioLogger(Logger):
    """Logs metrics and the configuration to trackio, which stores them on this machine; ``trackio show`` draws them.

    The folder is that of trackio, which the environment variable ``TRACKIO_DIR`` changes. A resumed run is a new run of
    trackio.

    Args:
        project: name of the project.
        name: name of the run; ``lrl fit`` takes that of the run directory.
        space_id: a Space of Hugging Face that gets the metrics instead; None stores them on this machine.

    Raises:
        ValueError: If trackio is not installed.
    """

    def __init__(self, project: str = "lrl", name: str | None = None, space_id: str | None = None) -> None:
        super().__init__()
        require("trackio", "trackio", "trainer.logger TrackioLogger")
        self._project, self._name, self._space_id = project, name, space_id
        self._config: dict[str, Any] = {}
        self._run: Any = None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Name of the run."""
        return self._name

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Store the configuration, which trackio gets with the first metrics."""
        self._config = dict(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics at a step."""
        if self._run is None:
            import trackio  # pyright: ignore[reportMissingImports]

            with contextlib.redirect_stdout(io.StringIO()):  # it prints commands on seven lines
                self._run = trackio.init(
                    self._project,
                    self._name,
                    space_id=self._space_id,
                    config=self._config,
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        self._run.log(dict(metrics), step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what has not been written yet; a later stage of the trainer begins a new run."""
        if self._run is not None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._run = None
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.finish()


def log_row(logger: Logger, row: Mapping[str, float], step: int) -> None:
    """Log a row of metrics; TensorBoard stores the whole row as one event.

    Lightning's logger writes one event per metric, which takes 3% of the time of a run with a small network.

    Args:
        logger: a logger of the trainer.
        row: metrics by name.
        step: step of the row.
    """
    if rank_zero_only.rank != 0:
        logger.log_metrics(dict(row), step)  # loggers ignore the other ranks themselves
    elif type(logger) is CSVLogger:
        _log_csv_row(logger, row, step)
    elif type(logger) is TensorBoardLogger:
        from torch.utils.tensorboard.summary import Summary  # pyright: ignore[reportAttributeAccessIssue]

        prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
        values = [Summary.Value(tag=prefix + name, simple_value=value) for name, value in row.items()]
        with writing("a row of metrics in", logger.log_dir):
            logger.experiment._get_file_writer().add_summary(Summary(value=values), step)
    else:
        logger.log_metrics(dict(row), step)


def _log_csv_row(logger: CSVLogger, row: Mapping[str, float], step: int) -> None:
    """Log a row of metrics to a CSV file, which keeps its earlier rows if the disk is full.

    Lightning writes the whole file again if the row has a new column.
    """
    writer, file = logger.experiment, Path(logger.log_dir, "metrics.csv")
    kept = file.with_name(".metrics.csv.kept")
    with appending("a row of metrics in", file):
        copied = None
        try:
            if file.exists() and not {*row, "step"} <= {*writer.metrics_keys}:
                copied = shutil.copyfile(file, kept)
            logger.log_metrics(dict(row), step)
        except OSError:
            writer.metrics.clear()  # otherwise the logger tries to write them again when the run ends
            if copied is not None:
                os.replace(copied, file)
            raise
        finally:
            kept.unlink(missing_ok=True)


def log_transcripts(loggers: Iterable[Logger], text: str, step: int) -> None:
    """Log episodes as text to TensorBoard, and as a table to Weights & Biases; other loggers get nothing.

    Args:
        loggers: loggers of the trainer.
        text: the episodes.
        step: index of the collection; the table counts collections from 1, like the text.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("transcripts", indent(text, "    "), step)  # an indented block of Markdown
        elif isinstance(logger, WandbLogger):
            logger.log_table("transcripts", columns=["collection", "episode"], data=[[step + 1, text]])


def log_figure(loggers: Iterable[Logger], path: Path, step: int) -> None:
    """Log a PNG file to TensorBoard and Weights & Biases; other loggers get nothing.

    Args:
        loggers: loggers of the trainer.
        path: the file.
        step: step of the picture in TensorBoard.
    """
    from matplotlib.image import imread

    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(path.stem, imread(path)[..., :3], step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(path.stem, images=[str(path)])
