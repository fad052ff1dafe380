"""What is known of Gymnasium's environments beyond their spaces: sentences, names, words for actions, and ranges.

A range is what the integers 0 and 999 stand for where the space's own bounds are infinite or far wider than anything
that happens: the ends of an episode where there are some, else values that a good and a bad policy stay within.
"""

from __future__ import annotations

from lrl.codecs.mujoco import mujoco_names, mujoco_ranges
from lrl.codecs.spaces import Wording

MUJOCO = Wording(
    description="A simulated body with motors at its joints. The observation lists positions, then velocities.",
    names=mujoco_names,
    ranges=mujoco_ranges,
)
"""Every MuJoCo body."""

WORDINGS: dict[str, Wording] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": Wording(
        description="A pole stands on a cart. Push the cart so that the pole stays upright.",
        names=("cart position", "cart velocity", "pole angle", "pole velocity"),
        actions=("left", "right"),
        ranges=((-2.4, 2.4), (-3.0, 3.0), (-0.2095, 0.2095), (-3.5, 3.5)),
        has_expert=True,
    ),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": Wording(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill.",
        names=("position", "velocity"),
        actions=("left", "coast", "right"),
    ),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": Wording(
        description="A weak car stands in a valley. Swing it up to the flag on the right hill with little force.",
        names=("position", "velocity"),
    ),
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": Wording(
        description="Two links hang from a joint. Turn the joint between them until the tip is above the line.",
        names=("cosine 1", "sine 1", "cosine 2", "sine 2", "velocity 1", "velocity 2"),
        actions=("left", "none", "right"),
    ),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": Wording(
        description="A pendulum hangs from a joint. Swing it up and keep it upright with little torque.",
        names=("cosine", "sine", "velocity"),
    ),
    "gymnasium.envs.mujoco.mujoco_env:MujocoEnv": MUJOCO,
}
"""``module:class`` of a native environment to its wording; names, so that no environment is imported here."""
