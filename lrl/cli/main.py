"""LightningCLI with run directories, a base configuration and short errors: fit, validate, test and predict."""

from __future__ import annotations

import ast
import copy
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import yaml
from jsonargparse import ActionConfigFile, Namespace  # pyright: ignore[reportPrivateImportUsage]
from jsonargparse.typing import register_type
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from lrl.cli.error_messages import user_errors
from lrl.cli.program import run_of
from lrl.cli.run_directory import RunDirectory, append_rows, experiment_name, log_to
from lrl.cli.trainer_settings import check_settings, check_wandb, fsdp2, set_data_parallel_size
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.evaluation.load import checkpoint_file
from lrl.files import from_yaml, resolve_config, shipped
from lrl.functional.distributed import read_checkpoint
from lrl.ranges import LateSettingError, check_seed
from lrl.registry import enable_short_names, short_name
from lrl.training.export import ExportModel
from lrl.training.module import PolicyModule, RunModule
from lrl.training.progress import HeldOutTable

_TEXT_OR_NONE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\bNone\b""")

_CLASS_PATH = re.compile(r"(?<=class_path: )[\w.]+")
_DURATION = re.compile(r"(?:(\d+) days?, |(\d+):)?(\d+):(\d+):(\d+(?:\.\d+)?)")


def duration(text: str) -> timedelta:
    """Parse a duration in Lightning's format ``DD:HH:MM:SS`` or Python's format ``D days, HH:MM:SS``.

    jsonargparse 4.53 ignores everything after the third number, and therefore the seconds in Lightning's format.

    Raises:
        ValueError: If the text has another form.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"a duration must be written as DD:HH:MM:SS or HH:MM:SS, not as {text!r}.")
    days, hours, minutes, seconds = found[1] or found[2] or 0, *found.groups()[2:]
    return timedelta(days=float(days), hours=float(hours), minutes=float(minutes), seconds=float(seconds))


register_type(timedelta, deserializer=duration)


def _enumeration_as_text(dumper: yaml.SafeDumper, member: Enum) -> yaml.Node:
    """Represent a member of an enumeration by the text from which it is parsed again.

    jsonargparse does this for arguments whose type is the enumeration, but not if only their default is a member of it.
    An example is ``interval`` of Lightning's ``Timer``, whose type is a text.
    """
    return dumper.represent_str(str(member.value) if isinstance(member, str) else member.name)


yaml.SafeDumper.add_multi_representer(Enum, _enumeration_as_text)


class RunParser(LightningArgumentParser):
    """Version of Lightning's parser that does not validate a configuration again to write it, which is slow."""

    def parse_args(self, args: Any = None, *more: Any, **settings: Any) -> Any:  # pyright: ignore
        """Parse arguments; the parser of a nested class also accepts None in place of null.

        jsonargparse 4.53 passes parsed values to that parser in Python's notation, in which null is None.
        """
        if getattr(self, "_inner_parser", False) and args is not None:
            args = [none_as_null(arg) for arg in args]
        return super().parse_args(args, *more, **settings)

    def _check_value_key(self, action: Any, value: Any, *more: Any, **settings: Any) -> Any:
        """Check a value; a mapping is copied first.

        If an option replaces the class of an object, jsonargparse 4.53 checks the arguments of the earlier class here,
        and would change them: an optional dataclass among them could then not be parsed again.
        """
        value = value.clone() if isinstance(value, Namespace) else value
        return super()._check_value_key(action, value, *more, **settings)

    def dump(self, cfg: Any, *args: Any, **settings: Any) -> str:
        """Return a configuration as text, in which components have their short names."""
        text = super().dump(cfg, *args, **{"skip_validation": True} | settings)
        return _CLASS_PATH.sub(lambda found: short_name(found[0]), text)


