"""Advice: what an expert would do in the states that another policy reaches, recorded beside what was done."""

import json
import pickle
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from commands import run_words
from network_runs import KEYS, network, save_run

from lrl.cli.collect import load_advisor, main
from lrl.codecs.numbers import NumberFormat
from lrl.data.jsonl import JsonlDemonstrations, write_jsonl
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.data.rows import MinariRows
from lrl.data.sources import ConcatDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter, dataset_path
from lrl.envs.text import AdvisedObservation, text_of
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_baseline
from lrl.lm.config import LanguageModelConfig
from lrl.policies.baselines import FixedActor
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.rollouts.examples import draw_examples
from lrl.types import SamplingConfig

LAKES = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", max_episode_steps=12)
GOTO = GymnasiumEnvs("lrl/BabyAI-GoToLocal-v0", max_episode_steps=9)
CHEETAH = GymnasiumEnvs("HalfCheetah-v5", numbers=NumberFormat(kind="integers"), max_episode_steps=9)
POLE = GymnasiumEnvs("CartPole-v1", max_episode_steps=9)
NAME = "lrl/advised-v0"


class Stubborn(FixedActor):
    """Actor with invalid responses in some turns."""

    probability = 1.0

    def __init__(self, invalid):
        super().__init__("direct")
        self.invalid = invalid

    def choose(self, observations, keys):
        return ["nonsense" if turn in self.invalid else "RIGHT" for turn in keys.turn.tolist()]


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def advised(env, policy="random", advisor="expert", num_envs=3, dataset_id=NAME, **changes):
    """A data set of five episodes, and its reader."""
    actors = [load_baseline(a, env).policy if isinstance(a, str) else a for a in (policy, advisor)]
    collect(actors[0], env, dataset_id, 5, 3, num_envs, name="it", commit="", advisor=actors[1], **changes)
    return DatasetReader(dataset_id)


def visited(env):
    """The native observation after four default actions of the first episode."""
    native = env.make_native()
    native.reset(seed=3)
    action = env.codec.text_to_action(env.codec.default_action_text)
    seen = [native.step(action)[0] for _ in range(4)][-1]
    native.close()
    return np.asarray([seen], dtype=np.float32)


def text_policy(env):
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="direct"), SamplingConfig())
    policy.connect(env.codec)
    return policy


def demonstrated(env, policy=None, **settings):
    source = MinariDemonstrations(NAME, split="all", advised=True, **settings)
    source.validate(env)
    return source.load(env.codec, text_policy(env) if policy is None else policy)


def test_the_advice_is_the_experts_action_in_each_state_and_the_record_the_policys():
    reader, codec, agreed = advised(LAKES), LAKES.codec, []
    expert, played = load_baseline("expert", LAKES).policy.expert, LAKES.make_native()
    for index in range(5):
        episode = reader.episode(index)
        seen, _ = played.reset(seed=3 + index)
        for step, action in enumerate(episode.actions):
            assert episode.observations[step] == seen, "what was taken is what was recorded"
            best = expert(codec.observation_to_text(seen, episode.context))
            assert episode.advised_actions[step] == best
            agreed.append(action == best)
            seen = played.step(action)[0]
        assert list(episode.advised_actions) == list(range(len(episode.actions)))
    assert not all(agreed) and any(agreed), "the policy is random"
    played.close()


def test_babyais_bot_advises_in_the_state_before_the_step():
    reader, native = advised(GOTO), GOTO.make_native()
    for index in range(5):
        episode = reader.episode(index)
        native.reset(seed=3 + index)
        for step, action in enumerate(episode.actions):
            assert native.unwrapped.expert_action() == episode.advised_actions[step]
            native.step(action)
    native.close()


@pytest.mark.parametrize("env", [CHEETAH, POLE])
def test_a_network_advises_from_native_observations_for_every_kind_of_policy(env):
    advisor = network(env, scale=1e2)
    with torch.no_grad():  # centred near a state on the way: its choice depends on the state, and is no tie in it
        advisor.actor[-1].bias.sub_(advisor(advisor.norm(torch.tensor(visited(env)) + 0.001)).flatten())
    reader = advised(env, "constant", advisor)
    for index in range(5):
        episode = reader.episode(index)
        assert len(set(map(str, episode.actions))) == 1
        for step, observation in enumerate(episode.observations):
            (choice,) = advisor.act([observation], [()], KEYS, SamplingConfig(temperature=0)).actions
            np.testing.assert_allclose(episode.advised_actions[step], choice, atol=1e-4)
    kinds = {str(action) for index in range(5) for action in reader.episode(index).advised_actions.values()}
    assert len(kinds) > 1, "the advice depends on the state"


