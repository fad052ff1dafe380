"""Names and ranges of the observations of Gymnasium's MuJoCo environments.

Names follow Gymnasium's documentation, joint by joint. The ranges cover the values that random and bang-bang control
reach in 3,600 steps (99% of them for Humanoid's contact forces). Positions are in metres or radians, velocities in
metres or radians per second. Integers clip values out of range.
"""

from __future__ import annotations

from typing import Any, TypeVar

from lrl.codecs.numbers import Range

T = TypeVar("T")

_POSITION_RANGE, _DISTANCE_RANGE = (-4.0, 4.0), (-100.0, 100.0)
_LOCOMOTION: dict[str, tuple[int, float]] = {
    "HalfCheetahEnv": (1, 30.0),
    "HopperEnv": (1, 10.0),
    "Walker2dEnv": (1, 10.0),
    "SwimmerEnv": (2, 10.0),
    "AntEnv": (2, 20.0),
    "HumanoidEnv": (2, 50.0),
    "HumanoidStandupEnv": (2, 50.0),
    "InvertedPendulumEnv": (0, 10.0),
}
"""Number of leading positions that measure the travelled distance, and the highest velocity, by class."""

_OTHER_RANGES: dict[str, tuple[tuple[int, Range], ...]] = {
    "PusherEnv": ((7, (-4.0, 4.0)), (7, (-20.0, 20.0)), (9, (-2.0, 2.0))),
    "ReacherEnv": ((4, (-1.0, 1.0)), (2, (-0.3, 0.3)), (2, (-150.0, 150.0)), (3, (-0.5, 0.5))),
    "InvertedDoublePendulumEnv": ((5, (-1.0, 1.0)), (3, (-10.0, 10.0)), (3, (-10.0, 10.0))),
}
"""Length and range of each section of the observation, by class. Version 5 omits the last constant numbers of two."""

_FORCE_RANGES: dict[str, Range] = {
    "cinert": (-10.0, 10.0),
    "cvel": (-50.0, 50.0),
    "qfrc_actuator": (-120.0, 120.0),
    "cfrc_ext": (-500.0, 500.0),
}
"""Ranges of the sections after the velocities of Humanoid. Ant clips its contact forces to 1."""

_JOINT_NAMES: dict[str, str] = {
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
}
_JOINT_NAMES |= {
    f"{joint}_{number}": f"{leg} {joint}"
    for joint in ("hip", "ankle")
    for number, leg in enumerate(("front left", "front right", "back left", "back right"), 1)
}
"""Names by joint of the XML file. Other joints keep their own names."""

_FREE_POSITIONS = ("x", "y", "height", *(f"orientation {part}" for part in "wxyz"))
_FREE_VELOCITIES = tuple(f"{axis} {kind}" for kind in ("velocity", "angular velocity") for axis in "xyz")

_ARM = ("shoulder pan", "shoulder lift", "upper arm roll", "elbow flex", "forearm roll", "wrist flex", "wrist roll")
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "PusherEnv": (
        *_ARM,
        *(f"{joint} velocity" for joint in _ARM),
        *(f"{thing} {axis}" for thing in ("fingertip", "object", "goal") for axis in "xyz"),
    ),
    "ReacherEnv": (
        *(f"{function} of {arm} arm" for function in ("cosine", "sine") for arm in ("first", "second")),
        *("target x", "target y", "first arm velocity", "second arm velocity"),
        *(f"fingertip to target {axis}" for axis in "xyz"),
    ),
    "InvertedDoublePendulumEnv": (
        "cart position",
        *(f"{function} of {pole} pole" for function in ("sine", "cosine") for pole in ("first", "second")),
        *("cart velocity", "first pole velocity", "second pole velocity"),
        *(f"constraint force {number}" for number in range(1, 4)),
    ),
}


def mujoco_names(native: Any) -> tuple[str, ...] | None:
    """Return the name of each observed dimension.

    Args:
        native: One of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One name per dimension; None for other environments.
    """
    name, size = type(native).__name__, native.observation_space.shape[0]
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name][:size]
    if name not in _LOCOMOTION:
        return None
    positions: list[str] = []
    velocities: list[str] = []
    for index in range(native.model.njnt):
        joint: str = native.model.joint(index).name
        if joint == "root":
            positions += _FREE_POSITIONS
            velocities += _FREE_VELOCITIES
        else:
            positions.append(_JOINT_NAMES.get(joint, joint.replace("_", " ")))
            velocities.append(f"{positions[-1]} velocity")
    forces = [f"{section} {n}" for section, count in _force_sections(name, native).items() for n in range(count)]
    return _observed((*positions, *velocities, *forces), name, size)


def mujoco_ranges(native: Any) -> tuple[Range, ...] | None:
    """Return the range of each observed dimension.

    Args:
        native: One of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One range per dimension; None for other environments.
    """
    name, size = type(native).__name__, native.observation_space.shape[0]
    if name in _OTHER_RANGES:
        return tuple(section_range for count, section_range in _OTHER_RANGES[name] for _ in range(count))[:size]
    if name not in _LOCOMOTION:
        return None
    num_distances, speed = _LOCOMOTION[name]
    positions = [_DISTANCE_RANGE] * num_distances + [_POSITION_RANGE] * (native.model.nq - num_distances)
    velocities = [(-speed, speed)] * native.model.nv
    force_ranges = _FORCE_RANGES | ({"cfrc_ext": (-1.0, 1.0)} if name == "AntEnv" else {})
    forces = [force_ranges[section] for section, count in _force_sections(name, native).items() for _ in range(count)]
    return _observed((*positions, *velocities, *forces), name, size)


def _observed(state: tuple[T, ...], name: str, size: int) -> tuple[T, ...] | None:
    """Return the observed part of the state: travelled distances at its front may be omitted."""
    hidden = len(state) - size
    return state[hidden:] if hidden in (0, _LOCOMOTION[name][0]) else None


def _force_sections(name: str, native: Any) -> dict[str, int]:
    """Return how many numbers of each section of :data:`_FORCE_RANGES` are observed, in their order."""
    sections: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sections is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sections = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sections = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sections = {"cfrc_ext": 6 * bodies}
    return {section: sections.get(section, 0) for section in _FORCE_RANGES}
