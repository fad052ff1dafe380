"""Few-shot examples out of an expert's episodes."""

import re

import pytest

from lrl.codecs.grid import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.baselines.experts import expert_for
from lrl.policies.baselines.fixed import ExpertPolicy
from lrl.prompts.template import PromptTemplate
from lrl.rollouts import few_shot_examples as examples
from lrl.rollouts.few_shot_examples import add_examples, draw_examples

HELD_OUT = re.compile("yellow box|red key|red door|green ball|grey door")
TEST_LEVEL = "lrl/BabyAI-MixedTestLocal-v0"


def test_examples_are_what_the_expert_answers_and_always_the_same() -> None:
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
    assert len(set(seen)) == len(seen) >= 5 and min(seen) >= examples._LOWEST_SEED


@pytest.mark.parametrize(("kwargs", "split"), [({"split": "test"}, "train"), ({"split": "all"}, "train"), ({}, None)])
def test_the_training_twin_differs_in_its_split_only(kwargs: dict, split: str | None) -> None:
    envs = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", {"size": 5} | kwargs, max_invalid=2)
    twin = envs.training_levels()
    assert (twin.kwargs.get("split"), twin.kwargs["size"], twin.max_invalid) == (split, 5, 2)
    assert envs.kwargs.get("split") == kwargs.get("split")


def test_a_prompt_gets_the_examples_it_asks_for_once() -> None:
    policy, envs = ExpertPolicy(), GymnasiumEnvs("FrozenLake-v1")
    add_examples(policy, envs)  # without a prompt nothing happens
    policy.prompt = PromptTemplate(response_format="final_answer", num_examples=2)
    add_examples(policy, envs)
    drawn = policy.prompt
    assert [turn.response.startswith("final answer: ") for turn in drawn.examples] == [True] * 2
    add_examples(policy, envs)
    assert policy.prompt is drawn


def test_more_examples_than_states_and_environments_without_expert_are_errors() -> None:
    with pytest.raises(ValueError, match="num_examples is 12; the expert met only"):
        draw_examples(GymnasiumEnvs("FrozenLake-v1"), 12, "direct")
    with pytest.raises(ValueError, match="num_examples is 1; it must be 0: BabyAICodec has no expert"):
        draw_examples(GymnasiumEnvs("minigrid:MiniGrid-Empty-5x5-v0"), 1, "direct")
