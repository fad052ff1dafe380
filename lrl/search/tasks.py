"""The 15 tasks of ProPS (NeurIPS 2025, arXiv:2511.21928) in ``tasks.yaml``, with published and reference returns.

The sources that we could read do not state how the published values were measured. From single runs on the project's
page we infer that the values of ProPS and ProPS+ are means over ten repeats of the best mean return of 20 episodes
among 400 proposals, and, with less certainty, that those of the baselines are values at the end of training. In the
original, the settings of ProPS and ProPS+ differ. Here all methods use those of ProPS, with three changes: actions are
clipped to the action space, ``CliffWalkingSlippery-v1`` replaces an id that was withdrawn, and Nim has no illegal
action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lrl.ranges import PositiveInt

if TYPE_CHECKING:
    from lrl.envs.factory import GymnasiumEnvs

SHORT_EPISODE = 200
"""Tasks whose episodes have at most this many steps are run on ten seeds, all others on three."""


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """An environment with a policy that has few enough parameters to search for them."""

    env_id: str
    """Registered name of the environment."""
    policy: Literal["linear", "tabular"]
    """Class of the policy: a linear function or a table."""
    max_steps: int
    """Maximum length of an episode, by the environment's own limit or the paper's."""
    num_parameters: int
    """Number of parameters of the policy."""
    published: Mapping[str, Any]
    """Mean returns that the paper reports, None where it reports none: ``props`` (the prompt contains only numbers),
    ``props_plus`` (it also describes the environment), ``ppo``, and ``best_baseline``, whose name is ``best_name``."""
    yardsticks: Mapping[str, float | None]
    """Reference returns, measured before any search here was run. ``nothing``: mean return of the episodes with seeds 0
    to 99 if all parameters are zero, or the action is always the first. ``random``: largest mean return over 20
    episodes among 400 random policies of the original, whose actions are not clipped; mean of several repeats.
    ``ceiling``: upper bound of the expected return of any policy, or about what good policies reach; None if neither is
    known."""

    @property
    def num_seeds(self) -> int:
        """Number of seeds that searches use on this task: ten if episodes are short, else three."""
        return 10 if self.max_steps <= SHORT_EPISODE else 3

    def env_factory(self) -> GymnasiumEnvs:
        """Return the factory of the environment with the time limit of the task."""
        from lrl.envs.factory import GymnasiumEnvs  # the command imports this module for its options

        return GymnasiumEnvs(self.env_id, max_episode_steps=self.max_steps)


TASKS = {
    name: SearchTask(**entries)
    for name, entries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""Tasks by name, in the order of the paper's table."""


NETWORKS = ("ppo", "trpo")
"""Names of the methods that train a network by gradients, see :mod:`lrl.search.networks`."""
IN_CONTEXT = "in_context"
"""Name of the search by a language model, see :class:`~lrl.search.in_context.InContextSearcher`."""


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """Budget of every method, and the checkpoint of the language model that searches."""

    iterations: PositiveInt = 400
    """Number of proposals of a search."""
    rollouts: PositiveInt = 20
    """Number of episodes of each proposal."""
    fresh_episodes: PositiveInt = 100
    """Number of episodes of the chosen policy that were not used to select it."""
    max_env_steps: PositiveInt = 1_000_000
    """Maximum number of steps of the training of a network, even if it has played fewer episodes than a search."""
    checkpoint: str | None = None
    """The run of a language model that learned to search, for in_context."""

    @property
    def episodes(self) -> int:
        """Number of episodes of a search, and maximum number of training episodes of a network."""
        return self.iterations * self.rollouts

    def entries(self, method: str) -> dict[str, int | str | None]:
        """Return the settings that matter for a method, as they are written to its records."""
        entries = asdict(self)
        if method not in NETWORKS:
            del entries["max_env_steps"]
        if method != IN_CONTEXT:
            del entries["checkpoint"]
        return entries
