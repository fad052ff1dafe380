"""Collection of rollouts: the callback that fills the rollout buffer, and how it plays the training environments.

Either each environment plays one whole episode (:class:`EpisodeCollector`), or a fixed number of turns, after which
episodes continue in the next collection (:class:`FixedHorizonCollector`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import lightning as L
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.functional.distributed import unsharded
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.registry import register
from lrl.rollouts.runner import EnvRunner, Step, stack_steps
from lrl.types import History, PastTurn, RandomKeys, Rollout, TurnBatch

if TYPE_CHECKING:
    from lrl.training.gradient_module import GradientModule


_MANY_TURNS = 512
"""Turns of a collection from which a single optimiser step is probably not intended."""
_MANY_COLLECTIONS = 20
"""Collections of a run from which a validation after each is probably not intended."""


def slow_settings(trainer: L.Trainer, module: L.LightningModule, data: RolloutDataModule) -> list[str]:
    """Return warnings of settings with which a run learns slowly, mostly validates, or never does.

    Args:
        trainer: trainer of the run.
        module: module that is trained; one with its own optimisation, such as TRPO, needs one minibatch.
        data: data module of the run.
    """
    warnings = []
    turns = data.num_groups * data.group_size * (data.num_steps or 1)
    if data.num_epochs * data.num_minibatches == 1 and turns >= _MANY_TURNS and module.automatic_optimization:
        warnings.append(
            f"a collection of at least {turns} turns is one optimiser step, because data.num_epochs and "
            "data.num_minibatches are 1; higher values train more on each collection."
        )
    collections, episodes = trainer.max_epochs or -1, data.validation.episodes
    validates, each = trainer.limit_val_batches != 0 and episodes > 0, trainer.check_val_every_n_epoch
    if validates and each is not None and 0 <= collections < each:
        warnings.append(
            f"no held-out episodes are played, because trainer.check_val_every_n_epoch is {each}, but the run ends "
            f"after {collections} collections (trainer.max_epochs); it must be at most {collections} for a validation."
        )
    if validates and each == 1 and not 0 <= collections < _MANY_COLLECTIONS:
        warnings.append(
            f"{episodes} held-out episodes are played after every collection, because "
            "trainer.check_val_every_n_epoch is 1; a higher value takes less time."
        )
    return warnings


@register
class VectorEnvRollouts(L.Callback):
    """Collects once at the start of every Lightning epoch, inside the trainer's precision context.

    :meth:`lrl.training.gradient_module.GradientModule.configure_callbacks` adds it to the trainer, so that no user has
    to list it.
    """

    def __init__(self) -> None:
        self.data: RolloutDataModule
        self.envs: VectorEnv | None = None
        self._fixed_horizon: FixedHorizonCollector | None = None

    def setup(self, trainer: L.Trainer, pl_module: GradientModule, stage: str) -> None:
        """Make the environments, before a model is loaded, so that an error in them is reported early.

        Raises:
            ValueError: If ``data`` collects no rollouts, or the devices cannot share its groups equally.
        """
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if stage != "fit":
            return
        if not isinstance(data, RolloutDataModule):
            name = type(data).__name__
            raise ValueError(f"trainer.callbacks has VectorEnvRollouts, but data is a {name}; it must be removed.")
        self.data = data
        if data.num_groups % trainer.world_size:
            raise ValueError(
                f"data.{data.counted_as} is {data.num_groups}; it must be a multiple of the "
                f"{trainer.world_size} devices."
            )
        num_envs = data.num_groups // trainer.world_size * data.group_size
        self.envs = data.env.make(num_envs, pl_module.policy.response_format)

    def on_fit_start(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        """Warn of settings with which a run learns slowly, mostly validates, or never does."""
        if trainer.is_global_zero:
            for text in slow_settings(trainer, pl_module, self.data):
                logging.getLogger("lrl").warning(text)

    def on_train_start(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        """End a resumed run at once if its budget of environment steps is spent, and no collection is left to train."""
        if not (self._is_unfinished(trainer) or trainer.fit_loop.restarted_mid_epoch):
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        """Collect, compute advantages, and fill the buffer."""
        if not self._is_unfinished(trainer):
            self._collect(trainer, pl_module)
        epochs, each = trainer.max_epochs or -1, trainer.check_val_every_n_epoch
        if self.data.spent and each is not None and (epochs < 0 or each <= epochs):
            trainer.check_val_every_n_epoch = 1  # validate at the end of the run as well

    def _is_unfinished(self, trainer: L.Trainer) -> bool:
        """Return whether the run was resumed within the current collection, on which training continues."""
        return self.data.has_untrained_minibatches and self.data.collection == trainer.current_epoch

    def _collect(self, trainer: L.Trainer, pl_module: GradientModule) -> None:
        data, started = self.data, monotonic()
        plan = CollectionPlan(
            seed=data.seed,
            collection=trainer.current_epoch,
            num_groups=data.num_groups // trainer.world_size,
            group_size=data.group_size,
            rank=trainer.global_rank,
            max_turns=data.max_turns,
            num_steps=data.num_steps,
            states=pl_module.needs_states,
        )
        pl_module.policy.settle_statistics(trainer.current_epoch)
        pl_module.forget()

        def play() -> Rollout:
            with trainer.precision_plugin.forward_context(), unsharded(pl_module), pl_module.interruption.abandonable():
                rollout = self._collector(pl_module, plan, trainer.world_size).collect(plan)
                if pl_module.policy.defers_logprobs:
                    rollout = pl_module.policy.complete(rollout, self._first_passes(pl_module, rollout.turns()))
                return rollout

        rollout = pl_module.interruption.attempt(play)
        pl_module.policy.end_episodes()
        seconds = monotonic() - started
        with pl_module.deferred_signals:  # PPO may fit its critic here
            with trainer.precision_plugin.forward_context(), unsharded(pl_module):
                batch = pl_module.prepare(rollout)
            pl_module.policy.learn_statistics(batch, trainer.current_epoch, pl_module.reduce_sum)
            data.fill(trainer.current_epoch, rollout, batch)
            ends = int((rollout.terminated | rollout.truncated).sum())
            totals = torch.tensor([rollout.num_turns, ends, int(rollout.response_mask.sum())], device=pl_module.device)
            data.tick(*trainer.strategy.reduce(totals.double(), reduce_op="sum").tolist())
            record_rollout(pl_module, rollout, seconds)

    def _first_passes(self, module: GradientModule, turns: TurnBatch) -> list[Tensor]:
        """Return the turns of each forward pass of the first updates on a collection, int64 ``(turn,)``."""
        device = turns.response_mask.device
        minibatches = [part.to(device) for part in self.data.first_pass(module.current_epoch, turns) if len(part)]
        return [part[some] for part in minibatches for some in module.passes(turns[part])]

    def _collector(
        self, module: GradientModule, plan: CollectionPlan, world_size: int
    ) -> EpisodeCollector | FixedHorizonCollector:
        assert self.envs is not None
        if plan.num_steps is None:
            return EpisodeCollector(module.policy, self.envs, world_size)
        if self._fixed_horizon is None:
            total = plan.num_envs * world_size
            collector = FixedHorizonCollector(module.policy, self.envs, plan.seed, plan.env, total)
            restored = self.data.track_episodes(collector.state)
            if restored is not None:
                collector.restore(restored)
            self._fixed_horizon = collector
        return self._fixed_horizon

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Count the minibatches that are trained."""
        self.data.count_minibatch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the run when ``data.max_env_steps`` is reached."""
        if self.data.spent:
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


def record_rollout(module: GradientModule, rollout: Rollout, seconds: float) -> None:
    """Record metrics of a collection, such as its mean return.

    Args:
        module: module that logs the metrics.
        rollout: the collection.
        seconds: wall-clock time of the collection.
    """
    tokens = rollout.response_mask.sum(-1)[rollout.active].float()
    module.record("rollout/return", rollout.metrics.get("episode_return", rollout.episode_returns))
    module.record("rollout/length", rollout.metrics.get("episode_length", rollout.lengths.float()))
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
            module.record(f"rollout/{name.replace('/', '_')}", values[~values.isnan()])
    ranks = module.trainer.world_size  # the mean over ranks is logged, and the rate is that of all ranks together
    module.record("throughput/env_steps_per_second", torch.tensor(ranks * rollout.num_turns / seconds))
    module.record("throughput/tokens_per_second", torch.tensor(ranks * float(rollout.response_mask.sum()) / seconds))


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """Describes one collection on one rank; all of its random numbers depend only on this plan."""

    seed: int
    """Seed of the run."""
    collection: int
    """Index of the collection in the run."""
    num_groups: int
    """Number of groups on this rank."""
    group_size: int
    """Number of episodes that start from the same state."""
    rank: int = 0
    """Index of this rank."""
    max_turns: int | None = None
    """Number of turns after which episodes are truncated; None uses only the limit of the environment."""
    num_steps: int | None = None
    """Number of turns per environment, after which episodes continue in the next collection; None plays whole
    episodes."""
    states: bool = False
    """Whether to set :attr:`Rollout.state <lrl.types.Rollout.state>`, for whole episodes only."""

    @property
    def num_envs(self) -> int:
        """Number of environments on this rank."""
        return self.num_groups * self.group_size

    @property
    def env(self) -> np.ndarray:
        """Global environment indices, int64 ``(env,)``."""
        return self.rank * self.num_envs + np.arange(self.num_envs)

    @property
    def group(self) -> np.ndarray:
        """Global group indices, int64 ``(env,)``."""
        return self.env // self.group_size

    def episode(self, world_size: int) -> np.ndarray:
        """Return an index for the group of each environment that is unique in the whole run, int64 ``(env,)``.

        Args:
            world_size: number of ranks that collect at the same time.
        """
        return self.collection * self.num_groups * world_size + self.group

    def keys(self, env: np.ndarray, turn: int) -> RandomKeys:
        """Return the keys of the random numbers of one turn.

        Args:
            env: global indices of the environments that take the turn, int64 ``(row,)``.
            turn: index of the turn in the collection.
        """
        turns = np.full(len(env), turn)
        return RandomKeys(seed=self.seed, purpose="rollout", collection=self.collection, env=env, turn=turns)


@final
class EpisodeCollector:
    """Collects one whole episode from each environment.

    Args:
        policy: policy that acts.
        envs: vectorised environments with ``AutoresetMode.DISABLED``.
        world_size: number of ranks that collect at the same time.
    """

    def __init__(self, policy: Policy, envs: VectorEnv, world_size: int = 1) -> None:
        self.policy, self.envs, self.world_size = policy, envs, world_size

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Play until every episode has ended; environments whose episode has ended are inactive."""
        runner, active = EnvRunner(self.policy, self.envs), np.ones(plan.num_envs, dtype=bool)
        reset_seeds = seeds("reset", plan.seed, plan.collection, plan.group)
        noise_seeds = seeds("noise", plan.seed, plan.collection, plan.env)
        steps: list[Step] = []
        values: list[Tensor] = []
        while active.any():
            runner.reset(reset_seeds, plan.episode(self.world_size), noise_seeds, idle=~active)
            rows = np.flatnonzero(active)
            step = runner.turn(plan.keys(plan.env[rows], len(steps)), rows, max_turns=plan.max_turns)
            steps.append(step)
            values.append(final_values(self.policy, runner, step))
            active[rows] = ~step.ended
        return stack_steps(steps, plan.group, values if self.policy.has_critic else None, plan.states)


