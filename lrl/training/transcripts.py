"""Transcripts of complete episodes, as JSON Lines and as readable text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.metrics import log_transcripts
from lrl.types import Rollout


@register
class Transcripts(L.Callback):
    """Writes some episodes of every n-th collection to ``transcripts.jsonl`` and ``transcripts.txt``.

    TensorBoard and Weights & Biases get the text as well. The episodes are written after training on the collection. A
    checkpoint within a collection contains them, because a resumed run trains on the stored turns without playing the
    episodes again.

    Args:
        every_n_collections: one in this many collections is written, beginning with the first.
        episodes: number of episodes to write per collection.
    """

    def __init__(self, every_n_collections: PositiveInt = 10, episodes: PositiveInt = 4) -> None:
        check_arguments(Transcripts.__init__, locals(), "Transcripts")
        self.every_n_collections, self.episodes = every_n_collections, episodes
        self._logged = False
        self._data: Any = None
        self._written = -1
        """Index of the collection whose episodes were written last."""
        self._restored: tuple[int, list[dict[str, Any]]] = (-1, [])
        """Index and episodes of the collection within which the run was resumed."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Store the data module, whose current collection is part of checkpoints."""
        self._data = getattr(trainer, "datamodule", None)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write episodes of the collection after training on it."""
        if trainer.current_epoch % self.every_n_collections or not trainer.is_global_zero:
            return
        collection, episodes = self._current()
        if collection == trainer.current_epoch:
            write_episodes(Path(trainer.default_root_dir), collection, episodes)
            pages = "".join(readable(collection, episode) for episode in episodes)
            log_transcripts(trainer.loggers, pages, collection)
            self._written = collection
        elif not self._logged:
            logging.getLogger("lrl").info("no transcripts: this run trains on demonstrations, not on rollouts")
            self._logged = True

    def _current(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the index of the latest collection and its episodes; -1 and none before the first."""
        rollout = getattr(self._data, "rollout", None)
        if rollout is None:
            return self._restored
        return self._data.collection, list(episodes_of(rollout, self.episodes))

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes that have not been written yet, as JSON."""
        collection, episodes = self._current()
        if collection in (-1, self._written) or collection % self.every_n_collections:
            return {}
        return {"collection": collection, "episodes": json.dumps(episodes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._restored = state_dict.get("collection", -1), json.loads(state_dict.get("episodes", "[]"))


def write_episodes(folder: Path, collection: int, episodes: Sequence[Mapping[str, Any]]) -> None:
    """Append episodes in the format of :func:`episodes_of` to the two files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "transcripts.jsonl").open("a", encoding="utf-8") as lines:
        for episode in episodes:
            lines.write(json.dumps({"collection": collection, **episode}, ensure_ascii=False) + "\n")
    with (folder / "transcripts.txt").open("a", encoding="utf-8") as page:
        for episode in episodes:
            page.write(readable(collection, episode))


def episodes_of(rollout: Rollout, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the episodes of up to ``limit`` evenly spaced environments as JSON objects.

    If episodes continue in the next collection, the first and the last episode of an environment may be incomplete.

    Args:
        rollout: the rollout.
        limit: maximum number of environments.
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
                "response": str(rollout.responses[time][env]),  # str: it may be a native action
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


def readable(collection: int, episode: Mapping[str, Any]) -> str:
    """Return one episode as readable text.

    Args:
        collection: index of the collection.
        episode: an episode in the format of :func:`episodes_of`.
    """
    end = next((end for end in ("terminated", "truncated") if episode[end]), "goes on")
    head = f"=== collection {collection}, environment {episode['env']}: return {episode['return']:.3f}, {end}\n"
    turns = [
        f"--- turn {turn['turn']}\n{turn['observation']}\n>>> {turn['response']}\n    reward {turn['reward']:.3f}\n"
        for turn in episode["turns"]
    ]
    return head + "".join(turns) + "\n"
