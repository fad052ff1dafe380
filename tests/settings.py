"""Modules and data modules from flat settings, so that a test names only the settings that it is about."""

import inspect
from dataclasses import is_dataclass, replace

OPTIMIZER = {name: name for name in ("lr", "weight_decay", "schedule", "warmup", "max_skipped_steps")} | {
    "optimizer": "factory"
}
CREDIT = {name: name for name in ("gamma", "gae_lambda", "token_gamma", "token_lambda", "local_penalties")}
CREDIT |= {"bootstrap_last": "bootstrap_last", "credit": "kind", "normalise_advantages": "normalise"}
KL = {f"kl_{name}": name for name in ("coef", "estimator", "target", "horizon")} | {"old_kl_coef": "old_coef"}
FIELDS = {
    "GRPOModule": {"optimizer": OPTIMIZER, "kl": KL},
    "RewardModelModule": {"optimizer": OPTIMIZER},
    "SFTModule": {"optimizer": OPTIMIZER},
    "REINFORCEPlusPlusModule": {"optimizer": OPTIMIZER},
    "PPOValueHeadModule": {
        "optimizer": OPTIMIZER,
        "credit": CREDIT,
        "kl": KL,
        "critic": {"critic_lr": "lr", "value_fit": "fit"},
    },
    "TRPOModule": {
        "credit": CREDIT,
        "natural_gradient": {
            "damping": "damping",
            "cg_iterations": "cg_iterations",
            "fisher": "product",
            "fisher_fraction": "fisher_fraction",
        },
        "line_search": {name: name for name in ("backtrack_coeff", "max_backtracks", "accept_ratio")},
    },
}
DATA = {"validation": {f"validation_{name}": name for name in ("env", "episodes", "seed", "num_envs", "temperature")}}


def made(kind, *args, **settings):
    """An object of a class whose configuration objects are given field by field; the others keep their defaults."""
    known = next((FIELDS[base.__name__] for base in kind.__mro__ if base.__name__ in FIELDS), DATA)
    for group, fields in known.items():
        flat = [name for name in fields if name in settings and (name != group or not is_dataclass(settings[name]))]
        given = {fields[name]: settings.pop(name) for name in flat}
        if given:
            settings[group] = replace(inspect.signature(kind).parameters[group].default, **given)
    return kind(*args, **settings)
