"""The command ``lrl expert_q``."""

from __future__ import annotations

from typing import Literal

from lrl.cli.command import command
from lrl.ranges import ClosedUnitInterval, PositiveInt, Seed


def expert_q(
    *,
    out: str,
    map_name: Literal["4x4", "8x8"] = "4x4",
    slippery: bool = True,
    seed: Seed = 0,
    gamma: ClosedUnitInterval = 0.99,
    episodes: PositiveInt = 1000,
) -> None:
    """Write demonstrations of a FrozenLake expert with its Q-values, in the columns of the original experiment.

    lrl expert_q --map_name 4x4 --slippery --out expert_q.csv

    Args:
        out: the CSV file to write.
        map_name: size of the map.
        slippery: whether moves slip to the sides.
        seed: seed of the episodes.
        gamma: discount per step.
        episodes: number of greedy episodes to play; failed episodes are omitted.
    """
    from lrl.envs.frozen_lake import generate_records, named_map, transition_table, write_csv
    from lrl.envs.tabular import optimal_q, optimal_success, success_probability

    table = transition_table(named_map(map_name), slippery)
    q_values = optimal_q([table], gamma)[0]
    records = generate_records(q_values, episodes, seed, map_name=map_name, is_slippery=slippery)
    write_csv(out, records)
    success, best = success_probability(table, q_values.argmax(1)), optimal_success(table)
    states = len({record["state"] for record in records})
    print(f"{out}: {len(records)} rows, {states} different states")
    print(f"success of the expert within 100 steps: {success:.4f} (no policy does better than {best:.4f})")


main = command(expert_q)
