"""Liger's fused Triton kernels (arXiv:2410.10989) for the layers of a causal LM on a GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from lrl.lm.attention import bare

if TYPE_CHECKING:
    from lrl.lm.model import LanguageModel


_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "layer_norm": True}
"""Kernels of the layers, where an architecture has them."""
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels of the loss that Hugging Face models compute from labels, which lrl does not use."""


def fuse_kernels(language_model: LanguageModel) -> None:
    """Let a model, and its reference, compute rotations, norms and gated layers by fused kernels, if it is asked to.

    Liger also replaces classes and functions of the architecture's module in transformers, so that models of this
    architecture that are loaded later in this process need a GPU as well.

    Args:
        language_model: configured, its weights on their device.

    Raises:
        ValueError: the weights are on no GPU, the package liger-kernel is not installed, or it has no kernels for the
            model.
    """
    if not language_model.config.liger_kernels:
        return
    if language_model.device.type != "cuda":
        raise ValueError(
            f"language_model.liger_kernels is true, but the weights are on {language_model.device.type!r}; it must be "
            "false, or trainer.accelerator gpu."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(
            "language_model.liger_kernels is true, which needs the package liger-kernel; install it by "
            "`pip install 'lrl[liger]'`, or set liger_kernels false."
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]

    for model in map(bare, (language_model.model, *language_model.copied_reference)):
        kind = model.config.model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ValueError(
                f"language_model.liger_kernels is true, but liger-kernel has none for the architecture {kind!r}; it "
                "must be false."
            )
        _apply_liger_kernel_to_instance(model=model, **_KERNELS, **_LOSSES)
