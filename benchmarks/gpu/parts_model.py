"""Decode and prefill of one model, through the executor and its graph runner.

A decode step is timed twice. With the *host in the loop*, it is a call of `batch_decode`: pages, packing,
launch, reading the tokens. *Device-fed*, the graph is replayed on the tokens that it chose itself: what the
device alone needs. The difference is what the host adds.
"""

from __future__ import annotations

import random

from benchmarks.gpu.model import Bench, decode_inputs, make_bench
from benchmarks.gpu.plan import PAGE_SIZE, Plan
from benchmarks.gpu.results import Roof, Row, row
from benchmarks.gpu.timing import Spread, Timer, spread, wall_ms
from benchmarks.shapes import Shape
from workers.operations import GREEDY
from workers.sampling import SamplingRow

# Of the design, by batch and model: shares of the roofline.
_DECODE_GOALS = {("qwen3-0.6b", 1): 0.4, ("qwen3-8b", 1): 0.75}
_DECODE_GOAL_AT_64 = 0.65
_HOST_GOAL = 0.03
_PREFILL_GOAL = 0.65
_PREFILL_GOAL_TOKENS = 2048


def measure(plan: Plan, timer: Timer, roof: Roof, shape: Shape) -> list[Row]:
    """All of it for one shape."""
    longest = plan.decode_context + plan.decode_steps + 2 * PAGE_SIZE
    bench = make_bench(
        plan, shape, max(max(plan.decode_batches) * longest, max(plan.prefill_tokens) + PAGE_SIZE)
    )
    rows = [_decode(plan, timer, roof, bench, batch) for batch in plan.decode_batches]
    return rows + [_prefill(plan, roof, bench, tokens) for tokens in plan.prefill_tokens]


def _decode(plan: Plan, timer: Timer, roof: Roof, bench: Bench, batch: int) -> Row:
    shape, steps = bench.shape, plan.decode_steps
    rounds = max(1, plan.repeats // 4)
    sequences = bench.fill(batch, plan.decode_context)
    _host_round(bench, plan, batch)  # captures the graphs, once for all batches
    in_loop = spread([_host_round(bench, plan, batch) for _ in range(rounds)])

    for sequence in sequences:
        bench.table.reserve(sequence, steps + 1)
    inputs, greedy = decode_inputs(sequences), [SamplingRow()] * batch
    fed = []
    for _ in range(rounds):
        bench.runner.step(inputs, greedy)
        fed.append(timer.once(lambda: bench.runner.run_ahead(steps, batch)) / steps)
    bench.release(batch)

    device = spread(fed)
    roofline_ms = 1e3 * shape.decode_bytes(batch, plan.decode_context + steps // 2) / roof["bytes_per_s"]
    exposed_ms = in_loop["median"] - device["median"]
    goal = _DECODE_GOALS.get((shape.name, batch), _DECODE_GOAL_AT_64 if batch == 64 else None)
    goals = [("share_of_host", _HOST_GOAL, False)]
    if goal is not None:
        goals.insert(0, ("share_of_roofline", goal, True))
    return row(
        f"decode, batch {batch}, {plan.decode_context} tokens",
        in_loop,
        *goals,
        tokens_per_s=1e3 * batch / in_loop["median"],
        share_of_roofline=roofline_ms / in_loop["median"],
        device_ms=device["median"],
        device_min_ms=device["min"],
        device_max_ms=device["max"],
        device_tokens_per_s=1e3 * batch / device["median"],
        device_share_of_roofline=roofline_ms / device["median"],
        host_ms=exposed_ms,
        share_of_host=exposed_ms / in_loop["median"],
    )


def _host_round(bench: Bench, plan: Plan, batch: int) -> float:
    """Milliseconds of a step, the mean of a round. Leaves the sequences as they were."""
    executor = bench.executor
    tokens = list(range(batch))

    def steps() -> None:
        for _ in range(plan.decode_steps):
            outputs = executor.batch_decode([(key, token, GREEDY) for key, token in enumerate(tokens)])
            tokens[:] = [output.token_id for output in outputs]

    took_ms = wall_ms(steps, plan.device)
    for key in range(batch):
        executor.truncate_kv(key, plan.decode_context)
    return took_ms / plan.decode_steps


def _prefill(plan: Plan, roof: Roof, bench: Bench, tokens: int) -> Row:
    ms = _prefill_ms(plan, bench, tokens)
    flops = bench.shape.prefill_flops(1, tokens) / (ms["median"] / 1e3)
    goals = [("share_of_matmul", _PREFILL_GOAL, True)] if tokens >= _PREFILL_GOAL_TOKENS else []
    return row(
        f"prefill, {tokens} tokens",
        ms,
        *goals,
        tokens_per_s=1e3 * tokens / ms["median"],
        tflop_per_s=flops / 1e12,
        share_of_matmul=flops / roof["flops_per_s"],
    )


def _prefill_ms(plan: Plan, bench: Bench, tokens: int) -> Spread:
    """Through the executor. Each time another prompt, so that none of it is found in the pages."""
    dice, found = random.Random(tokens), []
    for _ in range(1 + max(1, plan.repeats // 2)):
        prompt = [dice.randrange(bench.shape.vocab_size) for _ in range(tokens)]
        found.append(wall_ms(lambda prompt=prompt: bench.executor.prefill(0, prompt), plan.device))  # type: ignore[misc]
        bench.release(1)
    return spread(found[1:])
