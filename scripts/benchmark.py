"""Compare the speed of lrl with other libraries, or measure parts of it.

python scripts/benchmark.py grpo --json assets/results/benchmark_grpo.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark, and write its report to a file; a benchmark may yield several, each replacing the one before.

    Args:
        arguments: command-line arguments; None means ``sys.argv[1:]``.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "trl", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)  # before the imports, on which bitsandbytes logs
    from benchmarks.timing import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="benchmark", required=True)
    files = Path(__file__).with_name("benchmarks").glob("*.py")
    modules = {path.stem: importlib.import_module(f"benchmarks.{path.stem}") for path in files}
    modules = {name: module for name, module in modules.items() if hasattr(module, "add_arguments")}
    for name, module in sorted(modules.items()):
        text = str(module.__doc__).partition("\n")[0]
        subparser = subparsers.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        module.add_arguments(subparser)
        subparser.add_argument("--threads", type=int, default=None, help="torch threads, for both libraries")
        subparser.add_argument(
            "--cpu_time", action="store_true", help="measure CPU seconds, on a machine with other load"
        )
        subparser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.cpu_time:
        time.perf_counter = time.process_time
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    for report in modules[options.benchmark].main(options):
        if options.json is not None:
            settings = {name: value for name, value in vars(options).items() if name not in ("benchmark", "json")}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            document = {**provenance(), "settings": settings, **report}
            options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
