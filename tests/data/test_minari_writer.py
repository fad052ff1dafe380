"""Collecting: real Minari data sets of native observations and actions, the same for any number of environments."""

import dataclasses
import errno
import json
import os
import resource
import signal
import warnings
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
import yaml
from commands import run_words

from lrl.cli import collect as collect_script
from lrl.codecs.numbers import NumberFormat
from lrl.data import minari_writer as writer_module
from lrl.data.jsonl import write_jsonl
from lrl.data.minari_writer import collect, observation_ranges, observation_statistics
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter
from lrl.envs.text import TextEnv
from lrl.evaluation.load import load_baseline
from lrl.policies.baselines import FixedActor, NoisyActor
from lrl.types import PastTurn, RandomKeys

LAKES = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0")


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def gather(env=LAKES, policy="expert", dataset_id="lrl/test-v0", episodes=5, seed=3, num_envs=1, **changes):
    chosen = load_baseline(policy, env).policy if isinstance(policy, str) else policy
    return collect(chosen, env, dataset_id, episodes, seed, num_envs, name="expert", commit="abc", **changes)


class Stubborn(FixedActor):
    """Actor with a given number of invalid responses at the beginning of each episode."""

    def __init__(self, nonsense):
        super().__init__("direct")
        self.nonsense = nonsense

    def choose(self, observations, keys):
        return ["nonsense" if turn < self.nonsense else "RIGHT" for turn in keys.turn.tolist()]

    @property
    def probability(self):
        return 1.0


class Remembering(FixedActor):
    """Actor that always responds the same and keeps it in its memory."""

    def __init__(self):
        super().__init__("direct")
        self.connect(LAKES.codec)

    def choose(self, observations, keys):
        return ["stay"] * len(observations)

    def act(self, observations, memory, keys, sampling):
        turns = [(PastTurn(text, "stay"),) for text in observations]
        return dataclasses.replace(super().act(observations, memory, keys, sampling), memory=turns)

    @property
    def probability(self):
        return 1.0


def test_native_observations_and_actions_are_stored():
    gather(policy="random")
    dataset = minari.load_dataset("lrl/test-v0")
    env = gym.make("lrl/FrozenLakeRandomMaps-v0")
    assert len(dataset) == 5 and repr(dataset[0])
    for episode, about in zip(dataset, dataset.storage.get_episode_metadata(range(5)), strict=True):
        assert about["seed"] == 3 + episode.id and about["total_steps"] == len(episode.actions)
        assert about["rewards_sum"] == episode.rewards.sum()
        first, _ = env.reset(seed=about["seed"])
        seen, ends = [first], []
        for action in episode.actions:
            after, reward, terminated, truncated, _ = env.step(int(action))
            seen.append(after)
            ends.append((reward, terminated, truncated))
        assert episode.observations.tolist() == seen
        assert list(zip(episode.rewards, episode.terminations, episode.truncations)) == ends
        assert any(ends[-1][1:]) and about["success"] == (ends[-1][0] > 0)


@pytest.mark.slow
def test_random_actions_are_put_in_and_marked():
    gather(episodes=30, random_share=0.3)
    reader, codec = DatasetReader("lrl/test-v0"), LAKES.codec
    expert, chosen, put_in = load_baseline("expert", LAKES).policy, [], []
    for index in range(30):
        episode, own = reader.episode(index), set(reader.demonstrated_steps(index).tolist())
        for step, (seen, action) in enumerate(zip(episode.observations, episode.actions, strict=True)):
            best = codec.action_to_text(expert.expert(codec.observation_to_text(seen, episode.context)))
            (chosen if step in own else put_in).append(codec.action_to_text(action) == best)
    assert all(chosen), "what is demonstrated is the expert's choice"
    assert reader.num_demonstrated().sum() == len(chosen) and reader.lengths.sum() == len(chosen) + len(put_in)
    assert 0.2 < len(put_in) / reader.lengths.sum() < 0.4
    assert 0.1 < np.mean(put_in) < 0.4, "a random action of four is at times the best"


