"""Writing of Minari data sets, which appear in their place only when complete, and their storage format.

Minari's own ``DataCollector`` wraps a single environment, needs jax, and cannot store the context of a codec, so only
Minari's storage and episode buffers are used. :mod:`lrl.envs.minari_reader` reads data sets.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import string
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

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
    if isinstance(space, spaces.Dict):
        return {name: stack_samples(part, [sample[name] for sample in samples]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(stack_samples(part, [sample[index] for sample in samples]) for index, part in parts)
    return [str(sample) for sample in samples] if isinstance(space, spaces.Text) else np.stack(samples)


def sample_at(space: gym.Space, columns: Columns, step: int) -> Any:
    """Return the sample of one step from columns; the inverse of :func:`stack_samples`."""
    if isinstance(space, spaces.Dict):
        assert isinstance(columns, dict)
        return {name: sample_at(part, columns[name], step) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        assert isinstance(columns, tuple)
        return tuple(sample_at(part, columns[index], step) for index, part in enumerate(space.spaces))
    assert not isinstance(columns, dict)
    return columns[step]


def columns_of_infos(space: gym.Space, stored: Any) -> Columns:
    """Return the columns of a space that were stored as infos, which Minari reads without a space.

    Args:
        space: as Minari stores it.
        stored: a dictionary for each Dict or Tuple, an array of numbers or of encoded texts for each leaf.
    """
    if isinstance(space, spaces.Dict):
        return {name: columns_of_infos(part, stored[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(columns_of_infos(part, stored[f"_index_{index}"]) for index, part in enumerate(space.spaces))
    return [text.decode() for text in stored] if isinstance(space, spaces.Text) else stored


def checked_leaves(space: gym.Space, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], gym.Space]]:
    """Yield path in Minari's storage and space of each leaf whose stored values need to be checked.

    Texts are not checked, and neither are images, whose bytes are always in their Box.
    """
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from checked_leaves(part, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from checked_leaves(part, (*path, f"_index_{index}"))
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield path, space
    elif isinstance(space, spaces.Box):
        is_image = space.dtype == np.uint8 and bool((space.low == 0).all() and (space.high == 255).all())
        if not is_image:
            yield path, space


def invalid_values(space: gym.Space, column: np.ndarray) -> np.ndarray:
    """Return where a column contains invalid values of a leaf, bool ``(step, ...)``.

    These are numbers outside a space of integers, and numbers that are not finite. Finite numbers beyond the bounds of
    a Box are reported by :func:`values_out_of_bounds`.

    Args:
        space: one of :func:`checked_leaves`.
        column: ``(step, ...)``.
    """
    if column.dtype.kind not in "biuf":
        return np.ones(column.shape, dtype=bool)
    wrong = ~np.isfinite(column) if column.dtype.kind == "f" else np.zeros(column.shape, dtype=bool)
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.integer) and column.dtype.kind == "f":
            wrong |= column != np.rint(column)
        return wrong
    low, high = _bounds(space)
    wrong |= (column < low) | (column > high)
    return wrong | (column != np.rint(column)) if column.dtype.kind == "f" else wrong


def values_out_of_bounds(space: gym.Space, column: np.ndarray) -> np.ndarray:
    """Return where a column of a Box exceeds the bounds, bool ``(step, ...)``; all False for other leaves.

    Args:
        space: one of :func:`checked_leaves`.
        column: without :func:`invalid_values`, ``(step, ...)``.
    """
    if not isinstance(space, spaces.Box):
        return np.zeros(column.shape, dtype=bool)
    if column.dtype.kind == "f" and np.issubdtype(space.dtype, np.floating):
        with np.errstate(over="ignore"):  # a number that overflows is out of bounds
            column = column.astype(space.dtype, copy=False)  # so that 1 + 1e-12 does not exceed the float32 bound 1
    return (column < space.low) | (column > space.high)


def clip_columns(space: gym.Space, columns: Columns) -> Columns:
    """Return columns whose numbers beyond the bounds of a Box are clipped to it."""
    if isinstance(space, spaces.Dict):
        assert isinstance(columns, dict)
        return columns | {name: clip_columns(part, columns[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        assert isinstance(columns, tuple)
        return tuple(clip_columns(part, column) for part, column in zip(space.spaces, columns, strict=True))
    if not (isinstance(space, spaces.Box) and isinstance(columns, np.ndarray)):
        return columns
    outside = values_out_of_bounds(space, columns)
    return np.where(outside, np.clip(columns, space.low, space.high), columns) if outside.any() else columns


def _bounds(space: gym.Space) -> tuple[Any, Any]:
    """Return the smallest and the largest integers of a Discrete, MultiDiscrete or MultiBinary space."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def columns_size(columns: Columns) -> int:
    """Return the size of columns in bytes, without the overhead of Python strings."""
    if isinstance(columns, np.ndarray):
        return columns.nbytes
    parts = columns.values() if isinstance(columns, dict) else columns
    return sum(len(part) if isinstance(part, str) else columns_size(part) for part in parts)


