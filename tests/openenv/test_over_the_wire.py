"""Tests that episodes over the wire equal those of the same environment in this process."""

import numpy as np
import pytest
from openenv_server import serving, serving_process

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.processes import EnvironmentFailedError
from lrl.openenv.codec import OpenEnvCodec
from lrl.openenv.factory import OpenEnvEnvs

BABYAI = "lrl/BabyAI-GoToLocal-v0"


def walk(envs, texts, response_format, steps=60, noise=False):
    """Play random actions in three environments, with one invalid response in ten, and return all results."""
    rng, trace = np.random.default_rng(0), []
    if noise:
        envs.set_attr("noise_seed", [7, 8, 9])
    texts_seen, infos = envs.reset(seed=[3, 4, 5], options={"episode": np.arange(3)})
    trace.append((tuple(texts_seen), infos["action_valid"].tolist(), infos["success"].tolist()))
    for turn in range(steps):
        responses = [rendered(rng, texts, response_format) for _ in range(3)]
        seen, rewards, terminated, truncated, infos = envs.step(tuple(responses))
        facts = [infos[name].tolist() for name in ("action_valid", "success", "invalid_reason")]
        trace.append((tuple(seen), rewards.tolist(), terminated.tolist(), truncated.tolist(), *facts))
        ended = terminated | truncated
        if ended.any():
            seeds = [turn, 100 + turn, 200 + turn]
            texts_seen, _ = envs.reset(seed=seeds, options={"reset_mask": ended, "episode": np.arange(3)})
            trace.append(tuple(texts_seen))
    return trace


def rendered(rng, texts, response_format):
    """Return a response that is mostly valid."""
    text = "dance" if rng.random() < 0.1 else texts[rng.integers(len(texts))]
    if response_format == "direct" or rng.random() < 0.05:
        return text
    return f"<think>so</think><answer>{text}</answer>"


def both(here, response_format, texts=None, **walking):
    """Return the results in this process and over the wire."""
    with serving(here) as url:
        there = OpenEnvEnvs(url, max_invalid=here.max_invalid, invalid_penalty=here.invalid_penalty)
        assert there.codec.description == here.codec.description
        assert there.codec.action_texts == here.codec.action_texts
        traces = []
        for factory in (here, there):
            envs = factory.make(3, response_format)
            traces.append(walk(envs, texts or here.codec.action_texts, response_format, **walking))
            envs.close()
    return traces


@pytest.mark.parametrize("response_format", ["direct", "think_answer"])
@pytest.mark.parametrize("id", ["FrozenLake-v1", BABYAI])
def test_episodes_over_the_wire_equal_those_in_this_process(id, response_format):
    here, there = both(GymnasiumEnvs(id, max_invalid=2), response_format)
    assert here == there
    ends = [turn for turn in here[1:] if len(turn) == 7]
    assert any(any(turn[2]) for turn in ends) and any(not all(turn[4]) for turn in ends)


def test_a_time_limit_of_the_server_truncates():
    here, there = both(GymnasiumEnvs("FrozenLake-v1", max_episode_steps=4, max_invalid=3), "direct")
    assert here == there
    assert any(any(turn[3]) for turn in here if len(turn) == 7)


def test_the_noise_seed_of_a_group_is_sent_over_the_wire():
    here, there = both(GymnasiumEnvs("FrozenLake-v1"), "direct", noise=True)
    assert here == there
    assert here != both(GymnasiumEnvs("FrozenLake-v1"), "direct")[0]


def test_actions_that_only_the_server_can_parse_follow_the_rule_of_invalid_actions():
    texts = ["<action>0.5</action>", "<action>9</action>", "<action>much</action>", "0.5", ""]
    settings = {"max_invalid": 3, "max_episode_steps": 40}
    here, there = both(GymnasiumEnvs("MountainCarContinuous-v0", **settings), "think_answer", texts)
    assert here == there
    reasons = {reason for turn in here if len(turn) == 7 for reason in turn[6]}
    assert len(reasons) >= 4  # of the format, of the tags, of the number, and none


def test_settings_of_the_client_and_reset_options_are_used():
    with serving(GymnasiumEnvs("CartPole-v1")) as url:
        options = {"low": -0.001, "high": 0.001}
        envs = OpenEnvEnvs(url, max_episode_steps=2, invalid_penalty=-0.5, reset_options=options).make(1, "direct")
        (text,), _ = envs.reset(seed=[0])
        here = GymnasiumEnvs("CartPole-v1", reset_options=options).make(1, "direct")
        assert here.reset(seed=[0])[0] == (text,) and text != here.reset(seed=[1])[0][0]
        *_, infos = envs.step(("fly",))
        assert not infos["action_valid"][0]
        envs.step((OpenEnvEnvs(url).codec.action_texts[0],))
        _, rewards, terminated, truncated, _ = envs.step(("fly",))
        assert rewards.tolist() == [-0.5] and not terminated[0] and not truncated[0]
        envs.close()


def test_all_actions_are_sent_before_the_first_outcome_is_read(monkeypatch):
    order = []
    from lrl.openenv import sessions

    for name in ("_write", "_read"):
        known = getattr(sessions.SocketSession, name)
        monkeypatch.setattr(
            sessions.SocketSession, name, lambda self, *a, _n=name, _k=known: order.append(_n) or _k(self, *a)
        )
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        envs = OpenEnvEnvs(url).make(3, "direct")
        envs.reset(seed=[0, 1, 2])
        order.clear()
        envs.step(("LEFT", "nowhere", "DOWN"))
        envs.close()
    assert order == ["_write", "_write", "_read", "_read"]


def test_more_environments_than_sessions_raise_one_sentence():
    with serving(GymnasiumEnvs("FrozenLake-v1"), max_sessions=2) as url:
        envs = OpenEnvEnvs(url).make(3, "direct")
        with pytest.raises(EnvironmentFailedError, match="environment 2 of .* all 2 sessions are taken"):
            envs.reset(seed=[0, 1, 2])
        envs.close()
        again = OpenEnvEnvs(url).make(2, "direct")  # the sessions were given back
        again.reset(seed=[0, 1])
        again.close()


@pytest.mark.slow
def test_a_server_that_is_killed_in_an_episode_raises_one_sentence():
    with serving_process("--env_id", "FrozenLake-v1") as (url, kill):
        envs = OpenEnvEnvs(url).make(2, "direct")
        envs.reset(seed=[11, 12])
        envs.step(("LEFT", "LEFT"))
        kill()
        with pytest.raises(EnvironmentFailedError) as error:
            envs.step(("LEFT", "LEFT"))
        envs.close()
        sentence = str(error.value)
        assert sentence.startswith(f"environment 0 of {url} (episode seed 11) failed: the connection was lost")
        assert "\n" not in sentence and sentence.endswith(".")
        with pytest.raises(ValueError, match="cannot be read .*start the server first"):
            OpenEnvEnvs(url).make(1, "direct")


def test_the_codec_of_a_server_converts_texts():
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        codec = OpenEnvEnvs(url).codec
    assert isinstance(codec, OpenEnvCodec)
    assert codec.text_to_action("LEFT") == {"text": "LEFT"} and codec.action_to_text({"text": "UP"}) == "UP"
    with pytest.raises(ValueError, match="the action must be one of LEFT, DOWN, RIGHT, UP"):
        codec.text_to_action("left")
