"""Single episodes of an evaluation, turn by turn, for ``lrl watch`` and for videos."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.native import close_env, shown
from lrl.envs.text import text_of
from lrl.files import require
from lrl.policies.actor import Actor
from lrl.ranges import check_seed
from lrl.rollouts.runner import EnvRunner
from lrl.types import RandomKeys, SamplingConfig

Picture = np.ndarray | str | None
"""A frame, uint8 ``(height, width, 3)``, or a text, depending on the render mode; None without rendering."""


@dataclass(frozen=True, kw_only=True)
class WatchedTurn:
    """Holds one turn in readable form."""

    number: int
    """Index of the turn in its episode."""
    observation: str
    """Text of the observation before the action."""
    prompt: str
    """Prompt of the language model; empty for a policy without one."""
    response: str
    """Response of the policy; empty for a policy with native actions."""
    action: str
    """Text of the action; empty if it was not legal."""
    reason: str
    """Reason why the action was not legal; empty if it was."""
    reward: float
    terminated: bool
    """Whether the turn terminated the episode."""
    truncated: bool
    """Whether the turn truncated the episode."""
    success: bool
    """Whether the episode is a success if it ends with this turn."""
    picture: Picture
    """Picture of the state before the action."""
    last_picture: Picture = None
    """Picture of the state after the action, if the turn ends the episode."""


def watch_episode(
    policy: Actor,
    env_factory: EnvFactory,
    index: int,
    seed: int,
    sampling: SamplingConfig | None = None,
    render_mode: str | None = None,
) -> Iterator[WatchedTurn]:
    """Play the same episode as :func:`~lrl.evaluation.episodes.evaluate_policy`, and yield each turn.

    Args:
        policy: connected and configured policy.
        env_factory: factory of the environment.
        index: index of the episode, which is reset with ``seed + index``.
        seed: seed of episode 0 and of the policy's random numbers.
        sampling: overrides the policy's sampling settings.
        render_mode: Gymnasium's ``rgb_array`` or ``ansi``; None renders nothing.

    Raises:
        ValueError: If ``seed`` is out of range, or the environment cannot be rendered in this mode or on this machine.
    """
    check_seed("seed", seed, index + 1)
    envs = _with_render_mode(env_factory, render_mode).make(1, policy.response_format)
    episode, native, codec = np.array([index]), policy.response_format is None, policy.codec
    assert codec is not None, "connect() must be called before"
    try:
        runner = EnvRunner(policy, envs)
        runner.reset(seed + episode, episode)
        while not runner.ended[0]:
            picture, prompt = _render(envs, render_mode), policy.prompt_text(runner.observations[0], runner.memory[0])
            keys = RandomKeys(seed=seed, purpose="evaluation", collection=0, env=episode, turn=runner.lengths)
            step = runner.turn(keys, sampling=sampling)
            observation, response = step.observations[0], step.decisions.actions[0]
            ended = step.terminated[0] or step.truncated[0]
            yield WatchedTurn(
                number=int(step.turn[0]),
                observation=codec.observation_to_text(observation) if native else text_of(observation),
                prompt=prompt,
                response="" if native else response,
                action=policy.action_text(response),
                reason=str(step.infos["invalid_reason"][0]),
                reward=float(step.rewards[0]),
                terminated=bool(step.terminated[0]),
                truncated=bool(step.truncated[0]),
                success=bool(step.infos.get("success", [False])[0]),
                picture=picture,
                last_picture=_render(envs, render_mode) if ended else None,
            )
    finally:
        envs.close()


def render_modes(env_factory: EnvFactory) -> tuple[str, ...]:
    """Return the render modes of an environment; none if it is not a registered environment."""
    return tuple(_metadata(env_factory).get("render_modes") or ())


def _metadata(env_factory: EnvFactory) -> dict[str, Any]:
    """Return Gymnasium's metadata of an environment; empty if it is not a registered environment."""
    if not isinstance(env_factory, GymnasiumEnvs):
        return {}
    env = env_factory.make_native()
    close_env(env)
    return env.metadata


