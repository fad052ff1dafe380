"""Tests of RAGEN's boards: their rules and distribution, exact optima, and playing them as text and natively."""

import json
import time
from collections import deque

import numpy as np
import pytest
from gymnasium.utils import seeding
from results.boards import HORIZONS, boards_table, exact_success
from results.command import main

from lrl.codecs.boards import BOARDS, PlainBoardCodec, RagenBoardCodec
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.envs.boards import Room, SokobanEnv, sample_lake, sample_room, solve
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.tabular import optimal_success
from lrl.evaluation.load import load_baseline
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

LAKES = ["lrl/RagenFrozenLake-v0", "lrl/RagenFrozenLakeSlippery-v0"]
SOKOBAN = ["lrl/Sokoban1Box-v0", "lrl/Sokoban2Boxes-v0"]
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
CORRIDOR = Room(size=6, floor=0b111100 << 5, targets=1 << 10, boxes=1 << 8, player=7)
"""The player, a box, a free cell and a target in one row of four cells."""


RAGEN_MAPS = {0: ("FFGS", "FHFF", "FHFF", "FFFF"), 7: ("FFFF", "FFFF", "FFFS", "FFFG")}


def rows_of(observation, board="sokoban"):
    return ["".join(BOARDS[board].kinds[kind][0] for kind in row) for row in observation.argmax(-1).tolist()]


def shortest_solution(rows):
    """Search for the shortest solution of a drawn room, independently of lrl's representation."""
    cells = {(r, c): symbol for r, line in enumerate(rows) for c, symbol in enumerate(line)}
    targets = frozenset(place for place, symbol in cells.items() if symbol in "O√S")
    boxes = frozenset(place for place, symbol in cells.items() if symbol in "X√")
    player = next(place for place, symbol in cells.items() if symbol in "PS")
    seen, queue = {(player, boxes)}, deque([(player, boxes, 0)])
    while queue:
        (row, column), boxes, length = queue.popleft()
        if boxes == targets:
            return length
        for down, right in MOVES:
            place, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if cells[place] == "#" or (place in boxes and (cells[behind] == "#" or behind in boxes)):
                continue
            state = place, (boxes - {place}) | {behind} if place in boxes else boxes
            if state not in seen:
                seen.add(state)
                queue.append((*state, length + 1))
    return None


def check_rooms(num_boxes, seeds):
    for seed in seeds:
        env = SokobanEnv(num_boxes)
        rows = rows_of(env.reset(seed=seed)[0])
        drawn = "".join(rows)
        assert (drawn.count("X"), drawn.count("√"), drawn.count("O") + drawn.count("S")) == (num_boxes, 0, num_boxes)
        assert set(rows[0] + rows[-1] + "".join(line[0] + line[-1] for line in rows)) == {"#"}
        solution = solve(env.room)
        assert solution.length == shortest_solution(rows) > 0
        within = exact_success(solution.table(), 0, range(1, solution.length + 1))[:, 1]
        assert within.tolist() == [0.0] * (solution.length - 1) + [1.0]


@pytest.mark.parametrize("num_boxes", [1, 2])
def test_rooms_can_be_solved_and_the_shortest_solution_equals_an_independent_search(num_boxes):
    check_rooms(num_boxes, range(10_000, 10_040))


@pytest.mark.reference
@pytest.mark.parametrize("num_boxes", [1, 2])
def test_a_thousand_rooms_can_be_solved(num_boxes):
    check_rooms(num_boxes, range(10_000, 11_000))


def check_lakes(id, seeds):
    """Compare the optimum with a breadth-first search (static), or with value iteration over the drawn map."""
    env = GymnasiumEnvs(id).make_native().unwrapped
    for seed in seeds:
        env.reset(seed=seed)
        cells = {(r, c): letter for r, line in enumerate(env.map) for c, letter in enumerate(line)}
        assert sorted("".join(env.map).replace("F", "").replace("H", "")) == ["G", "S"]
        values = {place: float(letter == "G") for place, letter in cells.items()}
        slip = 0.1 if env.is_slippery else 0.0
        for _ in range(25):
            moved = {}
            for (row, column), letter in cells.items():
                after = [(min(max(row + r, 0), 3), min(max(column + c, 0), 3)) for r, c in MOVES]
                sides = {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}
                outcomes = [
                    (1 - 2 * slip) * values[after[a]] + slip * sum(values[after[side]] for side in sides[a])
                    for a in range(4)
                ]
                moved[row, column] = max(outcomes) if letter in "SF" else float(letter == "G")
            values = moved
        start = next(place for place, letter in cells.items() if letter == "S")
        assert abs(optimal_success(env.table, 25, env.start) - values[start]) < 1e-9
        assert env.is_slippery or values[start] == 1.0


@pytest.mark.parametrize("id", LAKES)
def test_lakes_can_be_crossed_and_the_optimum_equals_an_independent_computation(id):
    check_lakes(id, range(10_000, 10_040))


@pytest.mark.reference
@pytest.mark.parametrize("id", LAKES)
def test_a_thousand_lakes_can_be_crossed(id):
    check_lakes(id, range(10_000, 11_000))


