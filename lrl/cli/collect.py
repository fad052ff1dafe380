"""Record episodes as a Minari data set, or export a data set as JSON lines.

lrl collect --policy expert --env_id lrl/BabyAI-GoToLocal-v0 --dataset_id lrl/babyai-goto/bot-v0
lrl collect --policy runs/frozen_lake/grpo/<run> --env_id FrozenLake-v1 --dataset_id lrl/lake/llm-v0
lrl collect --policy runs/cartpole/ppo_mlp/<run> --dataset_id lrl/cartpole/expert-v0 --num_envs 16
lrl collect --policy runs/babyai/sft/<run> --advisor expert --dataset_id lrl/babyai-goto/advised-v0 --temperature 1
lrl collect --env_id lrl/BabyAI-GoToLocal-v0 --dataset_id lrl/babyai-goto/bot-v0 --jsonl goto.jsonl

A run or checkpoint may hold any policy: a language model that acts in text, or a network with native actions. Without
--env_id it plays in the environment that it was trained in.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.arguments import add_env_arguments, check_env_arguments, command_parser, envs_of, subcommand

_OF_PLAYING = (
    *("episodes", "max_episode_steps", "seed", "num_envs", "vectorization", "temperature", "random_share"),
    *("advisor", "successful_only"),
)
"""Options that say how episodes are played, which only ``--policy`` does."""

if TYPE_CHECKING:
    from lrl.codecs.numbers import Ranges
    from lrl.data.minari_writer import Collected
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.policies.actor import Actor


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument(
        "--policy", help="expert, random, constant, a checkpoint or a run directory; without it nothing is played"
    )
    add_env_arguments(parser, "the environment that the run was trained in; a baseline needs one")
    parser.add_argument("--dataset_id", required=True, help="Minari's name, such as lrl/babyai-goto/bot-v0")
    parser.add_argument("--episodes", type=int, default=100, help="to play, one seed each, all to their end")
    parser.add_argument("--max_episode_steps", type=int, help="that truncate an episode; default: the environment's")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--num_envs", type=int, default=1, help="in parallel; the data set does not depend on it")
    parser.add_argument("--vectorization", choices=("sync", "async"), default="sync", help="async: in processes")
    parser.add_argument("--temperature", type=float, default=0.0, help="of a run; 0: its mean or most probable action")
    parser.add_argument("--random_share", type=float, default=0.0, help="of turns with a random action")
    parser.add_argument("--advisor", help="expert or a run; its action in each state is recorded beside the policy's")
    parser.add_argument("--successful_only", action="store_true", help="keep what the environment calls a success")
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="write the data set as JSON lines as well")
    parser.add_argument("--digits", action="store_true", help="write words in --jsonl as numbers of the action space")
    parser.add_argument("--ranges", action="store_true", help="print the ranges of its observations, for env.numbers")
    parser.add_argument("--statistics", action="store_true", help="print their means and deviations, for env.numbers")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Record and export what the options ask for, and print what was written.

    Raises:
        ValueError: the options ask for nothing, or contradict each other.
    """
    if arguments.policy is None and arguments.jsonl is None and not (arguments.ranges or arguments.statistics):
        raise ValueError("give --policy to collect, --jsonl to export, --ranges or --statistics to measure, or several")
    if arguments.digits and arguments.jsonl is None:
        raise ValueError("--digits is given without --jsonl, and no lines are written; leave it out, or give --jsonl.")
    if arguments.jsonl is not None and arguments.jsonl.is_dir():
        raise ValueError(f"--jsonl is {arguments.jsonl}, which is a folder; it must be a file.")
    if arguments.policy is None:
        check_nothing_to_play(arguments)
    if arguments.advisor is not None:
        check_advice_is_kept(arguments)
    policy, env = load(arguments)
    if policy is not None:
        collected = record(policy, env, arguments)
        means = collected.results.means()
        print(f"{arguments.dataset_id}: {collected.episodes} episodes, {collected.steps} steps")
        print(f"return {means['return']:.4g}, success {means['success_rate']:.3f} of {arguments.episodes} played")
    if arguments.jsonl is not None:
        from lrl.data.jsonl import write_jsonl

        lines = write_jsonl(arguments.dataset_id, env, arguments.jsonl, arguments.digits)
        print(f"{arguments.jsonl}: {lines} lines")
    if arguments.ranges:
        from lrl.data.minari_writer import observation_ranges

        ranges = observation_ranges(arguments.dataset_id)
        print(f"numbers: {{kind: integers, ranges: {_yaml(ranges)}}}")
    if arguments.statistics:
        from lrl.data.minari_writer import observation_statistics

        statistics = observation_statistics(arguments.dataset_id)
        print(f"numbers: {{kind: normalised, statistics: {_yaml(statistics)}}}")


