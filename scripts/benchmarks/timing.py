"""Functions that benchmarks share: timing of two implementations, trainers of TRL, and whole training runs."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PrinterCallback, TrainerCallback

from lrl.cli.run_directory import commit
from lrl.lm.attention import SOUND

Measure = Callable[[], float]
"""Runs an implementation and returns its rate in units per second."""


def now() -> float:
    """Return the time in seconds, once all work on the GPU has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, and ``--precision`` of the trainer of lrl."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default=None, help="precision of lrl's trainer, such as bf16-mixed")


def trainer_settings(options: argparse.Namespace, max_grad_norm: float) -> dict[str, Any]:
    """Return settings with which lrl trains on the device of the options, without validation."""
    accelerator = "gpu" if options.device == "cuda" else "cpu"
    precision = {} if options.precision is None else {"precision": options.precision}
    return {"accelerator": accelerator, "limit_val_batches": 0, "gradient_clip_val": max_grad_norm, **precision}


def configure_on(device: str, module: Any) -> None:
    """Configure a language model, a policy or a module on a device, as the trainer of Lightning does."""
    with torch.device(device):
        (module.configure_model if hasattr(module, "configure_model") else module.configure)()
    module.to(device)


def alternate(ours: Measure, theirs: Measure, repeats: int, warm: bool = False) -> tuple[list[float], list[float]]:
    """Measure two implementations alternately, so that other load on the machine affects both.

    Args:
        ours: measures lrl.
        theirs: measures the other implementation.
        repeats: number of measurements of each; the order changes from repeat to repeat.
        warm: whether both have run before; otherwise both run once first, without being measured.

    Returns:
        The rates of both.
    """
    for warm_up in () if warm else (ours, theirs):
        warm_up()
    rates: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for which in ((0, 1), (1, 0))[repeat % 2]:
            rates[which].append((ours, theirs)[which]())
    return rates


def compare(
    name: str, unit: str, ours: Measure, theirs: Measure, repeats: int, warm: bool = False, **notes: Any
) -> dict[str, Any]:
    """Measure two implementations with :func:`alternate`, and return a row of the table for :func:`compared`.

    Args:
        name: name of the row.
        unit: unit of what a rate counts per second.
        ours: measures lrl.
        theirs: measures the other implementation.
        repeats: number of measurements of each.
        warm: whether both have run before.
        notes: further entries of the row.
    """
    return compared_rates(name, unit, alternate(ours, theirs, repeats, warm), **notes)


def compared_rates(name: str, unit: str, rates: tuple[list[float], list[float]], **notes: Any) -> dict[str, Any]:
    """Return a row of the table for :func:`compared` from the rates of both implementations; see :func:`compare`."""
    ratios = [own / other for own, other in zip(*rates, strict=True)]
    ratio = statistics.median(rates[0]) / statistics.median(rates[1])
    row = {"name": name, "unit": f"{unit}/s", "ratio": ratio, "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return row | {"ours": rates[0], "theirs": rates[1]} | notes


def compared(title: str, bar: float | None, rows: list[dict[str, Any]], **notes: Any) -> dict[str, Any]:
    """Print the table of comparisons, and return the report for the JSON file.

    Args:
        title: title of the report.
        bar: ratio that lrl should reach; None if there is none.
        rows: rows of the table, see :func:`compare`.
        notes: further entries of the report.
    """
    print(f"{'':36s} {'ours':>10s} {'theirs':>10s} {'':14s} {'ratio':>7s}  (smallest to largest of the repeats)")
    for row in rows:
        ours, theirs = statistics.median(row["ours"]), statistics.median(row["theirs"])
        spread = f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        print(f"{row['name']:36s} {ours:10.1f} {theirs:10.1f} {row['unit']:14s} {row['ratio']:6.2f}x  {spread}")
    if bar is not None:
        print(f"bar: {bar:g}x")
    return {"bar": bar, "title": title, **notes, "comparisons": rows}


def provenance() -> dict[str, Any]:
    """Return the command, the commit and the machine, on which the figures depend."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    machine = {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {"command": "python " + shlex.join(sys.argv), "commit": commit(), "machine": machine}


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are allocated inside a ``with`` block, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and count its results."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def trained(model: Any) -> list[Tensor]:
    """Return the trained weights: all weights, or the weights of adapters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def gradient(loss: Tensor, model: Any) -> Tensor:
    """Return the gradient of a loss with respect to all trained weights, flat."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained(model))])


LENGTH = 0.1
"""Maximum additional distance from 1, compared with TRL, of the length of a gradient in 16 bits."""


def check_gradients(grads: Sequence[Tensor], exact: Tensor) -> dict[str, float]:
    """Compare the gradients of lrl and of TRL in 16 bits with the gradient in float32.

    Args:
        grads: both gradients, flat.
        exact: the gradient in float32, flat.

    Returns:
        The relative errors of both, and their lengths along the gradient in float32.

    Raises:
        AssertionError: If the error of lrl is more than :data:`SOUND` times that of TRL, or if its length differs from
            1 by more than the length of TRL's gradient and :data:`LENGTH`.
    """
    errors = [float((grad.float() - exact).norm() / exact.norm()) for grad in grads]
    assert errors[0] <= SOUND * errors[1], f"the gradient of lrl is {errors[0]:.3f} from float32, TRL's {errors[1]:.3f}"
    lengths = [float(grad.float() @ exact / exact.square().sum()) for grad in grads]
    message = f"along the gradient in float32, lrl's has the length {lengths[0]:.3f}, TRL's {lengths[1]:.3f}"
    assert abs(lengths[0] - 1) <= abs(lengths[1] - 1) + LENGTH, message
    sides = zip(("ours", "theirs"), errors, lengths, strict=True)
    return {
        f"gradient_{what}_{side}": value
        for side, error, length in sides
        for what, value in (("error", error), ("length", length))
    }


def trl_settings(steps: int, lr: float, max_grad_norm: float, device: str = "cpu") -> dict[str, Any]:
    """Return settings with which TRL takes ``steps`` timed steps after a first one, without logging and saving."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant",
        "max_steps": steps + 1,
        "learning_rate": lr,
        "max_grad_norm": max_grad_norm,
    }