def test_a_random_action_stands_in_the_history_that_a_language_model_reads():
    policy = NoisyActor(Remembering(), 0.5)
    keys = RandomKeys(seed=0, purpose="x", collection=0, env=np.arange(64), turn=np.zeros(64, dtype=np.int64))
    decisions = policy.act(["here"] * 64, [()] * 64, keys, policy.sampling)
    assert [memory[-1].response for memory in decisions.memory] == list(decisions.actions)
    assert 16 < len(decisions.replaced) < 48
    assert {a for row, a in enumerate(decisions.actions) if row not in decisions.replaced} == {"stay"}


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_an_invalid_share_raises_one_sentence(share):
    with pytest.raises(ValueError, match="random_share is"):
        gather(random_share=share)


def test_the_codecs_context_is_kept_with_every_episode():
    gather()
    reader, env = DatasetReader("lrl/test-v0"), LAKES.make_native()
    contexts = []
    for index in range(5):
        env.reset(seed=3 + index)
        contexts.append(LAKES.codec.context(env))
    assert [reader.episode(index).context for index in range(5)] == contexts and len(set(contexts)) == 5


@pytest.mark.parametrize(("vectorization", "num_envs"), [("sync", 3), pytest.param("async", 2, marks=pytest.mark.slow)])
def test_the_data_set_does_not_depend_on_how_many_environments_play(vectorization, num_envs):
    gather(episodes=7)
    envs = GymnasiumEnvs(LAKES.id, vectorization=vectorization)
    gather(envs, dataset_id="lrl/side-by-side-v0", episodes=7, num_envs=num_envs)
    one, several = minari.load_dataset("lrl/test-v0"), minari.load_dataset("lrl/side-by-side-v0")
    for ours, theirs in zip(one, several, strict=True):
        assert np.array_equal(ours.observations, theirs.observations) and np.array_equal(ours.actions, theirs.actions)
    metadata = [list(each.storage.get_episode_metadata(range(7))) for each in (one, several)]
    assert metadata[0] == metadata[1]


def test_the_metadata_have_the_policy_and_its_return():
    collected = gather(GymnasiumEnvs("FrozenLake-v1", {"is_slippery": False}))
    metadata = minari.load_dataset("lrl/test-v0").storage.metadata
    assert metadata["algorithm_name"] == "expert" and metadata["total_steps"] == collected.steps == 30
    ours = metadata["lrl"]
    assert (ours["policy"], ours["commit"], ours["seed"], ours["return_mean"]) == ("expert", "abc", 3, 1.0)
    assert ours["env_kwargs"] == {"is_slippery": False} and ours["played_success_rate"] == 1.0
    assert minari.load_dataset("lrl/test-v0").recover_environment().spec.kwargs["is_slippery"] is False


def test_only_successful_episodes_are_kept_on_request():
    lake = GymnasiumEnvs("FrozenLake-v1")
    collected = gather(lake, episodes=12, num_envs=4, successful_only=True)
    wins = int(collected.results.successes.sum())
    assert 0 < wins < 12 and collected.episodes == wins
    dataset = minari.load_dataset("lrl/test-v0")
    assert len(dataset) == wins and all(episode.rewards[-1] == 1 for episode in dataset)
    seeds = [about["seed"] for about in dataset.storage.get_episode_metadata(range(wins))]
    assert seeds == (3 + np.flatnonzero(collected.results.successes)).tolist()


def test_invalid_responses_are_not_kept():
    lake = GymnasiumEnvs("FrozenLake-v1", {"is_slippery": False}, max_episode_steps=3)
    policy = Stubborn(nonsense=2)
    policy.connect(lake.codec)
    collected = gather(lake, policy, episodes=2, num_envs=2)
    assert collected.results.lengths.tolist() == [5, 5] and collected.steps == 6
    episode = minari.load_dataset("lrl/test-v0")[0]
    assert episode.observations.tolist() == [0, 1, 2, 3] and episode.truncations.tolist() == [False, False, True]


