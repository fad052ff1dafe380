"""Writing of Minari data sets, and conversion of samples of Gymnasium spaces to Minari's storage format.

A data set is written to a temporary folder and moved to Minari's folder when it is complete.

Minari's own ``DataCollector`` wraps a single environment, needs jax, and cannot store the context of a codec, so only
Minari's storage and episode buffers are used. :mod:`lrl.envs.minari_reader` reads data sets.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import string
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from lrl.codecs.space_formats import flatten, unflatten
from lrl.faults import full_disk, megabytes

if TYPE_CHECKING:
    from minari.dataset.minari_storage import MinariStorage


# Samples of Gymnasium spaces in Minari's storage format: one column per leaf, with a leading step axis.

Columns = dict[str, "Columns"] | tuple["Columns", ...] | list[str] | np.ndarray
"""Samples of a space: an array ``(step, ...)`` or a list of texts for each leaf."""


def to_minari_space(space: gym.Space) -> gym.Space:
    """Return the space in a form that Minari can store: text spaces, such as MiniGrid's missions, become ``Text``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: to_minari_space(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([to_minari_space(part) for part in space.spaces])
    if space.dtype is not None and space.dtype.kind == "U":
        return spaces.Text(4096, min_length=0, charset=string.printable)
    return space


def stack_samples(space: gym.Space, samples: Sequence[Any]) -> Columns:
    """Convert one sample per step to columns."""
    parts = [dict(flatten(space, sample)) for sample in samples]
    columns: dict[str, Any] = {}
    for path, leaf in flatten(space, space):
        values = [part[path] for part in parts]
        columns[path] = list(map(str, values)) if isinstance(leaf, spaces.Text) else np.stack(values)
    return unflatten(space, columns)


def samples_of(space: gym.Space, columns: Columns, length: int) -> list[Any]:
    """Return the samples of the first ``length`` steps of columns; the inverse of :func:`stack_samples`."""
    parts = dict(flatten(space, columns))
    return [unflatten(space, {path: column[step] for path, column in parts.items()}) for step in range(length)]


