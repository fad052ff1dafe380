"""Names, units and ranges of the numbers of Gymnasium's MuJoCo environments, from the table of bodies and the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lrl.codecs.mujoco_bodies import ANT_FORCE_RANGE, BODIES, DISTANCE_RANGE, FORCES, JOINTS, POSITION_RANGE, Body
from lrl.codecs.number_codecs import Range
from lrl.codecs.quantities import Quantity

_FREE, _SLIDE = 0, 2
"""MuJoCo's numbers of joint types (``mjtJoint``); all others here are hinges."""


def mujoco_task(native: Any) -> str | None:
    """Return the description of a body and its task; None for other environments than Gymnasium's."""
    body = BODIES.get(type(native).__name__)
    return None if body is None else body.task


def mujoco_observation(native: Any) -> tuple[Quantity, ...] | None:
    """Return name, unit and range of each observed dimension.

    Args:
        native: One of Gymnasium's MuJoCo environments, version 4 or 5.

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
    """Return name and unit of each number of an action, the joint that a motor drives.

    Controls are multiplied by the motor's gear, so that only a gear of 1 has units of torque or force.

    Args:
        native: One of Gymnasium's MuJoCo environments, version 4 or 5.

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
    """Return the name of what moves at a joint: ``cart`` where the joint's is ``cart position``."""
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
    """Return how many numbers of each section of :data:`FORCES` are observed, in their order."""
    sections: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sections is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sections = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sections = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sections = {"cfrc_ext": 6 * bodies}
    return {section: sections.get(section, 0) for section in FORCES}
