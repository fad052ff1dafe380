"""Minari data sets on disk, written completely or not at all and read episode by episode.

Minari's own ``DataCollector`` wraps a single environment, needs jax, and cannot store the context of a codec, so only
Minari's storage and episode buffers are used.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cached_property
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from lrl.envs.minari_spaces import stack_samples, to_minari_space
from lrl.envs.stored_episode import StoredEpisode

CONTEXT = "context"
"""Key of an episode's metadata for the context of the codec, as JSON."""
RANDOM_STEPS = "random_steps"
"""Key for the steps at which a random action was inserted, as JSON."""
ADVISED = "advised"
"""Key for the action that the policy would have chosen at each of these steps, as JSON texts or null."""


@contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress what Minari prints and warns about: missing metadata, downloads, deleted folders."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


def dataset_path(dataset_id: str) -> Path:
    """Return the folder of a data set's files, below ``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``.

    Raises:
        ValueError: the name is malformed.
    """
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError):  # TypeError: the name has no version
        raise ValueError(f"dataset_id is {dataset_id!r}; it must be like lrl/frozen_lake/expert-v0.") from None
    return get_dataset_path(dataset_id) / "data"


class DatasetWriter:
    """Writes a data set to a temporary folder and moves it to its final place at the end.

    Use as a context manager: a data set that is not finished is deleted.

    Args:
        dataset_id: name of the data set, with namespaces and version.
        observation_space: native observation space.
        action_space: native action space.
        env_spec: specification of the environment, if it is registered.

    Raises:
        ValueError: the name is malformed or taken.
    """

    def __init__(
        self, dataset_id: str, observation_space: gym.Space, action_space: gym.Space, env_spec: EnvSpec | None
    ) -> None:
        from minari.dataset.minari_storage import MinariStorage
        from minari.storage import get_dataset_path

        self.dataset_id, self.path = dataset_id, dataset_path(dataset_id)
        if self.path.parent.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which exists in {get_dataset_path()}; it must be a new name or version."
            )
        self.observation_space, self.action_space = to_minari_space(observation_space), to_minari_space(action_space)
        self._folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=get_dataset_path()))
        with suppress_output():
            self._storage = MinariStorage.new(
                self._folder, self.observation_space, self.action_space, env_spec, jpeg_encoding=False
            )
        self._metadata: list[dict[str, Any]] = []

    def add(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Append episodes to the data set.

        Args:
            episodes: each with ``seed``, ``context``, ``success``, lists of native ``observations`` (one more than
                steps), ``actions``, ``rewards``, ``terminations`` and ``truncations`` (one per step), and lists
                ``random_steps`` and ``advised``.
        """
        from minari.data_collector import EpisodeBuffer

        spaces = {"observations": self.observation_space, "actions": self.action_space}
        buffers = []
        for episode in episodes:
            fields = {name: episode[name] for name in ("seed", "rewards", "terminations", "truncations")}
            fields |= {name: stack_samples(space, episode[name]) for name, space in spaces.items()}
            buffers.append(EpisodeBuffer(**fields, infos={}))  # Minari cannot print an episode without infos
        self._storage.update_episodes(buffers)
        self._metadata += map(_episode_metadata, episodes)

    def finish(self, metadata: Mapping[str, object]) -> None:
        """Write the metadata of the data set and move it to where Minari looks for it."""
        from minari import __version__
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.namespace import create_namespace, list_local_namespaces

        with suppress_output():
            self._storage.update_episode_metadata(self._metadata)
            about = {"dataset_id": self.dataset_id, "minari_version": __version__}
            self._storage.update_metadata(about | dict(metadata))
            namespace = parse_dataset_id(self.dataset_id)[0]
            if namespace is not None and namespace not in list_local_namespaces():
                create_namespace(namespace)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o755)  # temporary folders are readable by their owner only
            self._folder.rename(self.path)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _episode_metadata(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reward statistics that Minari's own callback writes, and this package's own entries."""
    rewards = np.asarray(episode["rewards"], dtype=np.float64)
    statistics = ("sum", "mean", "std", "max", "min")
    metadata: dict[str, Any] = {f"rewards_{name}": float(getattr(rewards, name)()) for name in statistics}
    metadata["success"] = bool(episode["success"])
    if episode["random_steps"]:
        metadata[RANDOM_STEPS] = json.dumps(episode["random_steps"])
        metadata[ADVISED] = json.dumps(episode["advised"])
    return metadata if episode["context"] is None else metadata | {CONTEXT: json.dumps(episode["context"])}


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

    def demonstrated_steps(self, index: int, advised: bool = False) -> np.ndarray:
        """Return the steps of an episode whose actions were chosen by its policy, int64 ``(step,)``.

        Args:
            index: index of the episode.
            advised: whether to include the steps at which a random action was taken and the policy's own is known.
        """
        included = self.advised_actions(index) if advised else ()
        excluded = [step for step in self._random[index] if step not in included]
        return np.setdiff1d(np.arange(self.lengths[index]), excluded)

    def advised_actions(self, index: int) -> dict[int, str]:
        """Return, by step, the text of the action that the policy would have chosen where a random one was taken."""
        pairs = zip(self._random[index], self._advised[index])  # older data sets hold no advice
        return {step: text for step, text in pairs if text is not None}

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
            terminated = bool(np.any(stored["terminations"]))
            return StoredEpisode(*columns, int(self.lengths[index]), context, stored["rewards"], terminated)

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