def columns_of_infos(space: gym.Space, stored: Any) -> Columns:
    """Convert columns that were read from an episode's infos to the structure of a space.

    Minari reads infos without their space, so that it returns dictionaries for tuples, and bytes for texts.

    Args:
        space: space of the samples, as returned by :func:`to_minari_space`.
        stored: the infos: a dictionary for each Dict or Tuple, an array of numbers or of bytes for each leaf.
    """
    if isinstance(space, spaces.Dict):
        return {name: columns_of_infos(part, stored[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(columns_of_infos(part, stored[f"_index_{index}"]) for index, part in enumerate(space.spaces))
    return [text.decode() for text in stored] if isinstance(space, spaces.Text) else stored


def check_column(space: gym.Space, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which values of a column are invalid, and which are out of the bounds of a Box.

    Numbers that are not finite, and numbers outside a space of integers, are invalid. Finite numbers outside the bounds
    of a Box are valid, because many environments exceed the bounds that they declare.

    Args:
        space: space of the leaf; not a ``Text``.
        column: values of the leaf, ``(step, ...)``.

    Returns:
        Two bool arrays ``(step, ...)``: which values are invalid, and which valid ones are out of bounds.
    """
    if column.dtype.kind not in "biuf":
        return np.ones(column.shape, dtype=bool), np.zeros(column.shape, dtype=bool)
    low, high = _bounds(space)
    invalid = ~np.isfinite(column)
    values = column
    if column.dtype.kind == "f" and space.dtype is not None:
        if np.issubdtype(space.dtype, np.floating):
            with np.errstate(over="ignore"):  # a number that overflows is out of bounds
                values = column.astype(space.dtype)  # so that 1 + 1e-12 does not exceed the float32 bound 1
        else:
            invalid |= column != np.rint(column)
    outside = ((values < low) | (values > high)) & ~invalid
    return (invalid, outside) if isinstance(space, spaces.Box) else (invalid | outside, np.zeros_like(outside))


def _bounds(space: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest numbers of a leaf that is not a ``Text``."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def clip_columns(space: gym.Space, columns: Columns) -> Columns:
    """Return columns in which numbers outside the bounds of a Box are clipped to the bounds."""
    parts = dict(flatten(space, columns))
    for path, leaf in flatten(space, space):
        if isinstance(leaf, spaces.Box):
            outside = check_column(leaf, parts[path])[1]
            if outside.any():
                parts[path] = np.where(outside, np.clip(parts[path], leaf.low, leaf.high), parts[path])
    return unflatten(space, parts)


def spaces_match(stored: gym.Space, native: gym.Space) -> bool:
    """Return whether samples of the stored space can be read as samples of the native space.

    A stored Dict may have further keys. Bounds of a Box need to agree only where both are finite, because libraries
    represent infinity differently.
    """
    stored, native = to_minari_space(stored), to_minari_space(native)
    if isinstance(native, spaces.Dict) and isinstance(stored, spaces.Dict):
        parts = native.spaces.items()
        return all(name in stored.spaces and spaces_match(stored[name], part) for name, part in parts)
    if isinstance(native, spaces.Tuple) and isinstance(stored, spaces.Tuple):
        return len(stored) == len(native) and all(map(spaces_match, stored, native))
    if isinstance(native, spaces.Text) and isinstance(stored, spaces.Text):
        return True
    if isinstance(native, spaces.Box) and isinstance(stored, spaces.Box) and stored.shape == native.shape:
        own, other = np.stack([stored.low, stored.high]), np.stack([native.low, native.high])
        finite = (np.abs(own) < np.finfo(np.float32).max) & (np.abs(other) < np.finfo(np.float32).max)
        return bool(np.allclose(own[finite], other[finite]))
    return stored == native


CONTEXT = "context"
"""Key of an episode's metadata: the context of the codec, as JSON."""
RANDOM_STEPS = "random_steps"
"""Key of an episode's metadata: the indices of the steps at which a random action was inserted, as a JSON list."""
ADVISED_STEPS = "advised_steps"
"""Key of an episode's metadata: the indices of the steps for which an advised action is stored, as a JSON list."""
ADVISED_ACTION = "advised_action"
"""Key of an episode's infos: native actions, which are advised at :data:`ADVISED_STEPS` and otherwise meaningless."""
HAS_ADVISOR = "has_advisor"
"""Key of an episode's metadata: whether an advisor chose the advised actions, which then exist for every step."""


@contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress standard output and warnings; Minari reports missing metadata, downloads and deleted folders."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def dataset_path(dataset_id: str) -> Path:
    """Return the folder of a data set's files, below ``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``.

    Raises:
        ValueError: If the name is malformed.
    """
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError):  # TypeError: the name has no version
        raise ValueError(f"dataset_id is {dataset_id!r}; it must be like lrl/frozen_lake/expert-v0.") from None
    return get_dataset_path(dataset_id) / "data"


class DatasetWriter:
    """Writes a data set in parts to a temporary folder, and moves it to its final place at the end.

    Use it as a context manager. If the data set is not finished, the episodes that were added are kept in a data set
    whose name ends with ``-unfinished``, or in the temporary folder if that cannot be written either. Each part is a
    separate file, so that an error during writing, such as a full disk, does not damage the other parts. HDF5 files are
    first built in memory, because the HDF5 library may crash with a segmentation fault if a write to the disk fails.

    Args:
        dataset_id: name of the data set, with namespaces and version.
        observation_space: native observation space.
        action_space: native action space.
        env_spec: specification of the environment, if it is registered.

    Raises:
        ValueError: If the name is malformed or taken, or Minari cannot store a space.
    """

    def __init__(
        self, dataset_id: str, observation_space: gym.Space, action_space: gym.Space, env_spec: EnvSpec | None
    ) -> None:
        from minari.serialization import serialize_space
        from minari.storage import get_dataset_path

        self.dataset_id, self.path = dataset_id, dataset_path(dataset_id)
        if self.path.parent.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which exists in {get_dataset_path()}; it must be a new name or version."
            )
        self.observation_space, self.action_space = to_minari_space(observation_space), to_minari_space(action_space)
        for name, space in (("observation", self.observation_space), ("action", self.action_space)):
            try:
                serialize_space(space)
            except (NotImplementedError, TypeError, ValueError) as error:  # NotImplementedError: unknown class of space
                raise ValueError(
                    f"the {name} space of {dataset_id!r} is {space}, which Minari cannot store ({error}); it must "
                    "be a Discrete, MultiDiscrete, MultiBinary, Box or Text, or a Dict or Tuple of these."
                ) from error
        self._env_spec = _storable_spec(env_spec)
        self._folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=get_dataset_path()))
        self._parts: list[Path] = []
        self._num_episodes = 0
        self._size = 0
        """Number of bytes of the file that is being written; 0 if it is not known yet."""
        self._finished = False

    def add(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Append episodes to the data set.

        Args:
            episodes: each with ``seed``, ``context``, ``success``, lists of native ``observations`` (one more than
                steps), ``actions``, ``rewards``, ``terminations`` and ``truncations`` (one per step), and a list
                ``random_steps``. Episodes with advised actions also have ``advised_actions``, a dictionary from steps
                to native actions, and ``has_advisor``, whether an advisor chose them.

        Raises:
            OSError: If the episodes cannot be written; episodes that were added before are not damaged.
        """
        from minari.data_collector import EpisodeBuffer

        if not episodes:
            return
        spaces = {"observations": self.observation_space, "actions": self.action_space}
        buffers = []
        for episode in episodes:
            fields = {name: episode[name] for name in ("seed", "rewards", "terminations", "truncations")}
            fields |= {name: stack_samples(space, episode[name]) for name, space in spaces.items()}
            infos = {}  # not None, because Minari cannot print an episode without infos
            if advised := episode.get("advised_actions"):
                actions = [advised.get(step, action) for step, action in enumerate(episode["actions"])]
                actions.append(actions[-1])  # Minari has as many infos as observations, one more than actions
                infos[ADVISED_ACTION] = stack_samples(self.action_space, actions)
            buffers.append(EpisodeBuffer(**fields, infos=infos))
        part = self._folder / f"part-{len(self._parts)}"
        with self._writing(part):
            storage: Any = self._new_storage(part)
            path, storage._file_path = storage._file_path, io.BytesIO()
            storage.update_episodes(buffers)
            storage.update_episode_metadata(map(_episode_metadata, episodes))
            self._write(path, storage._file_path.getbuffer())
        self._parts.append(part)
        self._num_episodes += len(episodes)

    def finish(self, metadata: Mapping[str, object]) -> None:
        """Write the metadata of the data set, and move it to the folder from which Minari loads it.

        Raises:
            OSError: If the data set cannot be written.
        """
        self._assemble(self.dataset_id, metadata)
        self._finished = True

    def _assemble(self, dataset_id: str, metadata: Mapping[str, object]) -> None:
        """Join the parts, and move the result to the folder of a data set with this name."""
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.namespace import create_namespace, list_local_namespaces

        path, data = dataset_path(dataset_id), self._folder / "data"
        with self._writing(data):
            self._join_parts(data)
            file = data / "metadata.json"
            known = json.loads(file.read_text(encoding="utf-8"))
            known |= {"dataset_id": dataset_id, **metadata}
            file.write_text(json.dumps(known, default=str), encoding="utf-8")
            namespace = parse_dataset_id(dataset_id)[0]
            if namespace is not None and namespace not in list_local_namespaces():
                create_namespace(namespace)
            path.parent.mkdir(parents=True, exist_ok=True)
            data.rename(path)

    def _join_parts(self, data: Path) -> None:
        """Copy the episodes of all parts to a new storage."""
        import h5py

        storage, content = self._new_storage(data), io.BytesIO()
        number, steps = 0, 0
        with h5py.File(content, "w", track_order=True) as joined:
            for part in self._parts:
                with h5py.File(part / "main_data.hdf5", "r") as file:
                    for index in range(len(file)):
                        file.copy(f"episode_{index}", joined, name=f"episode_{number}")
                        attributes: Any = joined[f"episode_{number}"].attrs
                        attributes["id"] = number
                        number, steps = number + 1, steps + int(attributes["total_steps"])
        self._write(data / "main_data.hdf5", content.getbuffer())
        storage.update_metadata({"total_episodes": number, "total_steps": steps, "dataset_size": storage.get_size()})

    def _write(self, path: Path, content: memoryview) -> None:
        self._size = content.nbytes
        path.write_bytes(content)

    def _new_storage(self, folder: Path) -> MinariStorage:
        from minari import __version__
        from minari.dataset.minari_storage import MinariStorage

        spaces = self.observation_space, self.action_space
        storage = MinariStorage.new(folder, *spaces, self._env_spec, jpeg_encoding=False)
        storage.update_metadata({"dataset_id": self.dataset_id, "minari_version": __version__})
        return storage

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Suppress output while a folder is written, and remove the folder after an error."""
        self._size = 0
        try:
            with suppress_output():
                yield
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
                if self._size and full_disk(error):
                    reason += f" ({megabytes(self._size)} are needed)"
                message = f"dataset_id is {self.dataset_id!r}, which cannot be written to {folder.parent}: {reason}"
                raise OSError(message) from error
            raise

    def _keep(self) -> str | None:
        """Move the episodes of an unfinished data set to a data set with another name, and return that name.

        It returns None if the data set cannot be written, for example because the disk is still full.
        """
        name, _, version = self.dataset_id.rpartition("-v")
        number = int(version)
        while dataset_path(f"{name}-unfinished-v{number}").parent.exists():
            number += 1
        kept = f"{name}-unfinished-v{number}"
        try:
            self._assemble(kept, {"description": f"episodes of {self.dataset_id}, which was not finished"})
        except Exception:
            return None
        return kept

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._finished or not self._num_episodes:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        kept, where = self._keep(), f"the data sets {self._folder}/part-*, with minari.MinariDataset(path)"
        if kept is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            where = f"the data set {kept!r}, in {dataset_path(kept).parent}"
        count = f"{self._num_episodes} episode{'s' * (self._num_episodes > 1)}"
        sentence = f"{count} already collected can be read as {where}"
        if isinstance(error, (OSError, ValueError)):
            reason = str(error).rstrip(".")
            raise ValueError(f"{reason}; {sentence}.") from error
        logging.getLogger("lrl").warning("%r was not finished; %s.", self.dataset_id, sentence)


def _storable_spec(env_spec: EnvSpec | None) -> EnvSpec | None:
    """Return the specification of an environment, or None if Minari cannot store it because it contains a class."""
    if env_spec is None:
        return None
    try:
        env_spec.to_json()
    except (TypeError, ValueError) as error:
        message = "the data set will not store the specification of %s, which cannot be written as JSON (%s)"
        logging.getLogger("lrl").warning(message, env_spec.id, error)
        return None
    return env_spec


def _episode_metadata(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reward statistics that Minari's own callback writes, and the entries that lrl reads."""
    rewards = np.asarray(episode["rewards"], dtype=np.float64)
    statistics = ("sum", "mean", "std", "max", "min")
    metadata: dict[str, Any] = {f"rewards_{name}": float(getattr(rewards, name)()) for name in statistics}
    metadata["success"] = bool(episode["success"])
    metadata[HAS_ADVISOR] = bool(episode.get("has_advisor"))
    metadata[RANDOM_STEPS] = json.dumps(episode["random_steps"])
    metadata[ADVISED_STEPS] = json.dumps(sorted(episode.get("advised_actions", ())))
    if episode["context"] is not None:
        metadata[CONTEXT] = json.dumps(episode["context"], default=methodcaller("tolist"))  # NumPy numbers, arrays
    return metadata
