"""One episode of an evaluation, turn by turn: what was seen, asked, answered and paid, and how it looked."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.text import text_of
from lrl.policies.actor import Actor
from lrl.prompts.response_format import response_format as format_named
from lrl.rollouts.episodes import rows_of
from lrl.types import History, RandomKeys, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class WatchedTurn:
    """A decision and what came of it."""

    number: int
    observation: str
    prompt: str
    """What the language model read; empty where there is none."""
    answer: str
    action: str
    """As it was understood; empty where it was no legal action."""
    reason: str
    """Why it was not."""
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    picture: Any
    """Of the state before the action: uint8 ``(height, width, 3)``, a text, or None."""


def follow(
    policy: Actor,
    env_factory: EnvFactory,
    index: int,
    seed: int,
    sampling: SamplingConfig | None = None,
    render_mode: str | None = None,
) -> Iterator[WatchedTurn]:
    """Play episode ``index`` as :func:`~lrl.evaluation.episodes.evaluate_policy` does.

    Args:
        policy: connected and configured.
        env_factory: where to play.
        index: of the episode; it is reset with ``seed + index``.
        seed: of episode 0, and of the policy's random numbers.
        sampling: how the policy decides; None takes its own way.
        render_mode: Gymnasium's: ``rgb_array``, ``ansi``, or None for no pictures.

    Raises:
        ValueError: the environment cannot be drawn that way, here or at all.
    """
    envs: Any = _drawn(env_factory, render_mode).make(1, policy.response_format)
    try:
        policy.prepare(envs)
        number = np.array([index])
        observations, _ = envs.reset(seed=[seed + index], options={"episode": number})
        memory: list[History] = [()]
        ended, turn = False, 0
        while not ended:
            observation, picture = rows_of(observations, envs)[0], _picture(envs, render_mode)
            prompt = policy.prompt_text(observation, memory[0])
            keys = RandomKeys(seed=seed, purpose="evaluation", collection=0, env=number, turn=np.array([turn]))
            decisions = policy.act([observation], memory, keys, sampling)
            memory, answer = decisions.memory, decisions.actions[0]
            native = policy.response_format is None
            observations, rewards, terminated, truncated, infos = envs.step(
                np.asarray([answer]) if native else (answer,)
            )
            ended = bool(terminated[0] or truncated[0])
            yield WatchedTurn(
                number=turn,
                observation=_text(policy).observation_to_text(observation) if native else text_of(observation),
                prompt=prompt,
                answer="" if native else answer,
                action=_understood(policy, answer),
                reason=str(infos["invalid_reason"][0]),
                reward=float(rewards[0]),
                terminated=bool(terminated[0]),
                truncated=bool(truncated[0]),
                success=bool(infos["success"][0]),
                picture=picture,
            )
            turn += 1
    finally:
        envs.close()


def render_modes(env_factory: EnvFactory) -> tuple[str, ...]:
    """How an environment can be drawn, by Gymnasium's names."""
    if not isinstance(env_factory, GymnasiumEnvs):
        return ()
    env = env_factory.make_native()
    env.close()
    return tuple(env.metadata.get("render_modes") or ())


def film(
    policy: Actor, env_factory: EnvFactory, index: int, seed: int, path: Path, sampling: SamplingConfig | None = None
) -> int:
    """Play an episode and write it as an mp4.

    Returns:
        How many turns it had.

    Raises:
        ValueError: it cannot be drawn, or not be written.
    """
    _check_video_writer()
    turns = list(follow(policy, env_factory, index, seed, sampling, "rgb_array"))
    assert isinstance(env_factory, GymnasiumEnvs)
    env = env_factory.make_native()
    env.close()
    write_video([turn.picture for turn in turns], path, env.metadata.get("render_fps", 10))
    return len(turns)


def write_video(frames: Sequence[Any], path: Path, fps: int) -> None:
    """Write pictures as an mp4.

    Args:
        frames: uint8 ``(height, width, 3)``, all alike.
        path: the file; folders are created.
        fps: pictures per second.
    """
    import imageio.v2

    path.parent.mkdir(parents=True, exist_ok=True)
    imageio.v2.mimwrite(path, [*frames], fps=fps, macro_block_size=2)  # H.264 wants even sizes


def _check_video_writer() -> None:
    """imageio finds it by itself, and complains late."""
    for name in ("imageio", "imageio_ffmpeg"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--capture_video needs {name}, which is not installed; pip install 'lrl[video]'.")


def _drawn(env_factory: EnvFactory, render_mode: str | None) -> EnvFactory:
    """The same environments in this process, drawn."""
    if not isinstance(env_factory, GymnasiumEnvs):
        if render_mode is not None:
            raise ValueError(f"{type(env_factory).__name__} cannot be drawn; it must be a registered environment.")
        return env_factory
    if render_mode is not None and render_mode not in (modes := render_modes(env_factory)):
        raise ValueError(
            f"{env_factory.id} cannot be drawn as {render_mode}; it knows {', '.join(modes) or 'nothing'}."
        )
    twin = copy.copy(env_factory)
    twin.vectorization = "sync"
    if render_mode is not None:
        twin.kwargs = env_factory.kwargs | {"render_mode": render_mode}
    return twin


def _picture(envs: Any, render_mode: str | None) -> Any:
    if render_mode is None:
        return None
    if "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # without a screen; read when MuJoCo draws first
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            return envs.render()[0]
    except Exception as error:  # MuJoCo, GLFW, EGL and pygame each raise their own
        reason = " ".join(str(error).split())[:120]
        name = envs.spec.id if envs.spec else "the environment"
        raise ValueError(
            f"{name} cannot be drawn on this machine ({type(error).__name__}: {reason}); "
            "MuJoCo needs a screen, or EGL or OSMesa and MUJOCO_GL=egl or osmesa."
        ) from error


def _text(policy: Actor) -> TextCodec:
    assert policy.codec is not None, "connect() comes first"
    return policy.codec


def _understood(policy: Actor, answer: Any) -> str:
    if policy.response_format is None:
        return _text(policy).action_to_text(answer)
    try:
        action = _text(policy).text_to_action(format_named(policy.response_format).extract(answer))
    except InvalidActionError:
        return ""
    return _text(policy).action_to_text(action)
