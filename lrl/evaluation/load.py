"""Loading of policies: from a checkpoint, a language model, a chat model, or a baseline by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrl.chat.model import ChatModel
from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.files import from_yaml
from lrl.functional.distributed import drop_frozen, find_checkpoint, frozen_parameter_names, read_checkpoint
from lrl.policies.actor import Actor
from lrl.policies.baselines import ConstantActor, ExpertActor, FixedActor, RandomActor
from lrl.policies.policy import Policy
from lrl.policies.retrying import InvalidRetryConfig, RetryingActor
from lrl.policies.served import ServedPolicy
from lrl.prompts import PromptTemplate
from lrl.registry import build, short_name
from lrl.rollouts.examples import add_examples, wants_examples
from lrl.types import SamplingConfig

BASELINES: dict[str, type[FixedActor]] = {"random": RandomActor, "constant": ConstantActor, "expert": ExpertActor}
"""Policies without weights, by name."""


class Loaded(NamedTuple):
    """Holds a policy that is ready to act, and the environment in which it is evaluated."""

    policy: Actor
    env_factory: EnvFactory
    info: dict[str, Any]
    """``name`` and ``env_id``; for a checkpoint also ``env_steps`` and ``config``."""


def load_policy(path: str | Path, env_factory: EnvFactory | None = None) -> Loaded:
    """Build the policy of a checkpoint, and load its weights.

    Args:
        path: a checkpoint, or a run directory, whose last checkpoint is loaded.
        env_factory: environment of the evaluation; None uses the validation environment of the training run.

    Raises:
        ValueError: If there is no checkpoint, it was not written by lrl, or its weights do not fit its configuration.
    """
    file, checkpoint, config, policy = _read(path)
    if env_factory is None:
        env_factory = _training_env(config["data"]["init_args"], file)
    policy.connect(env_factory.codec)
    if policy.response_format is None:
        policy.connect_spaces(*env_factory.spaces)
    if wants_examples(policy):  # examples come from the training environment, wherever the policy is evaluated
        add_examples(policy, _build(EnvFactory, config["data"]["init_args"]["env"], file))
    _configure(policy, checkpoint, file)
    info = {"name": str(path), "env_id": env_id(env_factory), "config": config}
    return Loaded(policy.eval(), env_factory, info | {"env_steps": int(checkpoint["lrl"].get("env_steps", 0))})


def load_weights(path: str | Path) -> Policy:
    """Build the policy of a checkpoint and load its weights, without an environment to act in.

    Args:
        path: a checkpoint, or a run directory, whose last checkpoint is loaded.

    Raises:
        ValueError: If there is no checkpoint, it was not written by lrl, or its weights do not fit its configuration.
    """
    file, checkpoint, config, policy = _read(path)
    if policy.response_format is None:  # the size of its head depends on the spaces
        env_factory = _training_env(config["data"]["init_args"], file)
        policy.connect(env_factory.codec)
        policy.connect_spaces(*env_factory.spaces)
    _configure(policy, checkpoint, file)
    return policy.eval()


def _read(path: str | Path) -> tuple[Path, Mapping[str, Any], Mapping[str, Any], Policy]:
    """Return the path of a checkpoint, its content, the configuration of its run, and its policy without weights.

    Raises:
        ValueError: If there is no checkpoint, or it contains no configuration or no policy.
    """
    file = checkpoint_file(Path(path))
    checkpoint = read_checkpoint(file)
    if "config" not in checkpoint.get("lrl", {}):
        raise ValueError(f"checkpoint is {str(path)!r}, which holds no config; give one that lrl wrote.")
    config = from_yaml(checkpoint["lrl"]["config"])
    if "policy" not in config["model"]["init_args"]:
        kind = config["model"]["class_path"].rpartition(".")[2]
        raise ValueError(f"checkpoint is {str(path)!r}, a run of {kind}, which holds no policy; give one that does.")
    policy = config["model"]["init_args"]["policy"]
    generator = (policy.get("init_args") or {}).get("generator") or {}
    if short_name(generator.get("class_path", "")) == "ServedGenerator":
        del policy["init_args"]["generator"]  # its server holds the weights of a run that is training
    return file, checkpoint, config, _build(Policy, policy, file)


def _configure(policy: Policy, checkpoint: Mapping[str, Any], file: Path) -> None:
    """Load the base and the trained weights of a policy.

    Raises:
        ValueError: If the frozen base model, which the checkpoint does not contain, differs from that in training, or
            if trained weights are missing or unknown.
    """
    policy.configure()
    base = checkpoint["lrl"].get("fingerprint", "")
    if base != policy.fingerprint:
        raise ValueError(
            f"checkpoint is {str(file)!r}, trained on base weights {base!r}, but the base weights here are "
            f"{policy.fingerprint!r}."
        )
    _load_weights(policy, checkpoint["state_dict"], file)


def _load_weights(policy: Policy, state: Mapping[str, Any], file: Path) -> None:
    """Load the trained weights.

    Raises:
        ValueError: If trained weights are missing, unknown or of another shape.
    """
    given = {name.removeprefix("policy."): tensor for name, tensor in state.items()}
    own = policy.state_dict()
    needed = set(drop_frozen(own, frozen_parameter_names(policy)))
    missing, unknown = sorted(needed - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        raise ValueError(
            f"checkpoint is {str(file)!r}, which does not fit: weights {missing[:3]} are missing and "
            f"{unknown[:3]} are unknown."
        )
    other = next((name for name, weights in given.items() if weights.shape != own[name].shape), None)
    if other is not None:
        raise ValueError(
            f"checkpoint is {str(file)!r}, whose weight {other} has the shape {tuple(given[other].shape)} instead of "
            f"{tuple(own[other].shape)}; give an environment with the observations and actions of the run."
        )
    policy.load_state_dict(given, strict=False)


def saved_numbers(path: str | Path, wanted: str | None = None) -> NumberFormat | None:
    """Return the number format of a checkpoint's environment, the only one that the policy can read.

    Args:
        path: a checkpoint or a run directory.
        wanted: the number format that the user requests, or its kind alone; None accepts the saved one.

    Raises:
        ValueError: If the requested format differs from the saved one.
    """
    saved = _numbers_config(_env_config(_saved_data(checkpoint_file(Path(path)))))
    numbers = NumberFormat(**saved) if saved else None
    shown = numbers or NumberFormat()
    if wanted is not None and wanted != shown.kind and NumberFormat.parse(wanted) != shown:
        raise ValueError(f"numbers is {wanted!r}, but the checkpoint was trained with another format; leave it out.")
    return numbers


def training_env(path: str | Path) -> GymnasiumEnvs:
    """Return the environment in which a checkpoint was trained, for recording episodes.

    Raises:
        ValueError: If there is no checkpoint, or it was not trained in a registered environment.
    """
    file = checkpoint_file(Path(path), "policy")
    config = _saved_data(file).get("env")
    env = None if config is None else _build(EnvFactory, config, file)
    if not isinstance(env, GymnasiumEnvs):
        what = "no environment" if env is None else type(env).__name__
        raise ValueError(f"policy is {str(path)!r}, which was trained on {what}; env_id is needed.")
    return env


def _saved_data(file: Path) -> Mapping[str, Any]:
    """Return the ``data.init_args`` of a checkpoint's configuration; empty if it has none."""
    config = from_yaml(read_checkpoint(file, weights=False).get("lrl", {}).get("config", ""))
    return (config or {}).get("data", {}).get("init_args", {})


