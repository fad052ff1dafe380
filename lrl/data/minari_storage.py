"""Minari's data sets on disk: written whole or not at all, read episode by episode, every complaint one sentence.

Minari's own collector keeps an episode per wrapped environment, needs jax for that, and knows neither many environments
side by side nor a codec's context. So its storage and its episode buffers are used, and not its collector.
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
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from lrl.data.minari_spaces import columns, row, storable

CONTEXT = "context"
"""Where an episode's metadata hold the codec's context, as JSON."""
RANDOM_STEPS = "random_steps"
ADVISED = "advised"
"""And the steps at which a random action was put in, as JSON: what such an action was the policy did not choose."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what Minari prints and warns of off the terminal: advice on metadata, downloads, deleted folders."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


def data_path(dataset_id: str) -> Path:
    """The folder of a data set's files, under ``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``.

    Raises:
        ValueError: no data set can be called that.
    """
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError):  # TypeError: a name without version
        raise ValueError(f"dataset_id is {dataset_id!r}; it must be like lrl/frozen_lake/expert-v0.") from None
    return get_dataset_path(dataset_id) / "data"


class DatasetWriter:
    """Writes a data set beside its place and moves it there at the end.

    Use as a context manager: what is not finished is removed.

    Args:
        dataset_id: its name, with namespaces and version.
        observation_space: native.
        action_space: native.
        env_spec: of the environment.

    Raises:
        ValueError: the name is malformed or taken.
    """

    def __init__(
        self, dataset_id: str, observation_space: gym.Space, action_space: gym.Space, env_spec: EnvSpec | None
    ) -> None:
        from minari.dataset.minari_storage import MinariStorage
        from minari.storage import get_dataset_path

        self.dataset_id, self.path = dataset_id, data_path(dataset_id)
        if self.path.parent.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which exists in {get_dataset_path()}; choose another name or version."
            )
        self.observation_space, self.action_space = storable(observation_space), storable(action_space)
        self._folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=get_dataset_path()))
        with quiet():
            self._storage = MinariStorage.new(
                self._folder, self.observation_space, self.action_space, env_spec, jpeg_encoding=False
            )
        self._metadata: list[dict[str, Any]] = []

    def add(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Append episodes.

        Args:
            episodes: each with ``seed``, ``context``, ``success``, and lists of native ``observations`` (one more than
                steps), ``actions``, ``rewards``, ``terminations``, ``truncations``, ``random_steps`` and ``advised``.
        """
        from minari.data_collector import EpisodeBuffer

        buffers = [
            EpisodeBuffer(
                seed=episode["seed"],
                observations=columns(self.observation_space, episode["observations"]),
                actions=columns(self.action_space, episode["actions"]),
                **{name: episode[name] for name in ("rewards", "terminations", "truncations")},
                infos={},  # Minari cannot print an episode that has none
            )
            for episode in episodes
        ]
        self._storage.update_episodes(buffers)
        self._metadata += map(_episode_metadata, episodes)

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write what is said of the data set as a whole, and put it where Minari looks for it."""
        from minari import __version__
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.namespace import create_namespace, list_local_namespaces

        with quiet():
            self._storage.update_episode_metadata(self._metadata)
            about = {"dataset_id": self.dataset_id, "minari_version": __version__}
            self._storage.update_metadata(about | dict(metadata))
            namespace = parse_dataset_id(self.dataset_id)[0]
            if namespace is not None and namespace not in list_local_namespaces():
                create_namespace(namespace)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o755)  # temporary folders are for their owner only
            self._folder.rename(self.path)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _episode_metadata(episode: Mapping[str, Any]) -> dict[str, Any]:
    """What Minari's own callback says of rewards, and what it does not know."""
    rewards = np.asarray(episode["rewards"], dtype=np.float64)
    figures = {name: float(getattr(rewards, name)()) for name in ("sum", "mean", "std", "max", "min")}
    about: dict[str, Any] = {f"rewards_{name}": value for name, value in figures.items()}
    about["success"] = bool(episode["success"])
    if episode["random_steps"]:
        about[RANDOM_STEPS] = json.dumps(episode["random_steps"])
        about[ADVISED] = json.dumps(episode["advised"])
    return about if episode["context"] is None else about | {CONTEXT: json.dumps(episode["context"])}