def test_only_the_advice_is_demonstrated_in_text_and_natively():
    reader = advised(CHEETAH, "constant", network(CHEETAH, scale=1e2))
    texts = demonstrated(CHEETAH)
    assert len(texts) == reader.lengths.sum() == 45
    episodes = {int(number): reader.episode(int(number)) for number in texts.episodes}
    turns = [(episode, step) for episode in episodes.values() for step in range(9)]
    for demonstration, (episode, step) in zip(texts, turns, strict=True):
        assert demonstration.observation == CHEETAH.codec.observation_to_text(episode.observations[step])
        assert demonstration.response == CHEETAH.codec.action_to_text(episode.advised_actions[step])
        assert demonstration.response != CHEETAH.codec.action_to_text(episode.actions[step])
    mlp = MLPPolicy(hidden_sizes=[8])
    for demonstration, (episode, step) in zip(demonstrated(CHEETAH, mlp), turns, strict=True):
        np.testing.assert_array_equal(demonstration.native.action, episode.advised_actions[step])
        np.testing.assert_array_equal(demonstration.native.observation, episode.observations[step])


def test_past_turns_are_those_of_the_policy():
    reader = advised(LAKES, "constant")
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="direct", history=1), SamplingConfig())
    policy.connect(LAKES.codec)
    turns = demonstrated(LAKES, policy)
    episode, codec = reader.episode(int(turns.episodes[0])), LAKES.codec
    assert turns[1].history[0].response == codec.action_to_text(episode.actions[0])
    assert turns[1].response == codec.action_to_text(episode.advised_actions[1])


def test_results_do_not_depend_on_the_number_of_environments():
    one, other = advised(GOTO, num_envs=1), advised(GOTO, num_envs=4, dataset_id="lrl/advised-v1")
    for index in range(5):
        first, second = one.episode(index), other.episode(index)
        assert first.actions == second.actions and first.advised_actions == second.advised_actions


@pytest.mark.parametrize("invalid", [(0, 1), (2,), (1, 3)])
def test_a_turn_without_a_legal_action_is_no_step_and_shifts_no_advice(invalid):
    policy = Stubborn(invalid)
    policy.connect(LAKES.codec)
    reader = advised(LAKES, policy)
    expert = load_baseline("expert", LAKES).policy.expert
    for index in range(5):
        episode = reader.episode(index)
        assert len(episode.advised_actions) == len(episode.actions) > 0
        for step, seen in enumerate(episode.observations):
            assert episode.advised_actions[step] == expert(LAKES.codec.observation_to_text(seen, episode.context))


@pytest.mark.slow
def test_a_language_model_reads_a_shown_text_with_advice_as_the_text():
    policy = text_policy(GOTO)
    policy.configure()
    text = "Goal: go to a red ball\nYou see a red ball 1 step left"
    advised_text = AdvisedObservation(text, 2)
    assert policy.encode(advised_text, ()) == policy.encode(text, ())
    again = pickle.loads(pickle.dumps(advised_text))
    assert again == text and again.expert_action == 2 and type(text_of(again)) is str
    reader = advised(GOTO, policy, sampling=SamplingConfig(max_new_tokens=2), num_envs=2, random_share=0.5)
    assert len(demonstrated(GOTO, policy)) == reader.lengths.sum()


READERS = {
    "demonstrations": lambda: MinariDemonstrations(NAME, split="all").load(LAKES.codec, text_policy(LAKES)),
    "rows": lambda: MinariRows(NAME, LAKES).rows(),
    "jsonl": lambda: write_jsonl(NAME, LAKES, "never_written.jsonl"),
    "examples": lambda: draw_examples(LAKES, 1, "direct", NAME),
}


