"""Shard a language model over ranks."""

from __future__ import annotations

import logging

from torch.distributed.device_mesh import DeviceMesh

from lrl.functional.distributed import shard
from lrl.models.language_model import LanguageModel


def shard_language_model(language_model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard the weights, and those of a copied reference, over the ranks of ``mesh`` (FSDP2).

    Raises:
        ValueError: the weights are quantised, whose 4-bit blocks cannot be split, or the critic has an adapter: the
            gradients of a block are reduced once, and actor and critic both pass through it.
    """
    if language_model.has_critic_adapter:
        raise ValueError("value_head.adapter is true, which FSDP2 cannot shard; it must be false, or the strategy ddp.")
    if language_model.config.quantization is not None:
        raise ValueError(
            f"language_model.quantization is {language_model.config.quantization!r}, which FSDP2 cannot shard; "
            "it must be null, or trainer.strategy ddp."
        )
    if language_model.lower is not None:  # ranks would gather the weights of the lower layers at different times
        logging.getLogger("lrl").warning(
            "lora.last_layers is set and the weights are sharded (FSDP2); the layers below are computed in every pass, "
            "their states are not kept."
        )
        language_model.lower = None
    language_model.chunks = False  # the head's weights are gathered in the model's own passes only
    for model in (language_model.model, *language_model.copied_reference):
        shard(model, mesh)
