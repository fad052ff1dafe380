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
from lrl.envs.rows import RowSource
from lrl.functional.random import counter_hash
from lrl.policies.text import TextPolicy
from lrl.types import PastTurn


class Demonstrations(ABC):
    """A source of demonstrations."""

    @abstractmethod
    def turns(self, codec: TextCodec, policy: TextPolicy) -> Sequence[PastTurn]:
        """Observations with the answers that should be given to them.

        Args:
            codec: the text of the environment that they are of.
            policy: writes answers in its format; its model need not be there yet.
        """


class ExpertDemonstrations(Demonstrations):
    """The best action of every row, one answer each; among equally good actions one is drawn per row.

    Args:
        rows: states with expert Q-values.
        reasoning: written before the action where the format asks for it, one drawn per answer; ``{seen}`` stands for
            the observation's first line.
        repeat: how many answers per row, with ties drawn anew.
        seed: of the draws.
    """

    def __init__(
        self, rows: RowSource, reasoning: Sequence[str] = ("I see {seen}, I choose",), repeat: int = 1, seed: int = 0
    ) -> None:
        if repeat < 1:
            raise ValueError(f"demonstrations.repeat is {repeat}; it must be at least 1.")
        if not reasoning:
            raise ValueError('demonstrations.reasoning is []; it must hold at least one text, [""] writes none.')
        self.rows, self.reasoning, self.repeat, self.seed = rows, tuple(reasoning), repeat, seed

    def turns(self, codec: TextCodec, policy: TextPolicy) -> list[PastTurn]:
        """One turn per row and repetition."""
        rows = self.rows.rows()
        draws = counter_hash("demonstration", self.seed, np.arange(len(rows) * self.repeat))
        turns = []
        for index, draw in enumerate(draws.tolist()):
            row = rows[index % len(rows)]
            best = row.best_actions
            text = codec.action_to_text(best[draw % len(best)])
            thought = self.reasoning[(draw >> 32) % len(self.reasoning)]
            seen = row.observation.partition("\n")[0]
            turns.append(PastTurn(row.observation, policy.write(text, thought.replace("{seen}", seen))))
        return turns


class JsonlDemonstrations(Demonstrations):
    """One JSON object per line: what was seen, and what was answered.

    What was seen stands under ``observation`` or ``prompt``. An answer stands under ``response`` as it is, or its
    action under ``action``, with or without ``<action>`` tags, and what was thought under ``reasoning``: these are put
    into the policy's format. The original's files, ``{"observation": ..., "action": ...}``, are such files.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def turns(self, codec: TextCodec, policy: TextPolicy) -> list[PastTurn]:
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

    def _turn(self, number: int, line: str, codec: TextCodec, policy: TextPolicy) -> PastTurn:
        try:
            record = json.loads(line)
            seen = _text(record, "observation", "prompt")
            if "response" in record:
                return PastTurn(seen, _text(record, "response"))
            action = codec.text_to_action(_ACTION_TAGS.sub("", _text(record, "action", "response")))
            return PastTurn(seen, policy.write(codec.action_to_text(action), record.get("reasoning", "")))
        except InvalidActionError as error:
            raise ValueError(f"{self.path}, line {number}: action is {record['action']!r}; {error}.") from error
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number}: it must be a JSON object, {error}.") from error
        except LookupError as error:
            raise ValueError(f"{self.path}, line {number}: {error.args[0]}.") from error


_ACTION_TAGS = re.compile(r"^\s*<action>|</action>\s*$")


def _text(record: dict[str, Any], *keys: str) -> str:
    """The text under the first of ``keys`` that is there."""
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise LookupError(f"{key} is {record[key]!r}; it must be a text")
            return record[key]
    raise LookupError(f"it has no {' or '.join(keys)}; it has {', '.join(record) or 'nothing'}")
