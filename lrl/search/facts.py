"""The facts that ProPS+ is told of an environment, and what their texts are composed of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from gymnasium import spaces

from lrl.codecs.known_environments import ENVIRONMENT_METADATA, mujoco_action, mujoco_observation, mujoco_task
from lrl.codecs.quantities import Quantity, describe_quantities
from lrl.codecs.spaces import EnvironmentMetadata
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, get_desc


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Holds the facts of an environment, each as one or more sentences."""

    world: str
    """What there is, and what is to be done."""
    observation: str
    """What an observation is."""
    actions: str
    """What the actions are, and what they do."""
    reward: str
    """The reward of a step."""
    end: str
    """When an episode ends before its time limit."""
    start: str
    """How an episode starts, which options of the reset may change."""
    noise: str = "Nothing else is random."
    """What is random after the start."""

    def render(self, max_steps: int | None, known_start: bool = True) -> str:
        """Return the whole text, one line for each fact.

        Args:
            max_steps: number of steps after which an episode is cut; None for no limit.
            known_start: whether episodes start as in :attr:`start`.
        """
        cut = "" if max_steps is None else f"It is cut after {max_steps} steps."
        start = self.start if known_start else "options of the reset set the start."
        facts = {
            "Observation": self.observation,
            "Actions": self.actions,
            "Reward of a step": self.reward,
            "End of an episode": f"{self.end} {cut}",
            "Randomness": f"{start} {self.noise}",
        }
        return "\n".join([self.world, *(f"{name}: {_sentence(fact)}" for name, fact in facts.items())])


def _sentence(text: str) -> str:
    """Begin with a capital letter, unless the text begins with a number or the name of a variable."""
    stripped = text.strip()
    return stripped[:1].upper() + stripped[1:] if stripped[:2].isalpha() else stripped


def argument(native: Any, name: str) -> Any:
    """Return an argument that an environment was made with, or its default.

    Args:
        native: a native environment without wrappers.
        name: of the argument; it must exist.
    """
    given = {} if native.spec is None else native.spec.kwargs
    if name in given:
        return given[name]
    found = (inspect.signature(base.__init__).parameters.get(name) for base in type(native).__mro__)
    return next(parameter.default for parameter in found if parameter is not None)


def observed_numbers(native: Any, quantities: Sequence[Quantity]) -> str:
    """List the numbers of an observation, with the bounds of their space where these are finite."""
    box: spaces.Box = native.observation_space
    bounds = [(float(low), float(high)) for low, high in zip(box.low, box.high, strict=True)]
    listed = [
        one._replace(range=limits if np.isfinite(limits).all() else None)
        for one, limits in zip(quantities, bounds, strict=True)
    ]
    return f"the numbers are, in order: {describe_quantities(listed)}."


def numbered(names: Sequence[str], start: int = 0) -> str:
    """Return the number and name of each action of a discrete space."""
    return ", ".join(f"{number} is {name}" for number, name in enumerate(names, start))


# Facts of Gymnasium's MuJoCo environments, version 5, from their source; weights and limits are read from them.

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


# Facts of each environment for ProPS+: observations, actions, rewards, end of an episode and randomness.
#
# The texts are about native numbers; codecs describe what language models act with. Facts are those of the
# environments' source, and what their arguments can change is read from them. No best return and no
# strategy is in them, nor what the original withholds: the holes of FrozenLake, the walls of the maze and
# the strategy in Nim.


def environment_facts(native: Any) -> EnvironmentFacts | None:
    """Return the facts of an environment; None for one that is not known.

    Args:
        native: a native environment without wrappers. Subclasses of known ones are unknown, as they may differ.
    """
    write = _FACTS.get(_name(native))
    return None if write is None else write(native)


def _name(native: Any) -> str:
    return f"{type(native).__module__}:{type(native).__qualname__}"


def _known(native: Any) -> tuple[EnvironmentMetadata, str]:
    """Return the metadata of an environment, and the list of its actions."""
    known = ENVIRONMENT_METADATA[_name(native)]
    return known, numbered(known.action_names or ())


def _observed(native: Any) -> str:
    return observed_numbers(native, _known(native)[0].quantities("observation") or ())


# -- classic control ------------------------------------------------------------------------------------------------


