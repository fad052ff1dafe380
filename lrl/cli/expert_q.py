"""The command ``lrl expert_q``."""

from __future__ import annotations

from typing import Literal

from lrl.cli.command import command
from lrl.ranges import Seed


def expert_q(
    *,
    out: str,
    map_name: Literal["4x4", "8x8"] = "4x4",
    slippery: bool = True,
    method: Literal["value_iteration", "q_learning"] = "value_iteration",
    seed: Seed = 0,
    gamma: float = 0.99,
    episodes: int = 1000,
    learning_episodes: int = 50_000,
) -> None:
    """Write demonstrations of a FrozenLake expert with its Q-values, in the columns of the original experiment.

    lrl expert_q --map_name 4x4 --slippery --method value_iteration --out expert_q.csv

    Args:
        out: the CSV file to write.
        map_name: size of the map.
        slippery: whether moves slip to the sides.
        method: how the Q-values are computed.
        seed: seed of the episodes.
        gamma: discount per step.
        episodes: number of greedy episodes to play; failed episodes are omitted.
        learning_episodes: number of episodes of q_learning.
    """
    import gymnasium as gym

    from lrl.envs.frozen_lake import generate_records, named_map, transition_table, write_csv
    from lrl.envs.tabular import optimal_q, optimal_success, q_learning, success_probability

    table = transition_table(named_map(map_name), slippery)
    if method == "value_iteration":
        q_values = optimal_q([table], gamma)[0]
    else:
        env = gym.make("FrozenLake-v1", map_name=map_name, is_slippery=slippery, disable_env_checker=True)
        q_values = q_learning(env, learning_episodes, seed, gamma=gamma)
    records = generate_records(q_values, episodes, seed, map_name=map_name, is_slippery=slippery)
    write_csv(out, records)
    success, best = success_probability(table, q_values.argmax(1)), optimal_success(table)
    states = len({record["state"] for record in records})
    print(f"{out}: {len(records)} rows, {states} different states")
    print(f"success of the expert within 100 steps: {success:.4f} (no policy does better than {best:.4f})")


main = command(expert_q)
