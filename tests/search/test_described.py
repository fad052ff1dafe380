"""Tests of the texts about environment and policy that ProPS+ has in its prompt and ProPS does not."""

import re

import pytest
from search_runs import PLUS, data_of, fit

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.rephrased import Phrasing, RephrasedCodec
from lrl.search.described import environment_in_words, policy_in_words, task_in_words
from lrl.search.experiments import make_policy
from lrl.search.module import PromptedSearchModule
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.search.prompted import PromptedSearcher
from lrl.search.prompts import SearchPrompt
from lrl.search.stand_in import HillClimbingChatModel
from lrl.search.tasks import TASKS


def told(env, policy=None, **settings):
    policy = policy or TabularPolicy()
    policy.connect_spaces(*env.spaces)
    return task_in_words(policy, env, **settings)


@pytest.mark.parametrize("name", TASKS)
def test_only_prompts_of_props_plus_describe_reward_end_and_randomness_of_a_task(name):
    task = TASKS[name]
    policy = make_policy(task)
    world, words = task_in_words(policy, task.env_factory(), 1000)
    prompts = {}
    for plus in (False, True):
        for text in ((world, words), ("", "")):
            prompt = SearchPrompt(describe_environment=plus)
            (message,) = prompt.render(space=policy.parameter_space(), task=text, history="H")
            prompts.setdefault(plus, []).append(message["content"])
    assert prompts[False][0] == prompts[False][1], "no word of it is in the prompt of ProPS"
    assert f"Environment: {world}\n\nPolicy: {words}\n\n" in prompts[True][0]
    for label in ("Observation", "Actions", "Reward of a step", "End of an episode", "Randomness"):
        assert f"\n{label}: " in prompts[True][0] and label not in prompts[False][0]
    assert f"It is cut after {task.max_steps} steps." in world
    assert len(words) > 50 and "<action>" not in world


def test_states_of_frozen_lake_are_described_by_row_and_column():
    world, words = told(TASKS["frozen_lake"].env_factory())
    states = re.findall(r"(\d+) is row (\d+) column (\d+)[;.]", words)
    assert [int(state) for state, *_ in states] == list(range(16))
    assert all(int(state) == 4 * int(row) + int(column) for state, row, column in states)
    assert "The start S is state 0. The goal G is state 15. Where the holes are is not told." in world
    assert "0 is LEFT; 1 is DOWN; 2 is RIGHT; 3 is UP" in words
    _, words = told(GymnasiumEnvs("FrozenLake-v1", {"desc": ["SFF", "HFG"]}))
    assert "States: 0 is row 0 column 0; 1 is row 0 column 1; 2 is row 0 column 2; 3 is row 1 column 0" in words
    _, words = told(GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0"))
    assert "15 is row 3 column 3" in words


def test_states_that_need_a_context_are_not_named_without_it():
    policy = TabularPolicy()
    policy.connect_spaces(*TASKS["frozen_lake"].env_factory().spaces)
    assert "States" not in policy_in_words(policy, FrozenLakeCodec())


def test_actions_that_are_numbers_are_listed_without_names():
    _, words = told(TASKS["nim"].env_factory())
    assert words == "it is a table: params[i] is the action in state i. Actions: 1, 2, 3."


def test_slipping_is_described_if_moves_slip():
    for name in ("frozen_lake", "cliff_walking"):
        world, _ = told(TASKS[name].env_factory())
        assert "Moves slip: with probability 1/3 the move goes in the direction of the action" in world
    for id, kwargs in (("FrozenLake-v1", {"is_slippery": False}), ("CliffWalking-v1", {})):
        world, _ = told(GymnasiumEnvs(id, kwargs))
        assert world.endswith("Randomness: Nothing is random.")


def test_the_lower_time_limit_is_described():
    env = GymnasiumEnvs("CartPole-v1")
    assert "after 500 steps" in told(env, LinearPolicy())[0]
    assert "after 500 steps" in told(env, LinearPolicy(), max_steps=1000)[0]
    assert "after 50 steps" in told(env, LinearPolicy(), max_steps=50)[0]
    assert "cut" not in told(GymnasiumEnvs("lrl/Nim-v0"))[0]


def test_reset_options_replace_the_description_of_the_start():
    env = GymnasiumEnvs("CartPole-v1", reset_options={"low": -0.2, "high": 0.2})
    assert "0.05" not in told(env, LinearPolicy())[0]


def test_other_environments_are_described_by_their_codec():
    env = GymnasiumEnvs("Acrobot-v1")
    assert told(env, LinearPolicy())[0] == environment_in_words(env.codec) != ""


def test_the_description_of_a_codec_with_other_words_is_kept():
    env = GymnasiumEnvs("FrozenLake-v1")
    phrasing = Phrasing(description="Cross the ice.", actions={"LEFT": "WEST"})
    world, words = told(env.with_settings(codec=RephrasedCodec(env.codec, phrasing)))
    assert world == "Cross the ice." and "0 is WEST" in words and "15 is row 3 column 3" in words


def test_a_search_passes_its_descriptions_to_the_searcher(tmp_path):
    data, searcher = data_of("FrozenLake-v1"), PromptedSearcher(HillClimbingChatModel(), **PLUS)
    module = PromptedSearchModule(TabularPolicy(), searcher)
    fit(tmp_path, module=module, data=data)
    world, words = task_in_words(module.policy, data.env, data.max_steps)
    assert searcher._task == (world, words) and "Moves slip" in world
