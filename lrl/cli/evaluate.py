"""The command ``lrl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lrl.cli.command import command, command_line
from lrl.cli.options import DeviceOptions, ModelOptions, PlayedEnvOptions, PlayOptions, exactly_one
from lrl.ranges import PositiveInt

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lrl.evaluation.episodes import EpisodeResults
    from lrl.evaluation.load import Loaded


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """Options of the policy."""

    checkpoint: str | None = None
    """A checkpoint or a run directory."""
    policy: str | None = None
    """A baseline: random, constant or expert."""
    success_at: Literal["last_step", "any_step"] | None = None
    """Which steps decide whether an episode is a success; default: env.success_at of the run, or last_step."""
    merge_adapters: bool = False
    """Merge the adapters into the weights first, which is faster; results are the same up to rounding."""
    rephrase: str | None = None
    """YAML file of rephrased prompts; the episodes are played again with each of them."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of the output."""

    json: Path | None = None
    """Write all figures and episodes to this file."""
    tensorboard: Path | None = None
    """Log the figures in this folder."""
    capture_video: Path | None = None
    """Write an mp4 of each of the first episodes to this folder."""
    num_videos: PositiveInt | None = None
    """Number of episodes of --capture_video; default: 3."""


def evaluate(
    *,
    subject: SubjectOptions,
    language_model: ModelOptions,
    env: PlayedEnvOptions,
    play: PlayOptions,
    device: DeviceOptions,
    output: OutputOptions,
) -> None:
    """Play N seeded episodes and print return, length, success and invalid actions, each with a 95% interval.

    lrl evaluate --checkpoint runs/frozen_lake/grpo/<run>
    lrl evaluate --model HuggingFaceTB/SmolLM2-135M-Instruct --env_id FrozenLake-v1 --episodes 20
    lrl evaluate --model smollm2-135m --dtype bfloat16 --choose --env_id CartPole-v1
    lrl evaluate --checkpoint runs/frozen_lake/grpo/<run> --rephrase assets/rephrased/frozen_lake.yaml
    lrl evaluate --policy expert --json expert.json
    lrl evaluate --policy random --env_url http://127.0.0.1:8000
    lrl evaluate --api_url http://127.0.0.1:8000/v1 --model NAME --env_id FrozenLake-v1 --response_format direct
    """
    language_model.check(device.devices)
    if output.num_videos is not None and output.capture_video is None:
        raise ValueError("--num_videos is given without --capture_video; give both or neither.")
    settings = {"subject": subject, "language_model": language_model, "env": env, "play": play, "output": output}
    device.fabric().launch(partial(_on_device, **settings))


def _on_device(
    fabric: Fabric,
    subject: SubjectOptions,
    language_model: ModelOptions,
    env: PlayedEnvOptions,
    play: PlayOptions,
    output: OutputOptions,
) -> None:
    """Evaluate on one of the devices; the first one reports the results of all."""
    from lrl.cli.run_directory import commit
    from lrl.evaluation.load import usage_line
    from lrl.evaluation.report import write_json

    loaded = _load(subject, language_model, env)
    if subject.success_at is not None:
        loaded = loaded._replace(env_factory=loaded.env_factory.with_settings(success_at=subject.success_at))
    if subject.merge_adapters:
        from lrl.lm.merging import merge_adapters_of

        merge_adapters_of(loaded.policy, str(subject.checkpoint or subject.policy or language_model.model))
    loaded = language_model.with_retries(loaded)
    with fabric.autocast():
        results = play.play(fabric, loaded)
        usage = loaded.policy.report()  # without the episodes of rephrased prompts
        row = "trained" if subject.checkpoint else "model" if language_model.model else str(subject.policy)
        rows = {row: results} | _play_baselines(fabric, loaded, play, row)
        lines = [results.success_rule, exact_line(loaded, play.temperature)]
        rephrased = _play_rephrased(fabric, loaded, play, subject.rephrase)
        if not fabric.is_global_zero:
            return
        rows |= {f"{row}, {name}": other for name, (other, _) in rephrased.items()}
        lines += [f"{name}: {line}" for name, (_, line) in rephrased.items() if line]
        in_all = loaded.policy.report()
        lines += [usage_line(usage)] if usage else []
        lines += [f"in all: {usage_line(in_all)}"] if in_all != usage else []
        _print(rows, loaded, play, "\n".join(filter(None, lines)))
        if output.json is not None:
            names = loaded.info["env_id"], loaded.info["name"]
            report: dict[str, Any] = results.report(*names) | {"temperature": play.temperature}
            report |= {"command": command_line("lrl evaluate"), "commit": commit()}
            report |= {"usage": usage, "usage_in_all": in_all} if usage else {}
            report |= {"merged_adapters": True} if subject.merge_adapters else {}
            report |= (
                {"rephrased": {key: one.report(*names) for key, (one, _) in rephrased.items()}} if rephrased else {}
            )
            write_json(report, output.json)
        if output.tensorboard is not None:
            _log_figures(results, loaded, output.tensorboard)
        if output.capture_video is not None:
            _capture(loaded, play, output.capture_video, output.num_videos or 3)


