"""The base class of modules that train a policy: its weights, its environments, and held-out episodes."""

from __future__ import annotations

from abc import ABC
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lrl.data.run_data import RunDataModule
from lrl.evaluation.episodes import EpisodeMetrics, EpisodeResults, evaluate_policy, gather
from lrl.functional.distributed import drop_frozen, frozen_parameter_names, unsharded
from lrl.policies.policy import Policy
from lrl.rollouts.runner import add_examples, wants_examples
from lrl.training.resume import check_fingerprint
from lrl.training.run_module import RunModule


class PolicyModule(RunModule, ABC):
    """Abstract module that trains a policy, by gradients (``GradientModule``) or by search.

    Args:
        policy: policy to train.
    """

    run_data: RunDataModule | None

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._configured = False
        self._generator_state = torch.get_rng_state()

    # -- weights ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Connect the policy to its environment, and add few-shot examples if its prompt needs them."""
        super().setup(stage)
        data = self.run_data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RunDataModule):
            name = type(data).__name__
            raise ValueError(f"data is a {name}; it must be a RolloutDataModule or a DemonstrationsDataModule.")
        self.policy.connect(data.codec)
        if data.validation_env is not data.env:
            data.validation_env.check("data.validation.env", self.policy.response_format)
        if self.policy.response_format is None:
            self.policy.connect_spaces(*data.env.spaces)
        if wants_examples(self.policy):
            add_examples(self.policy, data.env)

    def configure_model(self) -> None:
        """Load the weights; a second call does nothing.

        Weights without an ``init_seed`` are initialised by torch's generator in the state it had when the module was
        created. A strategy for several ranks may have seeded it again since, which would give other initial weights
        than on one device.
        """
        if not self._configured:
            self._configured = True
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_state)
                self.policy.configure()

    @property
    def overwritten_names(self) -> set[str]:
        """Names of frozen weights that differ from the base model and are therefore saved in checkpoints."""
        return set()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the trainable weights; frozen ones are loaded again from the base model."""
        return drop_frozen(super().state_dict(*args, **kwargs), frozen_parameter_names(self) - self.overwritten_names)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the fingerprint of the base model."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"] = {"fingerprint": self.policy.fingerprint} | checkpoint["lrl"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and restore the state of the run.

        Raises:
            ValueError: If the base model, the seed or the names of the trainable weights differ.
        """
        check_fingerprint(checkpoint.get("lrl", {}), self.policy.fingerprint)
        super().on_load_checkpoint(checkpoint)

    @property
    def strict_loading(self) -> bool:
        """Return False, because frozen weights are not saved; :meth:`on_load_checkpoint` compares names instead."""
        return False

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        raise ValueError("strict_loading cannot be set, because checkpoints contain trainable weights only.")

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens of a turn."""
        return self.policy.sampling.max_new_tokens

    # -- held-out episodes ------------------------------------------------------------------------------------------

    def evaluate_held_out(self, seeds: Tensor, group: str) -> EpisodeResults:
        """Play one episode for each seed and log the results as ``<group>/...``.

        Args:
            seeds: consecutive seeds, int64 ``(episode,)``.
            group: first part of the metrics' names.
        """
        results = self.interruption.attempt(partial(self._play, seeds))
        metrics = EpisodeMetrics().to(self.device)
        metrics.update(results)
        self.publish({f"{group}/{name}": float(value) for name, value in metrics.compute().items()})
        return gather(results)

    def _play(self, seeds: Tensor) -> EpisodeResults:
        """Play this rank's share of held-out episodes."""
        assert self.run_data is not None
        validation = self.run_data.validation
        with self.trainer.precision_plugin.forward_context(), unsharded(self), self.interruption.abandonable():
            return evaluate_policy(
                self.policy,
                self.run_data.validation_env,
                episodes=len(seeds),
                seed=int(seeds[0]),
                num_envs=min(validation.num_envs, len(seeds)),
                sampling=self.policy.sampling_at(validation.temperature),
                rank=self.global_rank,
                world_size=self.trainer.world_size,
            )

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play held-out episodes, if there are any."""
        return self.evaluate_held_out(seeds, "val") if len(seeds) else None

    def test_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes."""
        return self.evaluate_held_out(seeds, "test")

    def predict_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes and return their results."""
        return self.evaluate_held_out(seeds, "predict")
