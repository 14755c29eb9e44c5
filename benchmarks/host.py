"""What a step of a worker costs its host: `python -m benchmarks.host [--rows 1,8] [--profile]`.

The step loop, scheduler, page accounting, packing and the runner of CUDA graphs are real; the model is not
there: a replay launches nothing, and its logits are ready. So this is the time in which a GPU waits for
Python, or has to be kept busy meanwhile. Decodes of one token, all in each step. Options of the outputs:
greedy tokens, tokens drawn with top_p and a seed for each sequence, and log-probabilities. With run-ahead,
the next step is launched before the requests for it, and before the last one's results are read. Prints JSON:
milliseconds of CPU a step (the median over the steps, and the least, which a busy machine disturbs less) and
Python calls per row, which no clock disturbs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import machine
from workers.decodes import CHOSEN, OP_ID, Decodes, DecodesDone
from workers.executors.engine import Engine
from workers.kv.table import KvTable
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.operations import Command, Forward, Kind, OutputSpec, Result, Sampling
from workers.runners.adjusted_rows import AdjustedRows
from workers.runners.base import StepResult
from workers.runners.cuda_graph import CudaGraphRunner
from workers.runners.decode_buffers import DecodeBuffers
from workers.runners.device_queue import DeviceQueue
from workers.runners.graph_capture import Capture
from workers.sampling import SamplingRow
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

_PAGE_TOKENS = 16
_VOCABULARY = 32_000
_SETTLING_STEPS = 8
_COUNTED_STEPS = 4
_PREFILL_TOKENS = 8192
_GREEDY, _LOGPROBS = OutputSpec(), OutputSpec(top_logprobs=5)
# By sequence.
OUTPUTS: Mapping[str, Callable[[int], OutputSpec]] = {
    "greedy": lambda _: _GREEDY,
    "drawn": lambda sequence: OutputSpec(sampling=Sampling(temperature=0.8, top_p=0.9, seed=sequence)),
    "logprobs": lambda _: _LOGPROBS,
}


class ReplayedRunner(CudaGraphRunner):
    """The runner of CUDA graphs, with its buffers on the host. A replay launches nothing."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        queue: DeviceQueue | None = None,
        replay: Callable[[], None] = lambda: None,
        *,
        can_launch: bool = True,
    ) -> None:
        """`replay` takes the place of that of a graph; `can_launch`: see `Runner`."""
        model: Any = SimpleNamespace(has_hidden_states=False, max_lora_slots=0)
        super().__init__(model, weightless_kv(), max_rows=max_rows, max_seq_len=max_tokens, queue=queue)
        self._replay_of_graph, self.can_launch = replay, can_launch
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(max_rows, _VOCABULARY, generator=generator)
        self._tokens = self._table.argmax(-1)

    def step(
        self, inputs: ForwardInputs, rows: Sequence[SamplingRow], capture: RowCapture | None = None
    ) -> StepResult:
        """See `Runner.step`. Prefills are not launched either."""
        if self._is_decode(inputs, rows):
            return super().step(inputs, rows, capture)
        return StepResult(self._table[: len(rows)], self._tokens[: len(rows)])

    def _capture_one(self, capture: Capture, buffers: DecodeBuffers, bucket: int, *, lora: bool) -> Any:
        del capture, bucket, lora
        buffers.chosen.copy_(self._tokens)
        return SimpleNamespace(replay=self._replay_of_graph, logits=[self._table], experts=[])

    def _capture_second_graphs(self, captured: Any, capture: Capture) -> None:
        del capture
        device, queue = torch.device("cpu"), captured.buffers.queue
        captured.adjusted = AdjustedRows(self._max_rows, _VOCABULARY, device, queue)
        captured.adjust = dict.fromkeys(self._buckets, lambda: None)


def weightless_kv() -> Any:
    """Pages without memory."""
    return SimpleNamespace(page_size=_PAGE_TOKENS, device=torch.device("cpu"), copy_pages=lambda _: None)


