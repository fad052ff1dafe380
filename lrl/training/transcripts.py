"""Transcripts of complete episodes, as JSON Lines and as readable text."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lrl.evaluation.report_episodes import reward_text
from lrl.faults import appending
from lrl.functional.distributed import shards_parameters
from lrl.policies.policy import Policy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.metrics import log_transcripts
from lrl.types import Rollout, TurnBatch

_DIGITS = 4
"""Number of significant digits of numbers."""
_NUMBERS = 32
"""Maximum number of shown numbers of a native observation."""


@register
class Transcripts(L.Callback):
    """Writes some episodes of every n-th collection to ``transcripts.jsonl`` and ``transcripts.txt``.

    TensorBoard and Weights & Biases get the text as well. The episodes are written after training on the collection. A
    checkpoint within a collection contains them, because a resumed run trains on the stored turns without playing the
    episodes again.

    The text counts collections from 1, like the terminal, and ``transcripts.jsonl`` from 0, like ``groups.csv``. Both
    contain the terms of the reward that a turn reported, without their weights. Turns in ``transcripts.jsonl`` also
    have ``valid``, which says whether the action is valid, and lists with one element per sampled token: ``tokens``,
    their texts; ``logprobs`` while sampling; ``new_logprobs`` with the weights after training on the collection;
    ``advantages``; and ``values`` if there is a critic. A policy that writes no text has no ``tokens``, because its
    only token is the action. ``new_logprobs`` are missing if the weights are sharded.

    Args:
        every_n_collections: one in this many collections is written, beginning with the first.
        episodes: number of episodes to write per collection.
    """

    def __init__(self, every_n_collections: PositiveInt = 10, episodes: PositiveInt = 4) -> None:
        check_arguments(Transcripts.__init__, locals(), "Transcripts")
        self.every_n_collections, self.episodes = every_n_collections, episodes
        self._logged = False
        self._data: Any = None
        self._policy: Policy | None = None
        self._written = -1
        """Index of the collection whose episodes were written last."""
        self._restored: tuple[int, list[dict[str, Any]]] = (-1, [])
        """Index and episodes of the collection within which the run was resumed."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Store the data module, whose current collection is part of checkpoints, and the policy."""
        self._data, self._policy = getattr(trainer, "datamodule", None), getattr(pl_module, "policy", None)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write episodes of the collection after training on it."""
        if trainer.current_epoch % self.every_n_collections or not trainer.is_global_zero:
            return
        collection = self._collection
        if collection == trainer.current_epoch:
            episodes = self._current()
            self._add_new_logprobs(trainer, episodes)
            write_episodes(Path(trainer.default_root_dir), collection, episodes)
            pages = "".join(readable(collection, episode) for episode in episodes)
            log_transcripts(trainer.loggers, pages, collection)
            self._written = collection
        elif not self._logged:
            logging.getLogger("lrl").info("no transcripts: this run trains on demonstrations, not on rollouts")
            self._logged = True

    @property
    def _collection(self) -> int:
        """Index of the latest collection whose episodes are known; -1 before the first."""
        known = getattr(self._data, "rollout", None) is not None
        return self._data.collection if known else self._restored[0]

    def _current(self) -> list[dict[str, Any]]:
        """Return the episodes of the latest collection."""
        rollout = getattr(self._data, "rollout", None)
        if rollout is None:
            return self._restored[1]
        episodes = list(episodes_of(rollout, self.episodes))
        if self._policy is not None and self._data.batch is not None:
            add_tokens(episodes, self._policy, self._data.batch)
        return episodes

    def _add_new_logprobs(self, trainer: L.Trainer, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Add log-probabilities with the current weights, unless they are sharded or the turns are not known."""
        if self._policy is None or self._data.batch is None or shards_parameters(trainer.strategy):
            return
        with trainer.precision_plugin.forward_context():
            add_new_logprobs(episodes, self._policy, self._data.batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes that have not been written yet, as JSON."""
        collection = self._collection
        if collection in (-1, self._written) or collection % self.every_n_collections:
            return {}
        episodes = self._current()
        if not self._data.has_untrained_minibatches:  # then a checkpoint does not contain the turns
            self._add_new_logprobs(self._data.trainer, episodes)
        return {"collection": collection, "episodes": json.dumps(episodes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._restored = state_dict.get("collection", -1), json.loads(state_dict.get("episodes", "[]"))


def write_episodes(folder: Path, collection: int, episodes: Sequence[Mapping[str, Any]]) -> None:
    """Append episodes in the format of :func:`episodes_of` to the two files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, page = folder / "transcripts.jsonl", folder / "transcripts.txt"
    with appending("the transcript", lines, page):
        with lines.open("a", encoding="utf-8") as file:
            for episode in episodes:
                turns = [{key: value for key, value in turn.items() if key != "row"} for turn in episode["turns"]]
                written = {"collection": collection, **episode, "turns": turns}
                file.write(json.dumps(written, ensure_ascii=False) + "\n")
        with page.open("a", encoding="utf-8") as file:
            file.writelines(readable(collection, episode) for episode in episodes)


def episodes_of(rollout: Rollout, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the episodes of up to ``limit`` evenly spaced environments as JSON objects.

    The ``row`` of a turn is its index in the batch of the collection; :func:`write_episodes` leaves it out. If episodes
    continue in the next collection, the first and the last episode of an environment may be incomplete.

    Args:
        rollout: the rollout.
        limit: maximum number of environments.
    """
    num_envs = rollout.active.shape[1]
    for env in sorted({index * num_envs // limit for index in range(min(limit, num_envs))}):
        yield from _episodes_of_env(rollout, env)


def _episodes_of_env(rollout: Rollout, env: int) -> Iterator[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    rows = (rollout.active.flatten().cumsum(0) - 1).view_as(rollout.active)[:, env].tolist()
    times = rollout.active[:, env].nonzero()[:, 0].tolist()
    valid = rollout.metrics.get("action_valid")
    if valid is not None and len(valid) != rollout.num_turns:
        valid = None
    terms = {name: values for name, values in rollout.metrics.items() if name.startswith("reward/")}
    for time in times:
        turns.append(
            {
                "row": rows[time],
                "turn": int(rollout.turn[time, env]),
                "observation": rollout.observations[time][env] or _numbers(rollout, time, env),
                "response": str(rollout.responses[time][env]),  # str: it may be a native action
                "reward": float(rollout.rewards[time, env]),
                "response_tokens": int(rollout.response_mask[time, env].sum()),
            }
        )
        reported = {name.removeprefix("reward/"): float(values[rows[time]]) for name, values in terms.items()}
        reported = {name: value for name, value in reported.items() if not math.isnan(value)}
        if reported:
            turns[-1]["reward_terms"] = reported
        if valid is not None:
            turns[-1]["valid"] = bool(valid[rows[time]])
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


def add_tokens(episodes: Sequence[Mapping[str, Any]], policy: Policy, batch: TurnBatch) -> None:
    """Add to each turn what is known of its sampled tokens before training on them.

    Args:
        episodes: episodes in the format of :func:`episodes_of`.
        policy: policy that played them.
        batch: all turns of the collection, with their advantages.
    """
    turns, rows = _turns_and_rows(episodes)
    part = batch[rows.to(batch.response_mask.device)]
    columns = {"logprobs": part.old_logprobs, "advantages": part.advantages, "values": part.old_values}
    added = {name: _sampled(values, part) for name, values in columns.items() if values is not None}
    if isinstance(policy, TextPolicy):
        decode = policy.language_model.tokenizer.tokenizer.decode
        ids = (
            row[chosen].tolist() for row, chosen in zip(part.inputs["response_ids"], part.response_mask, strict=True)
        )
        added["tokens"] = [[decode([token], clean_up_tokenization_spaces=False) for token in row] for row in ids]
    elif isinstance(policy, ScoringPolicy):
        added["tokens"] = [[turn["response"]] for turn in turns]
    for name in sorted(added):
        for turn, values in zip(turns, added[name], strict=True):
            turn[name] = values


def add_new_logprobs(episodes: Sequence[Mapping[str, Any]], policy: Policy, batch: TurnBatch) -> None:
    """Add to each turn the log-probabilities of its tokens with the current weights of the policy."""
    turns, rows = _turns_and_rows(episodes)
    part = batch[rows.to(batch.response_mask.device)]
    logprobs = policy.in_passes(part, lambda some: policy.evaluate(some).logprobs)
    for turn, values in zip(turns, _sampled(logprobs, part), strict=True):
        turn["new_logprobs"] = values


def _turns_and_rows(episodes: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Tensor]:
    """Return all turns of episodes, and the index of each in the batch of the collection, int64 ``(turn,)``."""
    turns = [turn for episode in episodes for turn in episode["turns"]]
    return turns, torch.tensor([turn["row"] for turn in turns], dtype=torch.long)


def _sampled(values: Tensor, batch: TurnBatch) -> list[list[float]]:
    """Return the rounded numbers of the sampled tokens of each turn."""
    rows = zip(values.detach().float().cpu().tolist(), batch.response_mask.tolist(), strict=True)
    return [
        [float(f"{value:.{_DIGITS}g}") for value, chosen in zip(row, mask, strict=True) if chosen] for row, mask in rows
    ]


def _numbers(rollout: Rollout, time: int, env: int) -> str:
    """Return the numbers that a network read as rounded text; empty if there are none."""
    if "observation" not in rollout.inputs:
        return ""
    numbers = rollout.inputs["observation"][time, env].flatten().tolist()
    rest = ["..."] if len(numbers) > _NUMBERS else []
    return ", ".join([*(f"{number:.{_DIGITS}g}" for number in numbers[:_NUMBERS]), *rest])


def readable(collection: int, episode: Mapping[str, Any]) -> str:
    """Return one episode as readable text.

    Args:
        collection: index of the collection, which is counted from 1 in the text.
        episode: an episode in the format of :func:`episodes_of`.
    """
    end = next((end for end in ("terminated", "truncated") if episode[end]), "goes on")
    head = f"=== collection {collection + 1}, environment {episode['env']}: return {episode['return']:.3f}, {end}\n"
    turns = [
        f"--- turn {turn['turn']}\n{turn['observation']}\n>>> {turn['response']}\n    {reward_text(turn)}\n"
        for turn in episode["turns"]
    ]
    return head + "".join(turns) + "\n"
