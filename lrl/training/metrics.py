"""Means and maxima of metrics over a collection and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lrl.functional.distributed import all_gather_objects

State = dict[str, Any]
"""``names``, ``tensors`` (of :meth:`torchmetrics.Metric.state_dict`) and ``maxima``; empty if nothing was recorded."""

_PENDING = 500
"""Number of records that are buffered before they are added to the states together."""


class MetricMeans(Metric):
    """Computes means or maxima by name, over all ranks, of the values recorded since the last :meth:`flush`.

    All recorded values have the same weight in a mean, whatever their rank and minibatch.

    It is one metric with a sum and a count per name, because one :class:`torchmetrics.MeanMetric` per name takes a
    tenth of a small network's training step. Recorded values stay on their device until :meth:`flush`.
    """

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__(compute_with_cache=False)
        for state in ("totals", "counts"):
            self.add_state(state, torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")
        self._rows: dict[str, int] = {}
        """Index of each name in the states."""
        self._maxima: dict[str, Tensor] = {}
        self._recorded: list[tuple[str, Tensor, int]] = []
        """Name, sum and number of values recorded since the last :meth:`settle`; for a maximum the number is 0."""
        self._settled: list[tuple[str, Tensor, int]] = []
        """Settled records that are not yet in the states, because many minibatches are added at once."""

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
            self._add_settled()

    def _add_settled(self) -> None:
        for name, value, _ in (record for record in self._settled if record[2] == 0):
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
        settled = [record for record in self._settled if record[2] > 0]
        self._settled.clear()
        if settled:
            names, totals, counts = zip(*settled, strict=True)
            self.update(names, torch.stack([total.to(self.device) for total in totals]), torch.tensor(counts))

    def update(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Add sums and numbers of values, ``(name,)``; a name may occur more than once."""
        missing = [name for name in dict.fromkeys(names) if name not in self._rows]
        self._rows.update((name, row) for row, name in enumerate(missing, len(self._rows)))
        rows = torch.tensor([self._rows[name] for name in names], dtype=torch.int64, device=self.device)
        nothing = self.totals.new_zeros(len(missing))
        self.totals = torch.cat([self.totals, nothing]).index_add(0, rows, totals)
        self.counts = torch.cat([self.counts, nothing]).index_add(0, rows, counts.to(self.counts))

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each name, ``()``, after torchmetrics has reduced the states over ranks."""
        return dict(zip(self._rows, self.totals / self.counts, strict=True))

    def flush(self) -> dict[str, float]:
        """Return the means and maxima, and reset them; all ranks must call it, even if they recorded nothing."""
        self.settle()
        self._add_settled()
        own_maxima = {name: float(value) for name, value in self._maxima.items()}
        ranks = all_gather_objects((list(self._rows), own_maxima))
        names = sorted(set().union(*(rows for rows, _ in ranks)))
        maxima: dict[str, float] = {}
        for name, value in (item for _, items in ranks for item in items.items()):
            maxima[name] = max(maxima.get(name, value), value)
        means: dict[str, float] = {}
        if names:
            self._arrange(names)
            means = {name: float(mean) for name, mean in self.compute().items()}
        self.reset()
        return means | maxima

    def _arrange(self, names: list[str]) -> None:
        """Reorder the states to ``names``, which is the same on all ranks; names without records get count 0."""
        own, totals, counts = list(self._rows), self.totals, self.counts
        nothing = totals.new_zeros(len(names))
        self.reset()
        self.update(names, nothing, nothing)
        self.update(own, totals, counts)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        """Move to another device without converting the double-precision sums."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor.new_empty(0)).device), exclude_state)

    def reset(self) -> None:
        """Drop all records."""
        super().reset()
        self._rows.clear()
        self._maxima.clear()
        self._recorded.clear()
        self._settled.clear()

    def state(self) -> State:
        """Return the records of this rank, on the CPU."""
        self._add_settled()
        if not (self._rows or self._maxima):
            return {}
        self.persistent(True)  # only here: checkpoints store these states of every rank, not the module's own
        tensors = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        self.persistent(False)
        maxima = {name: float(value) for name, value in self._maxima.items()}
        return {"names": list(self._rows), "tensors": tensors, "maxima": maxima}

    def load(self, state: State) -> None:
        """Restore the result of :meth:`state`."""
        self.reset()
        if state:
            self.load_state_dict(state["tensors"])
            self.to(self.device)
            self._rows.update((name, row) for row, name in enumerate(state["names"]))
            for name, value in state["maxima"].items():
                self._maxima[name] = torch.tensor(value, dtype=torch.float64, device=self.device)
