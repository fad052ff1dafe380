"""Checks that a run allows second derivatives and whole collections, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor

from lrl.data.run_data import RunDataModule
from lrl.functional.distributed import shards_parameters
from lrl.policies.policy import Policy
from lrl.training.value_fit import check_separate_critic


def check_run(trainer: L.Trainer, policy: Policy, data: RunDataModule) -> None:
    """Raise if a run has no second derivatives, or does not train on whole collections.

    Args:
        trainer: of the run.
        policy: what is trained.
        data: the data module.

    Raises:
        ValueError: names the setting.
    """
    if trainer.max_steps != -1:
        raise ValueError(
            f"trainer.max_steps is {trainer.max_steps}; TRPO counts collections, it must be -1 and trainer.max_epochs "
            "or data.max_env_steps end the run."
        )
    for name, value in {"num_epochs": data.num_epochs, "num_minibatches": data.num_minibatches}.items():
        if value != 1:
            raise ValueError(f"data.{name} is {value}; TRPO takes a collection whole, it must be 1.")
    precision = str(trainer.precision)
    if not precision.startswith(("32", "64")):
        raise ValueError(
            f"trainer.precision is {precision}; a trust region of this size is lost in 16 bits, it must be 32-true or "
            "64-true."
        )
    if shards_parameters(trainer.strategy):
        raise ValueError(
            "trainer.strategy shards the weights (FSDP2), under which a second derivative is nothing; TRPO needs auto "
            "or ddp."
        )
    model = policy.trunk and policy.trunk.language_model
    if model is not None and model.config.attention == "flash_attention_2":
        raise ValueError(
            "language_model.attention is flash_attention_2, which has no second derivative; TRPO needs sdpa or eager."
        )
    if model is not None and model.config.liger_kernels:
        raise ValueError(
            "language_model.liger_kernels is true, whose kernels have no second derivative; TRPO needs false."
        )
    if model is not None and model.config.quantization is not None:
        raise ValueError(
            f"language_model.quantization is {model.config.quantization}, whose layers have no second derivative; "
            "TRPO needs null."
        )


def check_trainable(policy: Policy, actor: Sequence[Tensor]) -> None:
    """Raise if the actor or the critic cannot be trained without the other.

    Args:
        policy: configured.
        actor: the weights that the trust region holds.

    Raises:
        ValueError: the critic has no weights of its own, the actor has none, or weights of 16 bits.
    """
    check_separate_critic(policy, "TRPO")
    narrow = next((weight.dtype for weight in actor if weight.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        name = str(narrow).removeprefix("torch.")
        raise ValueError(
            f"language_model.dtype is {name}; steps inside a trust region are lost in 16 bits, it must be float32 "
            "where its weights are trained."
        )
    if not actor:
        raise ValueError(
            f"model.policy is a {type(policy).__name__} with nothing to train; TRPO needs trainable weights."
        )
