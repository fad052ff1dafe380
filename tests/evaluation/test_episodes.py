"""Tests of evaluation by seeded episodes."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.evaluation.episodes import EpisodeResults, evaluate_policy, merge
from lrl.policies.baselines import FixedActor, RandomActor
from lrl.types import Decisions, History, PastTurn, RandomKeys, SamplingConfig


class Countdown(gym.Env):
    """Environment that lasts ``seed`` turns, with a reward of ``seed`` at its end."""

    observation_space = gym.spaces.Text(64)
    action_space = gym.spaces.Text(64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        self.seed, self.left = seed, seed
        return f"{seed} {self.left}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        ended = self.left == 0
        info = {"action_valid": action != "", "success": ended and self.seed % 2 == 0}
        return f"{self.seed} {self.left}", float(self.seed) * ended, ended, False, info


class Countdowns(EnvFactory):
    codec = FrozenLakeCodec()

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        return SyncVectorEnv([Countdown] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


class Watcher(FixedActor):
    """Actor that records its calls and keeps all observations in its memory."""

    probability = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int, int]] = []

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        return [0] * len(observations)

    def act(
        self, observations: Sequence[str], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        for text, history, env, turn in zip(observations, memory, keys.env, keys.turn, strict=True):
            assert [past.observation.split()[0] for past in history] == [text.split()[0]] * len(history)
            self.asked.append((text, int(env), int(turn), len(history)))
        longer = [(*history, PastTurn(text, "")) for text, history in zip(observations, memory, strict=True)]
        return super().act(observations, longer, keys, sampling)


def watch(episodes: int, num_envs: int) -> tuple[EpisodeResults, list[tuple[str, int, int, int]]]:
    policy = Watcher()
    policy.connect(Countdowns.codec)
    return evaluate_policy(policy, Countdowns(), episodes, 1, num_envs), sorted(policy.asked)


@pytest.mark.parametrize("num_envs", [1, 2, 5, 7, 50])
def test_every_seed_is_played_once_to_its_end_however_many_environments(num_envs: int) -> None:
    results, asked = watch(7, num_envs)
    assert results.lengths.tolist() == results.returns.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert results.successes.tolist() == [False, True, False, True, False, True, False]
    assert not results.invalid_actions.any(), "idle environments count nowhere"
    # Each turn is asked once, named by its episode and turn, with the memory of this episode only.
    assert asked == sorted(
        (f"{seed} {seed - turn}", seed - 1, turn, turn) for seed in range(1, 8) for turn in range(seed)
    )


def random_walk(num_envs: int, **options: Any) -> EpisodeResults:
    policy, envs = RandomActor(), GymnasiumEnvs("FrozenLake-v1")
    policy.connect(envs.codec)
    return evaluate_policy(policy, envs, 40, 10_000, num_envs, **options)


def episodes(results: EpisodeResults) -> list[Any]:
    return results.report("", "")["per_episode"]


def test_results_do_not_depend_on_num_envs_in_a_noisy_environment() -> None:
    alone = episodes(random_walk(1))
    assert alone == episodes(random_walk(7)) == episodes(random_walk(64))
    assert len({episode["length"] for episode in alone}) > 3


def test_results_do_not_depend_on_the_number_of_ranks() -> None:
    parts = [random_walk(4, rank=rank, world_size=3) for rank in range(3)]
    assert [len(part) for part in parts] == [14, 13, 13]
    assert episodes(merge(parts)) == episodes(random_walk(16))


def test_a_rank_without_episodes_plays_none() -> None:
    assert len(random_walk(4, rank=41, world_size=50)) == 0


@pytest.mark.slow
def test_random_walks_succeed_as_often_as_the_exact_figure_says() -> None:
    policy, envs = RandomActor(), GymnasiumEnvs("FrozenLake-v1")
    policy.connect(envs.codec)
    results = evaluate_policy(policy, envs, 1000, 0, 50)
    lower, upper = results.intervals()["success_rate"]
    assert lower < 0.0140 < upper  # propagated through the transition table for 100 steps


def test_progress_is_reported_once_per_episode() -> None:
    told: list[None] = []
    random_walk(7, on_episode=lambda: told.append(None))
    assert len(told) == 40


def test_silence_is_counted_as_invalid() -> None:
    class Mute(RandomActor):
        def act(self, *args: Any, **kwargs: Any) -> Decisions:
            decisions = super().act(*args, **kwargs)
            object.__setattr__(decisions, "actions", ["..."] * len(decisions.actions))
            return decisions

    policy, envs = Mute(), GymnasiumEnvs("FrozenLake-v1", max_invalid=3)
    policy.connect(envs.codec)
    results = evaluate_policy(policy, envs, 5, 0, 2)
    assert results.lengths.tolist() == [3] * 5
    assert results.means() == pytest.approx(
        {"return": -0.3, "length": 3.0, "success_rate": 0.0, "invalid_action_rate": 1.0}
    )


class Reader(FixedActor):
    """Actor whose response depends on the observation and on the number of earlier ones."""

    greedy_is_reproducible = True
    probability = 1.0

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.remembers = remembers
        self.asked: list[tuple[str, History]] = []

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        return [sum(map(ord, text)) % 4 for text in observations]

    def act(self, observations: Sequence[str], memory: list[History], *args: Any) -> Decisions:
        self.asked += zip(observations, memory, strict=True)
        longer = [(PastTurn(text, ""), *past)[: self.remembers] for text, past in zip(observations, memory)]
        return super().act(observations, longer, *args)


@pytest.mark.parametrize("remembers", [False, True])
def test_a_greedy_policy_is_queried_once_per_prompt_with_the_same_results(remembers: bool) -> None:
    def play(temperature: float) -> tuple[EpisodeResults, list[tuple[str, History]]]:
        policy, envs = Reader(remembers), GymnasiumEnvs("FrozenLake-v1")
        policy.connect(envs.codec)
        return evaluate_policy(policy, envs, 30, 0, 8, SamplingConfig(temperature=temperature)), policy.asked

    (greedy, asked), (every, all_asked) = play(0.0), play(1.0)
    assert len(asked) == len(set(asked)) and set(asked) == set(all_asked) and len(all_asked) == every.lengths.sum()
    np.testing.assert_array_equal(greedy.returns, every.returns)
    np.testing.assert_array_equal(greedy.lengths, every.lengths)


def test_report_has_the_promised_keys() -> None:
    report = random_walk(8).report("FrozenLake-v1", "random")
    assert list(report) == [
        "env_id",
        "policy",
        "episodes",
        "seed",
        "return_mean",
        "return_ci95",
        "return_iqm",
        "length_mean",
        "success_at",
        "success_rate",
        "success_ci95",
        "invalid_action_rate",
        "env_steps_per_second",
        "per_episode",
    ]
    assert [episode["seed"] for episode in report["per_episode"]] == list(range(10_000, 10_040))
    assert report["return_mean"] == np.mean([episode["return"] for episode in report["per_episode"]])


@pytest.mark.parametrize(("name", "episodes", "num_envs"), [("episodes", 0, 1), ("num_envs", 1, 0)])
def test_nothing_to_play_is_an_error(name: str, episodes: int, num_envs: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        evaluate_policy(RandomActor(), GymnasiumEnvs("FrozenLake-v1"), episodes, 0, num_envs)
