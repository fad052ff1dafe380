"""The rollout buffer, which stores collections and divides them into minibatches."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lrl.data.run_data import MinibatchLoader, RunDataModule, ValidationConfig
from lrl.envs.factory import EnvFactory
from lrl.functional.distributed import all_gather_objects, own_value, redistribute_lists
from lrl.functional.random import permutation
from lrl.lm.layouts import sorted_paths
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Rollout, TurnBatch


@register
class RolloutDataModule(RunDataModule):
    """Streams online rollouts as minibatches of turns (:class:`~lrl.types.TurnBatch`).

    One Lightning epoch is one collection: :class:`lrl.training.collect.VectorEnvRollouts` fills the buffer, then
    training makes ``num_epochs`` passes over it, each divided into exactly ``num_minibatches`` minibatches.

    Args:
        env: training environment.
        num_groups: number of groups of episodes per collection, over all ranks; set either this or ``num_envs``.
        group_size: number of episodes per group, which start from the same state.
        num_envs: number of environments over all ranks; set either this or ``num_groups``.
        num_steps: number of turns per environment and collection, after which episodes continue in the next collection;
            null plays one whole episode per environment.
        num_epochs: number of passes over each collection.
        num_minibatches: number of minibatches per pass.
        max_turns: number of turns after which episodes are truncated; null uses only the limit of the environment.
        max_env_steps: the run ends with a validation after the collection that reaches this number of turns; null uses
            only ``trainer.max_epochs``.
        validation: settings of held-out episodes.
        seed: seed of the run.
    """

    collects = True

    def __init__(
        self,
        env: EnvFactory,
        num_groups: PositiveInt | None = None,
        group_size: PositiveInt = 1,
        num_envs: PositiveInt | None = None,
        num_steps: PositiveInt | None = None,
        num_epochs: PositiveInt = 1,
        num_minibatches: PositiveInt = 1,
        max_turns: PositiveInt | None = None,
        max_env_steps: PositiveInt | None = None,
        validation: ValidationConfig = ValidationConfig(),
        seed: int = 0,
    ) -> None:
        check_arguments(RolloutDataModule.__init__, locals(), "data")
        super().__init__(env, validation, seed, "env_steps", "episodes", "tokens")
        if (num_groups is None) == (num_envs is None):
            raise ValueError(f"data.num_groups is {num_groups}, num_envs {num_envs}; exactly one must be set.")
        if num_envs is not None and group_size > 1:
            raise ValueError(
                f"data.group_size is {group_size}, which needs data.num_groups, but data.num_envs is set; set "
                "data.num_groups instead of data.num_envs."
            )
        if num_steps is not None and num_envs is None:
            raise ValueError(f"data.num_steps is {num_steps}, but data.num_groups is set; groups play whole episodes.")
        if num_envs is not None and num_steps is not None and num_minibatches > num_envs * num_steps:
            raise ValueError(
                f"data.num_minibatches is {num_minibatches}; it must be at most num_envs * num_steps, which is "
                f"{num_envs * num_steps}."
            )
        self.num_groups: int = num_groups or num_envs or 0
        """Number of groups, over all ranks; with ``num_envs`` each environment is a group of its own."""
        self.counted_as = "num_groups" if num_envs is None else "num_envs"
        """Name of the setting that determines ``num_groups``."""
        self.group_size, self.num_steps = group_size, num_steps
        self.num_epochs, self.num_minibatches = num_epochs, num_minibatches
        self.max_turns, self.max_env_steps = max_turns, max_env_steps
        self.rollout: Rollout | None = None
        self.collection = -1
        self.trained_minibatches = 0
        self._running_episodes: Callable[[int], dict[str, Any]] | None = None
        """Function that returns the state of the current episodes, for checkpoints."""
        self._restored_episodes: dict[str, Any] | None = None
        """State of the current episodes in the checkpoint from which the run is resumed."""
        self._batch: TurnBatch | None = None
        self._shuffled: tuple[int, int, list[torch.Tensor]] = (-1, -1, [])
        """Cache of the last shuffled pass: collection, pass, and turns of each minibatch."""

    def prepare_data(self) -> None:
        """Download what the environments need, once per machine."""
        self.env.prepare_data()
        self.validation_env.prepare_data()

    @property
    def minibatches_per_collection(self) -> int:
        """Number of minibatches per collection."""
        return self.num_epochs * self.num_minibatches

    @property
    def trained_per_collection(self) -> int:
        """Number of minibatches per collection that are trained on; ``trainer.limit_train_batches`` may limit it."""
        limit = math.inf if self.trainer is None else self.trainer.num_training_batches
        return int(min(self.minibatches_per_collection, limit))

    def schedule_length(self, key: str, limit: float, of_collection: int = 1) -> float:
        """Return the number of steps over which a schedule decays.

        Args:
            key: configuration key of the schedule, for a warning.
            limit: number of steps after which the trainer ends the run; infinite if it does not.
            of_collection: number of steps of a collection.
        """
        if self.max_env_steps is not None and self.num_steps is not None:
            return min(limit, of_collection * -(-self.max_env_steps // (self.num_groups * self.num_steps)))
        if self.max_env_steps is not None and limit < math.inf:
            warnings.warn(
                f"{key} ends with trainer.max_epochs or trainer.max_steps: the number of collections in which whole "
                f"episodes reach data.max_env_steps, which is {self.max_env_steps}, is not known before.",
                stacklevel=2,
            )
        return limit

    @property
    def has_untrained_minibatches(self) -> bool:
        """True if minibatches of the collection remain to be trained on."""
        return self._batch is not None and self.trained_minibatches < self.trained_per_collection

    @property
    def batch(self) -> TurnBatch | None:
        """The turns of the collection with their advantages; None before the first collection."""
        return self._batch

    def fill(self, collection: int, rollout: Rollout, batch: TurnBatch) -> None:
        """Store a collection.

        Args:
            collection: index of the collection in the run.
            rollout: the rollout, for transcripts.
            batch: the turns with their advantages.
        """
        self.collection, self.rollout = collection, rollout
        self.trained_minibatches = 0
        self._hold(batch)

    def _hold(self, batch: TurnBatch) -> None:
        """Store the turns of a collection, and clear the cache of shuffled turns."""
        self._batch, self._shuffled = batch, (-1, -1, [])

    def count_minibatch(self) -> None:
        """Count one more minibatch of the collection as trained."""
        self.trained_minibatches += 1

    def track_episodes(self, state: Callable[[int], dict[str, Any]]) -> dict[str, Any] | None:
        """Include the state of unfinished episodes, which continue in the next collection, in checkpoints.

        Args:
            state: returns the state of these episodes after a collection, given its index.

        Returns:
            Their state in the checkpoint that the run is resumed from; None in a new run.
        """
        self._running_episodes = state
        return self._restored_episodes

    def minibatch(self, index: int) -> TurnBatch:
        """Return minibatch ``index`` of the collection, which belongs to pass ``index // num_minibatches``.

        Turns with the same prompt are kept together, so that the update can compute the prompt once.

        Raises:
            ValueError: If no collection is stored, because the module does not collect.
        """
        if self._batch is None:
            raise ValueError(
                "The rollout buffer is empty; the module must be a GradientModule, or return VectorEnvRollouts from "
                "configure_callbacks."
            )
        if self.num_minibatches == 1 and "prompt_ids" not in self._batch.inputs:
            return self._batch  # the order does not matter to the loss
        return self._batch[self._members(self._batch, index)]

    def sample(self, share: float, min_turns: int, max_turns: int) -> TurnBatch:
        """Return a random sample of this rank's turns, at most as many as a minibatch has.

        Turns with the same prompt are selected together, because they are faster to evaluate.

        Args:
            share: share of the turns to select.
            min_turns: minimum number of turns, if there are that many.
            max_turns: maximum number of turns.
        """
        assert self._batch is not None
        minibatch_size = -(-len(self._batch) // self.num_minibatches)
        count = min(max(int(share * len(self._batch)), min_turns), max_turns, minibatch_size)
        # Passes are numbered from 0, so pass num_epochs is never trained on, and its order is independent of theirs.
        chosen = self._order(self._batch, self.num_epochs, self.collection)[:count]
        return self._batch[chosen.to(self._batch.response_mask.device)]

    def first_pass(self, collection: int, batch: TurnBatch) -> list[torch.Tensor]:
        """Return the turns of each minibatch, int64 ``(turn,)``, in the first pass over a collection.

        Args:
            collection: index of the collection in the run, which is not stored yet.
            batch: its turns.
        """
        return [*torch.tensor_split(self._order(batch, 0, collection), self.num_minibatches)]

    def _members(self, batch: TurnBatch, index: int) -> torch.Tensor:
        """Return the turns of minibatch ``index``, int64 ``(turn,)``."""
        epoch = index // self.num_minibatches
        if self._shuffled[:2] != (self.collection, epoch):
            minibatches = torch.tensor_split(self._order(batch, epoch, self.collection), self.num_minibatches)
            self._shuffled = self.collection, epoch, [turns.to(batch.response_mask.device) for turns in minibatches]
        return self._shuffled[2][index % self.num_minibatches]

    def step_sizes(self, index: int, accumulated: int) -> tuple[int, int]:
        """Return this rank's numbers of turns and sampled tokens in the optimiser step of a minibatch.

        Args:
            index: index of the minibatch.
            accumulated: number of minibatches per optimiser step; the last step of a collection may have fewer.
        """
        assert self._batch is not None
        start, batch = index - index % accumulated, self._batch
        step = range(start, min(start + accumulated, self.trained_per_collection))
        masks = [batch.response_mask[self._members(batch, minibatch)] for minibatch in step]
        return sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)

    def _order(self, batch: TurnBatch, epoch: int, collection: int) -> torch.Tensor:
        """Return the shuffled order of turns, int64 ``(turn,)``.

        Turns with equal prompts are adjacent, and so are those whose prompts continue each other, as the turns of an
        episode with history do.
        """
        shuffled = torch.from_numpy(permutation(len(batch), "minibatch", self.seed, collection, epoch))
        if "prompt_ids" not in batch.inputs:
            return shuffled
        prompts, mask = (batch.inputs[name].cpu()[shuffled] for name in ("prompt_ids", "prompt_mask"))
        # Different prompts in lexicographic order, the prompt of each turn, and the tokens shared with the one before.
        paths, path_of, shared = sorted_paths(torch.where(mask, prompts, -1))
        cluster = _clusters((paths >= 0).sum(1).tolist(), shared.tolist())
        place = torch.from_numpy(permutation(max(cluster) + 1, "cluster", self.seed, collection, epoch))
        order = place[torch.tensor(cluster)[path_of]] * len(paths) + path_of
        return shuffled[torch.argsort(order, stable=True)]

    def train_dataloader(self) -> MinibatchLoader:
        """Return a loader of the minibatches, in order."""
        return MinibatchLoader(self, lambda: self.minibatches_per_collection, self.minibatch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a batch on a device; turns that are there already are not copied."""
        if isinstance(batch, TurnBatch) and batch.response_mask.device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    @property
    def spent(self) -> bool:
        """True if ``max_env_steps`` is reached."""
        return self.max_env_steps is not None and self.clocks["env_steps"] >= self.max_env_steps

    def tick(self, env_steps: float, episodes: float, tokens: float) -> None:
        """Advance the clocks (env steps, episodes and tokens) by the size of one collection, over all ranks."""
        self.advance(env_steps=env_steps, episodes=episodes, tokens=tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks, and within a collection the turns of each rank and the number of trained minibatches."""
        state = super().state_dict() | {"collection": self.collection}
        if self.num_steps is not None:
            state_after = self._running_episodes
            running = self._restored_episodes if state_after is None else state_after(self.collection)
            state["running_episodes"] = all_gather_objects(running)
        if self.has_untrained_minibatches:
            assert self._batch is not None
            state["batches"] = all_gather_objects(self._batch.fields())
            state["trained_minibatches"] = self.trained_minibatches
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            ValueError: If the checkpoint was written within a collection with a different number of ranks.
        """
        super().load_state_dict(state_dict)
        self.collection = state_dict["collection"]
        fits = self.trainer is None or self.trainer.state.fn == "fit"
        if state_dict.get("running_episodes") and fits:
            self._restored_episodes = redistribute_lists(state_dict["running_episodes"])
        if "batches" in state_dict and fits:
            self._hold(TurnBatch(**own_value(state_dict["batches"])))
            self.trained_minibatches = int(state_dict["trained_minibatches"])


def _clusters(sizes: Sequence[int], shared: Sequence[int]) -> list[int]:
    """Return the index of each prompt's cluster. Clusters are shuffled, but the turns of a cluster stay together.

    A prompt continues another if it begins with all of its tokens. A prompt and the only one that continues it belong
    to the same cluster. Where the episodes of a group differ, several prompts continue the same one; each of these
    begins a new cluster, so that minibatches are still shuffled.

    Args:
        sizes: number of tokens of each prompt, in lexicographic order of the prompts.
        shared: number of leading tokens that each prompt has in common with the one before it.
    """
    # In lexicographic order, a prompt continues the nearest earlier prompt all of whose tokens it shares. The stack
    # open_prompts contains the earlier prompts that a later one may still continue.
    parents, open_prompts = list[int](), list[int]()
    for number, equal in enumerate(shared):
        while open_prompts and sizes[open_prompts[-1]] > equal:
            open_prompts.pop()
        parents.append(open_prompts[-1] if open_prompts else -1)
        open_prompts.append(number)
    continuations, clusters, count = Counter(parents), list[int](), 0
    for parent in parents:
        continues = parent >= 0 and continuations[parent] == 1
        clusters.append(clusters[parent] if continues else count)
        count += not continues
    return clusters
