"""Tests of the facts about tabular environments in ProPS+ prompts, by comparison with the environments."""

import re
from fractions import Fraction

import numpy as np
import pytest
from environment_facts import facts_of, numbers

PLACES = (("S", r"The start S is [a-z ]*states? ([\d, ]+)\."), ("G", r"The goal G is [a-z ]*states? ([\d, ]+)\."))


def moves_of(facts):
    """Return the step in rows and columns of each action according to its name in the facts."""
    steps = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    named = dict(re.findall(r"(\d) is (\w+)", facts.actions))
    return [np.array(steps[named[str(action)].lower()]) for action in range(4)]


def told_outcomes(facts, state, action, shape):
    """Return the probability of each next cell according to the facts."""
    found = re.search(r"with probability (\S+) the move.* with probability (\S+)\. ", facts.noise)
    straight, aside = (float(Fraction(part)) for part in (found.groups() if found else (1, 0)))
    steps, step = moves_of(facts), moves_of(facts)[action]
    cells = {}
    for other in steps:
        chance = straight if (other == step).all() else aside if other @ step == 0 else 0.0
        row, column = np.clip(np.array(divmod(state, shape[1])) + other, 0, np.array(shape) - 1)
        cells[int(row * shape[1] + column)] = cells.get(int(row * shape[1] + column), 0.0) + chance
    return {cell: chance for cell, chance in cells.items() if chance}


def outcomes(native, state, action):
    """Return the probability of each next state in the environment, with its reward and termination."""
    found = {}
    for chance, after, reward, ended in native.P[state][action]:
        total, *_ = found.get(int(after), (0.0,))
        found[int(after)] = (total + chance, reward, ended)
    return found


@pytest.mark.parametrize(
    "kwargs",
    [
        {"is_slippery": True},
        {"is_slippery": False, "map_name": "8x8"},
        {"success_rate": 0.5, "reward_schedule": (5, -2, -1), "desc": ["SFH", "FFG"]},
    ],
)
def test_frozen_lake(kwargs):
    facts, native = facts_of("FrozenLake-v1", **kwargs)
    shape, letters = native.desc.shape, native.desc.astype(str).ravel()
    told = {letter: [int(one) for one in re.search(pattern, facts.world)[1].split(",")] for letter, pattern in PLACES}
    assert told == {letter: np.flatnonzero(letters == letter).tolist() for letter in "SG"}
    holes = np.flatnonzero(letters == "H").tolist()
    assert "Where the holes are is not told" in facts.world, "nor did the original tell it"
    assert f"state = {shape[1]} * row + column" in facts.observation
    at_goal, in_hole, else_where = numbers(facts.reward)
    for state in np.flatnonzero((letters == "F") | (letters == "S")).tolist():
        for action in range(4):
            found = outcomes(native, state, action)
            assert {cell: chance for cell, (chance, *_) in found.items()} == pytest.approx(
                told_outcomes(facts, state, action, shape)
            )
            for cell, (_, reward, ended) in found.items():
                assert reward == (at_goal if cell in told["G"] else in_hole if cell in holes else else_where)
                assert ended == (cell in told["G"] + holes)
    assert native.reset(seed=3)[0] in told["S"]


def test_random_maps_are_not_described():
    for facts in (facts_of("lrl/FrozenLakeRandomMaps-v0")[0], facts_of("FrozenLake-v1", map_name=None)[0]):
        assert "The start S is" not in facts.world and "random" in facts.world + facts.start


@pytest.mark.parametrize("id", ["CliffWalkingSlippery-v1", "CliffWalking-v1"])
def test_cliff_walking(id):
    facts, native = facts_of(id)
    start, goal = map(int, re.search(r"from state (\d+) .* goal, state (\d+)", facts.world).groups())
    first, last = map(int, re.search(r"states (\d+) to (\d+), is a cliff", facts.world).groups())
    cliff = set(range(first, last + 1))
    assert cliff == set(np.flatnonzero(native._cliff)) and native.reset(seed=0)[0] == start
    step, fall = numbers(facts.reward)
    for state in set(range(48)) - cliff - {goal}:
        for action in range(4):
            told = {}
            for cell, chance in told_outcomes(facts, state, action, (4, 12)).items():
                arrived = (start, fall, False) if cell in cliff else (cell, step, cell == goal)
                told[arrived] = told.get(arrived, 0.0) + chance
            found = {}
            for chance, after, reward, ended in native.P[state][action]:
                key = (int(after), float(reward), bool(ended))
                found[key] = found.get(key, 0.0) + chance
            assert found == pytest.approx(told)
    assert ("slip" in facts.noise) == native.is_slippery


def test_maze():
    facts, native = facts_of("lrl/Maze3x3-v0")
    table, (arrival, step) = native.dynamics.table, numbers(facts.reward)
    assert native.reset(seed=0)[0] == 0 and table.probability.shape[-1] == 1
    for state in range(8):
        for action, move in enumerate(moves_of(facts)):
            after = int(table.next_state[state, action, 0])
            assert after in (state, 3 * (state // 3 + move[0]) + state % 3 + move[1])
            assert table.terminated[state, action, 0] == (after == 8)
            assert table.reward[state, action, 0] == pytest.approx(arrival if after == 8 else step, abs=5e-5)


def test_nim():
    facts, native = facts_of("lrl/Nim-v0")
    table, (won, lost, none) = native.dynamics.table, (1, -1, 0)
    assert facts.reward.startswith("1 if the opponent") and "-1 if you" in facts.reward and ", 0 in" in facts.reward
    assert native.reset(seed=0)[0] == 10 and native.action_space.start == 1
    for sticks in range(1, 11):
        for taken in (1, 2, 3):
            for column in np.flatnonzero(table.probability[sticks, taken - 1]):
                place = (sticks, taken - 1, column)
                left = int(table.next_state[place])
                reward = lost if taken >= sticks else won if left == 0 else none
                assert table.reward[place] == reward and table.terminated[place] == (reward != none)
    assert "strategy of the opponent is not known" in facts.noise
