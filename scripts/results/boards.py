"""Exact success of a random and of an optimal policy on RAGEN's boards, next to the published rows of SCOUT.

python scripts/results.py boards --json assets/results/boards.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrl.cli.command import command_line
from lrl.envs.boards import RagenLakeEnv, SokobanEnv, solve
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.tabular import TransitionTable
from lrl.evaluation.report import markdown_table, result_text
from lrl.evaluation.statistics import bootstrap_interval
from lrl.files import write_whole
from lrl.ranges import PositiveInt

HORIZONS: dict[str, tuple[int, ...]] = {
    "lrl/RagenFrozenLake-v0": (25, 10),
    "lrl/RagenFrozenLakeSlippery-v0": (25, 10),
    "lrl/Sokoban1Box-v0": (10, 25),
    "lrl/Sokoban2Boxes-v0": (10, 25),
}
"""Time limits in actions by environment; the first one is SCOUT's."""

SCOUT: dict[str, tuple[float, ...]] = {
    "Qwen2.5-0.5B without training": (0.17, 0.14, 0.04, 0.00),
    "Qwen2.5-0.5B, multi-turn PPO": (0.39, 0.24, 0.15, 0.06),
    "Qwen2.5-0.5B, SCOUT": (0.93, 0.88, 0.98, 0.53),
    "network by DQN": (0.90, 0.80, 0.98, 0.47),
    "network by PPO": (0.90, 0.85, 0.99, 0.50),
}
"""Published success rates (arXiv:2601.21754, Table 1) in the order of :data:`HORIZONS`."""


def boards(
    *,
    num_boards: PositiveInt = 1000,
    seed: int = 10_000,
    machine: str = "2-core x86-64 virtual machine",
    json: Path | None = None,
) -> None:
    """Compute the exact success of a random and of an optimal policy on RAGEN's boards, and print a table.

    Args:
        num_boards: number of boards of each environment.
        seed: seed of the first board; later ones count up from it.
        machine: description of the machine, for the file.
        json: write all figures to this file.
    """
    from lrl.cli.run_directory import commit

    about = {"title": "Exact success on RAGEN's boards", "command": command_line("python scripts/results.py boards")}
    about |= {"commit": commit(), "machine": machine, "seed": seed, "num_boards": num_boards}
    result = about | {"boards": [row for id in HORIZONS for row in _measure(id, seed, num_boards)]}
    print(boards_table(result))
    if json is not None:
        with write_whole(json) as file:
            file.write(result_text(result))


def _measure(id: str, seed: int, num_boards: int) -> list[dict[str, Any]]:
    """Return the mean success probability of both policies over boards, with intervals over the boards."""
    env: Any = GymnasiumEnvs(id).make_native().unwrapped
    figures = []
    for number in range(seed, seed + num_boards):
        env.reset(seed=number)
        figures.append(exact_success(*_table(env), HORIZONS[id]))
    rows = []
    for limit, by_policy in zip(HORIZONS[id], np.array(figures).transpose(1, 2, 0), strict=True):
        row: dict[str, Any] = {"env_id": id, "max_episode_steps": limit}
        for name, values in zip(("random", "optimum"), by_policy, strict=True):
            row |= {name: float(values.mean()), f"{name}_ci95": list(bootstrap_interval(values))}
        rows.append(row)
    return rows


def exact_success(table: TransitionTable, start: int, limits: Sequence[int]) -> np.ndarray:
    """Return the success probability of a random and of an optimal policy within each limit, ``(limit, policy)``.

    The arrays of the table are indexed, because the tables of Sokoban have too many states for dense matrices.
    """
    probability, goal = table.probability * ~table.terminated, table.goal_probability
    random = optimum = np.zeros(table.num_states)
    found = {}
    for step in range(1, max(limits) + 1):
        random = (goal + (probability * random[table.next_state]).sum(-1)).mean(-1)
        optimum = (goal + (probability * optimum[table.next_state]).sum(-1)).max(-1)
        found[step] = random[start], optimum[start]
    return np.array([found[limit] for limit in limits])


def _table(env: RagenLakeEnv | SokobanEnv) -> tuple[TransitionTable, int]:
    """Return the transition table of the current board and its initial state."""
    return (env.table, env.start) if isinstance(env, RagenLakeEnv) else (solve(env.room).table(), 0)


def boards_table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row per environment and time limit, and SCOUT's figures for its time limits."""
    rows = []
    for row in result["boards"]:
        limits = HORIZONS[row["env_id"]]
        published = row["max_episode_steps"] == limits[0]
        column = list(HORIZONS).index(row["env_id"])
        cells = [f"`{row['env_id']}`", f"{row['max_episode_steps']}"]
        for name in ("random", "optimum"):
            low, high = row[f"{name}_ci95"]
            cells.append(f"{row[name]:.3f} ({low:.3f} to {high:.3f})")
        rows.append([*cells, *(f"{rates[column]:.2f}" if published else "" for rates in SCOUT.values())])
    heads = ["environment", "actions", "random", "optimum", *(f"SCOUT: {name}" for name in SCOUT)]
    return markdown_table(heads, rows)