class Host:
    """A step loop with sequences of one length, and their callers."""

    def __init__(
        self,
        rows: int,
        context: int,
        output: Callable[[int], OutputSpec],
        *,
        runs_ahead: bool,
        runner: ReplayedRunner | None = None,
    ) -> None:
        self._outputs = {sequence: output(sequence) for sequence in range(1, rows + 1)}
        self._runs_ahead = runs_ahead
        pages = rows * (context // _PAGE_TOKENS + 64)
        runner = runner or ReplayedRunner(rows, 2 * context)
        engine = Engine(KvTable(pages, _PAGE_TOKENS), weightless_kv(), runner)
        self.results: list[Result | DecodesDone] = []
        limits = (max(_PREFILL_TOKENS, rows), rows, rows)
        self.loop = StepLoop(
            engine,
            Scheduler(*limits),
            self.results.extend,
            2 * context if runs_ahead else 0,
            prelaunch_unrequested=runs_ahead,
        )
        self._lengths = dict.fromkeys(range(1, rows + 1), 0)
        self._tokens = dict.fromkeys(self._lengths, 0)
        for sequence in self._lengths:
            # No two share pages.
            prompt = [(sequence * 7919 + i) % _VOCABULARY for i in range(context - 1)]
            (done,) = self._run(Forward(sequence, sequence, 0, prompt), 1)
            assert isinstance(done, Forward), done
            self._lengths[sequence], self._tokens[sequence] = context - 1, done.outputs[-1].token_id

    def requests(self) -> Decodes:
        """Each sequence appends the token that was chosen last."""
        return Decodes.of(
            [
                Forward(
                    sequence,
                    sequence,
                    length,
                    [self._tokens[sequence]],
                    output=self._outputs[sequence],
                    kind=Kind.DECODE,
                    caller=sequence,
                    prelaunch=self._runs_ahead,
                )
                for sequence, length in self._lengths.items()
            ]
        )

    def step(self, requests: Decodes) -> list[Result | DecodesDone]:
        """They are answered, in one step."""
        return self._run(requests, len(requests))

    def took(self, results: Sequence[Result | DecodesDone]) -> None:
        """Note what was chosen."""
        for done in results:
            assert isinstance(done, DecodesDone), done
            for op_id, token in zip(*done.columns[[OP_ID, CHOSEN]].tolist(), strict=True):
                self._lengths[op_id] += 1
                self._tokens[op_id] = token

    def _run(self, command: Command | Decodes, count: int) -> list[Result | DecodesDone]:
        self.loop.submit([command])
        answered: list[Result | DecodesDone] = []
        while count > 0:
            self.loop.take()
            self.loop.flush()
            self.loop.step()
            self.loop.flush()
            count -= sum([len(one) if isinstance(one, DecodesDone) else 1 for one in self.results])
            answered += self.results
            self.results.clear()
        return answered


def measure(rows: int, context: int, output: str, *, runs_ahead: bool, steps: int) -> dict[str, Any]:
    """One line of the table."""
    host = Host(rows, context, OUTPUTS[output], runs_ahead=runs_ahead)
    times_ns = []
    for _ in range(_SETTLING_STEPS + steps):
        requests = host.requests()
        began_ns = time.thread_time_ns()
        results = host.step(requests)
        times_ns.append(time.thread_time_ns() - began_ns)
        host.took(results)
    del times_ns[:_SETTLING_STEPS]
    return {
        "rows": rows,
        "context": context,
        "output": output,
        "runs_ahead": runs_ahead,
        "cpu_ms": round(statistics.median(times_ns) / 1e6, 4),
        "least_cpu_ms": round(min(times_ns) / 1e6, 4),
        "calls_per_row": round(_calls(host) / _COUNTED_STEPS / rows, 1),
    }


def _calls(host: Host) -> int:
    """Calls of Python functions in a few steps."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(_COUNTED_STEPS):
        requests = host.requests()
        sys.setprofile(note)
        try:
            results = host.step(requests)
        finally:
            sys.setprofile(None)
        host.took(results)
    return count


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256], metavar="N,...")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768], metavar="TOKENS,...")
    parser.add_argument("--outputs", nargs="+", choices=OUTPUTS, default=[*OUTPUTS])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=1 << 21, help="skip what needs more tokens in all")
    parser.add_argument("--profile", action="store_true", help="print where the time of each line goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, lines = machine.times_s(), []
    for context in options.contexts:
        for rows in options.rows:
            if rows * context > options.max_tokens:
                continue
            for output in options.outputs:
                for runs_ahead in (False, True):
                    profile = cProfile.Profile() if options.profile else None
                    if profile is not None:
                        host = Host(rows, context, OUTPUTS[output], runs_ahead=runs_ahead)
                        for _ in range(options.steps):
                            requests = host.requests()
                            results = profile.runcall(host.step, requests)
                            host.took(results)
                        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(12)
                    line = measure(rows, context, output, runs_ahead=runs_ahead, steps=options.steps)
                    lines.append(line)
                    print(json.dumps(line), file=sys.stderr, flush=True)
    found = {"machine": machine.describe(), "lines": lines}
    print(json.dumps(found | {"disturbance": machine.disturbance(before, machine.times_s())}, indent=2))


if __name__ == "__main__":
    main()
