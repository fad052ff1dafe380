"""Tests of searchers: legal proposals, learning, and restoring."""

import json

import numpy as np
import pytest
import torch

from lrl.search.searchers import (
    CMAES,
    AugmentedRandomSearch,
    CrossEntropyMethod,
    ParameterSpace,
    RandomSearch,
    Relaxation,
    Trial,
)

SEARCHERS = {"random": RandomSearch, "cross-entropy": CrossEntropyMethod, "CMA-ES": CMAES, "ARS": AugmentedRandomSearch}
REAL = ParameterSpace(size=8)
TABLE = ParameterSpace(size=16, actions=(1, 2, 3, 4))
TARGET = np.array([3.0, -2.0, 1.0, 4.0, -5.0, 0.0, 2.0, -1.0])
PLAN = np.array([1, 2, 3, 4, 4, 3, 2, 1, 1, 1, 2, 2, 3, 3, 4, 4])


def hill(parameters):
    return -float(np.square(parameters - TARGET).sum())


def matches(parameters):
    return float((parameters == PLAN).sum())


def trial(parameters, value):
    return Trial(parameters=parameters, returns=np.array([value - 1.0, value + 1.0]), env_steps=2)


def searched(kind, space, function, proposals, seed=0, searcher=None):
    """Search, and return the searcher, its proposals and their values."""
    if searcher is None:
        searcher = SEARCHERS[kind]()
        searcher.setup(space, seed, 400)
    found, values = [], []
    for _ in range(proposals):
        found.append(searcher.ask())
        values.append(function(found[-1]))
        searcher.tell(trial(found[-1], values[-1]))
    return searcher, np.array(found), np.array(values)


@pytest.mark.parametrize(("space", "function"), [(REAL, hill), (TABLE, matches)], ids=["real", "table"])
@pytest.mark.parametrize("kind", SEARCHERS)
def test_every_proposal_is_legal_and_follows_from_the_seed(kind, space, function):
    _, found, values = searched(kind, space, function, 120)
    assert [space.complaint(list(one)) for one in found] == [""] * 120
    if space is REAL:
        assert (np.abs(found * 10 - np.round(found * 10)) < 1e-9).all()
    _, again, _ = searched(kind, space, function, 120)
    _, other, _ = searched(kind, space, function, 120, seed=1)
    assert (again == found).all() and (other != found).any()
    assert len({tuple(one) for one in found}) > 60 and len(set(values)) > 1


@pytest.mark.parametrize(("space", "function"), [(REAL, hill), (TABLE, matches)], ids=["real", "table"])
@pytest.mark.parametrize("kind", SEARCHERS)
@pytest.mark.parametrize("proposals", [0, 1, 53])
def test_a_restored_search_equals_an_uninterrupted_one(kind, space, function, proposals, tmp_path):
    whole, found, _ = searched(kind, space, function, proposals)
    whole.tell(trial(space.sample(np.random.default_rng(9)), 3.0))  # of somebody else
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert json.loads(json.dumps(state)) == state
    restored = SEARCHERS[kind]()
    restored.setup(space, 0, 400)
    restored.load_state_dict(state)
    _, wanted, _ = searched(kind, space, function, 40, searcher=whole)
    _, got, _ = searched(kind, space, function, 40, searcher=restored)
    assert (got == wanted).all()
    assert proposals == 0 or not (wanted[: len(found)] == found[:40]).all()


@pytest.mark.parametrize("kind", [name for name in SEARCHERS if name != "random"])
@pytest.mark.parametrize(("space", "function"), [(REAL, hill), (TABLE, matches)], ids=["real", "table"])
def test_all_searchers_outperform_random_search_on_synthetic_functions(kind, space, function):
    best = [searched(kind, space, function, 400, seed)[2].max() for seed in range(5)]
    control = [searched("random", space, function, 400, seed)[2].max() for seed in range(5)]
    assert min(best) > max(control)


def test_a_search_with_the_wrong_sign_gets_worse():
    for kind in ("cross-entropy", "CMA-ES", "ARS"):
        _, found, _ = searched(kind, REAL, lambda parameters: -hill(parameters), 300)
        assert np.mean([hill(one) for one in found[-50:]]) < np.mean([hill(one) for one in found[:50]])


def test_a_search_starts_from_the_best_warm_up_policy():
    near = TARGET + 0.1
    for kind in ("cross-entropy", "CMA-ES", "ARS"):
        searcher = SEARCHERS[kind]()
        searcher.setup(REAL, 0, 400)
        for parameters in (TARGET - 3, near, TARGET + 3):
            searcher.tell(trial(np.clip(parameters, -6, 6), hill(parameters)))
        _, found, _ = searched(kind, REAL, hill, 20, searcher=searcher)
        _, cold, _ = searched(kind, REAL, hill, 20)
        assert np.abs(found.mean(0) - TARGET).mean() < np.abs(cold.mean(0) - TARGET).mean()


def test_asking_twice_returns_the_same_proposal():
    for kind, make in SEARCHERS.items():
        searcher = make()
        searcher.setup(REAL, 0, 400)
        assert (searcher.ask() == searcher.ask()).all(), kind


