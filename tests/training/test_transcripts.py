"""Whole episodes on paper, and parts of those that go on."""

import errno
import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tiny_runs

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.evaluation.report_episodes import chosen_episodes, read_transcripts
from lrl.faults import DiskFullError
from lrl.policies.baselines import RandomActor
from lrl.rewards.reward import Reward
from lrl.training import transcripts
from lrl.training.collect import CollectionPlan, EpisodeCollector, FixedHorizonCollector, record_rollout
from lrl.training.transcripts import Transcripts, episodes_of, write_episodes

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
    assert page.count("=== collection 8") == 2 and page.count("\n--- turn 0\n") == 2


def test_a_disk_that_is_full_during_a_transcript_leaves_the_earlier_episodes(tmp_path, monkeypatch):
    plan = CollectionPlan(seed=0, collection=0, num_groups=2, group_size=1)
    episodes = list(episodes_of(EpisodeCollector(random_policy(), LAKE.make(2, "direct")).collect(plan), 2))
    for folder, collections in ((tmp_path / "new", 0), (tmp_path / "old", 1)):
        for collection in range(collections):
            write_episodes(folder, collection, episodes)
        before = {path.name: path.read_bytes() for path in folder.iterdir()} if collections else {}
        calls = count()

        def readable(collection, episode, calls=calls):
            if next(calls) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return "one episode\n"

        with monkeypatch.context() as patch:
            patch.setattr(transcripts, "readable", readable)
            with pytest.raises(DiskFullError, match=rf"the transcript '{folder}/transcripts.jsonl' was not written"):
                write_episodes(folder, 1, episodes)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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


def test_turns_have_the_numbers_of_their_tokens_before_and_after_training(tiny_model, tmp_path):
    module, data = tiny_runs.module_of(tiny_model, "continuing"), tiny_runs.rollout_data("continuing")
    tiny_runs.train(tmp_path, Transcripts(1, 2), module=module, data=data, max_epochs=1)
    episodes = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    turns = [turn for episode in episodes if episode["env"] == 6 for turn in episode["turns"]]
    rows = [int(time * 12 + 6) for time in range(4)]  # all environments are active
    batch, tokenizer = data.batch[np.array(rows)], module.policy.language_model.tokenizer
    found = {"logprobs": batch.old_logprobs, "advantages": batch.advantages, "values": batch.old_values}
    found["new_logprobs"] = module.policy.evaluate(batch).logprobs.detach()
    for row, turn in enumerate(turns):
        count = turn["response_tokens"]
        assert len(turn["tokens"]) == count and "row" not in turn
        ids = batch.inputs["response_ids"][row, :count].tolist()
        assert turn["tokens"] == [tokenizer.tokenizer.decode([one]) for one in ids]
        for name, values in found.items():
            np.testing.assert_allclose(turn[name], values[row, :count], rtol=1e-3, err_msg=name)
    assert len(turns) == 4 and any(turn["logprobs"] != turn["new_logprobs"] for turn in turns)


class StateReward(Reward):
    """A reward that differs between the states."""

    name = "state"

    def __call__(self, rows, responses, actions):
        return np.array([float(row.state) for row in rows])


class ResponseReward(StateReward):
    name = "response"

    def __call__(self, rows, responses, actions):
        return np.array([float(len(response)) for response in responses])


