"""Means of what a collection records."""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.functional.sharding import gather_ranks

State = dict[str, list[Tensor]]
"""Sum and number of what was recorded, by name."""


class Meters:
    """Means by name, over all ranks, of what was recorded since they were last asked for.

    What is recorded in every training step must cost next to nothing: a sum, which stays on its device until the mean
    is asked for.
    """

    def __init__(self) -> None:
        self._counted: dict[str, tuple[Tensor, int]] = {}
        self._recorded: list[tuple[str, Tensor, int]] = []

    def record(self, name: str, values: Tensor) -> None:
        """Add values of any shape, which count from the next :meth:`settle` on."""
        if values.numel():
            self._recorded.append((name, values.detach().sum(dtype=torch.float64), values.numel()))

    def settle(self) -> None:
        """Count what was recorded."""
        for name, total, count in self._recorded:
            before = self._counted.get(name)
            self._counted[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        self._recorded.clear()

    def flush(self) -> dict[str, float]:
        """The means; all is forgotten. All ranks must call it, whatever each has recorded."""
        self.settle()
        ranks = gather_ranks(self.state())
        self._counted.clear()
        names = sorted(set().union(*ranks))
        parts = {name: [rank[name] for rank in ranks if name in rank] for name in names}
        return {name: float(sum(p[0] for p in part) / sum(p[1] for p in part)) for name, part in parts.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._counted.clear()
        self._recorded.clear()

    def state(self) -> State:
        """What counts on this rank."""
        return {name: [total.cpu(), torch.tensor(count)] for name, (total, count) in self._counted.items()}

    def load(self, state: State) -> None:
        """Take what :meth:`state` returned."""
        self._counted = {name: (total, int(count)) for name, (total, count) in state.items()}
