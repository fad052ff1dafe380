"""A profile of a language model with a Gaussian head: env steps per second of its rollouts, and one update.

The settings are those of ``configs/half_cheetah/trpo_tiny.yaml``, without Lightning, with the trunk frozen and trained.
Collections of 16 environments and 128 steps alternate with the parts of a TRPO update of the actor, which are timed
separately, without the fit of the critic and the statistics of whitening. Results are medians over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CONFIG = "configs/half_cheetah/trpo_tiny.yaml"
ENVS, STEPS = 16, 2048


class Stopwatch:
    """Measures the total seconds of named parts of the program."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part; also decorates functions."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Measure a method from now on."""
        setattr(owner, method, self.timed(part)(getattr(owner, method)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py head``."""
    parser.add_argument("--repeats", type=int, default=5)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a frozen and a trained trunk."""
    title = "Where a language model with a Gaussian head spends its time on HalfCheetah"
    yield {
        "title": title,
        "trunk": {name: _figures(options.repeats, name == "frozen") for name in ("frozen", "trained")},
    }


def _figures(repeats: int, frozen: bool) -> dict[str, Any]:
    rollouts, updates = _measure(repeats, frozen)
    rollout, update = ({part: _median(seconds) for part, seconds in each.items()} for each in (rollouts, updates))
    rates = sorted(round(STEPS / seconds, 1) for seconds in rollouts["all"])
    kind = "frozen" if frozen else "trained"
    print(f"trunk {kind}, rollouts: {statistics.median(rates):.0f} env steps/s ({rates[0]:.0f} to {rates[-1]:.0f})")
    for name, parts in ((f"rollout of {STEPS} steps", rollout), ("update on them", update)):
        print(f"  {name}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items()))
    return {"env_steps_per_second": rates, "rollout_seconds": rollout, "update_seconds": update}


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 3)


def _measure(repeats: int, frozen: bool) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each part of every rollout and every update."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from lrl.functional.trust_region import conjugate_gradient
    from lrl.training.collect import CollectionPlan

    module, envs, collector = _built(frozen)
    watch, rollouts, updates = Stopwatch(), defaultdict(list), defaultdict(list)
    watch.watch(module.policy, "_text", "writing and tokenising observations")
    watch.watch(module.policy, "_states", "trunk")
    watch.watch(module.policy, "_head_outputs", "head")
    watch.watch(envs, "step", "environment")
    for repeat in range(repeats + 1):  # the first warms up
        module.policy.settle_statistics(repeat)
        plan = CollectionPlan(seed=0, collection=repeat, num_groups=ENVS, group_size=1, num_steps=STEPS // ENVS)
        watch.seconds.clear()
        started = time.perf_counter()
        rollout = collector.collect(plan)
        whole = time.perf_counter() - started
        parts = {"all": whole, **watch.seconds, "sampling, values and the rest": whole - sum(watch.seconds.values())}

        batch, chunk = module.prepare(rollout), module.chunk_size
        module.policy.learn_statistics(batch, repeat)
        watch.seconds.clear()
        with sdpa_kernel(SDPBackend.MATH):
            weights, pieces = module.actor_parameters(), batch.split(chunk)
            with watch.timed("surrogate, its gradient, the old policy"):
                _, gradient, old = module._surrogate_and_gradient(pieces, weights, float(len(batch)))
            with watch.timed("graph of Fisher's products"):
                product = module._fisher_product(batch, weights)
            with watch.timed("conjugate gradient"):
                conjugate_gradient(product, gradient, module.natural_gradient.cg_iterations)
            with watch.timed("one look of the line search"):
                module._surrogate_and_kl(pieces, old, float(len(batch)))
        spent = {part: watch.seconds[part] for part in watch.seconds if part not in parts}
        for seconds, seen in ((rollouts, parts), (updates, spent)):
            for part, value in seen.items() if repeat else ():
                seconds[part].append(value)
    envs.close()
    return rollouts, updates


def _built(frozen: bool) -> tuple[Any, Any, Any]:
    """Return the module, the environments and the collector of the config."""
    from lrl.algorithms.trpo import TRPOModule
    from lrl.envs.factory import EnvFactory
    from lrl.registry import build
    from lrl.training.collect import CollectionPlan, FixedHorizonCollector

    content = yaml.safe_load(Path(CONFIG).read_text())
    content["model"]["init_args"]["policy"]["init_args"] |= {"freeze_trunk": frozen, "init_seed": 0}
    module = build(TRPOModule, content["model"])
    factory = build(EnvFactory, content["data"]["init_args"]["env"])
    module.policy.connect(factory.codec)
    module.policy.connect_spaces(*factory.spaces)
    module.policy.configure()
    envs, plan = factory.make(ENVS, None), CollectionPlan(seed=0, collection=0, num_groups=ENVS, group_size=1)
    return module, envs, FixedHorizonCollector(module.policy, envs, 0, plan.env, ENVS)
