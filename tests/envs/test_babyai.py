"""Tests of the BabyAI-Text levels: sampling, rewards, views and the bot."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from minigrid.core.world_object import Ball
from minigrid.minigrid_env import MiniGridEnv

from lrl.codecs.babyai import BabyAICodec
from lrl.envs.babyai import LocalLevel, all_reachable
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.native import NativeEnv
from lrl.envs.text import AdvisedObservation, TextEnv
from lrl.evaluation.episodes import evaluate_policy
from lrl.policies.baselines import ExpertActor

TRAIN = ("GoTo", "Pickup", "Open", "PutNext", "PickUpSeqGoTo", "MixedTrain")
TEST = ("GoToTest", "PickupTest", "MixedTest")
HELD_OUT = ("yellow box", "red key", "red door", "green ball", "grey door")
NAMED = re.compile(r"(red|green|blue|purple|yellow|grey) (key|ball|box|door)")
MISSIONS = {
    "goto": r"go to (a|the) \w+ \w+",
    "pickup": r"pick up (a|the) \w+ \w+",
    "open": r"open the (\w+ )?door",
    "putnext": r"put (a|the) \w+ \w+ next to (a|the) \w+ \w+",
    "pickup_seq_goto": r"pick up (a|the) \w+ \w+, then go to (a|the) \w+ \w+"
    r"|go to (a|the) \w+ \w+ after you pick up (a|the) \w+ \w+",
}


def level_id(name: str) -> str:
    return f"lrl/BabyAI-{name}Local-v0"


def level(name: str, **kwargs) -> LocalLevel:
    env = GymnasiumEnvs(level_id(name), kwargs).make_native().unwrapped
    assert isinstance(env, LocalLevel)
    return env


def bot_failures(name: str, episodes: int, seed: int = 10_000) -> list[int]:
    """Return the seeds of the episodes in which the bot, acting through text, fails."""
    envs = GymnasiumEnvs(level_id(name))
    policy = ExpertActor()
    policy.connect(envs.codec)
    results = evaluate_policy(policy, envs, episodes, seed, num_envs=8)
    assert not results.invalid_actions.any()
    return [int(seed + i) for i in np.flatnonzero(~results.successes)]


@pytest.mark.parametrize("name", TRAIN + TEST)
def test_random_walks_through_text_equal_native_ones(name: str) -> None:
    native = NativeEnv(level(name))
    text, codec = TextEnv(level(name), BabyAICodec(), "direct"), BabyAICodec()
    rng = np.random.default_rng(0)
    steps, seed = 0, 0
    while steps < 1000:
        seen, _ = native.reset(seed=seed)
        shown, _ = text.reset(seed=seed)
        ended = False
        while not ended:
            assert native.observation_space.contains(seen)
            assert shown == codec.observation_to_text(seen)
            action = int(rng.choice(6, p=[0.2, 0.2, 0.4, 0.08, 0.08, 0.04]))
            seen, *outcome, info = native.step(action)
            shown, *said, told = text.step(codec.action_to_text(action))
            assert (outcome, info) == (said, told)
            steps, ended = steps + 1, outcome[1] or outcome[2]
        assert shown == codec.observation_to_text(seen)
        seed += 1


@pytest.mark.parametrize("name", TRAIN + TEST)
def test_missions_name_held_out_objects_only_and_always_in_test_levels(name: str) -> None:
    env, tasks = level(name), set()
    for seed in range(40):
        mission = env.reset(seed=seed)[0]["mission"]
        tasks.add(env.task)
        assert re.fullmatch(MISSIONS[env.task], mission)
        named = [match[0] for match in NAMED.finditer(mission)]
        assert all((thing in HELD_OUT) == (name in TEST) for thing in named), mission
        assert named or mission == "open the door"
        assert env.max_steps == (64 if env.task in ("goto", "pickup") else 128)
        assert env.num_cols == (2 if env.task == "open" else 1)
    assert tasks == set(env.tasks), "a mixed level samples its task at each reset"


@pytest.mark.parametrize(
    ("name", "kwargs"), [("PutNext", {}), ("Open", {}), ("Open", {"room_size": 5, "num_distractors": 2})]
)
def test_all_objects_are_reachable_and_none_is_in_front_of_the_agent(name: str, kwargs: dict) -> None:
    env = level(name, **kwargs)
    for seed in range(60):
        env.reset(seed=seed)
        assert env.check_objs_reachable(raise_exc=False)
        ahead = env.grid.get(*env.front_pos)
        assert env.grid.get(*env.agent_pos) is None and (ahead is None or ahead.type == "wall")


def test_reachability_equals_that_of_minigrid() -> None:
    env, rng, minigrid_results = level("GoTo", num_distractors=14), np.random.default_rng(0), []
    for _ in range(200):
        env.reset(seed=0)
        env.grid.wall_rect(0, 0, 8, 8)
        cells = rng.permutation([y * 8 + x for y in range(1, 7) for x in range(1, 7)]).tolist()
        agent, things = cells[0], cells[1:15]
        for cell in cells:
            env.grid.set(cell % 8, cell // 8, Ball("red") if cell in things else None)
        env.agent_pos = (agent % 8, agent // 8)
        minigrid_results.append(env.check_objs_reachable(raise_exc=False))
        assert all_reachable(8, agent, things) == minigrid_results[-1]
    assert 10 < sum(minigrid_results) < 190


def test_positions_are_uniform() -> None:
    env, agents, things = level("Pickup", num_distractors=0), np.zeros((8, 8)), np.zeros((8, 8))
    for seed in range(1500):
        env.reset(seed=seed)
        agents[env.agent_pos] += 1
        things += [[cell is not None and cell.type != "wall" for cell in env.grid.grid[x::8]] for x in range(8)]
    assert agents.sum() == things.sum() == 1500
    assert (agents[1:7, 1:7] > 15).all() and (agents < 80).all(), "1500 / 36 is 42"
    assert (things[1:7, 1:7] > 15).all() and (things < 80).all()


def test_open_has_a_locked_door_and_its_key_in_the_room_of_the_agent() -> None:
    env = level("Open")
    for seed in range(20):
        env.reset(seed=seed)
        things = [thing for thing in env.grid.grid if thing is not None and thing.type != "wall"]
        (door,) = [thing for thing in things if thing.type == "door"]
        assert door.is_locked and door.color in ("yellow", "green", "blue", "purple")
        assert any(thing.type == "key" and thing.color == door.color for thing in things)
        room = env.room_from_pos(*env.agent_pos)
        assert all(room.pos_inside(*thing.cur_pos) for thing in things)
        assert len(things) == 2 + 8


@pytest.mark.parametrize(("name", "objects"), [("GoTo", 4), ("Pickup", 4), ("PutNext", 5), ("PickUpSeqGoTo", 5)])
def test_the_number_of_distractors_can_be_set(name: str, objects: int) -> None:
    env = level(name, num_distractors=3)
    env.reset(seed=0)
    assert sum(thing is not None and thing.type != "wall" for thing in env.grid.grid) == objects


def test_the_reward_of_a_success_decreases_with_the_steps_and_all_others_are_zero() -> None:
    env = level("GoTo")
    for seed in range(5):
        env.reset(seed=seed)
        steps, ended = 0, False
        while not ended:
            _, reward, terminated, truncated, info = env.step(env.expert_action())
            steps, ended = steps + 1, terminated or truncated
            assert info["success"] is terminated
            assert reward == (pytest.approx(1 - 0.9 * steps / 64) if terminated else 0)


def test_the_time_limit_truncates_without_success() -> None:
    env = level("Pickup")
    env.reset(seed=0)
    outcomes = [env.step(0)[1:] for _ in range(64)]
    assert outcomes[-1] == (0.0, False, True, {"success": False})
    assert not any(terminated or truncated for _, terminated, truncated, _ in outcomes[:-1])


@pytest.mark.parametrize("name", ["MixedTrain", "MixedTest"])
def test_the_seed_of_a_reset_determines_the_level(name: str) -> None:
    first, second = NativeEnv(level(name)), NativeEnv(level(name))
    second.noise_seed = 7
    for _ in range(3):
        second.reset(seed=99)
        second.step(2)
    missions = set()
    for seed in range(12):
        (one, _), (two, _) = first.reset(seed=seed), second.reset(seed=seed)
        assert one["mission"] == two["mission"]
        for action in (2, 1, 2, 0, 3, 2):
            assert np.array_equal(one["image"], two["image"])
            one, two = first.step(action)[0], second.step(action)[0]
        missions.add(one["mission"])
    assert len(missions) > 6
    assert second.reset()[0]["mission"], "a reset without a seed samples a new level"


def test_creating_levels_prints_nothing(capfd) -> None:
    env = level("PutNext")
    for seed in range(30):
        env.reset(seed=seed)
    assert capfd.readouterr() == ("", "")


def advised_walk(env: VectorEnv, steps: int) -> list:
    env.set_attr("advises", True)
    seeds = list(range(env.num_envs))
    observations, _ = env.reset(seed=seeds)
    trace = []
    for _ in range(steps):
        assert all(isinstance(seen, AdvisedObservation) for seen in observations)
        advice = [seen.expert_action for seen in observations]
        trace.append((observations, advice))
        observations, _, terminated, truncated, infos = env.step(
            tuple(BabyAICodec().action_to_text(action) for action in advice)
        )
        if (ended := terminated | truncated).any():
            assert infos["success"][ended].all()
            fresh, _ = env.reset(seed=seeds, options={"reset_mask": ended})
            observations = [new if again else old for new, old, again in zip(fresh, observations, ended)]
    return trace


@pytest.mark.slow
def test_advice_comes_with_the_text_in_this_process_and_from_others() -> None:
    traces = []
    for vectorization in ("sync", "async"):
        env = GymnasiumEnvs(level_id("Pickup"), vectorization=vectorization).make(2, "direct")
        try:
            traces.append(advised_walk(env, 12))
        finally:
            env.close()
    assert traces[0] == traces[1]


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_native_observations_contain_the_missions(vectorization) -> None:
    env = GymnasiumEnvs(level_id("GoTo"), vectorization=vectorization).make(2, None)
    alone = level("GoTo")
    try:
        observations, _ = env.reset(seed=[3, 4])
        expected = [alone.reset(seed=seed)[0] for seed in (3, 4)]
        assert list(observations["mission"]) == [observation["mission"] for observation in expected]
        assert np.array_equal(observations["image"], [observation["image"] for observation in expected])
    finally:
        env.close()


def test_an_invalid_answer_changes_neither_room_nor_advice() -> None:
    env = TextEnv(level("GoTo"), BabyAICodec(), "direct")
    env.advises = True
    shown, _ = env.reset(seed=3)
    refused, *_ = env.step("jump")
    assert isinstance(refused, AdvisedObservation) and refused.endswith("\n" + shown)
    assert refused.expert_action == shown.expert_action
    env.advises = False
    assert type(env.reset(seed=3)[0]) is str


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Open", "PutNext"])
def test_the_view_equals_that_of_minigrid(name: str) -> None:
    env, rng = level(name), np.random.default_rng(1)
    for seed in range(15):
        observation, _ = env.reset(seed=seed)
        for step in range(60):
            native = MiniGridEnv.gen_obs(env)
            assert observation["image"].dtype == native["image"].dtype
            assert np.array_equal(observation["image"], native["image"])
            assert (observation["direction"], observation["mission"]) == (native["direction"], native["mission"])
            action = env.expert_action() if step < 15 else rng.integers(6)
            observation = env.step(action)[0]


def test_the_bot_is_only_created_on_demand() -> None:
    env = level("GoTo")
    env.reset(seed=0)
    env.step(2)
    assert env._bot is None


@pytest.mark.parametrize("name", ["GoTo", "Open", "PutNext"])
def test_the_bot_takes_account_of_other_actions(name: str) -> None:
    env, rng, successes = level(name), np.random.default_rng(0), 0
    for seed in range(20):
        env.reset(seed=seed)
        ended, info = False, {}
        while not ended:
            advice = env.expert_action()
            assert advice == env.expert_action(), "repeated calls return the same action"
            action = int(rng.integers(6)) if rng.random() < 0.4 else advice
            *_, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        successes += info["success"]
    assert successes >= 18, "opening a box removes it, which makes some missions impossible"


@pytest.mark.parametrize("name", TRAIN + TEST)
def test_the_bot_succeeds_through_text(name: str) -> None:
    assert bot_failures(name, 10) == []


def test_the_number_of_distractors_is_sampled_from_a_list_at_each_reset() -> None:
    env, counts = level("GoTo", num_distractors=[0, 3, 5]), []
    for seed in range(60):
        env.reset(seed=seed)
        counts.append(sum(thing is not None and thing.type != "wall" for thing in env.grid.grid) - 1)
        assert counts[-1] == env.num_distractors
    assert set(counts) == {0, 3, 5} and min(map(counts.count, (0, 3, 5))) >= 10
    env.reset(seed=7)
    assert env.num_distractors == counts[7], "it is determined by the seed"


def test_a_list_with_one_number_equals_the_number() -> None:
    rooms = []
    for number in (3, [3]):
        env = level("Pickup", num_distractors=number)
        env.reset(seed=1)
        rooms.append(str(env))
    assert rooms[0] == rooms[1]


@pytest.mark.reference
@pytest.mark.parametrize("name", TRAIN + TEST)
def test_the_bot_succeeds_through_text_on_200_seeds(name: str) -> None:
    assert bot_failures(name, 200) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tasks": ["fly"]}, "tasks is ['fly']; it must be a non-empty list of goto, pickup"),
        ({"tasks": "goto"}, "tasks is 'goto'; it must be a list"),
        ({"split": "all"}, "split is 'all'; it must be one of train, test"),
        ({"room_size": 4}, "room_size is 4; it must be at least 5"),
        ({"last_actions": -1}, "last_actions is -1; it must be an integer of at least 0"),
        ({"last_actions": 2.0}, "last_actions is 2.0; it must be an integer"),
        ({"last_actions": None}, "last_actions is None; it must be an integer"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"num_distractors": -1}, "num_distractors is -1; it must be an integer from 0 to 16"),
        ({"num_distractors": [3, True]}, "num_distractors is True; it must be an integer from 0 to 16"),
        ({"num_distractors": []}, "num_distractors is []; it must be a number or a non-empty list of numbers"),
        ({"num_distractors": [0, 17]}, "num_distractors is 17; it must be an integer from 0 to 16"),
        ({"num_distractors": 17}, "num_distractors is 17; it must be an integer from 0 to 16"),
    ],
)
def test_an_invalid_setting_raises_with_its_key(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        GymnasiumEnvs(level_id("MixedTrain"), kwargs).make(1, "direct")
    assert message in str(error.value)