class TRLClock(TrainerCallback):
    """Records the time and ``count(trainer)`` at the end of each step of a trainer of TRL."""

    def __init__(self, count: Callable[[Any], float]) -> None:
        self.count = count
        self.times: list[float] = []
        self.counts: list[float] = []

    def train(self, trainer: Any) -> float:
        """Run the trainer, and return the seconds from the end of the first step to the end of the last."""
        self.trainer, self.times, self.counts = trainer, [], []
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return self.times[-1] - self.times[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record both."""
        self.times.append(now())
        self.counts.append(self.count(self.trainer))


class WholeRuns(ABC):
    """Whole training runs with equal settings of ``lrl fit`` and of another library, each with a seed of its own.

    Args:
        config: configuration of the runs of lrl, including its parsing, logging and checkpoints.
        env_steps: number of environment steps of both, rounded up to whole collections.
        figure: column of ``metrics.csv`` whose last value is kept; held-out episodes are played only for ``val/...``.
    """

    def __init__(self, config: str, env_steps: int, figure: str) -> None:
        self.config, self.figure = config, figure
        content = yaml.safe_load(Path(config).read_text())
        self.model: dict[str, Any] = content["model"]["init_args"]
        self.data: dict[str, Any] = content["data"]["init_args"]
        self.trainer: dict[str, Any] = content["trainer"]
        per_collection = self.data["num_envs"] * self.data["num_steps"]
        self.collections = -(-env_steps // per_collection)
        self.steps = self.collections * per_collection
        self.returns: dict[str, list[float]] = {"ours": [], "theirs": []}
        self.training_rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        """Environment steps per second of training alone: ``Trainer.fit`` here, and what :meth:`train` says there."""

    def trained(self, side: str, started: float) -> None:
        """Record that the training of a side, which started at a time of ``time.perf_counter``, has ended."""
        self.training_rates[side].append(self.steps / (time.perf_counter() - started))

    def ours(self) -> float:
        """Return environment steps per second of ``lrl fit``."""
        from lrl.cli.main import LRLCLI

        runs = self

        class TimedCLI(LRLCLI):
            """Records the time of ``Trainer.fit``."""

            def before_fit(self) -> None:
                """Start the clock."""
                self.started = time.perf_counter()

            def after_fit(self) -> None:
                """Stop the clock."""
                runs.trained("ours", self.started)
                super().after_fit()

        with tempfile.TemporaryDirectory() as folder:
            changes = {
                "seed_everything": len(self.returns["ours"]),
                "data.init_args.max_env_steps": self.steps,
                "trainer.max_epochs": self.collections,
                "trainer.check_val_every_n_epoch": self.collections + (not self.figure.startswith("val/")),
                "run_directory": f"{folder}/run",
            }
            os.environ.pop("LRL_RUN_DIRECTORY", None)  # set by the previous run
            started = time.perf_counter()
            TimedCLI(["fit", "--config", self.config, *(f"--{name}={value}" for name, value in changes.items())])
            rate = self.steps / (time.perf_counter() - started)
            with Path(folder, "run/metrics.csv").open() as file:
                found = [row[self.figure] for row in csv.DictReader(file) if row.get(self.figure)]
        self.returns["ours"].append(float(found[-1]))
        return rate

    def theirs(self) -> float:
        """Return environment steps per second of the other library."""
        started = time.perf_counter()
        self.returns["theirs"].append(self.train(len(self.returns["theirs"])))
        return self.steps / (time.perf_counter() - started)

    @abstractmethod
    def train(self, seed: int) -> float:
        """Train with the other library, call :meth:`trained`, and return the return that is kept."""
