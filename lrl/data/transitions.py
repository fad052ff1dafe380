"""Data module of the transitions in Minari data sets, for training reward models."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lrl.data.run_data import ClockedDataModule, MinibatchLoader
from lrl.envs.minari_reader import DatasetReader, download
from lrl.functional.random import permutation
from lrl.ranges import HalfOpenUnitInterval, OpenUnitInterval, PositiveInt, check_arguments
from lrl.registry import register
from lrl.rewards.reward_model import space_to_dict, transition_vectors

Split = Literal["train", "validation", "test"]

_MAX_UNKNOWN_WEIGHT = 0.01
"""Maximum of ``gamma**n`` for a step of a truncated episode, where ``n`` rewards from the step on are known.

Steps with a larger value are omitted. The weights ``(1 - gamma) * gamma**k`` of a return's rewards sum to 1, and
``gamma**n`` is the sum of the weights of the unknown rewards after the time limit.
"""


@register
class TransitionsDataModule(ClockedDataModule):
    """Streams pairs of inputs ``(row, size)`` and rewards ``(row,)``; one Lightning epoch is one pass over them.

    Inputs are concatenated observations and actions (:func:`~lrl.rewards.reward_model.transition_vectors`). They are
    kept in memory as float32; a million steps of HalfCheetah take 96 MB. All steps are used, including random ones.

    Whole episodes are held out: neighbouring steps are so similar that held-out steps of training episodes would
    measure memorisation. Early stopping uses the validation split, and ``lrl test`` uses the test split.

    The target of a step is its reward, or with a positive ``gamma`` a scaled discounted return from the step on. A
    policy that maximises a model of single rewards neglects the rewards that follow. Rewards after a time limit are
    unknown. The last steps of a truncated episode are omitted if the discount factors of the unknown rewards make up
    more than a hundredth of the sum of all discount factors of the return.

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local; or a list of several with the
            same spaces. If a policy will be trained with the model's rewards, include data with actions that a good
            policy does not take.
        batch_size: number of rows per training step over all ranks.
        validation_share: fraction of each data set's episodes to hold out for validation; at least one episode is
            held out.
        test_share: fraction of each data set's episodes to hold out for testing; 0 holds out none, otherwise at least
            one episode is held out.
        seed: seed of the split and of the order of the rows.
        gamma: discount of the rewards that follow a step. With 0 the target is the reward of the step, otherwise
            ``(1 - gamma) * sum_k gamma**k r_{t+k}``, which has the unit of a reward.

    Raises:
        ValueError: If no data set is given, or one twice, or a setting is out of range.
    """

    def __init__(
        self,
        dataset_id: str | list[str],
        batch_size: PositiveInt = 2048,
        validation_share: OpenUnitInterval = 0.1,
        test_share: HalfOpenUnitInterval = 0.1,
        seed: int = 0,
        gamma: HalfOpenUnitInterval = 0.0,
    ) -> None:
        check_arguments(TransitionsDataModule.__init__, locals(), "data")
        super().__init__(seed, "optimizer_steps")
        self.dataset_id, self.batch_size = dataset_id, batch_size
        self.dataset_ids = [dataset_id] if isinstance(dataset_id, str) else list(dataset_id)
        if not self.dataset_ids or len(set(self.dataset_ids)) < len(self.dataset_ids):
            raise ValueError(f"data.dataset_id is {dataset_id!r}; it must be a name, or a list of different names.")
        self.validation_share, self.test_share, self.gamma = validation_share, test_share, float(gamma)
        self.episodes: dict[Split, np.ndarray] = {}
        """Indices of the episodes of each split, int64 ``(episode,)``, numbered consecutively over all data sets."""
        self._rows: dict[Split, tuple[Tensor, Tensor]] = {}
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def prepare_data(self) -> None:
        """Download the data sets, once per machine."""
        for name in self.dataset_ids:
            download(name)

    def setup(self, stage: str) -> None:
        """Read the data sets; a second call does nothing.

        Raises:
            ValueError: If a data set is missing or damaged or has too few episodes, the rewards are all equal, the data
                sets have different spaces, or the batch size is too small for the number of devices.
        """
        assert self.trainer is not None
        if self.batch_size < 2 * self.trainer.world_size:
            raise ValueError(
                f"data.batch_size is {self.batch_size}; it must be at least 2 for each of the "
                f"{self.trainer.world_size} devices, because batch normalisation needs two rows."
            )
        if not self._rows:
            self.load()

    def load(self) -> None:
        """Read all episodes into memory, split by episode.

        Raises:
            ValueError: If a data set is missing or damaged or has too few episodes, the rewards are all equal, or the
                data sets have different spaces.
        """
        readers = [DatasetReader(name) for name in self.dataset_ids]
        spaces = self.observation_space, self.action_space = readers[0].observation_space, readers[0].action_space
        for name, space in zip(("observation", "action"), spaces):
            space_to_dict(name, space)  # raises for a space that a reward model does not support
        indices: dict[Split, list[np.ndarray]] = {}
        parts: dict[Split, list[tuple[Tensor, Tensor]]] = {}
        before = 0
        for reader in readers:
            reader.check_spaces(*spaces, "data.dataset_id")
            for split, episodes in self._split(reader).items():
                indices.setdefault(split, []).append(before + episodes)
                own = parts.setdefault(split, [])
                for index in episodes.tolist():
                    episode = reader.episode(index)
                    rewards = discounted_rewards(episode.rewards, episode.terminated, self.gamma)
                    seen, acted = (column[: len(rewards)] for column in (episode.observations, episode.actions))
                    if len(rewards):
                        own.append((transition_vectors(*spaces, seen, acted), rewards))
            before += len(reader.lengths)
        self.episodes = {split: np.concatenate(found) for split, found in indices.items()}
        for split, rows in parts.items():
            if rows:
                inputs, rewards = zip(*rows)
                self._rows[split] = torch.cat(inputs), torch.cat(rewards)
        self._check_rows()

    def _split(self, reader: DatasetReader) -> dict[Split, np.ndarray]:
        """Split the indices of episodes at random; ``MinariDemonstrations`` has the same validation split."""
        num_episodes = len(reader.lengths)
        shares: dict[Split, float] = {"validation": self.validation_share, "test": self.test_share}
        counts = {split: max(round(share * num_episodes), int(share > 0)) for split, share in shares.items()}
        if sum(counts.values()) >= num_episodes:
            raise ValueError(
                f"data.dataset_id is {reader.dataset_id!r}, which contains {num_episodes} episodes; of these "
                f"data.validation_share and data.test_share hold out {sum(counts.values())}, so that "
                "none is left to train on."
            )
        order = permutation(num_episodes, "split", self.seed)
        held_out, tested, trained = np.split(order, np.cumsum(list(counts.values())))
        return {"train": trained, "validation": held_out, "test": tested}

    def _check_rows(self) -> None:
        for split, (inputs, rewards) in self._rows.items():
            if not (inputs.isfinite().all() and rewards.isfinite().all()):
                raise ValueError(
                    f"data.dataset_id is {self.dataset_id!r}, whose {split} split contains numbers that are not "
                    "finite; observations, actions and rewards must be finite."
                )
        for split in ("train", "validation", *(["test"] if self.test_share else [])):
            if split not in self._rows:
                known = " with enough known rewards after it; data.gamma must be smaller" if self.gamma else ""
                raise ValueError(
                    f"data.dataset_id is {self.dataset_id!r}, whose {split} split contains no step{known}."
                )
        rewards = self._rows["train"][1]
        if bool((rewards == rewards[0]).all()):
            raise ValueError(
                f"data.dataset_id is {self.dataset_id!r}, whose rewards are all {float(rewards[0]):g}; a reward model "
                "needs rewards that differ."
            )

    def rows(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the inputs, float32 ``(row, size)``, and rewards, float32 ``(row,)``, of a split.

        Raises:
            ValueError: If there is no test split.
        """
        if split not in self._rows:
            raise ValueError(f"data.test_share is {self.test_share:g}; it must be positive for lrl test.")
        return self._rows[split]

    def num_batches(self) -> int:
        """Return the number of training steps per pass, which is the same on every rank."""
        return -(-len(self.rows("train")[1]) // self.batch_size)

    def batch(self, epoch: int, index: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """Return a rank's part of batch ``index``.

        If the last batch of a pass is too small, it is filled with the first rows of that pass.
        """
        inputs, rewards = self.rows("train")
        if self._order[0] != epoch:
            order = permutation(len(rewards), "transitions", self.seed, epoch)
            self._order = (epoch, np.resize(order, self.num_batches() * self.batch_size))
        chosen = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        own = torch.from_numpy(chosen[rank::world_size])
        return inputs[own], rewards[own]

    def train_dataloader(self) -> MinibatchLoader:
        """Return the batches of this rank."""
        return MinibatchLoader(self, self.num_batches, self._batch_of_this_rank)

    def _batch_of_this_rank(self, index: int) -> tuple[Tensor, Tensor]:
        trainer: Any = self.trainer
        epoch = 0 if trainer.overfit_batches else trainer.current_epoch  # overfit_batches repeats the first batches
        return self.batch(epoch, index, trainer.global_rank, trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        """Return a loader of one item: this rank's part of the validation split."""
        return self._loader_of("validation")

    def test_dataloader(self) -> DataLoader:
        """Return a loader of one item: this rank's part of the test split."""
        return self._loader_of("test")

    def _loader_of(self, split: Split) -> DataLoader:
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        one_item: Any = [tuple(tensor[rank::world_size] for tensor in self.rows(split))]
        return DataLoader(one_item, batch_size=None, generator=torch.Generator())

    def tick(self, index: int) -> None:
        """Advance the clock of optimiser steps if batch ``index`` of a pass is the last one of such a step."""
        assert self.trainer is not None
        ends = (index + 1) % self.trainer.accumulate_grad_batches == 0 or index + 1 == self.trainer.num_training_batches
        self.advance(optimizer_steps=int(ends))


def discounted_rewards(rewards: np.ndarray, terminated: bool, gamma: float) -> Tensor:
    """Return scaled discounted returns of an episode, float32 ``(step,)``: ``(1 - gamma) * sum_k gamma**k r_{t+k}``.

    Args:
        rewards: rewards of the steps, float64 ``(step,)``.
        terminated: whether the episode terminated. If it was truncated, a step is omitted if the discount factors of
            the unknown rewards make up more than a hundredth of the sum of all discount factors (``gamma**n`` if ``n``
            rewards are known).
        gamma: discount, in [0, 1).
    """
    returns = accumulate(reversed(rewards.tolist()), lambda following, reward: reward + gamma * following)
    values = (1 - gamma) * torch.tensor(list(returns), dtype=torch.float64).flip(0)
    needed = 1  # number of known rewards from a step on
    if gamma and not terminated:
        needed = math.ceil(math.log(_MAX_UNKNOWN_WEIGHT) / math.log(gamma))
    return values[: max(len(values) - needed + 1, 0)].float()
