"""Few-shot examples out of an expert's episodes."""

import re

import pytest

from lrl.cli.options import ModelOptions
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.data.minari_writer import collect
from lrl.data.rows import MinariRows
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.prompt_env import PromptEnvs
from lrl.evaluation.load import load_baseline
from lrl.policies.baselines import ExpertActor, expert_for
from lrl.prompts import PromptTemplate
from lrl.rewards.behaviour_cloning import BehaviourCloningReward
from lrl.rewards.format import ClosingTagFormatReward
from lrl.rollouts import examples as few_shot_examples
from lrl.rollouts.examples import add_examples, draw_examples

HELD_OUT = re.compile("yellow box|red key|red door|green ball|grey door")
TEST_LEVEL = "lrl/BabyAI-MixedTestLocal-v0"


def test_examples_are_the_responses_of_the_expert_and_always_the_same() -> None:
    envs, expert = GymnasiumEnvs("FrozenLake-v1"), expert_for(FrozenLakeCodec())
    turns = draw_examples(envs, 5, "direct")
    assert turns == draw_examples(envs, 5, "direct") and turns[:3] == draw_examples(envs, 3, "direct")
    assert len({turn.observation for turn in turns}) == 5
    for turn in turns:
        assert turn.response == FrozenLakeCodec().action_texts[expert(turn.observation)]


def test_examples_for_a_held_out_level_come_from_its_training_twin() -> None:
    turns = draw_examples(GymnasiumEnvs(TEST_LEVEL), 12, "think_answer")
    assert all(turn.response.startswith("<think></think><answer>") for turn in turns)
    assert len({turn.response for turn in turns}) > 2
    assert not any(HELD_OUT.search(turn.observation.partition("\n")[0]) for turn in turns)
    assert all(type(turn.observation) is str for turn in turns), "advice is not for the eyes of the policy"


def test_no_evaluation_counts_up_to_the_seeds_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    envs = GymnasiumEnvs("FrozenLake-v1")

    def make(self, num_envs, response_format):
        vectorised = original(self, num_envs, response_format)
        reset = vectorised.reset
        vectorised.reset = lambda **given: seen.extend(given["seed"]) or reset(**given)
        return vectorised

    original = GymnasiumEnvs.make
    monkeypatch.setattr(GymnasiumEnvs, "make", make)
    draw_examples(envs, 5, "direct")
    assert len(set(seen)) == len(seen) >= 5 and min(seen) >= few_shot_examples._LOWEST_SEED


@pytest.mark.parametrize(("kwargs", "split"), [({"split": "test"}, "train"), ({"split": "all"}, "train"), ({}, None)])
def test_the_training_twin_differs_in_its_split_only(kwargs: dict, split: str | None) -> None:
    envs = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", {"size": 5} | kwargs, max_invalid=2)
    twin = envs.training_split()
    assert (twin.kwargs.get("split"), twin.kwargs["size"], twin.max_invalid) == (split, 5, 2)
    assert envs.kwargs.get("split") == kwargs.get("split")


def test_a_prompt_gets_its_examples_once() -> None:
    policy, envs = ExpertActor(), GymnasiumEnvs("FrozenLake-v1")
    add_examples(policy, envs)  # without a prompt nothing happens
    policy.prompt = PromptTemplate(response_format="final_answer", num_examples=2)
    add_examples(policy, envs)
    drawn = policy.prompt
    assert [turn.response.startswith("final answer: ") for turn in drawn.examples] == [True] * 2
    add_examples(policy, envs)
    assert policy.prompt is drawn


@pytest.mark.slow
def test_more_examples_than_states_and_environments_without_expert_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_shot_examples, "_EPISODES_PER_EXAMPLE", 25)  # which show every state
    with pytest.raises(ValueError, match="num_examples is 12; it must be at most 11"):
        draw_examples(GymnasiumEnvs("FrozenLake-v1"), 12, "direct")
    with pytest.raises(ValueError, match="num_examples is positive; it must be 0, or .*: BabyAICodec has no expert"):
        draw_examples(GymnasiumEnvs("minigrid:MiniGrid-Empty-5x5-v0"), 1, "direct")