def test_the_terms_of_a_reward_are_those_of_each_turn(tmp_path):
    envs = PromptEnvs(ExpertQRows(), [StateReward(weight=2.0), ResponseReward(weight=0.5)])
    plan = CollectionPlan(seed=0, collection=0, num_groups=6, group_size=2)
    policy = RandomActor("direct")
    policy.has_critic = False
    policy.connect(envs.codec)
    rollout = EpisodeCollector(policy, envs.make(12, "direct")).collect(plan)
    write_episodes(tmp_path, 0, list(episodes_of(rollout, 12)))
    episodes = read_transcripts(tmp_path / "transcripts.jsonl", problems := [])
    turns = [turn for episode in episodes for turn in episode["turns"]]
    for turn in turns:
        terms = turn["reward_terms"]
        assert terms.keys() == {"state", "response"} and terms["response"] == len(turn["response"])
        assert turn["reward"] == pytest.approx(2 * terms["state"] + 0.5 * terms["response"])
    assert len({turn["reward_terms"]["state"] for turn in turns}) > 2 and not problems
    terms = turns[0]["reward_terms"]
    line = f"reward {turns[0]['reward']:.4g} (response {terms['response']:.4g}, state {terms['state']:.4g})\n"
    assert line in (tmp_path / "transcripts.txt").read_text()
    assert all("(response " in shown.turns[0].head for shown in chosen_episodes(episodes))


class TermsEnv(gym.Env):
    """Episodes of 2 to 4 steps; the first term is the number of steps so far, the second one is reported at the end."""

    observation_space, action_space = gym.spaces.Discrete(9), gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, 2 + (seed or 0) % 3
        return 0, {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        terms = {"reward_steps": float(self.steps)} | ({"reward_end": 10.0} if ended else {})
        return self.steps, sum(terms.values()), ended, False, terms


@pytest.mark.parametrize("num_steps", [None, 7])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_the_terms_of_a_native_environment_are_those_of_each_turn(num_steps, num_envs):
    gym.register("lrl-test/Terms-v0", TermsEnv, max_episode_steps=9)
    try:
        envs = GymnasiumEnvs("lrl-test/Terms-v0", max_invalid=9)
        policy = RandomActor("direct")
        policy.has_critic = False
        policy.connect(envs.codec)
        made = envs.make(num_envs, "direct")
        invalid = iter(range(10**6))
        act = policy.act

        def sometimes_invalid(*given):
            decisions = act(*given)
            actions = ["nothing" if next(invalid) % 5 == 2 else one for one in decisions.actions]
            return replace(decisions, actions=actions)

        policy.act = sometimes_invalid
        plan = CollectionPlan(seed=0, collection=0, num_groups=num_envs, group_size=1, num_steps=num_steps)
        if num_steps is None:
            rollout = EpisodeCollector(policy, made).collect(plan)
        else:
            rollout = FixedHorizonCollector(policy, made, 0, np.arange(num_envs), num_envs).collect(plan)
    finally:
        gym.registry.pop("lrl-test/Terms-v0")
    turns = [turn for episode in episodes_of(rollout, num_envs) for turn in episode["turns"]]
    assert not all(turn["valid"] for turn in turns)
    for turn in turns:
        terms = turn.get("reward_terms", {})
        assert turn["valid"] == ("steps" in terms) and (sum(terms.values()) == turn["reward"] or not turn["valid"])
    reported = [turn["reward_terms"] for turn in turns if "reward_terms" in turn]
    assert {len(terms) for terms in reported} == {1, 2}
    module = SimpleNamespace(recorded={}, max_response_tokens=1, trainer=SimpleNamespace(world_size=1))
    module.record = lambda name, values: module.recorded.__setitem__(name, values.tolist())
    record_rollout(module, rollout, 1.0)
    for name in ("steps", "end"):
        values = sorted(terms[name] for terms in reported if name in terms)
        assert sorted(module.recorded[f"rollout/reward_{name}"]) == values


@pytest.mark.parametrize("terms", ["state", [], [["a", 1.0]], {"a": "b"}, None])
def test_damaged_terms_are_a_damaged_line(terms, tmp_path):
    turn = {"response": "", "reward": 0.0, "reward_terms": terms}
    (tmp_path / "lines").write_text(json.dumps({"return": 0.0, "collection": 0, "turns": [turn]}) + "\n")
    assert not read_transcripts(tmp_path / "lines", problems := []) and "1 line" in problems[0]
