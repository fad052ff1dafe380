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
    """Trains a policy, by gradients (:class:`~lrl.training.gradient_module.GradientModule`) or without.

    Args:
        policy: what is trained.
    """

    run_data: RunDataModule | None

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._configured = False
        self._generator_state = torch.get_rng_state()

    # -- weights ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Connect the policy with its environment, and show it examples from there if its prompt wants some."""
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

        Weights without an ``init_seed`` of their own are initialised by torch's generator as it was when the module was
        made. Until now a strategy for several ranks may have seeded it again, and the run on one device would start
        from other weights.
        """
        if not self._configured:
            self._configured = True
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_state)
                self.policy.configure()

    @property
    def overwritten_names(self) -> set[str]:
        """Names of frozen weights that are not those of the base model; checkpoints hold them."""
        return set()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the trainable weights; the frozen ones can be loaded again by the name of the base model."""
        return drop_frozen(super().state_dict(*args, **kwargs), frozen_parameter_names(self) - self.overwritten_names)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the fingerprint of the base model to what a resume checks."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"] = {"fingerprint": self.policy.fingerprint} | checkpoint["lrl"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and restore what it says of the run.

        Raises:
            ValueError: another base model or seed, missing trainable weights, or unknown ones.
        """
        check_fingerprint(checkpoint.get("lrl", {}), self.policy.fingerprint)
        super().on_load_checkpoint(checkpoint)

    @property
    def strict_loading(self) -> bool:
        """Return False: :meth:`on_load_checkpoint` compares the names of weights, because frozen ones are not saved."""
        return False

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        raise ValueError("strict_loading cannot be set: checkpoints hold trainable weights only.")

    @property
    def max_response_tokens(self) -> int:
        """The longest possible turn, in tokens."""
        return self.policy.sampling.max_new_tokens

    # -- held-out episodes ------------------------------------------------------------------------------------------

    def evaluate_held_out(self, seeds: Tensor, group: str) -> EpisodeResults:
        """Play one episode for each seed and publish the results as ``<group>/...``.

        Args:
            seeds: int64 ``(episode,)``, consecutive.
            group: of the metrics' names.
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
