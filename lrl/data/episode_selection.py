"""Selection of the episodes and steps of a Minari data set, the same for demonstrations and for rows of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lrl.envs.minari_reader import DatasetReader
from lrl.functional.random import permutation

Split = Literal["train", "validation", "all"]
"""``train`` and ``validation`` have no episode in common; ``all`` uses both."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSelection:
    """Describes which part of a data set is used; equal settings select equal episodes, whatever they are used for."""

    key: str
    """Configuration key of the data set, at which error messages start."""
    split: Split = "train"
    validation_share: float = 0.1
    """Fraction of episodes in the validation split, at least one of two or more."""
    num_episodes: int | None = None
    """Number of episodes of the split; None selects all. A larger number adds to the same episodes."""
    num_rows: int | None = None
    """Number of steps of the split, of whole episodes except the last; None selects all."""
    min_return: float | None = None
    """Lowest undiscounted return of an episode of the split; None selects all."""
    seed: int = 0
    """Seed of the split and the selection."""

    def __post_init__(self) -> None:
        if self.num_episodes is not None and self.num_rows is not None:
            raise ValueError(f"{self.key}.num_episodes and {self.key}.num_rows are both set; one must be null.")

    def select(self, reader: DatasetReader, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``.

        Args:
            reader: The data set.
            steps: Number of steps of each episode that can be used, int64 ``(episode,)``.

        Raises:
            ValueError: If the split has fewer episodes or steps, or none with this return.
        """
        episodes = self._with_min_return(reader, self._split(len(steps)))
        episodes = episodes[steps[episodes] > 0]
        steps = steps[episodes]
        self._check_size(reader.dataset_id, steps)
        if self.num_rows is None:
            return episodes[: self.num_episodes], steps[: self.num_episodes]
        steps = np.clip(self.num_rows - (np.cumsum(steps) - steps), 0, steps)
        return episodes[steps > 0], steps[steps > 0]

    def _with_min_return(self, reader: DatasetReader, episodes: np.ndarray) -> np.ndarray:
        """Return those of some episodes, int64 ``(episode,)``, whose return is at least ``min_return``."""
        if self.min_return is None or not len(episodes):
            return episodes
        returns = reader.returns[episodes]
        if returns.max() < self.min_return:
            raise ValueError(
                f"{self.key}.min_return is {self.min_return:g}, but the returns in the {self.split} split of "
                f"{reader.dataset_id!r} are {returns.min():.6g} to {returns.max():.6g}; it must be at most "
                "the greatest."
            )
        return episodes[returns >= self.min_return]

    def _check_size(self, dataset_id: str, steps: np.ndarray) -> None:
        """Raise if more is asked for than the episodes with ``steps``, int64 ``(episode,)``, hold."""
        available = {"num_episodes": len(steps), "num_rows": int(steps.sum())}
        above = "" if self.min_return is None else f" with a return of {self.min_return:g} or more"
        for name, count in available.items():
            if (getattr(self, name) or 1) > count:
                raise ValueError(
                    f"{self.key}.{name} is {getattr(self, name)}, but the {self.split} split of {dataset_id!r} holds "
                    f"{count}{above}; it must be at most that."
                )

    def _split(self, num_episodes: int) -> np.ndarray:
        """Return the episodes of the split in the order in which they are selected, int64 ``(episode,)``."""
        order = permutation(num_episodes, "split", self.seed)
        held_out = max(round(self.validation_share * num_episodes), int(self.validation_share > 0 and num_episodes > 1))
        return {"all": order, "validation": order[:held_out], "train": order[held_out:]}[self.split]