def test_invalid_responses_at_the_end_of_an_episode_are_removed():
    lake = GymnasiumEnvs("FrozenLake-v1", {"is_slippery": False}, max_invalid=2)
    policy = Stubborn(0)
    policy.choose = lambda seen, keys: ["RIGHT" if turn < 2 else "nonsense" for turn in keys.turn.tolist()]
    policy.connect(lake.codec)
    gather(lake, policy, episodes=1)
    episode = minari.load_dataset("lrl/test-v0")[0]
    assert episode.actions.tolist() == [2, 2] and episode.truncations.tolist() == [False, True]
    assert not episode.terminations.any()


def test_nothing_to_keep_raises_one_sentence_and_leaves_nothing_behind(datasets):
    policy = Stubborn(nonsense=99)
    policy.connect(LAKES.codec)
    with pytest.raises(ValueError, match=r"episodes is 2, but none can be written: 0 were successful .* and 0 had"):
        gather(policy=policy, episodes=2)
    assert list(datasets.rglob("*")) == []


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def failing_from(function, call):
    """Return the function, which finds the disk full from its given call on, and then writes nothing."""
    calls = count(1)

    def wrapped(*arguments, **keywords):
        return full_disk() if next(calls) >= call else function(*arguments, **keywords)

    return wrapped


def rows_of(dataset_id):
    return [(e.observations.tolist(), e.actions.tolist()) for e in minari.load_dataset(dataset_id)]


def test_an_interrupted_collection_keeps_the_episodes_that_have_ended(datasets, caplog, monkeypatch):
    """This includes episodes that ended out of order, but not unfinished ones."""
    monkeypatch.setattr(writer_module, "_CHUNK", 2)
    gather(policy="random", episodes=7, dataset_id="lrl/whole-v0", num_envs=3)
    ended = count(1)

    def stop():
        if next(ended) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather(policy="random", episodes=7, num_envs=3, on_episode=stop)
    assert "5 episodes already collected can be read as the data set 'lrl/test-unfinished-v0', in " in caplog.text
    assert not (datasets / "lrl" / "test-v0").exists() and not list(datasets.glob(".unfinished-*"))
    whole, kept = rows_of("lrl/whole-v0"), rows_of("lrl/test-unfinished-v0")
    assert len(kept) == 5 and all(episode in whole for episode in kept)


@pytest.mark.parametrize("call", [2, 3])
def test_a_disk_that_fills_up_while_playing_loses_no_episode_that_was_written(datasets, monkeypatch, call):
    monkeypatch.setattr(writer_module, "_CHUNK", 2)
    gather(policy="random", episodes=6, dataset_id="lrl/whole-v0")
    with monkeypatch.context() as patch:
        create = h5py.Group.create_dataset
        episodes = 2 * (call - 1)
        patch.setattr(h5py.Group, "create_dataset", failing_from(create, 1 + episodes * 5))  # 5 columns, no infos
        with pytest.raises(
            ValueError, match="^dataset_id is 'lrl/test-v0', which cannot be written to .*: No space left on device;"
        ) as raised:
            gather(policy="random", episodes=6)
    assert f"; {episodes} episodes already collected can be read as the data set 'lrl/test-unf" in str(raised.value)
    assert rows_of("lrl/test-unfinished-v0") == rows_of("lrl/whole-v0")[:episodes]
    assert minari.load_dataset("lrl/test-unfinished-v0").total_steps == sum(
        len(actions) for _, actions in rows_of("lrl/whole-v0")[:episodes]
    )
    assert not list(datasets.glob(".unfinished-*"))


