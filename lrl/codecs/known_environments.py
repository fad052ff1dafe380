"""Descriptions, names and ranges of Gymnasium's environments, which their spaces do not contain.

A range holds the values that the integers 0 and 999 represent where the bounds of the space are infinite or much
wider than the observed values: the limits at which episodes end, if there are any, else values that neither good nor
bad policies exceed.
"""

from __future__ import annotations

from lrl.codecs.mujoco import mujoco_names, mujoco_ranges
from lrl.codecs.spaces import EnvironmentMetadata

ENVIRONMENT_METADATA: dict[str, EnvironmentMetadata] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": EnvironmentMetadata(
        description="A pole stands on a cart. Push the cart so that the pole stays upright.",
        observation_names=("cart position", "cart velocity", "pole angle", "pole velocity"),
        action_names=("left", "right"),
        observation_ranges=((-2.4, 2.4), (-3.0, 3.0), (-0.2095, 0.2095), (-3.5, 3.5)),
        has_expert=True,
    ),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": EnvironmentMetadata(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill.",
        observation_names=("position", "velocity"),
        action_names=("left", "coast", "right"),
    ),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": EnvironmentMetadata(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill with little force.",
        observation_names=("position", "velocity"),
    ),
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": EnvironmentMetadata(
        description="Two links hang from a joint. Turn the joint between them until the tip is above the line.",
        observation_names=("cosine 1", "sine 1", "cosine 2", "sine 2", "velocity 1", "velocity 2"),
        action_names=("left", "none", "right"),
    ),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": EnvironmentMetadata(
        description="A pendulum hangs from a joint. Swing it up and keep it upright with little torque.",
        observation_names=("cosine", "sine", "velocity"),
    ),
    "gymnasium.envs.mujoco.mujoco_env:MujocoEnv": EnvironmentMetadata(
        description="A simulated body with motors at its joints. The observation lists positions, then velocities.",
        observation_names=mujoco_names,
        observation_ranges=mujoco_ranges,
    ),
}
"""Metadata by the ``module:class`` of the native environment. Names avoid importing the environments."""
