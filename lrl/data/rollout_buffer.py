"""The buffer between collecting and training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.functional.distributed import all_gather_objects, redistribute_lists, value_of_this_rank
from lrl.functional.random import permutation
from lrl.types import Rollout, TurnBatch

Clocks = dict[str, float]


class RolloutDataModule(L.LightningDataModule):
    """Streams online rollouts as :class:`TurnBatch` parts.

    One Lightning epoch is one collection: :class:`lrl.callbacks.collect.VectorEnvRollouts` fills the buffer, then
    ``num_epochs`` passes are made over it, each cut into exactly ``num_minibatches`` parts.

    Args:
        env: where training episodes are played.
        num_groups: groups per collection, over all ranks; each plays whole episodes.
        group_size: episodes per group; they start from the same state.
        num_envs: environments over all ranks, in place of groups.
        num_steps: turns that each of ``num_envs`` plays per collection, its episodes going on from one collection to
            the next; null plays one whole episode in each.
        num_epochs: passes over each collection.
        num_minibatches: parts of a pass.
        share_noise: whether the episodes of a group share the environment's noise as well.
        max_turns: cut episodes after this many turns; null leaves it to the environment.
        max_env_steps: end the run after the collection that reaches this many turns, and validate there; null leaves it
            to ``max_epochs``.
        validation_env: where held-out episodes are played; null takes ``env``.
        validation_episodes: how many, one seed each.
        validation_seed: seed of the first held-out episode.
        validation_num_envs: environments that are evaluated side by side.
        validation_temperature: of held-out episodes; 0 decodes greedily.
        seed: of everything random in the run.
    """

    def __init__(
        self,
        env: EnvFactory,
        num_groups: int | None = None,
        group_size: int = 1,
        num_envs: int | None = None,
        num_steps: int | None = None,
        num_epochs: int = 1,
        num_minibatches: int = 1,
        share_noise: bool = False,
        max_turns: int | None = None,
        max_env_steps: int | None = None,
        validation_env: EnvFactory | None = None,
        validation_episodes: int = 50,
        validation_seed: int = 10_000,
        validation_num_envs: int = 50,
        validation_temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"num_groups": num_groups, "group_size": group_size, "num_envs": num_envs, "num_steps": num_steps}
        for name, value in (sizes | {"num_epochs": num_epochs, "num_minibatches": num_minibatches}).items():
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}; it must be at least 1.")
        if (num_groups is None) == (num_envs is None):
            raise ValueError(f"data.num_groups is {num_groups}, num_envs {num_envs}; one of them must be set.")
        if num_envs is not None and group_size > 1:
            raise ValueError(f"data.group_size is {group_size} with num_envs; groups need num_groups.")
        if num_envs is not None and share_noise:
            raise ValueError("data.share_noise is true with num_envs; only groups share anything.")
        if num_steps is not None and num_envs is None:
            raise ValueError(f"data.num_steps is {num_steps} with num_groups; groups play whole episodes.")
        self.env, self.validation_env = env, validation_env or env
        self.num_groups: int = num_groups or num_envs or 0
        self.counted_as = "num_groups" if num_envs is None else "num_envs"
        self.group_size, self.num_steps = group_size, num_steps
        self.num_epochs, self.num_minibatches = num_epochs, num_minibatches
        self.share_noise, self.max_turns, self.max_env_steps = share_noise, max_turns, max_env_steps
        self.validation_episodes, self.validation_seed = validation_episodes, validation_seed
        self.validation_num_envs, self.validation_temperature = validation_num_envs, validation_temperature
        self.seed = seed
        self.rollout: Rollout | None = None
        self.collection = -1
        self.trained_parts = 0
        self.clocks: Clocks = {"env_steps": 0, "episodes": 0, "tokens": 0, "minutes": 0.0}
        self.running_episodes: Callable[[int], dict[str, Any]] | None = None
        """Tells of episodes that go on in the next collection, for checkpoints."""
        self.restored_episodes: dict[str, Any] | None = None
        """What a checkpoint told of them."""
        self._batch: TurnBatch | None = None
        self._counted: tuple[int, int, tuple[int, int]] = (-1, -1, (0, 0))
        """Collection, first part and sizes of the optimiser step that was counted last."""
        self._started = time.monotonic()

    @property
    def codec(self) -> TextCodec:
        """Of the training environment."""
        return self.env.codec

    @property
    def num_parts(self) -> int:
        """Training steps per collection."""
        return self.num_epochs * self.num_minibatches

    @property
    def filled(self) -> bool:
        """Whether there is something left to train on."""
        return self._batch is not None and self.trained_parts < self.num_parts

    def fill(self, collection: int, rollout: Rollout, batch: TurnBatch) -> None:
        """Take over what was collected.

        Args:
            collection: its index in the run.
            rollout: as it was collected, for transcripts.
            batch: the turns with their advantages.
        """
        self.collection, self.rollout, self._batch = collection, rollout, batch
        self.trained_parts = 0

    @property
    def position(self) -> int:
        """The part that is trained next, by Lightning's own count, which a resume restores whatever was saved when."""
        assert self.trainer is not None
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def part(self, index: int) -> TurnBatch:
        """Part ``index`` of the buffer: of pass ``index // num_minibatches``.

        Turns with the same prompt stay together, so that the prompt is shared in the update as well.
        """
        if self._batch is None:
            raise ValueError("The rollout buffer is empty; give the trainer the callback VectorEnvRollouts.")
        if self.num_minibatches == 1 and "prompt_ids" not in self._batch.inputs:
            return self._batch  # one sum, whatever the order
        return self._batch[self._members(self._batch, index)]

    def _members(self, batch: TurnBatch, index: int) -> torch.Tensor:
        """The turns of part ``index``, int64 ``(turn,)``."""
        order = self._order(batch, index // self.num_minibatches)
        parts = torch.tensor_split(order, self.num_minibatches)
        return parts[index % self.num_minibatches].to(batch.response_mask.device)

    def step_sizes(self, index: int, accumulated: int) -> tuple[int, int]:
        """Return this rank's turns and sampled tokens of the optimiser step that part ``index`` belongs to.

        Args:
            index: of a part.
            accumulated: parts per optimiser step; the last step of a collection may have fewer.
        """
        assert self._batch is not None
        start, batch = index - index % accumulated, self._batch
        if self._counted[:2] != (self.collection, start):
            limit = self.num_parts if self.trainer is None else int(self.trainer.num_training_batches)
            parts = range(start, min(start + accumulated, limit))
            masks = [batch.response_mask[self._members(batch, part)] for part in parts]
            sizes = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
            self._counted = self.collection, start, sizes
        return self._counted[2]

    def _order(self, batch: TurnBatch, epoch: int) -> torch.Tensor:
        """A shuffle of the turns, int64 ``(turn,)``, that keeps turns with equal prompts side by side."""
        shuffled = torch.from_numpy(permutation(len(batch), "minibatch", self.seed, self.collection, epoch))
        if "prompt_ids" not in batch.inputs:
            return shuffled
        prompts = batch.inputs["prompt_ids"].cpu()[shuffled]
        _, cluster = torch.unique(prompts, dim=0, return_inverse=True)
        place = torch.from_numpy(permutation(int(cluster.max()) + 1, "cluster", self.seed, self.collection, epoch))
        return shuffled[torch.argsort(place[cluster], stable=True)]

    def train_dataloader(self) -> PartLoader:
        """Parts of the buffer, in order."""
        return PartLoader(self)

    def val_dataloader(self) -> DataLoader:
        """One item: the seeds of the held-out episodes, int64 ``(episode,)``."""
        seeds = torch.arange(self.validation_seed, self.validation_seed + self.validation_episodes)
        one_item: Any = [seeds]
        return DataLoader(one_item, batch_size=None, shuffle=False, num_workers=0)

    def test_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        """As :meth:`val_dataloader`."""
        return self.val_dataloader()

    @property
    def spent(self) -> bool:
        """Whether the budget of turns is used up."""
        return self.max_env_steps is not None and self.clocks["env_steps"] >= self.max_env_steps

    def tick(self, env_steps: float, episodes: float, tokens: float) -> None:
        """Advance the clocks by what one collection took, over all ranks."""
        self.clocks["env_steps"] += env_steps
        self.clocks["episodes"] += episodes
        self.clocks["tokens"] += tokens
        now = time.monotonic()
        self.clocks["minutes"] += (now - self._started) / 60
        self._started = now

    def state_dict(self) -> dict[str, Any]:
        """The clocks; off a collection boundary also what each rank collected, and how much of it is trained."""
        state: dict[str, Any] = {"clocks": dict(self.clocks), "collection": self.collection}
        if self.num_steps is not None:
            tell = self.running_episodes
            running = self.restored_episodes if tell is None else tell(self.collection)
            state["running_episodes"] = all_gather_objects(running)
        if self.filled:
            assert self._batch is not None
            state["batches"], state["trained_parts"] = all_gather_objects(self._batch.fields()), self.trained_parts
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: another number of ranks collected turns that are still to be trained on.
        """
        self.clocks, self.collection = dict(state_dict["clocks"]), state_dict["collection"]
        self._started = time.monotonic()
        fits = self.trainer is None or self.trainer.state.fn == "fit"
        if state_dict.get("running_episodes") and fits:
            self.restored_episodes = redistribute_lists(state_dict["running_episodes"])
        if "batches" in state_dict and fits:
            self._batch = TurnBatch(**value_of_this_rank(state_dict["batches"]))
            self.trained_parts = state_dict["trained_parts"]


class PartLoader:
    """Yields the buffer's parts.

    No ``DataLoader``: Lightning neither puts a distributed sampler into it nor asks for workers. A constant length:
    without one Lightning would prefetch from the empty buffer before the first collection. Stateful in name only,
    which tells Lightning that it can be resumed: the position is :attr:`RolloutDataModule.position`.
    """

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.num_parts

    def __iter__(self) -> Iterator[TurnBatch]:
        assert self.data.trainer is not None
        while self.data.position < self.data.trainer.num_training_batches:  # a resumed epoch may be at its end
            yield self.data.part(self.data.position)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""
