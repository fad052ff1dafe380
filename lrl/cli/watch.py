"""Follow one episode in the terminal, turn by turn, or play it yourself.

lrl watch --policy expert --env_id FrozenLake-v1 --seed 3
lrl watch --checkpoint runs/frozen_lake/grpo/<run>
lrl watch --api_url http://127.0.0.1:8000/v1 --model NAME --response_format direct
lrl watch --human --env_id lrl/BabyAI-GoToLocal-v0
lrl watch --policy random --env_url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.arguments import (
    add_env_arguments,
    add_env_url_argument,
    add_model_arguments,
    check_env_arguments,
    check_model_arguments,
    command_parser,
    envs_at,
    load_untrained,
    subcommand,
    with_retries,
)

if TYPE_CHECKING:
    from lrl.evaluation.episode_records import WatchedTurn
    from lrl.evaluation.load import Loaded


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--checkpoint", help="a checkpoint or a run directory")
    subject.add_argument("--model", help="any causal LM, untrained by lrl: hub name, folder or GGUF file")
    subject.add_argument("--policy", help="a baseline: random, constant or expert")
    subject.add_argument("--human", action="store_true", help="type the actions yourself; an empty line ends the game")
    add_env_arguments(parser)
    add_env_url_argument(parser)
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the episode")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--turns", type=int, help="stop after this many turns")
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="write a picture of each turn")
    add_model_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Play one episode; the end of the input, or Ctrl-C, leaves it."""
    try:
        play(arguments)
    except (EOFError, KeyboardInterrupt):
        sys.stderr.write("\nleft\n")
        raise SystemExit(0) from None


def play(arguments: argparse.Namespace) -> None:
    """Play the episode and print every turn."""
    from lrl.evaluation.episode_records import render_modes, watch_episode

    loaded = load(arguments)
    modes = render_modes(loaded.env_factory)
    mode = "rgb_array" if arguments.frames else "ansi" if "ansi" in modes and not arguments.human else None
    sampling = loaded.policy.sampling_at(arguments.temperature)
    print(f"{loaded.info['name']} in {loaded.info['env_id']}, seed {arguments.seed}")
    total, turn = 0.0, None
    for turn in watch_episode(loaded.policy, loaded.env_factory, 0, arguments.seed, sampling, mode):
        total += turn.reward
        show(turn, arguments)
        if arguments.turns is not None and turn.number + 1 >= arguments.turns:
            break
    assert turn is not None
    print(f"\n{turn.number + 1} turns, return {total:g}, {outcome(turn)}")


def outcome(turn: WatchedTurn) -> str:
    """Describe how the episode ended, given its last turn."""
    if not (turn.terminated or turn.truncated):
        return "stopped"
    how = "terminated" if turn.terminated else "truncated"
    return f"{how}, {'success' if turn.success else 'no success'}"


def show(turn: WatchedTurn, arguments: argparse.Namespace) -> None:
    """Print one turn; a human player has seen the observation already."""
    if isinstance(turn.picture, str):
        print(f"\n{turn.picture.rstrip()}")
    if arguments.frames:
        import imageio.v3
        import numpy as np

        arguments.frames.mkdir(parents=True, exist_ok=True)
        imageio.v3.imwrite(arguments.frames / f"{turn.number:04d}.png", np.asarray(turn.picture))
    if not arguments.human:
        response = f"\nresponse: {turn.response}" if turn.response else ""
        print(f"\n--- turn {turn.number}\n{turn.prompt or turn.observation}{response}")
    print(f"action: {turn.action or f'none, {turn.reason}'}   reward: {turn.reward:g}")


def load(arguments: argparse.Namespace) -> Loaded:
    """Load the policy and the environment that the options name."""
    from lrl.evaluation.load import Loaded, env_id, load_baseline, load_policy, saved_numbers

    check_model_arguments(arguments)
    if arguments.model is not None:
        return with_retries(load_untrained(arguments, envs_at(arguments)), arguments)
    if arguments.checkpoint is not None:
        check_env_arguments(arguments)
        numbers, named = saved_numbers(arguments.checkpoint, arguments.numbers), arguments.env_id or arguments.env_url
        loaded = load_policy(arguments.checkpoint, envs_at(arguments, numbers) if named else None)
        return with_retries(loaded, arguments)
    env = envs_at(arguments)
    if arguments.policy is not None:
        return with_retries(load_baseline(arguments.policy, env), arguments)
    from lrl.policies.baselines import HumanActor

    actor = HumanActor("direct")
    actor.connect(env.codec)
    print(env.codec.description)
    return with_retries(Loaded(actor, env, {"name": "you", "env_id": env_id(env)}), arguments)


main = subcommand(make_parser, run)