@final
class FixedHorizonCollector:
    """Collects ``num_steps`` turns from each environment; episodes continue in the next collection.

    Args:
        policy: policy that acts.
        envs: vectorised environments with ``AutoresetMode.DISABLED``.
        seed: seed of the run.
        env: global indices of these environments, int64 ``(env,)``.
        total: number of environments over all ranks.
    """

    def __init__(self, policy: Policy, envs: VectorEnv, seed: int, env: np.ndarray, total: int) -> None:
        self.policy, self.seed, self.env, self.total = policy, seed, env, total
        self.runner = EnvRunner(policy, envs)
        self._episode = np.zeros(len(env), dtype=np.int64)
        """Index of the current episode of each environment."""
        self._actions: list[list[Any]] = [[] for _ in env]
        """Actions of the current episodes."""
        self._start, self._collection = self._live_episodes(), -1
        """Current episodes at the start of the current collection, and the index of the collection."""

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Play ``plan.num_steps`` turns in each environment."""
        assert plan.num_steps is not None
        self._reset()
        self._start, self._collection = self._live_episodes(), plan.collection
        steps: list[Step] = []
        values: list[Tensor] = []
        for turn in range(plan.num_steps):
            step = self.runner.turn(plan.keys(self.env, turn), max_turns=plan.max_turns)
            steps.append(step)
            values.append(final_values(self.policy, self.runner, step, last=turn + 1 == plan.num_steps))
            for actions, action, ended in zip(self._actions, step.decisions.actions, step.ended, strict=True):
                if ended:
                    actions.clear()
                else:
                    actions.append(action)
            self._episode = self._episode + step.ended
            self._reset()
        return stack_steps(steps, plan.group, values if self.policy.has_critic else None)

    def _reset(self, idle: np.ndarray | None = None) -> None:
        """Start the next episode in environments whose episode has ended, except ``idle`` ones."""
        if not self.runner.ended.any():  # hashing the seeds would take longer than the step of a small environment
            return
        numbers = seeds("reset", self.seed, self._episode, self.env), self._episode * self.total + self.env
        self.runner.reset(*numbers, idle=idle)

    # -- resume ---------------------------------------------------------------------------------------------------

    def _live_episodes(self) -> tuple[np.ndarray, list[list[Any]], list[History]]:
        return self._episode, [list(actions) for actions in self._actions], list(self.runner.memory)

    def state(self, collection: int) -> dict[str, Any]:
        """Return indices, past actions and histories of the current episodes as numbers, strings and lists.

        Args:
            collection: index of the last completed collection. If a later one has started, the state is that at its
                start, because a resumed run collects it again.
        """
        episode, actions, memory = self._live_episodes() if self._collection == collection else self._start
        return {
            "episode": episode.tolist(),
            "actions": [[_plain(action) for action in played] for played in actions],
            "memory": [[[turn.observation, turn.response] for turn in history] for history in memory],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replay the current episodes with the same seeds and actions.

        All environments are stepped together, but their episodes differ in length. Each environment is therefore reset
        when the number of remaining steps equals the length of its episode. Before that it is idle, or takes arbitrary
        actions whose results are dropped.

        Raises:
            ValueError: If the number of environments has changed.
        """
        if len(state["episode"]) != len(self.env):
            raise ValueError(
                f"the checkpoint contains the episodes of {len(state['episode'])} environments per device, but this "
                f"run has {len(self.env)}; resume with the same data.num_envs."
            )
        self._episode = np.array(state["episode"], dtype=np.int64)
        self._actions = [[self._native(action) for action in actions] for actions in state["actions"]]
        lengths = np.array([len(actions) for actions in self._actions])
        for remaining in range(lengths.max(), 0, -1):
            self.runner.ended |= lengths == remaining
            self._reset(idle=lengths < remaining)
            rows = np.flatnonzero(lengths >= remaining)
            self.runner.step([self._actions[row][-remaining] for row in rows], rows)
        self.runner.ended |= lengths == 0
        self._reset()
        self.runner.memory = [tuple(PastTurn(*turn) for turn in history) for history in state["memory"]]
        self._start = self._live_episodes()

    def _native(self, action: Any) -> Any:
        """Convert an action of :meth:`state` to the format of the environment."""
        return action if isinstance(action, str) else np.asarray(action, self.runner.envs.single_action_space.dtype)


def _plain(action: Any) -> Any:
    """Convert an action to a text, a number or a list."""
    return action if isinstance(action, str) else np.asarray(action).tolist()


def final_values(policy: Policy, runner: EnvRunner, step: Step, last: bool = False) -> Tensor:
    """Return the values of the states after turns at which episodes are cut, float32 ``(row,)``; 0 elsewhere.

    Args:
        policy: policy with the critic; without a critic all values are 0.
        runner: runner that took the step and has not been reset since.
        step: one turn of a rollout.
        last: whether it is the last turn of the rollout, which cuts all episodes that have not ended.
    """
    values = torch.zeros(len(step.rows), dtype=torch.float32)
    if not policy.has_critic or not (last or step.truncated.any()):
        return values
    cut = np.flatnonzero(~step.terminated & (step.truncated | last))
    if len(cut):
        values[torch.from_numpy(cut)] = policy.state_values(*runner.seen(step.rows[cut])).float().cpu()
    return values
