"""The actor that remembers the greedy responses of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch

from lrl.policies.actor import Actor
from lrl.policies.wrapper import ActorWrapper
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

_CACHED = 20_000
"""Greedy responses after which the cache is emptied."""


@final
class ResponseCache(ActorWrapper):
    """Acts as a greedy policy does, but asks it only once for the same observation and history.

    Args:
        actor: its actions at temperature 0 depend on nothing else (``greedy_is_reproducible``).
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self._responses: dict[tuple[Any, History], tuple[Any, History]] = {}

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Return the greedy responses; no token counts as sampled."""
        if len(self._responses) > _CACHED:
            self._responses.clear()
        states = list(zip(observations, memory, strict=True))
        new = {state: row for row, state in enumerate(states) if state not in self._responses}
        if new:
            rows = list(new.values())
            some = replace(keys, env=keys.env[rows], turn=keys.turn[rows])
            decisions = self.actor.act([seen for seen, _ in new], [history for _, history in new], some, sampling)
            self._responses.update(zip(new, zip(decisions.actions, decisions.memory, strict=True), strict=True))
        responses, histories = zip(*(self._responses[state] for state in states), strict=True)
        none = torch.zeros(len(states), 0)
        return Decisions(actions=responses, inputs={}, response_mask=none.bool(), logprobs=none, memory=list(histories))
