"""Counter-based random numbers: each number is a hash of a purpose and counters, independent of the order of calls.

With a sequential generator, the numbers of a row would depend on which other rows have finished, on the number of
environments, and on whether a run was resumed. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014), folded over the counters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from lrl.types import RandomKeys

_GOLDEN = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_FIRST, _SECOND = (np.array(factor, dtype=np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31, _11 = (np.array(shift, dtype=np.uint64) for shift in (30, 27, 31, 11))
# The constants of SplitMix64. They are arrays, because converting a number to an array takes as long as the arithmetic.


def _mix(value: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 to uint64 values of any shape."""
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


def counter_hash(purpose: str, *counters: int | np.ndarray) -> np.ndarray:
    """Hash counters to 64 random bits.

    Args:
        purpose: what the numbers are used for; for the same counters, different purposes give independent numbers.
        counters: integers or broadcastable integer arrays ``(...)``.

    Returns:
        uint64 array of the broadcast shape ``(...)``.
    """
    leading = tuple(takewhile(lambda counter: isinstance(counter, int), counters))
    state = _state_after(purpose, leading)
    with np.errstate(over="ignore"):
        for counter in counters[len(leading) :]:
            state = _fold(state, counter)
        return _mix(state)


@lru_cache(maxsize=256)
def _state_after(purpose: str, counters: tuple[int, ...]) -> np.ndarray:
    """Return the hash state after the leading integers; cached, because thousands of calls have the same integers."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(zlib.crc32(purpose.encode()), dtype=np.uint64) + _GOLDEN)
        for counter in counters:
            state = _fold(state, counter)
    return state


def _fold(state: np.ndarray, counter: int | np.ndarray) -> np.ndarray:
    """Return the hash state after one more counter."""
    return _fold_mixed(state, _mixed(counter))


def _mixed(counter: int | np.ndarray) -> np.ndarray:
    """Return the part of :func:`_fold` that depends only on the counter."""
    return _mix(np.asarray(counter, dtype=np.int64).astype(np.uint64) + _GOLDEN)


def _fold_mixed(state: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """Return the hash state after one more counter, given the result of :func:`_mixed`."""
    return _mix(state ^ mixed) + _GOLDEN


def seeds(purpose: str, *counters: int | np.ndarray) -> np.ndarray:
    """Return seeds for environments and libraries, int64 in [0, 2**31) with the broadcast shape of the counters.

    Args:
        purpose: see :func:`counter_hash`.
        counters: see :func:`counter_hash`.
    """
    return (counter_hash(purpose, *counters) >> np.uint64(33)).astype(np.int64)


def permutation(length: int, purpose: str, *counters: int) -> np.ndarray:
    """Return a random permutation of ``range(length)``, int64 ``(length,)``.

    Args:
        length: number of elements.
        purpose: see :func:`counter_hash`.
        counters: integers, see :func:`counter_hash`.
    """
    return np.argsort(counter_hash(purpose, *counters, np.arange(length)), kind="stable")


_BELOW_ONE = np.float32(1 - 2**-24)
"""The largest float32 below 1. A uniform number of 1 would give an infinite exponential sample."""


def token_bits(keys: RandomKeys, num_tokens: int) -> Tensor:
    """Return 64 random bits for each of the next tokens of each row, int64 ``(row, num_tokens)``."""
    # The hash of purpose, seed, collection, env, turn and token. What is equal in all turns of a collection is cached.
    state = _state_of_rows(keys.purpose, keys.seed, keys.collection, keys.env.astype(np.int64).tobytes())
    with np.errstate(over="ignore"):
        state = _fold(state, keys.turn)[:, None]
        bits = _mix(_fold_mixed(state, _mixed_tokens(num_tokens)))
    return torch.from_numpy(bits.view(np.int64))


@lru_cache(maxsize=4)
def _state_of_rows(purpose: str, seed: int, collection: int, env: bytes) -> np.ndarray:
    """Return the hash state after the environment index of each row, uint64 ``(row,)``."""
    with np.errstate(over="ignore"):
        return _fold(_state_after(purpose, (seed, collection)), np.frombuffer(env, dtype=np.int64))


@lru_cache(maxsize=64)
def _mixed_tokens(num_tokens: int) -> np.ndarray:
    """Return :func:`_mixed` of the indices of tokens, uint64 ``(1, num_tokens)``."""
    with np.errstate(over="ignore"):
        return _mixed(np.arange(num_tokens)[None])


def token_uniforms(keys: RandomKeys, num_tokens: int) -> Tensor:
    """Return a uniform number in [0, 1) for each of the next tokens of each row, float64 ``(row, num_tokens)``."""
    bits = token_bits(keys, num_tokens).numpy().view(np.uint64)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def exponentials(bits: Tensor, size: int) -> Tensor:
    """Return independent exponential samples with mean 1; the bits of a row seed the SplitMix64 generator of the row.

    Args:
        bits: 64 random bits per row, int64 ``(row,)``.
        size: number of samples per row.

    Returns:
        Positive float32 ``(row, size)``; sample ``k`` of a row depends only on the bits of the row and on ``k``.
    """
    if bits.device.type == "cpu":  # NumPy computes the same numbers with a third of the overhead
        stream = _mix(bits.numpy().view(np.uint64)[:, None] + _stream_increments(size))
        uniforms = ((stream >> _11).astype(np.float64) + 0.5) * 2.0**-53
        return torch.from_numpy(-np.log1p(-np.minimum(uniforms.astype(np.float32), _BELOW_ONE)))
    return _exponentials_by_torch(bits, size)


def _exponentials_by_torch(bits: Tensor, size: int) -> Tensor:
    """Compute :func:`exponentials` with torch, on the device of ``bits``."""
    state = bits[:, None] + _increments(size, bits.device)
    for shift, factor in _ROUNDS:
        state = state.bitwise_xor_(_shifted(state, shift)).mul_(factor)
    state.bitwise_xor_(_shifted(state, 31))
    uniforms = _shifted(state, 11).double().add_(0.5).mul_(2.0**-53).float().clamp_(max=float(_BELOW_ONE))
    return torch.log1p(uniforms.neg_()).neg_()


@lru_cache(maxsize=64)
def _stream_increments(size: int) -> np.ndarray:
    """Return the increments that SplitMix64 adds to its seed for its first ``size`` numbers, uint64 ``(size,)``."""
    return np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN


@cache
def _increments(size: int, device: torch.device) -> Tensor:
    """Return :func:`_stream_increments` as an int64 tensor ``(size,)``, which CUDA graphs read: it is never freed."""
    return torch.from_numpy(_stream_increments(size).view(np.int64)).to(device)


def _signed(bits: int) -> int:
    """Return the signed integer with the same 64 bits, because torch has no unsigned arithmetic."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


_ROUNDS = ((30, _signed(int(_FIRST))), (27, _signed(int(_SECOND))))
"""Shift and factor of the first two rounds of SplitMix64's finaliser; the last round has no factor."""


def _shifted(state: Tensor, shift: int) -> Tensor:
    """Shift an int64 tensor ``(...)`` to the right, filling with zeros."""
    return (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside the context, and restore their states afterwards.

    It is used for operations that cannot take counter-based numbers, such as dropout.

    Args:
        seed: the seed; None changes nothing.
        device: the device whose generator is seeded, in addition to that of the CPU.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
