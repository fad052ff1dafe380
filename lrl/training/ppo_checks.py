"""What PPO refuses before a run begins."""

from __future__ import annotations

import lightning as L

from lrl.functional.credit import CREDITS, Discounts
from lrl.functional.distributed import shards_parameters
from lrl.policies.policy import Policy
from lrl.training.critic_fit import ValueFit


def check_credit(policy: Policy, credit: str, discounts: Discounts, algorithm: str = "PPO") -> None:
    """Refuse what credit cannot rest on.

    Raises:
        ValueError: no critic, an unknown credit, a discount outside [0, 1], or an option that the credit does not read.
    """
    if not policy.has_critic:
        raise ValueError(
            f"model.policy is a {type(policy).__name__} without critic; {algorithm} needs one: set policy.init_args."
            "value_head of a language model, critic of an MLP, critic_hidden_sizes of a HeadPolicy."
        )
    if credit not in CREDITS:
        raise ValueError(f"model.credit is {credit!r}; it must be one of {', '.join(CREDITS)}.")
    for name in ("gamma", "gae_lambda", "token_gamma", "token_lambda"):
        if not 0 <= getattr(discounts, name) <= 1:
            raise ValueError(f"model.{name} is {getattr(discounts, name)}; it must be in [0, 1].")
    for name in ("local_penalties", "bootstrap_last"):
        if getattr(discounts, name) and credit not in ("turn", "nested"):
            raise ValueError(f"model.{name} is true with credit {credit}, which has no use for it; it must be false.")


def check_leash(
    clip_range: float | None, old_kl_coef: float, kl_coef: float, kl_target: float | None, kl_horizon: int
) -> None:
    """Refuse settings under which nothing, or nothing sensible, holds the policy back.

    Raises:
        ValueError: names the setting.
    """
    if clip_range is not None and clip_range <= 0:
        raise ValueError(f"model.clip_range is {clip_range}; it must be positive, or null.")
    if clip_range is None and old_kl_coef <= 0:
        raise ValueError(
            f"model.clip_range is null and old_kl_coef {old_kl_coef}; one of them must hold the policy back."
        )
    if kl_coef < 0 or old_kl_coef < 0:
        raise ValueError(f"model.kl_coef is {kl_coef}, old_kl_coef {old_kl_coef}; both must be 0 or positive.")
    if kl_target is not None and (kl_target <= 0 or kl_coef == 0):
        raise ValueError(f"model.kl_target is {kl_target}, kl_coef {kl_coef}; both must be positive.")
    if kl_horizon < 1:
        raise ValueError(f"model.kl_horizon is {kl_horizon}; it must be at least 1.")


def check_loss(
    clip_range_vf: float | None, vf_coef: float, ent_coef: float, loss_normalisation: str, target_kl: float | None
) -> None:
    """Refuse weights and limits that mean nothing.

    Raises:
        ValueError: names the setting.
    """
    for name, limit in (("clip_range_vf", clip_range_vf), ("target_kl", target_kl)):
        if limit is not None and limit <= 0:
            raise ValueError(f"model.{name} is {limit}; it must be positive, or null.")
    for name, weight in (("vf_coef", vf_coef), ("ent_coef", ent_coef)):
        if weight < 0:
            raise ValueError(f"model.{name} is {weight}; it must be 0 or positive.")
    if loss_normalisation not in ("token", "sequence"):
        raise ValueError(f"model.loss_normalisation is {loss_normalisation!r}; it must be token or sequence.")


def check_critic_stands_alone(policy: Policy, key: str) -> None:
    """Refuse a critic that cannot be fitted while the actor stands still, or only by passes through the whole trunk.

    Args:
        policy: configured.
        key: what asks for it.

    Raises:
        ValueError: it has no weights of its own, or an adapter.
    """
    if not policy.critic_parameters():
        raise ValueError(
            f"model.policy is a {type(policy).__name__} whose critic has no weights of its own; {key} fits it apart "
            "from the actor: shared_value_network must be false."
        )
    model = getattr(policy, "language_model", None)
    if model is not None and model.has_critic_adapter:
        raise ValueError(
            f"value_head.adapter is true; {key} fits the critic apart, without the trunk: it must be false."
        )


def check_whole_weights(trainer: L.Trainer) -> None:
    """Refuse to fit a critic whose weights are spread over devices.

    Raises:
        ValueError: the strategy shards them.
    """
    if shards_parameters(trainer.strategy):
        raise ValueError(
            "model.value_fit is set and trainer.strategy shards the weights (FSDP2), which L-BFGS cannot step; "
            "value_fit must be null, or the strategy auto or ddp."
        )


def check_value_fit(value_fit: ValueFit | None, critic_lr: float | None, clip_range_vf: float | None) -> None:
    """Refuse what a critic that is fitted apart has no use for.

    Raises:
        ValueError: names the setting.
    """
    if value_fit is None:
        return
    if value_fit.method != "lbfgs":
        raise ValueError(f"model.value_fit.method is {value_fit.method}; beside PPO's own optimiser it must be lbfgs.")
    for name, value in (("critic_lr", critic_lr), ("clip_range_vf", clip_range_vf)):
        if value is not None:
            raise ValueError(f"model.{name} is {value} with value_fit, which has no use for it; it must be null.")