@pytest.mark.parametrize("reader", READERS)
def test_actions_that_an_advisor_would_not_take_are_never_imitated(reader):
    advised(LAKES)
    with pytest.raises(ValueError, match="collected with an advisor"):
        READERS[reader]()


def test_an_advisor_that_reads_what_is_not_shown_raises():
    with pytest.raises(ValueError, match="advisor is expert, but policy acts natively"):
        advised(POLE, network(POLE))


def test_an_advisor_that_responds_in_text_raises():
    with pytest.raises(ValueError, match="advisor is a TextPolicy, which responds in text"):
        advised(LAKES, advisor=text_policy(LAKES))


@pytest.mark.slow
def test_the_command_collects_advice_and_names_the_advisor(tmp_path, capsys):
    run = tmp_path / "runs" / "mlp"
    save_run(run, network(POLE), {"id": "CartPole-v1"})
    main("collect", ["--policy", "random", "--env_id", "CartPole-v1", "--advisor", str(run), "--dataset_id", NAME])
    reader = DatasetReader(NAME)
    assert reader.has_advisor and reader.metadata["lrl"]["advisor"] == str(run)
    assert "100 episodes" in capsys.readouterr().out


REFUSED = {
    "--advisor is 'nobody'; it must be expert, a checkpoint or a run directory": [
        "--policy=random",
        "--advisor=nobody",
    ],
    "--advisor is expert, but no episodes are played without --policy": ["--advisor=expert", "--ranges"],
    "--jsonl is it.jsonl, whose lines cannot": ["--policy=random", "--advisor=expert", "--jsonl=it.jsonl"],
    "--successful_only is given with --advisor": ["--policy=random", "--advisor=expert", "--successful_only"],
    "--advisor is 'expert', which cannot act here": ["--policy=random", "--advisor=expert", "--env_id=Pendulum-v1"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_options_that_make_no_advice_raise_one_sentence(said, capsys):
    with pytest.raises(SystemExit):
        main("collect", ["--env_id=CartPole-v1", f"--dataset_id={NAME}", *REFUSED[said]])
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
    assert not dataset_path(NAME).exists()


def test_an_advisor_that_reads_other_numbers_than_are_shown_raises(tmp_path):
    trained = {"id": "CartPole-v1", "numbers": {"kind": "integers"}}
    head = {"class_path": "HeadPolicy", "init_args": {"language_model": {"name": "assets/tiny-lm"}}}
    save_run(tmp_path / "run", head_policy(), trained, head)
    assert load_advisor(str(tmp_path / "run"), GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(kind="integers")))
    with pytest.raises(ValueError, match="which reads numbers as NumberFormat.*integers.*, but --policy reads them as"):
        load_advisor(str(tmp_path / "run"), POLE)


def head_policy():
    policy = HeadPolicy(LanguageModelConfig(name="assets/tiny-lm"))
    policy.connect(POLE.codec)
    policy.connect_spaces(*POLE.spaces)
    policy.configure()
    return policy


def test_a_tuple_of_actions_is_read_as_it_was_written():
    space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Dict({"at": gym.spaces.Box(-1, 1, (2,))})])
    space.seed(0)
    taken, better = [space.sample() for _ in range(3)], [space.sample() for _ in range(3)]
    episode = {"seed": 0, "context": None, "success": False, "observations": [0, 1, 2, 3], "actions": taken}
    episode |= {"rewards": [0.0] * 3, "terminations": [False] * 3, "truncations": [False, False, True]}
    episode |= {"random_steps": [], "advised_actions": dict(enumerate(better)), "has_advisor": True}
    with DatasetWriter(NAME, gym.spaces.Discrete(4), space, None) as writer:
        writer.add([episode])
        writer.finish({})
    stored = DatasetReader(NAME).episode(0)
    for read, written in [(stored.actions, taken), (list(stored.advised_actions.values()), better)]:
        for (first, second), (number, parts) in zip(read, written, strict=True):
            assert first == number
            np.testing.assert_array_equal(second["at"], parts["at"])


@pytest.mark.slow
def test_equal_texts_with_other_advice_are_not_confused():
    results = [
        evaluate_policy(load_baseline("expert", GOTO).policy, GOTO, 40, 10_000, num_envs, SamplingConfig(temperature=t))
        for num_envs, t in [(1, 0.0), (8, 0.0), (8, 1.0)]
    ]
    assert all(np.array_equal(result.lengths, results[0].lengths) for result in results)


