"""Play N seeded episodes and print return, length, success and invalid actions, each with a 95% interval.

lrl evaluate --checkpoint runs/frozen_lake/grpo/<run>
lrl evaluate --model HuggingFaceTB/SmolLM2-135M-Instruct --env_id FrozenLake-v1 --episodes 20
lrl evaluate --model smollm2-135m --dtype bfloat16 --choose --env_id CartPole-v1
lrl evaluate --checkpoint runs/frozen_lake/grpo/<run> --rephrase assets/rephrased/frozen_lake.yaml
lrl evaluate --policy expert --json expert.json
lrl evaluate --policy random --env_url http://127.0.0.1:8000
lrl evaluate --api_url http://127.0.0.1:8000/v1 --model NAME --env_id FrozenLake-v1 --response_format direct
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.arguments import (
    add_env_arguments,
    add_env_url_argument,
    add_fabric_arguments,
    add_model_arguments,
    check_env_arguments,
    check_model_arguments,
    command_parser,
    envs_at,
    fabric_of,
    load_untrained,
    subcommand,
    with_retries,
)

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lrl.evaluation.episodes import EpisodeResults
    from lrl.evaluation.load import Loaded


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("--checkpoint", help="a checkpoint or a run directory")
    parser.add_argument("--model", help="any causal LM, untrained by lrl: hub name, folder or GGUF file")
    parser.add_argument("--policy", help="a baseline: random, constant or expert; mlp: --checkpoint must hold an MLP")
    add_env_arguments(parser)
    add_env_url_argument(parser)
    parser.add_argument(
        "--success_at",
        choices=("last_step", "any_step"),
        help="which steps decide whether an episode is a success; default: env.success_at of the run, or last_step",
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=10_000, help="of the first episode")
    parser.add_argument("--num_envs", type=int, default=16, help="in parallel; the result does not depend on it")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument(
        "--merge_adapters", action="store_true", help="play with the adapters merged: faster, the same up to rounding"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and episodes")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="log the figures in this folder")
    parser.add_argument("--capture_video", type=Path, metavar="FOLDER", help="write an mp4 of the first episodes")
    parser.add_argument("--num_videos", type=int, default=3, help="with --capture_video")
    parser.add_argument("--rephrase", metavar="FILE", help="play again with the prompts that a YAML file rephrases")
    add_fabric_arguments(parser)
    add_model_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate on all devices and print on the first."""
    check_model_arguments(arguments)
    fabric_of(arguments).launch(partial(run_on_device, arguments=arguments))


def run_on_device(fabric: Fabric, arguments: argparse.Namespace) -> None:
    """Load the policy, and evaluate it in the precision that the options name."""
    loaded = load(arguments)
    if arguments.success_at is not None:
        loaded = loaded._replace(env_factory=loaded.env_factory.with_success_at(arguments.success_at))
    if arguments.merge_adapters:
        from lrl.lm.merging import merge_adapters_of

        merge_adapters_of(loaded.policy, str(arguments.checkpoint or arguments.policy or arguments.model))
    loaded = with_retries(loaded, arguments)
    with fabric.autocast():
        evaluate(fabric, loaded, arguments)


def evaluate(fabric: Fabric, loaded: Loaded, arguments: argparse.Namespace) -> None:
    """Play the policy and the baselines, print the table, and write what the options ask for."""
    from rich.console import Console

    from lrl.evaluation.load import load_baseline, usage_line
    from lrl.evaluation.report import results_table, write_json

    subject = "trained" if arguments.checkpoint else "model" if arguments.model else arguments.policy
    rows = {subject: play(fabric, loaded, arguments)}
    usage = loaded.policy.report()  # before the episodes in other words add to it
    for name in ("random", "expert"):
        try:
            baseline = load_baseline(name, loaded.env_factory)
        except ValueError:
            continue  # this environment has no such baseline
        if name not in rows:
            rows[name] = play(fabric, baseline, arguments)
    exact = [exact_line(loaded, arguments.temperature)]
    other_words = play_rephrased(fabric, loaded, arguments)
    for name, (results, line) in other_words.items():
        rows[f"{subject}, {name}"] = results
        exact.append(f"{name}: {line}" if line else "")
    if fabric.is_global_zero:
        seeds = f"seeds {arguments.seed} to {arguments.seed + arguments.episodes - 1}"
        what = f"{loaded.info['name']} in {loaded.info['env_id']}"
        title = f"{what}\n{arguments.episodes} episodes ({seeds}), 95% intervals"
        lines, in_all = [rows[subject].success_rule, *exact, usage_line(usage) if usage else ""], loaded.policy.report()
        if in_all != usage:
            lines.append(f"in all: {usage_line(in_all)}")
        Console().print(results_table(rows, title, "\n".join(filter(None, lines))))
        if arguments.json is not None:
            env_id, policy = loaded.info["env_id"], loaded.info["name"]
            report = rows[subject].report(env_id, policy)
            report |= {"usage": usage, "usage_in_all": in_all} if usage else {}
            if arguments.merge_adapters:
                report["merged_adapters"] = True
            if other_words:
                report["rephrased"] = {name: row.report(env_id, policy) for name, (row, _) in other_words.items()}
            write_json(report, arguments.json)
        if arguments.tensorboard is not None:
            log_figures(rows[subject], loaded, arguments.tensorboard)
        if arguments.capture_video is not None:
            capture(loaded, arguments)


