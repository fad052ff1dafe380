"""The command ``lrl collect``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.command import command
from lrl.cli.options import EnvOptions, changed
from lrl.ranges import ClosedUnitInterval, NonNegativeFloat, PositiveInt, Seed

if TYPE_CHECKING:
    from lrl.codecs.numbers import Ranges
    from lrl.data.minari_writer import CollectionSummary
    from lrl.envs.factory import GymnasiumEnvs
    from lrl.policies.actor import Actor


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Options of the episodes that --policy plays."""

    episodes: PositiveInt = 100
    """Number of episodes, one seed each, all played to their end."""
    max_episode_steps: PositiveInt | None = None
    """Number of steps after which an episode is truncated; default: the limit of the environment."""
    seed: Seed = 0
    """Seed of the first episode."""
    num_envs: PositiveInt = 1
    """Number of episodes that are played in parallel; the data set does not depend on it."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature, if --policy is a run; 0 takes the mean or the most probable action."""
    random_share: ClosedUnitInterval = 0.0
    """Share of turns with a random action."""
    advisor: str | None = None
    """An advisor, whose action in each state is recorded in addition: expert, a checkpoint or a run directory."""
    successful_only: bool = False
    """Write only successful episodes."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of the output that is made from the data set."""

    jsonl: Path | None = None
    """Write the data set as JSON lines to this file as well."""
    digits: bool = False
    """Write actions to --jsonl as indices in the action space instead of names."""
    ranges: bool = False
    """Print the ranges of the observations, for env.numbers."""
    statistics: bool = False
    """Print means and standard deviations of the observations, for env.numbers."""


def collect(
    *, dataset_id: str, policy: str | None = None, env: EnvOptions, play: CollectOptions, export: ExportOptions
) -> None:
    """Record episodes as a Minari data set, or export a data set as JSON lines.

    lrl collect --policy expert --env_id lrl/BabyAI-GoToLocal-v0 --dataset_id lrl/babyai-goto/bot-v0
    lrl collect --policy runs/frozen_lake/grpo/<run> --env_id FrozenLake-v1 --dataset_id lrl/lake/llm-v0
    lrl collect --policy runs/cartpole/ppo_mlp/<run> --dataset_id lrl/cartpole/expert-v0 --num_envs 16
    lrl collect --policy runs/babyai/sft/<run> --advisor expert --dataset_id lrl/babyai-goto/advised-v0 --temperature 1
    lrl collect --env_id lrl/BabyAI-GoToLocal-v0 --dataset_id lrl/babyai-goto/bot-v0 --jsonl goto.jsonl

    A run or checkpoint may hold any policy: a language model that acts in text, or a network with native actions.
    Without --env_id it plays in the environment that it was trained in.

    Args:
        dataset_id: name of the Minari data set, such as lrl/babyai-goto/bot-v0.
        policy: expert, random, constant, a checkpoint or a run directory; default: no episodes are played.
        env: environment of the episodes.
        play: how episodes are played.
        export: output that is made from the data set.
    """
    _check(policy, play, export)
    actor, envs = _load(policy, env, play)
    if actor is not None:
        collected = _record(actor, envs, dataset_id, str(policy), play)
        means = collected.results.means()
        print(f"{dataset_id}: {collected.episodes} episodes, {collected.steps} steps")
        success = f"success rate {means['success_rate']:.3f} over {play.episodes} episodes played"
        print(f"return {means['return']:.4g}, {success}")
    if export.jsonl is not None:
        from lrl.data.jsonl import write_jsonl

        lines = write_jsonl(dataset_id, envs, export.jsonl, export.digits)
        print(f"{export.jsonl}: {lines} lines")
    if export.ranges or export.statistics:
        from lrl.data.minari_writer import observation_ranges, observation_statistics

        if export.ranges:
            print(f"numbers: {{kind: integers, ranges: {_yaml(observation_ranges(dataset_id))}}}")
        if export.statistics:
            print(f"numbers: {{kind: normalised, statistics: {_yaml(observation_statistics(dataset_id))}}}")


