"""Tests of comparisons between turns of a group, against results by hand and plain loops over episodes."""

from collections import defaultdict

import pytest
import torch
from tiny_runs import on_two_ranks

from lrl.functional.groups import (
    GroupedTurns,
    discounted_returns,
    group_advantages,
    grouped_gae,
    grouped_values,
    shared_states,
    step_advantages,
    turn_numbers,
)

SCALES = ("group_std", "batch_std", "none")


def turn_advantages(rewards, group, active, **options):
    return step_advantages(GroupedTurns(rewards, turn_numbers(active), group, active), **options)


def turns(episodes, group):
    """Columns of ``(state, reward)`` per turn, all of which end by a terminal state."""
    time = max(map(len, episodes))
    fields = {name: torch.zeros(time, len(episodes), dtype=torch.float64) for name in ("rewards", "active", "ends")}
    state = torch.zeros(time, len(episodes), dtype=torch.int64)
    for column, episode in enumerate(episodes):
        for row, (seen, reward) in enumerate(episode):
            state[row, column], fields["rewards"][row, column], fields["active"][row, column] = seen, reward, 1
        fields["ends"][len(episode) - 1, column] = 1
    grid = GroupedTurns(fields["rewards"], state, torch.tensor(group), fields["active"].bool())
    return grid, fields["ends"].bool()


BY_HAND = turns([[(1, 0), (2, 1)], [(1, 0), (3, 0)], [(1, 0), (2, 0)]], [0, 0, 0])


