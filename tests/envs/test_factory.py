"""Tests of the factory of vectorized environments."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from lrl.envs.factory import GymnasiumEnvs
from lrl.prompts import get_response_format

RESPONSES = [f"<think>.</think><answer>{text}</answer>" for text in ("LEFT", "DOWN", "RIGHT", "UP")]


def walk(env: VectorEnv, steps: int) -> list:
    """Take random actions, reset finished environments by mask and return everything that was observed."""
    rng = np.random.default_rng(0)
    seeds = list(range(env.num_envs))
    observations, _ = env.reset(seed=seeds, options={"episode": np.arange(env.num_envs)})
    trace: list = [observations]
    for _ in range(steps):
        actions = tuple(RESPONSES[i] for i in rng.integers(4, size=env.num_envs))
        observations, rewards, terminated, truncated, infos = env.step(actions)
        assert isinstance(observations, tuple) and all(isinstance(text, str) for text in observations)
        assert all(len(infos[key]) == env.num_envs for key in ("action_valid", "success", "invalid_reason"))
        ended = terminated | truncated
        trace.append((observations, rewards.tolist(), ended.tolist(), infos["success"].tolist()))
        if ended.any():
            env.reset(seed=seeds, options={"reset_mask": ended, "episode": np.arange(env.num_envs)})
    return trace


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_autoreset_is_disabled_and_noise_seeds_can_be_set(vectorization) -> None:
    env = GymnasiumEnvs("FrozenLake-v1", vectorization=vectorization).make(2, "think_answer")
    try:
        assert env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
        env.set_attr("noise_seed", [5, 5])
        observations, _ = env.reset(seed=[1, 2])
        for _ in range(8):
            observations, _, terminated, truncated, _ = env.step((RESPONSES[1],) * 2)
            assert observations[0] == observations[1], "equal noise seeds give equal noise"
            if (terminated | truncated).any():
                break
        assert terminated.all()
        assert all("A" in text for text in observations), "the last observation belongs to the finished episode"
    finally:
        env.close()


def test_async_and_sync_environments_are_equal() -> None:
    traces = []
    for vectorization in ("sync", "async"):
        env = GymnasiumEnvs("FrozenLake-v1", vectorization=vectorization).make(2, "think_answer")
        try:
            traces.append(walk(env, 25))
        finally:
            env.close()
    assert traces[0] == traces[1]


def test_native_environments_keep_their_spaces_and_have_the_same_infos() -> None:
    env = GymnasiumEnvs("CartPole-v1").make(3, None)
    observations, _ = env.reset(seed=[0, 1, 2])
    assert observations.shape == (3, 4)
    *_, infos = env.step(np.zeros(3, dtype=np.int64))
    assert infos["action_valid"].all() and not infos["success"].any()


def test_the_time_limit_can_be_set() -> None:
    env = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=2).make(1, "think_answer")
    env.reset(seed=[0])
    assert [bool(env.step((RESPONSES[3],))[3][0]) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "FrozenLake-v7"}, "env.id is 'FrozenLake-v7'"),
        ({"id": "no_such_module:Env-v0"}, "env.id is 'no_such_module:Env-v0'"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"slippery": True}},
            "env.kwargs is {'slippery': True}, which FrozenLake-v1 does not accept: there is no argument 'slippery'; "
            "did you mean 'is_slippery'?",
        ),
        ({"id": "FrozenLake-v1", "kwargs": {"xyz": 1}}, "does not accept: there is no argument 'xyz'."),
        ({"id": "lrl/BabyAI-MixedTrainLocal-v0", "kwargs": {"num_distractor": 3}}, "did you mean 'num_distractors'?"),
        ({"id": "lrl/HalfCheetah-v5", "kwargs": {"gravit": 3}}, "there is no argument 'gravit'; did you mean"),
        ({"id": "FrozenLake-v1", "kwargs": {"map_name": "5x5"}}, "env.kwargs is {'map_name': '5x5'}"),
        ({"id": "FrozenLake-v1", "vectorization": "thread"}, "env.vectorization is 'thread'"),
        ({"id": "FrozenLake-v1", "max_invalid": 0}, "env.max_invalid is 0"),
    ],
)
def test_an_invalid_setting_raises_with_its_key(settings: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        GymnasiumEnvs(**settings).make(2, "think_answer")
    assert message in str(error.value)


def test_a_constructor_may_read_its_own_further_arguments() -> None:
    class Wrapped(gym.Wrapper):
        def __init__(self, **kwargs: bool) -> None:
            super().__init__(gym.make("FrozenLake-v1", **kwargs))

    gym.register("TestWrapped-v0", Wrapped)
    factory = GymnasiumEnvs("TestWrapped-v0", {"is_slippery": False}, codec=GymnasiumEnvs("FrozenLake-v1").codec)
    assert factory.make_native().unwrapped.spec is not None
    with pytest.raises(ValueError, match="there is no argument 'slippery'"):
        GymnasiumEnvs("TestWrapped-v0", {"slippery": False}).make_native()
    del gym.registry["TestWrapped-v0"]


def test_an_unknown_response_format_raises() -> None:
    with pytest.raises(ValueError, match="response_format is 'xml'"):
        GymnasiumEnvs("FrozenLake-v1").make(1, "xml")


def test_cliff_walking_has_a_time_limit() -> None:
    env = GymnasiumEnvs("CliffWalking-v1").make(1, "direct")
    env.reset(seed=[0])
    assert [bool(env.step(("UP",))[3][0]) for _ in range(500)].index(True) == 499


@pytest.mark.parametrize("form", ["direct", "think_answer", "final_answer"])
def test_box_actions_are_valid_in_every_response_format(form: str) -> None:
    env = GymnasiumEnvs("Pendulum-v1").make(1, form)
    env.reset(seed=[0])
    *_, infos = env.step((get_response_format(form).render("<action>0.5</action>"),))
    assert infos["action_valid"].all()


def test_the_last_of_many_positive_rewards_is_not_a_success():
    env = GymnasiumEnvs("Humanoid-v5").make(1, None)
    env.reset(seed=[0])
    env.action_space.seed(0)
    ended = np.array([False])
    while not ended[0]:
        _, rewards, ended, _, infos = env.step(env.action_space.sample())
    assert rewards[0] > 0 and not infos["success"][0]
    env.close()
    env = GymnasiumEnvs("FrozenLake-v1", {"is_slippery": False}).make(1, "direct")
    env.reset(seed=[0])
    for response in ("DOWN", "DOWN", "RIGHT", "DOWN", "RIGHT", "RIGHT"):
        _, rewards, ended, _, infos = env.step((response,))
        assert infos["success"][0] == ended[0]
    assert ended[0] and rewards[0] == 1
    env.close()
