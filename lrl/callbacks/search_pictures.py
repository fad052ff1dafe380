"""The record of a search in the run directory: every proposal with its returns, and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L

from lrl.algorithms.prompted_search import PromptedSearchModule
from lrl.reports.search_figures import SearchedPolicies, draw_parameters, draw_search


class SearchPictures(L.Callback):
    """Writes ``proposals.jsonl`` after every proposal, and ``search.png`` and ``parameters.png`` at the end.

    A line of ``proposals.jsonl`` is a policy: ``iteration``, ``parameters``, ``returns``, ``env_steps``, and what a
    language model replied; a proposal that ended the run has replies, and null for parameters. A resumed run writes the
    lines of the run before as well.
    """

    def __init__(self) -> None:
        self._written = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the policies that the run before has played.

        Raises:
            ValueError: the run is no search.
        """
        if not isinstance(pl_module, PromptedSearchModule):
            name = type(pl_module).__name__
            raise ValueError(f"trainer.callbacks has SearchPictures, which draws searches; {name} is none, remove it.")
        self._written = 0
        self._write(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        """Write the policy that was just played."""
        self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PromptedSearchModule)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "proposals.jsonl").open("a" if self._written else "w", encoding="utf-8") as lines:
            for trial in pl_module.trials[self._written :]:
                lines.write(json.dumps(trial, ensure_ascii=False) + "\n")
        self._written = len(pl_module.trials)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw both pictures, and write the policies of a finished search that is resumed, for which nothing starts."""
        assert isinstance(pl_module, PromptedSearchModule)
        if pl_module.trials:
            if not self._written:
                self._write(trainer, pl_module)
            policies, folder = SearchedPolicies.of(pl_module.trials), Path(trainer.default_root_dir)
            draw_search(policies, folder / "search.png")
            draw_parameters(policies, folder / "parameters.png")
