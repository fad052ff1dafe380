"""Minari data sets on disk, written completely or not at all; :mod:`lrl.envs.minari_reader` reads them.

Minari's own ``DataCollector`` wraps a single environment, needs jax, and cannot store the context of a codec, so only
Minari's storage and episode buffers are used.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from lrl.envs.minari_spaces import stack_samples, to_minari_space

CONTEXT = "context"
"""Key of an episode's metadata for the context of the codec, as JSON."""
RANDOM_STEPS = "random_steps"
"""Key for the steps at which a random action was inserted, as JSON."""
ADVISED = "advised"
"""Key for the action that the policy would have chosen at each of these steps, as JSON texts or null."""
ADVISED_ACTION = "advised_action"
"""Key in an episode's infos for the native action that an advisor would have taken in each step."""
HAS_ADVISOR = "has_advisor"
"""Key of an episode's metadata for whether its infos hold an advisor's actions."""


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
                ``random_steps`` and ``advised``; with an advisor also ``advised_actions`` (one per step).
        """
        from minari.data_collector import EpisodeBuffer

        spaces = {"observations": self.observation_space, "actions": self.action_space}
        buffers = []
        for episode in episodes:
            fields = {name: episode[name] for name in ("seed", "rewards", "terminations", "truncations")}
            fields |= {name: stack_samples(space, episode[name]) for name, space in spaces.items()}
            advised = episode.get("advised_actions")  # Minari has as many infos as observations, one more than actions
            infos = {ADVISED_ACTION: stack_samples(self.action_space, [*advised, advised[-1]])} if advised else {}
            buffers.append(EpisodeBuffer(**fields, infos=infos))  # Minari cannot print an episode without infos
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
    if episode.get("advised_actions"):
        metadata[HAS_ADVISOR] = True
    if episode["random_steps"]:
        metadata[RANDOM_STEPS] = json.dumps(episode["random_steps"])
        metadata[ADVISED] = json.dumps(episode["advised"])
    return metadata if episode["context"] is None else metadata | {CONTEXT: json.dumps(episode["context"])}
