"""Collecting from policies that act natively: networks are recorded as policies that answer in text are."""

import copy
import json

import minari
import numpy as np
import pytest
import torch
from network_runs import KEYS, network, save_run
from tiny_runs import save_tiny_model

from lrl.cli.collect import main
from lrl.codecs.numbers import NumberFormat
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.evaluation.load import load_policy
from lrl.lm.config import LanguageModelConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import RandomKeys, SamplingConfig


@pytest.fixture(scope="module", params=["CartPole-v1", "HalfCheetah-v5"])
def collected(request, tmp_path_factory):
    """Result of the script for a run directory: the environment, the run's policy, and the output."""
    folder, run = tmp_path_factory.mktemp("datasets"), tmp_path_factory.mktemp("runs") / "mlp"
    env = GymnasiumEnvs(request.param)
    save_run(run, network(env), {"id": request.param})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        arguments = ["--policy", str(run), "--env_id", request.param, "--dataset_id", "lrl/network-v0"]
        arguments += ["--episodes", "3", "--seed", "5", "--num_envs", "2", "--jsonl", str(folder / "rows.jsonl")]
        patch.setattr("lrl.envs.factory._spec", short(12))
        main("collect", arguments)
        yield env, load_policy(run).policy, run, folder / "rows.jsonl"


def short(steps):
    """Registered environments with another time limit."""
    import gymnasium as gym

    def spec(id):
        found = copy.deepcopy(gym.spec(id))  # the registered one is shared by all tests
        found.max_episode_steps = steps
        return found

    return spec


def test_a_checkpoint_of_a_network_is_recorded_in_native_observations_and_actions(collected):
    env, policy, *_ = collected
    reader, native = DatasetReader("lrl/network-v0"), env.make_native()
    assert reader.observation_space == native.observation_space and reader.action_space == native.action_space
    for index in range(3):
        episode = reader.episode(index)
        seen, _ = native.reset(seed=5 + index)
        for observation, action in zip(episode.observations, episode.actions, strict=True):
            np.testing.assert_array_equal(observation, seen)
            assert native.action_space.contains(action)
            (choice,) = policy.act([seen], [()], KEYS, SamplingConfig(temperature=0)).actions
            np.testing.assert_allclose(action, choice, atol=1e-4)
            seen = native.step(action)[0]
    native.close()


def test_replaying_recorded_actions_gives_the_recorded_rewards_and_ends(collected):
    env, native = collected[0], collected[0].make_native()
    dataset = minari.load_dataset("lrl/network-v0")
    assert dataset.total_episodes == 3
    for index, episode in enumerate(dataset):
        native.reset(seed=5 + index)
        replayed = [native.step(action)[1:4] for action in episode.actions]
        assert [reward for reward, *_ in replayed] == episode.rewards.tolist()
        ends = list(zip(episode.terminations.tolist(), episode.truncations.tolist(), strict=True))
        assert [end for _, *end in replayed] == [list(end) for end in ends]
        assert [any(end) for end in ends] == [False] * (len(ends) - 1) + [True], "whole, and no step after its end"
        if env.id == "HalfCheetah-v5":
            assert ends[-1] == (False, True), "cut by its time limit"
    native.close()


def test_recorded_actions_are_clipped_and_not_normalised(collected):
    env, policy, *_ = collected
    episode = DatasetReader("lrl/network-v0").episode(0)
    raw = policy.vectors(episode.observations, policy.actor)
    assert not torch.allclose(policy.norm(raw), raw)
    if env.id == "HalfCheetah-v5":
        outputs = policy(policy.norm(raw))
        assert outputs.abs().min() > 0 and (outputs.abs() > 1).float().mean() > 0.5
        assert np.abs(episode.actions).max() == 1.0


def test_its_metadata_are_those_of_any_other_policy(collected):
    run, reader = collected[2], DatasetReader("lrl/network-v0")
    ours = reader.metadata["lrl"]
    assert (ours["policy"], ours["seed"], ours["played_episodes"]) == (str(run), 5, 3)
    about = list(reader._storage.get_episode_metadata(range(3)))
    assert [one["seed"] for one in about] == [5, 6, 7]
    assert ours["return_mean"] == pytest.approx(np.mean([one["rewards_sum"] for one in about]))