def test_writes_that_fail_inside_hdf5_end_in_a_sentence(datasets):
    """HDF5 writes by itself; where that failed, it ended the process by a segmentation fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads of torch, which the child does not use
        child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, 25_000))  # bytes that a file may have
            try:
                gather(policy="random", episodes=6)
            except ValueError as error:
                status = 0 if "which cannot be written to" in str(error) and "can be read as" in str(error) else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_disk_that_is_full_at_the_end_leaves_readable_parts_and_says_where(datasets, monkeypatch):
    monkeypatch.setattr(writer_module, "_CHUNK", 2)
    gather(policy="random", episodes=5, dataset_id="lrl/whole-v0")
    monkeypatch.setattr(Path, "write_bytes", failing_from(Path.write_bytes, 1 + len(range(0, 5, 2))))
    with pytest.raises(
        ValueError, match=r"No space left on device \(\d+ bytes are needed\); 5 episodes already collected can be"
    ) as raised:
        gather(policy="random", episodes=5)
    (folder,) = datasets.glob(".unfinished-*")
    assert f"read as the data sets {folder}/part-*, with minari.MinariDataset(path)" in str(raised.value)
    parts = [minari.MinariDataset(path) for path in sorted(folder.iterdir())]
    rows = [(e.observations.tolist(), e.actions.tolist()) for part in parts for e in part]
    assert rows == rows_of("lrl/whole-v0")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_a_signal_ends_keeps_what_was_played(datasets, caplog, monkeypatch, number, status):
    @contextmanager
    def ended_after_three(*_):
        ended = count(1)
        yield lambda: os.kill(os.getpid(), number) if next(ended) == 3 else None

    former = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    monkeypatch.setattr("lrl.cli.quiet.progress_bar", ended_after_three)
    words = ["--policy", "random", "--env_id", "CartPole-v1", "--dataset_id", "lrl/test-v0", "--episodes", "50"]
    try:
        with pytest.raises(SystemExit, match=str(status)):
            collect_script.main("lrl collect", words)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert len(rows_of("lrl/test-unfinished-v0")) == 3 and "3 episodes already collected can be" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_second_unfinished_data_set_does_not_replace_the_first(datasets, monkeypatch, caplog):
    def stop():
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            gather(on_episode=stop)
    assert sorted(path.name for path in (datasets / "lrl").iterdir() if path.is_dir()) == [
        "test-unfinished-v0",
        "test-unfinished-v1",
    ]


class Still(gym.Env):
    """Environment that never changes and ends after one step."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def __init__(self, anything=None):
        self.anything = anything

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 1.0, True, False, {}


class OddSpace(gym.Space):
    """Space that Minari does not support."""

    def __init__(self):
        super().__init__((), np.int64)

    def sample(self, mask=None, probability=None):
        return 0

    def contains(self, x):
        return True


@pytest.mark.parametrize("kwargs", [{}, {"anything": np.arange(2)}, {"anything": Still}])
def test_an_environment_whose_registration_cannot_be_written_is_collected(datasets, caplog, kwargs):
    gym.register("Still-v0", Still)
    try:
        collected = gather(GymnasiumEnvs("Still-v0", kwargs), "random", episodes=3)
    finally:
        del gym.registry["Still-v0"]
    assert collected.episodes == 3 and len(rows_of("lrl/test-v0")) == 3
    assert "will not store the specification of Still-v0, which cannot be written as JSON" in caplog.text
    assert not list(datasets.glob(".unfinished-*"))
    json.dumps(minari.load_dataset("lrl/test-v0").storage.metadata["lrl"])


def test_a_space_that_minari_cannot_store_raises_one_sentence_and_leaves_nothing_behind(datasets):
    with pytest.raises(ValueError, match="observation space of 'lrl/test-v0' is .*OddSpace.*, which Minari cannot st"):
        DatasetWriter("lrl/test-v0", OddSpace(), gym.spaces.Discrete(2), None)
    assert not list(datasets.glob("*"))


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_former_json_lines_as_they_were(datasets, tmp_path, monkeypatch, failing):
    gather()
    path = tmp_path / "lines.jsonl"
    path.write_text("former\n", encoding="utf-8")
    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr("lrl.data.jsonl.json.dumps", failing_from(json.dumps, 5))
        else:
            patch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[failing], full_disk)
        with pytest.raises(OSError, match="the file '.*lines.jsonl' was not written \\(.*No space left on device"):
            write_jsonl("lrl/test-v0", LAKES, path)
    assert path.read_text(encoding="utf-8") == "former\n" and [*tmp_path.iterdir()] == [datasets, path]
    lines = write_jsonl("lrl/test-v0", LAKES, path)
    assert len(path.read_text(encoding="utf-8").splitlines()) == lines > 4


