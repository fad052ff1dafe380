"""The public functions ``lrl.train``, ``lrl.load``, ``lrl.evaluate`` and ``lrl.logprobs``."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from lrl.cli.quiet import silence_libraries
from lrl.cli.run_directory import RunDirectory
from lrl.data.demonstration_tokens import collate_demonstrations
from lrl.data.run_data import ClockedDataModule, RunDataModule
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy
from lrl.evaluation.load import BASELINES, checkpoint_file, last_checkpoint, load_policy
from lrl.functional.distributed import read_checkpoint
from lrl.lm.config import LanguageModelConfig
from lrl.policies.actor import Actor
from lrl.policies.policy import Policy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.ranges import LateSettingError
from lrl.registry import build, short_name
from lrl.rollouts.examples import add_examples
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.module import PolicyModule, RunModule
from lrl.training.progress import ConsoleProgress
from lrl.training.resume import arguments_of, described
from lrl.training.transcripts import Transcripts
from lrl.types import History, SamplingConfig


def train(
    module: RunModule,
    data: ClockedDataModule,
    *,
    max_epochs: int,
    run_directory: str | Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | Path | None = None,
    **trainer_settings: Any,
) -> L.Trainer:
    """Train a module on data; the default is one device.

    Without ``run_directory`` nothing is printed, logged or written. With it, the run prints its progress and writes the
    files that ``lrl fit`` writes: ``metrics.csv``, TensorBoard files, transcripts, checkpoints, ``run.log``, the
    command and the commit.

    Args:
        module: algorithm with the policy that it trains, such as a :class:`~lrl.algorithms.grpo.GRPOModule`.
        data: data module of rollouts or demonstrations.
        max_epochs: number of collections, or of passes over demonstrations; -1 sets no limit.
        run_directory: a folder that does not exist yet or is empty; None writes nothing.
        callbacks: Lightning callbacks. With ``run_directory``, callbacks for progress, transcripts and checkpoints are
            added unless this list has one of the same class.
        ckpt_path: a checkpoint or a run directory from which to resume.
        trainer_settings: further arguments of :class:`lightning.Trainer`, such as ``devices`` and ``precision``.

    Returns:
        The trainer: ``trainer.callback_metrics`` contains the last value of each metric,
        ``trainer.lightning_module.policy`` the trained policy.

    Raises:
        ValueError: If an argument has another type, the run directory is not empty, there is no checkpoint at
            ``ckpt_path``, or its run has already reached ``max_epochs``.
    """
    silence_libraries()
    started = time.monotonic()
    _check_train(module, data, max_epochs, callbacks, trainer_settings)
    checkpoint = None if ckpt_path is None else str(checkpoint_file(Path(ckpt_path), "ckpt_path"))
    if checkpoint is not None:
        _check_unfinished(checkpoint, max_epochs)
    used, in_checkpoints = list(callbacks), _ConfigInCheckpoints()
    settings: dict[str, Any] = QUIET | {"max_epochs": max_epochs}
    advice = ", and continue a run with ckpt_path"
    directory = None if run_directory is None else RunDirectory.create(str(run_directory), "", data.seed, advice=advice)
    if directory is not None:
        given = {type(callback) for callback in callbacks}
        defaults = ConsoleProgress(), Transcripts(), CollectionCheckpoint()
        used[:0] = [callback for callback in defaults if type(callback) not in given]
        settings |= {"default_root_dir": directory.path, "logger": _loggers(directory.path)}
    try:
        settings["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in used)
        if settings["enable_checkpointing"]:
            in_checkpoints.config = config_text(module, data)
        trainer = L.Trainer(callbacks=[*used, in_checkpoints], **settings | trainer_settings)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        if directory is not None:
            launch = " of this launch" if checkpoint else ""
            logging.getLogger("lrl").info("finished after %.2f minutes%s", (time.monotonic() - started) / 60, launch)
    except BaseException as error:
        begun = in_checkpoints.trained if isinstance(error, LateSettingError) else in_checkpoints.begun
        if directory is not None and not begun:
            directory.discard()
        raise
    finally:
        if directory is not None:
            directory.close()
    return trainer


def _check_train(module: Any, data: Any, max_epochs: Any, callbacks: Any, trainer_settings: Mapping[str, Any]) -> None:
    """Check the types of the arguments of :func:`train`, which would fail inside of Lightning."""
    if not isinstance(module, RunModule):
        raise ValueError(f"module is a {type(module).__name__}; it must be an algorithm, such as PPOValueHeadModule.")
    if not isinstance(data, ClockedDataModule):
        raise ValueError(f"data is a {type(data).__name__}; it must be a data module, such as RolloutDataModule.")
    if not isinstance(max_epochs, int):
        raise ValueError(f"max_epochs is {max_epochs!r}; it must be a whole number.")
    if isinstance(callbacks, str) or not all(isinstance(callback, L.Callback) for callback in callbacks):
        raise ValueError(f"callbacks is {callbacks!r}; it must be a list of Lightning callbacks.")
    unknown = [name for name in trainer_settings if name not in inspect.signature(L.Trainer.__init__).parameters]
    if unknown:
        raise ValueError(f"{unknown[0]} is an argument neither of lrl.train nor of lightning.Trainer.")


def _check_unfinished(checkpoint: str, max_epochs: int) -> None:
    """Check that the run of a checkpoint has something left to train.

    Raises:
        ValueError: If it has reached ``max_epochs``, or the checkpoint contains weights only.
    """
    loops = read_checkpoint(Path(checkpoint), weights=False).get("loops")
    if loops is None:
        raise ValueError(f"ckpt_path is {checkpoint!r}, which contains weights only; give a checkpoint of a run.")
    progress = loops["fit_loop"]["epoch_progress"]["current"]
    if 0 <= max_epochs <= progress["completed"]:
        raise ValueError(
            f"max_epochs is {max_epochs}, but the run of {checkpoint} has {progress['completed']} epochs (collections "
            "or passes over demonstrations); raise it to continue the run."
        )


QUIET: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}
"""Trainer settings of a run that prints and writes nothing; all but ``logger`` are also set in
``configs/base.yaml``."""


class _ConfigInCheckpoints(L.Callback):
    """Stores the configuration of policy and environment in each checkpoint, from which :func:`load` builds them."""

    config = ""
    begun = False
    """Whether training has started. If an error occurs before, the run directory is deleted."""

    trained = False
    """Whether a minibatch was trained. If a ``LateSettingError`` occurs before, the run directory is deleted."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that training has started."""
        self.begun = True

    def on_train_batch_end(self, *_: Any) -> None:
        """Note that a minibatch was trained."""
        self.trained = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the configuration."""
        if self.config:
            checkpoint["lrl"] = checkpoint.get("lrl", {}) | {"config": self.config}


def _loggers(path: Path) -> list[Logger]:
    """Return the loggers of ``configs/base.yaml``, which write to the run directory itself and not to a subfolder."""
    return [
        CSVLogger(path, name="", version="", flush_logs_every_n_steps=1),
        TensorBoardLogger(path, name="", version="", default_hp_metric=False),
    ]


def config_text(module: RunModule, data: ClockedDataModule) -> str:
    """Return the YAML configuration of a policy and its environments; empty if no configuration can describe them.

    The configuration is assembled from the constructor arguments that the objects store. To check it, policy and
    environment are built from it and compared with the given ones.

    Args:
        module: module with the policy.
        data: data module with the environments of training and validation.
    """
    if not isinstance(module, PolicyModule) or not isinstance(data, RunDataModule):
        return ""
    envs = {"env": data.env, "validation": {"env": data.validation.env}}
    config: dict[str, Any] = {
        "model": {"class_path": type(module).__name__, "init_args": {"policy": _config_of(module.policy)}},
        "data": {"class_path": type(data).__name__, "init_args": _config_of(envs)},
    }
    text = yaml.safe_dump(config, sort_keys=False)
    try:
        policy = build(Policy, config["model"]["init_args"]["policy"])
        env = build(EnvFactory, config["data"]["init_args"]["env"])
    except (ArgumentError, ValueError, TypeError):
        policy = env = None
    same = described("policy", policy) == described("policy", module.policy)
    if not (same and described("env", env) == described("env", data.env)):
        logging.getLogger("lrl").warning(
            "lrl.load will not load the checkpoints of this run: a configuration cannot describe how %s and %s were "
            "built.",
            type(module.policy).__name__,
            type(data.env).__name__,
        )
        return ""
    return text


def _config_of(value: Any) -> Any:
    """Return an object as a configuration for :func:`lrl.registry.build`: dicts and lists of strings and numbers."""
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _config_of(entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return [_config_of(entry) for entry in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(getattr(value, "config", None)):  # a language model
        return _config_of(value.config)
    given = arguments_of(value)
    given.pop("generator", None)  # the built-in generator samples from the same distribution
    arguments = {name: _config_of(entry) for name, entry in given.items()}
    if dataclasses.is_dataclass(value):
        return arguments
    kind = type(value)
    return {"class_path": short_name(f"{kind.__module__}.{kind.__qualname__}"), "init_args": arguments}


def load(path: str | Path) -> Actor:
    """Load a policy that is ready to be evaluated.

    Args:
        path: a checkpoint; a run directory, whose last checkpoint is loaded; a language model (hub name, folder or GGUF
            file), which becomes a :class:`~lrl.policies.text.TextPolicy`; or ``random``, ``constant`` or ``expert``.

    Raises:
        ValueError: If ``path`` is none of these, or cannot be loaded.
    """
    name = str(path)
    if name in BASELINES:
        return BASELINES[name]()
    if last_checkpoint(Path(path)).suffix == ".ckpt":
        return load_policy(path).policy
    if Path(path).is_dir() and not any(Path(path).glob("*config.json")):
        raise ValueError(
            f"path is {name!r}; it must be a run directory with a checkpoint, or the folder of a language model."
        )
    policy = TextPolicy(LanguageModelConfig(name=name), PromptTemplate(), SamplingConfig())
    try:
        policy.configure()
    except ValueError as error:
        raise ValueError(f"path is {name!r}, which is neither a run nor a language model: {error}") from error
    return policy.eval()


def evaluate(
    policy: Actor | PolicyModule | str | Path,
    env: EnvFactory | str,
    *,
    episodes: int = 200,
    seed: int = 10_000,
    num_envs: int = 50,
    temperature: float = 0.0,
) -> EpisodeResults:
    """Evaluate a policy on whole episodes with fixed seeds.

    Args:
        policy: the policy, a module that trains it, or an argument of :func:`load`.
        env: factory of the environments, or the id of a registered Gymnasium environment, whose numbers are written in
            the format that the policy was trained on.
        episodes: number of episodes.
        seed: seed of the first episode; each further episode has the next seed.
        num_envs: number of environments that are played in parallel; it changes the speed and not the results.
        temperature: sampling temperature; 0 selects the most probable tokens or actions.

    Returns:
        The results: ``means()`` returns the mean return, length and success rate, ``intervals()`` their 95% confidence
        intervals.

    Raises:
        ValueError: If ``policy`` or ``env`` has another type, ``episodes`` or ``num_envs`` is not positive, or the
            policy cannot act in the environment.
    """
    if not isinstance(policy, Actor | PolicyModule | str | Path):
        raise ValueError(
            f"policy is {policy!r}; it must be a policy, a module that trains one, or an argument of load."
        )
    if not isinstance(env, EnvFactory | str):
        raise ValueError(f"env is {env!r}; it must be an EnvFactory, or the id of a registered environment.")
    policy = policy.policy if isinstance(policy, PolicyModule) else policy
    actor = policy if isinstance(policy, Actor) else load(policy)
    numbers = None if actor.codec is None else getattr(actor.codec.unwrapped, "numbers", None)
    factory = env if isinstance(env, EnvFactory) else GymnasiumEnvs(env)
    if isinstance(env, str) and hasattr(factory.codec.unwrapped, "numbers"):  # else it is described in words
        factory = GymnasiumEnvs(env, numbers=numbers)
    codec, spaces, prompt, training = actor.codec, getattr(actor, "spaces", None), actor.prompt, actor.training
    try:
        actor.connect(factory.codec)
        if actor.response_format is None:
            actor.connect_spaces(*factory.spaces)
        add_examples(actor, factory)
        actor.configure()
        actor.eval()
        return evaluate_policy(actor, factory, episodes, seed, num_envs, actor.sampling_at(temperature))
    finally:  # the policy may be trained on another environment
        actor.train(training)
        if codec is not None:
            actor.prompt = prompt
            actor.connect(codec)
        if spaces is not None:
            actor.connect_spaces(*spaces)


def logprobs(
    policy: Policy | PolicyModule,
    observations: Sequence[str],
    responses: Sequence[str],
    histories: Sequence[History] | None = None,
) -> list[Tensor]:
    """Compute how probable given responses are, for example those of a person or of another model.

    Args:
        policy: a policy that writes or chooses texts, from :func:`load`, or a module that was trained.
        observations: text of the observation before each response.
        responses: whole responses in the policy's format, such as ``policy.write("LEFT", "")``.
        histories: the earlier turns of the episode for each response, oldest first, if the policy's prompt contains
            any; None is the first turn of an episode.

    Returns:
        For each response, the log-probability of each token in nats, float ``(token,)``, at the temperature of
        training. The last token is the one with which sampling stops. A policy that chooses has one number for each
        response, the log-probability of the choice.

    Raises:
        ValueError: If the policy neither writes nor chooses texts, there is not one text for each response, or the
            policy cannot write a response.
    """
    policy = policy.policy if isinstance(policy, PolicyModule) else policy
    trunk = policy.trunk if isinstance(policy, Policy) else None
    if trunk is None or policy.response_format is None or policy.codec is None:
        raise ValueError(
            f"policy is a {type(policy).__name__}; it must be a TextPolicy or a ScoringPolicy with an environment."
        )
    histories = [()] * len(responses) if histories is None else histories
    for name, given in (("observations", observations), ("responses", responses)):
        if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
            raise ValueError(f"{name} must be a list of texts.")
    if not len(observations) == len(responses) == len(histories):
        raise ValueError(
            f"there are {len(observations)} observations, {len(responses)} responses and {len(histories)} histories; "
            "there must be one of each for every response."
        )
    if not responses:
        return []
    policy.configure()
    illegal = [one for one in responses if isinstance(policy, ScoringPolicy) and not policy.action_text(one)]
    if illegal:
        raise ValueError(f"responses has {illegal[0]!r}; for a ScoringPolicy it must be a legal action.")
    encoded = policy.encode_responses(responses)
    if isinstance(policy, TextPolicy):  # a stop text of several tokens is not followed by an end token in sampling
        tokenizer = policy.language_model.tokenizer
        encoded = [ids[:-1] if tokenizer.ends(ids[:-1], policy.stop_text) else ids for ids in encoded]
    prompts = policy.encode_all([*zip(observations, histories, strict=True)])
    batch = collate_demonstrations(prompts, encoded).to(trunk.language_model.device)
    found = policy.in_passes(batch, lambda part: policy.evaluate(part).logprobs)
    return [row[chosen] for row, chosen in zip(found, batch.response_mask, strict=True)]
