"""Base class of algorithms that train by gradients: from a rollout to an optimiser step.

For each collection, :class:`~lrl.training.collect.VectorEnvRollouts` plays the environments and calls
:meth:`GradientModule.prepare`, which estimates advantages and returns the turns for the rollout buffer. Lightning then
calls :meth:`GradientModule.training_step` for each minibatch of the buffer: :meth:`GradientModule.step` evaluates the
policy and reduces the losses of its tokens to one number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast, final

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.functional.advantages import weighted_credit
from lrl.functional.distributed import all_gather_objects, own_value, shards_parameters
from lrl.functional.losses import WithGradients, reduce_tokens
from lrl.lm.heads import at_least_float32
from lrl.lm.loading import fingerprint, fuse_kernels
from lrl.lm.model import lower_layers_of
from lrl.policies.policy import Policy
from lrl.training.collect import VectorEnvRollouts
from lrl.training.guards import FiniteSteps, PassLimit, check_credit, check_loss
from lrl.training.metrics import derived
from lrl.training.module import PolicyModule
from lrl.training.optimizer import OptimizerConfig, no_op_loss, step_sizes
from lrl.training.progress import ConsoleProgress
from lrl.training.value_fit import values_of
from lrl.training.weights import lora_alpha, shard_weights, start_from
from lrl.types import Credit, Evaluation, Metrics, Rollout, TokenLoss, TurnBatch

_T = TypeVar("_T")

_MEASURED_SHARE, _MEASURED_TURNS = 1 / 8, (16, 256)
"""Share of a collection's turns on which ``train/update_kl`` is measured, and the minimum and maximum number."""


