"""Export of the trained model to a Hugging Face folder and to the hub."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L

from lrl.lm.adapters import check_embeddings, check_exportable, save_pretrained
from lrl.lm.model import LanguageModel
from lrl.registry import register
from lrl.training.gradient_module import GradientModule

FOLDER = "model"
"""Name of the exported folder in the run directory."""


@register
class ExportModel(L.Callback):
    """Writes ``model/`` into the run directory at the end of training, and pushes it to the Hugging Face hub.

    The folder contains the tokenizer and the full model, or only the adapter if one was trained.

    Args:
        repo_id: ``name`` or ``organisation/name`` on the hub; null pushes nothing.
        private: whether a new repository is private.
    """

    def __init__(self, repo_id: str | None = None, private: bool = True) -> None:
        self.repo_id, self.private = repo_id, private

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Validate the export before a model is loaded and trained.

        Raises:
            ValueError: If the policy has no language model, its adapter could not be loaded again, or the repository
                cannot be written.
        """
        if stage != "fit":
            return
        check_exportable(language_model_of(pl_module))
        error = create_repo(self.repo_id, self.private) if self.repo_id and trainer.is_global_zero else ""
        error = trainer.strategy.broadcast(error)  # all ranks raise, or none
        if error:
            raise ValueError(error)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that an exported adapter would belong to the base model that it names.

        Raises:
            ValueError: If ``init_from`` replaced weights of the base model, or its embeddings were changed.
        """
        assert isinstance(pl_module, GradientModule)
        check_embeddings(language_model_of(pl_module))
        if pl_module.overwritten_names and language_model_of(pl_module).config.lora is not None:
            raise ValueError(
                f"model.init_from is {pl_module.init_from!r}, which replaced the base that an exported adapter would "
                "name; it must be language_model.name instead, or nothing exported."
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the weights on every rank; write and push them on the first."""
        folder = Path(trainer.default_root_dir) / FOLDER
        save_pretrained(language_model_of(pl_module), folder, writes=trainer.is_global_zero)
        if self.repo_id is not None and trainer.is_global_zero:
            error = upload(folder, self.repo_id)  # logged instead of raised, because the run has finished
            logger = logging.getLogger("lrl")
            if error:
                logger.error(error)
            else:
                logger.info("pushed %s to %s", folder, self.repo_id)


def language_model_of(module: L.LightningModule) -> LanguageModel:
    """Return the language model of a module's policy.

    Raises:
        ValueError: If the policy has none.
    """
    assert isinstance(module, GradientModule)
    if module.policy.trunk is None:
        raise ValueError(f"model.policy is a {type(module.policy).__name__}, which has no language model to export.")
    return module.policy.trunk.language_model


def create_repo(repo_id: str, private: bool) -> str:
    """Create the repository if it does not exist; return an error message, or an empty string on success."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
        HfApi().create_repo(repo_id, private=private, exist_ok=True)
    except Exception as error:  # no token, a malformed name, errors of the hub and of the network, and offline mode
        return (
            f"{repo_id!r} cannot be pushed to ({_brief(error)}); check the network, the token (`hf auth login` or "
            "HF_TOKEN) and the name, which must be NAME or ORGANISATION/NAME."
        )
    return ""


def upload(folder: Path, repo_id: str) -> str:
    """Upload ``folder`` to an existing repository; return an error message, or an empty string on success."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Trained by lrl")
    except Exception as error:  # errors of the hub and of the network
        again = f"hf upload {repo_id} {folder}"
        return f"pushing to {repo_id} failed ({_brief(error)}); the model is in {folder}, try `{again}`."
    return ""


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