def record_video(
    policy: Actor, env_factory: EnvFactory, index: int, seed: int, path: Path, sampling: SamplingConfig | None = None
) -> int:
    """Play an episode, write it as a video and return its number of turns.

    Args:
        policy: connected and configured policy.
        env_factory: factory of the environment.
        index: index of the episode, which is reset with ``seed + index``.
        seed: seed of episode 0 and of the policy's random numbers.
        path: see :func:`write_video`.
        sampling: overrides the policy's sampling settings.

    Raises:
        ValueError: If the environment cannot be rendered, or no video can be written.
    """
    check_video(path)
    turns = list(watch_episode(policy, env_factory, index, seed, sampling, "rgb_array"))
    write_video(turns, path, env_factory)
    return len(turns)


def check_video(path: Path) -> None:
    """Check that :func:`write_video` can write a file of this type.

    Raises:
        ValueError: If the name ends in neither .mp4 nor .gif, or a package is missing.
    """
    if path.suffix not in (".mp4", ".gif"):
        raise ValueError(f"the name of a video must end in .mp4 or .gif; {path} does not.")
    if path.suffix == ".mp4":
        for name in ("imageio", "imageio_ffmpeg"):
            require(name, "video", "a video of the type .mp4")


def write_video(turns: Sequence[WatchedTurn], path: Path, env_factory: EnvFactory) -> None:
    """Write the states of turns, which were rendered as ``rgb_array``, as a video at the environment's frame rate.

    Args:
        turns: consecutive turns of one episode.
        path: an .mp4 or .gif file; folders are created.
        env_factory: factory of the environment.
    """
    last = [turns[-1].last_picture] if turns[-1].last_picture is not None else []
    frames: list[Any] = [np.asarray(picture) for picture in [*(turn.picture for turn in turns), *last]]
    fps = _metadata(env_factory).get("render_fps", 10)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        from PIL import Image

        first, *others = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    else:
        import imageio.v2

        imageio.v2.mimwrite(path, frames, fps=fps, macro_block_size=2)  # H.264 requires even sizes


def _with_render_mode(env_factory: EnvFactory, render_mode: str | None) -> EnvFactory:
    """Return a factory of the same environments in this process, with a render mode.

    Raises:
        ValueError: If the environment does not have this render mode.
    """
    if not isinstance(env_factory, GymnasiumEnvs):
        if render_mode is not None:
            raise ValueError(f"{type(env_factory).__name__} cannot be rendered; it must be a registered environment.")
        return env_factory
    if render_mode is not None and render_mode not in (modes := render_modes(env_factory)):
        raise ValueError(
            f"{env_factory.id} cannot be rendered as {render_mode}; its render modes are {', '.join(modes) or 'none'}."
        )
    rendering = {} if render_mode is None else {"render_mode": render_mode}
    return env_factory.with_settings(vectorization="sync", kwargs=env_factory.kwargs | rendering)


def _render(envs: VectorEnv, render_mode: str | None) -> Picture:
    """Render the only environment.

    Raises:
        ValueError: If rendering fails on this machine, or does not return an array.
    """
    if render_mode is None:
        return None
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # for machines without a screen; read before the first frame
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    name = getattr(envs, "name", "the environment")
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            pictures: Any = envs.render()
            picture = pictures[0]
    except Exception as error:  # MuJoCo, GLFW, EGL and pygame raise different errors
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{name} cannot be rendered on this machine ({type(error).__name__}: {reason}); "
            "MuJoCo needs a screen, or EGL or OSMesa and MUJOCO_GL=egl or osmesa."
        ) from error
    if render_mode == "rgb_array" and not isinstance(picture, np.ndarray):
        raise ValueError(f"{name} rendered {shown(picture)} as rgb_array; it must be an array of pixels.")
    return picture
