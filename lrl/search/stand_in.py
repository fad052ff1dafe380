"""Chat model without a language model, for trials and tests of prompted search."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

import numpy as np

from lrl.chat.model import ChatModel, Completion, Message
from lrl.registry import register
from lrl.types import SamplingConfig

_SCALE, _SHARE = 1.0, 0.5
"""Standard deviation of the change of a real parameter, and probability that a parameter is changed."""
_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
_INDEXED = re.compile(rf"^(params\[0\]: .*); f\(params\): ({_NUMBER})", re.MULTILINE)
_COMPACT = re.compile(rf"^((?:{_NUMBER} )+)= ({_NUMBER})", re.MULTILINE)
_SIZE = re.compile(r"params has (\d+) entries")
_RANGE = re.compile(rf"number from ({_NUMBER}) to ({_NUMBER})")
_ACTIONS = re.compile(r"one of ((?:-?\d+, )*-?\d+)\.")


@register
@final
class HillClimbingChatModel(ChatModel):
    """Chat model that replies with the best parameters in the prompt, of which it changes some at random.

    Like a language model, it only reads the prompt. Its results say nothing about language models.
    """

    name = "hill-climbing stand-in"

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one reply to each conversation, which depends on the last message and the seed only."""
        return [self._reply(messages[-1]["content"], seed) for messages, seed in zip(conversations, seeds, strict=True)]

    def _reply(self, prompt: str, seed: int) -> Completion:
        rng, sized = np.random.default_rng(seed), _SIZE.search(prompt)
        if sized is None:
            raise ValueError(
                "searcher.history.style is integers, which the hill-climbing stand-in does not read; it must be "
                "indexed or compact."
            )
        actions, limits = _ACTIONS.search(prompt), _RANGE.search(prompt)
        tried = [(float(value), _values(line)) for line, value in _INDEXED.findall(prompt) + _COMPACT.findall(prompt)]
        if not tried:
            values = np.full(int(sized[1]), float(actions[1].split(",")[0]) if actions else 0.0)
        else:
            values = np.array(max(tried, key=lambda one: one[0])[1])
        changed = rng.random(len(values)) < _SHARE
        changed[rng.integers(len(values))] = True
        if actions is not None:
            legal = np.array([int(action) for action in actions[1].split(",")])
            values[changed] = rng.choice(legal, changed.sum())
            texts = [str(int(value)) for value in values]
        else:
            assert limits is not None, "the prompt says what is legal"
            values[changed] += rng.normal(0.0, _SCALE, changed.sum())
            texts = [f"{value:.1f}" for value in np.clip(values, float(limits[1]), float(limits[2]))]
        named = ", ".join(f"params[{index}]: {text}" for index, text in enumerate(texts))
        text = f"{named}\nI changed {changed.sum()} of the best parameters so far."
        return Completion(
            text=text, finish_reason="stop", prompt_tokens=len(prompt.split()), completion_tokens=len(text.split())
        )


def _values(line: str) -> list[float]:
    """Return the parameters in a line of the history."""
    return [float(number) for number in re.findall(_NUMBER, re.sub(r"params\[\d+\]:", "", line))]
