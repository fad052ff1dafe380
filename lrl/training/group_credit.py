"""How the rewards of a rollout become advantages of its turns, for algorithms without a value function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from torch import Tensor

from lrl.functional.step_groups import grouped_gae, shared_states, step_advantages, turn_numbers
from lrl.ranges import ClosedUnitInterval, NonNegativeFloat, check_fields
from lrl.types import Rollout

_READ = {"episode": (), "turn": ("gamma",), "step": ("gamma", "step_weight"), "grouped_gae": ("gamma", "gae_lambda")}
"""The settings that each kind reads."""


@dataclass(frozen=True, kw_only=True)
class GroupCreditConfig:
    """How the turns of an episode get advantages over its group."""

    kind: Literal["episode", "turn", "step", "grouped_gae"] = "episode"
    """``episode``: all turns carry the advantage of their episode; ``turn``: the return from a turn on is compared with
    those of the group's turns of the same number; ``step``: the advantage of the episode, plus that over the turns of
    the group that observed the same state (GiGPO); ``grouped_gae``: GAE, where the mean return of these turns is the
    value of the state (GAGPO). See :mod:`lrl.functional.step_groups`."""
    gamma: ClosedUnitInterval = 0.95
    """Discount per turn of the returns of turns that are compared; ``episode`` and the episode's part of ``step`` are
    not discounted."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the advantage over turns in the same state, for ``step``."""
    gae_lambda: ClosedUnitInterval = 0.95
    """Per turn, for ``grouped_gae``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and field.name not in _READ[self.kind] and value != field.default:
                raise ValueError(
                    f"model.credit.{field.name} is {value}; it must be left out, {self.kind} credit does not read it."
                )

    @property
    def needs_states(self) -> bool:
        """Return whether turns are compared by what was observed before them."""
        return self.kind in ("step", "grouped_gae")

    def check_baseline(self, leave_one_out: bool) -> None:
        """Raise if the baseline of an episode cannot leave out the episode itself.

        Raises:
            ValueError: so it is.
        """
        if leave_one_out and self.kind == "grouped_gae":
            raise ValueError(
                "model.leave_one_out is true; it must be false, grouped_gae credit has values in place of a baseline."
            )

    def estimate(
        self,
        rollout: Rollout,
        episode_advantages: Tensor,
        scale: str,
        leave_one_out: bool = False,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the advantages of a rollout's turns, ``(time, env)``, 0 where inactive.

        Args:
            rollout: each environment has played one whole episode; ``state`` is there if ``needs_states``.
            episode_advantages: ``(env,)``, of the episodes over their groups.
            scale: what centred returns are divided by, see :func:`~lrl.functional.advantages.group_advantages`.
            leave_one_out: whether a baseline leaves out the turn itself.
            reduce: sums a tensor over ranks, each of which holds whole groups; None is for one rank.
        """
        if self.kind == "episode":
            return episode_advantages * rollout.active
        compared = turn_numbers(rollout.active) if self.kind == "turn" else _states(rollout)
        turns = (rollout.rewards, compared, rollout.group, rollout.active)
        if self.kind == "grouped_gae":
            discounts = {"gamma": self.gamma, "gae_lambda": self.gae_lambda}
            return grouped_gae(*turns, rollout.terminated, **discounts, scale=scale, reduce=reduce)
        options = {"scale": scale, "leave_one_out": leave_one_out}
        steps = step_advantages(*turns, gamma=self.gamma, **options, reduce=reduce)
        return steps if self.kind == "turn" else episode_advantages * rollout.active + self.step_weight * steps

    def metrics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return what tells whether states can be compared, to be logged by name; empty unless ``needs_states``."""
        if not self.needs_states:
            return {}
        return {"rollout/shared_state_rate": shared_states(_states(rollout), rollout.group, rollout.active)}


def _states(rollout: Rollout) -> Tensor:
    assert rollout.state is not None
    return rollout.state
