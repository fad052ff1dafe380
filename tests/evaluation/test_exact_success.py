"""Exact success on FrozenLake."""

from collections.abc import Sequence

import numpy as np
import pytest

from lrl.cli.evaluate import exact_line
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import map_split
from lrl.envs.tabular import success_probability
from lrl.evaluation import exact
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.exact import exact_evaluation, is_frozen_lake, lakes_of, wrong_states
from lrl.evaluation.load import load_baseline
from lrl.openenv.codec import OpenEnvCodec
from lrl.openenv.server import action_schema
from lrl.policies.baselines import ConstantActor, ExpertActor, FixedActor, RandomActor
from lrl.policies.mlp import MLPPolicy
from lrl.search.policies import TabularPolicy
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

LAKE = GymnasiumEnvs("FrozenLake-v1")
RANDOM_MAPS = GymnasiumEnvs("lrl/FrozenLakeRandomMaps-v0", kwargs={"split": "test"})


def connected(policy: FixedActor) -> FixedActor:
    policy.connect(LAKE.codec)
    return policy


def test_the_expert_has_the_value_of_value_iteration() -> None:
    (success,) = exact_evaluation(connected(ExpertActor()), lakes_of(LAKE)).success
    assert success == pytest.approx(0.7402, abs=1e-4)
    assert lakes_of(LAKE)[0].optimum == pytest.approx(0.7442, abs=1e-4)


def test_frequencies_of_random_answers_give_the_random_walk() -> None:
    lakes = lakes_of(LAKE)
    exact = exact_evaluation(connected(RandomActor()), lakes, samples=400)
    assert exact.decisions[0][lakes[0].states] == pytest.approx(np.full((11, 4), 0.25), abs=0.1)
    assert exact.decisions[0].sum() == pytest.approx(11), "states in which nobody acts hold nothing"
    assert exact.success[0] == pytest.approx(0.0139, abs=0.006)


def test_a_policy_trained_on_a_served_lake_is_evaluated_like_any_other() -> None:
    """Its codec only knows the texts of the server."""
    policy = RandomActor()
    policy.connect(OpenEnvCodec(LAKE.codec.description, action_schema(LAKE.codec)))
    there, here = (exact_evaluation(one, lakes_of(LAKE), samples=9) for one in (policy, connected(RandomActor())))
    assert there.success[0] == here.success[0] > 0 and (there.decisions[0] == here.decisions[0]).all()


def native(policy: TabularPolicy | MLPPolicy) -> TabularPolicy | MLPPolicy:
    policy.connect(LAKE.codec)
    policy.connect_spaces(*LAKE.spaces)
    policy.configure()
    return policy


def test_a_table_of_actions_is_evaluated_by_the_numbers_of_the_states() -> None:
    (lake,) = lakes_of(LAKE)
    policy, best = native(TabularPolicy()), lake.q_values.argmax(-1)
    assert isinstance(policy, TabularPolicy)
    policy.load_parameters(best)
    assert exact_evaluation(policy, [lake]).success[0] == pytest.approx(0.7402, abs=1e-4)
    best[0] = 2  # right, where only left keeps clear of the holes below
    policy.load_parameters(best)
    (success,) = exact_evaluation(policy, [lake]).success
    assert success == pytest.approx(lake.success(np.eye(4)[best])) and success < 0.6


def test_a_network_is_sampled_in_every_state() -> None:
    (lake,) = lakes_of(LAKE)
    policy = native(MLPPolicy())
    exact = exact_evaluation(policy, [lake], policy.sampling_at(1.0), samples=400)
    assert exact.decisions[0][lake.states] == pytest.approx(np.full((11, 4), 0.25), abs=0.1), "small outputs at first"


@pytest.mark.slow
def test_exact_success_agrees_with_episodes() -> None:
    policy = connected(ExpertActor())
    lower, upper = evaluate_policy(policy, LAKE, 400, 0, 50).intervals()["success_rate"]
    assert lower < exact_evaluation(policy, lakes_of(LAKE)).success[0] < upper


