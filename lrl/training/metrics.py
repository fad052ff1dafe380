"""Means and maxima of metrics over a collection and over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.functional.distributed import all_gather_objects

State = dict[str, tuple[float, int]]
"""For each name the sum and the number of recorded values, or the maximum and 0; empty if nothing was recorded."""

_PENDING = 500
"""Maximum number of records whose values stay on their device; they are read together, because reading waits for it."""


class MetricMeans:
    """Computes means or maxima by name, over all ranks, of the values recorded since the last :meth:`flush`.

    All recorded values have the same weight in a mean, whatever their rank and minibatch.
    """

    def __init__(self) -> None:
        self._totals: State = {}
        self._recorded: list[tuple[str, Tensor, int]] = []
        """Records since the last :meth:`settle`: name, sum and number of values, or name, maximum and 0."""
        self._settled: list[tuple[str, Tensor, int]] = []
        """Settled records whose values have not been read from their device yet."""

    def record(self, name: str, values: Tensor) -> None:
        """Record values of any shape for a mean; they take effect at the next :meth:`settle`."""
        if values.numel():
            self._recorded.append((name, values.detach().sum(dtype=torch.float64), values.numel()))

    def record_maximum(self, name: str, values: Tensor) -> None:
        """Record values of any shape for a maximum; they take effect at the next :meth:`settle`."""
        if values.numel():
            self._recorded.append((name, values.detach().max().double(), 0))

    def settle(self) -> None:
        """Let the recorded values take effect."""
        self._settled.extend(self._recorded)
        self._recorded.clear()
        if len(self._settled) > _PENDING:
            self.state()

    def state(self) -> State:
        """Return the settled records of this rank."""
        settled, self._settled = self._settled, []
        device = next((value.device for _, value, _ in settled if value.device.type != "cpu"), "cpu")
        values = torch.stack([value.to(device) for _, value, _ in settled]).tolist() if settled else []
        for (name, _, count), value in zip(settled, values, strict=True):
            _add(self._totals, name, value, count)
        return dict(self._totals)

    def load(self, state: State) -> None:
        """Restore the result of :meth:`state`."""
        self.reset()
        self._totals.update(state)

    def flush(self) -> dict[str, float]:
        """Return the means and maxima, and reset them; all ranks must call it, even if they recorded nothing."""
        self.settle()
        totals: State = {}
        for state in all_gather_objects(self.state()):
            for name, (value, count) in state.items():
                _add(totals, name, value, count)
        self.reset()
        return {name: value / max(count, 1) for name, (value, count) in sorted(totals.items())}

    def reset(self) -> None:
        """Drop all records."""
        for records in (self._totals, self._recorded, self._settled):
            records.clear()


def _add(totals: State, name: str, value: float, count: int) -> None:
    """Add a sum of ``count`` values to the total of a name, or, if ``count`` is 0, a maximum."""
    if count == 0:
        totals[name] = max(totals.get(name, (value, 0))[0], value), 0
    else:
        total, number = totals.get(name, (0.0, 0))
        totals[name] = total + value, number + count