def test_logits_do_not_order_actions():
    relaxation = Relaxation(ParameterSpace(size=2, actions=(1, 2, 3)))
    assert relaxation.size == 6 and relaxation.bounds is None and relaxation.scale == 1
    assert relaxation.proposal(np.array([0.0, 0.0, 0.1, 5.0, -1.0, 2.0])).tolist() == [3, 1]
    assert relaxation.point(np.array([3.0, 1.0])).tolist() == [0, 0, 1, 1, 0, 0]
    real = Relaxation(ParameterSpace(size=2))
    assert real.bounds.tolist() == [[-6, 6]] * 2 and real.proposal(np.array([9.0, 1.26])).tolist() == [6, 1.3]


def test_the_first_step_of_ars_equals_the_formula_of_the_paper():
    searcher = AugmentedRandomSearch(num_directions=2, num_top=1, step_size=0.5, noise=0.1)
    searcher.setup(ParameterSpace(size=2, decimals=None, scale=2.0), 0, 400)
    found = []
    for value in (1.0, 2.0, 5.0, 1.0):  # the second direction has the best side: difference 4, deviation 2
        found.append(searcher.ask())
        searcher.tell(trial(found[-1], value))
    searcher.ask()
    direction = (found[2] - found[3]) / 2 / 0.2  # noise 0.1 times scale 2
    assert searcher.centre == pytest.approx(0.5 * 2.0 * 4.0 / 2.0 * direction)


def test_cross_entropy_fits_its_distribution_to_the_best_proposals():
    searcher = CrossEntropyMethod(population_size=4, elite_share=0.5, extra_noise=0.0)
    searcher.setup(ParameterSpace(size=1, decimals=None), 0, 400)
    found = []
    for value in (0.0, 7.0, 8.0, 1.0):
        found.append(float(searcher.ask()[0]))
        searcher.tell(trial(np.array(found[-1:]), value))
    searcher.ask()
    assert searcher.mean == pytest.approx([(found[1] + found[2]) / 2])
    assert searcher.std == pytest.approx([abs(found[1] - found[2]) / 2])


def test_cma_es_restarts_if_all_proposals_are_equal_after_rounding():
    searcher = CMAES()
    searcher.setup(ParameterSpace(size=2, decimals=0, low=-1, high=1, scale=1.0), 0, 400)
    found = [searched("CMA-ES", None, lambda parameters: -abs(parameters).sum(), 400, searcher=searcher)[1]]
    assert searcher._cma.population_size > 6
    assert len({tuple(one) for one in found[0][-40:]}) > 1


@pytest.mark.filterwarnings("error")
def test_the_smallest_population_of_cma_es_learns():
    found = searched("CMA-ES", REAL, hill, 200, searcher=started(CMAES(population_size=4), REAL))[2]
    assert found[-50:].mean() > found[:50].mean() + 10


@pytest.mark.parametrize("kind", [name for name in SEARCHERS if name != "random"])
def test_ranges_without_zero_are_searched(kind):
    space = ParameterSpace(size=3, low=1, high=4)
    _, found, values = searched(kind, space, lambda one: -float(np.square(one - 3).sum()), 400)
    assert [space.complaint(list(one)) for one in found] == [""] * 400
    assert values.max() > -0.2 and len({tuple(one) for one in found}) > 60


def started(searcher, space):
    searcher.setup(space, 0, 400)
    return searcher


def test_restoring_the_values_of_other_proposals_raises():
    before, _, _ = searched("cross-entropy", REAL, hill, 45)
    for space, iterations in ((REAL, 800), (ParameterSpace(size=8, high=5.0), 400)):
        other = CrossEntropyMethod()
        other.setup(space, 0, iterations)
        with pytest.raises(ValueError, match="of CrossEntropyMethod with other proposals than these settings lead to"):
            other.load_state_dict(before.state_dict())


def test_restoring_random_proposals_of_another_space_raises():
    before, _, _ = searched("random", REAL, hill, 5)
    other = started(SEARCHERS["random"](), ParameterSpace(size=8, high=5.0))
    with pytest.raises(ValueError, match="of RandomSearch with other proposals than these settings lead to"):
        other.load_state_dict(before.state_dict())


def test_settings_out_of_range_raise_one_sentence(monkeypatch):
    with pytest.raises(ValueError, match="searcher.num_top is 9; it must be at most num_directions, 8."):
        AugmentedRandomSearch(num_top=9)
    with pytest.raises(ValueError, match="searcher.population_size is 3; it must be at least 4."):
        CMAES(population_size=3)
    with pytest.raises(ValueError, match="searcher.population_size is 1; it must be at least 2."):
        CrossEntropyMethod(population_size=1)
    with pytest.raises(ValueError, match="searcher.elite_share is 0"):
        CrossEntropyMethod(elite_share=0.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^searcher CMAES needs the package cmaes, which .*\[search\]'\.$"):
        CMAES().setup(REAL, 0, 400)
