"""The trained model for others: a plain Hugging Face folder, and the hub."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L

from lrl.models.export import check_exportable, save_pretrained
from lrl.models.language_model import LanguageModel
from lrl.training.gradient_module import GradientModule

FOLDER = "model"
"""Name of the exported folder in the run directory."""


class ExportModel(L.Callback):
    """Writes ``model/`` into the run directory at the end of training, and pushes it to the Hugging Face hub.

    The folder holds the whole model, or the adapter where one was trained, and the tokenizer.

    Args:
        repo_id: ``name`` or ``organisation/name`` on the hub; null pushes nothing.
        private: whether a repository that is not there yet is made a private one.
    """

    def __init__(self, repo_id: str | None = None, private: bool = True) -> None:
        self.repo_id, self.private = repo_id, private

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Say what is wrong before a model is loaded, let alone trained.

        Raises:
            ValueError: the policy has no language model, its adapter could not be loaded again, or the hub does not
                let us write.
        """
        if stage != "fit":
            return
        check_exportable(language_model_of(pl_module))
        reason = refusal(self.repo_id, self.private) if self.repo_id and trainer.is_global_zero else ""
        reason = trainer.strategy.broadcast(reason)  # all ranks end, or none
        if reason:
            raise ValueError(reason)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse an adapter on a base that ``init_from`` replaced.

        Raises:
            ValueError: it did.
        """
        assert isinstance(pl_module, GradientModule)
        if pl_module.overwritten_names and language_model_of(pl_module).config.lora is not None:
            raise ValueError(
                f"model.init_from is {pl_module.init_from!r}, which replaced the base that an exported adapter would "
                "name; give that model as language_model.name instead, or export nothing."
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather on every rank, write and push on the first."""
        folder = Path(trainer.default_root_dir) / FOLDER
        save_pretrained(language_model_of(pl_module), folder, writes=trainer.is_global_zero)
        if self.repo_id is not None and trainer.is_global_zero:
            push(folder, self.repo_id)


def language_model_of(module: L.LightningModule) -> LanguageModel:
    """What is exported.

    Raises:
        ValueError: the policy has none.
    """
    assert isinstance(module, GradientModule)
    if module.policy.trunk is None:
        raise ValueError(f"model.policy is a {type(module.policy).__name__}, which has no language model to export.")
    return module.policy.trunk.language_model


def refusal(repo_id: str, private: bool) -> str:
    """Why nothing can be pushed, in one sentence, or nothing: makes the repository, if it is not there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    try:
        HfApi().whoami()
        HfApi().create_repo(repo_id, private=private, exist_ok=True)
    except LocalTokenNotFoundError:
        return f"there is no token to push to {repo_id!r} with; call `hf auth login` or set HF_TOKEN."
    except HFValidationError:
        return f"the repository to push to is {repo_id!r}, which is no hub name; it must be NAME or ORGANISATION/NAME."
    except Exception as error:  # the hub's own, the network's, and that the user asked to stay offline
        return f"{repo_id!r} cannot be pushed to; check the network, the token and the name ({_brief(error)})."
    return ""


def push(folder: Path, repo_id: str) -> None:
    """Upload ``folder``; a failure is told, not raised: the run is over and nothing of it may be lost."""
    from huggingface_hub import HfApi

    log = logging.getLogger("lrl")
    try:
        HfApi().upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Trained by lrl")
    except Exception as error:  # whatever it is
        again = f"hf upload {repo_id} {folder}"
        log.error("pushing to %s failed (%s); the model is in %s, try `%s`.", repo_id, _brief(error), folder, again)
        return
    log.info("pushed %s to %s", folder, repo_id)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
