"""Demonstrations as batches of turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.sources import Demonstrations, ExpertDemonstrations, JsonlDemonstrations, StreamedTurns
from lrl.data.validation import ValidationConfig
from lrl.envs.factory import EnvFactory
from lrl.functional.random import permutation
from lrl.models.padding import pad_prompts
from lrl.types import Demonstration, TurnBatch

__all__ = ["Demonstrations", "DemonstrationsDataModule", "ExpertDemonstrations", "JsonlDemonstrations", "as_batch"]

_WINDOW = 32
"""Batches among which turns are sorted by length, so that a batch holds turns of similar length."""
_REMEMBERED = 50_000
"""Answers whose tokens are kept, after which all are forgotten: a data set need not fit in memory."""


class DemonstrationsDataModule(L.LightningDataModule):
    """Streams demonstrations as :class:`TurnBatch`; one Lightning epoch is one pass.

    They are tokenised when they are asked for, by the policy itself: what is trained on is what is asked for in the
    environment. A batch's ``advantages`` are the weights of its tokens: an optimiser step is a mean over the tokens of
    all its batches, on all ranks.

    Args:
        demonstrations: where they come from.
        env: the environment that they are of.
        batch_size: demonstrations per training step, over all ranks; an optimiser step takes
            ``trainer.accumulate_grad_batches`` times as many.
        loss_on: ``completion`` trains the answer, ``all`` the prompt as well.
        validation_demonstrations: held-out ones, of which ``val/loss`` is the loss; null takes none.
        validation: held-out episodes.
        seed: of the order of the demonstrations.
    """

    rollout = None

    def __init__(
        self,
        demonstrations: Demonstrations,
        env: EnvFactory,
        batch_size: int = 64,
        loss_on: Literal["completion", "all"] = "completion",
        validation_demonstrations: Demonstrations | None = None,
        validation: ValidationConfig = ValidationConfig(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size is {batch_size}; it must be at least 1.")
        self.demonstrations, self.validation_demonstrations = demonstrations, validation_demonstrations
        self.env, self.validation = env, validation
        self.batch_size, self.seed = batch_size, seed
        self.loss_on: Literal["completion", "all"] = loss_on
        self.clocks: dict[str, float] = {"tokens": 0, "optimizer_steps": 0, "minutes": 0.0}
        self._turns: dict[Demonstrations, Sequence[Demonstration]] = {}
        self._responses: dict[str, list[int]] = {}
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._windows: dict[tuple[int, int], np.ndarray] = {}
        self._started = time.monotonic()

    @property
    def codec(self) -> TextCodec:
        """Of the environment."""
        return self.env.codec

    @property
    def validation_env(self) -> EnvFactory:
        """Environment of the held-out episodes."""
        return self.validation.env or self.env

    def prepare_data(self) -> None:
        """Fetch the demonstrations, once per machine."""
        for source in self._sources:
            source.prepare()

    @property
    def _sources(self) -> list[Demonstrations]:
        return [s for s in (self.demonstrations, self.validation_demonstrations) if s is not None]

    def setup(self, stage: str) -> None:
        """Read the demonstrations: what is wrong with them is said before a model is loaded."""
        if stage != "fit":
            return
        assert self.trainer is not None
        if self.batch_size < self.trainer.world_size:
            raise ValueError(
                f"data.batch_size is {self.batch_size}; it must be at least the {self.trainer.world_size} devices."
            )
        for source in self._sources:
            source.check(self.env)
            self.turns(source)

    def turns(self, source: Demonstrations) -> Sequence[Demonstration]:
        """All demonstrations of a source, made or read once."""
        if source not in self._turns:
            self._turns[source] = source.turns(self.codec, self._policy())
        return self._turns[source]

    def _policy(self) -> Any:
        """A policy that encodes and writes answers."""
        assert self.trainer is not None
        policy = self.trainer.lightning_module.policy
        if not policy.demonstration_losses:
            name = type(policy).__name__
            raise ValueError(f"model.policy is a {name}; demonstrations train a TextPolicy or a ScoringPolicy.")
        if self.loss_on not in policy.demonstration_losses:
            raise ValueError("data.loss_on is 'all'; it must be completion, a ScoringPolicy says nothing of prompts.")
        return policy

    def encode(self, turn: Demonstration) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the tokens that are trained: the answer, or all but the first of both."""
        prompt, response = self._policy().encode(turn.observation, turn.history), self._encode_response(turn.response)
        return (prompt, response) if self.loss_on == "completion" else (prompt[:1], prompt[1:] + response)

    def _encode_response(self, response: str) -> list[int]:
        if response not in self._responses:
            if len(self._responses) >= _REMEMBERED:
                self._responses.clear()
            self._responses[response] = self._policy().encode_response(response)
        return self._responses[response]

    def num_batches(self) -> int:
        """Training steps per pass; the same on every rank."""
        return -(-len(self.turns(self.demonstrations)) // self.batch_size)

    def batch(self, epoch: int, index: int, rank: int = 0, world_size: int = 1) -> TurnBatch:
        """This rank's part of batch ``index`` of pass ``epoch``; the last batch is filled up from the pass's start."""
        tokens = sum(self.num_tokens(epoch, part) for part in self._accumulated(index))
        weight = self._accumulate * world_size / tokens  # Lightning divides losses by the one, DDP by the other
        own = self._chosen(epoch, index)[rank::world_size]
        prompts, responses = zip(*(self.encode(turn) for turn in own), strict=True)
        return as_batch(prompts, responses, weight)

    def num_tokens(self, epoch: int, index: int) -> int:
        """Trained tokens of a batch, over all ranks."""
        turns = self._chosen(epoch, index)
        if self.loss_on == "all":
            return sum(len(self.encode(turn)[1]) for turn in turns)
        return sum(len(self._encode_response(turn.response)) for turn in turns)

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def _accumulated(self, index: int) -> range:
        """The batches of the optimiser step that batch ``index`` is part of."""
        limit = float("inf") if self.trainer is None else self.trainer.num_training_batches
        start = index - index % self._accumulate
        return range(start, int(min(start + self._accumulate, self.num_batches(), limit)))

    def _chosen(self, epoch: int, index: int) -> list[Demonstration]:
        """The demonstrations of a batch."""
        window, place = divmod(index, _WINDOW)
        if (epoch, window) not in self._windows:
            if len(self._windows) > 1:  # two are kept: an optimiser step may have batches in both
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = self._sorted(epoch, window)
        turns = self.turns(self.demonstrations)
        return [turns[i] for i in self._windows[epoch, window][place].tolist()]

    def _sorted(self, epoch: int, window: int) -> np.ndarray:
        """The demonstrations of some batches, int64 ``(batch, batch_size)``: sorted by length, the batches shuffled."""
        turns, size, start = self.turns(self.demonstrations), self.batch_size, window * _WINDOW * self.batch_size
        part = self._shuffled(epoch)[start : start + _WINDOW * size]
        lengths = np.array([turns[i].characters for i in part.tolist()])
        batches = part[np.argsort(lengths, kind="stable")].reshape(-1, size)
        return batches[permutation(len(batches), "batches", self.seed, epoch, start)]

    def _shuffled(self, epoch: int) -> np.ndarray:
        """The order of a pass, int64, in whole batches."""
        if self._order[0] != epoch:
            turns = self.turns(self.demonstrations)
            if isinstance(turns, StreamedTurns):
                order = turns.shuffled(self.seed, epoch)
            else:
                order = permutation(len(turns), "demonstrations", self.seed, epoch)
            self._order = (epoch, np.resize(order, self.num_batches() * self.batch_size))
        return self._order[1]

    def train_dataloader(self) -> BatchLoader:
        """Batches of this rank."""
        return BatchLoader(self)

    def validation_batches(self, rank: int = 0, world_size: int = 1) -> Iterator[TurnBatch]:
        """This rank's held-out demonstrations; ranks may have different numbers of batches."""
        if self.validation_demonstrations is None:
            return
        turns = self.turns(self.validation_demonstrations)
        own, window = range(rank, len(turns), world_size), _WINDOW * self.batch_size
        for start in range(0, len(own), window):
            part = sorted((turns[i] for i in own[start : start + window]), key=lambda turn: turn.characters)
            for first in range(0, len(part), self.batch_size):
                prompts, responses = zip(*map(self.encode, part[first : first + self.batch_size]), strict=True)
                yield as_batch(prompts, responses)

    def val_dataloader(self) -> DataLoader:
        """One item: the seeds of the held-out episodes, int64 ``(episode,)``."""
        one_item: Any = [self.validation.seeds]
        return DataLoader(one_item, batch_size=None, shuffle=False, num_workers=0)

    def test_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    def tick(self, epoch: int, index: int) -> None:
        """Advance the clocks by one batch, over all ranks."""
        self.clocks["tokens"] += self.num_tokens(epoch, index)
        self.clocks["optimizer_steps"] += index == self._accumulated(index)[-1]
        now = time.monotonic()
        self.clocks["minutes"] += (now - self._started) / 60
        self._started = now

    def state_dict(self) -> dict[str, Any]:
        """The clocks; the order of the demonstrations follows from the seed."""
        return {"clocks": dict(self.clocks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.clocks = dict(state_dict["clocks"])
        self._started = time.monotonic()


def as_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], weight: float | None = None
) -> TurnBatch:
    """Pad demonstrations to a batch.

    Args:
        prompts: token ids.
        responses: token ids that are trained.
        weight: of each of them, as its advantage; None takes 1 / the batch's tokens.
    """
    device = torch.device("cpu")
    inputs, answers = pad_prompts(prompts, device), pad_prompts(responses, device)
    mask = answers["prompt_mask"]
    advantages = mask * (1 / int(mask.sum()) if weight is None else weight)
    inputs["response_ids"] = answers["prompt_ids"]
    nothing = torch.zeros_like(advantages)
    return TurnBatch(inputs=inputs, response_mask=mask, old_logprobs=nothing, advantages=advantages)


class BatchLoader:
    """Yields from where Lightning's own count stands, which a resume restores; stateful in name only.

    No ``DataLoader``: Lightning neither puts a distributed sampler into it nor asks for workers.
    """

    def __init__(self, data: DemonstrationsDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.num_batches()

    def __iter__(self) -> Iterator[TurnBatch]:
        trainer = self.data.trainer
        assert trainer is not None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        while (position := progress.current.ready) < trainer.num_training_batches:  # a resumed pass may be at its end
            yield self.data.batch(trainer.current_epoch, position, trainer.global_rank, trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""
