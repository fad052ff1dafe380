"""The ``lrl`` program: its help, and its subcommands, each of which imports only what it needs."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import time
from collections.abc import Sequence

TRAINER_COMMANDS = {
    "fit": "train a policy",
    "validate": "play held-out episodes with a checkpoint (--ckpt_path)",
    "test": "like validate, logged under test/",
    "predict": "like validate, and write the episodes to predictions.json in the run directory",
}
"""Subcommands of LightningCLI."""
COMMANDS = {
    "fetch": "download and convert a pretrained language model",
    "evaluate": "play episodes with a checkpoint, any language model or a baseline, and print the results",
    "watch": "follow one episode turn by turn in the terminal, or play it yourself",
    "serve_env": "serve an environment by OpenEnv's protocol, or write a folder that OpenEnv can deploy",
    "merge": "merge an adapter into its base model, and write a plain Hugging Face folder",
    "collect": "record episodes as a Minari data set, or export a data set as JSON lines",
    "plot": "draw a logged metric of runs, with a 95% interval over seeds",
    "compare": "compare runs with baseline runs, paired by seed",
    "run_seeds": "train one experiment on several seeds that follow a rule",
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
        SystemExit: If a user caused an error.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m lrl` does, so that packages in the current folder are found
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        commands = (f"  {name:<16} {text}\n" for name, text in (TRAINER_COMMANDS | COMMANDS).items())
        sys.stdout.write(f"{_HEAD}{''.join(commands)}{_OPTIONS}")
    elif args[0] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"lrl {version('lrl')}\n")
    elif args[0] in COMMANDS:
        importlib.import_module(MODULES.get(args[0], f"lrl.cli.{args[0]}")).main(f"lrl {args[0]}", args[1:])
    elif args[0] in TRAINER_COMMANDS or args[0].startswith("-"):
        started = time.monotonic()
        _train(args, started)
    else:
        known = [*TRAINER_COMMANDS, *COMMANDS]
        near = difflib.get_close_matches(args[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(known)}."
        sys.stderr.write(f"lrl: {args[0]!r} is not a command; {hint}\n")
        raise SystemExit(2)


def _train(args: Sequence[str], started: float) -> None:
    """Run a command of LightningCLI. Help and errors for misspelt keys are printed without importing Lightning."""
    if args[0] in TRAINER_COMMANDS:
        from lrl.cli.error_messages import user_errors
        from lrl.cli.keys import check_keys, help_text

        with user_errors("lrl"):
            text = help_text(args, TRAINER_COMMANDS[args[0]])
            if text is not None:
                sys.stdout.write(text)
                return
            check_keys(args)
    from lrl.cli.main import run

    run(started=started)