PENDULUM = GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(kind="integers"), max_episode_steps=6)
"""An environment without expert."""


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    policy = load_baseline("random", PENDULUM).policy
    collect(policy, PENDULUM, "lrl/pendulum-v0", 4, 0, 2, name="random", commit="")
    return "lrl/pendulum-v0"


def test_examples_of_a_data_set_are_its_turns_of_different_episodes(dataset) -> None:
    turns = draw_examples(PENDULUM, 4, "think_answer", dataset)
    assert turns == draw_examples(PENDULUM, 4, "think_answer", dataset)
    reader, codec, found = DatasetReader(dataset), PENDULUM.codec, []
    for number in range(4):
        episode = reader.episode(number)
        for observation, action in zip(episode.observations, episode.actions, strict=True):
            text = codec.action_to_text(action)
            told = (codec.observation_to_text(observation), f"<think></think><answer>{text}</answer>")
            found += [number] * ((told[0], told[1]) in {(turn.observation, turn.response) for turn in turns})
    assert sorted(found) == [0, 1, 2, 3]
    assert len(draw_examples(PENDULUM, 9, "direct", dataset)) == 9, "episodes may give several"


def test_the_data_set_of_examples_is_downloaded(dataset, monkeypatch) -> None:
    downloaded: list[str] = []
    monkeypatch.setattr(few_shot_examples, "download", downloaded.append)
    draw_examples(PENDULUM, 1, "direct", dataset)
    assert downloaded == [dataset]


def test_a_prompt_gets_its_examples_from_the_data_set_that_it_names(dataset) -> None:
    policy = load_baseline("random", PENDULUM).policy
    policy.prompt = PromptTemplate(response_format="direct", num_examples=2, examples_from=dataset)
    add_examples(policy, PENDULUM)
    assert policy.prompt.examples == draw_examples(PENDULUM, 2, "direct", dataset)


def test_examples_can_be_shown_with_rows_whose_rewards_read_responses(dataset) -> None:
    """The spaces of rows do not depend on rewards, which raise errors for native actions."""
    rows = PromptEnvs(MinariRows(dataset, PENDULUM), [ClosingTagFormatReward(), BehaviourCloningReward()])
    assert draw_examples(rows, 2, "direct", dataset) == draw_examples(PENDULUM, 2, "direct", dataset)


@pytest.mark.slow
def test_data_sets_that_cannot_be_shown_raise_one_sentence(dataset, monkeypatch) -> None:
    monkeypatch.setattr(few_shot_examples, "_EPISODES_PER_EXAMPLE", 5)  # which show every turn
    with pytest.raises(ValueError, match="num_examples is 99; it must be at most 24, .* found in 'lrl/pendulum-v0'"):
        draw_examples(PENDULUM, 99, "direct", dataset)
    with pytest.raises(ValueError, match="examples_from is 'lrl/pendulum-v0', whose observation space is Box"):
        draw_examples(GymnasiumEnvs("CartPole-v1"), 1, "direct", dataset)
    monkeypatch.setattr("lrl.envs.minari_reader._check_hub", lambda: (_ for _ in ()).throw(OSError()))
    with pytest.raises(ValueError, match="dataset_id is 'lrl/none-v0', which is not in"):
        draw_examples(PENDULUM, 1, "direct", "lrl/none-v0")
    with pytest.raises(ValueError, match="examples_from is 'a/b-v0', but prompt.num_examples is 0"):
        PromptTemplate(examples_from="a/b-v0")


def test_a_model_without_training_is_shown_turns_of_a_data_set(dataset, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("lrl.evaluation.load.load_model", lambda name, env, prompt, **other: seen.append(prompt))
    options = ModelOptions(model="x", num_examples=2, examples_from=dataset)
    options.load(GymnasiumEnvs("Pendulum-v1"))
    assert seen == [{"response_format": "think_answer", "num_examples": 2, "examples_from": dataset}]