def check_nothing_to_play(arguments: argparse.Namespace) -> None:
    """Raise if an option would be ignored, because nothing is played.

    Raises:
        ValueError: one of :data:`_OF_PLAYING` is not its default.
    """
    parser = make_parser("")
    for name in _OF_PLAYING:
        value = getattr(arguments, name)
        if value != parser.get_default(name):
            given = f"--{name} is given" if value is True else f"--{name} is {value}"
            raise ValueError(f"{given} without --policy, and nothing is played; leave it out, or give --policy.")


def check_advice_is_kept(arguments: argparse.Namespace) -> None:
    """Raise if another option would drop what ``--advisor`` is for.

    Raises:
        ValueError: ``--jsonl`` or ``--successful_only`` is given as well.
    """
    if arguments.jsonl is not None:
        raise ValueError(f"--jsonl is {arguments.jsonl}, whose lines cannot hold advice; leave it or --advisor out.")
    if arguments.successful_only:
        raise ValueError(
            "--successful_only drops the episodes in which --policy fails, where advice counts; leave one of both out."
        )


def _yaml(ranges: Ranges) -> str:
    if isinstance(ranges, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(own)}" for key, own in ranges.items()) + "}"
    return "[" + ", ".join(f"[{first:.6g}, {second:.6g}]" for first, second in ranges) + "]"


def load(arguments: argparse.Namespace) -> tuple[Actor | None, GymnasiumEnvs]:
    """Load the policy, None without ``--policy``, and the environment.

    Raises:
        ValueError: ``--policy`` is neither a baseline nor a path, or the environment is not known.
    """
    from lrl.evaluation.load import BASELINES, load_baseline, load_policy, saved_numbers, training_env

    name: str | None = arguments.policy
    check_env_arguments(arguments)
    if name is None or name in BASELINES:
        if arguments.env_id is None:
            raise ValueError("--env_id is missing; it must be a registered name, unless --policy is a run.")
        env = limited(envs_of(arguments, vectorization=arguments.vectorization), arguments)
        return None if name is None else load_baseline(name, env).policy, env
    if not Path(name).exists():
        known = ", ".join(BASELINES)
        raise ValueError(f"--policy is {name!r}; it must be {known}, a checkpoint or a run directory.")
    numbers = saved_numbers(name, arguments.numbers)
    if arguments.env_id is None:
        env = training_env(name).with_vectorization(arguments.vectorization)
    else:
        env = envs_of(arguments, numbers, vectorization=arguments.vectorization)
    env = limited(env, arguments)
    return load_policy(name, env).policy, env


def load_advisor(name: str | None, env: GymnasiumEnvs) -> Actor | None:
    """Load the actor of ``--advisor``, None without it.

    Raises:
        ValueError: it is neither ``expert`` nor a path, or cannot act in the environment.
    """
    from lrl.codecs.numbers import NumberFormat
    from lrl.evaluation.load import load_baseline, load_policy, saved_numbers
    from lrl.policies.head import HeadPolicy

    if name is None:
        return None
    if name != "expert" and not Path(name).exists():
        raise ValueError(f"--advisor is {name!r}; it must be expert, a checkpoint or a run directory.")
    try:
        actor = (load_baseline(name, env) if name == "expert" else load_policy(name, env)).policy
    except ValueError as error:
        raise ValueError(f"--advisor is {name!r}, which cannot act here: {error}") from error
    if isinstance(actor, HeadPolicy):  # the only one that reads numbers as text
        own, shown = saved_numbers(name) or NumberFormat(), env.numbers or NumberFormat()
        if own != shown:
            raise ValueError(f"--advisor is {name!r}, which reads {own}, but --policy {shown}; both must be the same.")
    return actor


def limited(env: GymnasiumEnvs, arguments: argparse.Namespace) -> GymnasiumEnvs:
    """Return the environment with the time limit of ``--max_episode_steps``, where one is given."""
    steps: int | None = arguments.max_episode_steps
    return env if steps is None else env.with_max_episode_steps(steps)


def record(policy: Actor, env: GymnasiumEnvs, arguments: argparse.Namespace) -> Collected:
    """Play and record all episodes, with a progress bar."""
    from lrl.cli.quiet import progress_bar
    from lrl.cli.run_directory import commit
    from lrl.data.minari_writer import collect

    with progress_bar(arguments.policy, arguments.episodes) as advance, _exit_on_sigterm():
        return collect(
            policy,
            env,
            arguments.dataset_id,
            arguments.episodes,
            arguments.seed,
            arguments.num_envs,
            name=arguments.policy,
            commit=commit(),
            sampling=policy.sampling_at(arguments.temperature),
            random_share=arguments.random_share,
            advisor=load_advisor(arguments.advisor, env),
            advisor_name=arguments.advisor,
            successful_only=arguments.successful_only,
            on_episode=advance,
        )


class _EndedBySignal(SystemExit):
    """Ends the program, unlike an environment that calls ``sys.exit``."""


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Exit by an exception when a scheduler ends the program, so that the episodes that were played are kept."""
    process = os.getpid()

    def leave(number: int, _: object) -> None:
        if os.getpid() != process:  # an environment in a process of its own
            os._exit(128 + number)
        raise _EndedBySignal(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


main = subcommand(make_parser, run)
