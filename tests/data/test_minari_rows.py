"""Rows of Minari data sets: what the environment would have shown, read when it is shown."""

import gymnasium as gym
import numpy as np
import pytest
from tiny_runs import from_settings, make_trainer

import lrl.data.rows as module
from lrl.algorithms.grpo import GRPOModule
from lrl.codecs.numbers import NumberFormat
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.rows import MinariRows
from lrl.data.run_data import ValidationConfig
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter
from lrl.envs.prompt_env import PromptEnvs
from lrl.evaluation.load import load_baseline
from lrl.lm.config import LanguageModelConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.rewards.behaviour_cloning import BehaviourCloningReward, BoundedCloningReward
from lrl.rewards.format import ClosingTagFormatReward, InvalidActionReward
from lrl.rollouts.runner import EnvRunner
from lrl.training.optimizer import OptimizerConfig
from lrl.types import SamplingConfig

PENDULUM = GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(kind="integers"))
PLAYED = {
    "lrl/cartpole-v0": GymnasiumEnvs("CartPole-v1", max_episode_steps=9),
    "lrl/goto-v0": GymnasiumEnvs("lrl/BabyAI-GoToLocal-v0"),
}
LENGTHS, RETURNS = (3, 1, 4, 2, 5, 3), (-9.0, -2.0, -8.0, -6.0, -5.0, -3.0)


