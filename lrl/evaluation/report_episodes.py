"""Episodes for the report of a run, with the advantages of their tokens and the changes of their probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_TURNS = 4
"""Maximum number of turns that are shown of an episode."""
_MAX_CHARACTERS = 4000
"""Maximum number of characters that are shown of an observation or a response."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """A sampled token as it is shown."""

    text: str
    advantage: float
    """Advantage divided by the largest absolute advantage of the shown episodes, from -1 to 1."""
    change: float
    """Change of its probability by training, from -1 to 1."""
    title: str
    """The numbers as a text."""


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    """One turn of an episode as it is shown."""

    head: str
    observation: str
    response: str
    tokens: Sequence[Token]
    """The tokens of the response; empty if their numbers were not recorded."""


@dataclass(frozen=True, kw_only=True)
class ShownEpisode:
    """Some turns of one episode as they are shown."""

    title: str
    head: str
    turns: Sequence[ShownTurn]
    omitted: int
    """Number of turns that are not shown."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def read_transcripts(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the episodes in ``transcripts.jsonl``; damaged lines are left out."""
    if not path.exists():
        problems.append("transcripts.jsonl is missing, so no episodes are shown.")
        return []
    episodes, damaged = [], 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                episode = json.loads(line)
                _check(episode)
                episodes.append(episode)
            except (ValueError, KeyError, TypeError):
                damaged += 1
    if damaged:
        problems.append(f"{counted(damaged, 'line')} of transcripts.jsonl could not be read.")
    return [episode for episode in episodes if episode["turns"]]


def _check(episode: Mapping[str, Any]) -> None:
    """Raise a ValueError, KeyError or TypeError if an episode lacks what is shown of it."""
    numbers = [episode["return"], episode["collection"]]
    for turn in episode["turns"]:
        terms = turn.get("reward_terms", {})
        numbers += [turn["reward"], *(terms.values() if isinstance(terms, dict) else [None])]
    if not all(isinstance(number, (int, float)) for number in numbers) or any(
        "response" not in turn for turn in episode["turns"]
    ):
        raise ValueError("returns, collections and rewards must be numbers, and each turn must have a response.")


def reward_text(turn: Mapping[str, Any]) -> str:
    """Return the reward of a turn and its terms, such as ``reward 0.9 (expert_q 0.8, format 1)``."""
    terms = ", ".join(f"{name} {value:.4g}" for name, value in turn.get("reward_terms", {}).items())
    return f"reward {turn['reward']:.4g}" + (f" ({terms})" if terms else "")


def chosen_episodes(episodes: Sequence[dict[str, Any]]) -> Iterator[ShownEpisode]:
    """Yield the best and the worst of the last episodes, the one that training changed most, and the first invalid."""
    if not episodes:
        return
    newest = [one for one in episodes if one["collection"] == episodes[-1]["collection"]]
    best, worst = max(newest, key=lambda one: one["return"]), min(newest, key=lambda one: one["return"])
    changes = [
        (_turn_change(turn), place, number)
        for place, one in enumerate(episodes)
        for number, turn in enumerate(one["turns"])
    ]
    change, most, where = max(changes)
    invalid = (
        (place, number)
        for place, one in enumerate(episodes)
        for number, turn in enumerate(one["turns"])
        if turn.get("valid") is False
    )
    chosen = [("Best of the last recorded collection", best, len(best["turns"]) - 1)]
    if worst is not best:
        chosen.append(("Worst of the last recorded collection", worst, len(worst["turns"]) - 1))
    for place, number in list(invalid)[:1]:
        chosen.append(("First invalid action", episodes[place], number))
    if change > 0:
        chosen.append(("Most changed by training", episodes[most], where))
    scale = max(
        (abs(value) for _, one, _ in chosen for turn in one["turns"] for value in _finite(turn, "advantages")),
        default=0.0,
    )
    for title, episode, number in chosen:
        yield _shown(title, episode, number, scale or 1.0)


def _finite(turn: Mapping[str, Any], name: str) -> list[float]:
    """Return the numbers of the tokens of a turn with 0 for what is no finite number; empty if there are none."""
    values = turn.get(name)
    if not isinstance(values, list):
        return []
    return [float(one) if isinstance(one, (int, float)) and math.isfinite(one) else 0.0 for one in values]


def _turn_change(turn: Mapping[str, Any]) -> float:
    """Return the largest change of a token's probability by training; 0 if it was not recorded."""
    pairs = zip(_finite(turn, "logprobs"), _finite(turn, "new_logprobs"))
    return max((abs(_probability(new) - _probability(old)) for old, new in pairs), default=0.0)


def _probability(logprob: float) -> float:
    """Return the probability, or density, of a log-probability; at most 1, as colours show it."""
    return math.exp(min(logprob, 0.0))


def _shown(title: str, episode: Mapping[str, Any], number: int, scale: float) -> ShownEpisode:
    turns = episode["turns"]
    first = max(0, min(number - _MAX_TURNS // 2, len(turns) - _MAX_TURNS))
    end = next((end for end in ("terminated", "truncated") if episode.get(end)), "goes on")
    return ShownEpisode(
        title=title,
        head=f"collection {episode['collection'] + 1}, environment {episode.get('env', '?')}, return "
        f"{episode['return']:.3g}, {end}, {counted(len(turns), 'turn')}",
        turns=[_shown_turn(turn, scale) for turn in turns[first : first + _MAX_TURNS]],
        omitted=max(0, len(turns) - _MAX_TURNS),
    )


def _shown_turn(turn: Mapping[str, Any], scale: float) -> ShownTurn:
    response = str(turn["response"])
    texts = turn.get("tokens", [response])
    lists = {name: _finite(turn, name) for name in ("advantages", "logprobs", "new_logprobs", "values")}
    tokens = []
    for place, text in enumerate(texts if lists["advantages"] and isinstance(texts, list) else ()):
        known = {name: values[place] for name, values in lists.items() if place < len(values)}
        old, new = known.get("logprobs"), known.get("new_logprobs")
        change = 0.0 if old is None or new is None else _probability(new) - _probability(old)
        title = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in known.items())
        share = max(-1.0, min(1.0, known.get("advantages", 0.0) / scale))
        tokens.append(Token(text=str(text), advantage=share, change=change, title=title))
    return ShownTurn(
        head=f"turn {turn.get('turn', '?')}, {reward_text(turn)}"
        + (", invalid action" if turn.get("valid") is False else ""),
        observation=str(turn.get("observation", ""))[:_MAX_CHARACTERS],
        response=response[:_MAX_CHARACTERS],
        tokens=tokens,
    )
