"""Tests of HalfCheetah with modified physics."""

import gymnasium as gym
import numpy as np
import pytest

from lrl.envs.factory import GymnasiumEnvs

pytest.importorskip("mujoco")


def trajectory(env, steps=30):
    seen, _ = env.reset(seed=3)
    rng, rows = np.random.default_rng(0), [seen]
    for _ in range(steps):
        seen, reward, *_ = env.step(rng.uniform(-1, 1, 6).astype(np.float32))
        rows.append([*seen, reward])
    env.close()
    return np.concatenate(rows)


def test_without_factors_it_equals_the_environment_of_gymnasium():
    ours = GymnasiumEnvs("lrl/HalfCheetah-v5").make_native()
    assert ours.spec.max_episode_steps == 1000 and ours.spec.reward_threshold == 4800
    np.testing.assert_array_equal(trajectory(ours), trajectory(gym.make("HalfCheetah-v5")))


@pytest.mark.parametrize("kwargs", [{"gravity": 1.2}, {"friction": 0.8}, {"reset_noise_scale": 0.12}])
def test_factors_change_the_trajectory_but_not_the_text(kwargs):
    plain, other = (GymnasiumEnvs("lrl/HalfCheetah-v5", given) for given in ({}, kwargs))
    assert np.abs(trajectory(plain.make_native()) - trajectory(other.make_native())).max() > 1e-4
    assert plain.codec.observation_to_text(np.zeros(17)) == other.codec.observation_to_text(np.zeros(17))


def test_factors_scale_the_parameters_of_the_model():
    native = GymnasiumEnvs("lrl/HalfCheetah-v5", {"gravity": 0.8, "friction": 1.2}).make_native().unwrapped
    plain = gym.make("HalfCheetah-v5").unwrapped
    np.testing.assert_allclose(native.model.opt.gravity, 0.8 * plain.model.opt.gravity)
    np.testing.assert_allclose(native.model.geom_friction, 1.2 * plain.model.geom_friction)


def test_zero_gravity_raises():
    with pytest.raises(ValueError, match="gravity is 0; it must be positive"):
        GymnasiumEnvs("lrl/HalfCheetah-v5", {"gravity": 0}).make_native()
