"""What is known of MuJoCo's observations: a name for each number, and what integers stand for without bounds.

Names follow Gymnasium's documentation, joint by joint. The ends are wide enough for what random and bang-bang motors do
to each body in 3,600 steps (of Humanoid's contact forces, for 99%); positions are metres or radians, velocities per
second. What lies beyond is clipped.
"""

from __future__ import annotations

from typing import Any, TypeVar

Range = tuple[float, float]
T = TypeVar("T")

_POSITION, _TRAVELLED = (-4.0, 4.0), (-100.0, 100.0)
_BODIES: dict[str, tuple[int, float]] = {
    "HalfCheetahEnv": (1, 30.0),
    "HopperEnv": (1, 10.0),
    "Walker2dEnv": (1, 10.0),
    "SwimmerEnv": (2, 10.0),
    "AntEnv": (2, 20.0),
    "HumanoidEnv": (2, 50.0),
    "HumanoidStandupEnv": (2, 50.0),
    "InvertedPendulumEnv": (0, 10.0),
}
"""Class to how many of its positions say how far it has travelled, and to its highest velocity."""

_OTHERS: dict[str, tuple[tuple[int, Range], ...]] = {
    "PusherEnv": ((7, (-4.0, 4.0)), (7, (-20.0, 20.0)), (9, (-2.0, 2.0))),
    "ReacherEnv": ((4, (-1.0, 1.0)), (2, (-0.3, 0.3)), (2, (-150.0, 150.0)), (3, (-0.5, 0.5))),
    "InvertedDoublePendulumEnv": ((5, (-1.0, 1.0)), (3, (-10.0, 10.0)), (3, (-10.0, 10.0))),
}
"""Class to the sections of its observation; version 5 leaves out the last, constant numbers of two of them."""

_FORCES: dict[str, Range] = {
    "cinert": (-10.0, 10.0),
    "cvel": (-50.0, 50.0),
    "qfrc_actuator": (-120.0, 120.0),
    "cfrc_ext": (-500.0, 500.0),
}
"""Sections behind the velocities of a humanoid; an ant's contact forces are clipped to 1 by the environment."""

_JOINTS: dict[str, str] = {
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
_JOINTS |= {
    f"{joint}_{number}": f"{leg} {joint}"
    for joint in ("hip", "ankle")
    for number, leg in enumerate(("front left", "front right", "back left", "back right"), 1)
}
"""Joint of a body's XML file to its name; another joint keeps its own."""

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
    """The name of every observed number.

    Args:
        native: one of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One per dimension; None for a body that is not Gymnasium's.
    """
    name, size = type(native).__name__, native.observation_space.shape[0]
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name][:size]
    if name not in _BODIES:
        return None
    joints: list[str] = [native.model.joint(index).name for index in range(native.model.njnt)]
    words = {joint: _JOINTS.get(joint, joint.replace("_", " ")) for joint in joints}
    positions = [part for joint in joints for part in (_FREE_POSITIONS if joint == "root" else (words[joint],))]
    velocities = [
        part for joint in joints for part in (_FREE_VELOCITIES if joint == "root" else (f"{words[joint]} velocity",))
    ]
    forces = [f"{section} {n}" for section, count in _force_sections(name, native).items() for n in range(count)]
    return _visible((*positions, *velocities, *forces), name, size)


def mujoco_ranges(native: Any) -> tuple[Range, ...] | None:
    """The ends of every observed number.

    Args:
        native: one of Gymnasium's MuJoCo environments, version 4 or 5.

    Returns:
        One range per dimension; None for a body that is not Gymnasium's.
    """
    name, size = type(native).__name__, native.observation_space.shape[0]
    if name in _OTHERS:
        return tuple(end for count, end in _OTHERS[name] for _ in range(count))[:size]
    if name not in _BODIES:
        return None
    travelled, speed = _BODIES[name]
    positions = [_TRAVELLED] * travelled + [_POSITION] * (native.model.nq - travelled)
    ranges = (*positions, *[(-speed, speed)] * native.model.nv, *_force_ranges(name, native))
    return _visible(ranges, name, size)


def _visible(known: tuple[T, ...], name: str, size: int) -> tuple[T, ...] | None:
    """What is known of the observed numbers: how far a body has travelled may be left out at the front."""
    hidden = len(known) - size
    return known[hidden:] if hidden in (0, _BODIES[name][0]) else None


def _force_ranges(name: str, native: Any) -> list[Range]:
    ends = _FORCES | ({"cfrc_ext": (-1.0, 1.0)} if name == "AntEnv" else {})
    return [ends[section] for section, count in _force_sections(name, native).items() for _ in range(count)]


def _force_sections(name: str, native: Any) -> dict[str, int]:
    """How many numbers of each section of :data:`_FORCES` are observed, in their order."""
    sections: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sections is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sections = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sections = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sections = {"cfrc_ext": 6 * bodies}
    return {section: sections.get(section, 0) for section in _FORCES}
