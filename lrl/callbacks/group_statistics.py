"""Statistics of each group of a collection: the first place to look when a policy does not learn."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L

from lrl.policies.policy import Policy
from lrl.types import Rollout

_FIELDS: tuple[str, ...] = ("collection", "state", "episodes", "return_mean", "return_std", "action_entropy", "actions")


class GroupStatistics(L.Callback):
    """Writes a row per collection and initial state to ``groups.csv`` in the run directory.

    A group in which all episodes take the same wrong action has ``return_std`` 0 and no gradient; if its
    ``action_entropy`` stays near 0, the right action is no longer sampled. Columns: ``collection``; ``state``, the
    first line of the initial observation; ``episodes`` from that state; mean and standard deviation of their returns;
    entropy in nats of the first actions, and their frequencies. Groups with the same initial state share a row; only
    groups of the first rank are written.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Append a row for each initial state of the collection that was just trained on."""
        rollout = getattr(getattr(trainer, "datamodule", None), "rollout", None)
        if rollout is None or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "groups.csv"
        new_file = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _FIELDS)
            if new_file:
                writer.writeheader()
            for row in group_rows(rollout, getattr(pl_module, "policy", None)):
                writer.writerow({"collection": trainer.current_epoch} | row)


def group_rows(rollout: Rollout, policy: Policy | None) -> Iterator[dict[str, str | int | float]]:
    """Iterate over one row per initial state, in order of appearance.

    Args:
        rollout: complete episodes, ``(time, env)``.
        policy: its codec and response format parse the actions; a response without a legal action counts as
            ``invalid``. None counts the responses themselves.
    """
    members: dict[str, list[int]] = {}
    for env, observation in enumerate(rollout.observations[0]):
        members.setdefault(str(observation).strip().split("\n", 1)[0], []).append(env)
    for state, envs in members.items():
        returns = rollout.returns[envs]
        actions = Counter(_action_text(policy, rollout.responses[0][env]) for env in envs)
        frequencies = {action: count / len(envs) for action, count in sorted(actions.items())}
        yield {
            "state": state,
            "episodes": len(envs),
            "return_mean": round(float(returns.mean()), 4),
            "return_std": round(float(returns.std(correction=0)), 4),
            "action_entropy": round(-sum(p * math.log(p) for p in frequencies.values()), 4),
            "actions": " ".join(f"{action}={frequency:.3f}" for action, frequency in frequencies.items()),
        }


def _action_text(policy: Policy | None, response: Any) -> str:
    if not isinstance(response, str) or policy is None or policy.codec is None or policy.response_format is None:
        return str(response)
    return policy.action_text(response) or "invalid"