def write(dataset_id, observations, actions, returns, spaces):
    """Write episodes whose return is that of their last step."""
    with DatasetWriter(dataset_id, *spaces, None) as writer:
        for seen, acted, last in zip(observations, actions, returns, strict=True):
            ends = [False] * (len(acted) - 1) + [True]
            episode = {"seed": 0, "context": None, "success": False, "observations": [*seen, seen[-1]]}
            episode |= {"actions": acted, "rewards": [last * end for end in ends], "terminations": ends}
            writer.add([episode | {"truncations": [False] * len(ends), "random_steps": []}])
        writer.finish({})


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Six episodes of Pendulum with known numbers, and recorded episodes of two environments."""
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        seen = [list(rng.uniform(-1, 1, (length, 3)).astype(np.float32)) for length in LENGTHS]
        acted = [list(rng.uniform(-2, 2, (length, 1)).astype(np.float32)) for length in LENGTHS]
        write("lrl/pendulum-v0", seen, acted, RETURNS, PENDULUM.spaces)
        for dataset_id, env in PLAYED.items():
            collect(load_baseline("expert", env).policy, env, dataset_id, 5, 3, 2, name="expert", commit="")
        yield {"lrl/pendulum-v0": (seen, acted)}


def rows_of(dataset_id="lrl/pendulum-v0", env=PENDULUM, **settings):
    return MinariRows(dataset_id, env, **{"split": "all"} | settings).rows()


def test_a_row_holds_a_step_natively_and_as_the_environment_writes_it(datasets):
    rows, (seen, acted) = rows_of(), datasets["lrl/pendulum-v0"]
    assert len(rows) == sum(LENGTHS) and sorted(rows.episodes) == [0, 1, 2, 3, 4, 5]
    expected = [step for episode in rows.episodes for step in zip(seen[episode], acted[episode], strict=True)]
    for row, (observation, action) in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row.native_observation, observation)
        np.testing.assert_array_equal(row.action, action)
        assert row.observation == PENDULUM.codec.observation_to_text(observation)
        assert row.observation.startswith("<observation>") and row.q_values == ()
    assert [row.observation for row in rows[2:5]] == [rows[index].observation for index in (2, 3, 4)]
    assert rows[-1].observation == rows[len(rows) - 1].observation
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_an_action_out_of_bounds_is_compared_as_the_environment_takes_it(datasets):
    """Data sets of others may hold such actions, which no response could match."""
    write("lrl/wild-v0", [[np.zeros(3, np.float32)]], [[np.array([7.5], np.float32)]], [0.0], PENDULUM.spaces)
    assert [row.action.tolist() for row in rows_of("lrl/wild-v0")] == [[2]]


def test_discrete_steps_are_plain_integers(datasets):
    (row, *_) = rows_of("lrl/cartpole-v0", PLAYED["lrl/cartpole-v0"])
    assert type(row.action) is int and row.native_observation.shape == (4,)


@pytest.mark.parametrize("history", [0, 2, 5])
@pytest.mark.parametrize("dataset_id", PLAYED)
def test_prompts_and_their_history_are_those_of_the_demonstrated_episodes(datasets, dataset_id, history):
    """They are compared with demonstrations, whose tokens are those of the same states met online."""
    env = PLAYED[dataset_id]
    policy = TextPolicy(
        LanguageModelConfig(), PromptTemplate(response_format="direct", history=history), SamplingConfig()
    )
    policy.connect(env.codec)
    source = MinariRows(dataset_id, env, "all")
    turns = MinariDemonstrations(dataset_id, "all").load(env.codec, policy)
    assert len(source.rows()) == len(turns) > 9
    runner = EnvRunner(policy, PromptEnvs(source, [InvalidActionReward()]).make(len(turns), "direct"))
    runner.reset(np.zeros(len(turns), dtype=np.int64), np.arange(len(turns)))
    shown = list(zip(*runner.seen(np.arange(len(turns))), strict=True))
    assert sorted(map(str, shown)) == sorted(str((turn.observation, turn.history)) for turn in turns)
    assert max(len(past) for _, past in shown) == history


def test_a_rows_own_action_is_demonstrated_where_there_are_no_q_values(datasets):
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="direct"), SamplingConfig())
    source = MinariRows("lrl/pendulum-v0", PENDULUM)
    turns = ExpertDemonstrations(source).load(PENDULUM.codec, policy)
    assert [turn.response for turn in turns] == [PENDULUM.codec.action_to_text(row.action) for row in source.rows()]


def test_the_reward_of_the_recorded_response_is_the_highest(datasets):
    """The original trained on other texts than it evaluated on; here both are written by one codec."""
    source = MinariRows("lrl/pendulum-v0", PENDULUM)
    envs = PromptEnvs(source, [ClosingTagFormatReward(), BoundedCloningReward()]).make(4, "direct")
    observations, _ = envs.reset(options={"episode": np.arange(4)})
    online, _ = PENDULUM.make(1, "direct").reset(seed=[0])
    assert [text[:13] + text[-14:] for text in (*observations, *online)] == ["<observation></observation>"] * 5
    responses = tuple(PENDULUM.codec.action_to_text(row.action) for row in envs.rows)
    _, rewards, *_, infos = envs.step(responses)
    assert infos["reward/closing_tag_format"].tolist() == [1] * 4
    np.testing.assert_allclose(rewards, 2, atol=1e-4)  # half a bin of 4/999


def test_episodes_are_selected_by_number_rows_and_return(datasets):
    everything = rows_of().episodes.tolist()
    assert rows_of(num_episodes=2).episodes.tolist() == everything[:2]
    few = rows_of(num_rows=7)
    assert len(few) == 7 and few.episodes.tolist() == everything[: len(few.episodes)]
    assert sorted(rows_of(min_return=-5.0).episodes) == [1, 4, 5]
    assert len(rows_of(min_return=-2.0)) == 1
    assert rows_of(seed=1).episodes.tolist() != everything
    parts = [rows_of(split=split, validation_share=0.3).episodes.tolist() for split in ("train", "validation")]
    assert sorted([*parts[0], *parts[1]]) == sorted(everything) and len(parts[1]) == 2


def test_demonstrations_and_rows_with_equal_settings_use_equal_episodes(datasets):
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="direct"), SamplingConfig())
    for settings in ({"min_return": -6.0}, {"num_rows": 5}, {"split": "validation"}):
        turns = MinariDemonstrations("lrl/pendulum-v0", **settings).load(PENDULUM.codec, policy)
        rows = MinariRows("lrl/pendulum-v0", PENDULUM, **settings).rows()
        assert turns.episodes.tolist() == rows.episodes.tolist() and len(turns) == len(rows)


def test_episodes_are_kept_within_a_number_of_bytes(datasets, monkeypatch):
    rows, read, episode = rows_of(), [], DatasetReader.episode
    monkeypatch.setattr(DatasetReader, "episode", lambda self, index: read.append(index) or episode(self, index))
    for _ in range(2):
        assert len(list(rows)) == len(rows)
    assert len(read) == 5  # the first was read when the rows were opened
    assert rows._cache.bytes >= sum(LENGTHS) * (4 * (3 + 1) + 8 + 8)  # float32 numbers, a reward and an index per step
    monkeypatch.setattr(module, "_CACHED_BYTES", 1000)
    small = rows_of()
    for row, same in zip(small, rows, strict=True):
        np.testing.assert_array_equal(row.native_observation, same.native_observation)
    assert small._cache.bytes <= 1000


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_rows": 99}, "env.rows.num_rows is 99, but the all split of 'lrl/pendulum-v0' has 18"),
        ({"num_episodes": 9}, "env.rows.num_episodes is 9, but the all split of 'lrl/pendulum-v0' has 6"),
        ({"num_rows": 1, "num_episodes": 1}, "env.rows.num_episodes and env.rows.num_rows are both set"),
        ({"min_return": 0.0}, "env.rows.min_return is 0, but the returns in the all split .* are -9 to -2; it must"),
        ({"split": "test"}, "env.rows.split is 'test'; it must be one of train, validation, all"),
        ({"num_rows": 0}, "env.rows.num_rows is 0; it must be at least 1"),
        ({"env": PLAYED["lrl/cartpole-v0"]}, "env.rows.dataset_id is 'lrl/pendulum-v0', whose observation space is"),
        ({"dataset_id": "lrl/none-v0"}, "dataset_id is 'lrl/none-v0', which is not in"),
    ],
)
def test_invalid_settings_of_rows_raise_one_sentence(datasets, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        rows_of(**settings)


def test_a_run_downloads_the_rows_of_its_environments(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "download", asked.append)
    env = PromptEnvs(MinariRows("far/train-v0", PENDULUM), [BoundedCloningReward()])
    held_out = PromptEnvs(MinariRows("far/test-v0", PENDULUM), [BoundedCloningReward()])
    RolloutDataModule(env, num_groups=1, validation=ValidationConfig(env=held_out)).prepare_data()
    assert asked == ["far/train-v0", "far/test-v0"]


def train(root, policy, source, rewards, collections=2, **sizes):
    """Train a policy on rows and return what was logged."""
    sizes = {"num_groups": 3, "group_size": 4} | sizes
    trainer = make_trainer(root, max_epochs=collections)
    data = from_settings(RolloutDataModule, PromptEnvs(source, rewards), **sizes)
    trainer.fit(GRPOModule(policy, optimizer=OptimizerConfig(lr=2e-2)), datamodule=data)
    return [row for _, row in trainer.logger.rows if "rollout/return" in row]


def network():
    return MLPPolicy((16,), critic=False, init_seed=0, initial_log_std=-1.0)


def head():
    model = LanguageModelConfig(name="assets/tiny-lm")
    return HeadPolicy(model, hidden_sizes=(8,), freeze_trunk=True, max_text_tokens=32, critic=None, init_seed=0)


@pytest.mark.parametrize("make_policy", [network, head])
@pytest.mark.parametrize("dataset_id", ["lrl/pendulum-v0", "lrl/cartpole-v0"])
def test_policies_with_native_actions_are_trained_on_rows(datasets, tmp_path, make_policy, dataset_id):
    env, rewards = {"lrl/pendulum-v0": PENDULUM, **PLAYED}[dataset_id], [BehaviourCloningReward(weight=0.1)]
    policy = make_policy()
    first, last = train(tmp_path, policy, MinariRows(dataset_id, env), rewards)
    assert first["clock/env_steps"] == 12 and last["rollout/invalid_action_rate"] == 0
    assert first["rollout/return"] == pytest.approx(0.1 * first["rollout/reward_behaviour_cloning"])
    assert first["rollout/length"] == 1 and "rollout/success_rate" not in first
    assert first["train/advantage_abs"] > 0 and first["train/ratio_error"] < 1e-5
    assert ("rollout/clipped_numbers" in first) == (dataset_id == "lrl/pendulum-v0")


def test_a_policy_that_writes_text_is_trained_on_rows(datasets, tmp_path):
    prompt, model = PromptTemplate(response_format="direct", system=""), LanguageModelConfig(name="assets/tiny-lm")
    policy = TextPolicy(model, prompt, SamplingConfig(max_new_tokens=3))
    rewards = [ClosingTagFormatReward(), BehaviourCloningReward(weight=0.5)]
    (first, _) = train(tmp_path, policy, MinariRows("lrl/pendulum-v0", PENDULUM), rewards)
    assert first["rollout/invalid_action_rate"] == 1 and first["rollout/reward_behaviour_cloning"] == -10
    assert first["rollout/return"] == pytest.approx(first["rollout/reward_closing_tag_format"] - 5)
    assert "rollout/success_rate" not in first


@pytest.mark.learning
def test_a_network_learns_the_controller_that_was_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rng = np.random.default_rng(0)
    seen = [list(rng.uniform(-1, 1, (100, 3)).astype(np.float32)) for _ in range(5)]
    acted = [[np.array([x[0] - 0.5 * x[2]]) for x in episode] for episode in seen]
    spaces = PENDULUM.spaces[0], gym.spaces.Box(-2, 2, (1,), np.float32)
    write("lrl/linear-v0", seen, acted, [0.0] * 5, spaces)
    source, rewards = MinariRows("lrl/linear-v0", PENDULUM), [BoundedCloningReward(scale=0.2)]
    rows = train(tmp_path, network(), source, rewards, 60, num_groups=16, group_size=8, num_epochs=2)
    assert rows[0]["rollout/return"] < 0.6 and rows[-1]["rollout/return"] > 0.85


def test_shuffled_actions_are_those_of_other_rows_each_once(datasets):
    own, shuffled, again = rows_of(), rows_of(shuffle_actions=True), rows_of(shuffle_actions=True)
    for row, other in zip(own, shuffled, strict=True):
        assert row.observation == other.observation
        np.testing.assert_array_equal(row.native_observation, other.native_observation)
    actions = [
        [float(row.action[0]) for row in rows] for rows in (own, shuffled, again, rows_of(shuffle_actions=True, seed=1))
    ]
    assert sorted(actions[0]) == sorted(actions[1]) and actions[1] == actions[2] != actions[3]
    assert not any(one == other for one, other in zip(*actions[:2], strict=True)), "none keeps its own"
    assert own.past_turns(2, 2) == shuffled.past_turns(2, 2), "the history is what happened"
