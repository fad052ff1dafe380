"""The text around an environment and the invalid-action rule."""

import random

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.grid import FrozenLakeCodec, render_map
from lrl.codecs.registry import codec_for
from lrl.envs.native import NativeEnv
from lrl.envs.text import TextEnv

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")


def text_env(**kwargs) -> TextEnv:
    return TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "direct", **kwargs)


def test_text_transitions_equal_the_native_ones() -> None:
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


def test_an_invalid_action_costs_the_penalty_and_moves_nothing() -> None:
    env = text_env(invalid_penalty=-0.25)
    shown, _ = env.reset(seed=0)
    before = env.unwrapped.np_random.bit_generator.state
    feedback, reward, terminated, truncated, info = env.step("jump")
    assert feedback.startswith("Invalid action: ") and feedback.endswith("\n" + shown)
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert info["action_valid"] is False and info["success"] is False and "LEFT" in info["invalid_reason"]
    assert env.unwrapped.np_random.bit_generator.state == before
    assert env.step("jump")[0] == feedback, "feedback does not pile up"


def test_five_invalid_actions_in_a_row_end_the_episode_and_a_valid_one_starts_the_count_again() -> None:
    env = text_env()
    env.reset(seed=0)
    assert [env.step("?")[2] for _ in range(4)] == [False] * 4
    assert env.step("LEFT")[4]["action_valid"]
    assert [env.step("?")[2] for _ in range(5)] == [False] * 4 + [True]
    env.reset()
    assert [env.step("?")[2] for _ in range(5)] == [False] * 4 + [True]


def test_no_text_raises() -> None:
    rng = random.Random(1)
    env = TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "think_answer", max_invalid=10**6)
    env.reset(seed=0)
    for _ in range(300):
        text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(30)))
        for answer in (text, f"<think>{text}</think><answer>{text}</answer>", "<think>", "</answer>" * 1000):
            assert env.action_space.contains(answer)
            shown, *_ = env.step(answer)
            assert env.observation_space.contains(shown)


def test_an_equal_seed_gives_equal_noise_and_a_noise_seed_gives_noise_of_its_own() -> None:
    def walk(noise_seed: int | None) -> list[str]:
        env = text_env()
        env.set_wrapper_attr("noise_seed", noise_seed)
        return [env.reset(seed=3)[0]] + [env.step("DOWN")[0] for _ in range(6)]

    assert walk(None) == walk(None) and walk(1) == walk(1)
    walks = {tuple(walk(noise)) for noise in (None, 1, 2, 3, 4)}
    assert len(walks) > 1 and len({walk[0] for walk in walks}) == 1


def test_options_of_the_collector_do_no_harm() -> None:
    text_env().reset(seed=0, options={"episode": np.arange(3)})


class Scripted(gym.Env):
    """Pays a script; ends with it."""

    observation_space = action_space = gym.spaces.Discrete(1)

    def __init__(self, rewards: list[float], truncate: bool = False, verdict: bool | None = None) -> None:
        self.rewards, self.truncate, self.verdict = rewards, truncate, verdict

    def reset(self, *, seed=None, options=None):
        self.left = list(self.rewards)
        return 0, {}

    def step(self, action):
        reward = self.left.pop(0)
        info = {} if self.verdict is None else {"is_success": self.verdict}
        return 0, reward, not self.left and not self.truncate, not self.left and self.truncate, info


@pytest.mark.parametrize(
    ("env", "threshold", "success"),
    [
        (Scripted([0, 1]), None, True),
        (Scripted([1, 0]), None, False),
        (Scripted([0, 1], truncate=True), None, False),
        (Scripted([2, 2], truncate=True), 4, True),
        (Scripted([2, 1], truncate=True), 4, False),
        (Scripted([0, 1], verdict=False), None, False),
        (Scripted([0, -1], verdict=True), 5, True),
    ],
)
def test_success_is_the_environments_verdict_then_the_threshold_then_a_positive_end(
    env: gym.Env, threshold: float | None, success: bool
) -> None:
    native = NativeEnv(env, threshold)
    for _ in range(2):
        native.reset()
        assert native.step(0)[4]["success"] is False
        assert native.step(0)[4]["success"] is success


def test_the_registered_threshold_is_used() -> None:
    env = NativeEnv(gym.make("CartPole-v1"))
    env.reset(seed=0)
    outcome = env.step(0)
    while not outcome[2]:
        outcome = env.step(0)
    assert outcome[1] == 1 and outcome[4]["success"] is False


def test_max_invalid_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_invalid is 0"):
        text_env(max_invalid=0)


def test_whether_the_reasoning_names_the_action_that_was_taken() -> None:
    env = TextEnv(gym.make("FrozenLake-v1"), FrozenLakeCodec(), "final_answer")
    env.reset(seed=0)
    answers = {
        "up is a wall, so left final answer: LEFT": True,
        "so left, or up final answer: LEFT": False,
        "no idea final answer: LEFT": False,
        "left final answer: jump": False,
        "left": False,
    }
    assert {text: env.step(text)[4]["reasoning_agrees"] for text in answers} == answers


class Boxes(gym.Env):
    """Keeps the action that it is given, of a space that holds a Box."""

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
def test_the_environment_is_stepped_with_the_nearest_action_of_its_space(space, text, expected, clipped) -> None:
    native = Boxes(space)
    env = TextEnv(native, codec_for(native), "direct")
    env.reset()
    info = env.step(f"<action>{text}</action>")[4]
    np.testing.assert_equal(native.action, expected)
    assert info["clipped_numbers"] == clipped and space.contains(native.action)
