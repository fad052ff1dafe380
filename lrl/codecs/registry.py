"""Codecs of native environments, and metadata that the spaces of Gymnasium's environments do not contain.

The metadata are descriptions, names, units and ranges. A range holds the values that the integers 0 and 999 represent
where the bounds of the space are infinite or much wider than the observed values: the limits at which episodes end, if
there are any, else values that neither good nor bad policies exceed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import NumberFormat, Range
from lrl.codecs.spaces import EnvironmentMetadata, Quantity, SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, TaxiCodec, is_slippery

T = TypeVar("T")

_CODECS: dict[str, Callable[[gym.Env], TextCodec]] = {
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": lambda env: FrozenLakeCodec(is_slippery(env)),
    "gymnasium.envs.toy_text.taxi:TaxiEnv": lambda env: TaxiCodec(),
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": lambda env: CliffWalkingCodec(),
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
    make_codec, metadata = _lookup(native, _CODECS), _lookup(native, ENVIRONMENT_METADATA)
    name = native.spec.id if native.spec is not None else type(native).__name__
    if make_codec is not None:
        if numbers is not None:
            raise ValueError(f"env.numbers is set, but {name} is described in words; it must be null.")
        return make_codec(native)
    try:
        resolved = None if metadata is None else metadata.resolve(native)
        return SpaceCodec(native.observation_space, native.action_space, numbers, resolved)
    except ValueError as error:
        raise ValueError(f"env is {name!r}: {error}") from error


def _lookup(native: gym.Env, table: Mapping[str, T]) -> T | None:
    for base in type(native).__mro__:
        entry = table.get(f"{base.__module__}:{base.__qualname__}")
        if entry is not None:
            return entry
    return None


# Metadata of Gymnasium's MuJoCo environments.
#
# Names and units follow Gymnasium's documentation. The ranges cover the values that random and bang-bang control reach
# in 3,600 steps (99% of the values for Humanoid's contact forces). Integers clip values out of range.


class Body(NamedTuple):
    """Describes a body, whose observation is positions, then velocities of its joints if ``numbers`` is empty."""

    task: str
    distances: int = 0
    """Number of leading positions that measure the travelled distance, which the observation may omit."""
    speed: float = 0.0
    """Highest velocity, in metres or radians per second."""
    numbers: tuple[Quantity, ...] = ()
    """All numbers, for bodies that do not observe joints. Version 5 of two environments omits constants at the end."""


def _each(unit: str, limit: float, *names: str) -> tuple[Quantity, ...]:
    return tuple(Quantity(name, unit, (-limit, limit)) for name in names)


_ARM = ("shoulder pan", "shoulder lift", "upper arm roll", "elbow flex", "forearm roll", "wrist flex", "wrist roll")

BODIES: dict[str, Body] = {
    "HalfCheetahEnv": Body(
        "A two-dimensional cheetah with a back and a front leg. Run forward as fast as possible, with small torques.",
        distances=1,
        speed=30.0,
    ),
    "HopperEnv": Body(
        "A two-dimensional torso on a single leg. Hop forward without falling, with small torques.", 1, 10.0
    ),
    "Walker2dEnv": Body(
        "A two-dimensional torso on two legs. Walk forward without falling, with small torques.", 1, 10.0
    ),
    "SwimmerEnv": Body(
        "A chain of three links in a fluid. Swim to the right as fast as possible, with small torques.", 2, 10.0
    ),
    "AntEnv": Body(
        "A torso with four legs of two links each. Walk forward without falling, with small torques.", 2, 20.0
    ),
    "HumanoidEnv": Body("A human body with legs and arms. Walk forward without falling, with small torques.", 2, 50.0),
    "HumanoidStandupEnv": Body(
        "A human body lies on the ground. Stand up and remain standing, with small torques.", 2, 50.0
    ),
    "InvertedPendulumEnv": Body("A pole stands on a cart. Push the cart so that the pole stays upright.", 0, 10.0),
    "InvertedDoublePendulumEnv": Body(
        "Two poles, one on top of the other, stand on a cart. Push the cart so that both stay upright.",
        numbers=(
            *_each("m", 1.0, "cart position"),
            *_each(
                "", 1.0, "sine of first pole", "sine of second pole", "cosine of first pole", "cosine of second pole"
            ),
            *_each("m/s", 10.0, "cart velocity"),
            *_each("rad/s", 10.0, "first pole velocity", "second pole velocity"),
            *_each("N", 10.0, "constraint force 1", "constraint force 2", "constraint force 3"),
        ),
    ),
    "ReacherEnv": Body(
        "An arm of two links in a plane. Bring its fingertip to the target, with small torques.",
        numbers=(
            *_each("", 1.0, "cosine of first arm", "cosine of second arm", "sine of first arm", "sine of second arm"),
            *_each("m", 0.3, "target x", "target y"),
            *_each("rad/s", 150.0, "first arm velocity", "second arm velocity"),
            *_each("m", 0.5, "fingertip to target x", "fingertip to target y", "fingertip to target z"),
        ),
    ),
    "PusherEnv": Body(
        "A robot arm. Push the object to the goal with its fingertip, with small torques.",
        numbers=(
            *_each("rad", 4.0, *_ARM),
            *_each("rad/s", 20.0, *(f"{joint} velocity" for joint in _ARM)),
            *_each("m", 2.0, *(f"{thing} {axis}" for thing in ("fingertip", "object", "goal") for axis in "xyz")),
        ),
    ),
}
"""Bodies by the class of the environment."""

POSITION_RANGE, DISTANCE_RANGE = (-4.0, 4.0), (-100.0, 100.0)

FORCES: dict[str, tuple[str, Range]] = {
    "cinert": ("mass and inertia of each body in kg, kg m and kg m2", (-10.0, 10.0)),
    "cvel": ("velocity of each body in rad/s and m/s", (-50.0, 50.0)),
    "qfrc_actuator": ("torque of each motor in N m", (-120.0, 120.0)),
    "cfrc_ext": ("external torque and force on each body in N m and N", (-500.0, 500.0)),
}
"""Descriptions and ranges of the sections after the velocities of Ant and Humanoid."""

ANT_FORCE_RANGE = (-1.0, 1.0)
"""Ant clips its contact forces."""

JOINTS: dict[str, str] = {
    "rootx": "x",
    "rootz": "height",
    "rooty": "pitch",
    "slider1": "x",
    "slider2": "y",
    "free_body_rot": "front tip angle",
    "motor1_rot": "first joint",
    "motor2_rot": "second joint",
    "slider": "cart position",
    "hinge": "pole angle",
    "bthigh": "back thigh",
    "bshin": "back shin",
    "bfoot": "back foot",
    "fthigh": "front thigh",
    "fshin": "front shin",
    "ffoot": "front foot",
    "thigh_joint": "thigh",
    "leg_joint": "leg",
    "foot_joint": "foot",
    "thigh_left_joint": "left thigh",
    "leg_left_joint": "left leg",
    "foot_left_joint": "left foot",
    "joint0": "first arm",
    "joint1": "second arm",
}
JOINTS |= {f"r_{joint.replace(' ', '_')}_joint": joint for joint in _ARM}
JOINTS |= {
    f"{joint}_{number}": f"{leg} {joint}"
    for joint in ("hip", "ankle")
    for number, leg in enumerate(("front left", "front right", "back left", "back right"), 1)
}
"""Names by joint of the XML file. Other joints keep their own names."""


_FREE, _SLIDE = 0, 2
"""MuJoCo's numbers of joint types (``mjtJoint``); all others here are hinges."""


