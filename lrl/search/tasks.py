"""The 15 tasks of ProPS (NeurIPS 2025, arXiv:2511.21928), with its published figures and with yardsticks.

How the published values were made is not stated where we could read it. From single runs on the project's
page, those of ProPS and ProPS+ are inferred to be means over ten repeats of the best mean return of 20
episodes that any of 400 proposals had, and those of the baselines, with less certainty, values at the end of
training. ProPS and ProPS+ differ in their settings upstream; here all methods have those of ProPS, with
actions clipped to the space, ``CliffWalkingSlippery-v1`` instead of a withdrawn id, and Nim without its
illegal action.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lrl.envs.factory import GymnasiumEnvs

SHORT_EPISODE = 200
"""Up to this many steps, tasks are run on ten seeds; longer ones on three."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Figures of the paper; None where it gives none."""

    props: float
    """ProPS, which sees numbers alone."""
    props_plus: float
    """ProPS+, which is also told what the environment is."""
    ppo: float | None
    """PPO, as the paper ran it."""
    best_baseline: float
    """The best of its baselines."""
    best_name: str
    """Its name."""


@dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """Returns that say how good others are, measured before any search here."""

    nothing: float
    """With all parameters zero, or always the first action: the mean of the episodes with seeds 0 to 99."""
    random: float
    """The best of 400 random policies of the original, whose actions are not clipped, 20 episodes each, mean of some
    repeats."""
    ceiling: float | None
    """What no policy of any kind exceeds in expectation, or about what good ones reach; None where neither is known."""


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """An environment whose policy has few enough parameters to search for them."""

    env_id: str
    policy: Literal["linear", "tabular"]
    max_steps: int
    """Longest episode, by the environment or by the paper's cap."""
    num_parameters: int
    published: Published
    yardsticks: Yardsticks
    env_kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def num_seeds(self) -> int:
        """Number of seeds that the task is run on: ten where episodes are short, else three."""
        return 10 if self.max_steps <= SHORT_EPISODE else 3

    def env_factory(self) -> GymnasiumEnvs:
        """Return the factory of the environment, with its cap."""
        return GymnasiumEnvs(self.env_id, dict(self.env_kwargs), max_episode_steps=self.max_steps)


def _published(props: float, props_plus: float, ppo: float | None, best_baseline: float, best_name: str) -> Published:
    return Published(props=props, props_plus=props_plus, ppo=ppo, best_baseline=best_baseline, best_name=best_name)


def _yardsticks(nothing: float, random: float, ceiling: float | None) -> Yardsticks:
    return Yardsticks(nothing=nothing, random=random, ceiling=ceiling)


TASKS: dict[str, SearchTask] = {
    "mountain_car_continuous": SearchTask(
        env_id="MountainCarContinuous-v0",
        policy="linear",
        max_steps=999,
        num_parameters=3,
        published=_published(87.21, 89.16, 78.16, 86.65, "SAC"),
        yardsticks=_yardsticks(0.0, 82.3, 99.0),
    ),
    "inverted_pendulum": SearchTask(
        env_id="InvertedPendulum-v5",
        policy="linear",
        max_steps=1000,
        num_parameters=5,
        published=_published(1000.0, 1000.0, 218.65, 571.31, "TRPO"),
        yardsticks=_yardsticks(24.4, 281.0, 1000.0),
    ),
    "inverted_double_pendulum": SearchTask(
        env_id="InvertedDoublePendulum-v5",
        policy="linear",
        max_steps=1000,
        num_parameters=10,
        published=_published(128.2, 148.4, 108.6, 3609.0, "TRPO"),
        yardsticks=_yardsticks(86.6, 111.0, 9360.0),
    ),
    "reacher": SearchTask(
        env_id="Reacher-v5",
        policy="linear",
        max_steps=50,
        num_parameters=22,
        published=_published(-11.32, -18.15, -7.32, -7.32, "PPO"),
        yardsticks=_yardsticks(-12.0, -464.0, -4.0),
    ),
    "swimmer": SearchTask(
        env_id="Swimmer-v5",
        policy="linear",
        max_steps=1000,
        num_parameters=18,
        published=_published(218.83, 227.30, 39.40, 52.96, "TRPO"),
        yardsticks=_yardsticks(0.5, 220.0, 360.0),
    ),
    "hopper": SearchTask(
        env_id="Hopper-v5",
        policy="linear",
        max_steps=1000,
        num_parameters=36,
        published=_published(284.2, 356.2, 351.8, 716.9, "TRPO"),
        yardsticks=_yardsticks(145.6, 318.0, None),
    ),
    "walker2d": SearchTask(
        env_id="Walker2d-v5",
        policy="linear",
        max_steps=1000,
        num_parameters=108,
        published=_published(147.2, 126.8, 469.8, 519.4, "TRPO"),
        yardsticks=_yardsticks(94.5, -43.0, None),
    ),
    "frozen_lake": SearchTask(
        env_id="FrozenLake-v1",
        policy="tabular",
        max_steps=100,
        num_parameters=16,
        env_kwargs={"is_slippery": True},
        published=_published(0.57, 0.19, 0.16, 0.22, "TRPO"),
        yardsticks=_yardsticks(0.0, 0.34, 0.744),
    ),
    "cliff_walking": SearchTask(
        env_id="CliffWalkingSlippery-v1",
        policy="tabular",
        max_steps=100,
        num_parameters=48,
        published=_published(-100.0, -96.4, -94.4, -66.6, "TRPO"),
        yardsticks=_yardsticks(-207.9, -108.0, -63.0),
    ),
    "maze": SearchTask(
        env_id="lrl/Maze3x3-v0",
        policy="tabular",
        max_steps=100,
        num_parameters=9,
        published=_published(0.55, 0.97, None, 0.97, "A2C"),
        yardsticks=_yardsticks(-1.11, 0.53, 0.967),
    ),
    "nim": SearchTask(
        env_id="lrl/Nim-v0",
        policy="tabular",
        max_steps=10,
        num_parameters=11,
        published=_published(0.33, 0.97, None, 0.58, "A2C"),
        yardsticks=_yardsticks(-0.74, 0.51, 1.0),
    ),
    "mountain_car": SearchTask(
        env_id="MountainCar-v0",
        policy="linear",
        max_steps=200,
        num_parameters=9,
        published=_published(-126.1, -116.7, None, -194.4, "DQN"),
        yardsticks=_yardsticks(-200.0, -199.8, -110.0),
    ),
    "navigation": SearchTask(
        env_id="lrl/Navigation-v0",
        policy="linear",
        max_steps=1000,
        num_parameters=18,
        published=_published(2587.0, 2780.0, 4127.0, 4223.0, "TRPO"),
        yardsticks=_yardsticks(-137.5, 1524.0, 5000.0),
    ),
    "pong": SearchTask(
        env_id="lrl/Pong-v0",
        policy="linear",
        max_steps=1000,
        num_parameters=18,
        published=_published(2.80, 2.99, 2.29, 2.29, "PPO"),
        yardsticks=_yardsticks(0.17, 2.4, 3.0),
    ),
    "cart_pole": SearchTask(
        env_id="CartPole-v1",
        policy="linear",
        max_steps=500,
        num_parameters=10,
        published=_published(478.3, 500.0, 365.9, 465.3, "TRPO"),
        yardsticks=_yardsticks(9.4, 435.0, 500.0),
    ),
}
"""Tasks by name, in the order of the paper's table."""
