"""The compiled random numbers are those of their definition, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import philox
from tests.kernels.instruction_sets import need_compiled
from workers.counter_rng import uniform_reference


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    need_compiled()


KEYS = st.integers(0, 2**64 - 1)


@given(KEYS, st.lists(st.integers(0, 2**32 - 1), max_size=200))
def test_any_ids_under_any_key(key: int, ids: list[int]) -> None:
    token_ids = np.array(ids, dtype=np.int64)
    found = philox.uniform(key, token_ids)
    assert found.dtype == np.float32
    assert found.tobytes() == uniform_reference(key, token_ids).tobytes()


def test_ids_of_another_width_are_the_same_ids() -> None:
    narrow = np.arange(1000, dtype=np.int32)
    assert philox.uniform(5, narrow).tobytes() == uniform_reference(5, narrow).tobytes()  # type: ignore[arg-type]


@given(KEYS)
def test_every_other_id_of_a_vocabulary(key: int) -> None:
    token_ids = np.arange(100_000, dtype=np.int64)[::2]
    assert philox.uniform(key, token_ids).tobytes() == uniform_reference(key, token_ids).tobytes()
