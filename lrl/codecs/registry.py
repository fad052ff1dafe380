"""Codecs of native environments, and what is known about environments that their spaces do not contain.

The table of known environments is ``environments.yaml``: descriptions, names, units and ranges of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.boards import PlainBoardCodec
from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import NumberFormat, Range
from lrl.codecs.spaces import EnvironmentMetadata, Quantity, SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, TaxiCodec, is_slippery
from lrl.files import from_yaml

_CODECS: dict[str, Callable[[gym.Env], TextCodec]] = {
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": lambda env: FrozenLakeCodec(is_slippery(env)),
    "gymnasium.envs.toy_text.taxi:TaxiEnv": lambda env: TaxiCodec(),
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": lambda env: CliffWalkingCodec(),
    "lrl.envs.boards:RagenLakeEnv": lambda env: PlainBoardCodec("frozen_lake", is_slippery=env.is_slippery),  # pyright: ignore[reportAttributeAccessIssue]
    "lrl.envs.boards:SokobanEnv": lambda env: PlainBoardCodec("sokoban"),
    "minigrid.minigrid_env:MiniGridEnv": lambda env: BabyAICodec(has_expert=hasattr(env, "expert_action")),
}
"""Codec constructors by the ``module:class`` of the native environment. Names avoid importing the environments."""


def codec_for(env: gym.Env, numbers: NumberFormat | None = None) -> TextCodec:
    """Create the codec of an environment.

    The codec is registered for the environment's class or its nearest registered base class. All other environments
    get a :class:`~lrl.codecs.spaces.SpaceCodec`.

    Args:
        env: a native environment.
        numbers: the format of numbers; None selects decimals.

    Raises:
        ValueError: If the spaces are not supported, or ``numbers`` is given for an environment described in words.
    """
    native = env.unwrapped
    make_codec = next((_CODECS[name] for name in class_names(native) if name in _CODECS), None)
    name = native.spec.id if native.spec is not None else type(native).__name__
    if make_codec is not None:
        if numbers is not None:
            raise ValueError(f"env.numbers is set, but {name} is described in words; it must be null.")
        return make_codec(native)
    try:
        return SpaceCodec(native.observation_space, native.action_space, numbers, environment_metadata(native))
    except ValueError as error:
        raise ValueError(f"env is {name!r}: {error}") from error


def environment_metadata(native: gym.Env) -> EnvironmentMetadata:
    """Return what is known about a native environment; without any information if it is not in the table."""
    names = class_names(native)
    if "gymnasium.envs.mujoco.mujoco_env:MujocoEnv" in names:
        return _mujoco_metadata(native)
    known = _table()["environments"]
    return next((EnvironmentMetadata(**_parsed(known[name])) for name in names if name in known), EnvironmentMetadata())


def class_names(native: gym.Env) -> list[str]:
    """Return ``module:class`` of a native environment and of its base classes, nearest first."""
    return [f"{base.__module__}:{base.__qualname__}" for base in type(native).__mro__]


# Gymnasium's MuJoCo environments, versions 4 and 5.


class Body(NamedTuple):
    """Describes the body in a MuJoCo environment.

    If ``numbers`` is empty, an observation contains the positions and then the velocities of the body's joints.
    """

    task: str
    """Description of the task in one or two sentences."""
    distances: int = 0
    """Number of leading positions that measure the travelled distance, which the observation may omit."""
    speed: float = 0.0
    """Highest velocity, in metres or radians per second."""
    numbers: tuple[Quantity, ...] = ()
    """All numbers, for bodies that do not observe joints. Version 5 of two environments omits constants at the end."""


def _quantities(groups: list[dict[str, Any]]) -> tuple[Quantity, ...]:
    """Return the numbers of all entries of the table."""
    return tuple(
        Quantity(name, group.get("unit", ""), tuple(group["range"]) if "range" in group else None)
        for group in groups
        for name in group["names"]
    )


def _parsed(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry of the table, with quantities and tuples."""
    numbers = {key: _quantities(entry[key]) for key in ("observation", "action", "numbers") if key in entry}
    names = {"action_names": tuple(entry["action_names"])} if "action_names" in entry else {}
    return entry | numbers | names


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Return the table of known environments, which is parsed only if an environment needs it."""
    return from_yaml(Path(__file__).with_name("environments.yaml").read_text(encoding="utf-8"))


@cache
def bodies() -> dict[str, Body]:
    """Return the bodies by the class of the environment."""
    return {name: Body(**_parsed(entry)) for name, entry in _table()["bodies"].items()}


_POSITION_RANGE, _DISTANCE_RANGE = (-4.0, 4.0), (-100.0, 100.0)
_FORCES: dict[str, tuple[str, Range]] = {
    "cinert": ("mass and inertia of each body in kg, kg m and kg m2", (-10.0, 10.0)),
    "cvel": ("velocity of each body in rad/s and m/s", (-50.0, 50.0)),
    "qfrc_actuator": ("torque of each motor in N m", (-120.0, 120.0)),
    "cfrc_ext": ("external torque and force on each body in N m and N", (-500.0, 500.0)),
}
"""Description and range of each section that follows the velocities in observations of Ant and Humanoid."""
_ANT_FORCE_RANGE = (-1.0, 1.0)
"""Ant clips its contact forces."""
_FREE, _SLIDE = 0, 2
"""MuJoCo's numbers of joint types (``mjtJoint``); all others here are hinges."""


