"""Demonstrations as batches of turns."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import RowSource
from lrl.functional.random import counter_hash, permutation
from lrl.policies.text import TextPolicy
from lrl.types import PastTurn, TurnBatch

_BUCKETS = 32
"""Batches among which turns are sorted by length, so that a batch holds turns of similar length."""


class Demonstrations(ABC):
    """Where demonstrations come from."""

    @abstractmethod
    def turns(self, codec: TextCodec, policy: TextPolicy) -> Sequence[PastTurn]:
        """Observations with the answers that should be given to them."""


class ExpertDemonstrations(Demonstrations):
    """The best action of every row, one answer each; among equally good actions one is drawn per row.

    Args:
        rows: states with expert Q-values.
        reasoning: written before the action where the format asks for it; ``{seen}`` stands for the observation's
            first line.
        repeat: how many answers per row, with ties drawn anew.
        seed: of the draws.
    """

    def __init__(
        self, rows: RowSource, reasoning: Sequence[str] = ("I see {seen}, I choose",), repeat: int = 1, seed: int = 0
    ) -> None:
        if repeat < 1 or not reasoning:
            raise ValueError(f"demonstrations.repeat is {repeat}, reasoning {reasoning}; both must not be empty.")
        self.rows, self.reasoning, self.repeat, self.seed = rows, tuple(reasoning), repeat, seed

    def turns(self, codec: TextCodec, policy: TextPolicy) -> Sequence[PastTurn]:
        """One turn per row and repetition."""
        rows = self.rows.rows()
        draws = counter_hash("demonstration", self.seed, np.arange(len(rows) * self.repeat))
        turns = []
        for index, draw in enumerate(draws.tolist()):
            row = rows[index % len(rows)]
            action = row.best_actions[draw % len(row.best_actions)]
            thought = self.reasoning[(draw >> 32) % len(self.reasoning)].format(seen=row.observation.split("\n")[0])
            turns.append(PastTurn(row.observation, policy.write(codec.action_to_text(action), thought)))
        return turns


class JsonlDemonstrations(Demonstrations):
    """One JSON object per line: ``{"observation": ..., "action": ...}`` or ``{"observation": ..., "response": ...}``.

    An ``action`` is put into the response format; a ``response`` is taken as it is.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def turns(self, codec: TextCodec, policy: TextPolicy) -> Sequence[PastTurn]:
        """All lines.

        Raises:
            ValueError: the file is missing or empty, or a line is not such an object.
        """
        if not Path(self.path).is_file():
            raise ValueError(f"demonstrations.path is {self.path!r}; there is no such file.")
        lines = Path(self.path).read_text(encoding="utf-8").splitlines()
        turns = [self._turn(number, line, policy) for number, line in enumerate(lines, 1) if line.strip()]
        if not turns:
            raise ValueError(f"demonstrations.path is {self.path!r}; the file holds no demonstrations.")
        return turns

    def _turn(self, number: int, line: str, policy: TextPolicy) -> PastTurn:
        try:
            record = json.loads(line)
            answer = record["response"] if "response" in record else policy.write(record["action"], "")
            return PastTurn(str(record["observation"]), str(answer))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} line {number} is not an object with observation and action or response: {error!r}."
            ) from error


@dataclass(frozen=True)
class _Encoded:
    """Token ids of all demonstrations."""

    prompts: list[list[int]]
    responses: list[list[int]]

    def lengths(self) -> np.ndarray:
        return np.array([len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)])


