"""Credit against plain loops over single episodes, and what must not change it."""

from dataclasses import dataclass, replace

import pytest
import torch
from tiny_runs import on_two_ranks

from lrl.functional.advantages import CreditConfig, explained_variance, lambda_returns, weighted_credit, whiten
from lrl.functional.losses import clipped_surrogate
from lrl.types import Credit, Rollout

GAMMA, LAMBDA = 0.9, 0.8


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The parts of a rollout on which credit depends."""

    rewards: torch.Tensor
    token_rewards: torch.Tensor
    values: torch.Tensor
    final_values: torch.Tensor
    mask: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    active: torch.Tensor


def assign_credit(kind, turns, config):
    """Advantages and returns of a rollout that has no inputs."""
    rollout = Rollout(
        inputs={},
        response_mask=turns.mask,
        logprobs=torch.zeros_like(turns.values),
        rewards=turns.rewards,
        terminated=turns.terminated,
        truncated=turns.truncated,
        active=turns.active,
        turn=torch.zeros_like(turns.active, dtype=torch.int64),
        group=torch.arange(turns.active.shape[1]),
        observations=[],
        responses=[],
        metrics={},
        values=turns.values,
        final_values=turns.final_values,
    )
    credit = replace(config, kind=kind, normalise=False).estimate(rollout, turns.token_rewards)
    return credit.advantages, credit.returns


def turns_of(columns, width=3, **changes):
    """Columns of ``(reward, values, end)`` per turn; ``end`` is "", "terminated", "truncated" or "cut"."""
    time, env = max(map(len, columns)), len(columns)
    zeros = torch.zeros(time, env, dtype=torch.float64)
    fields = {name: zeros.clone() for name in ("rewards", "final_values", "terminated", "truncated", "active")}
    fields |= {name: torch.zeros(time, env, width, dtype=torch.float64) for name in ("token_rewards", "values", "mask")}
    for column, rows in enumerate(columns):
        for row, (reward, values, end, *final) in enumerate(rows):
            fields["rewards"][row, column], fields["active"][row, column] = reward, 1
            fields["values"][row, column, : len(values)] = torch.tensor(values, dtype=torch.float64)
            fields["mask"][row, column, : len(values)] = 1
            if end in ("terminated", "truncated"):
                fields[end][row, column] = 1
            if final:
                fields["final_values"][row, column] = final[0]
    booleans = ("terminated", "truncated", "active", "mask")
    return Turns(**{name: field.bool() if name in booleans else field for name, field in fields.items()} | changes)


def random_columns(seed, width=3):
    generator = torch.Generator().manual_seed(seed)

    def number():
        return float(torch.randn((), generator=generator, dtype=torch.float64))

    def choose(n):
        return int(torch.randint(n, (), generator=generator))

    columns = []
    for _ in range(4):
        rows = []
        for row in range(7):
            end = ("", "", "terminated", "truncated")[choose(4)]
            final = [number()] if end == "truncated" or row == 6 else []
            rows.append((number(), [number() for _ in range(1 + choose(width))], end, *final))
        columns.append(rows)
    return columns


def episodes(column):
    """Return the episodes of a column, each with the value after its last turn."""
    episode = []
    for reward, values, end, *final in column:
        episode.append((reward, values))
        if end:
            yield episode, final[0] if end == "truncated" else 0.0
            episode = []
    if episode:
        yield episode, final[0]


def loop_turn_returns(episode, behind, local=False, last=False):
    """Recursion over one episode, written from the formula."""

    def step(t):
        if t == len(episode):
            return behind, behind, behind
        reward, values = episode[t]
        value, _, inherited = step(t + 1)
        beyond = GAMMA * (1 - LAMBDA) * value + GAMMA * LAMBDA * inherited
        inherited = (max(0.0, reward) if local else reward) + beyond
        return values[-1 if last else 0], reward + beyond, inherited

    return [step(t)[1] for t in range(len(episode))]


def loop_tokens(rewards, values, gamma, lam):
    """GAE of one turn."""
    out = []
    for m in range(len(values)):
        total = 0.0
        for k in range(m, len(values)):
            following = values[k + 1] if k + 1 < len(values) else 0.0
            total += (gamma * lam) ** (k - m) * (rewards[k] + gamma * following - values[k])
        out.append(total)
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("local", "last"), [(False, False), (True, True)])
def test_nested_credit_is_the_plain_loop(seed, local, last):
    columns = random_columns(seed)
    turns = turns_of(columns)
    noise = torch.randn(turns.values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turns = turns_of(columns, token_rewards=noise * turns.mask)
    discounts = CreditConfig(
        gamma=GAMMA, gae_lambda=LAMBDA, token_gamma=0.97, token_lambda=0.7, local_penalties=local, bootstrap_last=last
    )
    advantages, returns = assign_credit("nested", turns, discounts)
    for env, column in enumerate(columns):
        row = 0
        for episode, behind in episodes(column):
            for (_, values), target in zip(episode, loop_turn_returns(episode, behind, local, last), strict=True):
                rewards = turns.token_rewards[row, env, : len(values)].tolist()
                rewards[-1] += target
                expected = torch.tensor(loop_tokens(rewards, values, 0.97, 0.7), dtype=torch.float64)
                torch.testing.assert_close(advantages[row, env, : len(values)], expected)
                torch.testing.assert_close(
                    returns[row, env, : len(values)], expected + torch.tensor(values, dtype=torch.float64)
                )
                assert not advantages[row, env, len(values) :].any() and not returns[row, env, len(values) :].any()
                row += 1


@pytest.mark.parametrize("seed", range(3))
def test_turn_credit_gives_every_token_the_turns_advantage(seed):
    columns = random_columns(seed)
    discounts = CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA)
    advantages, returns = assign_credit("turn", turns_of(columns), discounts)
    for env, column in enumerate(columns):
        row = 0
        for episode, behind in episodes(column):
            for (_, values), target in zip(episode, loop_turn_returns(episode, behind), strict=True):
                assert advantages[row, env, : len(values)].tolist() == pytest.approx([target - values[0]] * len(values))
                assert returns[row, env, : len(values)].tolist() == pytest.approx([target] * len(values))
                row += 1


@pytest.mark.parametrize("seed", range(3))
def test_token_credit_is_gae_over_the_chain_of_all_tokens(seed):
    columns = random_columns(seed)
    discounts = CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA, token_gamma=0.97, token_lambda=0.7)
    advantages, _ = assign_credit("token", turns_of(columns), discounts)
    for env, column in enumerate(columns):
        row = 0
        for episode, behind in episodes(column):
            chain = []  # of (reward, value, discount to the next, decay to the next)
            for reward, values in episode:
                chain += [(0.0, value, 0.97, 0.97 * 0.7) for value in values[:-1]]
                chain.append((reward, values[-1], GAMMA, GAMMA * LAMBDA))
            expected, carry, following = [], 0.0, behind
            for reward, value, discount, decay in reversed(chain):
                carry = reward + discount * following - value + decay * carry
                following = value
                expected.insert(0, carry)
            mask = turns_of(columns).mask[row : row + len(episode), env]
            torch.testing.assert_close(
                advantages[row : row + len(episode), env][mask], torch.tensor(expected, dtype=torch.float64)
            )
            row += len(episode)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_token_per_turn_the_three_estimators_agree(seed):
    turns = turns_of(random_columns(seed, width=1), width=1)
    discounts = CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA)
    expected = assign_credit("turn", turns, discounts)
    for how in ("token", "nested"):
        for ours, theirs in zip(assign_credit(how, turns, discounts), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_by_hand():
    """Two turns of one token: r = 1, 2 and V = .5, .25, then the end."""
    turns = turns_of([[(1.0, [0.5], ""), (2.0, [0.25], "terminated")]], width=1)
    advantages, returns = assign_credit("turn", turns, CreditConfig(gamma=0.5, gae_lambda=0.5))
    # A_1 = 2 - .25; A_0 = (1 + .5 * .25 - .5) + .25 * A_1
    assert advantages.flatten().tolist() == pytest.approx([0.625 + 0.25 * 1.75, 1.75])
    assert returns.flatten().tolist() == pytest.approx([0.625 + 0.25 * 1.75 + 0.5, 2.0])


def test_the_critic_can_have_another_lambda_by_hand():
    """With lambda 1 its targets are the discounted sums of rewards, and the advantages are those of the test above."""
    turns = turns_of([[(1.0, [0.5], ""), (2.0, [0.25], "terminated")]], width=1)
    for kind in ("turn", "token", "nested"):
        credit = CreditConfig(gamma=0.5, gae_lambda=0.5, critic_lambda=1.0)
        advantages, returns = assign_credit(kind, turns, credit)
        assert advantages.flatten().tolist() == pytest.approx([0.625 + 0.25 * 1.75, 1.75])
        assert returns.flatten().tolist() == pytest.approx([1 + 0.5 * 2, 2.0])


@pytest.mark.parametrize("kind", ["turn", "token", "nested"])
def test_with_lambda_1_the_critic_does_not_learn_from_its_predictions_inside_a_turn(kind):
    """The reward after two turns of three tokens is 1, and without discount it is the target of all tokens."""
    turns = turns_of([[(0.0, [0.3, 0.1, 0.7], ""), (1.0, [0.2, 0.9, 0.4], "terminated")]], width=3)
    returns = assign_credit(kind, turns, CreditConfig(gamma=1.0, gae_lambda=0.5, critic_lambda=1.0))[1]
    assert returns.flatten().tolist() == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("kind", ["turn", "token", "nested"])
def test_the_lambda_of_the_critic_changes_its_targets_and_not_the_advantages(kind):
    turns, actor = turns_of(random_columns(3)), CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA)
    advantages, targets = assign_credit(kind, turns, replace(actor, critic_lambda=0.3))
    torch.testing.assert_close(advantages, assign_credit(kind, turns, actor)[0], rtol=0, atol=0)
    critic = assign_credit(kind, turns, replace(actor, gae_lambda=0.3, token_lambda=0.3))[1]
    torch.testing.assert_close(targets, critic, rtol=0, atol=0)
    assert (targets - assign_credit(kind, turns, actor)[1]).abs().max() > 0.01


def test_a_perfect_constant_critic_leaves_no_advantage():
    """Infinitely many rewards of 1 have the value 1 / (1 - gamma), also in a truncated or unfinished episode."""
    worth = 1 / (1 - GAMMA)
    for end in ("truncated", "cut"):
        turns = turns_of([[(1.0, [worth], "")] * 4 + [(1.0, [worth], end, worth)]], width=1)
        for how in ("turn", "token", "nested"):
            advantages, _ = assign_credit(how, turns, CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA))
            assert advantages.abs().max() < 1e-12


def test_termination_cuts_the_bootstrap_and_truncation_does_not():
    for end, beyond in (("terminated", 0.0), ("truncated", GAMMA * 7.0)):
        turns = turns_of([[(1.0, [0.0], end, 7.0), (100.0, [50.0], "terminated")]], width=1)
        advantages, _ = assign_credit("nested", turns, CreditConfig(gamma=GAMMA, gae_lambda=LAMBDA))
        assert float(advantages[0, 0, 0]) == pytest.approx(1.0 + beyond)  # independent of rewards in the next episode


def test_padding_changes_nothing():
    columns = random_columns(1)
    for how in ("turn", "token", "nested"):
        narrow, wide = (assign_credit(how, turns_of(columns, width), CreditConfig()) for width in (3, 6))
        for one, other in zip(narrow, wide, strict=True):
            torch.testing.assert_close(one, other[..., :3])
            assert not other[..., 3:].any()


def test_columns_of_whole_episodes_may_differ_in_length():
    short, long = random_columns(2)[:2]
    short, long = short[:1], long[:4]
    short[0] = (*short[0][:2], "terminated")
    long[3] = (*long[3][:2], "terminated")
    together = assign_credit("nested", turns_of([short, long]), CreditConfig())[0]
    alone = assign_credit("nested", turns_of([short]), CreditConfig())[0]
    torch.testing.assert_close(together[:1, :1], alone)
    assert not together[1:, 0].any()


def test_an_episode_without_any_reward_has_advantage_zero():
    turns = turns_of([[(0.0, [0.0, 0.0], "")] * 3 + [(0.0, [0.0], "terminated")]])
    for how in ("turn", "token", "nested", "bandit"):
        advantages, returns = assign_credit(how, turns, CreditConfig())
        assert not advantages.any() and not returns.any()
        assert torch.isfinite(whiten(advantages, turns.mask)).all()


def test_bandit_credit_rewards_every_turn_with_the_last_reward():
    turns = turns_of([[(5.0, [0.0], ""), (0.5, [0.0], "terminated"), (0.0, [0.0], ""), (0.25, [0.0], "truncated")]], 1)
    advantages, _ = assign_credit("bandit", turns, CreditConfig())
    assert advantages.flatten().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25])
    with pytest.raises(ValueError, match="needs whole episodes"):
        assign_credit("bandit", turns_of([[(1.0, [0.0], "cut", 0.0)]], 1), CreditConfig())


def test_a_local_penalty_affects_only_its_own_turn():
    rows = [(0.0, [0.0], ""), (-1.0, [0.0], ""), (1.0, [0.0], "terminated")]
    local = assign_credit("nested", turns_of([rows], 1), CreditConfig(gamma=1.0, gae_lambda=1.0, local_penalties=True))[
        0
    ]
    shared = assign_credit("nested", turns_of([rows], 1), CreditConfig(gamma=1.0, gae_lambda=1.0))[0]
    assert local.flatten().tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert shared.flatten().tolist() == pytest.approx([0.0, 0.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lambda_returns_are_summed_in_float32_and_have_no_gradient(dtype):
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(200, 2, generator=generator).to(dtype) for _ in range(4)]
    terminated, cut = torch.rand(2, 200, 2, generator=generator).lt(0.02)
    settings = {"gamma": 0.99, "gae_lambda": 0.95}
    rewards, values, final, following = (part.float() for part in numbers)
    wanted = lambda_returns(rewards, values, final, terminated, cut & ~terminated, next_values=following, **settings)
    rewards, values, final, following = (part.requires_grad_() for part in numbers)
    found = lambda_returns(rewards, values, final, terminated, cut & ~terminated, next_values=following, **settings)
    assert not found.requires_grad and found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_unknown_credit_names_the_four():
    with pytest.raises(ValueError, match="credit.kind is 'episode'; it must be one of turn, token, nested, bandit"):
        assign_credit("episode", turns_of(random_columns(0)), CreditConfig())


def test_whitening_ignores_masked_tokens():
    values = torch.tensor([[1.0, 2.0, 99.0], [3.0, 50.0, 70.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = whiten(values, mask)
    assert out[mask].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6) and not out[~mask].any()


def test_explained_variance():
    targets = torch.tensor([1.0, 2.0, 3.0])
    assert float(explained_variance(targets, targets)) == 1
    assert float(explained_variance(torch.full((3,), 2.0), targets)) == 0
    assert torch.isnan(explained_variance(targets, torch.full((3,), 0.1)))


def test_explained_variance_over_ranks_is_that_of_all_tokens():
    """Two simulated ranks: the sums of each are added to those of the other."""
    draw = torch.Generator().manual_seed(0)
    values, targets = torch.randn(7, generator=draw), torch.randn(7, generator=draw) + torch.arange(7)
    wanted = 1 - (targets - values).var() / targets.var()
    parts = [slice(0, 2), slice(2, 7)]
    said = on_two_ranks(lambda rank, reduce: explained_variance(values[parts[rank]], targets[parts[rank]], reduce))
    assert said == [pytest.approx(float(wanted))] * 2


def sampled_elsewhere(ratios, masks):
    """A rollout of one turn per environment whose tokens have the given ratios of trainer to generator."""
    ratios, mask = torch.tensor(ratios)[None], torch.tensor(masks)[None]
    behaviour = torch.full_like(ratios, -2.0) * mask
    ones = torch.ones(mask.shape[:2], dtype=torch.bool)
    return Rollout(
        inputs={},
        response_mask=mask,
        logprobs=(behaviour + ratios.log()) * mask,
        behaviour_logprobs=behaviour,
        rewards=torch.zeros(ones.shape),
        terminated=ones,
        truncated=~ones,
        active=ones,
        turn=torch.zeros(ones.shape, dtype=torch.int64),
        group=torch.arange(ones.shape[1]),
        observations=[],
        responses=[],
        metrics={},
    )


def test_advantages_are_multiplied_by_truncated_ratios():
    rollout = sampled_elsewhere([[0.5, 2.0], [8.0, 1.0]], [[True, True], [True, False]])
    credit = Credit(advantages=torch.tensor([[[1.0, -1.0], [2.0, 0.0]]]), metrics={"train/kept": torch.ones(1)})
    found = weighted_credit(credit, rollout, 3.0)
    torch.testing.assert_close(found.advantages, torch.tensor([[[0.5, -2.0], [6.0, 0.0]]]))
    assert found.metrics["train/importance_ratio"].tolist() == pytest.approx([0.5, 2.0, 8.0])
    assert found.metrics["train/importance_ratio_max"].max() == pytest.approx(8.0)
    # The weights are 0.5, 2 and 3: (5.5)^2 / (0.25 + 4 + 9) / 3.
    assert found.metrics["train/effective_sample_share"].item() == pytest.approx(30.25 / 13.25 / 3)
    assert "train/kept" in found.metrics
    assert weighted_credit(credit, rollout, None) is credit
    assert weighted_credit(credit, rollout.replace(behaviour_logprobs=None), 3.0) is credit


def test_a_weighted_advantage_multiplies_the_clipped_surrogate_by_the_weight():
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5])
    for advantage in (-1.5, 2.0):
        advantages, weights = torch.full((4,), advantage), torch.tensor([0.25, 3.0, 1.0, 2.0])
        weighted = clipped_surrogate(ratio, weights * advantages, 0.2, 0.3)
        torch.testing.assert_close(weighted, weights * clipped_surrogate(ratio, advantages, 0.2, 0.3))


def test_the_effective_sample_share_is_that_of_all_ranks():
    ratios = [[[0.5, 2.0]], [[8.0, 1.0]]]
    credit = Credit(advantages=torch.zeros(1, 1, 2))

    def share(index, reduce):
        rollout = sampled_elsewhere(ratios[index], [[True, index == 0]])
        return weighted_credit(credit, rollout, 3.0, reduce).metrics["train/effective_sample_share"].item()

    assert on_two_ranks(share) == pytest.approx([30.25 / 13.25 / 3] * 2)
