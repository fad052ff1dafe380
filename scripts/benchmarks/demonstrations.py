"""Reading demonstrations: rows per second from a Minari data set (HDF5) to batches of tokens, and the peak memory.

A data set with the shape of HalfCheetah (17 and 6 random numbers per row, episodes of 1,000 rows) is written to a
temporary folder. Each way of reading runs in its own process, whose peak memory is measured: ``encoded`` formats and
tokenises every row, ``written`` does that once and writes the ids to files, and ``cached`` reads the files. Rows are
shuffled and batches are padded as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lrl.codecs.numbers import NumberFormat
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.minari import MinariDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_storage import DatasetWriter
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

DATASET = "lrl/synthetic-cheetah-v0"
"""Minari's name of the data set."""
EPISODE = 1000
"""Number of rows of an episode."""
BARS = {"encoded rows/s": 5_000, "cached rows/s": 50_000, "peak memory GiB": 2}
"""Figures that should be reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py demonstrations``."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows of the data set")
    parser.add_argument("--encoded_rows", type=int, default=200_000, help="maximum number of rows read without files")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--numbers", choices=("decimals", "integers"), default="decimals")
    parser.add_argument("--model", default="assets/tiny-lm", help="model whose tokenizer is used")
    parser.add_argument("--way", choices=("encoded", "written", "cached"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)


def write_dataset(rows: int) -> None:
    """Write the data set, ten episodes at a time."""
    native = GymnasiumEnvs("HalfCheetah-v5").make_native()
    rng, spec = np.random.default_rng(0), native.unwrapped.spec
    with DatasetWriter(DATASET, native.observation_space, native.action_space, spec) as writer:
        for start in range(0, rows, 10 * EPISODE):
            count = min(10, -(-(rows - start) // EPISODE))
            writer.add([_episode(rng, min(EPISODE, rows - start - number * EPISODE)) for number in range(count)])
        writer.finish({})


def _episode(rng: np.random.Generator, steps: int) -> dict[str, Any]:
    return {
        "observations": list(rng.normal(scale=3.0, size=(steps + 1, 17))),
        "actions": list(rng.uniform(-1, 1, (steps, 6)).astype(np.float32)),
        "rewards": list(rng.normal(size=steps)),
        "terminations": [False] * steps,
        "truncations": [False] * (steps - 1) + [True],
        "seed": 0,
        "context": None,
        "success": False,
        "random_steps": [],
    }


def read(options: argparse.Namespace) -> dict[str, float]:
    """Read batches in one of the ways, and return seconds to the first batch, rows per second and peak memory."""
    cache = None if options.way == "encoded" else str(options.folder / "tokens")
    env = GymnasiumEnvs("HalfCheetah-v5", numbers=NumberFormat(kind=options.numbers))
    policy = TextPolicy(
        LanguageModelConfig(name=options.model), PromptTemplate(response_format="direct"), SamplingConfig()
    )
    policy.configure()
    policy.connect(env.codec)
    data = DemonstrationsDataModule(
        MinariDemonstrations(DATASET, split="all"), env, options.batch_size, token_cache=cache
    )
    data.connect(policy)
    started = time.perf_counter()
    data.batch(0, 0)
    first, cpu = time.perf_counter(), time.process_time()
    batches = data.num_batches()
    if options.way == "encoded":
        batches = min(batches, options.encoded_rows // options.batch_size)
    tokens = sum(int(data.batch(0, index).inputs["prompt_mask"].sum()) for index in range(1, batches))
    seconds = time.perf_counter() - first
    cpu_seconds = max(time.process_time() - cpu, 1e-3)  # some systems report 0 for a few rows
    rows, status = (batches - 1) * options.batch_size, Path("/proc/self/status").read_text()
    return {
        "rows": rows,
        "rows_per_second": rows / seconds,
        "rows_per_cpu_second": rows / cpu_seconds,
        "seconds_to_first_batch": first - started,
        "prompt_tokens_per_row": tokens / rows,
        "peak_memory_gib": int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 2**20,  # mapped files included
    }


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the data set, and read it in three ways."""
    if options.way is not None:
        print(json.dumps(read(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        write_dataset(options.rows)
        load = [os.getloadavg()[0]]
        figures = {}
        for way in ("encoded", "written", "cached"):
            command = [sys.executable, *sys.argv, "--way", way, "--folder", folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            one = figures[way] = json.loads(output.splitlines()[-1])
            load.append(os.getloadavg()[0])
            print(
                f"{way:8s} {one['rows_per_second']:8.0f} rows/s, {one['rows_per_cpu_second']:8.0f} per CPU second, "
                f"{one['seconds_to_first_batch']:8.2f} s to the first batch, {one['peak_memory_gib']:5.2f} GiB, "
                f"{one['prompt_tokens_per_row']:.0f} prompt tokens per row"
            )
    print("bars: " + ", ".join(f"{name} {bar}" for name, bar in BARS.items()) + f"; load {load}")
    yield {"bars": BARS, "load": load, "rows": options.rows, "ways": figures}
