"""A worker's step loop on a thread of its own, with the commands that a gateway sends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from workers.common.worker_pb2 import WorkerCommand
from workers.decodes import Column, Decodes
from workers.executors.engine import Engine
from workers.operations import Failed, Forward, Kind, Result
from workers.outputs import OutputSpec
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

# The loop ends when a device hangs only if somebody looks. Its first steps compile what they launch.
_ANSWER_S = 120.0


@dataclass
class Caller:
    """Who decodes a text on its own. The text's last token, at `position`, is not in its sequence.

    outputs: For its tokens in turns, all plain. One: then each next token is computed ahead.
    """

    sequence: int
    position: int
    token: int
    outputs: Sequence[OutputSpec]

    def next(self, op_id: int) -> Forward:
        """What it asks for."""
        return Forward(
            op_id,
            self.sequence,
            self.position,
            [self.token],
            output=self.outputs[self.position % len(self.outputs)],
            kind=Kind.DECODE,
            prompt_len=1,
            prelaunch=len(self.outputs) == 1,
        )


class LoopOnThread:
    """Started with the context, stopped at its end. The loop owns the engine meanwhile."""

    def __init__(self, engine: Engine, *, max_items: int, max_tokens: int, max_seq_tokens: int) -> None:
        """The limits of a step, and of a sequence, in tokens."""
        self._results: queue.SimpleQueue[Sequence[Result | Decodes]] = queue.SimpleQueue()
        scheduler = Scheduler(max_tokens, max_items, max_items)
        self.loop = StepLoop(engine, scheduler, self._emit, max_seq_tokens)
        self._thread = threading.Thread(target=self.loop.run, name="step loop", daemon=True)
        self._next_id = 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.stop()
        self._thread.join(_ANSWER_S)

    def _emit(self, results: Sequence[Result | Decodes]) -> None:
        # The loop uses its list again.
        self._results.put(list(results))

    def op_id(self) -> int:
        """A new one."""
        self._next_id += 1
        return self._next_id

    def ask(self, commands: Sequence[Forward | Decodes | WorkerCommand]) -> dict[int, Result | int]:
        """Sends them together, and waits: the result of each, of plain decodes the chosen token, by op_id.

        Raises RuntimeError if one failed, and TimeoutError if the loop does not answer.
        """
        wanted: set[int] = set()
        for command in commands:
            wanted |= set(command.column(Column.OP_ID)) if isinstance(command, Decodes) else {command.op_id}
        self.loop.submit(commands)
        found: dict[int, Result | int] = {}
        while wanted - found.keys():
            found |= self._next_results()
        return found

    def _next_results(self) -> dict[int, Result | int]:
        try:
            results = self._results.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise TimeoutError(f"the step loop has not answered for {_ANSWER_S:.0f} s") from None
        found: dict[int, Result | int] = {}
        for result in results:
            if isinstance(result, Decodes):
                found |= zip(*result.columns[[Column.OP_ID, Column.CHOSEN]].tolist(), strict=True)
            elif isinstance(result, Failed):
                raise RuntimeError(  # noqa: TRY004 - no wrong type
                    f"operation {result.op_id} failed: {result.reason}"
                )
            else:
                found[result.op_id] = result  # type: ignore[union-attr]
        return found

    def keep_asking(self, callers: Sequence[Caller], tokens: int) -> None:
        """Each caller asks for its next token when it has the last one, until the first has so many more."""
        waiting, asked, end = list(callers), dict[int, Caller](), callers[0].position + tokens
        while asked or callers[0].position < end:
            if callers[0].position < end:
                forwards = [caller.next(self.op_id()) for caller in waiting]
                asked |= {forward.op_id: caller for forward, caller in zip(forwards, waiting, strict=True)}
                waiting = []
                if forwards:
                    self.loop.submit([Decodes.of(forwards)])
            for op_id, result in self._next_results().items():
                if (caller := asked.pop(op_id, None)) is None:
                    continue  # of what else runs meanwhile
                caller.token, caller.position = _chosen(result), caller.position + 1
                waiting.append(caller)

    def decode(
        self,
        sequences: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        output: OutputSpec,
        *,
        ahead: bool = True,
    ) -> list[int]:
        """One token of each; `ahead`: they will be continued with what is chosen. Returns the chosen ones."""
        forwards = [
            Forward(
                self.op_id(),
                sequence,
                position,
                [token],
                output=output,
                kind=Kind.DECODE,
                prompt_len=1,
                prelaunch=ahead,
            )
            for sequence, position, token in zip(sequences, positions, tokens, strict=True)
        ]
        plain = output.is_plain
        found = self.ask([Decodes.of(forwards)] if plain else forwards)
        results = [found[forward.op_id] for forward in forwards]
        return [_chosen(one) for one in results]


def _chosen(result: Result | int) -> int:
    if isinstance(result, int):
        return result
    assert isinstance(result, Forward)
    return result.outputs[-1].token_id


def packed_mask(vocab_size: int, every: int) -> bytes:
    """A mask of each `every`-th token, one bit a token, least significant first."""
    allowed = np.zeros(-(-vocab_size // 8) * 8, np.bool_)
    allowed[:vocab_size:every] = True
    return np.packbits(allowed, bitorder="little").tobytes()
