"""Where demonstrations come from."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import RowSource
from lrl.functional.random import counter_hash
from lrl.policies.text import TextPolicy
from lrl.types import Demonstration


class Demonstrations(ABC):
    """A source of demonstrations."""

    def prepare(self) -> None:  # noqa: B027 (most sources have nothing to fetch)
        """Fetch what is not here. Called once per machine, before anything else; what fails, :meth:`turns` says."""

    def check(self, env: EnvFactory) -> None:  # noqa: B027 (nor to compare)
        """Whether they can be of this environment; called before :meth:`turns`.

        Raises:
            ValueError: they cannot.
        """

    @abstractmethod
    def turns(self, codec: TextCodec, policy: TextPolicy) -> Sequence[Demonstration]:
        """Observations with the answers that should be given to them.

        Args:
            codec: the text of the environment that they are of.
            policy: writes answers in its format; its model need not be there yet.
        """


class StreamedTurns(Sequence[Demonstration]):
    """Demonstrations that are not all in memory, in an order that reads each part once per pass."""

    @abstractmethod
    def shuffled(self, seed: int, epoch: int) -> np.ndarray:
        """Every place once, int64 ``(turn,)``."""


class Reasoning:
    """What is written before an action, where the format asks for it.

    Args:
        texts: of which one is drawn per answer; ``{seen}`` stands for the codec's gist of the observation, ``{action}``
            for the action.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not texts:
            raise ValueError('demonstrations.reasoning is []; it must hold at least one text, [""] writes none.')
        self.texts = tuple(texts)

    def answer(self, policy: TextPolicy, codec: TextCodec, observation: str, action_text: str, draw: int) -> str:
        """An answer in the policy's format; ``draw`` picks the text."""
        thought = self.texts[draw % len(self.texts)].replace("{action}", action_text)
        return policy.write(action_text, thought.replace("{seen}", codec.summary(observation)))


class ExpertDemonstrations(Demonstrations):
    """The best action of every row, one answer each; among equally good actions one is drawn per row.

    Args:
        rows: states with expert Q-values.
        reasoning: written before the action where the format asks for it, one drawn per answer; ``{seen}`` stands for
            the codec's gist of the observation, ``{action}`` for the action.
        repeat: how many answers per row, with ties drawn anew.
        seed: of the draws.
    """

    def __init__(
        self, rows: RowSource, reasoning: Sequence[str] = ("I see {seen}, I choose",), repeat: int = 1, seed: int = 0
    ) -> None:
        if repeat < 1:
            raise ValueError(f"demonstrations.repeat is {repeat}; it must be at least 1.")
        self.rows, self.reasoning, self.repeat, self.seed = rows, Reasoning(reasoning), repeat, seed

    def turns(self, codec: TextCodec, policy: TextPolicy) -> list[Demonstration]:
        """One turn per row and repetition."""
        rows = self.rows.rows()
        draws = counter_hash("demonstration", self.seed, np.arange(len(rows) * self.repeat))
        turns = []
        for index, draw in enumerate(draws.tolist()):
            row = rows[index % len(rows)]
            best = row.best_actions
            text = codec.action_to_text(best[draw % len(best)])
            response = self.reasoning.answer(policy, codec, row.observation, text, draw >> 32)
            turns.append(Demonstration(row.observation, response))
        return turns


class JsonlDemonstrations(Demonstrations):
    """One JSON object per line: what was seen, and what was answered.

    What was seen stands under ``observation``, with or without ``<observation>`` tags, or as it is under ``prompt``. An
    answer stands under ``response`` as it is, or its action under ``action``, with or without ``<action>`` tags, and
    what was thought under ``reasoning``: these are put into the policy's format, and tags are there exactly where the
    environment writes them. An action of finitely many may also be its number in the action space. The original's
    files, ``{"observation": ..., "action": ...}``, are such files.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def turns(self, codec: TextCodec, policy: TextPolicy) -> list[Demonstration]:
        """All lines but empty ones.

        Raises:
            ValueError: the file is missing or empty, or a line is not such an object, or its action is not legal.
        """
        try:
            lines = Path(self.path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"demonstrations.path is {self.path!r}, which cannot be read as text: {error}.") from error
        turns = [self._turn(number, line, codec, policy) for number, line in enumerate(lines, 1) if line.strip()]
        if not turns:
            raise ValueError(f"demonstrations.path is {self.path!r}, which holds no demonstrations; it must hold some.")
        return turns

    def _turn(self, number: int, line: str, codec: TextCodec, policy: TextPolicy) -> Demonstration:
        try:
            record = json.loads(line)
            seen = _text(record, "observation", "prompt")
            if "observation" in record and not codec.tags_observations:
                seen = _OBSERVATION_TAGS.sub("", seen)
            if "response" in record:
                return Demonstration(seen, _text(record, "response"))
            action = _action(codec, _text(record, "action", "response"))
            return Demonstration(seen, policy.write(codec.action_to_text(action), record.get("reasoning", "")))
        except InvalidActionError as error:
            raise ValueError(f"{self.path}, line {number}: action is {record['action']!r}; {error}.") from error
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number}: it must be a JSON object, {error}.") from error
        except LookupError as error:
            raise ValueError(f"{self.path}, line {number}: {error.args[0]}.") from error


_ACTION_TAGS = re.compile(r"^\s*<action>|</action>\s*$")
_DIGITS = re.compile(r"\s*-?[0-9]{1,18}\s*")
_OBSERVATION_TAGS = re.compile(r"^\s*<observation>|</observation>\s*$")


def _action(codec: TextCodec, text: str) -> Any:
    """A native action; numbers stand in tags, as the environment wants them, and words may.

    Where actions are words, their numbers in the action space will do as well.
    """
    bare = _ACTION_TAGS.sub("", text)
    words = codec.action_texts or ()
    if _DIGITS.fullmatch(bare) and bare not in words and int(bare) in map(codec.text_to_action, words):
        return int(bare)
    try:
        return codec.text_to_action(text)
    except InvalidActionError:
        return codec.text_to_action(bare)


def _text(record: dict[str, Any], *keys: str) -> str:
    """The text under the first of ``keys`` that is there."""
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise LookupError(f"{key} is {record[key]!r}; it must be a text")
            return record[key]
    raise LookupError(f"it has no {' or '.join(keys)}; it has {', '.join(record) or 'nothing'}")
