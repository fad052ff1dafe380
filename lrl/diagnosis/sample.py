"""A sample of the turns of one collection, with all numbers that training used for them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

FOLDER = "samples"
"""Folder of the samples in a run directory."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Describes a mistake or a problem of a run."""

    cause: str
    """Short name of the cause."""
    evidence: str
    """Where it shows, with numbers."""
    remedy: str
    """What to try."""
    confidence: float
    """From 0 to 1; 1 if the numbers are contradictory."""
    collection: int = -1
    """First collection that shows it; -1 if it is not known."""
    severity: Literal["error", "warning"] = "error"
    """``error`` for what is certainly a mistake, ``warning`` for what may be intended."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds some turns of one collection, all of one environment or group, in the order ``(time, env)``.

    Arrays have the shape ``(turn,)`` or, for the tokens of responses, ``(turn, token)``. Positions after the end of a
    response are padding.
    """

    collection: int
    """Index of the collection in the run."""
    settings: Mapping[str, Any]
    """Settings on which the numbers depend, such as the class of the algorithm and its estimator of advantages.

    Some are recorded of the whole collection, of the environment or of the updates:

    - ``starts``, a hash of the first observation of each episode, or of one episode per group; ``separate_starts``, how
      many resets of a separate environment, or rows of the data set, have each start state (``counts``), and whether
      these are all that there are (``all``);
    - ``numbers``, how the numbers of an observation are written, see
      :func:`lrl.training.environment_facts.number_format`;
    - ``misread``, made-up responses that the codec reads in another way than its documentation says; ``wrong_texts``,
      ``wrong_q_values`` and ``wrong_actions``, numbers of rows of a data set, see
      :mod:`lrl.training.environment_facts`;
    - ``left_gradient``, the largest gradient before the first backward pass of a minibatch; ``gradient_error``,
      ``gradient_factor`` and ``token_weights``, the comparison of the gradient of one minibatch with that of another
      backward pass, see :func:`lrl.training.recomputed.compared_gradients`; ``step_error`` and ``step_factor``, the
      same for the optimiser step, see :func:`lrl.training.recomputed.compared_step`;
    - ``norms``, the norm of the gradients of that step before and after clipping; ``order``, ``recorded`` or
      ``repeated`` if the minibatches of a pass have the turns in the order of the collection or of the pass before;
    - ``stop_kl``, the divergence of the minibatch after which the remaining ones are skipped, or of the last one, and
      ``stopped``, whether any are skipped.
    """
    observations: Sequence[str]
    """Observation of each turn; empty if it is not a text."""
    responses: Sequence[str]
    """Response of each turn, or its native action as a text."""
    pieces: Sequence[Sequence[str]]
    """Text of each token of the responses; empty for a policy that writes no text."""
    arrays: Mapping[str, np.ndarray]
    """Arrays by name:

    - ``(turn,)``: ``env``, ``time`` and ``group``, int64; ``turn``, the index of the turn in its episode;
      ``rewards`` and ``final_values``, float64; ``terminated``, ``truncated`` and ``cut``, bool;
    - ``(turn,)``: ``by_index``, bool, whether the environment was chosen by its index, and not because an episode was
      cut;
    - ``(turn, 3)``: ``origin``, see :attr:`lrl.types.Rollout.origin`;
    - ``(turn,)``, only if the environment reports them: ``valid``, whether the response was a legal action, and
      ``success``, NaN except at the end of an episode;
    - ``(turn,)``, NaN for turns that were not played again in a new environment: ``replay_rewards``,
      ``replay_terminated`` and ``replay_truncated``; ``replay_valid``, whether the response is a legal action;
      ``replay_observed``, whether the observation was the same; ``replay_repeats``, whether playing them a second time
      gave the same results; ``replay_native``, ``(turn, number)``, the native observation, if it consists of numbers;
      and ``replay_final_values``, the value of the state after a turn that is cut; ``unreset``, whether the first
      observation of an episode is that after the last turn of the one before, and not that of a reset;
    - ``(turn, token)``: ``ids``, int64; ``mask``, bool, the tokens on which the policy is trained; ``logprobs``, those
      that were recorded while sampling; ``advantages``; ``gradients``, the derivative of the loss with respect to the
      log-probability of the token;
    - only if they exist: ``values`` and ``returns``, the predictions and targets of the critic; ``ref_logprobs``;
    - derivatives of the loss with respect to the log-probability of a token without the entropy bonus and the KL term:
      ``surrogate`` at ratio 1, ``surrogate_above`` and ``surrogate_below`` with the log-probabilities of all tokens
      changed by :data:`lrl.diagnosis.losses.PROBE`; of the KL term, ``kl_gradients``, where the reference is less
      probable by :data:`lrl.diagnosis.losses.REFERENCE_PROBE`; of what depends on neither advantages nor the reference,
      ``offset_gradients``; with respect to entropy and value, ``entropy_gradients`` and ``value_gradients``;
    - ``moved``, how much the updates of the collection changed the log-probability of a token;
    - only for text: ``(turn,)``, bool, ``in_prompt``, whether the prompt contains the observation, ``with_system``,
      whether it contains the system message, ``decoded``, whether the response is the text of the sampled tokens, and
      ``names_action``, whether it contains the name of any action; ``named``, float64, whether the response is a legal
      action according to the documentation of the codec; int64, only if responses end with a text of several tokens,
      ``stopped_at``, the number of tokens up to its end;
    - ``evaluated``, ``entropy`` and ``evaluated_values``: log-probabilities, entropies and values that training
      computes before the first optimiser step; only for text, and NaN for turns for which they are not computed,
      ``plain_logprobs``, ``plain_entropy`` and ``plain_values``, by a separate forward pass for each turn,
      ``next_logprobs`` and ``previous_logprobs``, of the next and the previous token at the same position, and
      ``drawn``, int64, the tokens that its distributions give with the random numbers of sampling, -1 where they are
      not computed;
    - ``drawn_by``, bool ``(turn, key)``, whether the tokens of the turn are those that the keys of random numbers in
      ``settings["random_keys"]`` give; the first keys are the right ones, and the others, whose names say what they do
      not depend on, are only tried for turns with other tokens.
    """

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by name."""
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __len__(self) -> int:
        return len(self.arrays["env"])

    @property
    def number(self) -> int:
        """Number of the collection in messages, which count from 1."""
        return self.collection + 1

    def envs(self) -> list[np.ndarray]:
        """Return the indices of the turns of each environment, in the order of time."""
        return [np.flatnonzero(self["env"] == env) for env in np.unique(self["env"])]

    def finding(
        self, cause: str, evidence: str, remedy: str, confidence: float = 1.0, warning: bool = False
    ) -> Finding:
        """Return a finding of this collection."""
        severity = "warning" if warning else "error"
        return Finding(
            cause=cause,
            evidence=evidence,
            remedy=remedy,
            confidence=confidence,
            collection=self.collection,
            severity=severity,
        )

    def place(self, turn: int, token: int | None = None) -> str:
        """Return a description of a turn, or of one of its tokens, for a message."""
        where = f"collection {self.number}, environment {self['env'][turn]}, turn {self['turn'][turn]}"
        if token is None:
            return where
        pieces = self.pieces[turn] if len(self.pieces) else []
        return f"{where}, token {token}" + (f" ({pieces[token]!r})" if token < len(pieces) else "")


def write_sample(sample: Sample, run: Path) -> Path:
    """Write a sample into a run directory, and return the path of its file."""
    path = run / FOLDER / f"{sample.collection:06d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        "collection": sample.collection,
        "settings": dict(sample.settings),
        "observations": list(sample.observations),
        "responses": list(sample.responses),
        "pieces": [list(one) for one in sample.pieces],
    }
    with path.with_suffix(".tmp").open("wb") as file:
        arrays: Any = {"texts": np.array(json.dumps(texts)), **sample.arrays}
        np.savez_compressed(file, **arrays)
    path.with_suffix(".tmp").replace(path)
    return path


def read_samples(run: Path) -> list[Sample]:
    """Return the samples of a run, in the order of their collections.

    Raises:
        ValueError: If a file cannot be read.
    """
    samples = []
    for path in sorted((run / FOLDER).glob("*.npz")):
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            texts = json.loads(str(arrays.pop("texts")))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"run is {str(run)!r}, whose file {path.name} cannot be read or is damaged.") from error
        samples.append(Sample(arrays=arrays, **texts))
    return samples
