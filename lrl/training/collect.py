"""The callback that plays the training environments and fills the rollout buffer."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import lightning as L
import torch

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.functional.distributed import unsharded
from lrl.registry import register
from lrl.rollouts.collectors import CollectionPlan, EpisodeCollector, FixedHorizonCollector
from lrl.types import Rollout

if TYPE_CHECKING:
    from lrl.training.gradient_module import GradientModule


@register
class VectorEnvRollouts(L.Callback):
    """Collects once at the start of every Lightning epoch, inside the trainer's precision context.

    :meth:`lrl.training.gradient_module.GradientModule.configure_callbacks` adds it to the trainer, so that no user has
    to list it.
    """

    def __init__(self) -> None:
        self.envs: gym.vector.VectorEnv | None = None
        self._fixed_horizon: FixedHorizonCollector | None = None

    def setup(self, trainer: L.Trainer, pl_module: GradientModule, stage: str) -> None:
        """Make the environments, before a model is loaded, so that an error in them is reported early.

        Raises:
            ValueError: If the devices cannot share the groups or environments equally.
        """
        data = rollout_data(trainer)
        if stage != "fit" or data is None:
            return
        if data.num_groups % trainer.world_size:
            raise ValueError(
                f"data.{data.counted_as} is {data.num_groups}; it must be a multiple of the "
                f"{trainer.world_size} devices."
            )
        num_envs = data.num_groups // trainer.world_size * data.group_size
        self.envs = data.env.make(num_envs, pl_module.policy.response_format)

    def on_train_start(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        """End a resumed run at once if its budget of environment steps is spent, and no collection is left to train."""
        data, loop = rollout_data(trainer), trainer.fit_loop
        unfinished = data is not None and data.has_untrained_minibatches and data.collection == trainer.current_epoch
        if not (unfinished or loop.restarted_mid_epoch):
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        """Collect, compute advantages, and fill the buffer."""
        data = rollout_data(trainer)
        if data is None:
            return
        if not (data.has_untrained_minibatches and data.collection == trainer.current_epoch):
            self._collect(trainer, pl_module, data)
        epochs, each = trainer.max_epochs or -1, trainer.check_val_every_n_epoch
        if data.spent and each is not None and (epochs < 0 or each <= epochs):
            trainer.check_val_every_n_epoch = 1  # validate at the end of the run as well

    def _collect(self, trainer: L.Trainer, pl_module: GradientModule, data: RolloutDataModule) -> None:
        assert self.envs is not None
        started = time.monotonic()
        plan = CollectionPlan(
            seed=data.seed,
            collection=trainer.current_epoch,
            num_groups=data.num_groups // trainer.world_size,
            group_size=data.group_size,
            rank=trainer.global_rank,
            share_noise=data.share_noise,
            max_turns=data.max_turns,
            num_steps=data.num_steps,
            states=pl_module.needs_states,
        )
        pl_module.policy.settle_statistics(trainer.current_epoch)
        pl_module.forget()

        def play() -> Rollout:
            with trainer.precision_plugin.forward_context(), unsharded(pl_module), pl_module.interruption.abandonable():
                return self._collector(pl_module, plan, trainer.world_size, data).collect(plan)

        rollout = pl_module.interruption.attempt(play)
        seconds = time.monotonic() - started
        with pl_module.deferred_signals:  # PPO may fit its critic here
            with trainer.precision_plugin.forward_context(), unsharded(pl_module):
                batch = pl_module.prepare(rollout)
            pl_module.policy.learn_statistics(batch, trainer.current_epoch, pl_module.reduce_sum)
            data.fill(trainer.current_epoch, rollout, batch)
            ends = int((rollout.terminated | rollout.truncated).sum())
            totals = torch.tensor([rollout.num_turns, ends, int(rollout.response_mask.sum())], device=pl_module.device)
            data.tick(*trainer.strategy.reduce(totals.double(), reduce_op="sum").tolist())
            record_rollout(pl_module, rollout, seconds)

    def _collector(
        self, module: GradientModule, plan: CollectionPlan, world_size: int, data: RolloutDataModule
    ) -> EpisodeCollector | FixedHorizonCollector:
        assert self.envs is not None
        if plan.num_steps is None:
            return EpisodeCollector(module.policy, self.envs, world_size)
        if self._fixed_horizon is None:
            total = plan.num_envs * world_size
            collector = FixedHorizonCollector(module.policy, self.envs, plan.seed, plan.env, total)
            restored = data.track_episodes(collector.state)
            if restored is not None:
                collector.restore(restored)
            self._fixed_horizon = collector
        return self._fixed_horizon

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Count the minibatches that are trained."""
        data = rollout_data(trainer)
        if data is not None:
            data.count_minibatch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the run when ``data.max_env_steps`` is reached."""
        data = rollout_data(trainer)
        if data is not None and data.spent:
            trainer.should_stop = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the environments, whose processes may have received the signal that ends the run as well."""
        if self.envs is not None:
            with suppress(Exception):
                self.envs.close(terminate=True)
            self.envs = self._fixed_horizon = None

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the environments."""
        if self.envs is not None:
            self.envs.close()
            self.envs = self._fixed_horizon = None


def rollout_data(trainer: L.Trainer) -> RolloutDataModule | None:
    """Return the trainer's data module if it holds rollouts, else None."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, RolloutDataModule) else None


def record_rollout(module: GradientModule, rollout: Rollout, seconds: float) -> None:
    """Record the figures of a collection as metrics, such as its mean return."""
    tokens = rollout.response_mask.sum(-1)[rollout.active].float()
    whole = {"episode_return": rollout.returns, "episode_length": rollout.lengths.float()}
    for name, values in whole.items():
        module.record(name.replace("episode_", "rollout/"), rollout.metrics.get(name, values))
    module.record("rollout/response_tokens", tokens)
    if module.max_response_tokens > 1:  # with one token per turn the rate would always be 1
        module.record("rollout/token_limit_rate", (tokens >= module.max_response_tokens).float())
    module.record("rollout/logprob", rollout.logprobs[rollout.response_mask])
    for name, values in rollout.metrics.items():
        if name == "action_valid":
            module.record("rollout/invalid_action_rate", 1 - values)
        elif name in ("clipped_numbers", "reasoning_agrees"):
            module.record(f"rollout/{name}", values)
        elif name == "success":
            module.record("rollout/success_rate", values)
        elif name.startswith("reward/"):
            module.record(f"rollout/{name.replace('/', '_')}", values)
    ranks = module.trainer.world_size  # because the mean over ranks is logged
    module.record("throughput/env_steps_per_second", torch.tensor(ranks * rollout.num_turns / seconds))
    module.record("throughput/tokens_per_second", torch.tensor(ranks * float(rollout.response_mask.sum()) / seconds))