def test_a_language_model_can_learn_from_it(collected):
    env, *_, jsonl = collected
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(), SamplingConfig())
    policy.connect(env.codec)
    source = MinariDemonstrations("lrl/network-v0", split="all")
    source.prepare_data()
    source.validate(env)
    turns = source.load(env.codec, policy)
    first = DatasetReader("lrl/network-v0").episode(int(turns.episodes[0]))
    assert turns[0].observation == env.codec.observation_to_text(first.observations[0])
    assert env.codec.action_to_text(first.actions[0]) in turns[0].response
    assert len(jsonl.read_text().splitlines()) == len(turns)
    assert json.loads(jsonl.read_text().splitlines()[0])["observation"].startswith("<observation>")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def gather(env, policy, dataset_id="lrl/test-v0", num_envs=1, **changes):
    collect(policy, env, dataset_id, 4, 3, num_envs, name="network", commit="", **changes)
    reader = DatasetReader(dataset_id)
    return [reader.episode(index) for index in range(4)]


def test_the_data_set_of_a_network_does_not_depend_on_how_many_environments_play(datasets):
    env = GymnasiumEnvs("Pendulum-v1", max_episode_steps=5)
    policy = network(env, scale=1.0)
    for ours, theirs in zip(gather(env, policy), gather(env, policy, "lrl/side-by-side-v0", 3), strict=True):
        np.testing.assert_allclose(ours.observations, theirs.observations, atol=1e-5)
        np.testing.assert_allclose(ours.actions, theirs.actions, atol=1e-5)


