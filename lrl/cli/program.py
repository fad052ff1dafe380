"""The ``lrl`` program: its help, and its subcommands, each of which imports only what it needs."""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TRAINER_COMMANDS = {
    "fit": "train a policy",
    "validate": "play held-out episodes with a checkpoint (--ckpt_path)",
    "test": "like validate, logged under test/",
    "predict": "like validate, and write the episodes to predictions.json in the run directory",
}
"""Subcommands of LightningCLI."""
COMMANDS = {
    "preflight": "check a configuration before training: rewards, environment, tokens and one update",
    "fetch": "download and convert a pretrained language model",
    "evaluate": "play episodes with a checkpoint, any language model or a baseline, and print the results",
    "watch": "follow one episode turn by turn in the terminal, or play it yourself",
    "serve_env": "serve an environment by OpenEnv's protocol, or write a folder that OpenEnv can deploy",
    "merge": "merge an adapter into its base model, and write a plain Hugging Face folder",
    "consolidate": "write a sharded checkpoint (FSDP2) as one file",
    "collect": "record episodes as a Minari data set, or export a data set as JSON lines",
    "plot": "draw a logged metric of runs, with a 95% interval over seeds",
    "report": "write what runs did, with alarms, curves and episodes, as one HTML file",
    "table": "print a table of runs with one row per configuration",
    "compare": "compare runs with baseline runs, paired by seed",
    "run_seeds": "train one experiment on several seeds that follow a rule",
    "sweep": "train with every combination of the values of settings, on several seeds each",
    "zero_shot": "evaluate a pretrained language model that lrl has not trained, beside random actions",
    "success_table": "evaluate policies in several environments, and print a Markdown table",
    "search_table": "search for small policies on the tasks of ProPS, and compare with its published figures",
    "synthetic_search": "write histories on which a model learns to search, or compare searchers",
    "expert_q": "write the Q-values of a FrozenLake expert as CSV",
}
"""The other subcommands; each is a module of :mod:`lrl.cli` with its name, unless it is in :data:`MODULES`."""
MODULES = {
    "search_table": "lrl.search.table_command",
    "serve_env": "lrl.openenv.command",
    "synthetic_search": "lrl.search.synthetic_command",
}
"""The module of each subcommand that is defined outside :mod:`lrl.cli`."""

_HEAD = """usage: lrl {fit,validate,test,predict} --config <env>/<algorithm>.yaml [options]
       lrl COMMAND [options]

Language models as reinforcement-learning policies.

"""
_OPTIONS = """
`lrl COMMAND --help` lists the options of a command. Every key of a configuration is an option of fit, validate, test
and predict.

Example:

  lrl fit --config frozen_lake/grpo.yaml --trainer.max_epochs 50
"""


def main() -> None:
    """Run the command line; an error that a user caused is printed as one sentence, with exit status 2.

    Raises:
        SystemExit: If a user caused an error, or interrupted the program.
    """
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are imported; otherwise a command handles it
        sys.stderr.write("lrl: interrupted\n")
        raise SystemExit(130) from None


def _run(args: Sequence[str]) -> None:
    """Run the command that the first argument names."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m lrl` does, so that packages in the current folder are found
    if not args or args[0] in ("-h", "--help"):
        commands = (f"  {name:<16} {text}\n" for name, text in (TRAINER_COMMANDS | COMMANDS).items())
        sys.stdout.write(f"{_HEAD}{''.join(commands)}{_OPTIONS}")
    elif args[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"lrl {version('lrl')}\n")
    elif args[0] in COMMANDS:
        importlib.import_module(MODULES.get(args[0], f"lrl.cli.{args[0]}")).main(f"lrl {args[0]}", args[1:])
    elif args[0] in TRAINER_COMMANDS or args[0].startswith("-"):
        _train(args, time.monotonic())
    else:
        known = [*TRAINER_COMMANDS, *COMMANDS]
        near = difflib.get_close_matches(args[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(known)}."
        sys.stderr.write(f"lrl: {args[0]!r} is not a command; {hint}\n")
        raise SystemExit(2)


def _train(args: Sequence[str], started: float) -> None:
    """Run a command of LightningCLI. Help and errors for misspelt keys are printed without importing Lightning."""
    notes: Sequence[str] = ()
    if args[0] in TRAINER_COMMANDS:
        from lrl.cli.error_messages import user_errors
        from lrl.cli.help import help_text
        from lrl.cli.keys import check_keys

        with user_errors("lrl", args=args):
            text = help_text(args, TRAINER_COMMANDS[args[0]])
            if text is not None:
                sys.stdout.write(text)
                return
            args = with_configuration(args)
            notes = check_keys(args)
    with _without_collection():
        from lrl.cli.main import run

    run(args, started, notes)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Import libraries without garbage collections, which take a quarter of the time and find nothing.

    Later collections leave out what was imported. Nothing changes if the libraries have been imported before.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def with_configuration(args: Sequence[str]) -> list[str]:
    """Return arguments with the configuration of the run whose checkpoint they name.

    ``--ckpt_path RUN`` without ``--config`` reads ``RUN/config.yaml``. So does ``--resume RUN``, which is replaced by
    options that continue the run in its own directory.

    Args:
        args: command-line arguments, beginning with the command.

    Raises:
        ValueError: If the run does not exist or has no checkpoint or no configuration, or ``--resume`` cannot be used
            or is repeated.
    """
    command, *others = args
    values: dict[str, str] = {}
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        values[name] = value if equals else " ".join(args[number + 1 : number + 2])
    resumed, has_config = values.get("--resume"), not {"--config", "-c"}.isdisjoint(values)
    if resumed is not None:
        if command != "fit" or not {"--ckpt_path", "--run_directory"}.isdisjoint(values):
            raise ValueError("resume continues a run of lrl fit in its directory, without ckpt_path and run_directory.")
        place, *further = (place for place, arg in enumerate(others) if arg.partition("=")[0] == "--resume")
        if further:
            raise ValueError("resume is given more than once; give it once, with the run that is to be continued.")
        del others[place : place + (1 if "=" in others[place] else 2)]
    elif has_config or values.get("--ckpt_path", "null") == "null":
        return list(args)
    name, path = ("ckpt_path", values["--ckpt_path"]) if resumed is None else ("resume", resumed)
    run = run_of(path)
    if not Path(path).exists():
        raise ValueError(f"{name} is {path!r}, which does not exist; give the directory or a checkpoint of a run.")
    if Path(path).resolve() == run and not (run / "checkpoints" / "last.ckpt").exists():
        raise ValueError(f"{name} is {path!r}, which has no checkpoints/last.ckpt; start the run again.")
    if not has_config and not (run / "config.yaml").is_file():
        raise ValueError(
            f"{name} is {path!r}, but there is no {str(run / 'config.yaml')!r}; give a config, or the ckpt_path of "
            "lrl.train if it wrote the run."
        )
    first = [] if has_config else ["--config", str(run / "config.yaml"), "--run_directory", "null"]
    last = [] if resumed is None else ["--ckpt_path", resumed, "--run_directory", str(run)]
    return [command, *first, *others, *last]


def run_of(path: str | Path) -> Path:
    """Return the run directory of a checkpoint as an absolute path; a run directory is returned as it is."""
    path = Path(path).resolve()
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent if path.is_file() else path
