"""Random numbers depend on their counters only."""

import numpy as np
import pytest
import torch

from lrl.functional.random import (
    _exponentials_by_torch,
    counter_hash,
    exponentials,
    permutation,
    seeds,
    token_bits,
    token_uniforms,
)
from lrl.types import RandomKeys


def uniforms(env, **changes):
    env = np.asarray(env)
    fields = {"seed": 0, "purpose": "rollout", "collection": 1, "env": env, "turn": np.zeros_like(env)} | changes
    return token_uniforms(RandomKeys(**fields), 64)


def test_a_random_number_depends_only_on_its_counters():
    many, one = uniforms(np.arange(10)), uniforms([7])
    assert (many[7] == one[0]).all()


def test_every_counter_matters():
    base = uniforms([3])
    for change in ({"seed": 1}, {"purpose": "evaluation"}, {"collection": 2}, {"turn": np.array([1])}):
        assert (base != uniforms([3], **change)).all()


def test_numbers_are_uniform_and_uncorrelated():
    numbers = uniforms(np.arange(2000)).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    histogram = np.histogram(numbers, bins=16, range=(0, 1))[0] / numbers.size
    assert np.abs(histogram - 1 / 16).max() < 0.003
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.08
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.08


def test_exponentials_are_a_splitmix_stream_of_mean_one():
    bits = torch.tensor([0, -1, 1234567])
    numbers = exponentials(bits, 20_000)
    assert (numbers > 0).all() and torch.equal(numbers[2, :50], exponentials(bits[2:], 50)[0])
    for row in numbers:
        assert abs(row.mean() - 1) < 0.03 and abs(row.std() - 1) < 0.04
        assert abs(float((row < 0.1).float().mean()) - (1 - np.exp(-0.1))) < 0.01
    assert abs(np.corrcoef(numbers.numpy())[np.triu_indices(3, 1)]).max() < 0.03
    first = 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0
    assert numbers[0, 0].item() == pytest.approx(-np.log1p(-(first >> 11) * 2.0**-53), rel=1e-6)


def test_the_bits_of_tokens_are_the_hash_of_all_counters():
    env, turn = np.array([4, 0, 7]), np.array([1, 9, 1])
    for collection in (0, 1, 0):  # the second time from the cache
        keys = RandomKeys(seed=5, purpose="rollout", collection=collection, env=env, turn=turn)
        expected = counter_hash("rollout", 5, collection, env[:, None], turn[:, None], np.arange(6)[None])
        assert (token_bits(keys, 6).numpy().view(np.uint64) == expected).all()


def test_exponentials_are_the_same_where_torch_computes_them():
    bits = torch.randint(-(2**62), 2**62, (50,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(exponentials(bits, 200), _exponentials_by_torch(bits, 200), rtol=1e-6, atol=0)


def test_seeds_are_in_the_range_of_environments():
    numbers = seeds("reset", 0, np.arange(1000))
    assert numbers.dtype == np.int64 and numbers.min() >= 0 and numbers.max() < 2**31
    assert len(set(numbers.tolist())) == 1000


def test_permutations_visit_everything_once_and_differ_by_pass():
    first, second = permutation(11, "rows", 0, 0), permutation(11, "rows", 0, 1)
    assert sorted(first.tolist()) == list(range(11)) and first.tolist() != second.tolist()


def test_the_hash_never_changes():
    assert [int(h) for h in counter_hash("rollout", 0, np.arange(2))] == GOLDEN


GOLDEN = [3973147401279029364, 17367554402513588120]