def _mujoco_metadata(native: Any) -> EnvironmentMetadata:
    """Return what is known about a MuJoCo environment: only that it is one unless it is one of Gymnasium's."""
    description = "A simulated body with motors at its joints. The observation lists positions, then velocities."
    body = bodies().get(type(native).__name__)
    if body is None:
        return EnvironmentMetadata(description=description)
    observation, action = _mujoco_observation(native, body), _mujoco_action(native)
    return EnvironmentMetadata(description=description, task=body.task, observation=observation, action=action)


def _mujoco_observation(native: Any, body: Body) -> tuple[Quantity, ...] | None:
    """Return name, unit and range of each observed dimension; None if the observation has an unexpected size."""
    size = native.observation_space.shape[0]
    if body.numbers:
        return body.numbers[:size]
    state = [*_positions(native, body), *_velocities(native, (-body.speed, body.speed)), *_forces(native)]
    hidden = len(state) - size  # travelled distances at the front may be omitted
    return tuple(state[hidden:]) if hidden in (0, body.distances) else None


def _mujoco_action(native: Any) -> tuple[Quantity, ...]:
    """Return name and unit of each number of an action. Each number is named by the joint that its motor drives.

    Controls are multiplied by the motor's gear, so they are in units of torque or force only if the gear is 1.
    """
    model, quantities = native.model, []
    for motor in range(model.nu):
        joint = int(model.actuator_trnid[motor, 0])
        kind, unit = ("force", "N") if model.jnt_type[joint] == _SLIDE else ("torque", "N m")
        unit = f"{kind} in {unit}" if model.actuator_gear[motor, 0] == 1 else kind
        quantities.append(Quantity(_part_name(native, joint), unit))
    return tuple(quantities)


def _joint_name(native: Any, joint: int) -> str:
    name: str = native.model.joint(joint).name
    return _table()["joints"].get(name, name.replace("_", " "))


def _part_name(native: Any, joint: int) -> str:
    """Return the name of the part that moves at a joint: ``cart`` if the joint is named ``cart position``."""
    return _joint_name(native, joint).removesuffix(" position").removesuffix(" angle")


def _positions(native: Any, body: Body) -> Iterator[Quantity]:
    """Yield the position of each joint, and position and orientation of a free joint."""
    ranges = [_DISTANCE_RANGE] * body.distances + [_POSITION_RANGE] * (native.model.nq - body.distances)
    names: list[tuple[str, str]] = []
    for joint, kind in enumerate(native.model.jnt_type):
        if kind == _FREE:
            names += [("x", "m"), ("y", "m"), ("height", "m"), *((f"orientation {part}", "") for part in "wxyz")]
        else:
            names.append((_joint_name(native, joint), "m" if kind == _SLIDE else "rad"))
    yield from (Quantity(*one, limits) for one, limits in zip(names, ranges, strict=True))


def _velocities(native: Any, limits: Range) -> Iterator[Quantity]:
    """Yield the velocity of each joint, and velocity and angular velocity of a free joint."""
    for joint, kind in enumerate(native.model.jnt_type):
        if kind == _FREE:
            yield from (Quantity(f"{axis} velocity", "m/s", limits) for axis in "xyz")
            yield from (Quantity(f"{axis} angular velocity", "rad/s", limits) for axis in "xyz")
        else:
            yield Quantity(f"{_part_name(native, joint)} velocity", "m/s" if kind == _SLIDE else "rad/s", limits)


def _forces(native: Any) -> Iterator[Quantity]:
    """Yield the numbers after the velocities, in the order of :data:`_FORCES`."""
    name = type(native).__name__
    sizes: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sizes is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sizes = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sizes = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sizes = {"cfrc_ext": 6 * bodies}
    for section, (unit, limits) in _FORCES.items():
        limits = _ANT_FORCE_RANGE if name == "AntEnv" else limits
        yield from (Quantity(f"{section} {number}", unit, limits) for number in range(sizes.get(section, 0)))