def none_as_null(arg: str) -> str:
    """Replace None by null in ``--key=value`` if the value is None, or a list or dict in Python's notation.

    Other values are returned unchanged, and so is the word None within a string. A list or dict that contains an
    infinite number or NaN is not recognised.

    Args:
        arg: a command-line argument.
    """
    key, equals, text = arg.partition("=")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):
        return arg
    if not (value is None or isinstance(value, (list, dict))) or repr(value) != text:
        return arg
    return key + equals + _TEXT_OR_NONE.sub(lambda found: "null" if found[0] == "None" else found[0], text)


class ConfigFile(ActionConfigFile):
    """The action of ``--config``, which finds files and the configurations that ship with lrl."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read the named file into the configuration."""
        super().__call__(parser, cfg, resolve_config(values), option_string)


class SaveRunConfig(SaveConfigCallback):
    """Writes the resolved configuration to the run directory and into every checkpoint.

    A checkpoint also contains the lengths of the files that the run appends to, for a run that continues from it.
    """

    run_directory: RunDirectory | None = None
    """The run directory; None if there is none."""
    lengths: Mapping[str, int] | None = None
    """Lengths of these files in the checkpoint from which a run continues in its directory; None for a new run."""

    _stage = "fit"
    """The subcommand; a checkpoint that is written before :meth:`save_config` belongs to ``fit``."""
    _text = ""
    """The configuration as YAML, once the run directory or a checkpoint has it."""
    begun = False
    """Whether training or an evaluation has started."""
    before = 0
    """Number of minibatches that were trained before this launch."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what was appended to files after the checkpoint was written, and log the configuration.

        This is done here because the checkpoint has now been loaded without an error.
        """
        if self.run_directory is not None and self.lengths is not None:
            self.run_directory.rewind(self.lengths)
        self._log_config(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record that the run has started. Until it has trained, a ``LateSettingError`` removes its directory."""
        self.begun, self.before = True, _trained(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record that an evaluation has started."""
        self.begun = True

    on_test_start = on_predict_start = on_validation_start

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the configuration in the checkpoint, so that it can be loaded without the run directory."""
        checkpoint["lrl"] = checkpoint.get("lrl", {}) | {"config": self._written()}
        if trainer.is_global_zero and self.run_directory is not None:
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    logger.save()
            checkpoint["lrl"]["lengths"] = self.run_directory.lengths()

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the configuration to the run directory."""
        self._stage = stage
        path = Path(trainer.default_root_dir) / "config.yaml"  # Lightning would take the folder of the first logger
        path.write_text(self._written(), encoding="utf-8")
        if stage != "fit":
            self._log_config(trainer)

    def _log_config(self, trainer: L.Trainer) -> None:
        """Pass the configuration to the loggers of the first rank."""
        if not trainer.is_global_zero:
            return
        text = self._written()
        values = from_yaml(text)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):  # log_hyperparams writes only hparams.yaml
                logger.experiment.add_text("config", f"```yaml\n{text}\n```")
            if not isinstance(logger, CSVLogger):
                logger.log_hyperparams(copy.deepcopy(values))

    def _written(self) -> str:
        """Return the configuration as YAML. It is written once, because that is slow and does not change in a run."""
        if not self._text:
            config = self.config.clone()
            if self._stage == "fit":  # a run that uses this file is a new one
                config.ckpt_path = None
            self._text = self.parser.dump(config, skip_none=False)
        return self._text


