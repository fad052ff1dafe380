"""Reward model: an ensemble of networks that predicts the rewards of an environment from states and actions.

Objective, for the transitions (s, a, r) of the training episodes, where f_k is the prediction of member k and z(r) is
the reward scaled to mean 0 and standard deviation 1 (z-score):

    J = - sum_k  mean_(s, a, r)  (f_k(s, a) - z(r))^2

The predicted reward is the mean over members, scaled back. ``LearnedReward`` uses it as a reward function.

Departures from the original (RLFT4RL's ``reward_models.py``: MLP 256-256, batch normalisation, ReLU, dropout 0.1,
z-scores of inputs and rewards, Adam 1e-3, weight decay 1e-4, batches of 2048, at most 300 epochs, patience 10):

1. Whole episodes are held out instead of single steps. Besides the validation split, which early stopping uses, a test
   split measures the error.
2. The weights of the epoch with the lowest ``val/loss`` are kept as ``best.ckpt``, which ``LearnedReward`` prefers.
3. Ensembles: members differ in their initial weights and use the same batches. Their losses are added, which trains
   each member independently of the others.
4. Initial weights are orthogonal (:func:`lrl.lm.heads.mlp`).
5. Dropout masks depend on the run's seed and the index of the batch, so that a resumed run uses the same masks.
6. The default optimiser is AdamW; ``half_cheetah/reward_model.yaml`` selects Adam, as in the original.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lrl.data.transitions import Split, TransitionsDataModule
from lrl.functional.random import seeded, seeds
from lrl.lm.heads import seeded_init
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments
from lrl.registry import register
from lrl.rewards.reward_model import RewardModel
from lrl.training.metrics import MetricMeans
from lrl.training.module import RunModule
from lrl.training.optimizer import OptimizerConfig

_ROWS_PER_PASS = 2**14
"""Maximum number of held-out rows in one forward pass."""


@register
class RewardModelModule(RunModule):
    """Trains a :class:`~lrl.rewards.reward_model.RewardModel` on the transitions of a data set.

    Args:
        hidden_sizes: sizes of the hidden layers of each network.
        members: number of networks in the ensemble.
        dropout: probability of setting a hidden unit to zero in training.
        optimizer: optimiser and learning-rate schedule.
    """

    run_data: TransitionsDataModule | None
    model: RewardModel
    """The network or ensemble, created by :meth:`configure_model`."""

    def __init__(
        self,
        hidden_sizes: Sequence[int] = (256, 256),
        members: PositiveInt = 1,
        dropout: HalfOpenUnitInterval = 0.1,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, weight_decay=1e-4),
    ) -> None:
        check_arguments(RewardModelModule.__init__, locals(), "model")
        super().__init__()
        if not hidden_sizes or min(hidden_sizes) < 1:
            raise ValueError(f"model.hidden_sizes is {list(hidden_sizes)}; it must be one or more positive sizes.")
        self.hidden_sizes, self.members, self.dropout = tuple(hidden_sizes), members, dropout
        self.optimizer = optimizer
        optimizer.require_fixed_rate()
        self._configured = False

    def loss(self, scores: Tensor, rewards: Tensor) -> Tensor:
        """Return the squared error of each prediction, in squared z-scores, ``(member, row)``.

        Args:
            scores: predictions as z-scores, ``(member, row)``.
            rewards: rewards of the data set, ``(row,)``.
        """
        return (scores - self.model.rewards(rewards)).square()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, ``()``: the sum of the mean squared errors of all members."""
        inputs, rewards = batch
        with seeded(int(seeds("dropout", self.run_seed, self.current_epoch, batch_idx, self.global_rank)), self.device):
            errors = self.loss(self.model(inputs), rewards)
        self.record("train/loss", errors)
        self.record_learning_rate()
        return errors.mean(1).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val/loss``, ``val/r2`` and, for an ensemble, ``val/disagreement`` (standard deviation over members)."""
        self._evaluate(batch, "val", "validation")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the same metrics as ``test/...``, for episodes that are not used for early stopping."""
        self._evaluate(batch, "test", "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], group: str, split: Split) -> None:
        """Log the metrics of a split with the prefix ``group``, and print them unless this is a training run."""
        means = MetricMeans()
        for inputs, rewards in zip(*(tensor.split(_ROWS_PER_PASS) for tensor in batch), strict=True):
            scores, targets = self.model(inputs), self.model.rewards(rewards)
            means.record("loss", self.loss(scores, rewards))
            means.record("error", (scores.mean(0) - targets).square())
            means.record("target", targets)
            means.record("square", targets.square())
            means.record("disagreement", scores.std(0, correction=0) * self.model.rewards.std)
        mean = means.flush()  # over all ranks
        figures = {"loss": mean["loss"], "r2": r2(mean["error"], mean["square"] - mean["target"] ** 2)}
        if self.members > 1:
            figures["disagreement"] = mean["disagreement"]
        self.publish({f"{group}/{name}": value for name, value in figures.items()})
        if self.trainer.state.fn != "fit" and self.trainer.is_global_zero:
            held_out = f"{len(self._data.rows(split)[1])} steps of {len(self._data.episodes[split])} held-out episodes"
            values = ", ".join(f"{group}/{name} {value:.4f}" for name, value in figures.items())
            logging.getLogger("lrl").info("%s: %s on %s", ", ".join(self._data.dataset_ids), values, held_out)

    # -- hooks of Lightning -----------------------------------------------------------------------------------------

    @property
    def _data(self) -> TransitionsDataModule:
        assert self.run_data is not None, "setup() must be called before"
        return self.run_data

    def setup(self, stage: str) -> None:
        """Set the data module.

        Raises:
            ValueError: If the data module is not a ``TransitionsDataModule``.
        """
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TransitionsDataModule):
            raise ValueError(
                f"data is a {type(data).__name__}; it must be a TransitionsDataModule for RewardModelModule."
            )
        self.run_data = data

    def configure_model(self) -> None:
        """Initialise the weights and compute the statistics of the training data; further calls do nothing."""
        if self._configured:
            return
        self._configured, data = True, self._data
        with seeded_init(self.run_seed):
            spaces = data.observation_space, data.action_space
            self.model = RewardModel(*spaces, self.hidden_sizes, self.members, self.dropout)
        self.model.fit_statistics(*data.rows("train"))

    def configure_optimizers(self) -> Any:
        """Return the optimiser and its learning-rate schedule per optimiser step."""
        groups = [{"params": list(self.parameters())}]
        return self.optimizer.make(groups, self.trainer.estimated_stepping_batches, fused=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Advance the counters of the data module."""
        super().on_train_batch_start(batch, batch_idx)
        self._data.tick(batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings from which :func:`~lrl.rewards.reward_model.load_reward_model` builds the networks."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"]["reward_model"] = self.model.about

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint has a reward model with the same spaces and settings.

        Raises:
            ValueError: If the checkpoint contains no reward model, or one with other spaces or settings.
        """
        saved = checkpoint.get("lrl", {}).get("reward_model")
        if saved is None:
            raise ValueError("the checkpoint contains no reward model; give a run of RewardModelModule.")
        for name, value in self.model.about.items():
            if saved[name] != value:
                raise ValueError(f"{name} is {value}, in the checkpoint it was {saved[name]}; resume with the same.")
        super().on_load_checkpoint(checkpoint)


def r2(error: float, variance: float) -> float:
    """Return the coefficient of determination, 1 - error / variance; 0 if the variance is 0.

    Args:
        error: mean squared error of the predictions.
        variance: variance of the targets over the same rows.
    """
    return 1 - error / variance if variance > 1e-12 else 0.0
