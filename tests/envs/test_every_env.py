"""Tests that acting through text equals acting natively, for all supported environments."""

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.numbers import NumberFormat
from lrl.codecs.registry import codec_for, environment_metadata
from lrl.envs.factory import GymnasiumEnvs

CLASSIC = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]
TOYS = ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"]
BODIES = ["HalfCheetah-v4", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Swimmer-v5", "Ant-v5", "Humanoid-v5"]
BODIES += ["HumanoidStandup-v5", "Pusher-v5", "Reacher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5"]
OLD_BODIES = ["Hopper-v4", "Walker2d-v4", "Swimmer-v4", "Ant-v4", "Humanoid-v4", "HumanoidStandup-v4"]
OLD_BODIES += ["Reacher-v4", "InvertedPendulum-v4", "InvertedDoublePendulum-v4"]  # Pusher-v4 needs MuJoCo 2
STEPS = 1000
LIMITS = {"CliffWalking-v1": 500}
"""Time limits of environments that Gymnasium registers without one."""


pytestmark = pytest.mark.filterwarnings("ignore:.*The environment .*-v4 is out of date:DeprecationWarning")


def compare_walks(id, numbers, seed=0, steps=STEPS, kwargs=None):
    """Take random actions through text and natively, and compare all results."""
    envs = GymnasiumEnvs(id, kwargs, numbers=numbers)
    text_env, native = envs.make(1, "direct"), gym.make(id, LIMITS.get(id), disable_env_checker=True, **(kwargs or {}))
    codec, rng = envs.codec, native.action_space
    rng.seed(seed)
    (text,), _ = text_env.reset(seed=[seed])
    observation, _ = native.reset(seed=seed)
    for step in range(steps):
        assert text == codec.observation_to_text(observation, codec.context(native))
        response = codec.action_to_text(rng.sample())
        action = codec.text_to_action(response)
        if isinstance(rng, gym.spaces.Box):
            action = np.clip(action, rng.low, rng.high)
        (text,), rewards, terminated, truncated, infos = text_env.step((response,))
        observation, reward, native_terminated, native_truncated, _ = native.step(action)
        assert infos["action_valid"].all()
        assert (rewards[0], terminated[0], truncated[0]) == (reward, native_terminated, native_truncated)
        if native_terminated or native_truncated:
            (text,), _ = text_env.reset(seed=[seed + step], options={"reset_mask": np.array([True])})
            observation, _ = native.reset(seed=seed + step)
    text_env.close()
    native.close()


@pytest.mark.slow
@pytest.mark.parametrize("id", CLASSIC + BODIES)
@pytest.mark.parametrize("kind", ["decimals", "integers"])
def test_steps_with_numbers_equal_those_of_the_native_environment(id, kind):
    """A thousand go beyond the time limits, in which neither the kind of numbers nor the body plays a part."""
    long = kind == "decimals" and id in (*CLASSIC, "HalfCheetah-v5")
    compare_walks(id, NumberFormat(kind=kind), steps=STEPS if long else 200)


@pytest.mark.parametrize(("id", "size"), [(id, None) for id in BODIES + OLD_BODIES] + [("HalfCheetah-v5", 18)])
def test_integers_represent_mujoco_observations_to_half_a_bin(id, size):
    kwargs = {} if size is None else {"exclude_current_positions_from_observation": False}
    native = GymnasiumEnvs(id, kwargs).make_native()
    known = environment_metadata(native.unwrapped).observation
    low, high = np.array([one.range for one in known]).T
    assert size is None or len(low) == size
    assert len({one.name for one in known}) == len(low), "each dimension has a unique name"
    assert len(low) == native.observation_space.shape[0]
    native.reset(seed=0)
    native.action_space.seed(0)
    seen = np.array([native.step(native.action_space.sample())[0] for _ in range(200)])
    assert ((seen >= low) & (seen <= high)).mean() > 0.99
    written = codec_for(native, NumberFormat(kind="integers")).observation_to_text(seen[0])
    read = low + np.array([int(number) for number in written[13:-14].split(",")]) * (high - low) / 999
    assert np.abs(read - seen[0].clip(low, high)).max() <= ((high - low) / 999 / 2).max() + 1e-9
    native.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*DISPLAY:Warning")
@pytest.mark.parametrize("kwargs", [{}, {"task_kwargs": {"time_limit": 1}}])
def test_dm_control_environments_use_the_space_codec(kwargs):
    compare_walks("shimmy:dm_control/cheetah-run-v0", NumberFormat(precision=5), kwargs=kwargs)
    assert GymnasiumEnvs("shimmy:dm_control/cheetah-run-v0").codec.observation_to_text(
        {"position": np.zeros(8), "velocity": np.ones(9)}
    ).splitlines()[1] == "velocity: " + ",".join(["1.000"] * 9)


@pytest.mark.filterwarnings("ignore:.*DISPLAY:Warning")
def test_dm_control_environments_support_integers():
    numbers = NumberFormat(kind="integers", ranges={"position": [(-999.0, 999.0)], "velocity": [(0.0, 999.0)]})
    codec = GymnasiumEnvs("shimmy:dm_control/cheetah-run-v0", numbers=numbers).codec
    text = codec.observation_to_text({"position": np.ones(8), "velocity": np.full(9, 7.0)})
    assert text.splitlines() == ["position: " + ",".join(["500"] * 8), "velocity: " + ",".join(["7"] * 9)]


@pytest.mark.parametrize(
    ("kwargs", "first"), [({}, ()), ({"exclude_current_positions_from_observation": False}, ("x",))]
)
def test_half_cheetah_uses_the_names_of_gymnasiums_documentation(kwargs, first):
    joints = [f"{end} {part}" for end in ("back", "front") for part in ("thigh", "shin", "foot")]
    names = [*first, "height", "pitch", *joints, *(f"{name} velocity" for name in ("x", "height", "pitch", *joints))]
    envs = GymnasiumEnvs("HalfCheetah-v5", kwargs, numbers=NumberFormat(names=True, precision=0))
    text = envs.codec.observation_to_text(np.arange(len(names)))
    assert text.splitlines() == [f"{name} {number}" for number, name in enumerate(names)]


@pytest.mark.slow
@pytest.mark.parametrize("id", TOYS)
def test_a_thousand_steps_with_words_equal_those_of_the_native_environment(id):
    compare_walks(id, None)


def test_texts_of_taxi():
    codec = GymnasiumEnvs("Taxi-v4").codec
    native = gym.make("Taxi-v4").unwrapped
    assert codec.observation_to_text(native.encode(2, 3, 0, 1)) == (
        "taxi at row 2 column 3, passenger at red, destination green"
    )
    assert "in the taxi" in codec.observation_to_text(native.encode(0, 0, 4, 2))
    assert codec.text_to_action("pick up") == 4


def test_arguments_and_reset_options_are_passed_to_the_environment():
    cheetah = GymnasiumEnvs("HalfCheetah-v5", {"exclude_current_positions_from_observation": False})
    env = cheetah.make(1, "direct")
    (text,), _ = env.reset(seed=[0])
    assert text.count(",") == 17 and text.startswith("<observation>")
    _, _, _, _, infos = env.step(("<action>9,0,0,0,0,-9</action>",))
    assert infos["clipped_numbers"] == [2] and {"reward/ctrl", "reward/forward"} <= set(infos)
    env.close()
    bounded = GymnasiumEnvs("CartPole-v1", reset_options={"low": 0.01, "high": 0.011})
    env = bounded.make(2, "direct")
    texts, _ = env.reset(seed=[0, 1])
    assert all(value in ("0.010", "0.011") for text in texts for value in text[13:-14].split(","))
    env.close()


def test_a_number_format_for_an_environment_described_in_words_raises():
    with pytest.raises(ValueError, match="env.numbers is set, but FrozenLake-v1 is described in words"):
        _ = GymnasiumEnvs("FrozenLake-v1", numbers=NumberFormat()).codec
