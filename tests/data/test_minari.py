"""Demonstrations from Minari data sets have the tokens that the environment would have shown."""

import json
import re
import shutil
import time

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
import torch

import lrl.data.minari as module
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.data.demonstration_tokens import EncodedTokens
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.jsonl import JsonlDemonstrations, write_jsonl
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect, observation_ranges, observation_statistics
from lrl.data.rows import MinariRows
from lrl.data.sources import Augmentation, ExpertDemonstrations
from lrl.data.transitions import TransitionsDataModule
from lrl.envs import minari_reader
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter, dataset_path
from lrl.evaluation.load import load_baseline
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import Responses
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import RandomKeys, SamplingConfig

LAKES = "lrl/FrozenLakeRandomMaps-v0"
CHECK_HUB = minari_reader._check_hub
REASONING = ("I see {seen}, I choose", "so")
ENVS = {
    "lrl/lakes-v0": GymnasiumEnvs(LAKES, {"size": 4}, max_episode_steps=12),
    "lrl/cartpole-v0": GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers"), max_episode_steps=12),
    "lrl/pendulum-v0": GymnasiumEnvs("Pendulum-v1", max_episode_steps=4),
    "lrl/goto-v0": GymnasiumEnvs("lrl/BabyAI-GoToLocal-v0"),
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Four data sets of ten episodes each, in environments of four kinds."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("minari")
        patch.setenv("MINARI_DATASETS_PATH", str(root))
        patch.setattr(minari, "download_dataset", offline)
        patch.setattr(minari_reader, "_check_hub", lambda: None)
        for dataset_id, env in ENVS.items():
            name = "random" if "pendulum" in dataset_id else "expert"
            collect(load_baseline(name, env).policy, env, dataset_id, 10, 3, 2, name=name, commit="")
        yield root


def offline(dataset_id):
    raise OSError("there is no network")


@pytest.fixture
def copied(datasets, tmp_path, monkeypatch):
    """The lakes in a folder of their own, to be damaged."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    shutil.copytree(datasets / "lrl" / "lakes-v0", tmp_path / "lrl" / "lakes-v0")
    return tmp_path / "lrl" / "lakes-v0" / "data"


@pytest.fixture(scope="module")
def model():
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(), SamplingConfig(), max_prompt_tokens=4096)
    policy.configure()
    return policy


def connected(model, dataset_id="lrl/lakes-v0", **prompt):
    """The one model, with another prompt and codec."""
    model.prompt = PromptTemplate(**prompt)
    model.connect(ENVS[dataset_id].codec)
    return model


def turns_of(model, dataset_id="lrl/lakes-v0", prompt=None, **settings):
    policy = connected(model, dataset_id, **prompt or {})
    source = MinariDemonstrations(dataset_id, **{"split": "all", "reasoning": REASONING} | settings)
    source.validate(ENVS[dataset_id])
    return source.load(policy.codec, policy)


def data_of(model, monkeypatch, dataset_id="lrl/lakes-v0", prompt=None, batch_size=8, held_out=None, **settings):
    policy = connected(model, dataset_id, **prompt or {})
    source = MinariDemonstrations(dataset_id, **{"split": "all", "reasoning": REASONING} | settings)
    module = DemonstrationsDataModule(source, ENVS[dataset_id], batch_size, validation_demonstrations=held_out)
    module.connect(policy)
    return module


def met_online(policy, env, turns, seed, monkeypatch):
    """Return token ids of prompts and responses of an episode that is played with the demonstrated responses."""
    envs = env.make(1, policy.response_format)
    (observation,), _ = envs.reset(seed=[seed], options={"episode": np.array([0])})
    memory, met, ended = [()], [], False
    for step, turn in enumerate(turns):
        assert not ended
        ids = policy.encode_response(turn.response)
        said = Responses(
            ids=torch.tensor([ids]), mask=torch.ones(1, len(ids), dtype=torch.bool), logprobs=torch.zeros(1, len(ids))
        )
        monkeypatch.setattr(policy.generator, "generate", lambda *_, said=said: said)
        keys = RandomKeys(seed=0, purpose="", collection=0, env=np.zeros(1, np.int64), turn=np.full(1, step))
        decided = policy.act([observation], memory, keys, policy.sampling)
        met.append((decided.inputs["prompt_ids"][0].tolist(), decided.inputs["response_ids"][0].tolist()))
        memory = decided.memory
        (observation,), _, terminated, truncated, infos = envs.step(tuple(decided.actions))
        assert infos["action_valid"][0]
        ended = terminated[0] or truncated[0]
    envs.close()
    assert ended
    return met


def encoded(data, demonstrations):
    """Return the token ids of the prompts and of the responses."""
    return EncodedTokens((), data.policy, data.loss_on).encode(demonstrations)


@pytest.mark.parametrize("response_format", ["think_answer", "direct", "final_answer"])
@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("dataset_id", ENVS)
def test_the_tokens_of_a_row_are_those_of_the_same_state_met_online(
    model, datasets, monkeypatch, dataset_id, history, response_format
):
    prompt = {"history": history, "response_format": response_format}
    data = data_of(model, monkeypatch, dataset_id, prompt)
    turns, reader = data.load(data.demonstrations), DatasetReader(dataset_id)
    starts = np.concatenate([[0], np.cumsum(reader.lengths[turns.episodes])])
    for number, episode in list(enumerate(turns.episodes.tolist()))[:3]:
        rows = turns[starts[number] : starts[number + 1]]
        met = met_online(data.policy, ENVS[dataset_id], rows, 3 + episode, monkeypatch)
        assert list(zip(*encoded(data, rows), strict=True)) == met
        assert [len(row.history) for row in rows] == [min(step, history) for step in range(len(rows))]


def test_batches_hold_those_tokens(model, datasets, monkeypatch):
    data = data_of(model, monkeypatch, prompt={"history": 1}, batch_size=5)
    turns = data.load(data.demonstrations)
    assert data.num_batches() == -(-len(turns) // 5)
    batches = [data.batch(0, index, rank, 2) for index in range(data.num_batches()) for rank in (0, 1)]
    trained = [
        tuple(ids[mask].tolist()) for b in batches for ids, mask in zip(b.inputs["prompt_ids"], b.inputs["prompt_mask"])
    ]
    assert set(trained) == {tuple(prompt) for prompt in encoded(data, list(turns))[0]}
    assert len(trained) == 5 * data.num_batches()


def test_train_and_validation_share_no_episode_and_leave_none_out(model, datasets):
    parts = {split: turns_of(model, split=split, validation_share=0.3) for split in ("train", "validation", "all")}
    episodes = {split: set(part.episodes.tolist()) for split, part in parts.items()}
    assert len(episodes["validation"]) == 3 and len(episodes["train"]) == 7
    assert episodes["train"] | episodes["validation"] == episodes["all"] == set(range(10))
    assert (
        len(parts["train"]) + len(parts["validation"])
        == len(parts["all"])
        == DatasetReader("lrl/lakes-v0").lengths.sum()
    )


def test_the_split_follows_from_its_seed_alone(model, datasets):
    first, again, other = (turns_of(model, split="train", seed=seed).episodes.tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_a_larger_number_of_episodes_adds_to_the_same_episodes(model, datasets):
    few, more = (turns_of(model, split="train", num_episodes=count).episodes.tolist() for count in (2, 5))
    assert more[:2] == few and len(more) == 5
    whole = turns_of(model, split="train")
    for rows in (1, 7, len(whole)):
        taken = turns_of(model, split="train", num_rows=rows)
        assert len(taken) == rows and list(taken) == whole[:rows]


def test_only_episodes_with_a_return_are_used_on_request(model, datasets):
    stored = minari.load_dataset("lrl/pendulum-v0")
    returns = np.array([episode.rewards.sum() for episode in stored])
    median = float(np.median(returns))
    chosen = turns_of(model, "lrl/pendulum-v0", min_return=median).episodes
    assert set(chosen.tolist()) == set(np.flatnonzero(returns >= median).tolist())
    plain = turns_of(model, "lrl/pendulum-v0").episodes.tolist()
    assert [index for index in plain if index in chosen] == chosen.tolist(), "in the order of the split"
    for split in ("train", "validation"):
        part = turns_of(model, "lrl/pendulum-v0", split=split, validation_share=0.5, min_return=median).episodes
        whole = turns_of(model, "lrl/pendulum-v0", split=split, validation_share=0.5).episodes
        assert set(part.tolist()) == set(whole.tolist()) & set(chosen.tolist()), "the split does not depend on it"
    assert (
        turns_of(model, "lrl/pendulum-v0", min_return=median, num_episodes=2).episodes.tolist() == chosen[:2].tolist()
    )


def test_returns_are_those_of_the_rewards_where_the_metadata_has_none(datasets):
    shutil.copytree(datasets / "lrl" / "pendulum-v0", datasets / "lrl" / "bare-v0")
    with h5py.File(datasets / "lrl" / "bare-v0" / "data" / "main_data.hdf5", "a") as file:
        del file["episode_4"].attrs["rewards_sum"]
    returns = [episode.rewards.sum() for episode in minari.load_dataset("lrl/pendulum-v0")]
    assert len(set(returns)) == 10
    for dataset_id in ("lrl/pendulum-v0", "lrl/bare-v0"):
        np.testing.assert_allclose(DatasetReader(dataset_id).returns, returns)


@pytest.mark.parametrize("dataset_id", ["lrl/cartpole-v0", "lrl/pendulum-v0"])
def test_a_policy_that_acts_natively_is_shown_what_was_recorded_and_no_text(datasets, monkeypatch, dataset_id):
    env = ENVS[dataset_id]
    monkeypatch.setattr(type(env.codec), "observation_to_text", None)  # a call would raise
    source = MinariDemonstrations(dataset_id, split="all")
    turns, stored = source.load(env.codec, MLPPolicy()), minari.load_dataset(dataset_id)
    assert len(turns) == stored.total_steps
    rows = [(step, stored[index]) for index in turns.episodes.tolist() for step in range(len(stored[index].actions))]
    for turn, (step, episode) in zip(turns, rows, strict=True):
        np.testing.assert_array_equal(turn.native.observation, episode.observations[step])
        np.testing.assert_array_equal(turn.native.action, episode.actions[step])
        assert turn.observation == turn.response == ""


def test_a_policy_that_acts_natively_is_shown_advised_actions_as_well(model, datasets):
    env = ENVS["lrl/cartpole-v0"]
    expert = load_baseline("expert", env).policy
    collect(expert, env, "lrl/advised-cartpole-v0", 6, 0, name="expert", commit="abc", random_share=0.4)
    sources = [MinariDemonstrations("lrl/advised-cartpole-v0", "all", advised=advised) for advised in (False, True)]
    plain, advised = (source.load(env.codec, MLPPolicy()) for source in sources)
    assert len(plain) < len(advised) == DatasetReader("lrl/advised-cartpole-v0").lengths.sum()
    for turn in advised:
        x, v, angle, w = turn.native.observation
        assert turn.native.action == int(angle + 0.3 * w + 0.05 * x + 0.1 * v > 0)


def test_held_out_episodes_that_are_trained_on_are_an_error(model, datasets, monkeypatch):
    held_out = MinariDemonstrations("lrl/lakes-v0", split="validation", validation_share=0.3, seed=1)
    data = data_of(model, monkeypatch, split="train", validation_share=0.3, held_out=held_out)
    with pytest.raises(ValueError, match=r"have \d episodes of 'lrl/lakes-v0' in common with data.demonstrations"):
        data.load_all()
    for source in (
        MinariDemonstrations("lrl/lakes-v0", split="validation", validation_share=0.3),
        MinariDemonstrations("lrl/cartpole-v0", split="all"),
    ):
        source.check_held_out(data.demonstrations)


def test_every_pass_visits_every_row_once_in_another_order(model, datasets, monkeypatch):
    turns = turns_of(model)
    first, second = turns.shuffled_indices(0, 0), turns.shuffled_indices(0, 1)
    assert sorted(first) == sorted(second) == list(range(len(turns))) and first.tolist() != second.tolist()
    assert turns.shuffled_indices(0, 0).tolist() == first.tolist() != turns.shuffled_indices(1, 0).tolist()
    monkeypatch.setattr(module, "_BLOCK", 20)
    assert sorted(turns.shuffled_indices(0, 0)) == list(range(len(turns)))


def test_a_pass_reads_each_episode_once_and_keeps_few(model, datasets, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 20)
    data = data_of(model, monkeypatch, "lrl/cartpole-v0", batch_size=4)
    turns, read = data.load(data.demonstrations), []
    episode = DatasetReader.episode
    monkeypatch.setattr(DatasetReader, "episode", lambda self, index: read.append(index) or episode(self, index))
    turns._cache.clear()
    for place in turns.shuffled_indices(0, 0).tolist():
        turns[place]
        assert turns._cache.bytes <= 40
    assert sorted(read) == list(range(10))


def test_equal_seeds_give_equal_batches_to_a_run_that_is_resumed(model, datasets, monkeypatch):
    whole, resumed = (data_of(model, monkeypatch, prompt={"history": 1}, batch_size=4) for _ in range(2))
    for index in (5, 3):
        for name, tensor in whole.batch(1, index).inputs.items():
            assert torch.equal(tensor, resumed.batch(1, index).inputs[name])


def test_random_actions_are_in_the_history_and_not_demonstrated(model, datasets):
    env = ENVS["lrl/lakes-v0"]
    expert = load_baseline("expert", env).policy
    collect(expert, env, "lrl/noisy-v0", 12, 0, name="expert", commit="abc", random_share=0.4)
    policy = connected(model, history=3)
    turns = MinariDemonstrations("lrl/noisy-v0", split="all").load(env.codec, policy)
    reader, best = DatasetReader("lrl/noisy-v0"), expert.expert
    assert len(turns) == reader.num_demonstrated().sum() < reader.lengths.sum()
    extract = get_response_format(policy.response_format).extract
    assert all(extract(turn.response) == env.codec.action_to_text(best(turn.observation)) for turn in turns)
    past = [was for turn in turns for was in turn.history]
    assert any(extract(was.response) != env.codec.action_to_text(best(was.observation)) for was in past)


def test_random_actions_are_not_written_as_json_lines(model, datasets, tmp_path):
    env = ENVS["lrl/lakes-v0"]
    expert = load_baseline("expert", env).policy
    collect(expert, env, "lrl/strayed-v0", 12, 0, name="expert", commit="abc", random_share=0.4)
    reader, policy = DatasetReader("lrl/strayed-v0"), connected(model)
    lines = write_jsonl("lrl/strayed-v0", env, tmp_path / "lines.jsonl")
    assert lines == reader.num_demonstrated().sum() < reader.lengths.sum()
    extract = get_response_format(policy.response_format).extract
    source = JsonlDemonstrations(str(tmp_path / "lines.jsonl"))
    source.validate(env)
    for turn in source.load(env.codec, policy):
        assert extract(turn.response) == env.codec.action_to_text(expert.expert(turn.observation))


def test_advised_actions_are_demonstrated_where_random_ones_were_taken(model, datasets):
    env = ENVS["lrl/lakes-v0"]
    expert = load_baseline("expert", env).policy
    collect(expert, env, "lrl/advised-v0", 12, 0, name="expert", commit="abc", random_share=0.4)
    policy = connected(model, history=3)
    reader, best = DatasetReader("lrl/advised-v0"), expert.expert
    turns = MinariDemonstrations("lrl/advised-v0", split="all", advised=True).load(env.codec, policy)
    assert (
        len(turns)
        == reader.num_demonstrated(advised=True).sum()
        == reader.lengths.sum()
        > reader.num_demonstrated().sum()
    )
    extract = get_response_format(policy.response_format).extract
    assert all(extract(turn.response) == env.codec.action_to_text(best(turn.observation)) for turn in turns)
    past = [was for turn in turns for was in turn.history]
    assert any(extract(was.response) != env.codec.action_to_text(best(was.observation)) for was in past)
    with pytest.raises(ValueError, match=r"advised is true, but 'lrl/lakes-v0' contains no advised actions"):
        MinariDemonstrations("lrl/lakes-v0", advised=True).load(env.codec, policy)


def test_reasoning_is_sampled_per_response_and_quotes_the_observation(model, datasets):
    turns = list(turns_of(model))
    said = [turn.response.partition("</think>")[0].removeprefix("<think>") for turn in turns]
    assert all(text in ("so", f"I see {turn.observation.splitlines()[0]}, I choose") for text, turn in zip(said, turns))
    assert 0.2 < np.mean([text == "so" for text in said]) < 0.8
    assert [turn.response for turn in turns_of(model)] == [turn.response for turn in turns]
    assert [turn.response for turn in turns_of(model, num_rows=9)] == [turn.response for turn in turns[:9]]
    assert all(t.response.startswith("<think></think>") for t in turns_of(model, reasoning=("",)))


def test_held_out_rows_are_all_used_once(model, datasets, monkeypatch):
    held_out = MinariDemonstrations("lrl/lakes-v0", split="validation", validation_share=0.5)
    data = data_of(model, monkeypatch, split="train", validation_share=0.5, held_out=held_out)
    parts = [part for rank in (0, 1) for part in data.validation_batches(rank, 2)]
    assert sum(map(len, parts)) == len(data.load(held_out))


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("dataset_id", ENVS)
def test_json_lines_come_back_as_the_environment_writes_them(model, datasets, tmp_path, dataset_id, digits):
    path, env = tmp_path / "new" / "demos.jsonl", ENVS[dataset_id]
    if digits and env.codec.action_texts is None:
        with pytest.raises(ValueError, match="digits is true, but the actions of the environment are numbers"):
            write_jsonl(dataset_id, env, path, digits)
        return
    assert write_jsonl(dataset_id, env, path, digits) == DatasetReader(dataset_id).lengths.sum()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert list(record) == ["observation", "action"]
        assert all(text.startswith(f"<{tag}>") and text.endswith(f"</{tag}>") for tag, text in record.items())
        assert not digits or re.fullmatch("<action>[0-9]+</action>", record["action"])
    policy, source = connected(model, dataset_id), JsonlDemonstrations(str(path))
    source.validate(env)
    back = source.load(env.codec, policy)
    ours = list(turns_of(model, dataset_id, reasoning=("",)))
    assert {(t.observation, t.response) for t in back} == {(t.observation, t.response) for t in ours}


def test_a_data_set_of_others_is_read_without_context(model, datasets):
    buffer = minari.data_collector.EpisodeBuffer(
        observations=np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        actions=np.array([0, 1]),
        rewards=[1.0, 1.0],
        terminations=[False, True],
        truncations=[False, False],
        infos={},
    )
    env = ENVS["lrl/cartpole-v0"].make_native()
    with pytest.warns(UserWarning, match="is set to None"):
        minari.create_dataset_from_buffers("others/cartpole/human-v3", [buffer, buffer], env)
    policy = connected(model, "lrl/cartpole-v0")
    source = MinariDemonstrations("others/cartpole/human-v3", "all")
    source.validate(ENVS["lrl/cartpole-v0"])
    turns = source.load(policy.codec, policy)
    assert len(turns) == 4 and turns[0].observation == policy.codec.observation_to_text(buffer.observations[0])


@pytest.mark.parametrize("dataset_id", ["lrl/none-v0", "lrl/deeper/none-v1"])
def test_a_missing_data_set_raises_one_sentence(model, datasets, dataset_id):
    source = MinariDemonstrations(dataset_id)
    source.prepare_data()
    with pytest.raises(ValueError, match=f"^dataset_id is '{dataset_id}', which is not in {datasets} and could"):
        source.validate(ENVS["lrl/lakes-v0"])


def test_a_data_set_that_is_not_local_is_downloaded(datasets, monkeypatch, capfd):
    def download(dataset_id):
        print("Downloading", dataset_id)
        shutil.copytree(datasets / "lrl" / "lakes-v0", datasets / "far" / "lakes-v0")

    monkeypatch.setattr(minari, "download_dataset", download)
    source = MinariDemonstrations("far/lakes-v0")
    source.prepare_data()
    source.validate(ENVS["lrl/lakes-v0"])
    monkeypatch.setattr(minari, "download_dataset", offline)
    source.prepare_data()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "source_of", [MinariDemonstrations, TransitionsDataModule, lambda name: MinariRows(name, ENVS["lrl/lakes-v0"])]
)
def test_every_source_downloads_the_data_set_that_it_names(datasets, monkeypatch, source_of):
    downloaded = []
    monkeypatch.setattr(minari, "download_dataset", downloaded.append)
    source_of("far/lakes-v1").prepare_data()
    assert downloaded == ["far/lakes-v1"]


def cut_metadata(folder):
    path = folder / "metadata.json"
    path.write_text(path.read_text()[:200])


def cut_data(folder):
    path = folder / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_data(folder):
    (folder / "main_data.hdf5").unlink()


def lose_an_episode(folder):
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        del file["episode_4"]


def lose_actions(folder):
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        for name in file:
            del file[name]["actions"]


def lose_some_rewards(folder):
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        for name in file:
            kept = file[name]["rewards"][:-1]
            del file[name]["rewards"]
            file[name]["rewards"] = kept


def from_the_future(folder):
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"minari_version": "99.0.0"}))


@pytest.mark.parametrize(
    "damage", [cut_metadata, cut_data, remove_data, lose_an_episode, lose_actions, lose_some_rewards, from_the_future]
)
def test_a_damaged_data_set_raises_one_sentence(model, copied, damage):
    damage(copied)
    with pytest.raises(
        ValueError, match=r"^dataset_id is 'lrl/lakes-v0', which cannot be read \(.*\); delete .*lakes-v0 "
    ):
        turns_of(model)


def test_an_empty_data_set_raises_one_sentence(model, copied):
    path = copied / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 0}))
    with pytest.raises(ValueError, match="dataset_id is 'lrl/lakes-v0', which contains no steps"):
        turns_of(model)


def test_episodes_without_their_context_raise_one_sentence(model, copied):
    with h5py.File(copied / "main_data.hdf5", "a") as file:
        for name in file:
            del file[name].attrs["context"]
    with pytest.raises(
        ValueError, match=r"whose episode \d cannot be written as text by FrozenLakeCodec: .* needs the map"
    ):
        turns_of(model)


@pytest.mark.parametrize(
    ("dataset_id", "env", "complaint"),
    [
        ("lrl/cartpole-v0", "lrl/lakes-v0", r"whose observation space is Box.*; it must be Discrete\(16"),
        ("lrl/lakes-v0", "lrl/goto-v0", "whose observation space is Discrete"),
        ("lrl/goto-v0", "lrl/pendulum-v0", "whose observation space is Dict"),
    ],
)
def test_spaces_of_another_environment_raise_one_sentence(datasets, dataset_id, env, complaint):
    with pytest.raises(ValueError, match=complaint):
        MinariDemonstrations(dataset_id).validate(ENVS[env])


def test_another_size_or_other_actions_are_another_environment(datasets):
    with pytest.raises(ValueError, match="observation space"):
        MinariDemonstrations("lrl/lakes-v0").validate(GymnasiumEnvs(LAKES, {"size": 5}))
    with pytest.raises(ValueError, match="observation space"):
        MinariDemonstrations("lrl/cartpole-v0").validate(GymnasiumEnvs("Acrobot-v1"))
    MinariDemonstrations("lrl/goto-v0").validate(GymnasiumEnvs("lrl/BabyAI-PickupLocal-v0"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_episodes": 99}, "demonstrations.num_episodes is 99, but the all split of 'lrl/lakes-v0' has 10"),
        ({"num_rows": 10_000}, "demonstrations.num_rows is 10000, but the all split of 'lrl/lakes-v0' has"),
        ({"split": "validation", "validation_share": 0}, "the validation split of 'lrl/lakes-v0' has 0"),
        ({"split": "test"}, "demonstrations.split is 'test'"),
        ({"validation_share": 1.0}, "demonstrations.validation_share is 1.0"),
        ({"num_rows": 0}, "demonstrations.num_rows is 0"),
        ({"min_return": 7}, "min_return is 7, but the returns in the all split of 'lrl/lakes-v0' are 0 to 0; it must"),
        ({"min_return": -1, "num_rows": 999}, r"'lrl/lakes-v0' has \d+ with a return of -1 or more; it must be at"),
        ({"num_rows": 1, "num_episodes": 1}, "num_episodes and demonstrations.num_rows are both set"),
        ({"reasoning": ()}, "demonstrations.reasoning is"),
    ],
)
def test_settings_out_of_range_raise_their_name(model, datasets, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        turns_of(model, **settings)


def test_errors_come_before_a_model_is_loaded(model, datasets, tmp_path):
    import lrl
    from lrl.algorithms.sft import SFTModule

    policy = TextPolicy(LanguageModelConfig(name="not/there"), PromptTemplate(), SamplingConfig())
    sft, env = SFTModule(policy), ENVS["lrl/lakes-v0"]
    for train, held_out in (
        (MinariDemonstrations("lrl/none-v0"), None),
        (ExpertDemonstrations(ExpertQRows()), MinariDemonstrations("lrl/none-v0")),
    ):
        data = DemonstrationsDataModule(train, env, validation_demonstrations=held_out)
        with pytest.raises(ValueError, match="dataset_id is 'lrl/none-v0', which is not in"):
            lrl.train(sft, data, max_epochs=1, accelerator="cpu")


def test_a_download_without_network_does_not_wait(datasets, monkeypatch, capfd, caplog):
    monkeypatch.setattr(minari_reader, "_check_hub", CHECK_HUB)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    minari_reader.download("lrl/none-v0")
    assert time.perf_counter() - started < 10
    assert capfd.readouterr() == ("", "") and not [r for r in caplog.records if r.name != "lrl.trace"]


def test_the_path_is_where_minari_looks(datasets, monkeypatch):
    assert dataset_path("lrl/lakes-v0") == datasets / "lrl" / "lakes-v0" / "data"
    monkeypatch.delenv("MINARI_DATASETS_PATH")
    monkeypatch.setenv("HOME", str(datasets / "home"))
    assert dataset_path("lrl/lakes-v0") == datasets / "home" / ".minari" / "datasets" / "lrl" / "lakes-v0" / "data"


def test_ranges_are_what_the_data_set_spans(datasets, monkeypatch):
    found = observation_ranges("lrl/cartpole-v0")
    reader = DatasetReader("lrl/cartpole-v0")
    seen = np.concatenate([np.array(reader.episode(index).observations) for index in range(10)])
    np.testing.assert_array_equal(np.array(found).T, [seen.min(0), seen.max(0)])
    envs = GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers", ranges=found))
    texts = [envs.codec.observation_to_text(row) for row in seen]
    written = np.array([[int(number) for number in text[13:-14].split(",")] for text in texts])
    assert (written.min(0) == 0).all() and (written.max(0) == 999).all()
    with pytest.raises(ValueError, match="lrl/lakes-v0', whose observation space is .*; the space must be a Box"):
        observation_ranges("lrl/lakes-v0")


def test_statistics_are_those_of_the_data_set(datasets):
    found = np.array(observation_statistics("lrl/cartpole-v0"))
    reader = DatasetReader("lrl/cartpole-v0")
    seen = np.concatenate([np.array(reader.episode(index).observations, dtype=np.float64) for index in range(10)])
    np.testing.assert_allclose(found.T, [seen.mean(0), seen.std(0)], rtol=1e-9)
    numbers = NumberFormat(kind="normalised", statistics=found.tolist(), precision=6)
    codec = GymnasiumEnvs("CartPole-v1", numbers=numbers).codec
    written = np.array([text[13:-14].split(",") for text in map(codec.observation_to_text, seen)], dtype=np.float64)
    np.testing.assert_allclose([written.mean(0), written.std(0)], [np.zeros(4), np.ones(4)], atol=1e-5)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1 / 3, 123.456])
def test_a_number_that_never_changes_is_not_stretched(datasets, constant):
    """Its mean over episodes is rounded, which leaves a standard deviation of 1e-17."""
    box, name = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64), f"lrl/still-{abs(int(1000 * constant))}-v0"
    episode = {"seed": 0, "context": None, "success": False, "random_steps": []}
    with DatasetWriter(name, box, gym.spaces.Discrete(2), None) as writer:
        for steps in (7, 3, 5):
            seen = [np.array([constant, float(step)]) for step in range(steps + 1)]
            flags = {"terminations": [False] * steps, "truncations": [False] * steps, "rewards": [0.0] * steps}
            writer.add([episode | {"observations": seen, "actions": [0] * steps} | flags])
        writer.finish({})
    (mean, deviation), (_, other) = observation_statistics(name)
    assert mean == pytest.approx(constant) and deviation == 1 and 1 < other < 2


def test_ranges_of_a_dict_have_keys(datasets):
    box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    space = gym.spaces.Dict({"position": box, "count": gym.spaces.Discrete(9), "speed": gym.spaces.Tuple((box,))})
    steps = [np.array([-3.0, 1.0]), np.array([2.0, 1.0])]
    seen = [{"position": step, "count": 4, "speed": (10 * step,)} for step in steps]
    episode = {"seed": 0, "context": None, "success": False, "observations": [*seen, seen[0]], "actions": [0, 1]}
    episode |= {"rewards": [0.0, 0.0], "terminations": [False, True], "truncations": [False, False]}
    with DatasetWriter("lrl/joint-v0", space, gym.spaces.Discrete(2), None) as writer:
        writer.add([episode | {"random_steps": []}])
        writer.finish({})
    statistics = observation_statistics("lrl/joint-v0")
    assert statistics == {"position": [(-0.5, 2.5), (1.0, 1.0)], "speed.0": [(-5.0, 25.0), (10.0, 1.0)]}
    ranges = observation_ranges("lrl/joint-v0")
    assert ranges == {"position": [(-3.0, 2.0), (0.5, 1.5)], "speed.0": [(-30.0, 20.0), (9.5, 10.5)]}
    codec = SpaceCodec(space, gym.spaces.Discrete(2), NumberFormat(kind="integers", ranges=ranges))
    assert codec.observation_to_text(seen[1]) == "count: 4\nposition: 999,500\nspeed.0: 999,500"


class Upside(Augmentation):
    """Augmentation that is wrong for FrozenLake: it reverses the actions."""

    def augment(self, observations, actions, rng):
        return list(observations), [3 - int(action) for action in actions]


def test_copies_of_an_episode_are_changed_by_the_augmentation_and_the_first_is_not(model):
    prompt = {"response_format": "direct", "history": 1}
    plain = turns_of(model, prompt=prompt)
    copied = turns_of(model, prompt=prompt, copies=3, augmentation=Upside())
    assert len(copied) == 3 * len(plain)
    texts = [ENVS["lrl/lakes-v0"].codec.action_to_text(action) for action in range(4)]
    for place, turn in enumerate(plain):
        first, *others = (copied[place + copy * len(plain)] for copy in range(3))
        assert first == turn
        for other in others:
            assert other.observation == turn.observation
            assert texts.index(other.response) == 3 - texts.index(turn.response)
            assert [past.observation for past in other.history] == [past.observation for past in turn.history]
    assert sorted(copied.shuffled_indices(0, 0).tolist()) == list(range(len(copied)))


@pytest.mark.parametrize(("copies", "augmentation", "given"), [(2, None, "null"), (1, Upside(), "Upside")])
def test_several_copies_need_an_augmentation(copies, augmentation, given):
    with pytest.raises(ValueError, match=f"copies is {copies} and demonstrations.augmentation {given}"):
        MinariDemonstrations("lrl/lakes-v0", copies=copies, augmentation=augmentation)
