"""GRPO on FrozenLake with the responses of a real vLLM server, as docs/served.md starts it.

Runs configs/frozen_lake/grpo.yaml once per seed, with all weights or an adapter. The server samples every response,
also those of the validation. The report contains the exact success after each validation, the difference between the
log-probabilities of the server and of the trainer in every collection, and the seconds that the server needs to receive
the weights. ``--builtin`` measures the same runs with the built-in decoding loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import yaml

import lrl
from lrl.chat.generator import ServedGenerator
from lrl.chat.vllm import VLLMServer
from lrl.data.run_data import ClockedDataModule
from lrl.evaluation.statistics import headline_seed
from lrl.registry import build
from lrl.training.module import RunModule
from lrl.training.pictures import ExactSuccess

CONFIG = "configs/frozen_lake/grpo.yaml"
ADAPTER_RATE = 1e-3
"""Learning rate of adapters; that of all weights is the one of the configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py served``."""
    parser.add_argument("--url", default="http://localhost:8000", help="address of the server")
    parser.add_argument("--folder", default="/tmp/lrl-weights", help="folder that the server can read")
    parser.add_argument("--model", default="assets/tiny-lm", help="the model that the server was started with")
    parser.add_argument("--dtype", default="float32", help="data type of trainer and server")
    parser.add_argument("--lora_r", type=int, default=32, help="rank of the adapters; 0 trains and sends all weights")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs, with the seeds of lrl run_seeds")
    parser.add_argument("--collections", type=int, default=45, help="collections of each run")
    parser.add_argument("--builtin", action="store_true", help="sample with the built-in decoding loop instead")
    parser.add_argument("--accelerator", default="auto", help="Lightning's accelerator of the trainer")


class Measurements(L.Callback):
    """Measures each collection, and keeps the results of each validation.

    Attributes:
        collections: mean and maximum difference between recorded and recomputed log-probabilities in nats, return and
            seconds of each collection.
        exact_success: exact success after each validation.
    """

    def __init__(self) -> None:
        self.collections: list[dict[str, float]] = []
        self.exact_success: list[float] = []
        self._started = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compare the log-probabilities of the collection with those of the trainer, whose weights are the same."""
        rollout = trainer.datamodule.rollout  # pyright: ignore[reportAttributeAccessIssue]
        sampled = rollout.logprobs if rollout.behaviour_logprobs is None else rollout.behaviour_logprobs
        turns, mask = rollout.turns(), rollout.flatten(rollout.response_mask)
        own = pl_module.policy.in_passes(turns, lambda part: pl_module.policy.evaluate(part).logprobs)
        error = (own - rollout.flatten(sampled)).abs()[mask]
        now = time.perf_counter()
        figures = {
            "mean": float(f"{float(error.mean()):.2g}"),
            "maximum": float(f"{float(error.max()):.2g}"),
            "return": round(float(rollout.episode_returns.mean()), 3),
            "seconds": round(now - self._started, 2),
        }
        self._started = now
        self.collections.append(figures)
        print(
            f"collection {len(self.collections):3d}  difference {figures['mean']:.1e} (at most "
            f"{figures['maximum']:.1e}) nats, return {figures['return']:.3f}, {figures['seconds']:.2f} s",
            flush=True,
        )

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keep the exact success."""
        success = float(trainer.callback_metrics["val/exact_success"])
        self.exact_success.append(round(success, 4))
        print(f"exact success {success:.4f}", flush=True)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with each seed, and yield the report of all runs so far."""
    runs = list[dict[str, Any]]()
    for index in range(options.seeds):
        runs.append(run(options, headline_seed(index)))
        collections = [figures for one in runs for figures in one["collections"]]
        loads = [seconds for one in runs for seconds in one["seconds_per_load"]]
        report: dict[str, Any] = {
            "title": f"GRPO on FrozenLake, sampled by {'the decoding loop' if options.builtin else 'vLLM'}",
            "bar": 0.72,
            "exact_success": [one["exact_success"][-1] for one in runs],
            "mean_difference": statistics.mean(figures["mean"] for figures in collections),
            "largest_difference": max(figures["maximum"] for figures in collections),
            "seconds_per_collection": round(statistics.median(figures["seconds"] for figures in collections), 2),
        }
        if not options.builtin:
            server = VLLMServer(options.url, timeout=10, max_retries=0)
            report |= {
                "seconds_per_synchronisation": statistics.median(loads),
                "server": server.send("/version", method="GET"),
            }
        print(", ".join(f"{name} {value}" for name, value in report.items()), flush=True)
        yield report | {"runs": runs}


def run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train with one seed, and return its figures."""
    loads, content = list[float](), yaml.safe_load(Path(CONFIG).read_text())
    model, data, trainer = content["model"], content["data"], content["trainer"]
    policy, language_model = model["init_args"]["policy"]["init_args"], {"name": options.model, "dtype": options.dtype}
    policy["language_model"] = language_model
    if options.lora_r:
        language_model["lora"] = {"r": options.lora_r, "alpha": 2 * options.lora_r}
        model["init_args"]["optimizer"]["lr"] = ADAPTER_RATE
    if not options.builtin:
        arguments = {"url": options.url, "folder": options.folder}
        policy["generator"] = {"class_path": "ServedGenerator", "init_args": arguments}
    data["init_args"]["seed"] = seed
    L.seed_everything(seed)
    module = build(RunModule, model)
    if not options.builtin:
        measure_loads(module.policy.generator, loads)
    measurements, started = Measurements(), time.perf_counter()
    lrl.train(
        module,
        build(ClockedDataModule, data),
        max_epochs=options.collections,
        callbacks=[ExactSuccess(), measurements],
        check_val_every_n_epoch=min(trainer["check_val_every_n_epoch"], options.collections),
        gradient_clip_val=trainer["gradient_clip_val"],
        accelerator=options.accelerator,
    )
    minutes = round((time.perf_counter() - started) / 60, 2)
    figures = {"seed": seed, "minutes": minutes, "exact_success": measurements.exact_success}
    return figures | {"seconds_per_load": loads, "collections": measurements.collections}


def measure_loads(generator: ServedGenerator, loads: list[float]) -> None:
    """Add to ``loads`` the seconds of each synchronisation, with the writing of the weights."""
    publish = generator._publish

    def timed() -> None:
        start = time.perf_counter()
        publish()
        loads.append(round(time.perf_counter() - start, 3))

    generator._publish = timed
