"""When requests are meant to start."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.cli.load.generator import arrivals

RATES = st.floats(0.01, 1e4)


@given(rate=RATES, count=st.integers(1, 500))
def test_constant_arrivals_are_evenly_spaced_and_do_not_drift(rate: float, count: int) -> None:
    times = list(itertools.islice(arrivals("constant", rate, 0), count))
    assert times[0] == 0
    assert times[-1] == pytest.approx((count - 1) / rate, rel=1e-12)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap == pytest.approx(1 / rate, rel=1e-6) for gap in gaps)


@given(rate=RATES, seed=st.integers(0, 2**32))
def test_poisson_arrivals_come_at_the_rate_and_scatter_as_they_should(rate: float, seed: int) -> None:
    count = 4000
    times = list(itertools.islice(arrivals("poisson", rate, seed), count))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    # Mean and standard deviation of an exponential distribution are both 1 / rate: six standard errors.
    assert statistics.fmean(gaps) * rate == pytest.approx(1, abs=6 / count**0.5)
    assert statistics.pstdev(gaps) * rate == pytest.approx(1, abs=6 * (2 / count) ** 0.5)