def test_maps_are_those_of_ragen_for_equal_seeds():
    """The maps were printed by ragen/env/frozen_lake/utils.py (commit db0d8ee of SCOUT) for seeds 0 and 7."""
    assert sample_lake(seeding.np_random(0)[0]) == RAGEN_MAPS[0]
    assert sample_lake(seeding.np_random(7)[0]) == RAGEN_MAPS[7]


def test_the_distribution_of_rooms_is_that_of_ragen():
    """RAGEN's generator: 10.62 and 11.92 floor cells, solutions of 4.07 and 7.86 actions (8,000 and 2,000 rooms)."""
    for num_boxes, floor, length in ((1, 10.62, 4.07), (2, 11.92, 7.86)):
        rooms = [sample_room(np.random.default_rng(seed), num_boxes) for seed in range(100)]
        assert abs(np.mean([room.floor.bit_count() for room in rooms]) - floor) < 0.9
        assert abs(np.mean([solve(room).length for room in rooms]) - length) < 1.5


def test_rewards_and_moves_of_sokoban():
    env = SokobanEnv()
    env.reset(seed=0)
    env.room = CORRIDOR
    env._player, env._boxes = CORRIDOR.player, CORRIDOR.boxes
    right, left = 3, 2
    assert env.step(0)[1:4] == (-0.1, False, False), "walls block the player"
    assert env.step(right)[1] == -0.1 and (env._player, env._boxes) == (8, 1 << 9)
    assert env.step(left)[1] == -0.1 and (env._player, env._boxes) == (7, 1 << 9), "boxes are not pulled"
    env.step(right)
    _, reward, terminated, truncated, info = env.step(right)
    assert reward == pytest.approx(10.9) and terminated and not truncated and info == {"success": True}
    env._boxes, env._player, env.room = 1 << 9, 8, Room(size=6, floor=0b111100 << 5, targets=1 << 9, boxes=0, player=7)
    assert env.step(right)[1] == pytest.approx(-1.1), "a box leaves its target"
    assert env.step(right)[1] == -0.1 and env._boxes == 1 << 10, "walls block boxes"


@pytest.mark.parametrize("id", LAKES)
def test_moves_on_the_lake_follow_the_transition_table(id):
    env = GymnasiumEnvs(id).make_native()
    native, counts, total = env.unwrapped, np.zeros(3), 0
    for seed in range(40):
        env.reset(seed=seed)
        table, ended = native.table, False
        while not ended:
            state, action = native._cell, total % 4
            _, reward, terminated, truncated, info = env.step(action)
            outcomes = np.flatnonzero(table.next_state[state, action] == native._cell)
            assert len(outcomes), "the table contains the outcome"
            assert reward == table.reward[state, action, outcomes[0]] == info["success"]
            assert terminated == table.terminated[state, action, outcomes[0]]
            if native.is_slippery and len(set(table.next_state[state, action])) == 3:
                counts[outcomes[0]] += 1
            total, ended = total + 1, terminated or truncated
    if native.is_slippery:
        np.testing.assert_allclose(counts / counts.sum(), [0.1, 0.8, 0.1], atol=0.1)


@pytest.mark.parametrize("id", HORIZONS)
def test_the_seed_determines_the_episode_for_every_number_of_environments(id):
    seeds, texts = list(range(6)), []
    for sizes in ([6], [1] * 6, [2, 4]):
        found, first = [], 0
        for size in sizes:
            envs = GymnasiumEnvs(id).make(size, "direct")
            actions = envs.call("get_wrapper_attr", "codec")[0].action_texts
            shown, _ = envs.reset(seed=seeds[first : first + size])
            episode = [shown]
            for step in range(5):
                shown, *_ = envs.step((actions[step % 4],) * size)
                episode.append(shown)
            envs.close()
            found += [tuple(turn[row] for turn in episode) for row in range(size)]
            first += size
        texts.append(found)
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 6


@pytest.mark.parametrize("id", HORIZONS)
def test_episodes_end_at_the_published_limit(id):
    env = GymnasiumEnvs(id).make_native()
    for seed in range(200):
        env.reset(seed=seed)
        ends = []
        while not ends or not any(ends[-1]):
            ends.append(env.step(0)[2:4])
        if ends[-1] == (False, True):
            assert len(ends) == HORIZONS[id][0] == (25 if id in LAKES else 10)
            return
    raise AssertionError("no episode reached the limit")


@pytest.mark.parametrize("id", HORIZONS)
def test_the_expert_reaches_the_optimum_and_a_random_policy_its_exact_success(id):
    num_boards = 40
    env = GymnasiumEnvs(id).make_native()
    exact = []
    for seed in range(10_000, 10_000 + num_boards):
        env.reset(seed=seed)
        native = env.unwrapped
        table, start = (native.table, native.start) if id in LAKES else (solve(native.room).table(), 0)
        exact.append(exact_success(table, start, HORIZONS[id][:1])[0])
    random, optimum = np.mean(exact, axis=0)
    expert = play(id, num_boards, lambda native, rng: native.expert_action())
    chance = play(id, num_boards, lambda native, rng: int(rng.integers(4)))
    assert abs(expert.mean() - optimum) < (0.15 if "Slippery" in id else 1e-9)
    assert abs(chance.mean() - random) < 0.25
    assert random < optimum


