"""Base classes of the data modules: clocks, loading of minibatches, the environment and held-out episodes."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Settings of held-out episodes."""

    env: EnvFactory | None = None
    """Environment of the episodes; null uses the training environment."""
    episodes: NonNegativeInt = 50
    """Number of episodes, each with its own seed."""
    seed: NonNegativeInt = 10_000
    """Seed of the first episode; the others have the following seeds."""
    num_envs: PositiveInt = 50
    """Number of parallel environments."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 decodes greedily."""

    def __post_init__(self) -> None:
        check_fields(self, "data.validation")

    @property
    def seeds(self) -> Tensor:
        """Seeds of all episodes, int64 ``(episode,)``."""
        return torch.arange(self.seed, self.seed + self.episodes)


class ClockedDataModule(L.LightningDataModule, ABC):
    """Abstract data module of a run, with a seed and clocks.

    A clock counts the progress of the run, for example in env steps, tokens or optimiser steps. Metrics are logged
    together with the clocks, as ``clock/<name>``.

    Args:
        seed: seed of the run.
        clocks: names of the clocks besides minutes.
    """

    def __init__(self, seed: int, *clocks: str) -> None:
        super().__init__()
        self.seed = seed
        self.clocks: dict[str, float] = dict.fromkeys(clocks, 0) | {"minutes": 0.0}
        self._started = time.monotonic()

    def __str__(self) -> str:
        """Return :func:`repr`; Lightning would look for loaders of tensors."""
        return repr(self)

    @property
    def position(self) -> int:
        """Index of the next minibatch in Lightning's counter, which a resumed run restores."""
        assert self.trainer is not None
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def advance(self, **counts: float) -> None:
        """Advance the named clocks, and the minutes by the time since the last call."""
        for name, count in counts.items():
            self.clocks[name] += count
        now = time.monotonic()
        self.clocks["minutes"] += (now - self._started) / 60
        self._started = now

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks, with the minutes up to now."""
        self.advance()
        return {"clocks": dict(self.clocks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.clocks = dict(state_dict["clocks"])
        self._started = time.monotonic()


class RunDataModule(ClockedDataModule, ABC):
    """Abstract data module of a run that trains a policy in an environment.

    Args:
        env: training environment.
        validation: settings of held-out episodes.
        seed: seed of the run.
        clocks: names of the clocks besides minutes.
    """

    num_epochs = num_minibatches = 1
    """Number of passes over each collection, and of minibatches per pass; 1 in data modules that do not collect."""
    collects = False
    """Whether each Lightning epoch trains on newly collected data."""

    def __init__(self, env: EnvFactory, validation: ValidationConfig, seed: int, *clocks: str) -> None:
        super().__init__(seed, *clocks)
        self.env, self.validation = env, validation

    @property
    def codec(self) -> TextCodec:
        """Codec of the training environment."""
        return self.env.codec

    @property
    def validation_env(self) -> EnvFactory:
        """Environment of the held-out episodes."""
        return self.validation.env or self.env

    def val_dataloader(self) -> DataLoader:
        """Return a loader of one item: the seeds of the held-out episodes, int64 ``(episode,)``."""
        one_item: Any = [self.validation.seeds]
        # With a generator of its own, the loader draws no number from the global one, whose state resumed runs share.
        return DataLoader(one_item, batch_size=None, generator=torch.Generator())

    test_dataloader = predict_dataloader = val_dataloader


class MinibatchLoader:
    """Yields minibatches from the position of Lightning's counter, :attr:`ClockedDataModule.position`.

    It is not a ``DataLoader``, so that Lightning neither adds a distributed sampler nor recommends workers. Its length
    is constant, because otherwise Lightning would prefetch from the empty rollout buffer before the first collection.
    It has the methods of a stateful loader, without which Lightning does not resume within an epoch.

    Args:
        data: data module whose trainer counts minibatches.
        length: returns the number of minibatches.
        minibatch: returns this rank's part of the minibatch with an index.
    """

    def __init__(self, data: ClockedDataModule, length: Callable[[], int], minibatch: Callable[[int], Any]) -> None:
        self._data, self._length, self._minibatch = data, length, minibatch

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        assert self._data.trainer is not None
        while self._data.position < self._data.trainer.num_training_batches:  # a resumed epoch may be at its end
            yield self._minibatch(self._data.position)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because Lightning stores the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, because Lightning restores the position."""
