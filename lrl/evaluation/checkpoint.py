"""What is evaluated: the policy in a checkpoint, a model as it is, or a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.functional.frozen import frozen_names, without
from lrl.functional.sharding import is_sharded_checkpoint, read_checkpoint
from lrl.moved_names import current_config
from lrl.policies.baselines.fixed import ConstantPolicy, ExpertPolicy, FixedPolicy, RandomPolicy
from lrl.policies.policy import Policy
from lrl.rollouts.few_shot_examples import add_examples, wants_examples

BASELINES = ("random", "constant", "expert")
"""Policies that need no weights, by name."""

_PREFIX = "policy."


class Loaded(NamedTuple):
    """A policy that is ready to act, and where it acts."""

    policy: Policy
    env_factory: EnvFactory
    info: dict[str, Any]
    """``name``, ``env_id``, and of a checkpoint ``env_steps`` and ``config``."""


def load_policy(path: str | Path, env_factory: EnvFactory | None = None) -> Loaded:
    """Build the policy that a checkpoint was trained with, and load its weights.

    Args:
        path: a checkpoint file, or a run directory, whose last checkpoint is taken.
        env_factory: where to evaluate; None takes the validation environment of its training.

    Raises:
        ValueError: there is no checkpoint, it is not one of ours, or its weights do not fit what its config builds.
    """
    file = checkpoint_file(Path(path))
    checkpoint = read_checkpoint(file)
    if "config" not in checkpoint.get("lrl", {}):
        raise ValueError(f"--checkpoint is {str(path)!r}, which holds no config; give one that lrl wrote.")
    config = current_config(yaml.safe_load(checkpoint["lrl"]["config"]))
    policy = _build(Policy, config["model"]["init_args"]["policy"], file)
    if env_factory is None:
        env_factory = _training_env(config["data"]["init_args"], file)
    policy.connect(env_factory.codec)
    if policy.response_format is None:
        policy.connect_spaces(*env_factory.spaces)
    if wants_examples(policy):  # those of its training, wherever it is evaluated
        add_examples(policy, _build(EnvFactory, config["data"]["init_args"]["env"], file))
    policy.configure()
    _check_base(policy, checkpoint["lrl"], file)
    _load_weights(policy, checkpoint["state_dict"], file)
    info = {"name": str(path), "env_id": env_id(env_factory), "config": config}
    return Loaded(policy.eval(), env_factory, info | {"env_steps": int(checkpoint["lrl"].get("env_steps", 0))})


def saved_numbers(path: str | Path, kind: str | None = None) -> NumberFormat | None:
    """How a checkpoint's environment wrote its numbers; the policy can read no others.

    Args:
        path: a checkpoint file or a run directory.
        kind: what the user asks for; None takes what is saved.

    Raises:
        ValueError: that is another one.
    """
    config = yaml.safe_load(
        read_checkpoint(checkpoint_file(Path(path)), weights=False).get("lrl", {}).get("config", "")
    )
    data = current_config(config or {}).get("data", {}).get("init_args", {})
    saved = ((_env_config(data) or {}).get("init_args") or {}).get("numbers")
    numbers = NumberFormat(**saved) if saved else None
    if kind is not None and kind != (numbers or NumberFormat()).kind:
        raise ValueError(f"--numbers is {kind!r}, but the checkpoint was trained on others; leave it out.")
    return numbers


def load_model(name: str, env_factory: EnvFactory, prompt: Mapping[str, Any], **model: Any) -> Loaded:
    """Any causal language model as it is.

    Args:
        name: hub name or folder.
        env_factory: where to evaluate.
        prompt: fields of :class:`~lrl.prompts.template.PromptTemplate`.
        model: fields of :class:`~lrl.models.language_model.LanguageModelConfig`; ``max_new_tokens`` limits answers.
    """
    from lrl.models.language_model import LanguageModelConfig
    from lrl.policies.text import TextPolicy
    from lrl.prompts.template import PromptTemplate
    from lrl.types import SamplingConfig

    sampling = SamplingConfig(max_new_tokens=model.pop("max_new_tokens", SamplingConfig.max_new_tokens))
    policy = TextPolicy(LanguageModelConfig(name=name, **model), PromptTemplate(**prompt), sampling)
    policy.connect(env_factory.codec)
    add_examples(policy, env_factory)
    policy.configure()
    return Loaded(policy.eval(), env_factory, {"name": name, "env_id": env_id(env_factory)})


def load_baseline(name: str, env_factory: EnvFactory) -> Loaded:
    """A policy that needs no weights.

    Raises:
        ValueError: there is none of that name, or none for this environment.
    """
    kinds: dict[str, type[FixedPolicy]] = {"random": RandomPolicy, "constant": ConstantPolicy, "expert": ExpertPolicy}
    if name not in kinds:
        raise ValueError(f"--policy is {name!r}; it must be one of {', '.join(BASELINES)}.")
    policy = kinds[name]()
    policy.connect(env_factory.codec)
    return Loaded(policy, env_factory, {"name": name, "env_id": env_id(env_factory)})


def env_id(env_factory: EnvFactory) -> str:
    """The registered name of an environment, or the name of what makes it."""
    return env_factory.id if isinstance(env_factory, GymnasiumEnvs) else type(env_factory).__name__


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a path names.

    Raises:
        ValueError: there is none.
    """
    last = path / "checkpoints" / "last.ckpt"
    if last.exists():
        path = last
    if path.is_file() or is_sharded_checkpoint(path):
        return path
    raise ValueError(f"--checkpoint is {str(path)!r}; it must be a checkpoint, or a run directory that holds one.")


def _build(kind: type, config: Mapping[str, Any], file: Path) -> Any:
    """Make an object from its ``class_path`` and ``init_args``."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--object", type=kind)
    try:
        return parser.instantiate(parser.parse_object({"object": config}))["object"]
    except ArgumentError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--checkpoint is {str(file)!r}, whose {kind.__name__} cannot be built: {reason}") from error


def _training_env(data: Mapping[str, Any], file: Path) -> EnvFactory:
    config = _env_config(data)
    if config is None:
        raise ValueError(f"--checkpoint is {str(file)!r}, which was trained without environment; give --env_id.")
    return _build(EnvFactory, config, file)


def _env_config(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration of the environment that a run was validated in; ``validation_env`` is its key of older runs."""
    return (data.get("validation") or {}).get("env") or data.get("validation_env") or data.get("env")


def _check_base(policy: Policy, saved: Mapping[str, Any], file: Path) -> None:
    """The frozen base is not in the checkpoint: it must be the one that was trained on."""
    wanted = saved.get("fingerprint", "")
    if wanted != policy.fingerprint:
        raise ValueError(
            f"--checkpoint is {str(file)!r}, trained on base weights {wanted!r}; here they are {policy.fingerprint!r}."
        )


def _load_weights(policy: Policy, state: Mapping[str, Any], file: Path) -> None:
    """Load what was trained; only frozen weights may be missing, and nothing may be left over."""
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    own = policy.state_dict()
    needed = set(without(own, frozen_names(policy)))
    missing, unknown = sorted(needed - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        raise ValueError(
            f"--checkpoint is {str(file)!r}, which does not fit: {missing[:3]} are missing, {unknown[:3]} are unknown."
        )
    policy.load_state_dict(given, strict=False)