def random_turns(seed, groups=3, size=4, states=5, most=7):
    """Episodes of different lengths with few states, so that some are met twice in an episode and some once."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, most, (groups * size,)).tolist()
    episodes = [
        list(zip(torch.randint(states, (n,)).tolist(), torch.randn(n, dtype=torch.float64).tolist(), strict=True))
        for n in lengths
    ]
    return turns(episodes, [number // size for number in range(groups * size)])


def test_turns_in_the_same_state_are_compared_by_the_discounted_return_from_there():
    grid, _ = BY_HAND
    expected = torch.tensor([[1 / 3, -1 / 6, -1 / 6], [0.5, 0.0, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(step_advantages(grid, gamma=0.5, scale="none"), expected)
    spread = torch.tensor([1 / 12, 0.5], dtype=torch.float64).sqrt()[:, None] + 1e-4  # by n - 1, in state 1 and in 2
    torch.testing.assert_close(step_advantages(grid, gamma=0.5), expected / spread)


def test_turns_of_the_same_number_are_compared_by_hand():
    grid, _ = turns([[(1, 1), (2, 4)], [(3, 2)], [(4, 0), (5, 2)], [(6, 7), (6, 7)]], [0, 0, 0, 1])
    rewards, _, group, active = grid
    expected = torch.tensor([[1.0, 0.0, -1.0, 0.0], [1.0, 0.0, -1.0, 0.0]], dtype=torch.float64)  # 3, 2, 1; 4, 2
    torch.testing.assert_close(turn_advantages(rewards, group, active, gamma=0.5, scale="none"), expected)


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_of_turns_with_the_same_number_sum_to_zero_and_equal_a_loop(scale):
    grid, _ = random_turns(7)
    rewards, _, group, active = grid
    found = turn_advantages(rewards, group, active, gamma=0.9, scale=scale)
    returns = discounted_returns(grid, 0.9)
    for time in range(len(rewards)):
        for number in group.unique():
            peers = (group == number) & active[time]
            if not peers.any():
                continue
            centred = returns[time][peers] - returns[time][peers].mean()
            by = {"none": 1.0, "batch_std": returns[active].std() + 1e-4}.get(scale)
            if by is None:
                by = centred.std() + 1e-4 if len(centred) > 1 else 1.0
            torch.testing.assert_close(found[time][peers], centred / by)
    assert not found[~active].any()


def test_grouped_gae_by_hand():
    grid, ends = BY_HAND
    values = grouped_values(discounted_returns(grid, 0.5), grid)
    torch.testing.assert_close(values, torch.tensor([[1 / 6] * 3, [0.5, 0.0, 0.5]], dtype=torch.float64))
    one_step = torch.tensor([[1 / 12, -1 / 6, 1 / 12], [0.5, 0.0, -0.5]], dtype=torch.float64)  # their mean is 0
    td = grouped_gae(grid, ends, gamma=0.5, gae_lambda=0.0, scale="none")
    torch.testing.assert_close(td, one_step)
    scaled = grouped_gae(grid, ends, gamma=0.5, gae_lambda=0.0)
    torch.testing.assert_close(scaled, one_step / (one_step.std() + 1e-4))


@pytest.mark.parametrize("seed", range(5))
def test_step_advantages_are_those_of_a_loop_over_turns(seed):
    grid, _ = random_turns(seed)
    rewards, state, group, active = grid
    members, expected = defaultdict(list), torch.zeros_like(rewards)
    for env in range(rewards.shape[1]):
        length = int(active[:, env].sum())
        for time in range(length):
            later = [0.9 ** (k - time) * float(rewards[k, env]) for k in range(time, length)]
            members[int(group[env]), int(state[time, env])].append((time, env, sum(later)))
    for same in members.values():
        for time, env, value in same:
            expected[time, env] = value - sum(other for *_, other in same) / len(same)
    found = step_advantages(grid, gamma=0.9, scale="none")
    torch.testing.assert_close(found, expected)
    assert {1, 2} < {len(same) for same in members.values()}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_grouped_gae_is_that_of_a_loop_over_episodes(seed, gae_lambda):
    grid, ends = random_turns(seed)
    rewards, state, group, active = grid
    returns, members = discounted_returns(grid, 0.9), defaultdict(list)
    for time, env in active.nonzero().tolist():
        members[int(group[env]), int(state[time, env])].append(float(returns[time, env]))
    raw = torch.zeros_like(rewards)
    for env in range(rewards.shape[1]):
        length = int(active[:, env].sum())
        values = [members[int(group[env]), int(state[time, env])] for time in range(length)]
        values = [sum(same) / len(same) for same in values] + [0.0]
        for start in range(length):
            deltas = [float(rewards[k, env]) + 0.9 * values[k + 1] - values[k] for k in range(start, length)]
            raw[start, env] = sum((0.9 * gae_lambda) ** k * delta for k, delta in enumerate(deltas))
    for number in group.unique():
        own = active & (group == number)
        raw[own] -= raw[own].mean()
    found = grouped_gae(grid, ends, gamma=0.9, gae_lambda=gae_lambda, scale="none")
    torch.testing.assert_close(found, raw)


def test_grouped_gae_with_lambda_one_equals_step_advantages():
    grid, ends = random_turns(7)
    torch.testing.assert_close(
        grouped_gae(grid, ends, gamma=0.9, gae_lambda=1.0, scale="none"), step_advantages(grid, gamma=0.9, scale="none")
    )


def both(grid, ends, scale="group_std", reduce=None):
    options = {"gamma": 0.9, "scale": scale, "reduce": reduce}
    rewards, _, group, active = grid
    compared = (step_advantages(grid, **options), grouped_gae(grid, ends, gae_lambda=0.8, **options))
    return *compared, turn_advantages(rewards, group, active, **options)


@pytest.mark.parametrize("scale", SCALES)
def test_groups_with_equal_returns_get_advantage_zero(scale):
    grid, ends = random_turns(1)
    for rewards in (torch.zeros_like(grid[0]), grid[3] & ends.new_tensor(False)):
        agreed = grid._replace(rewards=rewards.to(grid.rewards.dtype))
        assert all(torch.equal(found, torch.zeros_like(found)) for found in both(agreed, ends, scale))
    alike = turns([[(1, 0.3), (2, 0.1)]] * 4, [0, 0, 0, 0])
    assert all(torch.equal(found, torch.zeros_like(found)) for found in both(*alike, scale))


@pytest.mark.parametrize("scale", SCALES)
def test_a_state_that_occurs_once_in_its_group_gets_step_advantage_zero(scale):
    grid, _ = turns([[(1, 0.0), (2, 1.0)], [(1, 0.0), (3, 5.0)], [(4, 0.0)]], [0, 0, 1])
    found = step_advantages(grid, gamma=0.9, scale=scale)
    assert bool(found[0, :2].all()) and not found[1].any() and not found[0, 2]
    assert float(shared_states(grid).float().mean()) == pytest.approx(2 / 5)


@pytest.mark.parametrize("scale", SCALES)
def test_rows_after_the_end_of_an_episode_are_ignored(scale):
    grid, ends = random_turns(2)
    rewards, state, group, active = grid
    assert not active.all()
    junk = GroupedTurns(rewards.masked_fill(~active, 9.0), state.masked_fill(~active, 1), group, active)
    for clean, changed in zip(both(grid, ends, scale), both(junk, ends, scale), strict=True):
        assert torch.equal(clean, changed) and not clean[~active].any()


def test_groups_are_compared_within_themselves_and_their_order_does_not_matter():
    grid, ends = random_turns(3)
    order = torch.randperm(len(grid[2]), generator=torch.Generator().manual_seed(0))
    moved = GroupedTurns(grid[0][:, order], grid[1][:, order], grid[2][order], grid[3][:, order])
    single = grid[2] == 1
    alone = GroupedTurns(grid[0][:, single], grid[1][:, single], grid[2][single], grid[3][:, single])
    for found, elsewhere in zip(both(grid, ends), both(moved, ends[:, order]), strict=True):
        torch.testing.assert_close(found[:, order], elsewhere)
    for found, elsewhere in zip(both(grid, ends), both(alone, ends[:, single]), strict=True):
        torch.testing.assert_close(found[:, single], elsewhere)


def test_truncation_is_treated_like_termination():
    grid, ends = random_turns(4)
    for complete, cut in zip(both(grid, ends), both(grid, ends & False), strict=True):
        assert torch.equal(complete, cut)


@pytest.mark.parametrize("scale", SCALES)
def test_two_ranks_compute_the_same_as_one(scale):
    grid, ends = random_turns(5, groups=4)
    half = len(grid[2]) // 2

    def work(rank, reduce):
        own = slice(rank * half, (rank + 1) * half)
        last = int(grid[3][:, own].sum(0).max())  # ranks differ in their numbers of turns
        share = GroupedTurns(grid[0][:last, own], grid[1][:last, own], grid[2][own], grid[3][:last, own])
        return both(share, ends[:last, own], scale, reduce)

    whole = both(grid, ends, scale)
    for rank, found in enumerate(on_two_ranks(work)):
        for one, other in zip(whole, found, strict=True):
            torch.testing.assert_close(one[: len(other), rank * half : (rank + 1) * half], other)


def test_scaling_over_ranks_is_the_scaling_of_all_episodes():
    returns, group = torch.randn(8, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    options = {"scale": "batch_std"}
    shares = on_two_ranks(
        lambda rank, reduce: group_advantages(returns[4 * rank :][:4], group[4 * rank :][:4], reduce=reduce, **options)
    )
    torch.testing.assert_close(torch.cat(shares), group_advantages(returns, group, **options))
