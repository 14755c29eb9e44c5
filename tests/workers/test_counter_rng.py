"""The counter RNG and draws made with it: published vectors, statistics of fixed keys.

Parity with Triton: tests/kernels/cuda/test_uniform_cuda.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from workers.counter_rng import GUMBEL_MAX, gumbel, mix64, mix_key, mix_keys, philox, uniform
from workers.outputs import Sampling
from workers.sampling import SamplingRow, choose_tokens


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, philox4x32 with 10 rounds.
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (np.array([int(word, 16)], dtype=np.uint64) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    words = philox((c0, c1, c2, c3), high << 32 | low)
    assert " ".join(f"{int(word[0]):08x}" for word in words) == expected


def test_keys_are_the_outputs_of_splitmix64() -> None:
    # The reference generator started at 0, which is what mix64 makes of seed 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [mix_key(0, position) for position in range(4)] == expected


def test_keys_of_several_draws_are_those_of_each() -> None:
    draws = [(0, 0), (1, 2**63 - 1), (2**64 - 1, 17), (-5, 2**40)]
    streams = np.array([mix64(seed) for seed, _ in draws], np.uint64)
    keys = mix_keys(streams, np.array([position for _, position in draws]))
    assert keys.tolist() == [mix_key(seed, position) for seed, position in draws]


def test_neighbouring_seeds_and_positions_have_keys_of_their_own() -> None:
    seeds = [*range(100), *range(2**64 - 100, 2**64)]
    positions = [*range(50), *range(2**31 - 25, 2**31 + 25)]
    keys = {mix_key(seed, position) for seed in seeds for position in positions}
    assert len(keys) == len(seeds) * len(positions)
    # A seed that is one step of the generator away is another stream, not the same one shifted.
    assert mix_key(0x9E3779B97F4A7C15, 0) != mix_key(0, 1)


def test_numbers_depend_on_the_id_alone_not_on_its_company() -> None:
    everything = uniform(99, np.arange(40_000))  # several chunks
    some = np.array([39_999, 3, 16_384, 16_383, 3])
    assert uniform(99, some).tolist() == everything[some].tolist()
    assert uniform(99, np.arange(0)).shape == (0,)
    assert not np.array_equal(everything, uniform(100, np.arange(40_000)))


def test_uniforms_are_uniform_and_gumbels_follow_from_them() -> None:
    ids = np.arange(152_000)
    u = uniform(mix_key(1, 2), ids)
    assert u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 1520) ** 2 / 1520).sum() < 148.2  # chi-square, 99 degrees of freedom, 1 in 1000
    noise = gumbel(mix_key(1, 2), ids)
    slow = [-math.log(-math.log1p(-max(float(x), 2.0**-32))) for x in u[:2000]]
    np.testing.assert_allclose(noise[:2000], slow, rtol=1e-13, atol=1e-13)
    # Mean Euler's constant, variance pi squared over 6; 4 standard errors.
    assert abs(noise.mean() - 0.5772) < 4 * math.sqrt(1.645 / len(ids))


def test_gumbel_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = np.float32(2**31) * np.float32(4.6566127342e-10)
    assert largest < 1
    ends = np.array([0.0, largest], dtype=np.float32)
    monkeypatch.setattr("workers.counter_rng.uniform", lambda key, ids: ends)
    noise = gumbel(0, np.arange(2))
    assert np.isfinite(noise).all()
    assert noise[0] == GUMBEL_MAX
    assert noise[1] < -2.5


def test_draws_at_neighbouring_positions_are_independent() -> None:
    rows = [SamplingRow(Sampling(temperature=1.0, seed=7), position=n) for n in range(4001)]
    tokens = choose_tokens(torch.zeros(4001, 4), rows).tolist()
    pairs = Counter(itertools.pairwise(tokens))
    expected = 4000 / 16
    statistic = sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4))
    assert statistic < 37.70  # chi-square, 15 degrees of freedom, 1 in 1000
