"""Commands as a shell would start them, run in this process: one of its own would import torch and Lightning again."""

import contextlib
import io
import logging
import os
import random
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

LOGGERS = (None, "lrl", "lrl.trace", "py.warnings", "lightning.pytorch", "lightning.fabric", "bitsandbytes", "absl")
"""Those that commands turn up, down or into a file."""
SMALL = {"batch_size": 8, "num_groups": 4, "group_size": 3, "num_steps": 4, "max_turns": 4}
"""Largest sizes of a shortened run."""


class Finished(NamedTuple):
    """Result of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_command(command, **environment):
    """Run ``lrl ...``, ``python -m lrl ...`` or ``python scripts/....py ...`` as a shell would.

    An error that a process would die of is its traceback in ``stderr`` and exit status 1.
    """
    words = subprocess.run(["bash", "-c", rf"printf '%s\0' {command}"], capture_output=True, text=True, check=True)
    return run_words(words.stdout.split("\0")[:-1], **environment)


def shorten(cli):
    """Reduce the sizes of a data module, which are many thousand turns in some experiments, and of pictures."""
    for name, most in SMALL.items():
        if hasattr(cli.datamodule, name) and (name == "max_turns" or getattr(cli.datamodule, name) is not None):
            setattr(cli.datamodule, name, min(getattr(cli.datamodule, name) or most, most))
    for callback in cli.trainer.callbacks:
        if hasattr(callback, "samples"):  # responses per state, whose frequencies are drawn
            callback.samples = 2


def run_words(words, **environment):
    """Run a command that is given as words, like :func:`run_command`."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with _as_if_fresh(environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            _main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            status = 1
            traceback.print_exc()
    return Finished(status, out.getvalue(), err.getvalue())


def _main(words):
    if Path(words[0]).is_absolute():  # a console script
        sys.argv = list(words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        finally:
            sys.modules.pop("lrl.__main__", None)  # runpy warns of a module that another command runs again
        return
    if words[0] == "lrl":
        words = ["python", "-m", *words]
    python, first, *rest = words
    assert python == "python"
    if first == "-m":
        sys.argv = rest
        runpy.run_module(f"{rest[0]}.__main__", run_name="__main__", alter_sys=False)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent.resolve()))
        runpy.run_path(first, run_name="__main__")


@contextlib.contextmanager
def _as_if_fresh(environment):
    """No run directory, Python's own filters; afterwards variables, loggers and generators are what they were."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    kept = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    numbers, pythons = np.random.get_state(), random.getstate()
    clean = {name: value for name, value in os.environ.items() if name != "LRL_RUN_DIRECTORY"}
    with (
        mock.patch.dict(os.environ, clean | environment, clear=True),
        mock.patch.multiple(sys, argv=sys.argv, path=list(sys.path), stdin=io.StringIO("")),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        shown = warnings.showwarning
        logging.captureWarnings(False)  # what a test before left on would not be turned on by this command
        warnings.showwarning = shown
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            np.random.set_state(numbers)
            random.setstate(pythons)
            for logger, level, propagate, handlers in kept:
                for opened in set(logger.handlers) - set(handlers):
                    opened.close()
                logger.setLevel(level)
                logger.propagate, logger.handlers[:] = propagate, handlers
