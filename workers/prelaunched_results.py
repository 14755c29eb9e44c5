"""The results of prelaunched decodes, from when they are computed until a request is answered with them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from workers.decodes import Column, Decodes
from workers.operations import Forward
from workers.outputs import RowOutput


class Ready(NamedTuple):
    """The result of a prelaunched decode, which was computed at `since_ns`."""

    position: int
    token_id: int
    output: RowOutput
    compute_ns: int
    batch_items: int
    since_ns: int


# By sequence, in order of their positions. The sequence that has been ready for longest comes first.
ReadyResults = dict[int, deque[Ready]]


def keep(ready: ReadyResults, decodes: Decodes) -> None:
    """Add the results of decodes that are computed."""
    of_results = [Column.POSITION, Column.CHOSEN, Column.COMPUTE_NS, Column.BATCH_ITEMS]
    positions, tokens, compute_ns, items = decodes.columns[of_results].tolist()
    outputs = decodes.row_outputs or map(RowOutput, tokens)
    results = map(Ready, positions, tokens, outputs, compute_ns, items, repeat(time.monotonic_ns()))
    for sequence, result in zip(decodes.sequences, results, strict=False):
        ready.setdefault(sequence, deque()).append(result)


def answer(ready: ReadyResults, requests: Decodes) -> tuple[Sequence[Decodes | Forward], Decodes]:
    """Take results for requests, all of which have some: as many as their `prelaunch` allows.

    Mutates `requests`. Returns the answers, and the last decode of each.
    """
    taken = [
        _take(ready, sequence, most)
        for sequence, most in zip(requests.sequences, requests.column(Column.PRELAUNCH), strict=True)
    ]
    last, columns = [results[-1] for results in taken], requests.columns
    columns[Column.CHOSEN] = [result.token_id for result in last]
    columns[Column.COMPUTE_NS] = [sum(result.compute_ns for result in results) for results in taken]
    columns[Column.BATCH_ITEMS] = [result.batch_items for result in last]
    if not all(spec.is_token_only for spec in requests.distinct_outputs):
        requests.row_outputs = [result.output for result in last]
    has_more = np.array([len(results) > 1 for results in taken], np.bool_)
    if not any(has_more):
        return (requests,), requests
    answers: list[Decodes | Forward] = [requests.take(~has_more)] if not all(has_more) else []
    for index in has_more.nonzero()[0].tolist():
        answers.append(_with_results(requests.forward(index), taken[index]))
        # The request becomes the last decode of its answer.
        columns[Column.POSITION, index] = last[index].position
        columns[Column.TOKEN, index] = taken[index][-2].token_id
        columns[Column.PRELAUNCH, index] -= len(taken[index]) - 1
    return answers, requests


def _take(ready: ReadyResults, sequence: int, most: int) -> list[Ready]:
    results = ready[sequence]
    taken = [results.popleft() for _ in range(min(max(1, most), len(results)))]
    if not results:
        del ready[sequence]
    return taken


def _with_results(request: Forward, results: Sequence[Ready]) -> Forward:
    """A requested decode with its result, and with those of the decodes after it."""
    request.outputs = [result.output for result in results]
    request.appended = [result.token_id for result in results[:-1]]
    request.kept = request.steps = len(results)
    request.compute_ns = sum(result.compute_ns for result in results)
    request.batch_items = results[-1].batch_items
    return request