@pytest.mark.slow
def test_a_run_plays_where_it_was_trained_unless_an_environment_is_named(datasets, tmp_path, capsys):
    own = {"id": "CartPole-v1", "max_episode_steps": 6, "reset_options": {"low": 0.0, "high": 0.01}}
    save_run(tmp_path / "run", network(GymnasiumEnvs("CartPole-v1"), scale=0.0), own)
    arguments = ["--policy", str(tmp_path / "run"), "--episodes", "2", "--num_envs", "2"]
    main("collect", [*arguments, "--dataset_id", "lrl/own-v0"])
    main("collect", [*arguments, "--dataset_id", "lrl/named-v0", "--env_id", "CartPole-v1"])
    reader, named = DatasetReader("lrl/own-v0"), DatasetReader("lrl/named-v0")
    assert reader.metadata["lrl"]["reset_options"] == own["reset_options"]
    assert reader.lengths.tolist() == [6, 6] and named.lengths.min() > 6
    assert (np.array([reader.episode(index).observations[0] for index in range(2)]) >= 0).all()
    assert "return 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "expert"], "--env_id is missing; it must be a registered name, unless --policy is a run"),
        (["--ranges"], "--env_id is missing"),
        (["--policy", "expert", "--env_kwargs", '{"a": 1}'], "--env_kwargs is given without --env_id"),
        (["--policy", "nowhere"], "--policy is 'nowhere'; it must be random, constant, expert, a checkpoint or a run"),
    ],
)
def test_an_environment_that_is_not_known_raises_one_sentence(datasets, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main("collect", [*arguments, "--dataset_id", "lrl/none-v0"])
    assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--episodes", "5"], "--episodes is 5"),
        (["--max_episode_steps", "5"], "--max_episode_steps is 5"),
        (["--seed", "3"], "--seed is 3"),
        (["--num_envs", "2"], "--num_envs is 2"),
        (["--temperature", "1"], "--temperature is 1.0"),
        (["--random_share", "0.2"], "--random_share is 0.2"),
        (["--successful_only"], "--successful_only is given"),
    ],
)
def test_what_says_how_to_play_is_an_error_where_nothing_is_played(datasets, capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main("collect", ["--env_id", "CartPole-v1", "--dataset_id", "lrl/none-v0", "--ranges", *words])
    assert end.value.code == 2 and f"{said}, but no episodes are played without --policy" in capsys.readouterr().err


@pytest.mark.parametrize("named", [[], ["--env_id", "Pendulum-v1"]])
def test_episodes_can_be_made_short_to_record_many_starts(datasets, tmp_path, named):
    env = GymnasiumEnvs("Pendulum-v1")
    save_run(tmp_path / "run", network(env), {"id": "Pendulum-v1"})
    words = ["--policy", str(tmp_path / "run"), "--dataset_id", "lrl/starts-v0", "--episodes", "3"]
    main("collect", [*words, *named, "--max_episode_steps", "7"])
    dataset = minari.load_dataset("lrl/starts-v0")
    assert dataset.spec.env_spec.max_episode_steps == 7
    assert [episode.truncations.tolist() for episode in dataset] == [[False] * 6 + [True]] * 3


def test_a_time_limit_below_one_step_is_an_error(datasets, capsys):
    words = ["--policy", "random", "--env_id", "CartPole-v1", "--dataset_id", "lrl/none-v0"]
    with pytest.raises(SystemExit) as end:
        main("collect", [*words, "--max_episode_steps", "0"])
    assert end.value.code == 2 and "max_episode_steps is 0; it must be at least 1." in capsys.readouterr().err


def test_a_network_is_recorded_at_a_temperature(datasets):
    env = GymnasiumEnvs("Pendulum-v1", max_episode_steps=20)
    policy = network(env, scale=1.0)
    gather(env, policy, sampling=policy.sampling_at(0.0))
    hot = gather(env, policy, "lrl/hot-v0", sampling=policy.sampling_at(1.0))
    again = gather(env, policy, "lrl/again-v0", 3, sampling=policy.sampling_at(1.0))
    calm = [DatasetReader("lrl/test-v0").episode(index) for index in range(4)]
    assert np.ptp(calm[0].actions) < 1 < np.ptp(hot[0].actions)
    np.testing.assert_allclose(hot[2].actions, again[2].actions, atol=1e-5)
    assert [DatasetReader(f"lrl/{name}-v0").metadata["lrl"]["temperature"] for name in ("test", "hot")] == [0, 1]


def test_the_codecs_context_is_kept_with_the_episodes_of_a_network(datasets):
    env = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0")
    native, contexts = env.make_native(), []
    for index in range(4):
        native.reset(seed=3 + index)
        contexts.append(env.codec.context(native))
    assert [episode.context for episode in gather(env, network(env))] == contexts and len(set(contexts)) == 4


def test_a_head_on_a_language_model_is_recorded_as_well(datasets, tmp_path):
    env = GymnasiumEnvs("CartPole-v1", max_episode_steps=4)
    policy = HeadPolicy(LanguageModelConfig(name=save_tiny_model(tmp_path / "tiny")), init_seed=0)
    policy.connect(env.codec)
    policy.connect_spaces(*env.spaces)
    policy.configure()
    assert [len(episode.actions) for episode in gather(env, policy)] == [4] * 4


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_random_actions_between_those_of_a_network_are_marked_and_its_own_are_kept(datasets, env_id):
    env = GymnasiumEnvs(env_id, max_episode_steps=60, numbers=NumberFormat(precision=0))
    policy = network(env, scale=1.0)
    policy.sampling = SamplingConfig(temperature=0)
    episodes = gather(env, policy, "lrl/noisy-v0", num_envs=2, random_share=0.3)
    reader, randoms, differing = DatasetReader("lrl/noisy-v0"), [], 0
    assert reader.metadata["lrl"]["random_share"] == 0.3 and reader.metadata["lrl"]["temperature"] == 0
    own = [set(reader.demonstrated_steps(index).tolist()) for index in range(4)]
    total = sum(len(episode.actions) for episode in episodes)
    assert 0.5 * total < sum(map(len, own)) < 0.9 * total
    for index, episode in enumerate(episodes):
        seen = list(episode.observations)
        choices = policy.act(seen, [()] * len(episode.actions), keys_of(episode), policy.sampling).actions
        advised = episode.advised_actions
        for step, (choice, action) in enumerate(zip(choices, episode.actions, strict=True)):
            assert reader.action_space.contains(action)
            if step in own[index]:
                np.testing.assert_allclose(action, choice, atol=1e-5)
                continue
            randoms.append(action)
            differing += not np.allclose(action, choice, atol=1e-3)
            np.testing.assert_allclose(advised[step], choice, atol=1e-5)
    assert np.ptp(randoms) == 1 if env_id == "CartPole-v1" else np.ptp(randoms) > 2, "over the whole space"
    assert differing > 0.25 * len(randoms)
    if env_id == "Pendulum-v1":
        assert len({float(action[0]) for action in randoms}) == len(randoms), "not rounded as a text is"
    alone = gather(env, policy, "lrl/alone-v0", num_envs=1, random_share=0.3)
    for one, two in zip(episodes, alone, strict=True):
        np.testing.assert_allclose(one.actions, two.actions, atol=1e-5)


def keys_of(episode):
    """Random numbers for each step of an episode."""
    rows = np.arange(len(episode.actions))
    return RandomKeys(seed=0, purpose="evaluation", collection=0, env=0 * rows, turn=rows)
