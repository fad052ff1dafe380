"""Tests of the transitions of a data set: whole episodes are held out, and every row is visited once per pass."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lrl.data.transitions import TransitionsDataModule, discounted_rewards
from lrl.envs.minari_storage import DatasetWriter

EPISODES, STEPS = 12, 5


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    (tmp_path / "datasets").mkdir()


def write(dataset_id="lrl/numbers-v0", episodes=EPISODES, rewards=None, first=0, actions=2, terminated=False, short=()):
    """Write episodes whose observations are (episode, step), actions step % 2 and rewards 10 * episode + step."""
    with DatasetWriter(dataset_id, spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(actions), None) as writer:
        for episode in range(first, first + episodes):
            steps = 1 if episode in short else STEPS
            given = [10.0 * episode + step for step in range(steps)] if rewards is None else rewards
            one = {"seed": episode, "context": None, "success": False, "random_steps": []}
            one["observations"] = [np.array([episode, step], dtype=np.float64) for step in range(steps + 1)]
            one |= {"actions": [np.int64(step % 2) for step in range(steps)], "rewards": given}
            one["terminations"] = [False] * (steps - 1) + [terminated]
            one["truncations"] = [False] * (steps - 1) + [not terminated]
            writer.add([one])
        writer.finish({})


def loaded(**settings):
    """Return the data module of the data set after it was read."""
    data = TransitionsDataModule(**{"dataset_id": "lrl/numbers-v0", "batch_size": 16} | settings)
    data.load()
    return data


def test_a_row_is_observation_action_and_reward_of_one_step():
    write()
    data = loaded()
    for split in ("train", "validation", "test"):
        inputs, rewards = data.rows(split)
        for row, reward in zip(inputs.tolist(), rewards.tolist(), strict=True):
            episode, step, *action = row
            assert reward == 10 * episode + step and action == [float(step % 2 == 0), float(step % 2 == 1)]
        assert inputs.dtype == rewards.dtype == torch.float32


def test_episodes_are_held_out_whole():
    write()
    data = loaded(validation_share=0.25, test_share=0.1)
    held = {split: data.rows(split)[0][:, 0].tolist() for split in ("train", "validation", "test")}
    assert [len(set(episodes)) for episodes in held.values()] == [8, 3, 1]
    assert sorted(one for episodes in held.values() for one in set(episodes)) == list(range(EPISODES))
    assert all(episodes.count(one) == STEPS for episodes in held.values() for one in episodes)
    assert {name: sorted(set(episodes)) for name, episodes in held.items()} == {
        name: sorted(indices.tolist()) for name, indices in data.episodes.items()
    }


@pytest.mark.slow
def test_several_data_sets_are_split_each_as_if_it_were_alone():
    write()
    write("lrl/more-v0", episodes=20, first=EPISODES)
    alone = loaded(), loaded(dataset_id="lrl/more-v0")
    both = loaded(dataset_id=["lrl/numbers-v0", "lrl/more-v0"])
    for split in ("train", "validation", "test"):
        first, second = (one.rows(split) for one in alone)
        inputs, rewards = both.rows(split)
        assert torch.equal(inputs, torch.cat([first[0], second[0]]))
        assert torch.equal(rewards, torch.cat([first[1], second[1]]))
        assert sorted(set(inputs[:, 0].tolist())) == sorted(both.episodes[split].tolist())


def test_a_discount_makes_the_reward_of_a_step_its_return():
    write(terminated=True)
    inputs, worth = loaded(gamma=0.5).rows("train")
    for (episode, step, *_), value in zip(inputs.tolist(), worth.tolist(), strict=True):
        following = [10 * episode + later for later in range(int(step), STEPS)]
        assert value == pytest.approx(0.5 * sum(0.5**k * reward for k, reward in enumerate(following)))


@pytest.mark.parametrize(
    ("terminated", "gamma", "expected"),
    [
        (True, 0.0, [1.0, 2.0, 4.0]),
        (False, 0.0, [1.0, 2.0, 4.0]),
        (True, 0.5, [0.5 * (1 + 1 + 1), 0.5 * (2 + 2), 0.5 * 4]),
        (False, 0.1, [0.9 * (1 + 0.2 + 0.04), 0.9 * (2 + 0.4)]),  # of 4 a tenth is unknown
        (False, 0.5, []),  # of any an eighth or more
    ],
)
def test_returns_beyond_a_time_limit_are_left_out(terminated, gamma, expected):
    worth = discounted_rewards(np.array([1.0, 2.0, 4.0]), terminated, gamma)
    assert worth.dtype == torch.float32 and worth.tolist() == pytest.approx(expected)


def test_a_discount_that_no_episode_is_long_enough_for_is_named():
    write()
    with pytest.raises(ValueError, match="whose train split contains no step with enough known rewards after it"):
        loaded(gamma=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_discount_for_which_the_episodes_of_a_split_are_too_short_is_named(split):
    write()
    write("lrl/short-v0", short=loaded().episodes[split])
    with pytest.raises(ValueError, match=f"whose {split} split contains no step with enough known rewards"):
        loaded(dataset_id="lrl/short-v0", gamma=0.1)


@pytest.mark.slow
def test_data_sets_of_other_spaces_are_named():
    write()
    write("lrl/more-v0", actions=3)
    with pytest.raises(
        ValueError, match=r"data.dataset_id is 'lrl/more-v0', whose action space is Discrete\(3\); it m"
    ):
        loaded(dataset_id=["lrl/numbers-v0", "lrl/more-v0"])


def test_the_split_follows_from_the_seed():
    write()
    first, again, other = (loaded(seed=seed).episodes["validation"].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_a_pass_visits_every_row_once_and_fills_the_last_batch():
    write()
    data = loaded(validation_share=0.1, test_share=0)  # 11 episodes, 55 rows
    rows = data.rows("train")[1].tolist()
    assert data.num_batches() == 4
    batches = [data.batch(3, index)[1].tolist() for index in range(4)]
    assert [len(batch) for batch in batches] == [16] * 4
    visited = [reward for batch in batches for reward in batch]
    assert sorted(visited[:55]) == sorted(rows) and visited[55:] == visited[:9]
    assert visited[:55] != rows
    assert data.batch(4, 0)[1].tolist() != batches[0] == data.batch(3, 0)[1].tolist()


def test_ranks_share_a_batch_without_overlap():
    write()
    data = loaded()
    inputs, rewards = data.batch(0, 1)
    parts = [data.batch(0, 1, rank, 3) for rank in range(3)]
    assert [len(part[1]) for part in parts] == [6, 5, 5]
    assert all(torch.equal(rewards[rank::3], part[1]) for rank, part in enumerate(parts))
    assert all(torch.equal(inputs[rank::3], part[0]) for rank, part in enumerate(parts))


def test_ranks_share_the_held_out_rows():
    write()
    data, parts = loaded(validation_share=0.25), []
    for rank in range(2):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        ((_, rewards),) = data.val_dataloader()
        parts.append(rewards.tolist())
    assert [len(part) for part in parts] == [8, 7]
    assert sorted(parts[0] + parts[1]) == sorted(data.rows("validation")[1].tolist())


@pytest.mark.parametrize(
    ("given", "settings", "sentence"),
    [
        ({"episodes": 2}, {}, "contains 2 episodes; .* hold out 2, so that none is left to train on"),
        ({"rewards": [1.0] * STEPS}, {}, "whose rewards are all 1; a reward model needs rewards that differ"),
        ({"rewards": [1.0, 2.0, np.nan, 0.0, 0.0]}, {}, "split contains numbers that are not finite"),
    ],
)
def test_data_sets_that_a_reward_model_cannot_learn_from_raise_one_sentence(given, settings, sentence):
    write(**given)
    with pytest.raises(ValueError, match=sentence) as caught:
        loaded(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"validation_share": 0}, r"data.validation_share is 0; it must be in \(0, 1\)"),
        ({"test_share": 1}, r"data.test_share is 1; it must be in \[0, 1\)"),
        ({"batch_size": 0}, "data.batch_size is 0; it must be at least 1"),
        ({"gamma": 1.0}, r"data.gamma is 1.0; it must be in \[0, 1\)"),
        ({"dataset_id": []}, r"data.dataset_id is \[\]; it must be a name, or a list of different names"),
        ({"dataset_id": ["lrl/a-v0"] * 2}, "data.dataset_id is .*; it must be a name, or a list of different names"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TransitionsDataModule(**{"dataset_id": "lrl/numbers-v0"} | settings)


def test_testing_without_a_test_split_raises_one_sentence():
    write()
    with pytest.raises(ValueError, match="data.test_share is 0; it must be positive for lrl test"):
        loaded(test_share=0).rows("test")


def test_a_batch_of_one_row_per_device_is_named():
    data = TransitionsDataModule("lrl/numbers-v0", batch_size=3)
    data.trainer = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="data.batch_size is 3; it must be at least 2 for each of the 2 devices"):
        data.setup("fit")
