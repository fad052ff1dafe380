"""Tests of searched policies: order of the parameters, actions, checkpoints and errors."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from search_runs import play

from lrl.algorithms.grpo import GRPOModule
from lrl.cli.watch import main
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_policy
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.search.searchers import ParameterSpace
from lrl.types import RandomKeys

BOX = spaces.Box(-1, 1, (2,), np.float32)


def connected(policy, observed, acted):
    policy.connect_spaces(observed, acted)
    policy.configure()
    return policy


def keys(rows):
    return RandomKeys(seed=0, purpose="rollout", collection=0, env=np.arange(rows), turn=np.zeros(rows, int))


def test_parameters_are_in_the_papers_order():
    policy = connected(LinearPolicy(), BOX, spaces.Box(-9.0, 9.0, (3,), np.float32))
    assert policy.parameter_space() == ParameterSpace(size=9)
    policy.load_parameters([1, 2, 3, 4, 5, 6, 0.1, 0.2, 0.3])  # W is 2 x 3, row by row, then b
    actions = policy.act([np.array([1.0, 0.5], np.float32)], [()], keys(1), policy.sampling).actions
    assert (
        actions == pytest.approx(np.array([[1 + 2 + 0.1, 2 + 2.5 + 0.2, 3 + 3 + 0.3]])) and actions.dtype == np.float32
    )
    plain = connected(LinearPolicy(bias=False, low=-1, high=1), BOX, spaces.Box(-9.0, 9.0, (3,), np.float32))
    assert plain.parameter_space() == ParameterSpace(size=6, low=-1, high=1)


def test_actions_are_clipped_to_their_box():
    policy = connected(LinearPolicy(), BOX, spaces.Box(np.array([-1.0, -0.5]), np.array([2.0, 0.5]), dtype=np.float64))
    decide = policy.decider(np.array([6.0, 6.0, 0, 0, 0, 0]))
    assert decide(np.array([[1.0, 0.0], [-1.0, 0.0], [0.05, 0.0]])) == pytest.approx(
        np.array([[2, 0.5], [-1, -0.5], [0.3, 0.3]])
    )


def test_the_action_with_the_highest_score_is_selected_and_the_first_of_equal_ones():
    policy = connected(LinearPolicy(), BOX, spaces.Discrete(3, start=5))
    decide = policy.decider(np.array([1.0, 2.0, 0.0, 0, 0, 0, 0, 0, 0]))
    assert decide(np.array([[1.0, 0], [-1.0, 0], [0.0, 0]])).tolist() == [6, 7, 5]


@pytest.mark.parametrize("outputs", [1, 2, 6])
@pytest.mark.parametrize("inputs", [2, 9, 17])
def test_an_action_does_not_depend_on_other_rows(inputs, outputs):
    observed, acted = spaces.Box(-9, 9, (inputs,)), spaces.Box(-1e9, 1e9, (outputs,), np.float64)
    policy, rng = connected(LinearPolicy(), observed, acted), np.random.default_rng(0)
    decide = policy.decider(policy.parameter_space().sample(rng))
    rows = rng.standard_normal((33, inputs))
    assert all((decide(rows[i : i + 1])[0] == decide(rows)[i]).all() for i in range(33))


def test_a_table_has_one_action_for_each_state():
    policy = connected(TabularPolicy(), spaces.Discrete(4), spaces.Discrete(3, start=1))
    assert policy.parameter_space() == ParameterSpace(size=4, actions=(1, 2, 3))
    assert policy.parameters_vector.tolist() == [1, 1, 1, 1], "the legal values nearest to zero"
    policy.load_parameters([3, 1, 2, 2])
    assert policy.act([0, 3, 1], [()] * 3, keys(3), policy.sampling).actions.tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 2, 3], "parameters do not fit the TabularPolicy: 3 values were given; there must be 4."),
        ([1, 2, 3, 0], r"params\[3\] is 0; it must be one of 1, 2, 3."),
        ([1, 2, 3, 1.5], r"params\[3\] is 1.5; it must be one of 1, 2, 3."),
    ],
)
def test_parameters_that_do_not_fit_raise_one_sentence(values, said):
    policy = connected(TabularPolicy(), spaces.Discrete(4), spaces.Discrete(3, start=1))
    with pytest.raises(ValueError, match=said):
        policy.load_parameters(values)
    assert policy.parameters_vector.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "observed", "acted", "said"),
    [
        (LinearPolicy, spaces.Discrete(4), spaces.Discrete(2), "observations are Discrete.4. and .* it needs a Box"),
        (LinearPolicy, BOX, spaces.MultiBinary(2), "actions are MultiBinary.2.; .* Discrete or a Box."),
        (TabularPolicy, BOX, spaces.Discrete(2), "a TabularPolicy, but observations are Box"),
        (
            LinearPolicy,
            spaces.Box(0, 255, (84, 84, 3), np.uint8),
            spaces.Discrete(4),
            r"a LinearPolicy, which has 84,676 parameters for observations Box\(0, 255.* at most 10,000. Wrap the",
        ),
        (TabularPolicy, spaces.Discrete(10**6), spaces.Discrete(2), "a TabularPolicy, which has 1,000,000 parameters"),
        (TabularPolicy, spaces.Discrete(2), BOX, "a TabularPolicy, but .* actions are Box"),
    ],
)
def test_spaces_that_do_not_fit_raise_one_sentence(policy, observed, acted, said):
    with pytest.raises(ValueError, match=said):
        policy().connect_spaces(observed, acted)


def test_a_reversed_range_raises_one_sentence():
    with pytest.raises(ValueError, match="policy.low is 2 and policy.high is 1; .*, and low must be below high."):
        LinearPolicy(low=2, high=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"low": -0.25, "high": 0.25}, "policy.low is -0.25 .* with at most policy.decimals 1 decimals"),
        ({"high": 4.5, "decimals": 0}, "policy.high is 4.5; .* with at most policy.decimals 0 decimals"),
        ({"low": -np.inf}, "policy.low is -inf; it must be a number from"),
        ({"decimals": -1}, "policy.decimals is -1; it must be 0 or positive, or null."),
    ],
)
def test_a_range_that_rounding_would_change_raises_one_sentence(settings, said):
    with pytest.raises(ValueError, match=said):
        LinearPolicy(**settings)
    LinearPolicy(low=-0.25, high=0.25, decimals=2)
    LinearPolicy(low=-0.25, high=0.251, decimals=None)


def test_checkpoints_contain_the_parameters_and_optimizers_ignore_them():
    policy = connected(LinearPolicy(), BOX, spaces.Discrete(2))
    policy.load_parameters([0.1, -6, 6, 0.3, 1, 2])
    assert not list(policy.parameters())
    other = connected(LinearPolicy(), BOX, spaces.Discrete(2))
    other.load_state_dict(policy.state_dict())
    assert other.parameters_vector.tolist() == [0.1, -6, 6, 0.3, 1, 2]
    assert LinearPolicy().state_dict() == {}


@pytest.mark.slow
@pytest.mark.parametrize("id", ["CartPole-v1", "FrozenLake-v1", "lrl/Nim-v0", "MountainCarContinuous-v0"])
def test_the_evaluation_plays_the_policy_of_the_search(id):
    envs = GymnasiumEnvs(id)
    policy = TabularPolicy() if isinstance(envs.spaces[0], gym.spaces.Discrete) else LinearPolicy()
    connected(policy, *envs.spaces)
    policy.load_parameters(policy.parameter_space().sample(np.random.default_rng(3)))
    results = evaluate_policy(policy, envs, 6, 100, 4)
    trial = play(policy, envs, policy.parameters_vector, range(100, 106), 1000)
    assert results.returns == pytest.approx(trial.returns, rel=1e-5) and results.lengths.sum() == trial.env_steps


def test_gradient_methods_raise_one_sentence():
    policy = connected(LinearPolicy(), BOX, spaces.Discrete(2))
    said = "model.policy is a LinearPolicy, which has no gradient; search its parameters, or train an MLPPolicy."
    for call in (
        lambda: policy.evaluate(None),
        lambda: policy.reference_logprobs(None),
        lambda: policy.build_reference(False),
        lambda: policy.critic_parameters(),
        lambda: policy.state_values([], []),
        lambda: policy.encode_turns([]),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match=said):
        GRPOModule(policy).configure_model()


@pytest.mark.parametrize(
    ("kind", "id", "values"),
    [("LinearPolicy", "CartPole-v1", np.arange(10) / 10 - 0.5), ("TabularPolicy", "lrl/Nim-v0", [2] * 11)],
)
def test_a_checkpoint_is_evaluated_by_the_common_command(kind, id, values, tmp_path):
    config = {
        "model": {"class_path": "Search", "init_args": {"policy": {"class_path": f"lrl.search.policies.{kind}"}}},
        "data": {"init_args": {"env": {"class_path": "GymnasiumEnvs", "init_args": {"id": id}}}},
    }
    weights = {"policy.parameter_values": torch.tensor(values, dtype=torch.float64)}
    saved = {"lrl": {"config": yaml.safe_dump(config), "env_steps": 3}, "state_dict": weights}
    torch.save(saved, tmp_path / "last.ckpt")
    loaded = load_policy(tmp_path / "last.ckpt")
    assert loaded.policy.parameters_vector == pytest.approx(values) and loaded.info["env_steps"] == 3
    results = evaluate_policy(loaded.policy, loaded.env_factory, 3, 0, 2, loaded.policy.sampling_at(0.0))
    played = play(loaded.policy, loaded.env_factory, np.asarray(values), range(3), 500)
    assert results.returns == pytest.approx(played.returns)
    main("lrl watch", ["--checkpoint", str(tmp_path / "last.ckpt"), "--turns", "2"])
