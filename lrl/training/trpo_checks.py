"""What TRPO refuses before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lrl.functional.credit import Discounts
from lrl.functional.distributed import shards_parameters
from lrl.policies.policy import Policy
from lrl.training.ppo_checks import check_credit, check_critic_stands_alone


def check_region(policy: Policy, credit: str, discounts: Discounts, settings: Mapping[str, Any]) -> None:
    """Refuse settings that no step could be found under.

    Args:
        policy: what is to be trained.
        credit: by name.
        discounts: how far it reaches.
        settings: the module's, by name.

    Raises:
        ValueError: names the setting.
    """
    check_credit(policy, credit, discounts, "TRPO")
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "max_kl": (lambda value: value > 0, "positive"),
        "damping": (lambda value: value >= 0, "0 or positive"),
        "cg_iterations": (lambda value: value >= 1, "at least 1"),
        "fisher": (lambda value: value in ("gauss_newton", "double_backward"), "gauss_newton or double_backward"),
        "fisher_fraction": (lambda value: 0 < value <= 1, "in (0, 1]"),
        "backtrack_coeff": (lambda value: 0 < value < 1, "in (0, 1)"),
        "max_backtracks": (lambda value: value >= 1, "at least 1"),
        "accept_ratio": (lambda value: value >= 0, "0 or positive"),
        "ent_coef": (lambda value: value >= 0, "0 or positive"),
        "chunk_size": (lambda value: value is None or value >= 1, "at least 1, or null"),
    }
    for name, (fits, right) in rules.items():
        if not fits(settings[name]):
            raise ValueError(f"model.{name} is {settings[name]!r}; it must be {right}.")


def check_run(trainer: L.Trainer, policy: Policy) -> None:
    """Refuse a run in which second derivatives, or the whole of a collection, are not to be had.

    Raises:
        ValueError: names the setting.
    """
    if trainer.max_steps != -1:
        raise ValueError(
            f"trainer.max_steps is {trainer.max_steps}; TRPO counts collections, it must be -1 and trainer.max_epochs "
            "or data.max_env_steps end the run."
        )
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("num_epochs", "num_minibatches"):
        if getattr(data, name, 1) != 1:
            raise ValueError(f"data.{name} is {getattr(data, name)}; TRPO takes a collection whole, it must be 1.")
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
    model: Any = getattr(policy, "language_model", None)
    if model is not None and model.config.attention == "flash_attention_2":
        raise ValueError(
            "language_model.attention is flash_attention_2, which has no second derivative; TRPO needs sdpa or eager."
        )
    if model is not None and model.config.quantization is not None:
        raise ValueError(
            f"language_model.quantization is {model.config.quantization}, whose layers have no second derivative; "
            "TRPO needs null."
        )


def check_trainable(policy: Policy, actor: Sequence[Tensor]) -> None:
    """Refuse a policy whose actor or critic could not move alone.

    Raises:
        ValueError: the critic has no weights of its own, or the actor none at all.
    """
    check_critic_stands_alone(policy, "TRPO")
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