def test_invalid_responses_count_as_failures() -> None:
    class HalfMute(ConstantActor):
        """Actor with empty responses below the first row."""

        def act(
            self, observations: Sequence[str], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
        ) -> Decisions:
            assert sampling.temperature == 0
            decisions = super().act(observations, memory, keys, sampling)
            actions = [a if "row 0" in o else "" for a, o in zip(decisions.actions, observations, strict=True)]
            object.__setattr__(decisions, "actions", actions)
            return decisions

    (lake,) = lakes_of(LAKE)
    results = exact_evaluation(connected(HalfMute("RIGHT")), [lake])
    assert results.decisions[0].sum() == 4 and results.success == 0
    assert success_probability(lake.table, np.full(16, 2)) > 0


def test_random_maps_are_different_ones_of_the_family() -> None:
    lakes = lakes_of(RANDOM_MAPS, num_maps=12)
    assert len({lake.desc for lake in lakes}) == 12
    assert all(map_split(lake.desc) == "test" for lake in lakes)
    results = exact_evaluation(connected(ExpertActor()), lakes)
    assert (results.success <= results.optimum + 1e-12).all() and results.success.mean() > 0.2


def test_a_fixed_map_is_one_map_however_many_are_wanted() -> None:
    assert [lake.steps for lake in lakes_of(LAKE, num_maps=9)] == [100]


@pytest.mark.parametrize(("count", "said"), [(1, "one map"), (2, "mean over 2 maps")])
def test_the_exact_success_states_the_number_of_maps_and_asks_a_chat_model_for_one_only(
    monkeypatch, count, said
) -> None:
    lakes, loaded = lakes_of(RANDOM_MAPS, num_maps=count), load_baseline("expert", RANDOM_MAPS)
    monkeypatch.setattr(exact, "lakes_of", lambda *_, **__: lakes)
    assert len(lakes) == count and f"({said})" in exact_line(loaded, 0)
    monkeypatch.setattr(ExpertActor, "asks_chat_model", True)
    assert (exact_line(loaded, 0) == "") == (count > 1)


def test_other_environments_have_no_exact_figure() -> None:
    cart = GymnasiumEnvs("CartPole-v1")
    assert is_frozen_lake(LAKE) and is_frozen_lake(RANDOM_MAPS) and not is_frozen_lake(cart)
    with pytest.raises(ValueError, match="env is 'CartPole-v1'"):
        lakes_of(cart)


def test_wrong_states_are_named_with_probabilities() -> None:
    lake = lakes_of(LAKE)[0]
    greedy = np.eye(4)[lake.q_values.argmax(-1)]
    sampled = greedy.copy()
    assert wrong_states(lake, greedy, sampled) == []
    assert lake.best_stationary == pytest.approx(0.7402, abs=1e-4)
    greedy[0], greedy[6], greedy[10] = (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 0)
    sampled[0], sampled[6], sampled[10] = (0.02, 0.04, 0.03, 0.91), (0, 0, 1, 0), (0.4, 0, 0, 0)
    assert wrong_states(lake, greedy, sampled) == [
        "row 0 column 0: UP has 0.91, LEFT (best) 0.02",
        "row 2 column 2: an invalid response has 0.60, LEFT (best) 0.40",
    ], "in row 1 column 2 LEFT and RIGHT are equally good"


def test_a_greedy_action_that_is_rarely_sampled_is_named() -> None:
    lake = lakes_of(LAKE)[0]
    greedy = np.eye(4)[lake.q_values.argmax(-1)]
    sampled = greedy.copy()
    greedy[8], sampled[8] = (1, 0, 0, 0), (0.4, 0, 0, 0.6)
    assert wrong_states(lake, greedy, sampled) == ["row 2 column 0: LEFT has 0.40, UP (best) 0.60"]
