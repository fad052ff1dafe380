"""Keep libraries' advertising and deprecation notes off the user's terminal; each entry says whose and why."""

from __future__ import annotations

import logging
import os
import warnings


def silence_libraries() -> None:
    """Switch off what is known to be noise, by name. Errors and all other warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warns after a fork
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame greets
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorboard's optional backend introduces itself
    if os.environ.get("WANDB_MODE") == "offline":
        os.environ.setdefault("WANDB_SILENT", "true")  # wandb says where it writes, which is the run directory
    for name, level in {
        "lightning.pytorch": logging.WARNING,  # tips, and "GPU available: False"
        "lightning.fabric": logging.WARNING,  # "Seed set to 0"
        "bitsandbytes": logging.ERROR,  # advises optional kernels on import
        "httpx": logging.WARNING,  # one line per request
        "absl": logging.ERROR,  # dm_control hands on what MuJoCo deprecates
    }.items():
        logging.getLogger(name).setLevel(level)
    # LightningCLI 2.6.6 still calls what jsonargparse 4.49 deprecated (Lightning #21906).
    warnings.filterwarnings("ignore", module="jsonargparse.*")
    warnings.filterwarnings("ignore", message=".*jsonargparse.*", category=DeprecationWarning)
    # The buffer lives in this process: there is nothing for loader workers to do.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # The learning rate follows optimiser steps, of which a skipped part of a collection makes none.
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    # Lightning 2.6.6 builds a tree spec in a way that torch deprecates.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # Lightning compares the log interval with the number of batches; metrics are logged once per collection.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    # The run directory is where Lightning is told to write.
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
    # dm_control looks for a screen when it is imported, and does without.
    warnings.filterwarnings("ignore", message=".*DISPLAY environment variable.*")
