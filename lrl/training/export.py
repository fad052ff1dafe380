"""Export of the trained model to a Hugging Face folder and to the hub."""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from lrl.evaluation.run_records import last_and_best
from lrl.evaluation.statistics import RESULT_METRICS
from lrl.lm.adapters import check_embeddings, check_exportable, save_pretrained
from lrl.lm.model import LanguageModel
from lrl.registry import register
from lrl.training.gradient_module import GradientModule

FOLDER = "model"
"""Name of the exported folder in the run directory."""


@register
class ExportModel(L.Callback):
    """Writes ``model/`` into the run directory at the end of training, and pushes it to the Hugging Face hub.

    The folder contains the tokenizer, the full model, or only the adapter if one was trained, and a model card.

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
        run = Path(trainer.default_root_dir)
        folder, model = run / FOLDER, language_model_of(pl_module)
        save_pretrained(model, folder, writes=trainer.is_global_zero)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()  # the card reads the metrics
            write_card(folder, run, model.config.name, is_adapter=model.config.lora is not None)
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


_CARD = """---
{front}---
# {title}

A language model that {algorithm} of `lrl` trained as the policy of an environment.

| | |
|---|---|
{facts}

The environment, or the demonstrations:

```yaml
{environment}```

## Results

{results}

## Use

Set `language_model.name` to this folder or repository in an experiment of lrl, or load it with transformers{peft}.
Prompts must have the form that the configuration below describes (`policy.prompt`).

## Configuration

<details><summary>All settings of the run</summary>

```yaml
{config}```

</details>
"""


def write_card(folder: Path, run: Path, base: str, is_adapter: bool) -> None:
    """Write ``README.md``, which the hub shows as the model card, from the records of a run.

    Args:
        folder: the exported model; a card that another library wrote is replaced.
        run: the run directory; without its ``config.yaml`` nothing is written.
        base: ``language_model.name`` of the run.
        is_adapter: whether the folder contains only an adapter.
    """
    if not (run / "config.yaml").is_file():
        return
    text = (run / "config.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = _portable(yaml.safe_load(text), run.resolve())  # others do not have the local folders
    algorithm, data = config["model"]["class_path"], config["data"]["init_args"]
    environment = {name: data[name] for name in ("env", "demonstrations") if data.get(name)}
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if not base.startswith("assets/") and not Path(base).exists():  # the hub knows no local folders
        front["base_model"] = base
    front["tags"] = ["lrl", "reinforcement-learning", algorithm]
    facts = {"base model": f"`{_portable(base, run.resolve())}`", "seed": config.get("seed_everything")}
    facts |= {
        name: f"`{_portable_command(file.read_text(encoding='utf-8'), run.resolve())}`"
        for name in ("command", "commit")
        if (file := run / f"{name}.txt").is_file()
    }
    card = _CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        title=run.resolve().name,
        algorithm=algorithm,
        facts="\n".join(f"| {name} | {fact} |" for name, fact in facts.items()),
        environment=yaml.safe_dump(environment, sort_keys=False),
        results=_results_of(run),
        peft=" and peft" if is_adapter else "",
        config=yaml.safe_dump(config, sort_keys=False),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _portable(value: Any, run: Path) -> Any:
    """Return settings in which local paths are relative to the run, or only the last name of one outside it."""
    if isinstance(value, dict):
        return {name: _portable(part, run) for name, part in value.items()}
    if isinstance(value, list):
        return [_portable(part, run) for part in value]
    option, _, path = value.rpartition("=") if isinstance(value, str) and value.startswith("--") else ("", "", value)
    if not isinstance(path, str) or not path.startswith(("/", "~/", "../")) or "/" not in path[1:]:
        return value
    place = Path(path).expanduser().resolve()
    shown = str(place.relative_to(run)) if place.is_relative_to(run) else place.name
    return f"{option}={shown}" if option else shown


def _portable_command(text: str, run: Path) -> str:
    """Return a command with the paths of :func:`_portable`."""
    program, *words = map(str, _portable(shlex.split(text), run))
    return shlex.join(["lrl" if program == "__main__.py" else program, *words])


def _results_of(run: Path) -> str:
    """Return a Markdown table of the last and the best values of the result metrics of a run."""
    rows = []
    for name in RESULT_METRICS:
        with suppress(ValueError):  # not logged in this run
            last, best = last_and_best(run, name)
            rows.append(f"| `{name}` | {last:.4g} | {best:.4g} |")
    if not rows:
        return "The run logged no result metric."
    return "\n".join(["| metric | last value | best value |", "|---|---|---|", *rows])


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
