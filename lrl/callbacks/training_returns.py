"""The return of every training episode, and a budget of episodes."""

from __future__ import annotations

import lightning as L

from lrl.callbacks.collect import rollout_data


class TrainingReturns(L.Callback):
    """Keeps the returns of the training episodes of this process, in the order in which they ended.

    Episodes that end at the same time are in the order of their environments. Checkpoints do not hold the returns.

    Args:
        max_episodes: ends the run after the collection in which so many episodes have ended; None does not.

    Attributes:
        returns: undiscounted sums of rewards.
    """

    def __init__(self, max_episodes: int | None = None) -> None:
        self.max_episodes = max_episodes
        self.returns: list[float] = []

    @property
    def spent(self) -> bool:
        """Return whether ``max_episodes`` have ended."""
        return self.max_episodes is not None and len(self.returns) >= self.max_episodes

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the episodes of the collection that was just trained on."""
        data = rollout_data(trainer)
        if data is None or data.rollout is None:
            return
        self.returns += data.rollout.metrics["episode_return"].tolist()
        if self.spent:
            trainer.should_stop = True