# -- several sources as one ------------------------------------------------------------------------------------------


def concatenated():
    """Return the expert's own steps and its advice, and the number of each."""
    own = load_baseline("expert", LAKES).policy
    collect(own, LAKES, "lrl/own-v0", 5, 3, 2, name="expert", commit="")
    advised(LAKES)
    parts = [MinariDemonstrations("lrl/own-v0", split="all"), MinariDemonstrations(NAME, split="all", advised=True)]
    policy = text_policy(LAKES)
    source = ConcatDemonstrations(parts)
    source.prepare_data()
    source.validate(LAKES)
    return source, source.load(LAKES.codec, policy), [part.load(LAKES.codec, policy) for part in parts]


def test_sources_are_demonstrated_one_after_another():
    _, turns, parts = concatenated()
    assert list(turns) == [*parts[0], *parts[1]] and len(turns) == sum(map(len, parts))
    assert turns[-1] == parts[1][-1] and turns[1:3] == [parts[0][1], parts[0][2]]


def test_a_pass_demonstrates_each_once_and_mixes_the_sources():
    _, turns, parts = concatenated()
    orders = [turns.shuffled_indices(0, epoch) for epoch in range(2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(len(turns)))
        first = order[: len(order) // 2] < len(parts[0])
        assert 0 < first.mean() < 1, "the first half of a pass has both"
    assert not np.array_equal(*orders)
    assert np.array_equal(orders[0], turns.shuffled_indices(0, 0))


def test_held_out_episodes_are_checked_in_every_source():
    source, *_ = concatenated()
    with pytest.raises(ValueError, match="in common"):
        MinariDemonstrations("lrl/own-v0", split="validation").check_held_out(source)
    with pytest.raises(ValueError, match="in common"):
        ConcatDemonstrations([MinariDemonstrations("lrl/own-v0", split="all")]).check_held_out(source)


def test_no_sources_raise():
    with pytest.raises(ValueError, match=r"demonstrations.sources is \[\]"):
        ConcatDemonstrations([])


@pytest.mark.slow
def test_the_documented_sources_are_read_from_yaml_and_train(tmp_path):
    own = load_baseline("expert", POLE).policy
    collect(own, POLE, "lrl/cartpole/controller-v0", 4, 3, 2, name="expert", commit="")
    collect(own, POLE, "lrl/cartpole/advised-v0", 4, 30, 2, name="expert", commit="", advisor=own)
    root = Path(__file__).parents[2]
    page = (root / "docs" / "environments.md").read_text(encoding="utf-8")
    block = page[page.index("demonstrations:\n  class_path: ConcatDemonstrations") :].split("```")[0]
    config = yaml.safe_load((root / "configs" / "cartpole" / "clone_mlp.yaml").read_text(encoding="utf-8"))
    changes = {"validation_demonstrations": None, "validation": {"episodes": 2}, "batch_size": 8}
    config["data"]["init_args"] |= yaml.safe_load(block) | changes
    config["trainer"] = {"max_epochs": 1, "check_val_every_n_epoch": 1}
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = ["python", "-m", "lrl", "fit", "--config", str(tmp_path / "it.yaml")]
    finished = run_words([*words, "--run_directory", str(tmp_path / "run")])
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_sources_in_memory_are_shuffled_and_distinguished_too(tmp_path):
    lines = [{"observation": f"<observation>{n}</observation>", "action": "<action>LEFT</action>"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    advised(LAKES)
    inner = ConcatDemonstrations([MinariDemonstrations(NAME, split="all", advised=True)])
    source = ConcatDemonstrations([JsonlDemonstrations(str(tmp_path / "rows.jsonl")), inner])
    assert len(source.sources) == 2 and source.has_native_turns
    source.validate(LAKES)
    turns = source.load(LAKES.codec, text_policy(LAKES))
    assert sorted(turns.shuffled_indices(1, 2).tolist()) == list(range(len(turns)))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines[:3])), encoding="utf-8")
    assert source.load(LAKES.codec, text_policy(LAKES)).fingerprint != turns.fingerprint
