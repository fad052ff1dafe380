"""Pictures of a search for the parameters of a small policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrl.reports.plots import new_figure, save_figure

_SAME = 0.12
"""Half of the width over which equal values of a parameter are spread, so that their lines can be seen."""


@dataclass(frozen=True, kw_only=True)
class SearchedPolicies:
    """Holds the policies of a search in the order in which they were played."""

    parameters: np.ndarray
    """float64 ``(policy, parameter)``."""
    values: np.ndarray
    """Mean return of each, ``(policy,)``."""
    episodes: np.ndarray
    """Episodes up to and including each policy, ``(policy,)``."""
    warm_up: np.ndarray
    """Whether a policy was a random one before the first proposal, bool ``(policy,)``."""

    @classmethod
    def of(cls, trials: Sequence[dict[str, Any]]) -> SearchedPolicies:
        """Collect the trials of a :class:`~lrl.algorithms.prompted_search.PromptedSearchModule`, at least one."""
        return cls(
            parameters=np.array([trial["parameters"] for trial in trials], dtype=np.float64),
            values=np.array([np.mean(trial["returns"]) for trial in trials]),
            episodes=np.cumsum([len(trial["returns"]) for trial in trials]),
            warm_up=np.array([trial["iteration"] < 1 for trial in trials]),
        )

    @property
    def best_so_far(self) -> np.ndarray:
        """The largest mean return up to each policy, ``(policy,)``."""
        return np.maximum.accumulate(self.values)

    def ranks(self) -> np.ndarray:
        """Return the rank of each policy by its mean return, from 0 for the worst to 1 for the best, ``(policy,)``."""
        order = np.argsort(np.argsort(self.values, kind="stable"), kind="stable")
        return order / max(1, len(order) - 1)


def draw_search(policies: SearchedPolicies, path: Path, title: str = "") -> None:
    """Draw the mean return of each policy and the best so far against episodes, to a PNG.

    Args:
        policies: in order of play.
        path: the PNG; missing folders are created.
        title: title above the picture.
    """
    figure, axes = new_figure(7, 4.2)
    for chosen, label, colour in ((policies.warm_up, "random policies", "0.6"), (~policies.warm_up, "proposals", "C0")):
        if chosen.any():
            axes.plot(policies.episodes[chosen], policies.values[chosen], ".", color=colour, markersize=4, label=label)
    axes.step(policies.episodes, policies.best_so_far, where="post", color="C1", label="best so far")
    axes.set_xlabel("episodes")
    axes.set_ylabel("mean return, training episodes")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_parameters(policies: SearchedPolicies, path: Path, title: str = "") -> None:
    """Draw each policy as a line over its parameters (parallel coordinates), to a PNG.

    The colour is the rank of the mean return; the best policy is drawn in black on top.

    Args:
        policies: in order of play.
        path: the PNG; missing folders are created.
        title: title above the picture.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    count = policies.parameters.shape[1]
    figure, axes = new_figure(min(14.0, 3.5 + 0.35 * count), 4.2)
    ranks, colours, x = policies.ranks(), colormaps["viridis"], np.arange(count)
    for index in np.argsort(ranks, kind="stable"):  # better ones on top
        shifted = policies.parameters[index] + _SAME * (2 * index / max(1, len(ranks) - 1) - 1)
        axes.plot(x, shifted, color=colours(ranks[index]), alpha=0.35, linewidth=0.8, marker="." if count == 1 else "")
    best = policies.parameters[int(policies.values.argmax())]
    axes.plot(x, best, color="black", linewidth=1.6, marker=".", label=f"best ({policies.values.max():,.4g})")
    axes.set_xlabel("parameter")
    axes.set_ylabel("value")
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=9)
    figure.colorbar(ScalarMappable(cmap=colours), ax=axes, label="rank of the mean return")
    save_figure(figure, path)
