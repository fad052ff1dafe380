"""Means and maxima of what a collection records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lrl.functional.distributed import all_gather_objects

State = dict[str, Any]
"""``names``, the tensors of :meth:`torchmetrics.Metric.state_dict` and ``maxima``; empty where nothing was recorded."""

_PENDING = 500
"""Records that wait until they are added to the states together."""


class MetricMeans(Metric):
    """Means or maxima by name, over all ranks, of what was recorded since they were last asked for.

    A mean weighs every recorded value alike, whichever rank and minibatch it comes from.

    One metric with a sum and a count per name, instead of one :class:`torchmetrics.MeanMetric` per name: those cost a
    tenth of a small network's training step. What is recorded stays on its device until the mean is asked for.
    """

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__(compute_with_cache=False)
        for state in ("totals", "counts"):
            self.add_state(state, torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")
        self._rows: dict[str, int] = {}
        """Where each name stands in the states."""
        self._maxima: dict[str, Tensor] = {}
        self._recorded: list[tuple[str, Tensor, int]] = []
        """Name, sum and number of values; for a maximum the number is 0."""
        self._settled: list[tuple[str, Tensor, int]] = []
        """What counts, and is not in the states yet: many minibatches are added at once."""

    def record(self, name: str, values: Tensor) -> None:
        """Add values of any shape, which count from the next :meth:`settle` on."""
        if values.numel():
            self._recorded.append((name, values.detach().sum(dtype=torch.float64), values.numel()))

    def record_maximum(self, name: str, values: Tensor) -> None:
        """Add values of any shape, of which the largest is returned, from the next :meth:`settle` on."""
        if values.numel():
            self._recorded.append((name, values.detach().max().double(), 0))

    def settle(self) -> None:
        """Count what was recorded."""
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
        """Add sums and numbers of values, ``(name,)``, one after the other; a name may stand there more than once."""
        missing = [name for name in dict.fromkeys(names) if name not in self._rows]
        self._rows.update((name, row) for row, name in enumerate(missing, len(self._rows)))
        rows = torch.tensor([self._rows[name] for name in names], dtype=torch.int64, device=self.device)
        nothing = self.totals.new_zeros(len(missing))
        self.totals = torch.cat([self.totals, nothing]).index_add(0, rows, totals)
        self.counts = torch.cat([self.counts, nothing]).index_add(0, rows, counts.to(self.counts))

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of each name, ``()``; torchmetrics has reduced the states over ranks before."""
        return dict(zip(self._rows, self.totals / self.counts, strict=True))

    def flush(self) -> dict[str, float]:
        """Return the means and maxima, and forget them. All ranks must call it, whatever each has recorded."""
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
        """Put the states into the order of ``names``, in which all ranks agree; what was not recorded counts 0."""
        own, totals, counts = list(self._rows), self.totals, self.counts
        nothing = totals.new_zeros(len(names))
        self.reset()
        self.update(names, nothing, nothing)
        self.update(own, totals, counts)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        """Move to another device; sums stay in double precision, whatever the weights are converted to."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor.new_empty(0)).device), exclude_state)

    def reset(self) -> None:
        """Forget everything that was recorded."""
        super().reset()
        self._rows.clear()
        self._maxima.clear()
        self._recorded.clear()
        self._settled.clear()

    def state(self) -> State:
        """Return what this rank has recorded, on the CPU."""
        self._add_settled()
        if not (self._rows or self._maxima):
            return {}
        self.persistent(True)  # not when the module that it belongs to is saved: a checkpoint holds every rank's
        tensors = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        self.persistent(False)
        maxima = {name: float(value) for name, value in self._maxima.items()}
        return {"names": list(self._rows), "tensors": tensors, "maxima": maxima}

    def load(self, state: State) -> None:
        """Take what :meth:`state` returned."""
        self.reset()
        if state:
            self.load_state_dict(state["tensors"])
            self.to(self.device)
            self._rows.update((name, row) for row, name in enumerate(state["names"]))
            for name, value in state["maxima"].items():
                self._maxima[name] = torch.tensor(value, dtype=torch.float64, device=self.device)