def _cart_pole(native: Any) -> EnvironmentFacts:
    known, actions = _known(native)
    place, angle = native.x_threshold, native.theta_threshold_radians
    sparse = argument(native, "sutton_barto_reward")
    return EnvironmentFacts(
        world=known.description,
        observation=f"{_observed(native)} Right is positive; an upright pole has angle 0, a positive one leans right.",
        actions=f"{actions}; each pushes the cart with a force of {native.force_mag:g} N.",
        reward="0, but -1 in the step that ends the episode early." if sparse else "1, also in the last step.",
        end=f"the cart position is beyond -{place:g} or {place:g}, or the pole angle is beyond -{angle:.4f} or "
        f"{angle:.4f}.",
        start="all four numbers start at random from -0.05 to 0.05.",
    )


def _mountain_car(native: Any) -> EnvironmentFacts:
    (known, actions), goal, velocity = _known(native), native.goal_position, native.goal_velocity
    if isinstance(native.action_space, spaces.Box):
        actions = (
            f"one number from -1 to 1, the push to the right. It adds {native.power:g} times itself to the velocity"
        )
        reward = "-0.1 * (action squared), and 100 more in the step that reaches the flag."
    else:
        actions = f"{actions}. A push left or right adds -{native.force:g} or {native.force:g} to the velocity"
        reward = "-1, whatever the action."
    return EnvironmentFacts(
        world=f"{known.description} The flag is at position {goal:g}, the bottom of the valley at -0.524.",
        observation=f"{_observed(native)} Right is positive.",
        actions=f"{actions} in each step, and the slope adds -0.0025 * cos(3 * position); the velocity stays within "
        f"its range. A wall at {native.min_position:g} stops the car.",
        reward=reward,
        end=f"the position is at least {goal:g}" + f", and the velocity at least {velocity:g}" * bool(velocity) + ".",
        start="the car starts at rest, at a random position from -0.6 to -0.4.",
    )


# -- tables ---------------------------------------------------------------------------------------------------------


_NO_SLIP = ("Nothing is random.", "Nothing else is random.")
"""Noise of moves that never slip, without and with a random start."""


def _slip(chance: float) -> str:
    """Describe the noise of moves, of which a part goes to the sides."""
    straight, aside = (Fraction(part).limit_denominator(1000) for part in (chance, (1 - chance) / 2))
    return (
        f"Moves slip: with probability {straight} the move goes in the direction of the action, and in each of the two "
        f"directions at right angles to it with probability {aside}. Nothing else is random."
    )


def _lake(native: Any, world: str, start: str) -> EnvironmentFacts:
    """Return the facts of FrozenLake on any map."""
    rows, columns = native.desc.shape
    goal, hole, ice = argument(native, "reward_schedule")
    return EnvironmentFacts(
        world=f"You walk on a frozen lake of {rows} rows and {columns} columns of cells, numbered from 0 at the top "
        f"left. Reach the goal G and avoid the holes H. {world}",
        observation=f"one whole number, state = {columns} * row + column, the cell that you are on.",
        actions=f"{numbered(FrozenLakeCodec().action_texts or ())}. Each moves you by one cell; a move off the map "
        "leaves you where you are.",
        reward=f"{goal:g} in the step to the goal, {hole:g} in the step into a hole, {ice:g} in every other step.",
        end="you are on the goal or in a hole.",
        start=start,
        noise=_slip(argument(native, "success_rate")) if argument(native, "is_slippery") else _NO_SLIP[bool(start)],
    )


def _frozen_lake(native: Any) -> EnvironmentFacts:
    if argument(native, "desc") is None and argument(native, "map_name") is None:
        return _lake(native, "The places of the holes are random and not known.", "The start is the cell S.")
    cells = "".join(get_desc(native))
    starts, goals = ([str(i) for i, cell in enumerate(cells) if cell == letter] for letter in "SG")
    places = f"{_states('start S', starts)} {_states('goal G', goals)} Where the holes are is not told."
    start = "" if len(starts) == 1 else "the start is a random one of the cells S."
    return _lake(native, places, start)


def _states(name: str, found: list[str]) -> str:
    if len(found) == 1:
        return f"The {name} is state {found[0]}."
    return f"The {name} is any of the states {', '.join(found)}."


def _random_lakes(native: Any) -> EnvironmentFacts:
    start = "each episode has another random map, of which only your own cell is observed."
    return _lake(native, "The start is at the top left, the goal at the bottom right.", start)


