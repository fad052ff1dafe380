"""The table of results in short: one row per task, with a random policy, the best one, and what was trained.

A row is an entry of :data:`HEADLINES`. All numbers are computed or read from files of ``assets/results``; a cell of
None is shown as "not run".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.report import markdown_table
from results.counts import HEADING, counts_text
from results.summaries import final_values

Read = Callable[[Callable[[str], dict[str, Any]]], str]
"""Function that returns the text of a cell, given a function that returns a kept result by its name."""


def trained(name: str) -> Read:
    """Return the cell of runs: the mean of their final values, and the number of seeds."""

    def read(kept: Callable[[str], dict[str, Any]]) -> str:
        values = final_values(kept(name))
        return f"{rounded(float(values.mean()))} ({len(values)} seed{'s' * (len(values) > 1)})"

    return read


def baseline(name: str, label: str) -> Read:
    """Return the cell of a baseline that is kept with runs, for example the expert whose actions they clone."""
    return lambda kept: rounded(kept(name)["baselines"][label])


def evaluated(name: str, env_id: str, figure: str) -> Read:
    """Return the cell of a policy that ``lrl success_table`` evaluated in an environment."""

    def read(kept: Callable[[str], dict[str, Any]]) -> str:
        (row,) = [row for row in kept(name)["environments"] if row["env_id"] == env_id]
        return rounded(row[figure])

    return read


def cells(name: str) -> Read:
    """Return the cell of a table of ``lrl success_table``: its mean success rate, and the number of its checkpoints."""

    def read(kept: Callable[[str], dict[str, Any]]) -> str:
        report = kept(name)["environments"]
        checkpoints = len({row["policy"] for row in report})
        mean = rounded(float(np.mean([row["success_rate"] for row in report])))
        return f"{mean} ({checkpoints} seeds)" if checkpoints > 1 else mean

    return read


def exact(success: Callable[[Lake], float]) -> Read:
    """Return the cell of a policy on FrozenLake's 4x4 map, whose probability of success is computed."""
    return lambda kept: rounded(success(lakes_of(GymnasiumEnvs("FrozenLake-v1"))[0]))


def random_success(lake: Lake) -> float:
    """Return the probability of success of uniformly random actions."""
    return lake.success(np.full(lake.q_values.shape, 1 / lake.table.num_actions))


def rounded(value: float) -> str:
    """Return a figure without decimals, or with two decimals below 10; means of shares that end in 5 are rounded up."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value + 1e-9:.2f}"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A row of the table."""

    task: str
    """Environment and metric."""
    algorithm: str
    """What trained the policies."""
    notebook: str
    """Name of the page in ``docs/experiments`` that documents the runs."""
    random: Read | None
    """Random actions."""
    best: Read | None
    """The best policy that is known: an optimum, a maximum, or the expert."""
    network: Read | None
    """A small network."""
    size: str
    """Number of parameters of the language model."""
    language_model: Read | None
    """A language model."""
    runs: tuple[str, ...]
    """Names of the results with the training runs of the network, if there is one, and of the language model."""


_BABYAI_BOUNDS = {"random": cells("babyai_mixed_random"), "best": cells("babyai_mixed_bot")}

HEADLINES: Mapping[str, Headline] = {
    "frozen_lake": Headline(
        task="FrozenLake 4x4, slippery: success",
        algorithm="GRPO, rewards from Q-values",
        notebook="frozen_lake",
        random=exact(random_success),
        best=exact(lambda lake: lake.best_stationary),
        network=None,
        size="1.6M",
        language_model=trained("frozen_lake_grpo_new"),
        runs=("frozen_lake_grpo_new",),
    ),
    "cartpole": Headline(
        task="CartPole: return",
        algorithm="PPO",
        notebook="cartpole",
        random=evaluated("baselines_random", "CartPole-v1", "return_mean"),
        best=evaluated("experts", "CartPole-v1", "return_mean"),
        network=trained("cartpole_ppo_mlp"),
        size="1.6M",
        language_model=trained("cartpole_ppo_text"),
        runs=("cartpole_ppo_mlp", "cartpole_ppo_text"),
    ),
    "babyai_zero_shot": Headline(
        task="BabyAI-Text, no distractors: success",
        algorithm="PPO, no demonstrations",
        notebook="smollm2",
        random=cells("babyai_empty_rooms_random"),
        best=cells("babyai_empty_rooms_bot"),
        network=None,
        size="135M",
        language_model=cells("babyai_zero_shot_smollm2_cells"),
        runs=("babyai_zero_shot_smollm2",),
    ),
    "babyai_reward_alone": Headline(
        task="BabyAI-Text, 0 to 5 distractors: success",
        algorithm="PPO, no demonstrations",
        notebook="lasting",
        **_BABYAI_BOUNDS,
        network=trained("babyai_ppo_mlp"),
        size="1.6M",
        language_model=trained("babyai_reward_alone"),
        runs=("babyai_ppo_mlp", "babyai_reward_alone"),
    ),
    "babyai_demonstrations": Headline(
        task="BabyAI-Text, 0 to 5 distractors: success",
        algorithm="SFT on 200 episodes, then PPO",
        notebook="lasting",
        **_BABYAI_BOUNDS,
        network=None,
        size="1.6M",
        language_model=trained("babyai_ppo_writing"),
        runs=("babyai_ppo_writing",),
    ),
    "half_cheetah": Headline(
        task="HalfCheetah: return",
        algorithm="SFT on 100,000 steps of an expert",
        notebook="half_cheetah",
        random=baseline("half_cheetah_again_text", "random actions"),
        best=baseline("half_cheetah_again_text", "the expert"),
        network=trained("half_cheetah_again_mlp"),
        size="1.6M",
        language_model=trained("half_cheetah_again_text"),
        runs=("half_cheetah_again_mlp", "half_cheetah_again_text"),
    ),
}
"""Rows by the name with which a page asks for them."""


def headlines_table(names: Sequence[str], kept: Callable[[str], dict[str, Any]], link: Callable[[Path], str]) -> str:
    """Return a Markdown table of rows.

    Args:
        names: keys of :data:`HEADLINES`, in the order of the rows.
        kept: returns a kept result by its name.
        link: returns the link to a page, given its path from the repository's root.

    Raises:
        ValueError: If a name is unknown.
    """
    rows = []
    for name in names:
        if name not in HEADLINES:
            raise ValueError(f"a table of headlines names {name!r}; it must be one of {', '.join(HEADLINES)}.")
        one = HEADLINES[name]
        cells = ["not run" if read is None else read(kept) for read in (one.random, one.best, one.network)]
        model = "not run" if one.language_model is None else f"{one.size}: {one.language_model(kept)}"
        page = link(Path("docs/experiments") / f"{one.notebook}.md")
        counts = [counts_text(kept(result)) for result in one.runs]
        text = counts[0] if len(counts) == 1 else "network {}, model {}".format(*counts)
        rows.append([f"[{one.task}]({page})", one.algorithm, *cells, model, text])
    heads = ["task", "trained by", "random", "best possible", "small network", "language model", HEADING]
    return markdown_table(heads, rows)
