"""SFT: supervised fine-tuning, behaviour cloning of demonstrations.

Objective, over the tokens t of a demonstrated turn a_1..a_T, its end token included:

    J = mean over the batch's tokens of  log pi(a_t | prompt, a_<t)

Departures from the usual recipe (Hugging Face's ``labels`` loss, TRL's ``SFTTrainer``):

1. Only the answer counts, not the prompt; ``DemonstrationsDataModule(loss_on="all")`` counts both.
2. No label smoothing.
3. pi is the distribution that the policy samples from, so its temperature is part of it; at 1 it is the usual loss.
4. Each micro-batch is a mean over its own tokens: with gradient accumulation or several ranks, a micro-batch of short
   answers weighs as much as one of long answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.algorithms.module import OptimizerFactory, PolicyModule
from lrl.algorithms.schedule import Schedule
from lrl.functional.masking import masked_mean
from lrl.policies.policy import Policy
from lrl.types import Rollout, TurnBatch


class SFTModule(PolicyModule):
    """Trains a policy to answer as demonstrated.

    Args:
        policy: what is trained.
        lr: learning rate.
        optimizer: makes the optimiser; null takes AdamW.
        weight_decay: of the default optimiser.
        schedule: of the learning rate.
        warmup: share of the run.
        init_from: weights to start from.
    """

    def __init__(
        self,
        policy: Policy,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule = "cosine",
        warmup: float = 0.03,
        init_from: str | None = None,
    ) -> None:
        super().__init__(policy, lr, optimizer, weight_decay, schedule, warmup, init_from)

    @property
    def needs_reference(self) -> bool:
        """Never."""
        return False

    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Demonstrations are not rolled out.

        Raises:
            ValueError: always; the data module should be ``DemonstrationsDataModule``.
        """
        raise ValueError("data is a RolloutDataModule; SFTModule trains on a DemonstrationsDataModule.")

    def training_step(self, batch: TurnBatch) -> Tensor:
        """The mean negative log-likelihood of the demonstrated tokens."""
        policy = self.policy.evaluate(batch)
        loss = -masked_mean(policy.logprobs, batch.response_mask)
        self._record_step(loss, policy.entropy, batch)
        return loss

    @torch.no_grad()
    def _record_step(self, loss: Tensor, entropy: Tensor, batch: TurnBatch) -> None:
        self.record("train/loss", loss)
        self.record("train/entropy", entropy[batch.response_mask])
        for group in self.optimizers(use_pl_optimizer=False).param_groups:  # pyright: ignore
            self.record("train/lr", torch.tensor(group["lr"]))
