"""The command ``lrl watch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.command import command
from lrl.cli.options import ModelOptions, PlayedEnvOptions, exactly_one
from lrl.ranges import NonNegativeFloat, PositiveInt, Seed

if TYPE_CHECKING:
    from lrl.evaluation.episode_records import WatchedTurn
    from lrl.evaluation.load import Loaded


def watch(
    *,
    checkpoint: str | None = None,
    policy: str | None = None,
    human: bool = False,
    language_model: ModelOptions,
    env: PlayedEnvOptions,
    seed: Seed = 10_000,
    temperature: NonNegativeFloat = 0.0,
    turns: PositiveInt | None = None,
    frames: Path | None = None,
    video: Path | None = None,
) -> None:
    """Follow one episode in the terminal, turn by turn, or play it yourself.

    lrl watch --policy expert --env_id FrozenLake-v1 --seed 3
    lrl watch --checkpoint runs/frozen_lake/grpo/<run> --video episode.gif
    lrl watch --api_url http://127.0.0.1:8000/v1 --model NAME --response_format direct
    lrl watch --human --env_id lrl/BabyAI-GoToLocal-v0
    lrl watch --policy random --env_url http://127.0.0.1:8000

    Args:
        checkpoint: a checkpoint or a run directory.
        policy: a baseline: random, constant or expert.
        human: type the actions yourself; an empty line ends the game.
        language_model: a language model that lrl has not trained.
        env: environment of the episode.
        seed: seed of the episode.
        temperature: sampling temperature; 0 takes the most probable response or action.
        turns: stop after this many turns.
        frames: write a picture of each turn to this folder.
        video: write the episode to this .mp4 or .gif file.

    Raises:
        ValueError: If the options contradict each other, or the policy or the environment cannot be loaded.
        SystemExit: If the input ends, or the user interrupts the episode; the exit status is 0.
    """
    from lrl.evaluation.episode_records import check_video, render_modes, watch_episode, write_video

    exactly_one(checkpoint=checkpoint, model=language_model.model, policy=policy, human=human)
    if video is not None:
        check_video(video)
    try:
        loaded = language_model.with_retries(_load(checkpoint, policy, language_model, env))
        modes = render_modes(loaded.env_factory)
        mode = "rgb_array" if frames or video else "ansi" if "ansi" in modes and not human else None
        print(f"{loaded.info['name']} in {loaded.info['env_id']}, seed {seed}")
        watched: list[WatchedTurn] = []
        sampling = loaded.policy.sampling_at(temperature)
        for turn in watch_episode(loaded.policy, loaded.env_factory, 0, seed, sampling, mode):
            watched.append(turn)
            _show(turn, human, frames)
            if turns is not None and turn.number + 1 >= turns:
                break
        total = sum(turn.reward for turn in watched)
        print(f"\n{len(watched)} turns, return {total:g}, {_outcome(watched[-1])}")
        if video is not None:
            write_video(watched, video, loaded.env_factory)
            print(f"video: {video}")
    except (EOFError, KeyboardInterrupt):  # the end of the input, or Ctrl-C, leaves the episode
        sys.stderr.write("\nleft\n")
        raise SystemExit(0) from None


def _load(checkpoint: str | None, policy: str | None, language_model: ModelOptions, env: PlayedEnvOptions) -> Loaded:
    """Load the policy and the environment that the options name."""
    from lrl.evaluation.load import Loaded, env_id, load_baseline

    language_model.check()
    if language_model.model is not None:
        return language_model.load(env.factory())
    if checkpoint is not None:
        return env.load(checkpoint)
    envs = env.factory()
    if policy is not None:
        return load_baseline(policy, envs)
    from lrl.policies.baselines import HumanActor

    actor = HumanActor("direct")
    actor.connect(envs.codec)
    print(envs.codec.description)
    return Loaded(actor, envs, {"name": "you", "env_id": env_id(envs)})


def _show(turn: WatchedTurn, human: bool, frames: Path | None) -> None:
    """Print one turn, and write its picture; a human player has seen the observation already."""
    if isinstance(turn.picture, str):
        print(f"\n{turn.picture.rstrip()}")
    if frames is not None:
        import numpy as np
        from PIL import Image

        frames.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(turn.picture)).save(frames / f"{turn.number:04d}.png")
    if not human:
        response = f"\nresponse: {turn.response}" if turn.response else ""
        print(f"\n--- turn {turn.number}\n{turn.prompt or turn.observation}{response}")
    print(f"action: {turn.action or f'none, {turn.reason}'}   reward: {turn.reward:g}")


def _outcome(turn: WatchedTurn) -> str:
    """Describe how the episode ended, given its last turn."""
    if not (turn.terminated or turn.truncated):
        return "stopped"
    how = "terminated" if turn.terminated else "truncated"
    return f"{how}, {'success' if turn.success else 'no success'}"


main = command(watch)
