"""Counter-based random numbers: a number depends on its purpose and counters, not on the order of sampling.

A stream that is consumed in batch order changes when a row finishes early, when the number of environments changes, or
when a run is resumed. A hash of counters does not. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014), folded over the counters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from lrl.types import RandomKeys

_GOLDEN = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_FIRST, _SECOND = (np.array(factor, dtype=np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31, _11 = (np.array(shift, dtype=np.uint64) for shift in (30, 27, 31, 11))
# The constants are arrays because creating an array takes as long as the arithmetic.


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


def counter_hash(purpose: str, *counters: int | np.ndarray) -> np.ndarray:
    """Hash counters to 64 random bits.

    Args:
        purpose: name of the use; different purposes give independent numbers for the same counters.
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
    """Return the hash state after the leading integers, cached because thousands of calls share them."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(zlib.crc32(purpose.encode()), dtype=np.uint64) + _GOLDEN)
        for counter in counters:
            state = _fold(state, counter)
    return state


def _fold(state: np.ndarray, counter: int | np.ndarray) -> np.ndarray:
    bits = np.asarray(counter, dtype=np.int64).astype(np.uint64)
    return _mix(state ^ _mix(bits + _GOLDEN)) + _GOLDEN


def seeds(purpose: str, *counters: int | np.ndarray) -> np.ndarray:
    """Return seeds for environments, int64 in [0, 2**31) with the broadcast shape ``(...)`` of the counters."""
    return (counter_hash(purpose, *counters) >> np.uint64(33)).astype(np.int64)


def permutation(length: int, purpose: str, *counters: int) -> np.ndarray:
    """Return a permutation of ``range(length)``, int64 ``(length,)``."""
    return np.argsort(counter_hash(purpose, *counters, np.arange(length)), kind="stable")


_BELOW_ONE = np.float32(1 - 2**-24)
"""The largest float32 below 1, whose exponential sample is finite."""


def token_bits(keys: RandomKeys, num_tokens: int) -> Tensor:
    """Return 64 random bits for each token that may be sampled, int64 ``(row, token)`` with ``num_tokens`` columns."""
    rows = (keys.env[:, None], keys.turn[:, None])
    bits = counter_hash(keys.purpose, keys.seed, keys.collection, *rows, np.arange(num_tokens)[None])
    return torch.from_numpy(bits.view(np.int64))


def token_uniforms(keys: RandomKeys, num_tokens: int) -> Tensor:
    """Return a uniform number in [0, 1) for each token that may be sampled, float64 ``(row, token)``."""
    bits = token_bits(keys, num_tokens).numpy().view(np.uint64)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def exponentials(bits: Tensor, size: int) -> Tensor:
    """Expand the 64 bits of each row into independent exponential samples of mean 1, by a SplitMix64 stream per row.

    Args:
        bits: int64 ``(row,)``.
        size: number of samples per row.

    Returns:
        Positive float32 ``(row, size)``; sample ``k`` of a row depends on its bits and on ``k`` alone.
    """
    if bits.device.type == "cpu":  # NumPy gives the same numbers, with a third of the overhead per call
        stream = _mix(bits.numpy().view(np.uint64)[:, None] + _stream_increments(size))
        uniforms = ((stream >> _11).astype(np.float64) + 0.5) * 2.0**-53
        return torch.from_numpy(-np.log1p(-np.minimum(uniforms.astype(np.float32), _BELOW_ONE)))
    return _exponentials_by_torch(bits, size)


def _exponentials_by_torch(bits: Tensor, size: int) -> Tensor:
    """Compute :func:`exponentials` by torch, on the device of ``bits`` ``(row,)``."""
    state = bits[:, None] + _increments(size, bits.device)
    for shift, factor in _ROUNDS:
        state = state.bitwise_xor_(_shifted(state, shift)).mul_(factor)
    state.bitwise_xor_(_shifted(state, 31))
    uniforms = _shifted(state, 11).double().add_(0.5).mul_(2.0**-53).float().clamp_(max=float(_BELOW_ONE))
    return torch.log1p(uniforms.neg_()).neg_()


@lru_cache(maxsize=64)
def _stream_increments(size: int) -> np.ndarray:
    """Return what SplitMix64 adds to its seed for each of the first ``size`` numbers, uint64 ``(size,)``."""
    return np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN


@lru_cache(maxsize=64)
def _increments(size: int, device: torch.device) -> Tensor:
    """Return :func:`_stream_increments` as an int64 tensor ``(size,)``."""
    return torch.from_numpy(_stream_increments(size).view(np.int64)).to(device)


def _signed(bits: int) -> int:
    """Return the same 64 bits as a signed integer: torch has no unsigned arithmetic."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


_ROUNDS = ((30, _signed(int(_FIRST))), (27, _signed(int(_SECOND))))
"""Shift and factor of the two multiplying rounds of SplitMix64's finaliser."""


def _shifted(state: Tensor, shift: int) -> Tensor:
    """Shift an int64 tensor ``(...)`` to the right, filling with zeros."""
    return (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside the context and restore them afterwards; a ``seed`` of None does nothing.

    For operations that cannot use counter-based numbers, such as dropout.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