class DatasetReader:
    """A data set whose episodes are read when they are asked for.

    Args:
        dataset_id: its name.

    Raises:
        ValueError: it is not there, or empty, or damaged.

    Attributes:
        lengths: steps of each episode, int64 ``(episode,)``.
    """

    def __init__(self, dataset_id: str) -> None:
        from minari import MinariDataset
        from minari.storage import get_dataset_path

        self.dataset_id, path = dataset_id, data_path(dataset_id)
        if not path.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which is neither in {get_dataset_path()} nor could it be downloaded; "
                "collect it with scripts/collect.py, or set MINARI_DATASETS_PATH to where it is."
            )
        with self._explained(), quiet():
            dataset = MinariDataset(path)
            self._storage = dataset.storage
            self.observation_space, self.action_space = dataset.observation_space, dataset.action_space
            found = list(self._storage.get_episode_metadata(range(dataset.total_episodes)))
            self.lengths = np.array([about["total_steps"] for about in found], dtype=np.int64)
            self._random: list[list[int]] = [json.loads(about.get(RANDOM_STEPS, "[]")) for about in found]
            self._advised: list[list[str | None]] = [json.loads(about.get(ADVISED, "[]")) for about in found]
        if not self.lengths.sum():
            raise ValueError(f"dataset_id is {dataset_id!r}, which holds no steps; collect some.")

    @property
    def metadata(self) -> dict[str, Any]:
        """What is said of the data set as a whole."""
        return self._storage.metadata

    def demonstrated(self, index: int, advised: bool = False) -> np.ndarray:
        """The steps of an episode that its policy chose, int64 ``(step,)``.

        Args:
            index: of the episode.
            advised: whether those count as well in which it was asked, and a random action taken.
        """
        asked = self.advised(index) if advised else ()
        return np.setdiff1d(np.arange(self.lengths[index]), [step for step in self._random[index] if step not in asked])

    def advised(self, index: int) -> dict[int, str]:
        """What the policy of an episode would have done where a random action was taken: step to action in words."""
        pairs = zip(self._random[index], self._advised[index])  # older data sets tell of none
        return {step: text for step, text in pairs if text is not None}

    def counts(self, advised: bool = False) -> np.ndarray:
        """How many steps of each episode are demonstrations, int64 ``(episode,)``; see :meth:`demonstrated`."""
        return np.array([len(self.demonstrated(index, advised)) for index in range(len(self.lengths))], dtype=np.int64)

    def episode(self, index: int) -> StoredEpisode:
        """Read one episode.

        Raises:
            ValueError: it is damaged.
        """
        with self._explained():
            (kept,) = self._storage.get_episodes([index])
            (about,) = self._storage.get_episode_metadata([index])
            context = json.loads(about[CONTEXT]) if CONTEXT in about else None
            return StoredEpisode(self, kept, int(self.lengths[index]), _tuples(context))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a damaged file makes HDF5, JSON, Gymnasium and Minari raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, which cannot be read ({reason}); delete "
                f"{data_path(self.dataset_id).parent} and collect or download it again."
            ) from error


class StoredEpisode:
    """One episode in memory: samples of native spaces, one per step.

    Args:
        reader: where it is from.
        kept: arrays by Minari's names.
        length: steps.
        context: the codec's; None where none was kept.
    """

    def __init__(self, reader: DatasetReader, kept: Mapping[str, Any], length: int, context: Any) -> None:
        self.context = context
        self.observations = [row(reader.observation_space, kept["observations"], step) for step in range(length)]
        self.actions = [row(reader.action_space, kept["actions"], step) for step in range(length)]


def _tuples(value: Any) -> Any:
    """JSON knows lists only; contexts are made of tuples."""
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def download(dataset_id: str) -> None:
    """Fetch a data set from Minari's server, if it is not here.

    Without network nothing is raised: :class:`DatasetReader` complains, on every rank.

    Raises:
        ValueError: the name is malformed.
    """
    if data_path(dataset_id).exists():
        return
    import minari

    with quiet(), redirect_stderr(StringIO()):  # progress bars
        try:
            _check_hub()
            minari.download_dataset(dataset_id)
        except Exception as error:  # whatever a network, or its absence, makes the client raise
            logging.getLogger("lrl.trace").debug("%s was not downloaded: %s", dataset_id, error)


def _check_hub() -> None:
    """Fail at once where there is no network: Minari's client would try for half a minute, and say so each time."""
    from huggingface_hub import constants, get_session

    if os.environ.get("MINARI_REMOTE", "hf").startswith("hf"):
        get_session().head(constants.ENDPOINT, timeout=10)
