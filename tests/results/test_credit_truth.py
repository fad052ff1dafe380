"""Tests of scores of advantage estimators against values by hand, and of cases in which an estimator is exact."""

import json

import pytest
import torch
from results.credit_truth import TruthConfig, credit_table, estimates, main, policies, sample_rollout, score

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import lakes_of


def test_scores_equal_values_computed_by_hand():
    true, apart = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(4)
    exact = score(5 - 2 * true, true, apart)
    assert exact["correlation"] == exact["averaged_correlation"] == pytest.approx(-1)
    assert exact["error_variance"] == pytest.approx(0, abs=1e-12)
    partial = score(torch.tensor([1.0, 0.0, 0.0, 1.0]), true, apart)
    assert partial["correlation"] == pytest.approx(0) and partial["error_variance"] == pytest.approx(1.25)
    half = score(torch.tensor([0.0, 0.0, 1.0, 1.0]), true, apart)
    assert half["correlation"] == pytest.approx(2 / 5**0.5) and half["error_variance"] == pytest.approx(0.25)
    nothing = score(torch.zeros(4), true, apart)
    assert (nothing["correlation"], nothing["error_variance"]) == (0, pytest.approx(1.25))


def test_averages_over_equal_choices_are_weighted_by_their_number():
    true, estimated = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([4.0, -2.0, 0.5, -0.5, 0.0])
    found = score(estimated, true, torch.tensor([7, 7, 3, 3, 3]))
    assert found["averaged_correlation"] == pytest.approx(1) and found["correlation"] < 0.5


def sampled(tokens, slippery=True, gamma=0.9, groups=8, size=16):
    (lake,) = lakes_of(GymnasiumEnvs("FrozenLake-v1", kwargs={"is_slippery": slippery}))
    policy = policies(lake, [0.05])["softmax 0.05"]
    return sample_rollout(lake, policy, groups, size, tokens=tokens, gamma=gamma, seed=0)


def test_one_step_advantages_of_an_exact_critic_are_exact_without_slipping():
    sample = sampled(1, slippery=False)
    found = estimates(sample, gamma=0.9, gae_lambda=0.0)
    torch.testing.assert_close(found["turn, exact critic"], sample.advantages)
    assert _score(sample, found["episode groups (GRPO)"])["correlation"] < 0.9


@pytest.mark.slow
def test_an_exact_critic_is_unbiased_and_groups_that_share_a_state_are_closer_than_episodes():
    sample = sampled(1, gamma=1.0, groups=64, size=64)
    found, mask = estimates(sample, gamma=1.0, gae_lambda=0.0), sample.rollout.response_mask
    true, estimated = _true(sample), found["turn, exact critic"][mask]
    assert float((true * estimated).mean() / true.square().mean()) == pytest.approx(1, abs=0.1)
    correlation = {name: _score(sample, one)["correlation"] for name, one in found.items()}
    assert correlation["turn, exact critic"] > 2 * correlation["episode groups, not scaled"] > 0
    assert correlation["grouped GAE, not scaled"] > 2 * correlation["episode groups, not scaled"]


def _score(sample, estimated):
    mask = sample.rollout.response_mask
    return score(estimated[mask], sample.advantages[mask], sample.choice[mask])


def _true(sample):
    return sample.advantages[sample.rollout.response_mask]


def test_turn_token_and_nested_credit_agree_on_one_token_and_differ_on_three():
    for tokens in (1, 3):
        found = estimates(sampled(tokens), gamma=0.9, gae_lambda=0.8)
        same = [torch.allclose(found["turn, exact critic"], found[f"{k}, exact critic"]) for k in ("token", "nested")]
        assert same == [tokens == 1] * 2


@pytest.mark.slow
def test_the_command_writes_numbers_a_table_and_a_figure(tmp_path, capsys):
    options = "--num_groups 4 --group_size 8 --seeds 2 --temperatures 0.02"
    files = f"--json {tmp_path}/truth.json --figure {tmp_path}/truth.png"
    main("credit_truth.py", f"{options} {files}".split())
    result = json.loads((tmp_path / "truth.json").read_text())
    assert result["command"].startswith("python scripts/credit_truth.py --num_groups 4") and result["commit"]
    assert [policy["policy"] for policy in result["policies"]] == ["uniform", "softmax 0.02"]
    assert len(result["scores"]) == 2 * 2 * 16 and (tmp_path / "truth.png").stat().st_size > 10_000
    for row in result["scores"]:
        low, high = row["correlation_ci95"]
        assert -1 <= low <= row["correlation"] <= high <= 1 and len(row["correlation_seeds"]) == 2
    table = credit_table(result, 3)
    said = capsys.readouterr().out
    assert (
        table in said
        and credit_table(result, 1, averaged=True) in said
        and table.count("\n") == 18
        and "| no estimate | 0 | " in table
    )


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--temperatures 0", "credit_truth.temperatures holds 0.0; each must be positive."),
        ("--group_size 0", "--group_size is 0; it must be at least 1."),
        ("--gamma 2", "--gamma is 2; it must be in [0, 1]."),
    ],
)
def test_a_mistake_is_one_sentence(option, said, capsys):
    with pytest.raises(SystemExit) as end:
        main("credit_truth.py", f"{option} --seeds 1 --num_groups 1".split())
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_at_least_one_seed_is_needed():
    with pytest.raises(ValueError, match=r"credit_truth.seeds is 0; it must be at least 1"):
        TruthConfig(seeds=0)