def mujoco_task(native: Any) -> str | None:
    """Return the description of a body and its task; None if it is not one of Gymnasium's environments."""
    body = BODIES.get(type(native).__name__)
    return None if body is None else body.task


def mujoco_observation(native: Any) -> tuple[Quantity, ...] | None:
    """Return name, unit and range of each observed dimension.

    Args:
        native: one of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One per dimension; None for other environments.
    """
    name, size = type(native).__name__, native.observation_space.shape[0]
    body = BODIES.get(name)
    if body is None:
        return None
    if body.numbers:
        return body.numbers[:size]
    velocity_range = (-body.speed, body.speed)
    state = [*_positions(native, body), *_velocities(native, velocity_range), *_forces(native, name)]
    hidden = len(state) - size  # travelled distances at the front may be omitted
    return tuple(state[hidden:]) if hidden in (0, body.distances) else None


def mujoco_action(native: Any) -> tuple[Quantity, ...] | None:
    """Return name and unit of each number of an action. The name is that of the joint that the motor drives.

    Controls are multiplied by the motor's gear, so they are in units of torque or force only if the gear is 1.

    Args:
        native: one of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One per motor; None for other environments.
    """
    if type(native).__name__ not in BODIES:
        return None
    model, quantities = native.model, []
    for motor in range(model.nu):
        joint = int(model.actuator_trnid[motor, 0])
        kind, unit = ("force", "N") if model.jnt_type[joint] == _SLIDE else ("torque", "N m")
        unit = f"{kind} in {unit}" if model.actuator_gear[motor, 0] == 1 else kind
        quantities.append(Quantity(_part_name(native, joint), unit))
    return tuple(quantities)