@pytest.mark.parametrize("name", ["noversion", "", "a b-v0", "../-v0"])
def test_a_name_that_minari_cannot_read_raises_one_sentence(name):
    with pytest.raises(ValueError, match="dataset_id is .*; it must be like"):
        gather(dataset_id=name)


def test_a_data_set_is_never_written_over():
    gather()
    with pytest.raises(ValueError, match="dataset_id is 'lrl/test-v0', which exists in .*; it must be a new name"):
        gather()


@pytest.mark.parametrize(
    ("id", "kwargs"), [("CartPole-v1", {}), ("Pendulum-v1", {}), ("lrl/BabyAI-GoToLocal-v0", {}), ("Blackjack-v1", {})]
)
def test_samples_of_any_space_are_read_unchanged(id, kwargs, monkeypatch):
    env, seen, acted = GymnasiumEnvs(id, kwargs, max_episode_steps=6), [], []
    step = TextEnv.step

    def spy(self, action):
        result = step(self, action)
        acted.append(result[4]["native"].action)
        seen.append((self.codec.observation_to_text(result[4]["native"].observation), result[0]))
        return result

    monkeypatch.setattr(TextEnv, "step", spy)
    gather(env, "random", episodes=2)
    reader = DatasetReader("lrl/test-v0")
    stored = [reader.episode(index) for index in range(2)]
    assert all(text == shown for text, shown in seen)
    actions = [action for episode in stored for action in episode.actions]
    assert len(actions) == len(acted)
    for ours, theirs in zip(actions, acted, strict=True):
        assert np.array_equal(ours, theirs) and np.asarray(ours).dtype == np.asarray(theirs).dtype
    texts = [env.codec.observation_to_text(one) for episode in stored for one in episode.observations[1:]]
    assert set(texts) <= {shown for _, shown in seen} and len(texts) == len(seen) - 2


def test_minari_prints_nothing(capfd, recwarn):
    gather()
    DatasetReader("lrl/test-v0").episode(0)
    assert capfd.readouterr() == ("", "") and not recwarn.list


def test_the_script_collects_and_exports(tmp_path):
    def run(*arguments):
        command = ["lrl", "collect", "--env_id", "FrozenLake-v1", "--dataset_id", "lrl/lake/bot-v0"]
        return run_words([*command, *arguments])

    lines = tmp_path / "lake.jsonl"
    done = run("--policy", "expert", "--episodes", "3", "--env_kwargs", '{"is_slippery": false}', "--jsonl", str(lines))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("lrl/lake/bot-v0: 3 episodes, 18 steps")
    record = json.loads(lines.read_text().splitlines()[0])
    assert record["observation"].startswith("<observation>row 0 column 0\nA F F F")
    assert record["action"] == "<action>DOWN</action>"
    again = run("--policy", "expert")
    assert again.returncode == 2 and again.stderr.startswith(
        "lrl collect: --dataset_id is 'lrl/lake/bot-v0', which exists"
    )
    assert len(again.stderr.splitlines()) == 1
    spans = run("--ranges")
    assert spans.returncode == 2 and "the space must be a Box" in spans.stderr


def test_the_script_measures_ranges_and_statistics_as_settings(datasets, capsys):
    words = ["--env_id", "CartPole-v1", "--dataset_id", "lrl/cart-v0"]
    collect_script.main("lrl collect", [*words, "--policy", "random", "--episodes", "3"])
    capsys.readouterr()
    collect_script.main("lrl collect", [*words, "--ranges", "--statistics"])
    integers, normalised = (yaml.safe_load(line)["numbers"] for line in capsys.readouterr().out.splitlines())
    np.testing.assert_allclose(NumberFormat(**integers).ranges, observation_ranges("lrl/cart-v0"), rtol=1e-5)
    np.testing.assert_allclose(NumberFormat(**normalised).statistics, observation_statistics("lrl/cart-v0"), rtol=1e-5)


def test_an_unfinished_data_set_is_removed(datasets):
    space = gym.spaces.Discrete(2)
    with DatasetWriter("lrl/test-v0", space, space, None):
        assert len(list(datasets.iterdir())) == 1
    assert list(datasets.iterdir()) == []
