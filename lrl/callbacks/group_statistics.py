"""What each group of a collection did: the first place to look when learning does not happen."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L

from lrl.codecs.codec import InvalidActionError
from lrl.prompts.response_format import get_response_format
from lrl.types import Rollout

_FIELDS: tuple[str, ...] = ("collection", "state", "episodes", "return_mean", "return_std", "action_entropy", "actions")


class GroupStatistics(L.Callback):
    """Writes a line per collection and starting state to ``groups.csv`` in the run directory.

    A group that agrees on a wrong action has ``return_std`` 0 and teaches nothing; where its ``action_entropy`` stays
    near 0, the right action is no longer sampled. Columns: ``collection``; ``state``, the first line of the first
    observation; ``episodes`` that began there; mean and standard deviation of their returns; entropy in nats of the
    first actions, and their shares. Several groups that begin in one state are one line. Only the first rank's groups.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Append the groups that were just trained on."""
        rollout = getattr(getattr(trainer, "datamodule", None), "rollout", None)
        if rollout is None or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "groups.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _FIELDS)
            if is_new:
                writer.writeheader()
            for line in group_lines(rollout, getattr(pl_module, "policy", None)):
                writer.writerow({"collection": trainer.current_epoch} | line)


def group_lines(rollout: Rollout, policy: Any) -> Iterator[dict[str, Any]]:
    """One line per starting state, in order of appearance.

    Args:
        rollout: of whole episodes, ``(time, env)``.
        policy: its codec and response format parse the actions; a response that is no action counts as ``invalid``.
    """
    members: dict[str, list[int]] = {}
    for env, observation in enumerate(rollout.observations[0]):
        members.setdefault(str(observation).strip().split("\n", 1)[0], []).append(env)
    for state, envs in members.items():
        returns = rollout.returns[envs]
        actions = Counter(_action(policy, rollout.responses[0][env]) for env in envs)
        shares = {action: count / len(envs) for action, count in sorted(actions.items())}
        yield {
            "state": state,
            "episodes": len(envs),
            "return_mean": round(float(returns.mean()), 4),
            "return_std": round(float(returns.std(correction=0)), 4),
            "action_entropy": round(-sum(share * math.log(share) for share in shares.values()), 4),
            "actions": " ".join(f"{action}={share:.3f}" for action, share in shares.items()),
        }


def _action(policy: Any, response: Any) -> str:
    if not isinstance(response, str) or policy.response_format is None:
        return str(response)
    try:
        return policy.codec.action_to_text(
            policy.codec.text_to_action(get_response_format(policy.response_format).extract(response))
        )
    except InvalidActionError:
        return "invalid"
