"""Read a local Minari data set episode by episode, and download one that is not local."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from lrl.envs.minari_spaces import columns_of_infos
from lrl.envs.minari_storage import (
    ADVISED,
    ADVISED_ACTION,
    CONTEXT,
    HAS_ADVISOR,
    RANDOM_STEPS,
    dataset_path,
    suppress_output,
)
from lrl.envs.stored_episode import StoredEpisode


class DatasetReader:
    """Reads a local data set, one episode at a time.

    Args:
        dataset_id: name of the data set.

    Raises:
        ValueError: the data set is missing, empty or damaged.

    Attributes:
        lengths: number of steps of each episode, int64 ``(episode,)``.
    """

    def __init__(self, dataset_id: str) -> None:
        from minari import MinariDataset
        from minari.storage import get_dataset_path

        self.dataset_id, path = dataset_id, dataset_path(dataset_id)
        if not path.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which is neither in {get_dataset_path()} nor could it be downloaded; "
                "collect it with scripts/collect.py, or set MINARI_DATASETS_PATH to its folder."
            )
        with self._readable_errors(), suppress_output():
            dataset = MinariDataset(path)
            self._storage = dataset.storage
            self.observation_space, self.action_space = dataset.observation_space, dataset.action_space
            episodes = list(self._storage.get_episode_metadata(range(dataset.total_episodes)))
            self.lengths = np.array([episode["total_steps"] for episode in episodes], dtype=np.int64)
            self._random: list[list[int]] = [json.loads(episode.get(RANDOM_STEPS, "[]")) for episode in episodes]
            self._has_advisor = np.array([bool(episode.get(HAS_ADVISOR)) for episode in episodes], dtype=bool)
            self._advised: list[list[str | None]] = [json.loads(episode.get(ADVISED, "[]")) for episode in episodes]
        if not self.lengths.sum():
            raise ValueError(f"dataset_id is {dataset_id!r}, which holds no steps; it must hold at least one.")

    @cached_property
    def returns(self) -> np.ndarray:
        """Undiscounted return of each episode, float64 ``(episode,)``."""
        indices = range(len(self.lengths))
        with self._readable_errors():
            episodes = self._storage.get_episode_metadata(indices)
            known = [episode.get("rewards_sum") for episode in episodes]
            if None in known:  # Minari's own metadata are optional
                known = [np.sum(episode["rewards"]) for episode in self._storage.get_episodes(indices)]
        return np.array(known, dtype=np.float64)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the data set as a whole."""
        return self._storage.metadata

    @property
    def files(self) -> list[Path]:
        """Files of the data set, by name."""
        return sorted(path for path in dataset_path(self.dataset_id).iterdir() if path.is_file())

    @property
    def has_advisor(self) -> bool:
        """Return whether an advisor was asked in every state of some episodes."""
        return bool(self._has_advisor.any())

    @property
    def has_advice(self) -> bool:
        """Return whether the data set holds advised actions."""
        return self.has_advisor or any(map(self.advised_actions, range(len(self.lengths))))

    def demonstrated_steps(self, index: int, advised: bool = False) -> np.ndarray:
        """Return the steps of an episode that are demonstrations, int64 ``(step,)``.

        Without an advisor these are the steps whose actions the policy chose, with one none.

        Args:
            index: index of the episode.
            advised: whether to include the steps for which an advised action is known; with an advisor these are all.
        """
        if self._has_advisor[index]:
            return np.arange(self.lengths[index] if advised else 0)
        included = self.advised_actions(index) if advised else ()
        excluded = [step for step in self._random[index] if step not in included]
        return np.setdiff1d(np.arange(self.lengths[index]), excluded)

    def advised_actions(self, index: int) -> dict[int, str]:
        """Return, by step, the text of the action that the policy would have chosen where a random one was taken."""
        pairs = zip(self._random[index], self._advised[index])  # older data sets hold no advice
        return {step: text for step, text in pairs if text is not None}

    def check_own_actions(self, key: str) -> None:
        """Raise if an advisor was asked, so that the actions taken are not what should be imitated.

        Args:
            key: option of the data set, at which the error message starts.

        Raises:
            ValueError: an advisor was asked.
        """
        if self.has_advisor:
            raise ValueError(
                f"{key} is {self.dataset_id!r}, which was collected with --advisor, so that its actions are not the "
                "expert's; it must be a data set of episodes that the expert played."
            )

    def num_demonstrated(self, advised: bool = False) -> np.ndarray:
        """Return the number of :meth:`demonstrated_steps` of each episode, int64 ``(episode,)``."""
        episodes = range(len(self.lengths))
        return np.array([len(self.demonstrated_steps(index, advised)) for index in episodes], dtype=np.int64)

    def episode(self, index: int) -> StoredEpisode:
        """Read one episode.

        Raises:
            ValueError: the episode is damaged.
        """
        with self._readable_errors():
            (stored,) = self._storage.get_episodes([index])
            (metadata,) = self._storage.get_episode_metadata([index])
            context = json.loads(metadata[CONTEXT]) if CONTEXT in metadata else None
            columns = self.observation_space, stored["observations"], self.action_space, stored["actions"]
            advised = None
            if self._has_advisor[index]:
                advised = columns_of_infos(self.action_space, stored["infos"][ADVISED_ACTION])
            terminated = bool(np.any(stored["terminations"]))
            return StoredEpisode(*columns, int(self.lengths[index]), context, stored["rewards"], terminated, advised)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # HDF5, JSON, Gymnasium and Minari raise many kinds for a damaged file
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, which cannot be read ({reason}); delete "
                f"{dataset_path(self.dataset_id).parent} and collect or download it again."
            ) from error


def download(dataset_id: str) -> None:
    """Download a data set from Minari's server if it is not local.

    A failure is not raised here: :class:`DatasetReader` raises on every rank.

    Raises:
        ValueError: the name is malformed.
    """
    if dataset_path(dataset_id).exists():
        return
    import minari

    with suppress_output(), redirect_stderr(StringIO()):  # progress bars
        try:
            _check_hub()
            minari.download_dataset(dataset_id)
        except Exception as error:  # the client raises many kinds without network
            logging.getLogger("lrl.trace").debug("%s was not downloaded: %s", dataset_id, error)


def _check_hub() -> None:
    """Raise at once if there is no network: Minari's client would retry, and print that, for half a minute."""
    from huggingface_hub import constants, get_session

    if os.environ.get("MINARI_REMOTE", "hf").startswith("hf"):
        get_session().head(constants.ENDPOINT, timeout=10)
