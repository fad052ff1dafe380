"""Means of what a collection records."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lrl.functional.sharding import gather_ranks


class Meters:
    """Means by name, over all ranks, of what was recorded since they were last asked for."""

    def __init__(self) -> None:
        self._means: dict[str, MeanMetric] = {}
        self._recorded: list[tuple[str, Tensor]] = []

    def record(self, name: str, values: Tensor) -> None:
        """Add values of any shape, which count from the next :meth:`settle` on."""
        self._recorded.append((name, values.detach().float()))

    def settle(self, device: torch.device) -> None:
        """Count what was recorded."""
        for name, values in self._recorded:
            meter = self._meter(name, device)
            if values.numel():
                meter.update(values.to(device))
        self._recorded.clear()

    def flush(self, device: torch.device) -> dict[str, float]:
        """The means; all is forgotten. All ranks must call it, whatever each has recorded."""
        self.settle(device)
        names = sorted(set().union(*gather_ranks(set(self._used()))))
        for name in names:
            self._add(name, torch.zeros(()), torch.zeros(()), device)  # a rank without values takes part in the sum
        means = {name: float(self._means[name].compute()) for name in names}
        for meter in self._means.values():
            meter.reset()
        return means

    def state(self) -> dict[str, list[Tensor]]:
        """Weighted sum and weight by name, on this rank."""
        return {name: [meter.mean_value.cpu(), meter.weight.cpu()] for name, meter in self._used().items()}

    def load(self, state: dict[str, list[Tensor]], device: torch.device) -> None:
        """Add what :meth:`state` returned."""
        for name, (total, weight) in state.items():
            self._add(name, total, weight, device)

    def _used(self) -> dict[str, MeanMetric]:
        return {name: meter for name, meter in self._means.items() if meter.update_called}

    def _meter(self, name: str, device: torch.device) -> MeanMetric:
        meter = self._means.setdefault(name, MeanMetric())
        return meter if meter.device == device else meter.to(device)

    def _add(self, name: str, total: Tensor, weight: Tensor, device: torch.device) -> None:
        meter = self._meter(name, device)
        meter.update(0.0, weight=0.0)
        meter.mean_value = meter.mean_value + total.to(device)
        meter.weight = meter.weight + weight.to(device)
