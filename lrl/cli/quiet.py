"""Progress bars, and filters for tips and deprecation warnings of libraries."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def silence_libraries() -> None:
    """Silence known messages of libraries; errors and all other warnings are still shown."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warns after a fork
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame prints a greeting
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the optional backend of tensorboard prints a banner
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")  # wandb prints its folder, which is the run directory
    for name, level in {
        "lightning.pytorch": logging.WARNING,  # tips, and "GPU available: False"
        "lightning.pytorch.callbacks": logging.INFO,  # output that the user requests, such as a model summary
        "lightning.fabric": logging.WARNING,  # "Seed set to 0"
        "bitsandbytes": logging.ERROR,  # recommends optional kernels on import
        "httpx": logging.WARNING,  # one line per request
        "httpx2": logging.WARNING,  # also one line per request, from the package openai
        "absl": logging.ERROR,  # dm_control logs deprecation warnings of MuJoCo
    }.items():
        logging.getLogger(name).setLevel(level)
    # LightningCLI 2.6.6 still calls functions that jsonargparse 4.49 deprecated (Lightning #21906).
    warnings.filterwarnings("ignore", module="jsonargparse.*")
    warnings.filterwarnings("ignore", message=".*jsonargparse.*", category=DeprecationWarning)
    # The rollout buffer is in this process, so workers of the data loader would be idle.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # The scheduler steps after every minibatch, also where ``target_kl`` skips the optimizer step.
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    # Lightning 2.6.6 builds a tree spec in a way that torch deprecates.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # Lightning compares the log interval with the number of batches, but metrics are logged once per collection.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    # Checkpoints and metrics are written to the run directory, where lrl has already written files (``command.txt``).
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    warnings.filterwarnings("ignore", message=".*Experiment logs directory .* exists and is not empty.*")
    # dm_control looks for a display when it is imported, and works without one.
    warnings.filterwarnings("ignore", message=".*DISPLAY environment variable.*")


# A progress bar on standard error.


@contextmanager
def progress_bar(name: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a progress bar while the block runs, if standard error is a terminal.

    Args:
        name: the bar's label.
        total: number of steps.
        shown: whether to show the bar; with several devices, only the process of the first one should show it.

    Yields:
        A function that advances the bar by one step.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
