"""Facts of each environment for ProPS+: observations, actions, rewards, end of an episode and randomness.

The texts are about native numbers; codecs describe what language models act with. Facts are those of the environments'
source, and what their arguments can change is read from them. No best return and no strategy is in them, nor what the
original withholds: the holes of FrozenLake, the walls of the maze and the strategy in Nim.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from gymnasium import spaces

from lrl.codecs.grid import FrozenLakeCodec, get_desc
from lrl.codecs.known_environments import ENVIRONMENT_METADATA
from lrl.codecs.spaces import EnvironmentMetadata
from lrl.codecs.toy_text import CliffWalkingCodec
from lrl.search.facts import EnvironmentFacts, argument, numbered, observed_numbers
from lrl.search.mujoco_facts import MUJOCO_FACTS


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
    "lrl.envs.frozen_lake.maps:RandomMapsEnv": _random_lakes,
    "lrl.envs.batched.maze:MazeEnv": _maze,
    "lrl.envs.batched.nim:NimEnv": _nim,
    "lrl.envs.batched.navigation:NavigationEnv": _navigation,
    "lrl.envs.batched.pong:PongEnv": _pong,
}
"""Functions of a native environment by its ``module:class``."""
