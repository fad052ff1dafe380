"""Tests of the one-turn environment on a data set."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from lrl.codecs.grid import FrozenLakeCodec
from lrl.envs.prompt_env import PromptEnvs
from lrl.envs.rows import RowSource
from lrl.rewards.expert_q import NormalizedAdvantageReward, OptimalActionReward
from lrl.rewards.format import FormatReward, InvalidActionReward
from lrl.rewards.row import Row


class FewRows(RowSource):
    """Data set of rows named ``row <number>`` with best action ``number % 4``."""

    def __init__(self, length: int = 7) -> None:
        self.length = length

    @property
    def codec(self) -> FrozenLakeCodec:
        """Codec of the rows."""
        return FrozenLakeCodec()

    def rows(self) -> list[Row]:
        """Return the rows."""
        values = [tuple(float(action == number % 4) for action in range(4)) for number in range(self.length)]
        return [Row(observation=f"row {n}", q_values=q, action=n % 4, state=n) for n, q in enumerate(values)]


def make(num_envs: int, seed: int = 0, response_format: str = "direct"):
    rewards = [FormatReward(weight=0.5), NormalizedAdvantageReward(weight=0.5)]
    return PromptEnvs(FewRows(), rewards, seed).make(num_envs, response_format)


def test_a_pass_visits_every_row_once_and_passes_differ() -> None:
    env = make(3)
    shown = []
    for counters in np.arange(21).reshape(7, 3):
        observations, _ = env.reset(options={"episode": counters})
        shown += list(observations)
    passes = [shown[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(rows) == [f"row {n}" for n in range(7)] for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3


def test_rows_depend_on_the_counter_only() -> None:
    counters = np.array([9, 9, 2, 2])
    together, _ = make(4).reset(options={"episode": counters})
    assert together[0] == together[1] and together[2] == together[3]
    alone = make(1)
    for text, counter in zip(together, counters, strict=True):
        alone.reset(options={"episode": np.array([5])})
        assert alone.reset(options={"episode": np.array([counter])})[0] == (text,)


def test_the_seed_determines_the_order_of_the_rows() -> None:
    orders = [make(7, seed).reset(options={"episode": np.arange(7)})[0] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_every_episode_is_one_turn_with_the_weighted_sum_of_rewards() -> None:
    env = make(4, response_format="think_answer")
    env.reset(options={"episode": np.zeros(4, dtype=np.int64)})
    best = env.rows[0].action
    names = FrozenLakeCodec().action_texts
    responses = (
        f"<think>x</think><answer>{names[best]}</answer>",
        f"<think></think><answer>{names[best - 1]}</answer>",
        "<think></think><answer>jump</answer>",
        names[best],
    )
    observations, rewards, terminated, truncated, infos = env.step(responses)
    assert rewards.tolist() == [1, 0.5, 0.5, 0]
    assert terminated.all() and not truncated.any() and len(observations) == 4
    assert infos["reward/format"].tolist() == [1, 1, 1, 0]
    assert infos["reward/normalized_advantage"].tolist() == [1, 0, 0, 0]
    assert infos["action_valid"].tolist() == [True, True, False, False]
    assert infos["success"].tolist() == [True, False, False, False]
    assert infos["invalid_reason"][0] == "" and "LEFT" in infos["invalid_reason"][2]
    assert env.metadata["autoreset_mode"] == AutoresetMode.DISABLED


def test_a_reset_mask_keeps_the_other_rows() -> None:
    env = make(3)
    before, _ = env.reset(options={"episode": np.array([0, 1, 2])})
    mask = np.array([False, True, False])
    after, _ = env.reset(seed=[1, 2, 3], options={"reset_mask": mask, "episode": np.array([4, 5, 6])})
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] == make(1).reset(options={"episode": np.array([5])})[0][0]


def test_without_a_counter_the_seed_is_used() -> None:
    assert make(2).reset(seed=[3, 4])[0] == make(2).reset(options={"episode": np.array([3, 4])})[0]
    assert make(2).reset(seed=3)[0] == make(2).reset(seed=[3, 4])[0]
    assert len(make(2).reset()[0]) == 2


def test_noise_seeds_are_accepted() -> None:
    make(2).set_attr("noise_seed", [1, 2])


def test_invalid_input_raises() -> None:
    with pytest.raises(ValueError, match="text observations only"):
        PromptEnvs(FewRows(), [FormatReward()]).make(1, None)
    with pytest.raises(ValueError, match="an empty FewRows"):
        PromptEnvs(FewRows(0), [FormatReward()]).make(1, "direct")
    with pytest.raises(ValueError, match="env.rewards is"):
        PromptEnvs(FewRows(), [])
    with pytest.raises(ValueError, match="no duplicates"):
        PromptEnvs(FewRows(), [OptimalActionReward(), InvalidActionReward(), OptimalActionReward()])
    with pytest.raises(ValueError, match=r"'episode'.*\(2,\)"):
        make(2).reset(options={"episode": np.arange(3)})
    with pytest.raises(ValueError, match="3 actions"):
        make(2).step(("LEFT",) * 3)
