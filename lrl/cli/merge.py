"""The command ``lrl merge``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lrl.cli.command import command
from lrl.cli.options import exactly_one
from lrl.cli.program import run_of

if TYPE_CHECKING:
    from lrl.lm.config import LanguageModelConfig


def merge(
    *,
    output_dir: Path,
    checkpoint: str | None = None,
    peft_model_id: str | None = None,
    push_to_hub: str | None = None,
    value_head: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Merge the adapter of a trained model into its base, and write a plain Hugging Face folder.

    lrl merge --checkpoint RUN --output_dir DIR

    The folder contains safetensors, configurations, tokenizer, chat template and a model card. transformers and vLLM
    can load it without lrl or peft; in lrl it is language_model.name: DIR. The merged model is loaded again and
    compared with the model with adapters, and the distance is printed. A model without adapters is written unchanged.

    Args:
        output_dir: the folder to write; must be new or empty.
        checkpoint: a checkpoint or a run directory.
        peft_model_id: a folder or hub name of an adapter that peft saved.
        push_to_hub: push the folder to the private repository of the hub with this name.
        value_head: write the critic of --checkpoint as value_head/value_head.safetensors, for model.init_from.
        dtype: data type of the written weights; default: the data type of the model.

    Raises:
        ValueError: If the options contradict each other, the folder is not empty, or the model cannot be loaded.
    """
    from lrl.lm.merging import check_new_folder, save_merged
    from lrl.training.export import create_repo, upload, write_card

    exactly_one(checkpoint=checkpoint, peft_model_id=peft_model_id)
    check_new_folder(output_dir, "output_dir")
    if value_head and checkpoint is None:
        raise ValueError("--value_head is given with --peft_model_id, but an adapter of peft has none; leave it out.")
    if push_to_hub and (error := create_repo(push_to_hub, private=True)):
        raise ValueError(error)
    model, save_others, config = (
        _of_peft(str(peft_model_id)) if checkpoint is None else _of_checkpoint(checkpoint, value_head)
    )
    distance = save_merged(model, output_dir, save_others, config, dtype=dtype)
    if checkpoint is not None:
        write_card(output_dir, run_of(checkpoint), config.name, is_adapter=False)
    size = sum(file.stat().st_size for file in output_dir.rglob("*")) / 1e6
    print(
        f"{output_dir}: {size:.1f} MB. Difference of log-probabilities from the adapter model in float32: "
        f"{distance.merged:.2g} nats; of the adapter model in this data type: {distance.adapter:.2g} nats."
    )
    if push_to_hub:
        if error := upload(output_dir, push_to_hub):
            raise ValueError(error)
        print(f"pushed to {push_to_hub}")


_Source = tuple[Any, Callable[[Path], None], "LanguageModelConfig"]
"""A model, a function that writes its tokenizer and its value head to a folder, and its configuration."""


def _of_checkpoint(checkpoint: str, value_head: bool) -> _Source:
    """Load the language model of a checkpoint.

    Raises:
        ValueError: If the checkpoint has no language model, or a value head is requested that cannot be written.
    """
    from lrl.evaluation.load import load_weights

    policy = load_weights(checkpoint)
    kind = type(policy).__name__
    if policy.trunk is None:
        raise ValueError(f"--checkpoint is {checkpoint!r}, a {kind}, which has no language model.")
    language_model, head = policy.trunk.language_model, policy.trunk.value_head
    if value_head and head is None:
        raise ValueError(f"--value_head is given, but the {kind} of --checkpoint has none; leave it out.")
    if value_head and language_model.has_critic_adapter:
        raise ValueError(
            "--value_head is given, but the critic of --checkpoint reads the model through an adapter of its own "
            "(value_head.adapter), which the merged model lacks; leave it out."
        )

    def save_others(draft: Path) -> None:
        """Write the tokenizer, and the value head if it is requested."""
        language_model.tokenizer.save(draft)
        if value_head and head is not None:
            head.save(draft)

    return language_model.model, save_others, language_model.config


def _of_peft(name: str) -> _Source:
    """Load an adapter that peft saved on its base."""
    from lrl.lm.merging import load_adapter

    loaded = load_adapter(name)
    return loaded.model, loaded.tokenizer.save_pretrained, loaded.config


main = command(merge)
