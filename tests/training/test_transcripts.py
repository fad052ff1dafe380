"""Whole episodes on paper, and parts of those that go on."""

import json

import numpy as np

from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.baselines import RandomActor
from lrl.training.collect import CollectionPlan, EpisodeCollector, FixedHorizonCollector
from lrl.training.transcripts import episodes_of, write_episodes

LAKE = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=5)


def random_policy():
    policy = RandomActor("direct")
    policy.has_critic = False
    policy.connect(LAKE.codec)
    return policy


def test_an_episode_has_its_turns_its_return_and_its_end(tmp_path):
    plan = CollectionPlan(seed=0, collection=0, num_groups=6, group_size=1)
    rollout = EpisodeCollector(random_policy(), LAKE.make(6, "direct")).collect(plan)
    episodes = list(episodes_of(rollout, 6))
    assert [len(episode["turns"]) for episode in episodes] == rollout.lengths.tolist()
    assert [episode["return"] for episode in episodes] == rollout.episode_returns.tolist()
    assert all(episode["terminated"] or episode["truncated"] for episode in episodes)
    assert [episode["env"] for episode in episodes_of(rollout, 3)] == [0, 2, 4]
    write_episodes(tmp_path, 7, list(episodes_of(rollout, 2)))
    lines = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["collection"] == 7 for line in lines)
    page = (tmp_path / "transcripts.txt").read_text()
    assert page.count("=== collection 7") == 2 and page.count("\n--- turn 0\n") == 2


def test_episodes_that_continue_are_separated(tmp_path):
    playing = FixedHorizonCollector(random_policy(), LAKE.make(2, "direct"), 0, np.arange(2), 2)
    plan = CollectionPlan(seed=0, collection=0, num_groups=2, group_size=1, num_steps=12)
    rollout = playing.collect(plan)
    for env in range(2):
        told = [episode for episode in episodes_of(rollout, 2) if episode["env"] == env]
        assert sum(len(episode["turns"]) for episode in told) == 12
        assert all(episode["turns"][0]["turn"] == 0 and len(episode["turns"]) <= 5 for episode in told)
        assert all(episode["terminated"] or episode["truncated"] for episode in told[:-1])
    write_episodes(tmp_path, 0, list(episodes_of(rollout, 1)))
    last = list(episodes_of(rollout, 1))[-1]
    ends = (tmp_path / "transcripts.txt").read_text().count("goes on")
    assert ends == (not (last["terminated"] or last["truncated"]))
