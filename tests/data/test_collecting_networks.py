"""Collecting from policies that act natively: networks are recorded as policies that answer in text are."""

import copy
import json

import numpy as np
import pytest
import torch
import yaml
from tiny_runs import save_tiny_model

from lrl.cli.collect import main
from lrl.data.demonstrations.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_storage import DatasetReader
from lrl.evaluation.checkpoint import load_policy
from lrl.models.language_model import LanguageModelConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts.template import PromptTemplate
from lrl.types import RandomKeys, SamplingConfig

MLP = {"hidden_sizes": [8], "normalise_observations": True, "init_seed": 0}


KEYS = RandomKeys(seed=0, purpose="evaluation", collection=0, env=np.zeros(1, int), turn=np.zeros(1, int))


def network(env, scale=1e4):
    """A random network that normalises what it sees, and whose means of a Box lie far outside at this scale."""
    policy = MLPPolicy(**MLP)
    policy.connect(env.codec)
    policy.connect_spaces(*env.spaces)
    policy.configure()
    policy.norm.learn(1.0 + 3.0 * torch.randn(50, policy._size, generator=torch.Generator().manual_seed(0)), 0)
    policy.norm.settle(1)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(scale)
    return policy


@pytest.fixture(scope="module", params=["CartPole-v1", "HalfCheetah-v5"])
def collected(request, tmp_path_factory):
    """What the script makes of a run directory: the environment, the run's policy, and what was printed."""
    folder, run = tmp_path_factory.mktemp("datasets"), tmp_path_factory.mktemp("runs") / "mlp"
    env = GymnasiumEnvs(request.param)
    policy = {"class_path": "lrl.policies.mlp.MLPPolicy", "init_args": MLP}
    factory = {"class_path": "lrl.envs.factory.GymnasiumEnvs", "init_args": {"id": request.param}}
    config = {"model": {"init_args": {"policy": policy}}, "data": {"init_args": {"env": factory}}}
    state = {f"policy.{name}": tensor for name, tensor in network(env).state_dict().items()}
    ours = {"config": yaml.safe_dump(config), "env_steps": 7, "fingerprint": ""}
    (run / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": state, "lrl": ours}, run / "checkpoints" / "last.ckpt")
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


def test_what_is_recorded_is_clipped_and_not_normalised(collected):
    env, policy, *_ = collected
    episode = DatasetReader("lrl/network-v0").episode(0)
    raw = policy._tensor(episode.observations)
    assert not torch.allclose(policy.norm(raw), raw)
    if env.id == "HalfCheetah-v5":
        outputs = policy(raw)[0]
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


def test_random_actions_are_put_in_between_answers_in_text_only(datasets):
    env = GymnasiumEnvs("CartPole-v1")
    with pytest.raises(ValueError, match="random_share is 0.2, but MLPPolicy acts natively; it must be 0"):
        gather(env, network(env), random_share=0.2)
