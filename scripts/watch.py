"""Watch one episode in the terminal, turn by turn, or play it yourself.

python scripts/watch.py --policy expert --env_id FrozenLake-v1 --seed 3
python scripts/watch.py --checkpoint runs/frozen_lake/grpo/<run>
python scripts/watch.py --human --env_id lrl/BabyAI-GoToLocal-v0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrl.evaluation.checkpoint import Loaded
    from lrl.evaluation.episode_records import WatchedTurn
    from lrl.policies.actor import Actor


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the command line."""
    from lrl.cli.arguments import add_env_arguments

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--checkpoint", help="a checkpoint or a run directory")
    subject.add_argument("--policy", help="a baseline: random, constant or expert")
    subject.add_argument("--human", action="store_true", help="type the actions yourself; an empty line ends the game")
    add_env_arguments(parser)
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the episode")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--turns", type=int, help="stop after this many turns")
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="write a picture of each turn")
    return parser, parser.parse_args()


def main() -> None:
    """Play one episode; print a user's mistake in one sentence and exit with status 2."""
    parser, arguments = parse()
    from lrl.cli.quiet import silence_libraries

    silence_libraries()
    try:
        run(arguments)
    except ValueError as error:
        parser.exit(2, f"watch.py: {error}\n")
    except (EOFError, KeyboardInterrupt):
        parser.exit(0, "\nleft\n")


def run(arguments: argparse.Namespace) -> None:
    """Play one episode and print each turn."""
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
    print(f"\n{turn.number + 1} turns, return {total:g}, {ending(turn)}")


def ending(turn: WatchedTurn) -> str:
    """Describe how the episode ended."""
    if not (turn.terminated or turn.truncated):
        return "stopped"
    how = "terminated" if turn.terminated else "truncated"
    return f"{how}, {'success' if turn.success else 'no success'}"


def show(turn: WatchedTurn, arguments: argparse.Namespace) -> None:
    """Print one turn, without the observation if a person plays and has seen it."""
    if isinstance(turn.picture, str):
        print(f"\n{turn.picture.rstrip()}")
    if arguments.frames:
        import imageio.v3

        assert turn.picture is not None
        arguments.frames.mkdir(parents=True, exist_ok=True)
        imageio.v3.imwrite(arguments.frames / f"{turn.number:04d}.png", turn.picture)
    if not arguments.human:
        response = f"\nresponse: {turn.response}" if turn.response else ""
        print(f"\n--- turn {turn.number}\n{turn.prompt or turn.observation}{response}")
    print(f"action: {turn.action or f'none, {turn.reason}'}   reward: {turn.reward:g}")


def load(arguments: argparse.Namespace) -> Loaded:
    """Load the policy and its environment."""
    from lrl.cli.arguments import envs_of
    from lrl.evaluation.checkpoint import Loaded, env_id, load_baseline, load_policy, saved_numbers

    if arguments.checkpoint is not None:
        numbers = saved_numbers(arguments.checkpoint, arguments.numbers)
        return load_policy(arguments.checkpoint, envs_of(arguments, numbers) if arguments.env_id else None)
    env = envs_of(arguments)
    if arguments.policy is not None:
        return load_baseline(arguments.policy, env)
    policy = human()
    policy.connect(env.codec)
    print(env.codec.description)
    return Loaded(policy, env, {"name": "you", "env_id": env_id(env)})


def human() -> Actor:
    """Make an actor whose actions are typed."""
    from lrl.policies.baselines.fixed import FixedActor

    class Human(FixedActor):
        """Takes actions from the keyboard."""

        def choose(self, observations: Sequence[str], keys: Any) -> list[str]:
            """Show the observation and read an action."""
            print(f"\n{observations[0]}")
            action = input("> ").strip()
            if not action:
                raise EOFError
            return [action]

        @property
        def probability(self) -> float:
            """Probability of the action, which is unknown."""
            return 1.0

    return Human("direct")


if __name__ == "__main__":
    main()
