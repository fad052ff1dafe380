"""Transcripts of complete episodes, as JSON Lines and as readable text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L

from lrl.ranges import PositiveInt, check_arguments
from lrl.types import Rollout


class Transcripts(L.Callback):
    """Writes some episodes of every n-th collection to ``transcripts.jsonl`` and ``transcripts.txt``.

    Args:
        every_n_collections: the number n.
        episodes: number of episodes per collection.
    """

    def __init__(self, every_n_collections: PositiveInt = 10, episodes: PositiveInt = 4) -> None:
        check_arguments(Transcripts.__init__, locals(), "Transcripts")
        self.every_n_collections, self.episodes = every_n_collections, episodes
        self._logged = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write episodes of the collection that was just trained on."""
        if trainer.current_epoch % self.every_n_collections or not trainer.is_global_zero:
            return
        rollout = getattr(getattr(trainer, "datamodule", None), "rollout", None)
        if rollout is None:
            if not self._logged:
                logging.getLogger("lrl").info("no transcripts: this run trains on demonstrations, not on rollouts")
            self._logged = True
            return
        write_episodes(Path(trainer.default_root_dir), trainer.current_epoch, rollout, self.episodes)


def write_episodes(folder: Path, collection: int, rollout: Rollout, limit: int) -> None:
    """Append up to ``limit`` episodes of ``rollout`` to the two files in ``folder``."""
    chosen = list(episodes_of(rollout, limit))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "transcripts.jsonl").open("a", encoding="utf-8") as lines:
        for episode in chosen:
            lines.write(json.dumps({"collection": collection} | episode, ensure_ascii=False) + "\n")
    with (folder / "transcripts.txt").open("a", encoding="utf-8") as page:
        for episode in chosen:
            page.write(readable(collection, episode))


def episodes_of(rollout: Rollout, limit: int) -> Iterator[dict[str, Any]]:
    """Iterate over the episodes of up to ``limit`` evenly spaced environments, as JSON objects.

    If episodes continue from one collection to the next, the first and the last of an environment may be incomplete.
    """
    num_envs = rollout.active.shape[1]
    for env in sorted({index * num_envs // limit for index in range(min(limit, num_envs))}):
        yield from _episodes_of_env(rollout, env)


def _episodes_of_env(rollout: Rollout, env: int) -> Iterator[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    times = rollout.active[:, env].nonzero()[:, 0].tolist()
    for time in times:
        turns.append(
            {
                "turn": int(rollout.turn[time, env]),
                "observation": rollout.observations[time][env],
                "response": str(rollout.responses[time][env]),  # may be a native action
                "reward": float(rollout.rewards[time, env]),
                "response_tokens": int(rollout.response_mask[time, env].sum()),
            }
        )
        terminated, truncated = bool(rollout.terminated[time, env]), bool(rollout.truncated[time, env])
        if terminated or truncated or time == times[-1]:
            yield {
                "env": env,
                "group": int(rollout.group[env]),
                "return": sum(turn["reward"] for turn in turns),
                "terminated": terminated,
                "truncated": truncated,
                "turns": turns,
            }
            turns = []


def readable(collection: int, episode: dict[str, Any]) -> str:
    """Return one episode as readable text."""
    end = next((end for end in ("terminated", "truncated") if episode[end]), "goes on")
    head = f"=== collection {collection}, environment {episode['env']}: return {episode['return']:.3f}, {end}\n"
    turns = [
        f"--- turn {turn['turn']}\n{turn['observation']}\n>>> {turn['response']}\n    reward {turn['reward']:.3f}\n"
        for turn in episode["turns"]
    ]
    return head + "".join(turns) + "\n"
