"""Data module that streams demonstrations as batches of turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from lrl.data.demonstration_tokens import DemonstrationTokens, cached_tokens, encoded
from lrl.data.run_data import MinibatchLoader, RunDataModule, ValidationConfig
from lrl.data.sources import Demonstrations, shuffled_indices
from lrl.envs.factory import EnvFactory
from lrl.functional.random import permutation
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Demonstration, TurnBatch

_WINDOW = 32
"""Number of batches whose turns are sorted by length together, so that the turns of a batch have similar lengths."""


@register
class DemonstrationsDataModule(RunDataModule):
    """Streams demonstrations as :class:`~lrl.types.TurnBatch`; one Lightning epoch is one pass over them.

    The policy tokenises them on demand, so that prompts are the same as in the environment. A policy that acts natively
    (such as :class:`~lrl.policies.mlp.MLPPolicy`) encodes native observations and actions instead; an action counts as
    one token. The ``advantages`` of a batch are token weights, chosen such that an optimiser step averages over the
    tokens of all its batches on all ranks.

    Args:
        demonstrations: source of the training demonstrations.
        env: environment of the demonstrations.
        batch_size: number of demonstrations per training step over all ranks; an optimiser step uses
            ``trainer.accumulate_grad_batches`` times as many.
        loss_on: ``completion`` trains on the response, ``all`` on the prompt as well.
        validation_demonstrations: held-out demonstrations for ``val/loss``; null for none.
        validation: settings of held-out episodes.
        seed: seed of the order of the demonstrations.
        token_cache: folder for files with the token ids of the training demonstrations, which are written before the
            first batch and reused by later passes and runs; null encodes them in every pass.
    """

    def __init__(
        self,
        demonstrations: Demonstrations,
        env: EnvFactory,
        batch_size: PositiveInt = 64,
        loss_on: Literal["completion", "all"] = "completion",
        validation_demonstrations: Demonstrations | None = None,
        validation: ValidationConfig = ValidationConfig(),
        seed: int = 0,
        token_cache: str | None = None,
    ) -> None:
        check_arguments(DemonstrationsDataModule.__init__, locals(), "data")
        super().__init__(env, validation, seed, "tokens", "optimizer_steps")
        self.demonstrations, self.validation_demonstrations = demonstrations, validation_demonstrations
        self.batch_size, self.token_cache = batch_size, token_cache
        self.loss_on: Literal["completion", "all"] = loss_on
        self._policy: Policy | None = None
        self._loaded: dict[Demonstrations, Sequence[Demonstration]] = {}
        self._tokens: DemonstrationTokens | None = None
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def prepare_data(self) -> None:
        """Download the demonstrations, once per machine."""
        for source in self._sources:
            source.prepare_data()

    @property
    def _sources(self) -> list[Demonstrations]:
        return [s for s in (self.demonstrations, self.validation_demonstrations) if s is not None]

    def setup(self, stage: str) -> None:
        """Check the settings that do not depend on the model.

        Raises:
            ValueError: If the batch size is smaller than the number of devices, or a source does not fit the
                environment.
        """
        if stage != "fit":
            return
        assert self.trainer is not None
        if self.batch_size < self.trainer.world_size:
            raise ValueError(
                f"data.batch_size is {self.batch_size}; it must be at least the number of devices, "
                f"{self.trainer.world_size}."
            )
        for source in self._sources:
            source.validate(self.env)

    def connect(self, policy: Policy) -> None:
        """Set the policy that encodes the demonstrations; the Lightning module calls this in its ``setup``.

        Raises:
            ValueError: If the policy cannot be trained on the demonstrations.
        """
        name = type(policy).__name__
        if not policy.demonstration_losses:
            raise ValueError(f"model.policy is a {name}, which cannot learn from demonstrations; use another policy.")
        if self.loss_on not in policy.demonstration_losses:
            raise ValueError(f"data.loss_on is 'all', which a {name} does not support; it must be completion.")
        if policy.response_format is None:
            self._check_native(name)
        self._policy, self._tokens = policy, None

    def _check_native(self, policy: str) -> None:
        """Check that a policy that acts natively can be trained on the demonstrations.

        Args:
            policy: name of the policy's class, for the error message.

        Raises:
            ValueError: If a source contains only texts, or ``token_cache`` is set.
        """
        for source in (part for given in self._sources for part in given.sources):
            if not source.has_native_turns:
                raise ValueError(
                    f"model.policy is a {policy}, which learns from native observations and actions, but "
                    f"{type(source).__name__} contain texts; all demonstrations must be MinariDemonstrations or "
                    "JsonlDemonstrations."
                )
        if self.token_cache is not None:
            raise ValueError(
                f"data.token_cache is {self.token_cache!r}, but a {policy} learns from native actions, which are not "
                "tokenised; it must be null."
            )

    @property
    def policy(self) -> Policy:
        """The policy that encodes the demonstrations."""
        assert self._policy is not None, "connect() must be called before"
        return self._policy

    def load_all(self) -> None:
        """Load and validate all demonstrations, so that errors are raised before a model is loaded.

        Raises:
            ValueError: If a source cannot be loaded, or a held-out demonstration is also a training demonstration.
        """
        for source in self._sources:
            self.load(source)
        if self.validation_demonstrations is not None:
            self.validation_demonstrations.check_held_out(self.demonstrations)

    def load(self, source: Demonstrations) -> Sequence[Demonstration]:
        """Return all demonstrations of a source, which are loaded in the first call.

        Raises:
            ValueError: If the source cannot be loaded.
        """
        if source not in self._loaded:
            self._loaded[source] = source.load(self.codec, self.policy)
        return self._loaded[source]

    @property
    def tokens(self) -> DemonstrationTokens:
        """The encoded training demonstrations."""
        if self._tokens is None:
            demonstrations = self.load(self.demonstrations)
            if self.token_cache is None:
                self._tokens = encoded(demonstrations, self.policy, self.loss_on)
            else:
                self._tokens = cached_tokens(self.token_cache, demonstrations, self.policy, self.loss_on)
        return self._tokens

    def num_batches(self) -> int:
        """Return the number of training steps per pass, which is the same on every rank."""
        return -(-len(self.load(self.demonstrations)) // self.batch_size)

    def batch(self, epoch: int, index: int, rank: int = 0, world_size: int = 1) -> TurnBatch:
        """Return a rank's part of batch ``index`` of a pass.

        If the last batch of a pass is too small, it is filled with the first turns of that pass.
        """
        tokens = sum(self.num_tokens(epoch, other) for other in self._accumulated(index))
        # Lightning divides the loss by the number of accumulated batches, and DDP averages gradients over ranks.
        weight = self._accumulate * world_size / tokens
        return self.tokens.batch(self._indices_of(epoch, index)[rank::world_size], weight)

    def in_order(self, size: int) -> Iterator[TurnBatch]:
        """Yield all training demonstrations once, in their stored order, ``size`` at a time, on every rank."""
        count = len(self.load(self.demonstrations))
        for start in range(0, count, size):
            yield self.tokens.batch(np.arange(start, min(start + size, count)))

    def num_tokens(self, epoch: int, index: int) -> int:
        """Return the number of target tokens of a batch over all ranks; a native action counts as one."""
        return self.tokens.num_targets(self._indices_of(epoch, index))

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def _accumulated(self, index: int) -> range:
        """Return the indices of all batches of the optimiser step that batch ``index`` belongs to."""
        limit = float("inf") if self.trainer is None else self.trainer.num_training_batches
        start = index - index % self._accumulate
        return range(start, int(min(start + self._accumulate, self.num_batches(), limit)))

    def _indices_of(self, epoch: int, index: int) -> np.ndarray:
        """Return the indices of the demonstrations of batch ``index`` on all ranks, int64 ``(turn,)``."""
        window, position = divmod(index, _WINDOW)
        if (epoch, window) not in self._windows:
            if len(self._windows) > 1:  # two are kept because an optimiser step may have batches in both
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = self._window(epoch, window)
        return self._windows[epoch, window][position]

    def _window(self, epoch: int, window: int) -> np.ndarray:
        """Return the indices of a window's demonstrations, int64 ``(batch, batch_size)``.

        Texts are sorted by length and divided into batches, which are then shuffled.
        """
        size, start = self.batch_size, window * _WINDOW * self.batch_size
        indices = self._shuffled(epoch)[start : start + _WINDOW * size]
        batches = indices[np.argsort(self.tokens.characters(indices), kind="stable")].reshape(-1, size)
        return batches[permutation(len(batches), "batches", self.seed, epoch, start)]

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return the order of the demonstrations in a pass, int64 ``(turn,)``, repeated to fill the last batch."""
        if self._order[0] != epoch:
            order = shuffled_indices(self.load(self.demonstrations), self.seed, epoch)
            self._order = (epoch, np.resize(order, self.num_batches() * self.batch_size))
        return self._order[1]

    def train_dataloader(self) -> MinibatchLoader:
        """Return the batches of this rank."""
        return MinibatchLoader(self, self.num_batches, self._batch_of_this_rank)

    def _batch_of_this_rank(self, index: int) -> TurnBatch:
        trainer: Any = self.trainer
        epoch = 0 if trainer.overfit_batches else trainer.current_epoch  # overfit_batches repeats the first batches
        return self.batch(epoch, index, trainer.global_rank, trainer.world_size)

    def validation_batches(self, rank: int = 0, world_size: int = 1) -> Iterator[TurnBatch]:
        """Yield the held-out demonstrations of a rank; ranks may have different numbers of batches."""
        if self.validation_demonstrations is None:
            return
        demonstrations = self.load(self.validation_demonstrations)
        tokens = encoded(demonstrations, self.policy, self.loss_on)
        own, window = np.arange(rank, len(demonstrations), world_size), _WINDOW * self.batch_size
        for start in range(0, len(own), window):
            indices = own[start : start + window]
            by_length = indices[np.argsort(tokens.characters(indices), kind="stable")]
            for first in range(0, len(by_length), self.batch_size):
                yield tokens.batch(by_length[first : first + self.batch_size])

    def tick(self, epoch: int, index: int) -> None:
        """Advance the clocks, which count tokens and optimiser steps, by one batch over all ranks."""
        steps = int(index == self._accumulated(index)[-1])
        self.advance(tokens=self.num_tokens(epoch, index), optimizer_steps=steps)
