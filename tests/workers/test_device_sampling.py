"""Which rows a device chooses for without their filters; tests/kernels/cuda compares the tokens."""

from __future__ import annotations

import pytest

from workers.device_sampling import is_simple
from workers.outputs import Sampling, TokenMask
from workers.sampling import SamplingRow


@pytest.mark.parametrize(
    ("row", "simple"),
    [
        (SamplingRow(), True),
        (
            SamplingRow(
                Sampling(temperature=0.7, seed=2**64 - 1), position=2**40, history=[1, 2], prompt_len=1
            ),
            True,
        ),
        # The most likely is never filtered out.
        (SamplingRow(Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)), True),
        (SamplingRow(mask=TokenMask(allowed=[1])), False),
        (SamplingRow(mask=TokenMask()), False),
        (SamplingRow(Sampling(logit_bias={3: 0.5})), False),
        (SamplingRow(Sampling(repetition_penalty=1.1)), False),
        (SamplingRow(Sampling(frequency_penalty=0.1)), False),
        (SamplingRow(Sampling(presence_penalty=0.1)), False),
    ],
)
def test_which_rows_need_a_temperature_and_a_key_only(row: SamplingRow, simple: bool) -> None:
    assert is_simple(row) is simple
