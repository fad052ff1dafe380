"""Records of start states, of the format of responses, and of the states of a data set, for the diagnosis.

The format of responses is read here a second time, from its documentation, and the Q-values of a data set are compared
with the transitions of Gymnasium's environment.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from time import process_time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.boards import PlainBoardCodec, RagenBoardCodec
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, TaxiCodec
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.prompt_env import PromptEnvs
from lrl.prompts import get_response_format
from lrl.rewards.reward import Row
from lrl.rollouts.runner import observation_key
from lrl.training.replay import Replay
from lrl.types import Rollout

_RESETS, _SECONDS = 128, 1.0
"""Number of start states of a separate environment, and seconds of processor time after which there are no more."""
_STARTS = 256
"""Maximum number of start states of a collection that are recorded."""
_ROWS, _MAPS = 4096, 20
"""Maximum numbers of rows and of maps of a data set that are compared."""
_NAMES = 50
"""Maximum number of actions whose names are read."""

_ANY_CASE = (FrozenLakeCodec, RagenBoardCodec, PlainBoardCodec)
"""Codecs whose names of actions are documented to be read without regard to case and surrounding whitespace."""
_EXACT = (TaxiCodec, CliffWalkingCodec, BabyAICodec, SpaceCodec)
"""Codecs whose names of actions are documented to be read exactly."""
_RENDERED = {"direct": "{}", "think_answer": "<think></think><answer>{}</answer>", "final_answer": "final answer: {}"}
"""A response with an action in each format of responses."""


def facts(env: EnvFactory, response_format: str | None, again: Replay) -> dict[str, Any]:
    """Return what is known of an environment before training; see :class:`~lrl.diagnosis.sample.Sample`.

    Args:
        env: factory of the training environment.
        response_format: name of the format of responses; None for native actions.
        again: environment that plays episodes again.
    """
    out: dict[str, Any] = {}
    if isinstance(env, PromptEnvs):
        rows, chosen = env.rows, np.arange(len(env.rows))
        if len(rows) > _ROWS:
            chosen = np.random.default_rng(0).choice(len(rows), _RESETS, replace=False)
        states = Counter(rows[int(index)].observation for index in chosen)
        out["separate_starts"] = {"counts": sorted(states.values()), "all": len(chosen) == len(rows)}
        if type(env.codec) is FrozenLakeCodec:
            out |= _of_rows(env.rows_source, [rows[index] for index in range(min(len(rows), _ROWS))])
    elif isinstance(env, GymnasiumEnvs):
        seeds, found, until = np.random.default_rng(0).integers(2**31, size=_RESETS), [], process_time() + _SECONDS
        while len(found) < _RESETS and process_time() < until:
            found.append(observation_key(again.start(int(seeds[len(found)]))))
        out["separate_starts"] = {"counts": sorted(Counter(found).values()), "all": False}
        if response_format is not None:
            out["numbers"] = number_format(env.codec, again.native_observation_space)
    if response_format is not None:
        out["misread"] = misread(env.codec, response_format)
    return out


def starts(rollout: Rollout) -> list[int]:
    """Return a hash of the first observation of each episode of a collection, of one episode per group."""
    first = torch.nonzero((rollout.active & (rollout.turn == 0)).cpu()).tolist()
    groups, vectors = rollout.group.tolist(), rollout.inputs.get("observation")
    grouped, found = len(set(groups)) < len(groups), dict[Any, int]()
    for time, env in first:
        episode = groups[env] if grouped else (time, env)
        if episode not in found and len(found) < _STARTS:
            seen = rollout.observations[time][env]
            found[episode] = observation_key(vectors[time, env].cpu().numpy() if vectors is not None else seen)
    return list(found.values())


# -- the format of responses ----------------------------------------------------------------------------------------


def action_of(codec: TextCodec, response_format: str, response: str) -> int | None:
    """Return the index of the action of a response according to the documentation; None if it contains no action.

    Raises:
        LookupError: If the documentation of the codec or of the format is not known here, or actions have no names.
    """
    names, text = codec.action_texts, response.strip()
    if names is None or response_format not in _RENDERED or type(codec) not in (*_ANY_CASE, *_EXACT):
        raise LookupError(response_format)
    if response_format == "think_answer":
        head, tag, text = text.removesuffix("</answer>").rpartition("<answer>")
        if not (response.rstrip().endswith("</answer>") and tag and head.startswith("<think>")):
            return None
        if not head.rstrip().endswith("</think>") or len(head.rstrip()) < len("<think></think>") or "<" in text:
            return None
    elif response_format == "final_answer":
        _, marker, text = text.rpartition("final answer:")
        if not marker:
            return None
    text = text.strip()
    if type(codec) is RagenBoardCodec:  # a sequence stands for its first action
        text = next((part.strip() for part in text.split("||") if part.strip()), "")
    if type(codec) in _ANY_CASE:
        return {name.lower(): index for index, name in enumerate(names)}.get(text.lower())
    return names.index(text) if text in names else None


def misread(codec: TextCodec, response_format: str) -> list[tuple[str, int | None, int | None]]:
    """Return made-up responses that the codec reads in another way than its documentation says.

    Returns:
        The response, the action according to the documentation, and that of the codec, None without an action.
    """
    names = (codec.action_texts or ())[:_NAMES]
    if not names:
        return []
    one, other, rendered = names[0], names[-1], _RENDERED.get(response_format, "{}")
    texts = [*names, "", f"I choose {one} now", f"{one}x", f"x{one}", f"{one} {other}", f"{other},{one}", f"({one})"]
    responses = [rendered.format(text) for text in [*texts, one.swapcase(), f" {one}"]]
    responses += [*names[:2], f"<answer>{one}</answer>", f"final answer {one}", rendered.format(one) + f" {other}"]
    out: list[tuple[str, int | None, int | None]] = []
    for response in responses:
        try:
            expected = action_of(codec, response_format, response)
        except LookupError:
            return []
        try:
            found = int(codec.text_to_action(get_response_format(response_format).extract(response)))
        except InvalidActionError:
            found = None
        start = getattr(codec.action_space, "start", 0)
        if found is not None:
            found -= int(start)
        if found != expected:
            out.append((response, expected, found))
    return out


def number_format(codec: TextCodec, space: Any) -> dict[str, Any] | None:
    """Return how the numbers of an observed Box are written according to the documentation; None if it is not known.

    Args:
        codec: codec of the environment.
        space: native observation space.

    Returns:
        ``offset``, ``factor``, ``low`` and ``high``, each a list with one entry per number, and ``error``: the text has
        ``(number - offset) * factor``, clipped to the bounds, up to the error.
    """
    if type(codec) is not SpaceCodec or not isinstance(space, spaces.Box):
        return None
    numbers, size = codec.numbers, int(np.prod(space.shape))
    pairs: Any = numbers.ranges or codec.metadata.observation_ranges
    pairs = numbers.statistics if numbers.kind == "normalised" else pairs
    if isinstance(pairs, Mapping):
        return None
    pairs = list(zip(space.low.ravel(), space.high.ravel())) if pairs is None else list(pairs)
    first, second = np.array(pairs * (size if len(pairs) == 1 else 1), dtype=np.float64).T
    offset, factor, low, high, error = np.zeros(size), np.ones(size), -np.inf, np.inf, 0.51 * 10.0**-numbers.precision
    if numbers.kind == "integers":
        offset, factor, low, high, error = first, 999 / (second - first), 0.0, 999.0, 0.51
    elif numbers.kind == "normalised":
        offset, factor, low, high = first, 1 / second, -10.0, 10.0
    of_all = {"offset": offset, "factor": factor, "low": np.full(size, low), "high": np.full(size, high)}
    return {**{name: values.tolist() for name, values in of_all.items()}, "error": error}


def named(codec: TextCodec, response_format: str, responses: Sequence[str]) -> np.ndarray | None:
    """Return whether responses contain an action according to the documentation, float64 ``(turn,)``."""
    with contextlib.suppress(LookupError):
        return np.array([float(action_of(codec, response_format, one) is not None) for one in responses])
    return None


# -- the states of a data set ---------------------------------------------------------------------------------------


def _of_rows(source: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Compare the Q-values, the actions and the texts of rows with each other, and with transitions of their maps.

    Returns:
        For each comparison that can be made, the number of rows, the number of wrong ones, and the first of them.
    """
    wrong: dict[str, list[str]] = {"q_values": [], "actions": [], "texts": []}
    counts = dict.fromkeys(wrong, 0)
    maps: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        if row.desc:
            if row.desc in maps or len(maps) < _MAPS:
                maps.setdefault(row.desc, {})[row.state] = row
            counts["texts"] += 1
            if not _shows(row):
                wrong["texts"].append(f"state {row.state}, {row.observation!r}")
        if row.q_values and isinstance(row.action, int | np.integer):
            counts["actions"] += 1
            best = max(row.q_values)
            if row.q_values[int(row.action)] < best - 1e-6 * max(abs(best), 1e-9):
                wrong["actions"].append(f"{row.observation!r}, action {row.action} and Q-values {row.q_values}")
    known = "gamma" in vars(source) and "is_slippery" in vars(source)
    gamma, slips = (source.gamma, source.is_slippery) if known else (1.0, False)
    for desc, states in maps.items() if known else ():
        transitions: Any = FrozenLakeEnv(desc=list(desc), is_slippery=slips).P
        for state, row in states.items():
            expected = _backup(transitions[state], states, gamma)
            if expected is not None and row.q_values:
                counts["q_values"] += 1
                if np.abs(np.array(row.q_values) - expected).max() > 1e-4:
                    shown, right = ([round(float(value), 4) for value in some] for some in (row.q_values, expected))
                    wrong["q_values"].append(f"{row.observation!r} has {shown}, should have {right}")
    return {
        f"wrong_{name}": {"rows": counts[name], "wrong": len(found), "first": found[0] if found else ""}
        for name, found in wrong.items()
        if counts[name]
    }


def _backup(transitions: Mapping[int, Any], states: Mapping[int, Row], gamma: float) -> np.ndarray | None:
    """Return the Q-values of a state from the largest ones of the next states; None if one of these is not known."""
    out: list[float] = []
    for action in sorted(transitions):
        total = 0.0
        for probability, following, reward, is_end in transitions[action]:
            if not is_end and int(following) not in states:
                return None
            future = 0.0 if is_end else max(states[int(following)].q_values, default=0.0)
            total += probability * (reward + gamma * future)
        out.append(total)
    return np.array(out)


def _shows(row: Row) -> bool:
    """Return whether the text of a state of a map has the agent in its cell, and the map around it."""
    width = len(row.desc[0])
    lines = row.observation.split("\n")[-len(row.desc) :]
    cells = "".join("".join(line.split()) for line in lines)
    expected = list("".join(row.desc))
    expected[row.state] = "A"
    return len(cells) == width * len(row.desc) and cells == "".join(expected)
