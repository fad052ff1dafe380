"""Tests of the maps of FrozenLake and of the data sets of their states."""

import numpy as np
import pytest

from lrl.codecs.toy_text import FrozenLakeCodec, get_desc, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows, RandomMapRows, map_split, named_map, random_maps, transition_table
from lrl.envs.tabular import optimal_success

RANDOM = "lrl/FrozenLakeRandomMaps-v0"


def test_the_seed_determines_the_map() -> None:
    env = GymnasiumEnvs(RANDOM).make_native()
    maps = []
    for seed in [*range(20), *range(20)]:
        env.reset(seed=seed)
        maps.append(get_desc(env))
    assert maps[:20] == maps[20:] and len(set(maps)) > 10
    env.reset(seed=0)
    following = [(env.reset(), get_desc(env))[1] for _ in range(5)]
    assert len(set(following)) > 1, "resets without a seed sample new maps"


def test_splits_are_disjoint_and_goals_are_reachable() -> None:
    for split in ("train", "test"):
        env = GymnasiumEnvs(RANDOM, kwargs={"split": split}).make_native()
        for seed in range(50):
            env.reset(seed=seed)
            assert map_split(get_desc(env)) == split
            assert optimal_success(transition_table(get_desc(env))) > 0
    train, test = set(random_maps(300, 0, "train")), set(random_maps(100, 0, "test"))
    assert len(train) == 300 and len(test) == 100 and not train & test
    everything = random_maps(400, 1, "all")
    assert 0.1 < np.mean([map_split(desc) == "test" for desc in everything]) < 0.3


def test_the_split_of_a_map_does_not_change() -> None:
    families = [map_split(desc) for desc in random_maps(12, 0, "all")]
    assert families.count("test") == 2 and map_split(named_map("4x4")) == "train"


def test_transitions_follow_the_table_of_the_random_map() -> None:
    env = GymnasiumEnvs(RANDOM, kwargs={"size": 5, "is_slippery": False}).make_native()
    for seed in range(10):
        state, _ = env.reset(seed=seed)
        assert state == 0 and env.observation_space.n == 25
        table = transition_table(get_desc(env), is_slippery=False)
        for action in np.random.default_rng(seed).integers(4, size=20):
            after, reward, terminated, *_ = env.step(int(action))
            assert after == table.next_state[state, action, 0] and reward == table.reward[state, action, 0]
            assert terminated == table.terminated[state, action, 0]
            if terminated:
                break
            state = after


def test_equal_seeds_share_their_map_also_in_processes() -> None:
    shown = []
    for vectorization in ("sync", "async"):
        env = GymnasiumEnvs(RANDOM, vectorization=vectorization).make(3, "direct")
        try:
            env.set_attr("noise_seed", [1, 2, 3])
            shown.append(env.reset(seed=[5, 5, 6])[0])
        finally:
            env.close()
    assert shown[0] == shown[1]
    assert shown[0][0] == shown[0][1] != shown[0][2]


def test_the_description_mentions_slippery_ice_only_if_it_is_slippery() -> None:
    assert "slippery" in GymnasiumEnvs("FrozenLake-v1").codec.description
    dry = GymnasiumEnvs("FrozenLake-v1", kwargs={"is_slippery": False}).codec.description
    assert "slippery" not in dry and "  " not in dry


def test_the_rows_of_the_4x4_map() -> None:
    rows = ExpertQRows().rows()
    assert [row.state for row in rows] == [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14]
    assert [row.best_actions for row in rows] == [(0,), (3,), (3,), (3,), (0,), (0, 2), (3,), (1,), (0,), (2,), (1,)]
    assert all(row.action in row.best_actions for row in rows)
    assert all(
        row.observation
        == render_map(row.state, named_map("4x4"))
        == FrozenLakeCodec().observation_to_text(row.state, row.desc)
        for row in rows
    )


def test_the_number_of_rows_of_a_custom_map_and_of_the_8x8_map() -> None:
    assert [row.best_actions for row in ExpertQRows(desc=["SFG"], is_slippery=False).rows()] == [(2,), (2,)]
    assert len(ExpertQRows("8x8").rows()) == 53


def test_the_rows_of_random_maps_equal_those_of_single_maps() -> None:
    rows = RandomMapRows(num_maps=30, seed=3, split="test").rows()
    maps = {row.desc for row in rows}
    assert len(maps) == 30 and all(map_split(desc) == "test" for desc in maps)
    assert len({(row.desc, row.state) for row in rows}) == len(rows)
    assert rows == RandomMapRows(num_maps=30, seed=3, split="test").rows()
    for desc in list(maps)[:5]:
        alone = ExpertQRows(desc=desc).rows()
        together = [row for row in rows if row.desc == desc]
        assert [row.best_actions for row in alone] == [row.best_actions for row in together]
        np.testing.assert_allclose([r.q_values for r in alone], [r.q_values for r in together], atol=1e-7)


def test_invalid_settings_raise() -> None:
    with pytest.raises(ValueError, match="map_name is '5x5'"):
        ExpertQRows("5x5")
    with pytest.raises(ValueError, match="split is 'valid'"):
        RandomMapRows(2, split="valid").rows()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="size is 1"):
        random_maps(1, 0, size=1)
    with pytest.raises(ValueError, match="num_maps is 40; .* of size 2"):
        random_maps(40, 0, "all", size=2)
    with pytest.raises(ValueError, match="p is 0"):
        GymnasiumEnvs(RANDOM, kwargs={"p": 0}).make_native()
