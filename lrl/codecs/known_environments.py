"""Descriptions, names, units and ranges of Gymnasium's environments, which their spaces do not contain.

A range holds the values that the integers 0 and 999 represent where the bounds of the space are infinite or much
wider than the observed values: the limits at which episodes end, if there are any, else values that neither good nor
bad policies exceed.
"""

from __future__ import annotations

from lrl.codecs.mujoco import mujoco_action, mujoco_observation, mujoco_task
from lrl.codecs.quantities import Quantity
from lrl.codecs.spaces import EnvironmentMetadata

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
    "lrl.envs.batched.maze:MazeEnv": EnvironmentMetadata(
        description="Find the way out of a maze of 3 x 3 cells, numbered row by row from 0, where you start, to 8, the "
        "exit. The walls are unknown.",
        action_names=("up", "down", "right", "left"),
    ),
    "lrl.envs.batched.nim:NimEnv": EnvironmentMetadata(
        description="Ten sticks lie on the table, and you begin. Each side takes 1 to 3 of them in turn; who takes the "
        "last stick loses. The observation is the number of sticks left."
    ),
    "lrl.envs.batched.navigation:NavigationEnv": EnvironmentMetadata(
        description="A robot in a corridor sees the distance to the wall in five directions. Go forward without "
        "touching a wall.",
        observation=tuple(Quantity(f"distance {side}", "m", (0.0, 30.0)) for side in _SIDES),
        action_names=("forward", "right", "left"),
    ),
    "lrl.envs.batched.pong:PongEnv": EnvironmentMetadata(
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