class DemonstrationsDataModule(L.LightningDataModule):
    """Streams demonstrations as :class:`TurnBatch`; one Lightning epoch is one pass.

    Args:
        demonstrations: where they come from.
        env: the environment that they are of, in which held-out episodes are played.
        batch_size: demonstrations per training step, over all ranks.
        loss_on: ``completion`` trains the answer, ``all`` the prompt as well.
        validation_episodes: held-out episodes, one seed each.
        validation_seed: seed of the first.
        validation_num_envs: environments that are evaluated side by side.
        validation_temperature: 0 decodes greedily.
        seed: of the order of the demonstrations.
    """

    rollout = None

    def __init__(
        self,
        demonstrations: Demonstrations,
        env: EnvFactory,
        batch_size: int = 64,
        loss_on: Literal["completion", "all"] = "completion",
        validation_episodes: int = 50,
        validation_seed: int = 10_000,
        validation_num_envs: int = 50,
        validation_temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"data.batch_size is {batch_size}; it must be at least 1.")
        self.demonstrations, self.env, self.validation_env = demonstrations, env, env
        self.batch_size, self.loss_on, self.seed = batch_size, loss_on, seed
        self.validation_episodes, self.validation_seed = validation_episodes, validation_seed
        self.validation_num_envs, self.validation_temperature = validation_num_envs, validation_temperature
        self.clocks: dict[str, float] = {"tokens": 0, "optimizer_steps": 0, "minutes": 0.0}
        self._encoded: _Encoded | None = None
        self._started = time.monotonic()

    @property
    def codec(self) -> TextCodec:
        """Of the environment."""
        return self.env.codec

    def encoded(self) -> _Encoded:
        """Token ids of all demonstrations, made once, by the policy that will be asked the same in the environment."""
        if self._encoded is None:
            policy = self._policy()
            turns = self.demonstrations.turns(self.codec, policy)
            prompts = [list(policy.encode(turn.observation, ())) for turn in turns]
            responses = [policy.encode_response(turn.response) for turn in turns]
            if self.loss_on == "all":
                responses = [p[1:] + r for p, r in zip(prompts, responses, strict=True)]
                prompts = [p[:1] for p in prompts]
            self._encoded = _Encoded(prompts, responses)
        return self._encoded

    def _policy(self) -> TextPolicy:
        assert self.trainer is not None
        policy = self.trainer.lightning_module.policy
        if not isinstance(policy, TextPolicy):
            raise ValueError(f"model.policy is a {type(policy).__name__}; demonstrations train a TextPolicy.")
        return policy

    def num_batches(self) -> int:
        """Training steps per pass; the same on every rank."""
        return -(-len(self.encoded().prompts) // self.batch_size)

    def batch(self, epoch: int, index: int, rank: int = 0, world_size: int = 1) -> TurnBatch:
        """This rank's part of step ``index`` of pass ``epoch``; the last step of a pass is filled up from its start."""
        encoded = self.encoded()
        chosen = self._order(epoch)[np.arange(index * self.batch_size, (index + 1) * self.batch_size) % self._length]
        own = chosen[rank::world_size]
        return as_batch([encoded.prompts[i] for i in own], [encoded.responses[i] for i in own])

    @property
    def _length(self) -> int:
        return len(self.encoded().prompts)

    def _order(self, epoch: int) -> np.ndarray:
        """A shuffle, int64 ``(demonstration,)``, sorted by length inside windows, the batches of a window shuffled."""
        order, lengths = permutation(self._length, "demonstrations", self.seed, epoch), self.encoded().lengths()
        window = _BUCKETS * self.batch_size
        for start in range(0, self._length - window + 1, window):
            part = order[start : start + window]
            batches = part[np.argsort(lengths[part], kind="stable")].reshape(_BUCKETS, self.batch_size)
            shuffle = permutation(_BUCKETS, "buckets", self.seed, epoch, start)
            order[start : start + window] = batches[shuffle].reshape(-1)
        return order

    def train_dataloader(self) -> _Batches:
        """Batches of this rank."""
        return _Batches(self)

    def val_dataloader(self) -> DataLoader:
        """One item: the seeds of the held-out episodes, int64 ``(episode,)``."""
        seeds = torch.arange(self.validation_seed, self.validation_seed + self.validation_episodes)
        return DataLoader([seeds], batch_size=None, shuffle=False, num_workers=0)  # pyright: ignore[reportArgumentType]

    def test_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    def tick(self, tokens: int) -> None:
        """Advance the clocks by one training step over all ranks."""
        self.clocks["tokens"] += tokens
        self.clocks["optimizer_steps"] += 1
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


def as_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> TurnBatch:
    """Pad demonstrations to a batch; old log-probabilities and advantages, which nothing asks for, are 0."""
    prompt_ids, prompt_mask = _pad(prompts)
    response_ids, response_mask = _pad(responses)
    nothing = torch.zeros(response_ids.shape)
    inputs = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids}
    return TurnBatch(inputs=inputs, response_mask=response_mask, old_logprobs=nothing, advantages=nothing)


def _pad(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width)[None] < lengths[:, None]


class _Batches:
    """Yields from where Lightning's own count stands, which a resume restores; stateful in name only."""

    def __init__(self, data: DemonstrationsDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.num_batches()

    def __iter__(self) -> Iterator[TurnBatch]:
        trainer = self.data.trainer
        assert trainer is not None
        for _ in range(len(self)):
            position = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            batch = self.data.batch(trainer.current_epoch, position, trainer.global_rank, trainer.world_size)
            self.data.tick(int(batch.response_mask.sum()) * trainer.world_size)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""