def _cliff_walking(native: Any) -> EnvironmentFacts:
    (rows, columns), slippery = native.shape, argument(native, "is_slippery")
    last, start, goal = rows - 1, columns * (rows - 1), columns * rows - 1
    return EnvironmentFacts(
        world=f"You walk on a grid of {rows} rows and {columns} columns, numbered from 0 at the top left, from state "
        f"{start} (row {last} column 0) to the goal, state {goal} (row {last} column {columns - 1}). Between them in "
        f"row {last}, states {start + 1} to {goal - 1}, is a cliff: who steps into it is put back to state {start}, "
        "and the episode goes on.",
        observation=f"one whole number, state = {columns} * row + column, the cell that you are on, which is never one "
        "of the cliff.",
        actions=f"{numbered(CliffWalkingCodec().action_texts or ())}. Each moves you by one cell; a move off the grid "
        "leaves you where you are.",
        reward="-1, but -100 in a step into the cliff.",
        end="you are on the goal.",
        start="",
        noise=_slip(1 / 3) if slippery else "Nothing is random.",
    )


# -- the other environments of ProPS ----------------------------------------------------------------------------------


def _maze(native: Any) -> EnvironmentFacts:
    known, actions = _known(native)
    return EnvironmentFacts(
        world=known.description,
        observation="one whole number, state = 3 * row + column, the cell that you are in.",
        actions=f"{actions}. Each moves you by one cell; a move into a wall leaves you where you are.",
        reward=f"1 in the step to the exit, {-0.1 / 9:.4f} in every other step.",
        end="you are at the exit.",
        start="",
        noise="Nothing is random.",
    )


def _nim(native: Any) -> EnvironmentFacts:
    return EnvironmentFacts(
        world="Ten sticks lie on the table, and you begin. Each side takes 1 to 3 of them in turn; who takes the last "
        "stick loses.",
        observation="one whole number, the sticks that are left at your turn; at 0 the game is over.",
        actions="1, 2 or 3, the number of sticks that you take.",
        reward="1 if the opponent takes the last stick, -1 if you take it or more than are left, 0 in all other steps.",
        end="the last stick is taken, or you take more than are left.",
        start="",
        noise="The strategy of the opponent is not known; some of its moves are random.",
    )


def _navigation(native: Any) -> EnvironmentFacts:
    known, actions = _known(native)
    return EnvironmentFacts(
        world=f"{known.description} The corridor is a closed loop, in the shape of an L and 3 m wide.",
        observation=f"{_observed(native)} Their directions are -90, -45, 0, 45 and 90 degrees to the right.",
        actions=f"{actions}. Forward moves by 0.2 m. Right and left turn by 0.2 rad and move by 0.04 m.",
        reward="5 for forward, -0.5 for a turn, but -200 in the step of a collision.",
        end="with a collision, which is an observed distance below 0.4 m.",
        start="an episode starts at a random place halfway between the walls, with any heading.",
        noise="Each distance, move in m and turn in rad has normal noise of standard deviation 0.02.",
    )


def _pong(native: Any) -> EnvironmentFacts:
    known, actions = _known(native)
    return EnvironmentFacts(
        world=f"{known.description} The field has 800 x 600 pixels. Paddles are 80 pixels high; the ball bounces off "
        "them and off the top and the bottom, and the place where it hits a paddle sets its velocity y: from -5 at the "
        "upper end to 5 at the lower. The right paddle follows the ball.",
        observation=f"{_observed(native)} A negative velocity x is towards you.",
        actions=f"{actions}. Up and down move the paddle by -5 and 5 pixels.",
        reward="1 if your paddle hits the ball, 0 in every other step.",
        end="the ball leaves the field to the left or to the right.",
        start="the ball starts in the middle, to a random side, with a random velocity y from -5 to 5.",
    )


_FACTS: dict[str, Callable[[Any], EnvironmentFacts]] = MUJOCO_FACTS | {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": _cart_pole,
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": _mountain_car,
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": _mountain_car,
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": _frozen_lake,
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": _cliff_walking,
    "lrl.envs.frozen_lake:RandomMapsEnv": _random_lakes,
    "lrl.search.environments:MazeEnv": _maze,
    "lrl.search.environments:NimEnv": _nim,
    "lrl.search.environments:NavigationEnv": _navigation,
    "lrl.search.environments:PongEnv": _pong,
}
"""Functions of a native environment by its ``module:class``."""