def load_model(
    name: str, env_factory: EnvFactory, prompt: Mapping[str, Any], choose: bool = False, **model: Any
) -> Loaded:
    """Load a causal language model as a policy, without training.

    Args:
        name: Hugging Face hub name, folder or GGUF file.
        env_factory: environment of the evaluation.
        prompt: fields of :class:`~lrl.prompts.PromptTemplate`.
        choose: whether the model scores the legal actions instead of generating text.
        model: fields of :class:`~lrl.lm.model.LanguageModelConfig`, and ``max_new_tokens`` of a response.

    Raises:
        ValueError: If the model cannot be loaded, or ``choose`` is true and the actions are not finitely many or the
            response format is not ``direct``.
    """
    from lrl.lm.config import LanguageModelConfig
    from lrl.policies.scoring import ScoringPolicy
    from lrl.policies.text import TextPolicy

    sampling = SamplingConfig(max_new_tokens=model.pop("max_new_tokens", SamplingConfig.max_new_tokens))
    language_model, template = LanguageModelConfig(name=name, **model), PromptTemplate(**prompt)
    policy: Policy = (
        ScoringPolicy(language_model, template) if choose else TextPolicy(language_model, template, sampling)
    )
    policy.connect(env_factory.codec)
    add_examples(policy, env_factory)
    policy.configure()
    return Loaded(policy.eval(), env_factory, {"name": name, "env_id": env_id(env_factory)})


