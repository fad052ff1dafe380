"""Tests of vectorized environments: Gymnasium's interface, resets, seeds and time limits."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from lrl.codecs.registry import codec_for
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import transition_table
from lrl.envs.prompt_env import PromptEnv
from lrl.search.batched import CartPole, DynamicsVectorEnv, MountainCar, MountainCarContinuous, TableDynamics
from lrl.search.rollouts import SeparateEnvs, make_batched

OWN = ("lrl/Maze3x3-v0", "lrl/Nim-v0", "lrl/Navigation-v0", "lrl/Pong-v0")


@pytest.mark.parametrize("id", OWN)
def test_both_entry_points_play_the_same_episode(id):
    single, many = gym.make(id, disable_env_checker=True), gym.make_vec(id, num_envs=3)
    assert many.metadata["autoreset_mode"] == AutoresetMode.DISABLED and many.num_envs == 3
    assert many.single_action_space == single.action_space
    single.action_space.seed(0)
    observation, _ = single.reset(seed=41)
    observations, _ = many.reset(seed=40)
    assert observations[1] == pytest.approx(observation) and single.observation_space.contains(observation)
    for _ in range(150):  # longer than a block of random numbers
        action = single.action_space.sample()
        observation, reward, terminated, truncated, _ = single.step(action)
        observations, rewards, ends, cuts, _ = many.step(np.full(3, action))
        assert observations[1].tolist() == np.asarray(observation).tolist()
        assert (rewards[1], ends[1], cuts[1]) == (reward, terminated, truncated)
        if terminated:
            break
    single.close()
    many.close()


@pytest.mark.parametrize("id", OWN)
@pytest.mark.filterwarnings("ignore:.*Box observation space m.*imum value is infinity:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Box observation space m.*imum value is -infinity:UserWarning")
@pytest.mark.filterwarnings("ignore:.*not within the observation space:UserWarning")
def test_both_entry_points_pass_gymnasiums_environment_checkers(id):
    from gymnasium.utils.env_checker import check_env

    check_env(gym.make(id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(
    ("id", "dynamics", "steps"), [("CartPole-v1", CartPole(), 500), ("MountainCar-v0", MountainCar(), 200)]
)
def test_classic_control_tasks_equal_gymnasiums_bit_for_bit(id, dynamics, steps):
    env, many, rng = gym.make(id), DynamicsVectorEnv(dynamics, 2), np.random.default_rng(0)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        observations, _ = many.reset(seed=[seed, 99])
        for _ in range(steps):
            assert observations[0].tolist() == observation.tolist() and observations.dtype == observation.dtype
            action = int(rng.integers(env.action_space.n))
            observation, reward, terminated, _, _ = env.step(action)
            observations, rewards, ends, _, _ = many.step(np.array([action, 0]))
            assert (rewards[0], ends[0]) == (reward, terminated)
            if terminated:
                break
    env.close()


def test_the_continuous_car_equals_gymnasiums_except_for_the_rounding_of_its_initial_state():
    env, many = gym.make("MountainCarContinuous-v0"), DynamicsVectorEnv(MountainCarContinuous(), 1)
    observation, _ = env.reset(seed=3)
    observations, _ = many.reset(seed=[3])
    arrived = False
    while not arrived:  # pushed along its velocity
        action = np.array([0.9 if observation[1] >= 0 else -0.8], np.float32)
        observation, reward, arrived, _, _ = env.step(action)
        observations, rewards, ends, _, _ = many.step(action[None])
        assert observations[0] == pytest.approx(observation, abs=1e-5) and observations.dtype == np.float32
        assert (rewards[0], ends[0]) == (pytest.approx(reward), arrived)
    env.close()


def test_a_masked_reset_leaves_the_other_copies_alone():
    many = gym.make_vec("lrl/Pong-v0", num_envs=3)
    many.reset(seed=0)
    for _ in range(5):
        before, *_ = many.step(np.zeros(3, int))
    after, _ = many.reset(seed=[7, 8, 9], options={"reset_mask": np.array([False, True, False])})
    assert (after[[0, 2]] == before[[0, 2]]).all() and after[1, 1:3].tolist() == [400, 300]
    alone, _ = gym.make_vec("lrl/Pong-v0", num_envs=1).reset(seed=8)
    assert after[1].tolist() == alone[0].tolist()
    with pytest.raises(ValueError, match="seed is a list of 2 numbers; there must be one for each of 3 environments."):
        many.reset(seed=[1, 2])


def test_copies_are_truncated_once_at_the_time_limit():
    many = DynamicsVectorEnv(MountainCar(), 2, max_episode_steps=3)
    many.reset(seed=0)
    cuts = [many.step(np.array([1, 1]))[3].tolist() for _ in range(3)]
    assert cuts == [[False, False], [False, False], [True, True]]


def test_transitions_of_a_table_have_its_probabilities():
    dynamics = TableDynamics(transition_table(("SFF", "FFF", "FFG"), is_slippery=True), np.eye(9)[4])
    many = DynamicsVectorEnv(dynamics, 6000)
    assert (many.reset(seed=0)[0] == 4).all()
    following, rewards, terminated, *_ = many.step(np.full(6000, 2))  # right, or a third each up and down
    shares = np.bincount(following, minlength=9) / 6000
    assert shares[[1, 5, 7]] == pytest.approx([1 / 3] * 3, abs=0.03) and shares[[0, 2, 3, 4, 6, 8]].sum() == 0
    assert rewards.sum() == 0 and not terminated.any()


@pytest.mark.parametrize(
    ("id", "kwargs", "kind"),
    [
        ("CartPole-v1", {}, DynamicsVectorEnv),
        ("CartPole-v1", {"sutton_barto_reward": True}, SeparateEnvs),  # which CartPole here does not have
        ("FrozenLake-v1", {"is_slippery": False}, DynamicsVectorEnv),
        ("lrl/FrozenLakeRandomMaps-v0", {}, SeparateEnvs),  # a subclass with another map in each episode
        ("lrl/Pong-v0", {}, DynamicsVectorEnv),
        ("Acrobot-v1", {}, SeparateEnvs),
    ],
)
def test_only_environments_with_known_transitions_are_stepped_together(id, kwargs, kind):
    envs = make_batched(GymnasiumEnvs(id, kwargs), 4)
    assert type(envs) is kind and envs.num_envs == 4
    envs.close()


def test_reset_options_and_time_limits_of_the_factory_are_used():
    bounded = make_batched(GymnasiumEnvs("CartPole-v1", reset_options={"low": 0.01, "high": 0.011}), 4)
    assert isinstance(bounded, SeparateEnvs)
    assert (np.abs(bounded.reset(seed=0)[0] - 0.0105) <= 0.00051).all()
    short = make_batched(GymnasiumEnvs("CartPole-v1", max_episode_steps=2), 1)
    short.reset(seed=[0])
    assert [short.step(np.array([1]))[3][0] for _ in range(2)] == [False, True]


def test_an_environment_without_native_actions_raises_one_sentence():
    factory = object.__new__(type("Rows", (PromptEnv,), {}))
    with pytest.raises(ValueError, match="env is a Rows; a search plays registered environments"):
        make_batched(factory, 1)


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("lrl/Maze3x3-v0", ("maze", "up, down, right, left")),
        ("lrl/Nim-v0", ("last stick", "1, 2, 3")),
        ("lrl/Navigation-v0", ("corridor", "forward, right, left")),
        ("lrl/Pong-v0", ("paddle", "up, down, nothing")),
    ],
)
def test_language_models_read_the_description_of_the_environment(id, words):
    env = gym.make(id, disable_env_checker=True)
    codec = codec_for(env)
    assert all(word in codec.description for word in words)
    observation, _ = env.reset(seed=0)
    assert codec.observation_to_text(observation)
    for action in range(3):
        action += int(env.action_space.start)
        assert codec.text_to_action(codec.action_to_text(action)) == action
    env.close()


def test_separate_copies_are_not_stepped_after_their_end():
    envs = make_batched(GymnasiumEnvs("Acrobot-v1", max_episode_steps=3), 3)
    envs.reset(seed=0)
    taken = [0, 0, 0]
    for row, env in enumerate(envs.envs):
        step = env.step
        env.step = lambda action, row=row, step=step: (taken.__setitem__(row, taken[row] + 1), step(action))[1]
    for _ in range(3):
        observations, rewards, terminated, truncated, _ = envs.step(np.array([0, 1, 2]))
    assert truncated.all() and not terminated.any() and rewards.tolist() == [-1, -1, -1]
    again, *_ = envs.step(np.array([0, 1, 2]))
    assert taken == [3, 3, 3] and (again == observations).all()
    begun, _ = envs.reset(seed=[5, 6, 7], options={"reset_mask": np.array([False, True, False])})
    envs.step(np.array([0, 1, 2]))
    assert taken == [3, 4, 3] and (begun[[0, 2]] == observations[[0, 2]]).all() and (begun[1] != observations[1]).any()
    envs.close()