class GradientModule(PolicyModule, ABC):
    """Abstract module that trains a policy by gradients; an algorithm implements :meth:`advantages` and :meth:`loss`.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        loss_normalisation: reduction of the loss over tokens, see :func:`lrl.functional.losses.reduce_tokens`.
        target_kl: maximum of ``train/approx_kl``, the estimated mean KL(old || new) of a minibatch over the tokens of
            all ranks, in nats. After a minibatch that exceeds it, the remaining minibatches of the collection are no-op
            steps. None never skips a minibatch.
        init_from: checkpoint, folder or hub name whose weights, and nothing else, the run starts from.
    """

    needs_values = False
    """Whether :meth:`advantages` reads the values of the tokens."""

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig,
        loss_normalisation: Literal["sequence", "token", "constant", "sum"] = "sum",
        target_kl: float | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(policy)
        if self.needs_values and not policy.has_critic:
            raise ValueError(
                f"model.policy is a {type(policy).__name__} without critic; {type(self).__name__} needs one: set "
                "value_head of a language model's policy, or critic of an MLPPolicy or a HeadPolicy."
            )
        self.optimizer, self.init_from = optimizer, init_from
        self.loss_normalisation, self.target_kl = loss_normalisation, target_kl
        self.finite_steps, self.pass_limit = FiniteSteps(self), PassLimit()
        self.skip_updates = False
        """Whether the remaining minibatches of this collection are no-op steps (``target_kl`` was exceeded)."""
        self.dropout_seed: int | None = None
        """Seed of dropout in the next step; None disables dropout. With dropout, the first ratio of RL would not be
        1."""
        self._start = self._reference = ""
        self._overwritten = set[str]()

    # -- implemented by an algorithm --------------------------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """True if the policy at the start of the run must be kept as reference."""
        return False

    @property
    def needs_states(self) -> bool:
        """True if :meth:`advantages` compares turns with equal observations."""
        return False

    @property
    def needs_groups(self) -> bool:
        """True if :meth:`advantages` compares the episodes of a group."""
        return False

    def advantages(self, rollout: Rollout) -> Credit:
        """Estimate the advantage of every token of a rollout.

        Args:
            rollout: a rollout on the device of the module, with ``values`` if :attr:`needs_values` and
                ``ref_logprobs`` if :attr:`needs_reference`.

        Raises:
            ValueError: If the algorithm does not learn from rollouts.
        """
        raise ValueError(
            f"data is a RolloutDataModule; it must be a DemonstrationsDataModule for {type(self).__name__}."
        )

    @abstractmethod
    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the loss of every token of a minibatch, without changing any state.

        Large minibatches are evaluated in several passes. Therefore the loss of a token may depend only on its own
        turn, and ``policy.distribution`` exists only if the algorithm sets
        :attr:`~lrl.policies.policy.Policy.needs_distribution`.

        Args:
            batch: turns with advantages.
            policy: the policy's log-probabilities, entropies and values for these turns, with gradient.
        """

    # -- from a rollout to a step -----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Connect the policy to its environment, and check that the data fits the algorithm.

        Raises:
            ValueError: If the algorithm needs rollouts, or groups of episodes, and the data has none.
        """
        super().setup(stage)
        name, data = type(self).__name__, self.run_data
        if stage != "fit" or type(self).advantages is GradientModule.advantages:
            return
        if not isinstance(data, RolloutDataModule):
            raise ValueError(f"data is a {type(data).__name__}; it must be a RolloutDataModule for {name}.")
        if self.needs_groups and data.group_size == 1:
            raise ValueError(
                f"data.group_size is 1; it must be at least 2, with data.num_groups, because {name} compares the "
                "episodes of a group."
            )

    def prepare(self, rollout: Rollout) -> TurnBatch:
        """Estimate the advantages of a rollout, and return its turns as a batch for the rollout buffer."""
        self.skip_updates = False
        turns = rollout.turns()
        rollout = rollout.to(turns.response_mask.device)
        if self.needs_reference:
            reference = self.policy.reference_logprobs(turns)
            turns = turns.replace(ref_logprobs=reference)
            rollout = rollout.replace(ref_logprobs=rollout.unflatten(reference))
        if self.needs_values:
            if rollout.values is None:
                rollout = rollout.replace(values=rollout.unflatten(values_of(self.policy, turns)))
            assert rollout.values is not None
            turns = turns.replace(old_values=rollout.flatten(rollout.values))
        credit = check_credit(self, self.advantages(rollout), rollout.response_mask)
        credit = weighted_credit(credit, rollout, self.policy.importance_cap, self.reduce_sum)
        self.record_all(credit.metrics)
        returns = None if credit.returns is None else rollout.flatten(credit.returns)
        return turns.replace(advantages=rollout.flatten(credit.advantages), returns=returns)

    @final
    def training_step(self, batch: TurnBatch) -> Tensor | None:
        """Train on one minibatch, or take a no-op step if the rest of the collection is skipped."""
        self.record_learning_rate()
        return no_op_loss(self.policy, batch) if self.skip_updates else self.step(batch)

    def step(self, batch: TurnBatch) -> Tensor | None:
        """Return the loss of a minibatch, ``()``, which Lightning differentiates; all ranks must call it.

        A rank without turns makes the same collective calls in the same order.
        """
        mask = batch.response_mask
        sizes: Sequence[Any] = () if self.loss_normalisation == "sum" else step_sizes(self, mask)
        if len(batch) == 0:
            loss = no_op_loss(self.policy, batch)
            self.record("train/loss", loss)  # 0; the losses of the other ranks are divided by a mean over all ranks
            self._check_target_kl(loss.new_zeros(0))
            return loss

        reduce = partial(self.reduced, sizes=sizes)
        passes = self.passes(batch)
        if len(passes) == 1:
            evaluation = self.policy.evaluate(batch, self.dropout_seed)
            tokens = check_loss(self, self.loss(batch, evaluation), mask, evaluation)
            loss = reduce(tokens, mask)
        else:
            evaluation, gradients = self._gradients(batch, passes, reduce)
            tokens = check_loss(self, self.loss(batch, evaluation), mask, evaluation)
            loss = WithGradients.apply(reduce(tokens, mask), *gradients, *self._trained)  # pyright: ignore
        self.record("train/loss", loss)
        metrics = tokens.metrics if self.target_kl is None else derived(tokens.metrics)
        self.record_all(metrics)
        self._check_target_kl(metrics.get("train/approx_kl"))
        return loss

    def reduced(self, tokens: TokenLoss, mask: Tensor, sizes: Sequence[Any] = ()) -> Tensor:
        """Return the contribution of the losses of tokens to the loss of a minibatch, ``()``.

        Args:
            tokens: losses of some turns of the minibatch.
            mask: the tokens that are trained, bool ``(turn, token)``.
            sizes: numbers of turns and tokens of the optimiser step; empty for those of ``mask``, or for a plain sum.
        """
        if not sizes and self.loss_normalisation != "sum":
            sizes = (len(mask), mask.sum())
        return reduce_tokens(tokens.loss, mask, self.loss_normalisation, *sizes, max_tokens=self.max_response_tokens)

    def passes(self, batch: TurnBatch, gradient: bool = True) -> list[Tensor]:
        """Return the turns of each forward pass over a minibatch, int64 ``(turn,)``; the memory of a pass is bounded.

        With dropout, distributions or sharded weights there is a single pass unless memory runs out: ranks must make
        the same number of passes, and passes have different dropout masks.

        Args:
            batch: a minibatch.
            gradient: whether a backward pass follows each forward pass.
        """
        sharded = self._trainer is not None and shards_parameters(self.trainer.strategy)
        if self.dropout_seed is not None or self.policy.needs_distribution or sharded:
            return self.pass_limit.split([torch.arange(len(batch), device=batch.response_mask.device)])
        return self.pass_limit.split(self.policy.passes(batch, gradient))

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def _gradients(
        self, batch: TurnBatch, passes: Sequence[Tensor], reduce: Callable[[TokenLoss, Tensor], Tensor]
    ) -> tuple[Evaluation, list[Tensor | None]]:
        """Evaluate a minibatch in several passes, and differentiate the loss of each pass before the next.

        Args:
            batch: turns with advantages.
            passes: indices of the turns of each pass.
            reduce: returns the contribution of tokens to the loss of the minibatch, given their losses and mask.

        Returns:
            The evaluation of the whole batch without gradients and distributions, and the gradient of the loss for each
            trained weight, None for weights on which the loss does not depend.
        """
        trained, parts = self._trained, list[tuple[Tensor, ...]]()
        sums: list[Tensor | None] = [None] * len(trained)
        scaler: Any = None if self._trainer is None else getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())  # prevents underflow of float16 gradients
        for number, turns in enumerate(passes):
            part = batch[turns]
            evaluation = self.policy.evaluate(part, self.dropout_seed and self.dropout_seed + number)
            tokens = check_loss(self, self.loss(part, evaluation), part.response_mask, evaluation)
            loss = reduce(tokens, part.response_mask)
            with torch.autocast(self.device.type, enabled=False):
                gradients = torch.autograd.grad(loss * scale, trained, allow_unused=True)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    total, wide = sums[index], at_least_float32(gradient) / scale
                    sums[index] = wide if total is None else total.add_(wide)
            outputs = (evaluation.logprobs, evaluation.entropy, evaluation.values)
            parts.append(tuple(output.detach() for output in outputs if output is not None))
        order = torch.argsort(torch.cat(list(passes)))
        whole = [torch.cat(outputs)[order] for outputs in zip(*parts, strict=True)]
        logprobs, entropy, values = [*whole, None][:3]
        assert logprobs is not None
        assert entropy is not None
        return Evaluation(logprobs=logprobs, entropy=entropy, values=values), sums

    def _check_target_kl(self, approx_kl: Tensor | None) -> None:
        """Skip the rest of the collection, on all ranks, if the mean divergence exceeds ``target_kl``.

        Args:
            approx_kl: estimates at the sampled tokens of this rank, ``(sampled token,)``.
        """
        if self.target_kl is not None:
            assert approx_kl is not None
            total, count = self.reduce_sum(torch.stack([approx_kl.sum(), approx_kl.new_tensor(float(len(approx_kl)))]))
            self.skip_updates = bool(total > self.target_kl * count)

    def record_all(self, metrics: Metrics) -> None:
        """Add values to the means that are logged at the end of this collection.

        ``train/ratio_error_max`` is an exception, because its maximum is logged, and in addition, as
        ``train/ratio_error``, its maximum over the first minibatch, which shows whether sampling and training agree.
        """
        if self._trainer is None or self.trainer.fit_loop.epoch_loop.batch_idx <= 0:
            metrics = derived(metrics)
            if "train/ratio_error_max" in metrics:
                self.record_maximum("train/ratio_error", metrics["train/ratio_error_max"])
        for name, values in metrics.items():
            if not isinstance(name, str):
                self._means.record_derived(name, values)
            else:
                (self.record_maximum if name.endswith("_max") else self.record)(name, values)

    @torch.no_grad()
    def _measure_update(self) -> None:
        """Record ``train/update_kl`` after the last minibatch of a collection, and adapt the learning rate to it.

        Like ``train/approx_kl`` it is ``r - 1 - log r`` at the sampled tokens, but with the weights after the last
        optimiser step of the collection, while ``train/approx_kl`` is evaluated before each step and is 0 at first. It
        is computed without gradient on a random sample of at most as many turns as a minibatch has. All ranks must call
        this method.
        """
        data = self.run_data
        if not isinstance(data, RolloutDataModule):
            return
        sample, kl = data.sample(_MEASURED_SHARE, *_MEASURED_TURNS), torch.zeros(0, device=self.device)
        with self.trainer.precision_plugin.forward_context():
            if len(sample) == 0:
                no_op_loss(self.policy, sample)
            for turns in self.passes(sample, gradient=False) if len(sample) else ():
                part = sample[turns]
                log_ratio = (self.policy.evaluate(part).logprobs - part.old_logprobs)[part.response_mask]
                kl = torch.cat([kl, log_ratio.exp() - 1 - log_ratio])
        self.record("train/update_kl", kl)
        if self.optimizer.update_kl is not None:
            total, count = self.reduce_sum(torch.stack([kl.sum(), kl.new_tensor(float(len(kl)))])).tolist()
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = self.optimizer.adapted(group["lr"], total / max(count, 1))

    # -- callbacks and weights --------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[L.Callback]:
        """Add :class:`VectorEnvRollouts` if the data module stores rollouts and the trainer has no such callback yet.

        It is inserted before the user's callbacks, so that they find the collection of their epoch in the buffer, and
        after :class:`ConsoleProgress`, which reports an epoch before the next collection starts.
        """
        trainer = cast(Any, self.trainer)
        collects = isinstance(trainer.datamodule, RolloutDataModule)
        if collects and not any(isinstance(callback, VectorEnvRollouts) for callback in trainer.callbacks):
            shows = bool(trainer.callbacks) and isinstance(trainer.callbacks[0], ConsoleProgress)
            trainer.callbacks.insert(int(shows), VectorEnvRollouts())
        return super().configure_callbacks()

    def configure_model(self) -> None:
        """Load the weights, then build the reference policy; a second call does nothing."""
        if self._configured:
            return
        self.policy.check_gradients()
        super().configure_model()
        if self.init_from is not None:
            self._overwritten = {f"policy.{name}" for name in start_from(self.policy, self.init_from)}
            self._start = fingerprint(self.policy)
        if self.needs_reference:
            self.policy.build_reference(warm_started=self.init_from is not None)
            self._reference = fingerprint(nn.ModuleList(self.policy.copied_reference))
        if self.device_mesh is not None:
            shard_weights(self.policy, cast(Any, self.device_mesh))

    @property
    def overwritten_names(self) -> set[str]:
        """Names of frozen weights that ``init_from`` replaced, so that they differ from the base model."""
        return self._overwritten

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the guards and the fingerprint of the initial weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"] |= {
            "start": self._start,
            "reference": self._reference,
            "lora_alpha": lora_alpha(self.policy),
            "skip_updates": self.skip_updates,
            "skipped_steps": self.finite_steps.state(),
            "pass_turns": self.pass_limit.turns,
        }
        data = self.run_data
        if isinstance(data, RolloutDataModule) and data.has_untrained_minibatches:
            recorded = [lower.recorded() for lower in lower_layers_of(self.policy)]
            checkpoint["lrl"]["recorded_states"] = all_gather_objects(recorded)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the guards.

        Raises:
            ValueError: If the initial weights of the run differ.
        """
        saved = checkpoint.get("lrl", {})
        if saved.get("start", "") != self._start:
            raise ValueError(
                f"model.init_from is {self.init_from!r}, whose weights differ from those that the run of "
                "the checkpoint started from; resume with the same weights, because they define the reference policy."
            )
        resumes = self.trainer.state.fn == "fit"
        if resumes and saved.get("reference") and self._reference and saved["reference"] != self._reference:
            raise ValueError(
                "model.policy has other initial weights than in the checkpoint, but they define the reference policy; "
                "set init_seed, or call seed_everything with the seed of that run before the module is created."
            )
        super().on_load_checkpoint(checkpoint)
        self.skip_updates = bool(saved.get("skip_updates", False))
        if self.trainer.state.fn == "fit":
            self.finite_steps.load(saved.get("skipped_steps", [0, 0]))
            self.pass_limit.turns = saved.get("pass_turns")
            if (recorded := saved.get("recorded_states")) is not None:
                for lower, states in zip(lower_layers_of(self.policy), own_value(recorded), strict=True):
                    lower.load_recorded(states)

    # -- optimiser --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Return the optimiser of the trainable weights and its schedule per optimiser step."""
        # Lightning's MixedPrecision cannot clip the gradients of a fused optimiser.
        fused = not isinstance(self.trainer.precision_plugin, MixedPrecision)
        steps, data = self.trainer.estimated_stepping_batches, self.run_data
        if self.optimizer.has_schedule and isinstance(data, RolloutDataModule):
            of_collection = -(-data.trained_per_collection // self.trainer.accumulate_grad_batches)
            steps = data.schedule_length("model.optimizer.schedule", steps, of_collection)
        return self.optimizer.make([{"params": self.optimized_parameters()}], steps, fused)

    def optimized_parameters(self) -> list[nn.Parameter]:
        """Return the weights that the optimiser updates: all trainable ones."""
        return self._trained

    @property
    def rate_limits(self) -> tuple[float, float] | None:
        """Smallest and largest learning rate if it follows the divergence (``optimizer.update_kl``)."""
        return self.optimizer.limits

    def on_fit_start(self) -> None:
        """Reject FSDP1, under which each rank sees only a part of the gradient's norm, and enable fused kernels.

        Raises:
            ValueError: If the strategy is FSDP1, if fused kernels are not available for the model, or if the learning
                rate is to be adapted to the divergence but nothing is sampled.
        """
        super().on_fit_start()
        if not isinstance(self.run_data, RolloutDataModule):
            self.optimizer.require_fixed_rate()
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError("trainer.strategy is FSDPStrategy (FSDP1); it must be fsdp, which selects FSDP2.")
        if self.policy.trunk is not None:
            fuse_kernels(self.policy.trunk.language_model)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take an optimiser step, unless the rest of the collection is skipped.

        A skipped step is not taken with gradients of 0, because Adam would still change the weights.
        """
        if self.skip_updates and optimizer_closure is not None:
            optimizer_closure()
            self.finite_steps.forget()
        else:
            closure = optimizer_closure and partial(self.within_memory, optimizer_closure)
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if batch_idx + 1 >= self.trainer.num_training_batches:
            self._measure_update()

    def within_memory(self, compute: Callable[[], _T]) -> _T:
        """Return ``compute()``; if memory runs out, call it again with smaller passes.

        It is not called again on several ranks, which would have to make the same passes, and for accumulated
        minibatches, whose gradients would be added twice.

        Args:
            compute: computes the gradient of a minibatch, in the passes of :meth:`passes`.

        Raises:
            ValueError: If memory runs out and ``compute`` is not called again.
        """
        repeats = self.world_size == 1 and (self._trainer is None or self.trainer.accumulate_grad_batches == 1)
        return self.pass_limit.attempt(compute, self.finite_steps.place, self._undo if repeats else None)

    def _undo(self) -> None:
        """Drop what the current minibatch has recorded so far."""
        self._means.drop_unsettled()
        self.finite_steps.forget()
        self.skip_updates = False

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Drop the gradients, without the profiling of the optimiser's own method, which takes longer than the rest."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate a loss; if it is not finite, all gradients become NaN on every rank."""
        super().backward(loss, *args, gradient=self.finite_steps.watch(loss), **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients, or remove them if they are not finite, so that the optimiser changes nothing."""
        precision = self.trainer.precision_plugin
        weights = list(precision.main_params(optimizer))
        norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not self.finite_steps.accept(norm):
            if getattr(precision, "scaler", None) is None:  # a loss scaler skips the step by itself
                optimizer.zero_grad()
        elif gradient_clip_algorithm == "value" or isinstance(precision, MixedPrecision):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val and float(norm) + 1e-6 > gradient_clip_val:  # otherwise the factor would be 1
            nn.utils.clip_grads_with_norm_(weights, gradient_clip_val, norm)

    def on_train_epoch_end(self) -> None:
        """Log once per collection, and measure the update of a collection that a limit such as ``max_steps`` ended."""
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready < self.trainer.num_training_batches:
            self._measure_update()
        if (std := self.policy.action_std) is not None:
            self.record("train/std", std.log().mean().exp())
        super().on_train_epoch_end()

    def publish_training(self) -> None:
        """Log what training recorded since the last row."""
        self.publish(self.flush() | {"train/skipped_steps": float(self.finite_steps.flush())})
