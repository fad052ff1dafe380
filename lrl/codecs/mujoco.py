"""What integers stand for in MuJoCo's observations, whose spaces have no bounds.

The ends are wide enough for what random and bang-bang motors do to each body in 3,600 steps (of Humanoid's contact
forces, for 99%); positions are metres or radians, velocities per second. What lies beyond is clipped.
"""

from __future__ import annotations

from typing import Any

Range = tuple[float, float]

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
    hidden = len(ranges) - size
    return ranges[hidden:] if hidden in (0, travelled) else None


def _force_ranges(name: str, native: Any) -> list[Range]:
    sections: dict[str, int] | None = getattr(native, "observation_structure", None)
    if sections is None:  # version 4
        bodies, joints = native.model.nbody, native.model.nv
        sections = {}
        if name in ("HumanoidEnv", "HumanoidStandupEnv"):
            sections = {"cinert": 10 * bodies, "cvel": 6 * bodies, "qfrc_actuator": joints, "cfrc_ext": 6 * bodies}
        elif name == "AntEnv" and native._use_contact_forces:
            sections = {"cfrc_ext": 6 * bodies}
    ends = _FORCES | ({"cfrc_ext": (-1.0, 1.0)} if name == "AntEnv" else {})
    return [end for section, end in ends.items() for _ in range(sections.get(section, 0))]