def load_baseline(name: str, env_factory: EnvFactory) -> Loaded:
    """Load a policy without weights by its name.

    Raises:
        ValueError: If the name is unknown, or the environment has no such policy.
    """
    if name not in BASELINES:
        raise ValueError(f"policy is {name!r}; it must be one of {', '.join(BASELINES)}.")
    policy = BASELINES[name]()
    policy.connect(env_factory.codec)
    return Loaded(policy, env_factory, {"name": name, "env_id": env_id(env_factory)})


def env_id(env_factory: EnvFactory) -> str:
    """Return the registered name of an environment, its URL, or the class name of its factory."""
    return getattr(env_factory, "id", type(env_factory).__name__)


def last_checkpoint(path: Path) -> Path:
    """Return the last checkpoint of a run directory, or the path itself if it is not a run directory."""
    last = path / "checkpoints" / "last.ckpt"
    return last if last.exists() else path


def checkpoint_file(path: Path, key: str = "checkpoint") -> Path:
    """Return the checkpoint at a path, which may be a run directory.

    Args:
        path: path given by the user.
        key: setting of the path, for the error message.

    Raises:
        ValueError: If there is no checkpoint.
    """
    return find_checkpoint(path, ("last.ckpt",), key)


def _build(kind: type, config: Mapping[str, Any], file: Path) -> Any:
    """Instantiate an object from its ``class_path`` and ``init_args`` in a checkpoint.

    Raises:
        ValueError: If the object cannot be built.
    """
    from jsonargparse import ArgumentError

    try:
        return build(kind, config)
    except ArgumentError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"checkpoint is {str(file)!r}, whose {kind.__name__} cannot be built: {reason}") from error


def _training_env(data: Mapping[str, Any], file: Path) -> EnvFactory:
    """Build the validation environment of a run, or its training environment if it has none.

    Raises:
        ValueError: If the run has no environment.
    """
    config = _env_config(data)
    if config is None:
        raise ValueError(f"checkpoint is {str(file)!r}, which was trained without an environment; env_id is needed.")
    return _build(EnvFactory, config, file)


def _env_config(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the configuration of a run's validation environment."""
    return (data.get("validation") or {}).get("env") or data.get("env")


def _numbers_config(env: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the number format in the configuration of an environment, or of the environment of its rows."""
    given = (env or {}).get("init_args") or {}
    rows = (given.get("rows") or {}).get("init_args") or {}
    return _numbers_config(rows["env"]) if rows.get("env") else given.get("numbers")


def load_served(
    chat_model: ChatModel,
    env_factory: EnvFactory,
    prompt: Mapping[str, Any],
    max_new_tokens: int,
    invalid_retries: InvalidRetryConfig = InvalidRetryConfig(),
) -> Loaded:
    """Load a policy that queries a chat model.

    Args:
        chat_model: the chat model.
        env_factory: environment of the evaluation.
        prompt: fields of :class:`~lrl.prompts.PromptTemplate`.
        max_new_tokens: maximum number of tokens of a response.
        invalid_retries: how many times a response without a legal action is sampled again.

    Raises:
        ValueError: If the environment has no codec, or no expert for few-shot examples.
    """
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    policy = ServedPolicy(chat_model, PromptTemplate(**prompt), sampling)
    policy.connect(env_factory.codec)
    add_examples(policy, env_factory)
    return Loaded(
        RetryingActor(policy, invalid_retries), env_factory, {"name": chat_model.name, "env_id": env_id(env_factory)}
    )


def usage_line(report: Mapping[str, Any]) -> str:
    """Describe statistics of requests and retries in one line.

    Args:
        report: result of :meth:`lrl.policies.retrying.RetryingActor.report`.
    """
    parts = [
        f"{report['asked']} prompts, {report['asked_again']} asked again for a legal action "
        f"({report['further_responses']} further responses), {report['still_invalid']} still without one"
    ]
    if "requests" in report:
        parts.append(requests_line(report))
    return "; ".join(parts)


def requests_line(report: Mapping[str, Any]) -> str:
    """Describe the number of requests to a server, their tokens and their cost in one line.

    Args:
        report: result of :meth:`lrl.chat.served.ServedChatModel.report`; missing entries count as 0.
    """
    requests, retries, cached = (report.get(name, 0) for name in ("requests", "retries", "cached"))
    parts = [f"{requests} requests, {retries} of them retries, {cached} prompts known before"]
    parts.append(f"{report.get('prompt_tokens', 0):,} + {report.get('completion_tokens', 0):,} tokens")
    if report.get("cost") is not None:
        parts.append(f"cost {report['cost']:.4g}")
    return "; ".join(parts)
