"""The 15 tasks of ProPS (NeurIPS 2025, arXiv:2511.21928) in ``tasks.yaml``, with published and reference returns.

The sources that we could read do not state how the published values were measured. From single runs on the project's
page we infer that the values of ProPS and ProPS+ are means over ten repeats of the best mean return of 20 episodes
among 400 proposals, and, with less certainty, that those of the baselines are values at the end of training. In the
original, the settings of ProPS and ProPS+ differ. Here all methods use those of ProPS, with three changes: actions are
clipped to the action space, ``CliffWalkingSlippery-v1`` replaces an id that was withdrawn, and Nim has no illegal
action.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lrl.envs.factory import GymnasiumEnvs

SHORT_EPISODE = 200
"""Tasks whose episodes have at most this many steps are run on ten seeds, all others on three."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Mean returns that the paper reports; None where it reports none."""

    props: float
    """ProPS, whose prompt contains only numbers."""
    props_plus: float
    """ProPS+, whose prompt also describes the environment."""
    ppo: float | None
    """PPO, as the paper ran it."""
    best_baseline: float
    """The best of the paper's baselines."""
    best_name: str
    """Name of that baseline."""


@dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """Reference returns, measured before any search here was run."""

    nothing: float
    """Mean return of the episodes with seeds 0 to 99 if all parameters are zero, or the action is always the first."""
    random: float
    """Largest mean return over 20 episodes among 400 random policies of the original, whose actions are not clipped;
    mean of several repeats."""
    ceiling: float | None
    """Upper bound of the expected return of any policy, or about what good policies reach; None if neither is known."""


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """An environment with a policy that has few enough parameters to search for them."""

    env_id: str
    policy: Literal["linear", "tabular"]
    max_steps: int
    """Maximum length of an episode, by the environment's own limit or the paper's."""
    num_parameters: int
    published: Published
    yardsticks: Yardsticks

    @property
    def num_seeds(self) -> int:
        """Number of seeds that searches use on this task: ten if episodes are short, else three."""
        return 10 if self.max_steps <= SHORT_EPISODE else 3

    def env_factory(self) -> GymnasiumEnvs:
        """Return the factory of the environment with the time limit of the task."""
        return GymnasiumEnvs(self.env_id, max_episode_steps=self.max_steps)


def _task(published: dict[str, Any], yardsticks: dict[str, Any], **settings: Any) -> SearchTask:
    return SearchTask(published=Published(**published), yardsticks=Yardsticks(**yardsticks), **settings)


TASKS = {
    name: _task(**entries)
    for name, entries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Tasks by name, in the order of the paper's table."""
