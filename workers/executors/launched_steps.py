"""Launches steps of plain decodes on a GPU, and reads their results later.

Meanwhile the next step can be launched behind: `workers.steps_in_flight` decides when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.batch import HistoryOf, pack, sampling_rows
from workers.decodes import NO_DECODES, Column, Decodes
from workers.executors.engine import Engine
from workers.executors.step_results import row_outputs
from workers.operations import Chunk
from workers.runners.base import After, LaunchedStep, raise_if_lost
from workers.sampling import SamplingError, SamplingRow

# In place of a token that only the device knows. It is outside of every vocabulary.
_UNKNOWN_TOKEN = -1


@dataclass(slots=True)
class StepInFlight:
    """A step of plain decodes that was launched, and whose results are not read yet.

    Its chunks of prompts have no results and count as computed, since whatever reads their KV runs later on
    the device.

    Attributes:
        decodes: First those that continue decodes of the previous step (their tokens are set when its results
            are read), then those that have joined.
        joined: The latter, as they were given.
        places: [N] int64, which decode of the previous step each continues, as in `After`.
        chunks: Chunks of prompts in the same forward.
    """

    decodes: Decodes
    launched: LaunchedStep
    launched_ns: int
    joined: Decodes = NO_DECODES
    places: NDArray[np.int64] | None = None
    chunks: Sequence[Chunk] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens of decodes and chunks."""
        return self.decodes.size + sum([chunk.count for chunk in self.chunks])


def launch(engine: Engine, decodes: Decodes, chunks: Sequence[Chunk] = ()) -> StepInFlight | None:
    """Launches a step of plain decodes that have begun, and of `chunks`, without waiting for it.

    The step must be finished later. All chunks must be `may_be_launched`; they count as computed at once.

    Returns None, without an effect, if the runner cannot launch it.
    """
    launched_ns = time.monotonic_ns()
    launched = _launched(engine, decodes, chunks, sampling_rows((), decodes, engine.history_of), None)
    if launched is None:
        return None
    step = StepInFlight(decodes, launched, launched_ns, chunks=chunks)
    engine.stats.step_begins(step.tokens, launched_ns)
    return step


def launch_after(
    engine: Engine,
    step: StepInFlight,
    decodes: Decodes,
    joining: Decodes = NO_DECODES,
    chunks: Sequence[Chunk] = (),
) -> StepInFlight | None:
    """As `launch`, behind the step in flight, whose chosen tokens are not known yet.

    Args:
        step: The step in flight.
        decodes: The next decodes of some of its sequences, in their order there.
        joining: Decodes of other sequences, which have begun.
        chunks: As for `launch`.

    Returns None, without an effect, if a page is missing for one of `decodes`, or the runner cannot launch
    it.
    """
    decodes.rows, begun = engine.kv_table.reserve_next(
        decodes.sequences, decodes.columns[Column.POSITION], ahead=1
    )
    if not all(begun.tolist()):
        return None
    places, rows = None, list[SamplingRow]()
    if joining.size or decodes.size < step.decodes.size:
        where = {sequence: place for place, sequence in enumerate(step.decodes.sequences)}
        places = np.array([where[one] for one in decodes.sequences] + [-1] * joining.size)
        if joining.size:
            both = Decodes.joined([decodes, joining])
            both.rows = np.concatenate([decodes.rows, joining.rows])
            decodes = both
        rows = sampling_rows((), decodes, _history_after(engine, step, places))
    launched_ns = time.monotonic_ns()
    launched = _launched(engine, decodes, chunks, rows, After(step.launched, places))
    if launched is None:
        return None
    return StepInFlight(decodes, launched, launched_ns, joining, places, chunks)


def finish(engine: Engine, step: StepInFlight, following: StepInFlight | None = None) -> None:
    """Waits for a launched step, and commits its tokens. `following`: the step launched after it.

    Raises a SamplingError if rows have no token. After any error nothing has been appended, and the tokens of
    `following` are dropped.
    """
    items, outputs = step.decodes.size + len(step.chunks), None
    try:
        chosen = step.launched.chosen()
        if not all(spec.is_token_only for spec in step.decodes.distinct_outputs):
            with step.launched.logits() as logits:
                rows = sampling_rows((), step.decodes, engine.history_of)
                outputs = row_outputs(logits, chosen, rows, step.decodes.outputs)
    except Exception as error:
        engine.stats.step_ends(0)
        raise_if_lost(error)
        if following is not None:
            with suppress(SamplingError):
                following.launched.chosen()
        raise
    engine.stats.step_ends(items)
    engine.append_decodes(step.decodes, chosen.numpy(), outputs, items)
    if following is not None:
        tokens, chosen_now = following.decodes.columns[Column.TOKEN], step.decodes.columns[Column.CHOSEN]
        if following.places is None:
            tokens[:] = chosen_now
        else:
            continues = following.places >= 0
            tokens[continues] = chosen_now[following.places[continues]]
        following.decodes.started_ns = time.monotonic_ns()
        # Its time counts from its launch, although the previous step ran until now: too long rather than
        # short.
        engine.stats.step_begins(following.tokens, following.launched_ns)


def _launched(
    engine: Engine,
    decodes: Decodes,
    chunks: Sequence[Chunk],
    rows: Sequence[SamplingRow],
    after: After | None,
) -> LaunchedStep | None:
    page_size = engine.kv.page_size
    keeps_logits = not all(spec.is_token_only for spec in decodes.distinct_outputs)
    inputs = pack((), page_size, decodes, engine.kv_table.page_tables.of(decodes.rows))
    beside = pack(chunks, page_size) if chunks else None
    try:
        launched = engine.runner.launch(inputs, rows, chunks=beside, keeps_logits=keeps_logits, after=after)
    except Exception as error:
        raise_if_lost(error)
        raise
    for chunk in chunks if launched is not None else ():
        engine.append(chunk, (), decodes.size + len(chunks), {})
    return launched


def _history_after(engine: Engine, step: StepInFlight, places: NDArray[np.int64]) -> HistoryOf:
    """As `Engine.history_of`, behind the step in flight. `places`: see `After`."""

    def history_of(decodes: Decodes, index: int) -> NDArray[np.int64]:
        place = places.item(index)
        if place < 0:
            return engine.history_of(decodes, index)
        # The decode in flight is not appended yet, and the token that it chooses is not known.
        return np.append(engine.history_of(step.decodes, place), _UNKNOWN_TOKEN)

    return history_of
