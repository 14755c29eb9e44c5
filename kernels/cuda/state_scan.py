"""The scan of a state for each head: Mamba 1 and 2 and the gated delta rule, which differ by constants.

    S = decay * S + outer(key, change),  y = query @ S, and in Mamba + direct * value

With DELTA the change is beta * (value - key @ (decay * S)), else step * value. A program has P columns of the
state of one head in registers, and scans the rows of an item one after the other, so that bits do not depend
on chunks, nor on what else is in the batch. Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T rows; N items; H heads; J heads of keys and queries; K width of these; V width of a
value; E the power of two not below K; P columns of a program.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant
from kernels.state_rows import StateRows

# Elements of a state in a program: 32 registers of each thread.
STATE_ELEMENTS = 4096
# Added to the sum of squares of a query or key, as in `kernels.gated_delta`.
UNIT_EPS = tl.constexpr(1e-6)


class Heads(NamedTuple):
    """How heads belong together.

    Attributes:
        heads: H.
        key_heads: J.
        adjacent: Head h has the keys h // adjacent % key_heads.
    """

    heads: int
    key_heads: int
    adjacent: int


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32 values, without a loss of precision where it is small.

    log(1 + e) is twice the inverse hyperbolic tangent of e / (2 + e), which is at most 1 / 3.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    square = z * z
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 11.0 + square * series
    series = 1.0 / 9.0 + square * series
    series = 1.0 / 7.0 + square * series
    series = 1.0 / 5.0 + square * series
    series = 1.0 / 3.0 + square * series
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + square * series)


@triton.jit
def step_state(state, query, key, value, step, rate, beta, DELTA: tl.constexpr, STEPS: tl.constexpr):
    """The state [E, P] after a row, and what its query reads of it [P]."""
    if STEPS == "head":
        state *= tl.exp(step * rate)
    elif STEPS == "key":
        state *= tl.exp(step * rate)[:, None]
    else:
        state *= tl.exp(step[None, :] * rate)
    change = (value - tl.sum(key[:, None] * state, 0)) * beta if DELTA else value * step
    state += key[:, None] * change[None, :]
    return state, tl.sum(query[:, None] * state, 0)


# A batch has its indices one after the other: their addresses may not compile another variant.
@triton.jit(do_not_specialize_on_alignment=["starts", "sources", "keeps"])
def state_scan_kernel(
    out,  # [T, H * V] float32 contiguous, written
    queries,  # [T, J * K]
    keys,  # [T, J * K]
    values,  # [T, H * V]
    steps,  # [T, ..] raw steps: of each head, of each element of a key, or of a value
    betas,  # [T, H]; not read without DELTA
    step_bias,  # as steps
    decays,  # [H], or [H, K, V] if steps are of values
    direct,  # [H], or [H * V] likewise; not read with DELTA
    states,  # [slots, H, K, V] float32, written
    starts,  # [N + 1], as of `StateRows`
    sources,  # [T]
    keeps,  # [T]
    row_stride,  # of queries, keys and values
    step_stride,  # of steps and betas
    least_step,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,  # what has a step: "head", "key" or "value"
    H: tl.constexpr,
    J: tl.constexpr,
    ADJACENT: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    EARLY: tl.constexpr,
):
    """P columns of the state of one head, over the rows of one item."""
    wait(EARLY)
    blocks: tl.constexpr = (V + P - 1) // P
    item, head = tl.program_id(0) // (H * blocks), tl.program_id(0) // blocks % H
    k, v = tl.arange(0, E), tl.program_id(0) % blocks * P + tl.arange(0, P)  # [E], [P]
    in_key, in_value = k < K, v < V
    tile = in_key[:, None] & in_value[None, :]  # [E, P]
    place = (head * K + k)[:, None] * V + v[None, :]  # of an element in the states of all heads
    first, end = tl.load(starts + item).to(tl.int64), tl.load(starts + item + 1).to(tl.int64)
    source = tl.load(sources + first).to(tl.int64)
    state = tl.load(states + source * (H * K * V) + place, mask=tile & (source >= 0), other=0.0)
    # What of its steps, and of the bias of these, is the program's.
    if STEPS == "head":
        step_place, has_step = head, True
        rate = tl.load(decays + head)
        straight = tl.load(direct + head)
    elif STEPS == "key":
        step_place, has_step = head * K + k, in_key
        rate = tl.load(decays + head)
        straight = 0.0
    else:
        step_place, has_step = head * V + v, in_value
        rate = tl.load(decays + place, mask=tile, other=0.0)
        straight = tl.load(direct + head * V + v, mask=in_value, other=0.0)
    bias = tl.load(step_bias + step_place, mask=has_step, other=0.0)
    key_place, value_place = head // ADJACENT % J * K + k, head * V + v
    for row in range(first, end):
        key = tl.load(keys + row * row_stride + key_place, mask=in_key, other=0.0).to(tl.float32)
        query = tl.load(queries + row * row_stride + key_place, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(values + row * row_stride + value_place, mask=in_value, other=0.0).to(tl.float32)
        raw_step = tl.load(steps + row * step_stride + step_place, mask=has_step, other=0.0)
        step = tl.maximum(softplus(raw_step.to(tl.float32) + bias), least_step)
        beta = 0.0
        if DELTA:
            key *= tl.rsqrt(tl.sum(key * key, 0) + UNIT_EPS)
            query *= tl.rsqrt(tl.sum(query * query, 0) + UNIT_EPS) * (K**-0.5)
            beta = 1.0 / (1.0 + tl.exp(-tl.load(betas + row * step_stride + head).to(tl.float32)))
        state, y = step_state(state, query, key, value, step, rate, beta, DELTA, STEPS)
        if not DELTA:
            y += straight * value
        tl.store(out + row * (H * V) + value_place, y, mask=in_value)
        kept = tl.load(keeps + row).to(tl.int64)
        tl.store(states + kept * (H * K * V) + place, state, mask=tile & (kept >= 0))


@cache
def _variant(heads: Heads, key_width: int, width: int, steps: str, *, is_delta: bool) -> Variant:
    padded = triton.next_power_of_2(key_width)
    constexprs = {
        "DELTA": is_delta,
        "STEPS": steps,
        "H": heads.heads,
        "J": heads.key_heads,
        "ADJACENT": heads.adjacent,
        "K": key_width,
        "V": width,
        "E": padded,
        "P": min(triton.next_power_of_2(width), max(1, STATE_ELEMENTS // padded)),
    }
    return Variant(state_scan_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def state_scan(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    steps: torch.Tensor,
    step_bias: torch.Tensor,
    decays: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
    heads: Heads,
    *,
    betas: torch.Tensor | None = None,
    direct: torch.Tensor | None = None,
    least_step: float = 0.0,
) -> torch.Tensor:
    """Launch `state_scan_kernel`; see there for the shapes. Checks nothing. Mutates `states`.

    Args:
        qkv: Queries, keys and values: columns of one tensor of rows.
        steps: Columns of rows, as `betas`, which are of the same tensor.
        step_bias: float32, as the others that follow.
        decays: Negative.
        states: Of each head.
        at: Which states the rows follow.
        heads: Of the layer.
        betas: With the delta rule.
        direct: Without it.
        least_step: What a step is at least.

    Returns:
        [T, H * V] float32
    """
    queries, keys, values = qkv
    _, _, key_width, width = states.shape
    out = torch.empty(len(values), heads.heads * width, dtype=torch.float32, device=values.device)
    if len(values) == 0:
        return out
    kinds = {heads.heads: "head", heads.heads * key_width: "key"}
    kind = "value" if decays.dim() > 1 else kinds[len(step_bias)]
    variant = _variant(heads, key_width, width, kind, is_delta=betas is not None)
    blocks = triton.cdiv(width, variant.constexprs["P"])
    variant.launch(
        ((len(at.starts) - 1) * heads.heads * blocks,),
        out,
        queries,
        keys,
        values,
        steps,
        steps if betas is None else betas,
        step_bias,
        decays,
        decays if direct is None else direct,
        states,
        at.starts,
        at.sources,
        at.keeps,
        values.stride(0),
        steps.stride(0),
        least_step,
    )
    return out
