"""SFT: supervised fine-tuning, behaviour cloning of demonstrations.

Objective, over the tokens t of all demonstrated turns of an optimiser step, end tokens included:

    J = mean_t  log pi(a_t | prompt, a_<t)

which is a policy gradient with the same advantage, 1 / number of tokens, for every demonstrated token.

Departures from the usual recipe (Hugging Face's ``labels`` loss, TRL's ``SFTTrainer``; the loss is the same):

1. The loss covers only the response, not the prompt; ``DemonstrationsDataModule(loss_on="all")`` covers both.
2. There is no label smoothing, so that the policy reproduces the probabilities of the demonstrations.
3. For a ``ScoringPolicy`` a response is one token, the choice, and the loss is the cross-entropy over the candidates.
   For an ``MLPPolicy`` or a ``HeadPolicy`` a native action is one token; the loss is the cross-entropy, or for a Box
   the negative log-likelihood of a clipped Gaussian
   (:meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`), whose log-std is trained as well.
4. The common prefix of all prompts of a batch is computed once per packed row (``TextPolicy(pack_tokens=...)``).
5. pi is the distribution at temperature 1, whatever temperature the policy samples with.
6. The dropout masks of adapters and model depend on the run's seed and the index of the batch.
7. Running statistics of observations are computed from all training demonstrations before the first update, except
   those loaded by ``init_from`` or from a checkpoint.
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
"""Number of demonstrations per update of the running statistics."""


@register
class SFTModule(GradientModule):
    """Trains a policy to imitate demonstrations.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        log_every: number of optimiser steps between two logged rows; null logs once per pass.
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
        """Load the demonstrations, and set the temperature to 1; held-out episodes use that of ``data.validation``."""
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
        """Raise if there is a critic under DDP, which waits for gradients of all weights; SFT does not train critics.

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
        """Compute the running statistics that are still empty from the demonstrations."""
        empty = self.policy.empty_statistics
        if not empty:
            return
        with self.trainer.precision_plugin.forward_context():
            for number, batch in enumerate(self._demonstrations.in_order(_CHUNK)):
                self.policy.learn_statistics(batch.to(self.device), number, parts=empty)
                for part in empty:
                    part.settle(number + 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log a row if one is due, advance the clocks, and choose the dropout seed of this batch."""
        super().on_train_batch_start(batch, batch_idx)
        data = self._demonstrations
        steps = data.clocks["optimizer_steps"]
        begins = batch_idx > 0 and batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.log_every is not None and begins and steps % self.log_every == 0:
            self.publish_training()
        data.tick(self.current_epoch, batch_idx)
        self.dropout_seed = int(seeds("dropout", data.seed, self.current_epoch, batch_idx, self.global_rank))

    def step(self, batch: TurnBatch) -> Tensor | None:
        """Return the loss of a batch, and record the current learning rates."""
        for group in cast(Any, self.optimizers(use_pl_optimizer=False)).param_groups:
            self.record("train/lr", torch.tensor(group["lr"]))
        return super().step(batch)

    @property
    def _demonstrations(self) -> DemonstrationsDataModule:
        if not isinstance(self.run_data, DemonstrationsDataModule):
            raise ValueError(f"data is a {type(self.run_data).__name__}; it must be a DemonstrationsDataModule.")
        return self.run_data

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play held-out episodes, if there are any, and log the loss on held-out demonstrations."""
        results = super().validation_step(seeds) if len(seeds) else None
        self._validate_loss()
        return results

    def _validate_loss(self) -> None:
        losses = MetricMeans()
        with unsharded(self):  # because ranks may have different numbers of batches
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
