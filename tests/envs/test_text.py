"""Tests of the text wrapper, the rule for invalid actions and the success criteria."""

import random

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.registry import codec_for
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.native import NativeEnv
from lrl.envs.text import TextEnv

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")


def text_env(**kwargs) -> TextEnv:
    return TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "direct", **kwargs)


def test_transitions_equal_those_of_the_native_environment() -> None:
    native, text = gym.make("FrozenLake-v1"), text_env()
    rng = np.random.default_rng(0)
    for seed in range(20):
        state, _ = native.reset(seed=seed)
        shown, _ = text.reset(seed=seed)
        ended = False
        while not ended:
            assert shown == render_map(state, MAP)
            action = int(rng.integers(4))
            state, reward, terminated, truncated, _ = native.step(action)
            shown, *outcome, info = text.step(FrozenLakeCodec().action_to_text(action))
            ended = terminated or truncated
            assert outcome == [reward, terminated, truncated]
            assert info == {"action_valid": True, "success": ended and reward == 1, "invalid_reason": ""}


def test_an_invalid_action_gives_the_penalty_and_does_not_step_the_environment() -> None:
    env = text_env(invalid_penalty=-0.25)
    shown, _ = env.reset(seed=0)
    before = env.unwrapped.np_random.bit_generator.state
    feedback, reward, terminated, truncated, info = env.step("jump")
    assert feedback.startswith("Invalid action: ") and feedback.endswith("\n" + shown)
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert info["action_valid"] is False and info["success"] is False and "LEFT" in info["invalid_reason"]
    assert env.unwrapped.np_random.bit_generator.state == before
    assert env.step("jump")[0] == feedback, "feedback does not accumulate"


def test_five_consecutive_invalid_actions_end_the_episode() -> None:
    env = text_env()
    env.reset(seed=0)
    assert [env.step("?")[2] for _ in range(4)] == [False] * 4
    assert env.step("LEFT")[4]["action_valid"]
    assert [env.step("?")[2] for _ in range(5)] == [False] * 4 + [True]
    env.reset()
    assert [env.step("?")[2] for _ in range(5)] == [False] * 4 + [True]


def test_no_response_raises() -> None:
    rng = random.Random(1)
    env = TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "think_answer", max_invalid=10**6)
    env.reset(seed=0)
    for _ in range(300):
        text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(30)))
        for response in (text, f"<think>{text}</think><answer>{text}</answer>", "<think>", "</answer>" * 1000):
            assert env.action_space.contains(response)
            shown, *_ = env.step(response)
            assert env.observation_space.contains(shown)


def test_noise_seeds_determine_the_noise_but_not_the_initial_state() -> None:
    def walk(noise_seed: int | None) -> list[str]:
        env = text_env()
        env.set_wrapper_attr("noise_seed", noise_seed)
        return [env.reset(seed=3)[0]] + [env.step("DOWN")[0] for _ in range(6)]

    assert walk(None) == walk(None) and walk(1) == walk(1)
    walks = {tuple(walk(noise)) for noise in (None, 1, 2, 3, 4)}
    assert len(walks) > 1 and len({walk[0] for walk in walks}) == 1


def test_unknown_reset_options_are_ignored() -> None:
    text_env().reset(seed=0, options={"episode": np.arange(3)})


class ScriptedEnv(gym.Env):
    """Environment with given rewards that ends after the last one."""

    observation_space = action_space = gym.spaces.Discrete(1)

    def __init__(self, rewards: list[float], truncate: bool = False, is_success: bool | None = None) -> None:
        self.rewards, self.truncate, self.is_success = rewards, truncate, is_success

    def reset(self, *, seed=None, options=None):
        self.left = list(self.rewards)
        return 0, {}

    def step(self, action):
        reward = self.left.pop(0)
        info = {} if self.is_success is None else {"is_success": self.is_success}
        return 0, reward, not self.left and not self.truncate, not self.left and self.truncate, info


@pytest.mark.parametrize(
    ("env", "threshold", "success"),
    [
        (ScriptedEnv([0, 1]), None, True),
        (ScriptedEnv([1, 0]), None, False),
        (ScriptedEnv([0, 1], truncate=True), None, False),
        (ScriptedEnv([2, 2], truncate=True), 4, True),
        (ScriptedEnv([2, 1], truncate=True), 4, False),
        (ScriptedEnv([0, 1], is_success=False), None, False),
        (ScriptedEnv([0, -1], is_success=True), 5, True),
    ],
)
def test_success_is_the_environments_own_then_the_threshold_then_a_positive_last_reward(
    env: gym.Env, threshold: float | None, success: bool
) -> None:
    native = NativeEnv(env, threshold)
    for _ in range(2):
        native.reset()
        assert native.step(0)[4]["success"] is bool(env.unwrapped.is_success), "as if the episode ended here"
        assert native.step(0)[4]["success"] is success


def test_the_registered_reward_threshold_is_used() -> None:
    env = NativeEnv(gym.make("CartPole-v1"))
    env.reset(seed=0)
    outcome = env.step(0)
    while not outcome[2]:
        outcome = env.step(0)
    assert outcome[1] == 1 and outcome[4]["success"] is False


def test_max_invalid_below_one_raises() -> None:
    with pytest.raises(ValueError, match="max_invalid is 0"):
        text_env(max_invalid=0)


def test_reasoning_agrees_if_the_taken_action_is_mentioned_last() -> None:
    env = TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "final_answer")
    env.reset(seed=0)
    responses = {
        "up is a wall, so left final answer: LEFT": True,
        "so left, or up final answer: LEFT": False,
        "no idea final answer: LEFT": False,
        "left final answer: jump": False,
        "left": False,
    }
    assert {text: env.step(text)[4]["reasoning_agrees"] for text in responses} == responses


class RecordingEnv(gym.Env):
    """Environment that stores its last action."""

    observation_space = gym.spaces.Discrete(1)

    def __init__(self, action_space: gym.Space) -> None:
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.action = action
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "text", "expected", "clipped"),
    [
        (gym.spaces.Box(0, 255, (2,), np.uint8), "300,-1", [255, 0], 2),
        (gym.spaces.Dict({"by": gym.spaces.Box(0, 255, (2,), np.uint8)}), "by: 300,7", {"by": [255, 7]}, 1),
        (gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (1,)), gym.spaces.Discrete(2))), "0: -9\n1: 1", (-1.0, 1), 1),
    ],
    ids=["Box", "Dict", "Tuple"],
)
def test_box_actions_are_clipped_to_the_action_space(space, text, expected, clipped) -> None:
    native = RecordingEnv(space)
    env = TextEnv(native, codec_for(native), "direct")
    env.reset()
    info = env.step(f"<action>{text}</action>")[4]
    np.testing.assert_equal(native.action, expected)
    assert info["clipped_numbers"] == clipped and space.contains(native.action)