class LRLCLI(LightningCLI):
    """LightningCLI with a base configuration and one run directory per launch."""

    def __init__(self, args: Any = None, run: bool = True, notes: Sequence[str] = ()) -> None:
        self._notes = notes
        defaults = {
            "default_config_files": [shipped("configs/base.yaml")],
            "exit_on_error": False,
        }  # run() prints the errors
        self.run_directory: RunDirectory | None = None
        self._restarted = False
        self._args = sys.argv[1:] if args is None else args
        enable_short_names()
        each = {"exit_on_error": False} | dict.fromkeys(self.subcommands(), defaults)
        try:
            super().__init__(
                RunModule,
                L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=SaveRunConfig,
                save_config_kwargs={"save_to_log_dir": False},
                parser_kwargs=each if run else defaults,
                args=args,
                run=run,
                auto_configure_optimizers=False,  # the module creates its optimizer; --optimizer would be ignored
            )
        except BaseException as error:
            begun = any(part.begun for part in self._records)
            if isinstance(error, LateSettingError):
                begun = any(part.begun and part.before < _trained(self.trainer) for part in self._records)
            if self.run_directory is not None and not begun:
                self.run_directory.discard()
            elif self.run_directory is not None and self.subcommand == "fit" and self.trainer.is_global_zero:
                self.run_directory.log_commands("resume")
            if self.run_directory is not None:
                self.run_directory.unlock()
            raise

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the subcommand that the command line names, or all four if it names none.

        Building the parser of a subcommand takes a fifth of a second, and only one is used.
        """
        known = LightningCLI.subcommands()
        return {name: known[name] for name in known if name in self._args} or known

    def report(self) -> None:
        """Log the results of a run that trained, and commands that use it."""
        if self.run_directory is None or self.subcommand not in (None, "fit") or not self.trainer.is_global_zero:
            return
        played = ("evaluate", "watch") if isinstance(self.model, PolicyModule) else ()
        self.run_directory.log_results()
        self._write_report(self.run_directory.path)
        further = ("plot", "compare", "resume") if self._reached_limits() else ("plot", "compare")
        self.run_directory.log_commands("checkpoint", *played, *further)

    def _reached_limits(self) -> list[str]:
        """Return the settings whose limits the run has reached, with their values."""
        limits = [
            ("trainer.max_epochs", self.trainer.current_epoch, self.trainer.max_epochs),
            ("trainer.max_steps", self.trainer.global_step, self.trainer.max_steps),
        ]
        if isinstance(self.datamodule, RolloutDataModule):
            data = self.datamodule
            limits.append(("data.max_env_steps", data.clocks["env_steps"], data.max_env_steps))
        reached = [f"{key} = {limit}" for key, done, limit in limits if limit and 0 < limit <= done]
        remaining = [one.time_remaining() for one in cast(Any, self.trainer).callbacks if isinstance(one, Timer)]
        return reached + ["trainer.max_time" for seconds in remaining if seconds is not None and seconds <= 0]

    def _write_report(self, run: Path) -> None:
        """Write the report into the run directory, unless the environment variable ``LRL_REPORT`` is 0."""
        if os.environ.get("LRL_REPORT", "1") == "0":
            return
        from lrl.cli.report import REPORT, findings
        from lrl.evaluation.report_page import write_report

        try:
            write_report([run], run / REPORT, diagnose=findings)
        except Exception as error:  # the run itself has ended well
            logging.getLogger("lrl").warning("the report of the run could not be written: %s", error)
        else:
            logging.getLogger("lrl").info("%-10s  %s", "report", os.path.relpath(run / REPORT))

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, without Lightning's warning that these are not those of the process."""
        self.config = parser.parse_args(args)

    def after_fit(self) -> None:
        """Check that a resumed run had something left to train, unless it is a job that was restarted.

        Raises:
            ValueError: If the run had already ended.
        """
        checkpoint = self._get(self.config, "ckpt_path")
        if not checkpoint or any(part.begun and part.before < _trained(self.trainer) for part in self._records):
            return
        sentence = (
            f"nothing was trained: the run of {os.path.relpath(checkpoint)} had already reached "
            f"{' and '.join(self._reached_limits()) or 'a limit'}; continue the run with a higher limit."
        )
        if self._restarted:
            logging.getLogger("lrl").warning(sentence)
            return
        for callback in self._records:
            callback.begun = False
        if self.run_directory is not None and self.run_directory.made is not None:
            shutil.rmtree(self.run_directory.path / "checkpoints", ignore_errors=True)  # a copy of the given one
        raise ValueError(sentence)

    @property
    def _records(self) -> list[SaveRunConfig]:
        """The callback that records the run, once there is a trainer."""
        callbacks: list[Any] = cast(Any, self.trainer).callbacks if hasattr(self, "trainer") else []
        return [callback for callback in callbacks if isinstance(callback, SaveRunConfig)]

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser whose ``--config`` is :class:`ConfigFile`."""
        parser = RunParser(dump_header=[f"lightning.pytorch=={L.__version__}"], allow_abbrev=False, **kwargs)
        parser.add_argument("-c", "--config", action=ConfigFile, help="a file, or one of the configs of lrl by name")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--run_directory`` and ``--push_to_hub``, and link values that must agree."""
        parser.add_argument("--run_directory", type=str | None, default=None, help="folder to which the run is written")
        parser.add_argument(
            "--push_to_hub",
            type=str | None,
            default=None,
            help="export the trained model to this repository of the hub",
        )
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)

    def before_instantiate_classes(self) -> None:
        """Create the run directory and let every logger write there.

        Raises:
            ValueError: If the checkpoint, the login of Weights & Biases or the run directory cannot be used.
        """
        config = self.config[self.subcommand] if self.subcommand else self.config
        configs, resumed, origin = [str(path) for path in config.get("config") or []], config.get("ckpt_path"), None
        if resumed:
            config.ckpt_path = str(checkpoint_file(Path(resumed), "ckpt_path"))
            check_ours(Path(config.ckpt_path))
            run = run_of(config.ckpt_path)
            origin = run if configs and Path(configs[0]).resolve() == run / "config.yaml" else None
        is_fsdp = config.trainer.strategy == "fsdp"
        if is_fsdp:
            config.trainer.strategy = fsdp2()
        notes = [*self._notes, *check_settings(config.trainer, self.subcommand)]
        if isinstance(config.trainer.logger, Namespace):
            config.trainer.logger = [config.trainer.logger]
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else []
        for logger in loggers:
            if "WandbLogger" in logger.class_path:
                check_wandb(logger.init_args.get("offline", False))
        trains = self.subcommand in (None, "fit")
        resumed = config.get("ckpt_path") if trains else None
        beside = None
        if origin is not None:
            beside = origin.with_name(
                f"{origin.name.partition('-resumed-')[0]}-{'resumed' if trains else self.subcommand}"
            )
        advice = ", or continue the run in it with lrl fit --resume"
        self.run_directory = RunDirectory.create(
            config.run_directory, experiment_name(configs), config.seed_everything, resumed, beside, advice
        )
        if is_fsdp:  # the log begins with the run directory
            logging.getLogger("lrl").info("trainer.strategy fsdp: the weights are sharded by FSDP2")
        for note in notes:
            logging.getLogger("lrl").info(note)
        restarted = self.run_directory.restart_from() if trains else None
        if restarted is not None:
            logging.getLogger("lrl").info("the job was restarted: resuming %s", os.path.relpath(restarted))
            config.ckpt_path, self._restarted = str(restarted), True
        if not trains and not config.get("ckpt_path"):
            logging.getLogger("lrl").warning("no --ckpt_path: %s evaluates the untrained policy", self.subcommand)
        for logger in loggers:
            log_to(logger, self.run_directory.path, origin)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return the trainer, with the callbacks that ``--push_to_hub`` and an evaluation need.

        Raises:
            ValueError: If the accelerator does not exist on this machine, ``devices`` are not valid for it, or two
                callbacks have the same class and state.
        """
        accelerator = self._get(self.config, "trainer.accelerator")
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"trainer.accelerator is {accelerator!r}, which this machine does not have; it must be auto or cpu."
            )
        if self.run_directory is not None:
            kwargs["default_root_dir"] = str(self.run_directory.path)
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except TypeError as error:
            if "CPUAccelerator" not in str(error):
                raise
            devices = self._get(self.config, "trainer.devices")
            raise ValueError(
                f"trainer.devices is {devices!r}; it must be auto or a positive number, because the run uses the CPU."
            ) from error
        except RuntimeError as error:
            twice = re.match(r"Found more than one stateful callback of type `(\w+)`", str(error))
            if twice is None:
                raise
            raise ValueError(
                f"trainer.callbacks has {twice[1]} twice with the same state, such as the same monitor; one of them "
                "must be removed."
            ) from error
        set_data_parallel_size(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):  # Lightning 2.6.6 passes a setting that wandb 0.31 warns about
                logger._wandb_init.pop("anonymous", None)
        profiler = cast(Any, trainer).profiler
        if self.run_directory is not None and not isinstance(profiler, PassThroughProfiler):
            profiler.dirpath = profiler.dirpath or str(self.run_directory.path)
            profiler.filename = profiler.filename or "profile"
        self._keep_files(trainer)
        repo_id = self._get(self.config, "push_to_hub")
        if repo_id is not None:
            cast(Any, trainer).callbacks.append(ExportModel(repo_id))  # after the checkpoint callback
        if self.subcommand not in (None, "fit"):
            cast(Any, trainer).callbacks.append(HeldOutTable())  # after the callbacks that log
        return trainer

    def _keep_files(self, trainer: L.Trainer) -> None:
        """Store the lengths of the run's files in checkpoints, and append to these files if the run continues."""
        directory, lengths = self.run_directory, None
        if directory is not None and directory.earlier is not None and self.subcommand in (None, "fit"):
            checkpoint = self._get(self.config, "ckpt_path")
            saved = read_checkpoint(Path(checkpoint), weights=False)["lrl"] if checkpoint else {}
            lengths = saved.get("lengths", {})
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    append_rows(logger)
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, SaveRunConfig):
                callback.run_directory, callback.lengths = directory, lengths


