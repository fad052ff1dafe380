"""SFT: supervised fine-tuning, behaviour cloning of demonstrations.

Objective, over the tokens t of all demonstrated turns of an optimiser step, end tokens included:

    J = mean_t  log pi(a_t | prompt, a_<t)

which is a policy gradient that gives every demonstrated token the same advantage, 1 / number of tokens.

Departures from the usual recipe (Hugging Face's ``labels`` loss, TRL's ``SFTTrainer``; the loss is the same):

1. Only the response counts, not the prompt; ``DemonstrationsDataModule(loss_on="all")`` counts both.
2. No label smoothing: the policy is to be as sure as the demonstrations are.
3. A response of a ``ScoringPolicy`` is one token, the choice: its loss is the cross-entropy over the candidates. So is
   a native action of an ``MLPPolicy`` or a ``HeadPolicy``: the cross-entropy, or for a Box the likelihood of a clipped
   Gaussian (:meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`), whose log-std is trained too.
4. What all prompts of a batch begin with is computed once per packed row (``TextPolicy(pack_tokens=...)``).
5. pi is the model's own distribution, whatever temperature the policy samples with.
6. Dropout, the adapters' and the model's own, follows from the run's seed and the batch's place in the run.
7. Running statistics are those of all training demonstrations, taken before the first update, but for those that
   ``init_from`` or a checkpoint brought.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.evaluation.episodes import EpisodeResults
from lrl.functional.distributed import unsharded
from lrl.functional.distributions import Gaussian
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.metrics import MetricMeans
from lrl.training.optimizer import OptimizerConfig
from lrl.types import Evaluation, TokenLoss, TurnBatch

_CHUNK = 4096
"""Demonstrations that running statistics learn from at a time."""


@register
class SFTModule(GradientModule):
    """Trains a policy to respond as demonstrated.

    Args:
        policy: what is trained.
        optimizer: the optimiser and its learning-rate schedule.
        log_every: optimiser steps between two logged rows; null logs once per pass.
        init_from: weights to start from.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, schedule="cosine", warmup=0.03),
        log_every: PositiveInt | None = None,
        init_from: str | None = None,
    ) -> None:
        check_arguments(SFTModule.__init__, locals(), "model")
        super().__init__(policy, optimizer, init_from=init_from)
        self.log_every = log_every

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the negative log-likelihood of each demonstrated token, times its weight."""
        metrics = {"train/loss": -policy.logprobs, "train/entropy": policy.entropy}
        return TokenLoss(
            loss=-policy.logprobs * batch.advantages,
            metrics={name: values.detach()[batch.response_mask] for name, values in metrics.items()},
        )

    # -- clocks, logging and the loss on held-out demonstrations ----------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the demonstrations, and train at temperature 1; held-out episodes have a temperature of their own."""
        super().setup(stage)
        self._demonstrations.connect(self.policy)
        if stage == "fit":
            self._demonstrations.load_all()
        sampling = self.policy.sampling
        if sampling.temperature != 1:
            logging.getLogger("lrl").warning(
                "sampling.temperature %g is ignored, SFT trains at 1.", sampling.temperature
            )
            self.policy.sampling = self.policy.sampling_at(1.0)

    def on_fit_start(self) -> None:
        """Raise for a critic under DDP, which expects a gradient of every weight: demonstrations give a critic none.

        Raises:
            ValueError: so it is, and the strategy does not look for weights without gradient.
        """
        super().on_fit_start()
        critic = any(weight.requires_grad for weight in self.policy.critic_parameters())
        replica: Any = self.trainer.model
        if critic and isinstance(replica, DistributedDataParallel) and not replica.find_unused_parameters:
            trunk = self.policy.trunk
            key = "critic" if trunk is None or trunk.value_head is None else "value_head"
            unset = "false" if trunk is None else "null"
            raise ValueError(
                f"policy.{key} is set, but demonstrations do not train it, and trainer.strategy is ddp, which waits "
                f"for the gradient of every weight; {key} must be {unset}, or the strategy "
                "ddp_find_unused_parameters_true."
            )

    @torch.no_grad()
    def on_train_start(self) -> None:
        """Take those running statistics of the policy from the demonstrations that have seen nothing yet."""
        empty = self.policy.empty_statistics
        if not empty:
            return
        with self.trainer.precision_plugin.forward_context():
            for number, batch in enumerate(self._demonstrations.in_order(_CHUNK)):
                self.policy.learn_statistics(batch.to(self.device), number, parts=empty)
                for part in empty:
                    part.settle(number + 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the previous steps recorded, if it is time; advance the clocks; name the dropout of this batch."""
        super().on_train_batch_start(batch, batch_idx)
        data = self._demonstrations
        steps = data.clocks["optimizer_steps"]
        begins = batch_idx > 0 and batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.log_every is not None and begins and steps % self.log_every == 0:
            self.publish_training()
        data.tick(self.current_epoch, batch_idx)
        self.dropout_seed = int(seeds("dropout", data.seed, self.current_epoch, batch_idx, self.global_rank))

    def step(self, batch: TurnBatch) -> Tensor | None:
        """Return the loss of a batch, and record the learning rates that it is trained with."""
        for group in cast(Any, self.optimizers(use_pl_optimizer=False)).param_groups:
            self.record("train/lr", torch.tensor(group["lr"]))
        return super().step(batch)

    @property
    def _demonstrations(self) -> DemonstrationsDataModule:
        if not isinstance(self.run_data, DemonstrationsDataModule):
            raise ValueError(f"data is a {type(self.run_data).__name__}; it must be a DemonstrationsDataModule.")
        return self.run_data

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
                evaluation = self.policy.evaluate(batch)
                losses.record("val/loss", -evaluation.logprobs[batch.response_mask])
                if isinstance(evaluation.distribution, Gaussian):
                    density = evaluation.distribution.logprobs(batch.inputs["clipped_action"][:, None])
                    losses.record("val/log_likelihood", density[batch.response_mask])
        means = losses.flush()
        if means:
            self.publish(means)
