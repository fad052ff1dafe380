"""SFT: supervised fine-tuning, behaviour cloning of demonstrations.

Objective, over the tokens t of all demonstrated turns of an optimiser step, end tokens included:

    J = mean_t  log pi(a_t | prompt, a_<t)

which is a policy gradient that gives every demonstrated token the same advantage, 1 / number of tokens.

Departures from the usual recipe (Hugging Face's ``labels`` loss, TRL's ``SFTTrainer``; the loss is the same):

1. Only the answer counts, not the prompt; ``DemonstrationsDataModule(loss_on="all")`` counts both.
2. No label smoothing: the policy is to be as sure as the demonstrations are.
3. An answer of a ``ScoringPolicy`` is one token, the choice: its loss is the cross-entropy over the candidates.
4. What all prompts of a batch begin with is computed once per packed row (``TextPolicy(pack_tokens=...)``).
5. pi is the model's own distribution, whatever temperature the policy samples with.
6. Dropout, the adapters' and the model's own, follows from the run's seed and the batch's place in the run.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lrl.data.demonstrations.data_module import DemonstrationsDataModule
from lrl.evaluation.episodes import EpisodeResults
from lrl.functional.distributed import unsharded
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.training.metrics import MetricMeans
from lrl.training.policy_module import OptimizerFactory, PolicyModule
from lrl.training.schedule import Schedule
from lrl.types import Rollout, TurnBatch


class SFTModule(PolicyModule):
    """Trains a policy to answer as demonstrated.

    Args:
        policy: what is trained.
        lr: learning rate.
        log_every: optimiser steps between two logged rows; null logs once per pass.
        optimizer: makes the optimiser; null takes AdamW.
        weight_decay: of the default optimiser.
        schedule: of the learning rate.
        warmup: share of the run.
        init_from: weights to start from.
        max_skipped_steps: steps in a row that may be skipped because their gradients are not finite.
    """

    def __init__(
        self,
        policy: Policy,
        lr: float = 1e-3,
        log_every: int | None = None,
        optimizer: OptimizerFactory | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule = "cosine",
        warmup: float = 0.03,
        init_from: str | None = None,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__(policy, lr, optimizer, weight_decay, schedule, warmup, init_from, max_skipped_steps)
        if log_every is not None and log_every < 1:
            raise ValueError(f"model.log_every is {log_every}; it must be at least 1, or null.")
        self.log_every = log_every
        self._dropout_seed: int | None = None

    @property
    def needs_reference(self) -> bool:
        """Never."""
        return False

    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Demonstrations are not rolled out.

        Raises:
            ValueError: always; the data module should be ``DemonstrationsDataModule``.
        """
        raise ValueError("data is a RolloutDataModule; it must be a DemonstrationsDataModule, SFTModule trains on one.")

    def setup(self, stage: str) -> None:
        """Train the distribution at temperature 1; held-out episodes have a temperature of their own."""
        super().setup(stage)
        if isinstance(self.policy, TextPolicy | ScoringPolicy) and self.policy.sampling.temperature != 1:
            ignored = self.policy.sampling.temperature
            logging.getLogger("lrl").warning(
                "sampling.temperature %g plays no part in SFT, which trains at 1.", ignored
            )
            self.policy.sampling = replace(self.policy.sampling, temperature=1.0)

    def training_step(self, batch: TurnBatch) -> Tensor:
        """The negative log-likelihood of the demonstrated tokens, each with its weight."""
        policy = self.policy.evaluate(batch, self._dropout_seed)
        loss = -(policy.logprobs * batch.advantages).sum()
        self._record_step(policy.logprobs, policy.entropy, batch.response_mask)
        return loss

    @torch.no_grad()
    def _record_step(self, logprobs: Tensor, entropy: Tensor, mask: Tensor) -> None:
        self.record("train/loss", -logprobs[mask])
        self.record("train/entropy", entropy[mask])
        for group in self.optimizers(use_pl_optimizer=False).param_groups:  # pyright: ignore
            self.record("train/lr", torch.tensor(group["lr"]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the steps before recorded, if that is due; then advance the clocks and name this batch's dropout."""
        super().on_train_batch_start(batch, batch_idx)
        data = self._demonstrations
        steps = data.clocks["optimizer_steps"]
        begins = batch_idx > 0 and batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.log_every is not None and begins and steps % self.log_every == 0:
            self.publish_training()
        data.tick(self.current_epoch, batch_idx)
        self._dropout_seed = int(seeds("dropout", data.seed, self.current_epoch, batch_idx, self.global_rank))

    @property
    def _demonstrations(self) -> DemonstrationsDataModule:
        data = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(data, DemonstrationsDataModule):
            raise ValueError(f"data is a {type(data).__name__}; it must be a DemonstrationsDataModule.")
        return data

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play held-out episodes, if there are any, and publish the loss on held-out demonstrations."""
        results = super().validation_step(seeds) if len(seeds) else None
        self._validate_loss()
        return results

    def _validate_loss(self) -> None:
        losses = MetricMeans().to(self.device)
        with unsharded(self):  # ranks may have different numbers of batches
            for held_out in self._demonstrations.validation_batches(self.global_rank, self.trainer.world_size):
                batch = held_out.to(self.device)
                losses.record("val/loss", -self.policy.evaluate(batch).logprobs[batch.response_mask])
        means = losses.flush()
        if means:
            self.publish(means)
