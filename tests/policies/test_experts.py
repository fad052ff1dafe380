"""Tests of experts and of the expert actor."""

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.frozen_lake import named_map, random_maps, transition_table
from lrl.envs.tabular import optimal_q, reachable_states, success_probability
from lrl.envs.text import AdvisedObservation
from lrl.policies.baselines import ExpertActor, FrozenLakeExpert, expert_for, read_drawing
from lrl.types import RandomKeys

KEYS = RandomKeys(seed=0, purpose="", collection=0, env=np.zeros(1), turn=np.zeros(1))


@pytest.mark.parametrize("desc", [named_map("4x4"), named_map("8x8"), *random_maps(3, seed=0)])
def test_read_drawing_is_the_inverse_of_render_map(desc: tuple[str, ...]) -> None:
    for state in reachable_states(transition_table(desc), "".join(desc).index("S")):
        for feedback in ("", "Invalid action: the action must be one of LEFT, DOWN, RIGHT, UP.\n"):
            assert read_drawing(feedback + render_map(state, desc)) == (state, desc)


def test_the_expert_chooses_the_actions_of_value_iteration() -> None:
    desc = named_map("4x4")
    table, expert = transition_table(desc), FrozenLakeExpert()
    actions = np.zeros(table.num_states, dtype=int)
    for state in reachable_states(table):
        actions[state] = expert(render_map(state, desc))
    optimum = success_probability(table, optimal_q([table])[0].argmax(-1))
    assert success_probability(table, actions) == pytest.approx(optimum)
    assert success_probability(table, actions) == pytest.approx(0.7402, abs=1e-4)


def test_the_expert_takes_the_shortest_path_if_the_ice_is_not_slippery() -> None:
    expert = expert_for(FrozenLakeCodec(is_slippery=False))
    assert [expert(render_map(state, named_map("4x4"))) for state in (10, 14)] == [1, 2]


def test_the_expert_actor_writes_the_action_of_the_expert() -> None:
    policy = ExpertActor(response_format="direct")
    policy.connect(FrozenLakeCodec())
    assert policy.act([render_map(14, named_map("4x4"))], [()], KEYS, policy.sampling).actions == ["DOWN"]
    own = ExpertActor(lambda text: len(text), "direct")
    own.connect(FrozenLakeCodec())
    assert own.act([".."], [()], KEYS, own.sampling).actions == ["RIGHT"]


def test_an_observation_without_a_map_raises() -> None:
    with pytest.raises(ValueError, match="observation is 'hello'"):
        read_drawing("hello")


def test_the_expert_of_an_environment_returns_the_advised_action() -> None:
    policy = ExpertActor(response_format="direct")
    policy.connect(BabyAICodec())
    assert policy.act([AdvisedObservation("Goal: go", 4)], [()], KEYS, policy.sampling).actions == ["drop"]
    with pytest.raises(ValueError, match="call prepare"):
        policy.act(["Goal: go"], [()], KEYS, policy.sampling)
    with pytest.raises(ValueError, match="no expert is known for BabyAICodec"):
        expert_for(BabyAICodec(has_expert=False))


def test_an_unknown_environment_has_no_expert() -> None:
    with pytest.raises(ValueError, match="no expert is known for SpaceCodec"):
        ExpertActor().connect(SpaceCodec(gym.spaces.Discrete(2), gym.spaces.Discrete(2)))