def _check(policy: str | None, play: CollectOptions, export: ExportOptions) -> None:
    """Check that the options request an output and do not contradict each other.

    Raises:
        ValueError: If the options request no output, or contradict each other.
    """
    if policy is None and export.jsonl is None and not (export.ranges or export.statistics):
        raise ValueError("give --policy to collect, --jsonl to export, --ranges or --statistics to measure, or several")
    if export.digits and export.jsonl is None:
        raise ValueError(
            "--digits is given without --jsonl, so that no lines are written; leave it out, or give --jsonl."
        )
    if export.jsonl is not None and export.jsonl.is_dir():
        raise ValueError(f"--jsonl is {export.jsonl}, which is a folder; it must be a file.")
    for name in changed(play) if policy is None else ():
        value = getattr(play, name)
        given = f"--{name} is given" if value is True else f"--{name} is {value}"
        raise ValueError(f"{given}, but no episodes are played without --policy; leave it out, or give --policy.")
    if play.advisor is not None and export.jsonl is not None:
        raise ValueError(
            f"--jsonl is {export.jsonl}, whose lines cannot contain the actions of --advisor; leave one of them out."
        )
    if play.advisor is not None and play.successful_only:
        raise ValueError(
            "--successful_only is given with --advisor, but omits the episodes in which --policy fails, for which the "
            "advisor's actions are most useful; leave one of them out."
        )


def _yaml(ranges: Ranges) -> str:
    """Return ranges or statistics as YAML on one line."""
    if isinstance(ranges, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(own)}" for key, own in ranges.items()) + "}"
    return "[" + ", ".join(f"[{first:.6g}, {second:.6g}]" for first, second in ranges) + "]"


def _load(policy: str | None, env: EnvOptions, play: CollectOptions) -> tuple[Actor | None, GymnasiumEnvs]:
    """Load the policy and the environment; without ``--policy`` the policy is None.

    Raises:
        ValueError: If ``--policy`` is neither a baseline nor a path, or the environment is not known.
    """
    from lrl.evaluation.load import BASELINES, load_baseline, load_policy, saved_numbers, training_env

    env.check_used()
    run = None if policy in (None, *BASELINES) else policy
    if run is not None and not Path(run).exists():
        known = ", ".join(BASELINES)
        raise ValueError(f"--policy is {policy!r}; it must be {known}, a checkpoint or a run directory.")
    if run is None and env.env_id is None:
        raise ValueError("--env_id is missing; it must be a registered name, unless --policy is a run.")
    numbers = None if run is None else saved_numbers(run, env.numbers)
    envs = training_env(run) if run is not None and env.env_id is None else env.gymnasium(numbers)
    envs = envs.with_settings(vectorization="sync")
    if play.max_episode_steps is not None:
        envs = envs.with_settings(max_episode_steps=play.max_episode_steps)
    if policy is None:
        return None, envs
    return (load_policy(policy, envs) if run else load_baseline(policy, envs)).policy, envs


def load_advisor(name: str | None, env: GymnasiumEnvs) -> Actor | None:
    """Load the actor that ``--advisor`` names; None if the option is not given.

    Raises:
        ValueError: If ``--advisor`` is neither ``expert`` nor a path, or cannot act in the environment.
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
    if isinstance(actor, HeadPolicy):  # the only advisor with native actions that reads numbers as text
        own, shown = saved_numbers(name) or NumberFormat(), env.numbers or NumberFormat()
        if own != shown:
            raise ValueError(
                f"--advisor is {name!r}, which reads numbers as {own}, but --policy reads them as {shown}; both must "
                "be the same."
            )
    return actor


def _record(actor: Actor, envs: GymnasiumEnvs, dataset_id: str, policy: str, play: CollectOptions) -> CollectionSummary:
    """Play and record all episodes, with a progress bar."""
    from lrl.cli.quiet import progress_bar
    from lrl.cli.run_directory import commit
    from lrl.data.minari_writer import collect

    with progress_bar(policy, play.episodes) as advance, _exit_on_sigterm():
        return collect(
            actor,
            envs,
            dataset_id,
            play.episodes,
            play.seed,
            play.num_envs,
            name=policy,
            commit=commit(),
            sampling=actor.sampling_at(play.temperature),
            random_share=play.random_share,
            advisor=load_advisor(play.advisor, envs),
            advisor_name=play.advisor,
            successful_only=play.successful_only,
            on_episode=advance,
        )


class _EndedBySignal(SystemExit):
    """Raised by the handler of SIGTERM.

    :mod:`lrl.envs.native` treats a plain ``SystemExit`` as an error of the environment.
    """


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise an exception on SIGTERM, which schedulers send to end a program, so that finished episodes are kept."""
    process = os.getpid()

    def leave(number: int, _: object) -> None:
        """Raise the exception, or end a process of an environment."""
        if os.getpid() != process:  # this is a forked process of an environment, which only exits
            os._exit(128 + number)
        raise _EndedBySignal(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


main = command(collect)
