"""Merge the adapter of a trained model into its base, and write a plain Hugging Face folder.

lrl merge --checkpoint RUN --output_dir DIR

The folder holds safetensors, configurations, tokenizer and chat template, and loads without lrl or peft: transformers
and vLLM take it, and so does ``language_model.name: DIR``. It is loaded again and compared with the adapter model, and
the distance is printed. A model that was trained whole is written as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.cli.arguments import command_parser, subcommand

if TYPE_CHECKING:
    from lrl.lm.config import LanguageModelConfig

_TYPES = ("float32", "bfloat16", "float16")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--checkpoint", help="a checkpoint or a run directory")
    subject.add_argument("--peft_model_id", help="a folder or hub name of an adapter that peft saved")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder to write; must be new or empty")
    parser.add_argument("--push_to_hub", metavar="NAME", help="push the folder to this private repository of the hub")
    parser.add_argument(
        "--value_head",
        action="store_true",
        help="write the critic of --checkpoint as value_head/value_head.safetensors, which model.init_from takes",
    )
    parser.add_argument("--dtype", choices=_TYPES, help="data type of the folder; default: that of the weights")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Write the folder and push it.

    Raises:
        ValueError: there is nothing to merge, or the folder or the repository cannot be written.
    """
    from lrl.lm.merging import check_new_folder, save_merged
    from lrl.training.export import create_repo, upload

    folder, repo_id = arguments.output_dir, arguments.push_to_hub
    check_new_folder(folder, "--output_dir")
    if arguments.value_head and arguments.checkpoint is None:
        raise ValueError("--value_head is given with --peft_model_id, and an adapter of peft has none; leave it out.")
    if repo_id and (error := create_repo(repo_id, private=True)):
        raise ValueError(error)
    load = of_peft if arguments.checkpoint is None else of_checkpoint
    distance = save_merged(*load(arguments, folder), dtype=arguments.dtype)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*')) / 1e6:.1f} MB. {distance.describe()}")
    if repo_id:
        if error := upload(folder, repo_id):
            raise ValueError(error)
        print(f"pushed to {repo_id}")


Source = tuple[Any, Path, Callable[[Path], None], "LanguageModelConfig"]
"""The first arguments of :func:`lrl.lm.merging.save_merged`."""


def of_checkpoint(arguments: argparse.Namespace, folder: Path) -> Source:
    """Load the language model of ``--checkpoint``.

    Raises:
        ValueError: there is none, or no value head where one is asked for.
    """
    from lrl.evaluation.load import load_weights

    policy = load_weights(arguments.checkpoint)
    kind = type(policy).__name__
    if policy.trunk is None:
        raise ValueError(f"--checkpoint is {arguments.checkpoint!r}, a {kind}, which has no language model.")
    language_model, head = policy.trunk.language_model, policy.trunk.value_head
    if arguments.value_head and head is None:
        raise ValueError(f"--value_head is given, but the {kind} of --checkpoint has none; leave it out.")
    if arguments.value_head and language_model.has_critic_adapter:
        raise ValueError(
            "--value_head is given, but the critic of --checkpoint reads the model through an adapter of its own "
            "(value_head.adapter), which the merged model lacks; leave it out."
        )

    def save_others(draft: Path) -> None:
        language_model.tokenizer.save(draft)
        if arguments.value_head and head is not None:
            head.save(draft)

    return language_model.model, folder, save_others, language_model.config


def of_peft(arguments: argparse.Namespace, folder: Path) -> Source:
    """Load the adapter of ``--peft_model_id`` on its base."""
    from lrl.lm.export import load_adapter

    loaded = load_adapter(arguments.peft_model_id)
    return loaded.model, folder, loaded.tokenizer.save_pretrained, loaded.config


main = subcommand(make_parser, run)
