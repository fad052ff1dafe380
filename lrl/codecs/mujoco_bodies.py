"""The table of what is known about Gymnasium's MuJoCo bodies: their task, and names, units and ranges of their numbers.

Names and units follow Gymnasium's documentation, joint by joint. The ranges cover the values that random and bang-bang
control reach in 3,600 steps (99% of them for Humanoid's contact forces). Integers clip values out of range.
"""

from __future__ import annotations

from typing import NamedTuple

from lrl.codecs.number_codecs import Range
from lrl.codecs.quantities import Quantity


class Body(NamedTuple):
    """Describes a body whose observation is positions, then velocities of its joints, unless numbers are listed."""

    task: str
    distances: int = 0
    """Number of leading positions that measure the travelled distance, which the observation may omit."""
    speed: float = 0.0
    """Highest velocity, in metres or radians per second."""
    numbers: tuple[Quantity, ...] = ()
    """All numbers, for bodies that observe other things than joints. Version 5 omits the last constant ones of two."""


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
"""What the sections after the velocities of Ant and Humanoid measure, and their ranges."""

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
