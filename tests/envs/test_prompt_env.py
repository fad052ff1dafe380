"""Tests of the one-turn environment on a data set."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.frozen_lake import ExpertQRows, RandomMapRows
from lrl.envs.prompt_env import EpisodeRows, PromptEnvs, RowSource
from lrl.rewards.behaviour_cloning import BehaviourCloningReward, BoundedCloningReward
from lrl.rewards.expert_q import NormalizedAdvantageReward, OptimalActionReward
from lrl.rewards.format import ClosingTagFormatReward, FormatReward, InvalidActionReward
from lrl.rewards.reward import Reward, Row
from lrl.types import PastTurn


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


class Arms(RowSource):
    """Data set of two-dimensional targets, to which the same movement leads."""

    targets = np.array([[0.5, -0.5], [1.0, 0.0], [-1.0, 0.25]], dtype=np.float32)
    spaces = (gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32))

    @property
    def codec(self) -> SpaceCodec:
        """Codec of the rows."""
        return SpaceCodec(*self.spaces)

    def rows(self) -> list[Row]:
        """Return the rows, without Q-values."""
        texts = map(self.codec.observation_to_text, self.targets)
        return [Row(observation=text, action=t, native_observation=t) for text, t in zip(texts, self.targets)]


class Steps(EpisodeRows):
    """Rows ``row 0`` to ``row 4`` of one episode."""

    def __len__(self) -> int:
        return 5

    def item(self, index):
        return Row(observation=f"row {index}", action=index % 4)

    def past_turns(self, index: int, length: int) -> tuple[tuple[str, str], ...]:
        """Return the turns before."""
        names = FrozenLakeCodec().action_texts
        return tuple((f"row {past}", names[past % 4]) for past in range(max(0, index - length), index))


class Recorded(FewRows):
    """Data set of the rows of one episode."""

    def rows(self) -> Steps:
        """Return the rows."""
        return Steps()


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
    with pytest.raises(ValueError, match="env.rows is a FewRows, which has text observations only"):
        PromptEnvs(FewRows(), [OptimalActionReward()]).make(1, None)
    with pytest.raises(ValueError, match="FormatReward, which reads the text of responses; it must be left out"):
        PromptEnvs(Arms(), [FormatReward()]).check("data.env", None)
    with pytest.raises(ValueError, match="data.env: env.rewards has a OptimalActionReward, but env.rows has no Q-val"):
        PromptEnvs(Arms(), [OptimalActionReward()]).check("data.env", "direct")
    with pytest.raises(ValueError, match="an empty FewRows"):
        PromptEnvs(FewRows(0), [FormatReward()]).make(1, "direct")
    with pytest.raises(ValueError, match="env.rewards is"):
        PromptEnvs(FewRows(), [])
    with pytest.raises(ValueError, match="names must be unique"):
        PromptEnvs(FewRows(), [OptimalActionReward(), InvalidActionReward(), OptimalActionReward()])
    with pytest.raises(ValueError, match=r"'episode'.*\(2,\)"):
        make(2).reset(options={"episode": np.arange(3)})
    with pytest.raises(ValueError, match="3 actions"):
        make(2).step(("LEFT",) * 3)


class _Own(Reward):
    name = "own"

    def __init__(self, returned, weight=1.0):
        super().__init__(weight)
        self.returned = returned

    def __call__(self, rows, responses, actions):
        return self.returned(rows) if callable(self.returned) else self.returned


class _NoName(_Own):
    name = None


class _NoWeight(_Own):
    def __init__(self):
        self.returned = [1.0]


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0],
        np.array([True, False]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([1, 0]).bfloat16(),
        (1.0, 0.0),
    ],
)
def test_what_a_reward_returns_is_converted(returned):
    env = PromptEnvs(FewRows(), [_Own(returned, weight=0.5)]).make(2, "direct")
    _, rewards, _, _, infos = env.step(("LEFT",) * 2)
    assert rewards.dtype == infos["reward/own"].dtype == np.float64
    assert rewards.tolist() == [0.5, 0] and infos["reward/own"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (
            np.ones((2, 1)),
            r"env.rewards: _Own returned a ndarray of shape \(2, 1\); the shape must be \(2,\), one number",
        ),
        ([1.0], r"returned a list of shape \(1,\); the shape must be \(2,\)"),
        (0.5, r"returned 0.5 of shape \(\); the shape must be \(2,\)"),
        (None, "returned None; it must return one number for each response"),
        ({"LEFT": 1.0}, "returned a dict; it must return one number"),
        ([None, 1.0], "returned a list; it must return one number"),
        (["1", "2"], "returned a list; it must return one number"),
        (np.array([1j, 0]), "returned a ndarray; it must return one number"),
        ([[1.0], [1.0, 2.0]], "returned a list, which cannot be converted to an array: ValueError: setting"),
        ([1.0, np.nan], "env.rewards: _Own is nan for the response 'RIGHT'; it must be finite"),
        (lambda rows: torch.tensor(float("nan")).expand(2), "env.rewards: _Own is nan for the response 'LEFT'"),
        (lambda rows: {}["key"], "env.rewards: _Own raised KeyError: 'key'"),
        (lambda rows: float("x"), "env.rewards: _Own raised ValueError: could not convert string to float: 'x'"),
    ],
)
def test_what_an_own_reward_returns_is_checked(returned, sentence):
    env = PromptEnvs(FewRows(), [InvalidActionReward(), _Own(returned)]).make(2, "direct")
    with pytest.raises(ValueError, match=sentence):
        env.step(("LEFT", "RIGHT"))


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        (InvalidActionReward(), "env.rewards is an InvalidActionReward; it must be a list of rewards"),
        ([InvalidActionReward], "env.rewards has the class InvalidActionReward; it must be an object of a subclass of"),
        ([len], "env.rewards has the function len; it must be an object of a subclass of lrl.rewards"),
        ([_NoName(1)], "env.rewards has a _NoName, whose class has no name; it must set name"),
        ([_NoWeight()], r"env.rewards has a _NoWeight, whose __init__ must call super\(\).__init__\(weight\)"),
    ],
)
def test_mistakes_in_the_list_of_rewards_raise(rewards, sentence):
    with pytest.raises(ValueError, match=sentence):
        PromptEnvs(FewRows(), rewards)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "a", None, True])
def test_the_weight_of_a_reward_must_be_a_number(weight):
    with pytest.raises(ValueError, match=f"_Own.weight is {weight!r}; it must be a finite number"):
        _Own([1.0], weight)


def test_numbers_are_parsed_clipped_and_rewarded() -> None:
    rewards = [ClosingTagFormatReward(weight=0.5), BehaviourCloningReward()]
    env = PromptEnvs(Arms(), rewards).make(4, "direct")
    observations, _ = env.reset(options={"episode": np.zeros(4, dtype=np.int64)})
    target = env.rows[0].action
    assert observations == (f"<observation>{target[0]:.3f},{target[1]:.3f}</observation>",) * 4
    responses = (
        f"<action>{target[0]},{target[1]}</action>",
        "<action>7,-8</action>",
        "<action>0.5</action>",
        "<action>0,0</action> then",
    )
    _, total, terminated, _, infos = env.step(responses)
    error = np.mean((np.array([1, -1]) - target) ** 2)  # where 7 and -8 are clipped to
    np.testing.assert_allclose(infos["reward/behaviour_cloning"], [0, -error, -10, -10])
    np.testing.assert_allclose(infos["reward/closing_tag_format"], [1, 1, -9, -0.5])
    np.testing.assert_allclose(total, [0.5, 0.5 - error, -14.5, -10.25])
    assert infos["action_valid"].tolist() == [True, True, False, False] and terminated.all()
    assert infos["clipped_numbers"].tolist() == [0, 2, 0, 0]
    assert "2 numbers" in infos["invalid_reason"][2] and "success" not in infos


def test_networks_see_native_observations_and_take_native_actions() -> None:
    factory = PromptEnvs(Arms(), [BoundedCloningReward(scale=0.5)])
    assert factory.spaces == Arms.spaces
    env = factory.make(3, None)
    observations, infos = env.reset(options={"episode": np.arange(3)})
    assert observations in env.observation_space and infos == {}
    assert sorted(map(tuple, observations.tolist())) == sorted(map(tuple, Arms.targets.tolist()))
    actions = observations + np.array([[0, 0], [5, 5], [-0.5, 0]], dtype=np.float32)
    again, rewards, terminated, truncated, infos = env.step(actions)
    taken = np.clip(actions, -1, 1)
    np.testing.assert_allclose(rewards, np.exp(-((taken - observations) ** 2).mean(1) / 0.5), rtol=1e-6)
    assert (again == observations).all() and terminated.all() and not truncated.any()
    assert infos["action_valid"].all() and "success" not in infos
    assert infos["clipped_numbers"].tolist() == (taken != actions).sum(1).tolist()


def test_cells_are_native_observations_of_frozen_lake() -> None:
    factory = PromptEnvs(ExpertQRows(), [OptimalActionReward()])
    assert factory.spaces == (gym.spaces.Discrete(16), gym.spaces.Discrete(4))
    env = factory.make(11, None)
    cells, _ = env.reset(options={"episode": np.arange(11)})
    assert sorted(cells) == [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14]
    chosen = np.array([row.best_actions[0] for row in env.rows])
    _, rewards, _, _, infos = env.step(chosen)
    assert rewards.tolist() == [1] * 11 and infos["success"].all()
    _, rewards, *_ = env.step((chosen + 2) % 4)
    assert 0 < rewards.sum() < 11  # one cell has two best actions, which are opposite
    with pytest.raises(ValueError, match="RandomMapRows, which has text observations only"):
        PromptEnvs(RandomMapRows(num_maps=2), [OptimalActionReward()]).make(1, None)


def test_rewards_get_empty_responses_where_actions_are_native() -> None:
    class Silent(InvalidActionReward):
        def __call__(self, rows, responses, actions):
            assert responses == ["", ""] and all(action.shape == (2,) for action in actions)
            return super().__call__(rows, responses, actions)

    env = PromptEnvs(Arms(), [Silent()]).make(2, None)
    env.reset(seed=0)
    assert env.step(np.zeros((2, 2)))[1].tolist() == [0, 0]


def test_past_turns_are_those_of_the_episode_in_the_response_format() -> None:
    env = PromptEnvs(Recorded(), [InvalidActionReward()]).make(5, "think_answer")
    assert env.reset(options={"episode": np.arange(5)})[1] == {}
    env.set_attr("max_past_turns", 2)
    observations, infos = env.reset(options={"episode": np.arange(5)})
    past = dict(zip(observations, infos["past_turns"], strict=True))
    turns = [
        PastTurn(f"row {n}", f"<think></think><answer>{a}</answer>") for n, a in enumerate(["LEFT", "DOWN", "RIGHT"])
    ]
    assert past["row 0"] == () and past["row 1"] == (turns[0],) and past["row 3"] == (turns[1], turns[2])


def test_rows_are_read_when_they_are_shown_and_once_per_group() -> None:
    read = []

    class Watched(Steps):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    class Source(FewRows):
        def rows(self) -> Watched:
            return Watched()

    env = PromptEnvs(Source(), [InvalidActionReward()]).make(6, "direct")
    read.clear()
    env.reset(options={"episode": np.repeat([3, 4], 3)})
    env.step(("LEFT",) * 6)
    assert len(read) == 2
