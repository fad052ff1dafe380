"""Write demonstrations of a FrozenLake expert with its Q-values, in the columns of the original experiment.

lrl expert_q --map_name 4x4 --slippery --method value_iteration --out expert_q.csv
"""

from __future__ import annotations

import argparse

from lrl.cli.arguments import command_parser, subcommand


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--map_name", default="4x4", choices=["4x4", "8x8"])
    parser.add_argument("--slippery", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--method", default="value_iteration", choices=["value_iteration", "q_learning"])
    parser.add_argument("--out", required=True, help="the CSV file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--episodes", type=int, default=1000, help="greedy episodes to play; failures are left out")
    parser.add_argument("--learning_episodes", type=int, default=50_000, help="episodes of q_learning")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Write the file, and print the expert's exact success probability."""
    import gymnasium as gym

    from lrl.envs.frozen_lake import generate_records, named_map, transition_table, write_csv
    from lrl.envs.tabular import optimal_q, optimal_success, q_learning, success_probability

    lake = {"map_name": arguments.map_name, "is_slippery": arguments.slippery}
    table = transition_table(named_map(arguments.map_name), arguments.slippery)
    if arguments.method == "value_iteration":
        q_values = optimal_q([table], arguments.gamma)[0]
    else:
        env = gym.make("FrozenLake-v1", **lake, disable_env_checker=True)
        q_values = q_learning(env, arguments.learning_episodes, arguments.seed, gamma=arguments.gamma)
    records = generate_records(q_values, arguments.episodes, arguments.seed, **lake)
    write_csv(arguments.out, records)
    success, best = success_probability(table, q_values.argmax(1)), optimal_success(table)
    states = len({record["state"] for record in records})
    print(f"{arguments.out}: {len(records)} rows, {states} different states")
    print(f"success of the expert within 100 steps: {success:.4f} (no policy does better than {best:.4f})")


main = subcommand(make_parser, run)
