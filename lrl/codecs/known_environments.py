"""Descriptions, names, units and ranges of Gymnasium's environments, which their spaces do not contain.

A range holds the values that the integers 0 and 999 represent where the bounds of the space are infinite or much
wider than the observed values: the limits at which episodes end, if there are any, else values that neither good nor
bad policies exceed.
"""

from __future__ import annotations

from lrl.codecs.mujoco import mujoco_action, mujoco_observation, mujoco_task
from lrl.codecs.quantities import Quantity
from lrl.codecs.spaces import EnvironmentMetadata

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
    "gymnasium.envs.mujoco.mujoco_env:MujocoEnv": EnvironmentMetadata(
        description="A simulated body with motors at its joints. The observation lists positions, then velocities.",
        task=mujoco_task,
        observation=mujoco_observation,
        action=mujoco_action,
    ),
}
"""Metadata by the ``module:class`` of the native environment. Names avoid importing the environments."""
