"""What the host prepares for choosing tokens on a device; tests/kernels/cuda compares the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.device_sampling import Columns, _send, _settings, choose_tokens, is_simple
from workers.outputs import Sampling, TokenMask
from workers.sampling import SamplingRow

INF = float("inf")


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
        # The most likely is never cut off.
        (SamplingRow(Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)), True),
        (SamplingRow(mask=TokenMask(allowed=[1])), False),
        (SamplingRow(mask=TokenMask()), False),
        (SamplingRow(Sampling(temperature=1.0, top_k=1)), False),
        (SamplingRow(Sampling(temperature=1.0, top_p=0.5)), False),
        (SamplingRow(Sampling(temperature=1.0, min_p=0.5)), False),
        (SamplingRow(Sampling(temperature=1.0, typical_p=0.5)), False),
        (SamplingRow(Sampling(logit_bias={3: 0.5})), False),
        (SamplingRow(Sampling(repetition_penalty=1.1)), False),
        (SamplingRow(Sampling(frequency_penalty=0.1)), False),
        (SamplingRow(Sampling(presence_penalty=0.1)), False),
    ],
)
def test_which_rows_need_a_temperature_and_a_key_only(row: SamplingRow, simple: bool) -> None:
    assert is_simple(row) is simple


def test_rows_share_the_history_of_their_forward_and_send_what_they_have_of_it() -> None:
    spec = Sampling(
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=1.0,
        logit_bias={7: 2.0, 3: -INF, 10: 1.0},
    )
    shared = [4, 3, 4, 9, 4, 2**32]
    rows = [
        SamplingRow(spec, history=shared, prompt_len=1),
        SamplingRow(),
        SamplingRow(spec, history=shared, history_len=3, prompt_len=5),
        SamplingRow(spec, history=shared, history_len=2, prompt_len=3, path=[8, 2**33]),
        SamplingRow(spec),
    ]
    columns = _settings(rows, [0, 1, 2, 3, 4], vocab=10)
    assert columns["bias_rows"].tolist() == [0, 0, 2, 2, 3, 3, 4, 4]
    assert columns["bias_ids"].tolist() == [7, 3] * 4 and columns["biases"].tolist() == [2.0, -INF] * 4
    assert columns["history"].tolist() == [4, 3, 4, 9, 4, 10, 4, 3, 8, 10]
    assert columns["penalty_rows"].tolist() == [0, 2, 3, 4]
    assert columns["begins"].tolist() == [0, 0, 6, 10]
    assert columns["prompt_ends"].tolist() == [1, 5, 9, 10]
    assert columns["ends"].tolist() == [6, 3, 10, 10]
    assert columns["repetitions"].tolist() == [1.5] * 4
    assert columns["frequencies"].tolist() == [0.25] * 4 and columns["presences"].tolist() == [1.0] * 4


def test_masks_become_words_and_what_they_lack_is_forbidden() -> None:
    masks = [
        TokenMask(packed=b"\x01\x02\x03\x84\xff\xff"),
        TokenMask(packed=b"\x80"),
        TokenMask(allowed=[0, 33, 34]),
    ]
    rows = [SamplingRow(), *(SamplingRow(mask=mask) for mask in masks)]
    columns = _settings(rows, [0, 1, 2, 3], vocab=34)
    assert columns["mask_rows"].tolist() == [1, 2, 3]
    words = columns["words"].view(np.uint32)
    assert words.tolist() == [[0x84030201, 0xFFFF], [0x80, 0], [1, 2]]


def test_limits_of_greedy_rows_are_left_out() -> None:
    greedy = Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5, typical_p=0.5)
    drawn = Sampling(temperature=1.0, top_k=2**32 - 1, top_p=0.5, min_p=0.25, typical_p=0.75)
    columns = _settings([SamplingRow(greedy), SamplingRow(drawn)], [0, 1], vocab=10)
    limits = [columns[name].tolist() for name in ("top_k", "top_p", "min_p", "typical_p")]
    assert limits == [[0, 2**31 - 1], [1.0, 0.5], [0.0, 0.25], [1.0, 0.75]]


def test_what_is_sent_arrives_aligned() -> None:
    tables: list[Columns] = [
        {"a": np.arange(3, dtype=np.int32), "b": np.array([0.5])},
        {},
        {"c": np.arange(6, dtype=np.int64).reshape(2, 3).T, "d": np.zeros((0, 4), dtype=np.int32)},
    ]
    sent = _send(tables, torch.device("cpu"))
    assert [list(table) for table in sent] == [list(table) for table in tables]
    for arrays, tensors in zip(tables, sent, strict=True):
        for array, tensor in zip(arrays.values(), tensors.values(), strict=True):
            assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
            assert tensor.data_ptr() % 16 == 0


def test_shapes_and_types_are_checked() -> None:
    for logits in (torch.zeros(2, 5), torch.zeros(5), torch.zeros(1, 0), torch.zeros(1, 5).double()):
        with pytest.raises(ValueError, match="logits torch"):
            choose_tokens(logits, [SamplingRow()])
    with pytest.raises(ValueError, match="stride of 3"):
        choose_tokens(torch.zeros(5, 3).T, [SamplingRow()] * 3)
