"""SFT: supervised fine-tuning on demonstrations, also called behaviour cloning.

Objective, for the tokens t of all demonstrated turns of an optimiser step, including end tokens:

    J = mean_t  log pi(a_t | prompt, a_<t)

Its gradient is a policy gradient in which every demonstrated token has the advantage 1 / number of tokens.

Departures from the usual recipe (Hugging Face's ``labels`` loss, TRL's ``SFTTrainer``; the loss is the same):

1. The loss covers only the response, not the prompt; ``DemonstrationsDataModule(loss_on="all")`` covers both.
2. Labels are not smoothed, so that the policy learns the action probabilities of the demonstrations.
3. For a ``ScoringPolicy``, a response is one token, the chosen action, and the loss is the cross-entropy over all
   actions. For an ``MLPPolicy`` or a ``HeadPolicy``, a native action is one token. The loss is then the cross-entropy
   for a Discrete action space, and for a Box the negative log-likelihood of a clipped Gaussian
   (:meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`), whose standard deviation is trained as
   well.
4. The common prefix of all prompts of a batch is computed once per packed row (``TextPolicy(pack_tokens=...)``).
5. pi is the distribution at temperature 1, even if the policy samples at another temperature.
6. The dropout masks of adapters and model depend on the run's seed and the index of the batch.
7. Running statistics of observations are computed from all training demonstrations before the first update, unless
   they were loaded by ``init_from`` or from a checkpoint.
"""

from __future__ import annotations

import logging
from typing import Any

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

_STATISTICS_BATCH = 4096
"""Number of demonstrations per update of the running statistics."""


@register
class SFTModule(GradientModule):
    """Trains a policy to imitate demonstrations.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        log_every: number of optimiser steps after which training metrics are logged; null logs once per pass over the
            demonstrations.
        init_from: checkpoint, folder or hub name whose weights the run starts from; null uses the policy's own.
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
        """Return the negative log-likelihood of each demonstrated token multiplied by its weight."""
        metrics = {"train/loss": -policy.logprobs, "train/entropy": policy.entropy}
        return TokenLoss(
            loss=-policy.logprobs * batch.advantages,
            metrics={name: values.detach()[batch.response_mask] for name, values in metrics.items()},
        )

    # -- clocks, logging and the loss on held-out demonstrations ----------------------------------------------------

    def setup(self, stage: str) -> None:
        """Load the demonstrations, and set the training temperature to 1; ``data.validation`` has its own."""
        super().setup(stage)
        self._demonstrations.connect(self.policy)
        if stage == "fit":
            self._demonstrations.load_all()
        sampling = self.policy.sampling
        if sampling.temperature != 1:
            logging.getLogger("lrl").warning(
                "sampling.temperature %g is ignored, because SFT trains at temperature 1.", sampling.temperature
            )
            self.policy.sampling = self.policy.sampling_at(1.0)

    def on_fit_start(self) -> None:
        """Check that there is no critic under DDP, which expects gradients of all weights; SFT does not train critics.

        Raises:
            ValueError: If the policy has a critic, and the strategy is DDP without ``find_unused_parameters``.
        """
        super().on_fit_start()
        critic = any(weight.requires_grad for weight in self.policy.critic_parameters())
        replica: Any = self.trainer.model
        if critic and isinstance(replica, DistributedDataParallel) and not replica.find_unused_parameters:
            raise ValueError(
                "model.policy has a critic, which demonstrations do not train, and trainer.strategy is ddp, which "
                "waits for the gradient of every weight; critic or value_head must not be set, or the strategy must be "
                "ddp_find_unused_parameters_true."
            )

    @torch.no_grad()
    def on_train_start(self) -> None:
        """Compute the running statistics from the demonstrations if they have not been loaded."""
        super().on_train_start()
        empty = self.policy.empty_statistics
        if not empty:
            return
        with self.trainer.precision_plugin.forward_context():
            for number, batch in enumerate(self._demonstrations.in_order(_STATISTICS_BATCH)):
                self.policy.learn_statistics(batch.to(self.device), number, parts=empty)
                for part in empty:
                    part.settle(number + 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log metrics every ``log_every`` steps, advance the counters, and set the dropout seed of this batch."""
        super().on_train_batch_start(batch, batch_idx)
        data = self._demonstrations
        steps = data.clocks["optimizer_steps"]
        is_new_step = batch_idx > 0 and batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.log_every is not None and is_new_step and steps % self.log_every == 0:
            self.publish_training()
        data.tick(self.current_epoch, batch_idx)
        self.dropout_seed = int(seeds("dropout", data.seed, self.current_epoch, batch_idx, self.global_rank))

    @property
    def _demonstrations(self) -> DemonstrationsDataModule:
        """The data module.

        Raises:
            ValueError: If it is not a ``DemonstrationsDataModule``.
        """
        if not isinstance(self.run_data, DemonstrationsDataModule):
            raise ValueError(
                f"data is a {type(self.run_data).__name__}; it must be a DemonstrationsDataModule for SFTModule."
            )
        return self.run_data

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play validation episodes, if there are any, and log the loss on held-out demonstrations."""
        results = super().validation_step(seeds) if len(seeds) else None
        self._validate_loss()
        return results

    def _validate_loss(self) -> None:
        """Log the loss on held-out demonstrations, and for a Gaussian policy the log-density of their actions."""
        losses = MetricMeans()
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