def play_rephrased(
    fabric: Fabric, loaded: Loaded, arguments: argparse.Namespace
) -> dict[str, tuple[EpisodeResults, str]]:
    """Play with the prompts in the other words of ``--rephrase``; by name the episodes and the exact success."""
    if arguments.rephrase is None:
        return {}
    from lrl.evaluation.rephrased import read_phrasings, rephrased

    played: dict[str, tuple[EpisodeResults, str]] = {}
    for name, phrasing in read_phrasings(arguments.rephrase).items():
        with rephrased(loaded, phrasing) as changed:
            played[name] = play(fabric, changed, arguments), exact_line(changed, arguments.temperature)
    return played


def log_figures(results: EpisodeResults, loaded: Loaded, folder: Path) -> None:
    """Log the means to TensorBoard, at the environment step of the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, value in results.means().items():
            writer.add_scalar(f"evaluation/{name}", value, loaded.info.get("env_steps", 0))


def capture(loaded: Loaded, arguments: argparse.Namespace) -> None:
    """Play the first episodes again with the same random numbers, and write them as videos."""
    from lrl.evaluation.episode_records import film

    sampling = loaded.policy.sampling_at(arguments.temperature)
    for index in range(min(arguments.num_videos, arguments.episodes)):
        path = arguments.capture_video / f"seed{arguments.seed + index}.mp4"
        turns = film(loaded.policy, loaded.env_factory, index, arguments.seed, path, sampling)
        print(f"{path}: {turns} turns")


def load(arguments: argparse.Namespace) -> Loaded:
    """Load the policy and the environment that the options name.

    Raises:
        ValueError: options contradict each other, or something cannot be loaded.
    """
    from lrl.evaluation.load import load_baseline, load_policy, saved_numbers

    check_subject(arguments)
    if arguments.checkpoint is not None:
        check_env_arguments(arguments)
        named = arguments.env_id or arguments.env_url
        numbers = saved_numbers(arguments.checkpoint, arguments.numbers)
        loaded = load_policy(arguments.checkpoint, envs_at(arguments, numbers) if named else None)
        kind = type(loaded.policy).__name__
        if arguments.policy == "mlp" and kind != "MLPPolicy":
            raise ValueError(f"--policy is 'mlp', but --checkpoint holds a {kind}; leave --policy out.")
        return loaded
    if arguments.policy is not None:
        return load_baseline(arguments.policy, envs_at(arguments))
    return load_untrained(arguments, envs_at(arguments))


def check_subject(arguments: argparse.Namespace) -> None:
    """Check that the options name exactly one policy.

    Raises:
        ValueError: they name none, or several.
    """
    given = [name for name in ("checkpoint", "model", "policy") if getattr(arguments, name) is not None]
    if arguments.policy == "mlp":
        if given != ["checkpoint", "policy"]:
            raise ValueError("--policy is 'mlp', which needs weights; give --checkpoint as well, and no --model.")
    elif len(given) != 1:
        raise ValueError(f"{len(given)} of --checkpoint, --model and --policy are given; it must be one of them.")


def play(fabric: Fabric, loaded: Loaded, arguments: argparse.Namespace) -> EpisodeResults:
    """Play this device's share of the episodes with a progress bar, and return those of all devices."""
    from lrl.cli.quiet import progress_bar
    from lrl.evaluation.episodes import evaluate_policy, gather

    policy = loaded.policy.to(fabric.device)
    fabric.strategy.precision.convert_module(policy)  # in place; does nothing with a mixed precision
    share = range(fabric.global_rank, arguments.episodes, fabric.world_size)
    with progress_bar(loaded.info["name"], len(share), fabric.is_global_zero) as advance:
        results = evaluate_policy(
            policy,
            loaded.env_factory,
            arguments.episodes,
            arguments.seed,
            arguments.num_envs,
            policy.sampling_at(arguments.temperature),
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            on_episode=advance,
        )
    return gather(results)


def exact_line(loaded: Loaded, temperature: float) -> str:
    """Describe the exact success of the greedy policy, or return "" where there is no transition table.

    Args:
        loaded: the policy, and the environment.
        temperature: Of the episodes; further requests to a chat model may cost money, so they are made only at 0.
    """
    from lrl.evaluation.exact import exact_evaluation, is_frozen_lake, lakes_of
    from lrl.policies.retrying import RetryingActor

    policy, note = loaded.policy, ""
    if isinstance(policy, RetryingActor):
        policy, note = policy.actor, ", without retries"
    if not is_frozen_lake(loaded.env_factory) or not policy.greedy_is_reproducible:
        return ""
    lakes = lakes_of(loaded.env_factory, num_maps=100)
    if policy.asks_chat_model and (temperature or len(lakes) > 1):
        return ""
    exact = exact_evaluation(policy, lakes)
    maps = f"mean over {len(exact.lakes)} maps" if len(exact.lakes) > 1 else "one map"
    return (
        f"exact success at temperature 0 ({maps}{note}): {exact.success.mean():.4f}; optimum {exact.optimum.mean():.4f}"
    )


main = subcommand(make_parser, run)