def _joint_name(native: Any, joint: int) -> str:
    name: str = native.model.joint(joint).name
    return JOINTS.get(name, name.replace("_", " "))


def _part_name(native: Any, joint: int) -> str:
    """Return the name of the part that moves at a joint: ``cart`` if the joint is named ``cart position``."""
    return _joint_name(native, joint).removesuffix(" position").removesuffix(" angle")


def _positions(native: Any, body: Body) -> Iterator[Quantity]:
    """Yield the position of each joint, and position and orientation of a free joint."""
    ranges = [DISTANCE_RANGE] * body.distances + [POSITION_RANGE] * (native.model.nq - body.distances)
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


def _forces(native: Any, name: str) -> Iterator[Quantity]:
    """Yield the numbers after the velocities."""
    for section, count in _force_sections(name, native).items():
        unit, limits = FORCES[section]
        limits = ANT_FORCE_RANGE if name == "AntEnv" else limits
        yield from (Quantity(f"{section} {number}", unit, limits) for number in range(count))


def _force_sections(name: str, native: Any) -> dict[str, int]:
    """Return the number of observed values of each section of :data:`FORCES`, in their order."""
    sections: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sections is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sections = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sections = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sections = {"cfrc_ext": 6 * bodies}
    return {section: sections.get(section, 0) for section in FORCES}


_SIDES = ("far left", "left", "ahead", "right", "far right")
_CAR = (Quantity("position", "m"), Quantity("velocity", "m per step"))

ENVIRONMENT_METADATA: dict[str, EnvironmentMetadata] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": EnvironmentMetadata(
        description="A pole stands on a cart. Push the cart so that the pole stays upright.",
        observation=(
            Quantity("cart position", "m", (-2.4, 2.4)),
            Quantity("cart velocity", "m/s", (-3.0, 3.0)),
            Quantity("pole angle", "rad", (-0.2095, 0.2095)),
            Quantity("pole velocity", "rad/s", (-3.5, 3.5)),
        ),
        action_names=("left", "right"),
        has_expert=True,
    ),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": EnvironmentMetadata(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill.",
        observation=_CAR,
        action_names=("left", "coast", "right"),
    ),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": EnvironmentMetadata(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill with little force.",
        observation=_CAR,
        action=(Quantity("push", "force to the right"),),
    ),
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": EnvironmentMetadata(
        description="Two links hang from a joint. Turn the joint between them until the tip is above the line.",
        observation=(
            *(Quantity(f"{function} {link}") for link in (1, 2) for function in ("cosine", "sine")),
            *(Quantity(f"velocity {link}", "rad/s") for link in (1, 2)),
        ),
        action_names=("left", "none", "right"),
    ),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": EnvironmentMetadata(
        description="A pendulum hangs from a joint. Swing it up and keep it upright with little torque.",
        observation=(Quantity("cosine"), Quantity("sine"), Quantity("velocity", "rad/s")),
        action=(Quantity("torque", "N m"),),
    ),
    "lrl.search.environments:MazeEnv": EnvironmentMetadata(
        description="Find the way out of a maze of 3 x 3 cells, numbered row by row from 0, where you start, to 8, the "
        "exit. The walls are unknown.",
        action_names=("up", "down", "right", "left"),
    ),
    "lrl.search.environments:NimEnv": EnvironmentMetadata(
        description="Ten sticks lie on the table, and you begin. Each side takes 1 to 3 of them in turn; who takes the "
        "last stick loses. The observation is the number of sticks left."
    ),
    "lrl.search.environments:NavigationEnv": EnvironmentMetadata(
        description="A robot in a corridor sees the distance to the wall in five directions. Go forward without "
        "touching a wall.",
        observation=tuple(Quantity(f"distance {side}", "m", (0.0, 30.0)) for side in _SIDES),
        action_names=("forward", "right", "left"),
    ),
    "lrl.search.environments:PongEnv": EnvironmentMetadata(
        description="You move the left paddle of a game of Pong. Hit the ball as often as possible; y grows downwards.",
        observation=(
            Quantity("centre of the paddle", "pixels"),
            *(Quantity(f"ball {axis}", "pixels") for axis in "xy"),
            *(Quantity(f"ball velocity {axis}", "pixels per step") for axis in "xy"),
        ),
        action_names=("up", "down", "nothing"),
    ),
    "gymnasium.envs.mujoco.mujoco_env:MujocoEnv": EnvironmentMetadata(
        description="A simulated body with motors at its joints. The observation lists positions, then velocities.",
        task=mujoco_task,
        observation=mujoco_observation,
        action=mujoco_action,
    ),
}
"""Metadata by the ``module:class`` of the native environment. Names avoid importing the environments."""