def play(id, num_boards, choose):
    env, rng, successes = GymnasiumEnvs(id).make_native(), np.random.default_rng(0), []
    for seed in range(10_000, 10_000 + num_boards):
        env.reset(seed=seed)
        ended = False
        while not ended:
            *_, terminated, truncated, info = env.step(choose(env.unwrapped, rng))
            ended = terminated or truncated
        successes.append(info["success"])
    return np.array(successes, dtype=float)


def test_the_expert_of_sokoban_adapts_to_other_actions_and_gives_up_dead_ends():
    env = SokobanEnv(num_boxes=2)
    for seed in range(20):
        env.reset(seed=seed)
        solution, rng = solve(env.room), np.random.default_rng(seed)
        for _ in range(30):
            state = solution.index[env._player, env._boxes]
            advised = env.expert_action()
            if solution.distance[state] > 0:
                assert solution.distance[solution.next_state[state, advised]] == solution.distance[state] - 1
            else:
                assert advised == 0
            if env.step(int(rng.integers(4)))[2]:
                break


def test_the_command_writes_exact_figures_in_the_order_of_the_table(tmp_path):
    main("results.py", ["boards", "--num_boards", "3", "--json", str(tmp_path / "boards.json")])
    result = json.loads((tmp_path / "boards.json").read_text())
    assert [(row["env_id"], row["max_episode_steps"]) for row in result["boards"]] == [
        (id, limit) for id in HORIZONS for limit in HORIZONS[id]
    ]
    assert all(0 <= row["random"] <= row["optimum"] <= 1 for row in result["boards"])
    first = boards_table(result).splitlines()[2]
    assert first.startswith("| `lrl/RagenFrozenLake-v0` | 25 | ") and first.endswith(
        "| 0.17 | 0.39 | 0.93 | 0.90 | 0.90 |"
    )


def test_rendering_shows_ragens_symbols():
    env = SokobanEnv(render_mode="ansi")
    observation, _ = env.reset(seed=3)
    assert env.render() == "\n".join(rows_of(observation))
    assert SokobanEnv().render() is None


def test_texts_can_be_ragens_through_the_factory():
    envs = GymnasiumEnvs(SOKOBAN[0], codec=RagenBoardCodec("sokoban")).make(2, "think_answer")
    texts, _ = envs.reset(seed=[0, 1])
    assert all(text.startswith("State:\n######\n") for text in texts)
    *_, infos = envs.step(("<think>go</think><answer>Up || Down</answer>", "<answer>Up</answer>"))
    assert infos["action_valid"].tolist() == [True, False]
    envs.close()


def test_the_text_layer_takes_less_than_a_millisecond_per_step():
    envs = GymnasiumEnvs(SOKOBAN[1]).make(1, "direct")
    envs.reset(seed=[0])
    native, codec = envs.envs[0].unwrapped, envs.envs[0].codec
    observation = native.observation()
    start = time.perf_counter()
    for _ in range(200):
        assert codec.observation_to_text(observation)
        codec.text_to_action("UP")
    assert (time.perf_counter() - start) / 200 < 1e-3
    envs.close()


def test_invalid_settings_raise():
    for id, kwargs, match in (
        (LAKES[0], {"size": 1}, "size is 1; it must be at least 2"),
        (LAKES[0], {"p": 0}, "p is 0; it must be in"),
        (LAKES[0], {"success_rate": 2}, "success_rate is 2; it must be in"),
        (SOKOBAN[0], {"size": 4}, "size is 4; it must be at least 5"),
        (SOKOBAN[0], {"num_boxes": 5}, "num_boxes is 5; it must be from 1 to 4 in a room of size 6"),
        (SOKOBAN[0], {"search_depth": 1}, "search_depth is 1; it must be at least 2"),
    ):
        with pytest.raises(ValueError, match=match):
            GymnasiumEnvs(id, kwargs=kwargs).make_native()


@pytest.mark.slow
@pytest.mark.parametrize("codec", [PlainBoardCodec("sokoban"), RagenBoardCodec("sokoban")])
def test_episodes_of_the_solver_are_demonstrations_for_text_policies(codec, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = GymnasiumEnvs(SOKOBAN[0], codec=codec)
    solver = load_baseline("expert", env).policy
    collect(solver, env, "lrl/solver-v0", 4, 3, 2, name="expert", commit="")
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="direct"), SamplingConfig())
    policy.configure()
    policy.connect(codec)
    source = MinariDemonstrations("lrl/solver-v0", split="all")
    source.validate(env)
    turns = source.load(codec, policy)
    assert {turn.response for turn in turns} <= set(codec.action_texts)
    native = env.make_native()
    shown, _ = native.reset(seed=3)
    assert codec.observation_to_text(shown) in [turn.observation for turn in turns]
