"""Facts of Gymnasium's MuJoCo environments, version 5, from their source; weights and limits are read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lrl.codecs.mujoco import mujoco_action, mujoco_observation, mujoco_task
from lrl.codecs.quantities import describe_quantities
from lrl.search.facts import EnvironmentFacts, argument, observed_numbers

_SQUARES = "(sum of the squared numbers of the action)"
_NO_END = "nothing ends it early."


def _body(native: Any, *, reward: str, end: str, start: str, note: str) -> EnvironmentFacts:
    box, acted = native.action_space, describe_quantities(mujoco_action(native) or ())
    assert np.ptp(box.low) == np.ptp(box.high) == 0, "all motors have the same range"
    return EnvironmentFacts(
        world=mujoco_task(native) or "",
        observation=f"{observed_numbers(native, mujoco_observation(native) or ())} {note}",
        actions=f"the numbers are, in order: {acted}; each is from {box.low[0]:g} to {box.high[0]:g}.",
        reward=reward,
        end=end,
        start=start,
    )


def _times(weight: float) -> str:
    return "" if weight == 1 else f"{weight:g} * "


def _span(limit: float) -> str:
    return f"-{limit:g} to {limit:g}"


def _uniform_start(native: Any) -> str:
    scale = argument(native, "reset_noise_scale")
    return f"at the start each position, angle and velocity differs from that at rest by {_span(scale)}, at random."


def _normal_start(native: Any) -> str:
    scale = argument(native, "reset_noise_scale")
    return (
        f"at the start each position and angle differs from that at rest by {_span(scale)}, at random, and each "
        f"velocity is a normal one of standard deviation {scale:g}."
    )


def _track(native: Any) -> str:
    low, high = native.model.joint("slider").range
    return f"The track of the cart ends at {low:g} and {high:g}. A positive force pushes to positive positions."


def _inverted_pendulum(native: Any) -> EnvironmentFacts:
    return _body(
        native,
        reward="1, but 0 in the step that ends the episode early.",
        end="the pole angle is beyond -0.2 or 0.2.",
        start=_uniform_start(native),
        note=f"An upright pole has angle 0, a positive angle leans to positive positions. {_track(native)}",
    )


def _inverted_double_pendulum(native: Any) -> EnvironmentFacts:
    alive = argument(native, "healthy_reward")
    return _body(
        native,
        reward=f"{alive:g} - 0.01 * x^2 - (y - 2)^2 - 0.001 * v1^2 - 0.005 * v2^2, where x is the position of the tip "
        "of the second pole in m, y its height above the cart, and v1 and v2 are the velocities of the poles. In the "
        f"step that ends the episode early, the bonus of {alive:g} is left out.",
        end="the height y is 1 m or less; it is 1.2 m where both poles are upright.",
        start=_normal_start(native),
        note="Upright poles have angle 0, positive angles lean to positive positions. The angle of the second pole is "
        "measured from the first. The constraint force is that on the cart; it and the velocities are clipped to -10 "
        f"and 10. {_track(native)}",
    )


def _reacher(native: Any) -> EnvironmentFacts:
    distance, cost = argument(native, "reward_dist_weight"), argument(native, "reward_control_weight")
    return _body(
        native,
        reward=f"-{_times(distance)}(distance of the fingertip from the target in m) - {_times(cost)}{_SQUARES}.",
        end=_NO_END,
        start="at the start the target is at a random place within 0.2 m of the shoulder, where it stays; the angles "
        "are random from -0.1 to 0.1, and their velocities from -0.005 to 0.005.",
        note="The angle of the second arm is measured from the first. The last two numbers are the position of the "
        "fingertip minus that of the target.",
    )


def _forward(native: Any, part: str, alive: str = "") -> str:
    weight, cost = argument(native, "forward_reward_weight"), argument(native, "ctrl_cost_weight")
    return (
        f"{_times(weight)}v{alive} - {_times(cost)}{_SQUARES}, where v is the mean velocity of the {part} along x "
        f"during the step of {native.dt:g} s, in m/s."
    )


def _swimmer(native: Any) -> EnvironmentFacts:
    reward, note = _forward(native, "front tip"), "x grows to the right."
    return _body(native, reward=reward, end=_NO_END, start=_uniform_start(native), note=note)


def _half_cheetah(native: Any) -> EnvironmentFacts:
    reward, note = (
        _forward(native, "torso"),
        "Heights are from that at rest. A positive pitch is nose down. Forward is +x.",
    )
    return _body(native, reward=reward, end=_NO_END, start=_normal_start(native), note=note)


def _on_legs(native: Any, note: str, more: str = "") -> EnvironmentFacts:
    (lowest, highest), (back, front) = (argument(native, f"healthy_{name}_range") for name in ("z", "angle"))
    height = f"{lowest:g} m or less" + f", or {highest:g} m or more" * bool(np.isfinite(highest))
    fallen = f"the height is {height}; or the pitch is {back:g} or less, or {front:g} or more{more}"
    ends, alive = argument(native, "terminate_when_unhealthy"), argument(native, "healthy_reward")
    lost = "In the step that ends the episode early" if ends else f"In steps after which {fallen}"
    return _body(
        native,
        reward=f"{_forward(native, 'torso', f' + {alive:g}')} {lost}, the bonus of {alive:g} is left out.",
        end=f"{fallen}." if ends else _NO_END,
        start=_uniform_start(native),
        note=f"{note}A positive pitch leans forward. Forward is +x. Velocities are clipped to -10 and 10.",
    )


def _hopper(native: Any) -> EnvironmentFacts:
    low, high = argument(native, "healthy_state_range")
    return _on_legs(native, "", f"; or another angle or a velocity is {low:g} or less, or {high:g} or more")


def _walker(native: Any) -> EnvironmentFacts:
    return _on_legs(native, "Thigh, leg and foot without a side are those of the right leg. ")


MUJOCO_FACTS: dict[str, Callable[[Any], EnvironmentFacts]] = {
    f"gymnasium.envs.mujoco.{module}_v5:{name}Env": write
    for module, name, write in (
        ("inverted_pendulum", "InvertedPendulum", _inverted_pendulum),
        ("inverted_double_pendulum", "InvertedDoublePendulum", _inverted_double_pendulum),
        ("reacher", "Reacher", _reacher),
        ("swimmer", "Swimmer", _swimmer),
        ("half_cheetah", "HalfCheetah", _half_cheetah),
        ("hopper", "Hopper", _hopper),
        ("walker2d", "Walker2d", _walker),
    )
}
"""Functions of a native environment by its ``module:class``."""