def spaces_match(stored: gym.Space, native: gym.Space) -> bool:
    """Return whether samples of the stored space can be read as samples of the native space.

    Bounds need to agree only where both are finite, because libraries represent infinity differently.
    """
    stored, native = to_minari_space(stored), to_minari_space(native)
    if isinstance(native, spaces.Dict) and isinstance(stored, spaces.Dict):
        parts = native.spaces.items()
        return all(name in stored.spaces and spaces_match(stored[name], part) for name, part in parts)
    if isinstance(native, spaces.Tuple) and isinstance(stored, spaces.Tuple):
        return len(stored) == len(native) and all(map(spaces_match, stored, native))
    if isinstance(native, spaces.Text) and isinstance(stored, spaces.Text):
        return True
    if isinstance(native, spaces.Box) and isinstance(stored, spaces.Box):
        if stored.shape != native.shape:
            return False
        return _bounds_agree(stored.low, native.low) and _bounds_agree(stored.high, native.high)
    return type(stored) is type(native) and stored == native


def _bounds_agree(stored: np.ndarray, native: np.ndarray) -> bool:
    largest = np.finfo(np.float32).max
    finite = (np.abs(stored) < largest) & (np.abs(native) < largest)
    return bool(np.allclose(stored[finite], native[finite]))


CONTEXT = "context"
"""Key of an episode's metadata for the context of the codec, as JSON."""
RANDOM_STEPS = "random_steps"
"""Key for the steps at which a random action was inserted, as JSON."""
ADVISED = "advised"
"""Key for the action that the policy would have chosen at each of these steps, as JSON texts or null."""
ADVISED_ACTION = "advised_action"
"""Key in an episode's infos for the native action that an advisor would have taken in each step."""
HAS_ADVISOR = "has_advisor"
"""Key of an episode's metadata for whether its infos contain an advisor's actions."""


@contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress output and warnings of Minari about missing metadata, downloads and deleted folders."""
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
    separate file, so that an error during writing, such as a full disk, does not damage the other parts.

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
        from minari.storage import get_dataset_path

        self.dataset_id, self.path = dataset_id, dataset_path(dataset_id)
        if self.path.parent.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which exists in {get_dataset_path()}; it must be a new name or version."
            )
        self.observation_space, self.action_space = to_minari_space(observation_space), to_minari_space(action_space)
        self._check_spaces()
        self._env_spec = _recoverable(env_spec)
        self._folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=get_dataset_path()))
        self._parts: list[Path] = []
        self._num_episodes = 0
        self._finished = False

    def _check_spaces(self) -> None:
        """Raise if Minari cannot store a space."""
        from minari.serialization import serialize_space

        for name, space in (("observation", self.observation_space), ("action", self.action_space)):
            try:
                serialize_space(space)
            except (NotImplementedError, TypeError, ValueError) as error:  # the first for a class that is not known
                raise ValueError(
                    f"the {name} space of {self.dataset_id!r} is {space}, which Minari cannot store ({error}); it must "
                    "be a Discrete, MultiDiscrete, MultiBinary, Box or Text, or a Dict or Tuple of these."
                ) from error

    def add(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Append episodes to the data set.

        Args:
            episodes: each with ``seed``, ``context``, ``success``, lists of native ``observations`` (one more than
                steps), ``actions``, ``rewards``, ``terminations`` and ``truncations`` (one per step), and lists
                ``random_steps`` and ``advised``; with an advisor also ``advised_actions`` (one per step).

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
            advised = episode.get("advised_actions")  # Minari has as many infos as observations, one more than actions
            infos = {ADVISED_ACTION: stack_samples(self.action_space, [*advised, advised[-1]])} if advised else {}
            buffers.append(EpisodeBuffer(**fields, infos=infos))  # Minari cannot print an episode without infos
        part = self._folder / f"part-{len(self._parts)}"
        with self._writing(part):
            storage: Any = self._new_storage(part)
            with _FileOfHDF5(part / "main_data.hdf5") as storage._file_path:
                storage.update_episodes(buffers)
                storage.update_episode_metadata(map(_episode_metadata, episodes))
        self._parts.append(part)
        self._num_episodes += len(episodes)

    def finish(self, metadata: Mapping[str, object]) -> None:
        """Write the metadata of the data set and move it to where Minari looks for it.

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
            file.write_text(json.dumps(known, default=_number_or_text), encoding="utf-8")
            namespace = parse_dataset_id(dataset_id)[0]
            if namespace is not None and namespace not in list_local_namespaces():
                create_namespace(namespace)
            path.parent.mkdir(parents=True, exist_ok=True)
            data.rename(path)

    def _join_parts(self, data: Path) -> None:
        """Copy the episodes of all parts to a new storage."""
        import h5py

        storage = self._new_storage(data)
        number, steps = 0, 0
        with _FileOfHDF5(data / "main_data.hdf5") as target, h5py.File(target, "a", track_order=True) as joined:
            for part in self._parts:
                with h5py.File(part / "main_data.hdf5", "r") as file:
                    for index in range(len(file)):
                        file.copy(f"episode_{index}", joined, name=f"episode_{number}")
                        attributes: Any = joined[f"episode_{number}"].attrs
                        attributes["id"] = number
                        number, steps = number + 1, steps + int(attributes["total_steps"])
        storage.update_metadata({"total_episodes": number, "total_steps": steps, "dataset_size": storage.get_size()})

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
        try:
            with suppress_output():
                yield
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, (OSError, RuntimeError)):  # h5py raises both where a write fails
                number = re.search(r"\berrno = (\d+)", str(error)) or re.search(r"\[Errno (\d+)\]", str(error))
                reason = os.strerror(int(number[1])) if number else " ".join(str(error).split())
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
        kept, where = self._keep(), f"the data sets of minari.MinariDataset in {self._folder}/part-*"
        if kept is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            where = f"the data set {kept!r}, in {dataset_path(kept).parent}"
        count = f"{self._num_episodes} episode{'s' * (self._num_episodes > 1)}"
        sentence = f"{count} of what was played can be read as {where}"
        if isinstance(error, (OSError, ValueError)):
            reason = str(error).rstrip(".")
            raise ValueError(f"{reason}; {sentence}.") from error
        logging.getLogger("lrl").warning("%r was not finished; %s.", self.dataset_id, sentence)


class _FileOfHDF5(io.FileIO):
    """File that HDF5 writes to, which raises the error of a failed write, such as a full disk, when it is closed.

    After a failed write to its own files, HDF5 prints tracebacks and may crash with a segmentation fault.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "r+")
        self._error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all bytes, or store the error; return their number."""
        view = memoryview(data).cast("B")
        with self._noted():
            written = 0
            while written < len(view):
                written += super().write(view[written:])
        return len(view)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size of the file, or store the error; return the requested size."""
        with self._noted():
            return super().truncate(size)
        return size or 0

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error

    def __exit__(self, *raised: Any) -> None:
        """Close the file.

        Raises:
            OSError: If a write failed.
        """
        with self._noted():
            os.fsync(self.fileno())  # some file systems report a full disk only here
        super().__exit__(*raised)
        if self._error is not None:
            raise self._error


def _recoverable(env_spec: EnvSpec | None) -> EnvSpec | None:
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


def _number(value: Any) -> Any:
    """Convert NumPy numbers for JSON; raise ``TypeError`` for other objects."""
    if not isinstance(value, (np.generic, np.ndarray)):
        raise TypeError(f"{value!r} cannot be written as JSON")
    return value.tolist()


def _number_or_text(value: Any) -> Any:
    """Convert NumPy numbers for JSON, and other objects to their description."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else repr(value)


def _episode_metadata(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reward statistics that Minari's own callback writes, and the entries of this package."""
    rewards = np.asarray(episode["rewards"], dtype=np.float64)
    statistics = ("sum", "mean", "std", "max", "min")
    metadata: dict[str, Any] = {f"rewards_{name}": float(getattr(rewards, name)()) for name in statistics}
    metadata["success"] = bool(episode["success"])
    if episode.get("advised_actions"):
        metadata[HAS_ADVISOR] = True
    if episode["random_steps"]:
        metadata[RANDOM_STEPS] = json.dumps(episode["random_steps"])
        metadata[ADVISED] = json.dumps(episode["advised"])
    if episode["context"] is not None:
        metadata[CONTEXT] = json.dumps(episode["context"], default=_number)
    return metadata
