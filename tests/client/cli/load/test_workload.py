"""What requests ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.cli.load.workload import Lengths, Request, Workload, read_trace
from quire.cli.terminal import WrongUsage

VOCAB = 50


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("64-512", 64, 512), ("512,64,128", 64, 512), ("0", 0, 0)]
)
def test_lengths_are_numbers_ranges_and_lists(text: str, low: int, high: int) -> None:
    lengths = Lengths.parse(text)
    assert (lengths.low, lengths.high) == (low, high)
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize("text", ["", "-1", "5-2", "a", "1,", "1-2-3", "1.5"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Lengths.parse(text)


@given(
    low=st.integers(1, 40),
    more=st.integers(0, 40),
    prefix=st.integers(0, 60),
    prefixes=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_requests_have_the_lengths_and_the_prefixes_that_were_asked_for(
    low: int, more: int, prefix: int, prefixes: int, seed: int
) -> None:
    workload = Workload(seed, Lengths(low, low + more), Lengths(3, 5), Lengths(prefix, prefix), prefixes)
    seen: dict[str | None, list[int]] = {}
    for index in range(30):
        request = workload.request(index)
        assert request == workload.request(index)
        prompt = workload.prompt(request, VOCAB)
        assert low <= len(prompt) == request.prompt_tokens <= low + more
        assert 3 <= request.output_tokens <= 5
        assert all(0 <= token < VOCAB for token in prompt)
        # Never the whole prompt, which would leave nothing to compute.
        shared = min(prefix, len(prompt) - 1)
        assert request.shared_prefix_tokens == shared
        longest = seen.setdefault(request.shared_prefix, prompt[:shared])
        both = min(len(longest), shared)
        assert prompt[:both] == longest[:both]
        if shared > len(longest):
            seen[request.shared_prefix] = prompt[:shared]
    assert len(seen) <= prefixes


def test_a_trace_is_read_in_the_order_of_its_times_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 2, "prompt_tokens": 30, "output_tokens": 4, "shared_prefix": "a"},
        {"at_s": 0.5, "prompt_tokens": 10, "output_tokens": 2},
        {"at_s": 3, "prompt_tokens": 8, "output_tokens": 1, "shared_prefix": 7, "shared_prefix_tokens": 99},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    trace = read_trace(path, 16)
    assert trace == (
        Request(0.5, 10, 2),
        Request(2, 30, 4, "a", 16),
        Request(3, 8, 1, "7", 99),
    )
    workload = Workload(0, Lengths(1, 1), Lengths(1, 1), trace=trace)
    assert [workload.request(index).prompt_tokens for index in range(4)] == [10, 30, 8, 10]
    assert [workload.request(index).shared_prefix_tokens for index in range(3)] == [0, 16, 7]
    assert workload.longest_tokens == 34


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "trace:2: "),
        ("[]", "must be an object"),
        ('{"at_s": 1, "prompt_tokens": 3}', "output_tokens must be a whole number from 1, not None"),
        ('{"at_s": -1, "prompt_tokens": 3, "output_tokens": 1}', "at_s must be a number from 0"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be"),
        ('{"at_s": 1, "prompt_tokens": 2.5, "output_tokens": 1}', "prompt_tokens must be"),
        ('{"at_s": true, "prompt_tokens": 2, "output_tokens": 1}', "at_s must be"),
        ('{"at_s": NaN, "prompt_tokens": 2, "output_tokens": 1}', "at_s must be"),
        ('{"at": 1}', "at is not known"),
    ],
)
def test_a_bad_trace_is_refused_with_the_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(WrongUsage, match="trace:2: ") as refused:
        read_trace(path, 0)
    assert says in str(refused.value)