def _trained(trainer: L.Trainer) -> int:
    """Return the number of minibatches that the whole run has trained."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return progress.processed


def _seed(value: Any) -> int:
    """Return the seed of the data; ``seed_everything`` may not be a boolean or null."""
    if isinstance(value, bool) or value is None:
        raise ValueError(f"seed_everything is {value}; it must be a number, so that the run can be repeated.")
    check_seed("seed_everything", int(value), maximum=2**32 - 1)  # the range of NumPy's and Lightning's seeds
    return int(value)


def check_ours(checkpoint: Path) -> None:
    """Check that lrl wrote a checkpoint.

    Raises:
        ValueError: If the checkpoint is damaged, or was written by another program.
    """
    try:
        ours = "lrl" in read_checkpoint(checkpoint, weights=False)
    except ValueError as error:
        raise ValueError(f"ckpt_path: {error}") from error
    if not ours:
        raise ValueError(
            f"ckpt_path is {str(checkpoint)!r}, which lrl did not write; give a checkpoint of a run of lrl."
        )


def run(args: Any = None, started: float | None = None, notes: Sequence[str] = ()) -> None:
    """Run the command line; an error that a user caused is printed as one sentence, with exit status 2.

    Args:
        args: command-line arguments; None means ``sys.argv[1:]``.
        started: ``time.monotonic()`` at the start of the process, so that the logged minutes include the imports.
        notes: sentences on the command line that are logged when the run begins.
    """
    started = time.monotonic() if started is None else started
    with user_errors("lrl", args=sys.argv[1:] if args is None else args):
        done = LRLCLI(args, notes=notes)
        try:
            launch = " of this launch" if done.subcommand == "fit" and done.trainer.ckpt_path else ""
            logging.getLogger("lrl").info("finished after %.2f minutes%s", (time.monotonic() - started) / 60, launch)
            done.report()
        finally:
            if done.run_directory is not None:
                done.run_directory.unlock()
