"""Write demonstrations of a FrozenLake expert with its Q-values, in the columns of the original experiment.

python scripts/expert_q.py --map_name 4x4 --slippery --method value_iteration --out expert_q.csv
"""

from __future__ import annotations

import argparse

import gymnasium as gym

from lrl.envs.frozen_lake.csv_file import generate_records, write_csv
from lrl.envs.frozen_lake.maps import named_map, transition_table
from lrl.envs.tabular import optimal_q, optimal_success, q_learning, success_probability


def main(argv: list[str] | None = None) -> None:
    """Find the Q-values, play greedily, keep what succeeded."""
    args = parse(argv)
    table = transition_table(named_map(args.map_name), args.slippery)
    if args.method == "value_iteration":
        q_values = optimal_q([table], args.gamma)[0]
    else:
        env = gym.make("FrozenLake-v1", map_name=args.map_name, is_slippery=args.slippery, disable_env_checker=True)
        q_values = q_learning(env, args.learning_episodes, args.seed, gamma=args.gamma)
    records = generate_records(q_values, args.episodes, args.seed, map_name=args.map_name, is_slippery=args.slippery)
    write_csv(args.out, records)
    success, best = success_probability(table, q_values.argmax(1)), optimal_success(table)
    states = len({record["state"] for record in records})
    print(f"{args.out}: {len(records)} rows, {states} different states")
    print(f"success of the expert within 100 steps: {success:.4f} (no policy does better than {best:.4f})")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map_name", default="4x4", choices=["4x4", "8x8"])
    parser.add_argument("--slippery", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--method", default="value_iteration", choices=["value_iteration", "q_learning"])
    parser.add_argument("--out", required=True, help="the CSV file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--episodes", type=int, default=1000, help="greedy episodes to play; failures are left out")
    parser.add_argument("--learning_episodes", type=int, default=50_000, help="episodes of q_learning")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
