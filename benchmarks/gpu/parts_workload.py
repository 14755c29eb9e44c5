"""Many requests at once, as nano-vllm measures itself: prompts and outputs of random lengths, tokens drawn.

The loop is the one of `workers.step_loop` without threads and wire: schedule, execute, complete.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.gpu.model import SEED, Bench, make_bench
from benchmarks.gpu.plan import PAGE_SIZE, Plan
from benchmarks.gpu.results import Row, row
from benchmarks.gpu.timing import spread, wall_ms
from workers.operations import Forward, Kind, OutputSpec, Sampling
from workers.scheduler import Scheduler

_TEMPERATURE = 0.6


@dataclass(slots=True)
class Request:
    """A prompt, how many tokens are wanted after it, and how many there are."""

    prompt: list[int]
    wanted: int
    made: int = 0


@dataclass(slots=True)
class _Counts:
    """Steps of a run, and how many of them were decodes only: those are replayed."""

    steps: int = 0
    decode_steps: int = 0
    output_tokens: int = 0


def make_requests(plan: Plan, vocab_size: int) -> list[Request]:
    """Seeded."""
    dice = random.Random(SEED)
    low, high = plan.request_tokens
    return [
        Request([dice.randrange(vocab_size) for _ in range(dice.randint(low, high))], dice.randint(low, high))
        for _ in range(plan.requests)
    ]


def measure(plan: Plan) -> list[Row]:
    """Output tokens per second of the whole workload, from the first prompt to the last token."""
    shape = plan.workload_shape
    requests = make_requests(plan, shape.vocab_size)
    pages = sum(-(-(len(request.prompt) + request.wanted) // PAGE_SIZE) for request in requests)
    bench = make_bench(plan, shape, (pages + len(requests)) * PAGE_SIZE)
    bench.executor.warmup()  # captures the graphs
    counts = _Counts()
    took_ms = wall_ms(lambda: _serve(bench, plan, requests, counts), plan.device)
    prompt_tokens = sum(len(request.prompt) for request in requests)
    return [
        row(
            f"{plan.requests} requests, {shape.name}",
            spread([took_ms]),
            output_tokens=counts.output_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens_per_s=1e3 * counts.output_tokens / took_ms,
            steps=counts.steps,
            decode_only_steps=counts.decode_steps,
            mean_step_ms=took_ms / counts.steps,
        )
    ]


def _serve(bench: Bench, plan: Plan, requests: list[Request], counts: _Counts) -> None:
    engine = bench.executor.engine
    scheduler = Scheduler(plan.step_tokens, plan.max_rows, plan.max_rows, PAGE_SIZE)
    for index, request in enumerate(requests):
        scheduler.add(_operation(index, 0, request.prompt, Kind.PREFILL))

    while len(scheduler):
        chunks = scheduler.next_batch(time.monotonic_ns(), engine.begin).chunks
        engine.execute(chunks)
        counts.steps += 1
        counts.decode_steps += all(chunk.op.kind is Kind.DECODE for chunk in chunks)
        for chunk in chunks:
            if not scheduler.advance(chunk):
                continue
            op, outputs = chunk.op, engine.complete(chunk.running, len(chunks)).outputs
            request = requests[op.sequence]
            request.made += 1
            counts.output_tokens += 1
            if request.made == request.wanted:
                engine.release(op.sequence)
                continue
            position = op.position + len(op.token_ids)
            scheduler.add(_operation(op.sequence, position, [outputs[-1].token_id], Kind.DECODE))


def _operation(sequence: int, position: int, tokens: list[int], kind: Kind) -> Forward:
    # An operation is known by its sequence: a request has one at a time.
    return Forward(
        op_id=sequence,
        sequence=sequence,
        position=position,
        token_ids=tokens,
        kind=kind,
        output=OutputSpec(sampling=Sampling(temperature=_TEMPERATURE, seed=sequence)),
        prompt_len=position + len(tokens),
    )