def _load(subject: SubjectOptions, language_model: ModelOptions, env: PlayedEnvOptions) -> Loaded:
    """Load the policy and the environment that the options name.

    Raises:
        ValueError: If the options name no policy or several, or something cannot be loaded.
    """
    from lrl.evaluation.load import load_baseline

    exactly_one(checkpoint=subject.checkpoint, model=language_model.model, policy=subject.policy)
    if subject.checkpoint is not None:
        return env.load(subject.checkpoint)
    if subject.policy is not None:
        return load_baseline(subject.policy, env.factory())
    return language_model.load(env.factory())


def _play_baselines(fabric: Fabric, loaded: Loaded, play: PlayOptions, row: str) -> dict[str, EpisodeResults]:
    """Play the baselines that the environment has, except the one that is evaluated itself."""
    from lrl.evaluation.load import load_baseline

    rows: dict[str, EpisodeResults] = {}
    for name in ("random", "expert"):
        try:
            baseline = load_baseline(name, loaded.env_factory)
        except ValueError:
            continue  # this environment has no such baseline
        if name != row:
            rows[name] = play.play(fabric, baseline)
    return rows


def _play_rephrased(
    fabric: Fabric, loaded: Loaded, play: PlayOptions, file: str | None
) -> dict[str, tuple[EpisodeResults, str]]:
    """Play the episodes with each rephrasing; return the results and a line with the exact success, by name."""
    if file is None:
        return {}
    from lrl.evaluation.rephrased import read_phrasings, rephrased

    played: dict[str, tuple[EpisodeResults, str]] = {}
    for name, phrasing in read_phrasings(file).items():
        with rephrased(loaded, phrasing) as changed:
            played[name] = play.play(fabric, changed), exact_line(changed, play.temperature)
    return played


def exact_line(loaded: Loaded, temperature: float) -> str:
    """Describe the exact success of the greedy policy, or return "" if there is no transition table.

    Args:
        loaded: the policy, and the environment.
        temperature: sampling temperature of the episodes; a chat model, whose requests may cost money, is queried only
            at 0.
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


def _print(rows: dict[str, EpisodeResults], loaded: Loaded, play: PlayOptions, caption: str) -> None:
    """Print the table of results in the terminal."""
    from rich.console import Console

    from lrl.evaluation.report import results_table

    seeds = f"seeds {play.seed} to {play.seed + play.episodes - 1}"
    how = f"{play.episodes} episodes ({seeds}), temperature {play.temperature:g}, 95% intervals"
    title = f"{loaded.info['name']} in {loaded.info['env_id']}\n{how}"
    Console().print(results_table(rows, title, caption))


def _log_figures(results: EpisodeResults, loaded: Loaded, folder: Path) -> None:
    """Log the means to TensorBoard, at the environment step of the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, value in results.means().items():
            writer.add_scalar(f"evaluation/{name}", value, loaded.info.get("env_steps", 0))


def _capture(loaded: Loaded, play: PlayOptions, folder: Path, count: int) -> None:
    """Play the first episodes again with the same random numbers, and write them as videos."""
    from lrl.evaluation.episode_records import record_video

    sampling = loaded.policy.sampling_at(play.temperature)
    for index in range(min(count, play.episodes)):
        path = folder / f"seed{play.seed + index}.mp4"
        turns = record_video(loaded.policy, loaded.env_factory, index, play.seed, path, sampling)
        print(f"{path}: {turns} turns")


main = command(evaluate)
