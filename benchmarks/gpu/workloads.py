"""The workloads on a GPU, the most important first, and their sizes there and in a rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.shapes import SHAPES
from benchmarks.plan import Comparison, Entry, Workload
from benchmarks.shapes import DEFAULT_SHAPE, Shape

# Goals: shares of the roofline by model and batch, and of the device-only speed with the host in the loop.
_DECODE_GOALS = {("qwen3-0.6b", 1): 0.4, ("qwen3-8b", 1): 0.75}
_DECODE_GOAL_AT_64 = 0.65
_HOST_GOAL = 0.97
_ATTENTION_GOAL = 0.8
_PREFILL_GOAL = 0.65
_PREFILL_GOAL_TOKENS = 2048
# From this size on, the start and end of a kernel take little time compared with reading.
_LARGE_KV_BYTES = 200e6
# As in `benchmarks.gpu.kernels`, which loads Triton.
_PLACES = ("qkv", "output", "gate_up", "down")
_MOST_FUSED_ROWS = 16
_ROW_KERNELS = ("rms_norm", "add_rms_norm", "gated_activation", "rope_kv_write")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run that takes minutes on one H200: tokens, rows or counts.

    Attributes:
        kernel_shape: The model whose widths the kernels by themselves get.
        decode_attention: (batch, context) of the decode kernel.
        prefill_attention: (new tokens, context with them) of the prefill kernel.
        shapes: Models, each a workload of its own.
        families: The same, of other families, for which there are no goals.
        request_tokens: Prompts and outputs of the many requests (low, high).
        static_ways: How transformers runs beside us.
    """

    kernel_shape: str = "qwen3-8b"
    row_tokens: tuple[int, ...] = (1, 64, 4096)
    # From the fourth on the KV has at least 200 MB.
    decode_attention: tuple[tuple[int, int], ...] = (
        *((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024)),
        *((8, 8192), (2, 32_768)),
    )
    # Decodes of different lengths: (batch, context) and the contexts of others beside them.
    mixed_lengths: tuple[tuple[int, ...], ...] = ((31, 1024, 32_768), (28, 1024, *[32_768] * 4))
    prefill_attention: tuple[tuple[int, int], ...] = ((2048, 2048), (8192, 8192), (2048, 32_768))
    sampling_rows: tuple[int, ...] = (1, 64, 256)
    product_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    shapes: tuple[str, ...] = (DEFAULT_SHAPE, "qwen3-8b", "qwen3-14b")
    families: tuple[str, ...] = ("qwen3-30b-a3b", "gemma3-12b")
    decode_batches: tuple[int, ...] = (1, 8, 32, 64, 256)
    decode_context: int = 1024
    prefill_tokens: tuple[int, ...] = (512, 2048, 8192)
    # Decodes beside a chunk of a prompt: (batch, tokens).
    mixed_steps: tuple[tuple[int, int], ...] = ((32, 512), (64, 2048))
    profiled: tuple[str, tuple[int, ...]] = ("qwen3-8b", (1, 64))
    served: tuple[int, ...] = (1, 32)
    served_steps: int = 64
    requests: int = 256
    request_tokens: tuple[int, int] = (100, 1024)
    step_tokens: int = 8192
    static_batches: tuple[int, ...] = (1, 32)
    static_ways: tuple[str, ...] = ("graph", "eager", "compiled")
    rounds: tuple[int, int] = (3, 8)


# A fraction of each, for Triton's interpreter.
REHEARSAL = Sizes(
    kernel_shape="rehearsal",
    row_tokens=(1, 3),
    decode_attention=((2, 40),),
    mixed_lengths=((2, 8, 40),),
    prefill_attention=((20, 40),),
    sampling_rows=(2,),
    product_rows=(2, 20),
    shapes=("rehearsal",),
    families=("rehearsal-experts",),
    decode_batches=(2,),
    decode_context=16,
    prefill_tokens=(24,),
    mixed_steps=((2, 12),),
    profiled=("rehearsal", (2,)),
    served=(1, 2),
    served_steps=3,
    requests=3,
    request_tokens=(3, 8),
    step_tokens=32,
    static_batches=(2,),
    static_ways=("graph",),
    rounds=(1, 1),
)


def all_workloads(*, rehearsal: bool) -> list[Workload]:
    """Every workload, in the order in which they run until the time limit."""
    sizes = REHEARSAL if rehearsal else Sizes()
    models = [_model(sizes, SHAPES[name]) for name in sizes.shapes]
    others = [_without_goals(_model(sizes, SHAPES[name])) for name in sizes.families]
    kernels = [_attention(sizes), _products(sizes), _requests(sizes), _rows(sizes), _sampling(sizes)]
    found = [*models[:2], *kernels, *models[2:], _static(sizes), *others]
    found = [replace(workload, rounds=sizes.rounds) for workload in found]
    # Where the time goes is asked next after how much it is.
    found.insert(len(models[:2]), _profile(sizes))
    # It needs what only a gateway does, which is hidden in a rehearsal.
    return [*found, replace(_server(sizes), optional=rehearsal)]


def _model(sizes: Sizes, shape: Shape) -> Workload:
    """Decodes with the host in the loop and with inputs from the device, and prefills."""
    entries, comparisons = [], []
    for batch in sizes.decode_batches:
        # A turn fills a page of 16 tokens, so that on average half a page precedes its tokens.
        read = shape.decode_bytes(batch, sizes.decode_context + 8)
        goal = _DECODE_GOALS.get((shape.name, batch), _DECODE_GOAL_AT_64 if batch == 64 else None)
        host = Entry(
            f"decode, batch {batch}", "device", "decode", {"batch": batch}, bytes_read=read, goal=goal
        )
        fed = replace(
            host, label=f"{host.label}, device-fed", arguments={"batch": batch, "fed": True}, goal=None
        )
        ahead = replace(host, label=f"{host.label}, launched ahead", method="decode_ahead", goal=None)
        entries += [host, ahead, fed]
        comparisons.append(Comparison(host.label, fed.label))
        comparisons.append(Comparison(ahead.label, fed.label, _HOST_GOAL))
    for tokens in sizes.prefill_tokens:
        goal = _PREFILL_GOAL if tokens >= _PREFILL_GOAL_TOKENS else None
        flops, arguments = shape.prefill_flops(1, tokens), {"tokens": tokens}
        entries.append(
            Entry(f"prefill, {tokens} tokens", "device", "prefill", arguments, flops=flops, goal=goal)
        )
    for batch, tokens in sizes.mixed_steps:
        label, arguments = f"{batch} decodes and {tokens} tokens", {"batch": batch, "tokens": tokens}
        entries.append(Entry(label, "device", "mixed", arguments))
    prepare = _load(shape.name, sizes, max(sizes.decode_batches), max(sizes.prefill_tokens))
    title = f"{shape.name}, {sizes.decode_context} tokens of context"
    return Workload(shape.name, title, "step", entries, comparisons, prepare=prepare, warm={})


def _profile(sizes: Sizes) -> Workload:
    """Kernels of a replayed step by time, in one round: figures by name are of one run."""
    name, batches = sizes.profiled
    entries = [Entry(f"step, batch {batch}", "device", "profile", {"batch": batch}) for batch in batches]
    title = f"{name}: kernels of a replayed step, {sizes.decode_context} tokens of context"
    prepare = _load(name, sizes, max(batches), 0)
    return Workload("profile", title, "step", entries, prepare=prepare, rounds=(1, 1))


def _server(sizes: Sizes) -> Workload:
    """A whole server: a call for each sequence, and one for all of them."""
    entries = [
        Entry(
            f"{mode}, batch {batch}",
            "server",
            "decode",
            {"steps": sizes.served_steps, "mode": mode, "batch": batch},
        )
        for batch in sizes.served
        for mode in ("unary", "batch")
    ]
    title = f"{sizes.shapes[0]} behind a gateway, {sizes.decode_context} tokens of context"
    arguments = {"batch": max(sizes.served), "context_tokens": sizes.decode_context}
    return Workload("server", title, "step", entries, prepare=("prepare_decode", arguments), warm={})


def _without_goals(workload: Workload) -> Workload:
    entries = [replace(entry, goal=None) for entry in workload.entries]
    comparisons = [replace(comparison, goal=None) for comparison in workload.comparisons]
    return replace(workload, entries=entries, comparisons=comparisons)


def _static(sizes: Sizes) -> Workload:
    """Comparison with transformers, at the same batch and context."""
    shape, entries, comparisons = sizes.shapes[0], [], []
    for batch in sizes.static_batches:
        ours = Entry(f"Quire, batch {batch}", "device", "decode", {"batch": batch})
        entries.append(ours)
        for way in sizes.static_ways:
            label = f"transformers, {way}, batch {batch}"
            entries.append(replace(ours, label=label, peer=f"static-{way}", ours=False))
            comparisons.append(Comparison(ours.label, label))
    prepare = _load(shape, sizes, max(sizes.static_batches), 0)
    title = f"{shape} beside transformers with a static cache, {sizes.decode_context} tokens of context"
    return Workload("peer", title, "step", entries, comparisons, prepare=prepare, warm={})


def _requests(sizes: Sizes) -> Workload:
    low, high = sizes.request_tokens
    arguments = {"count": sizes.requests, "low": low, "high": high, "step_tokens": sizes.step_tokens}
    title = f"{sizes.requests} requests at once, prompts and outputs of {low} to {high} tokens"
    entries = [Entry(sizes.shapes[0], "device", "serve", arguments)]
    prepare = _load(sizes.shapes[0], sizes, sizes.requests, sizes.requests * high)
    return Workload("workload", title, "run", entries, prepare=prepare)


def _load(shape: str, sizes: Sizes, batch: int, prompt_tokens: int) -> tuple[str, dict[str, Any]]:
    """The pages for decoding sequences, and for prompts beside them."""
    found = {"batch": batch, "context_tokens": sizes.decode_context, "prompt_tokens": prompt_tokens}
    return "load", {"shape_name": shape, **found}


def _attention(sizes: Sizes) -> Workload:
    shape, entries = SHAPES[sizes.kernel_shape], []
    for batch, context in sizes.decode_attention:
        read = 2 * 2 * batch * context * shape.num_key_value_heads * shape.head_dim
        label, goal = f"decode attention, {batch} x {context} tokens", read >= _LARGE_KV_BYTES
        entry = _kernel(sizes, label, "decode_attention", batch, context)
        entries.append(replace(entry, goal=_ATTENTION_GOAL if goal else None))
    for batch, context, *longer in sizes.mixed_lengths:
        label = f"decode attention, {batch} x {context} and {len(longer)} x {longer[0]} tokens"
        entries.append(_kernel(sizes, label, "decode_attention", batch, context, *longer))
    for new, context in sizes.prefill_attention:
        label = f"prefill attention, {new} of {context} tokens"
        entries.append(_kernel(sizes, label, "prefill_attention", new, context))
    return Workload("attention", "attention kernels, over pages in random order", "call", entries)


def _rows(sizes: Sizes) -> Workload:
    calls = [(name, tokens) for tokens in sizes.row_tokens for name in _ROW_KERNELS]
    entries = [_kernel(sizes, f"{name}, {tokens} tokens", name, tokens) for name, tokens in calls]
    return Workload("rows", "what is done to each token by itself", "call", entries)


def _products(sizes: Sizes) -> Workload:
    """A product alone by cuBLAS, with what is before and after it, and all in one with each of its tiles."""
    entries = []
    for place, name in enumerate(_PLACES):
        for rows in sizes.product_rows:
            label = f"{name}, {rows} rows"
            entries.append(_kernel(sizes, f"{label}, cuBLAS alone", "product_alone", place, rows))
            if rows > _MOST_FUSED_ROWS:
                continue
            entries.append(_kernel(sizes, f"{label}, separate", "product_separate", place, rows))
            # In a rehearsal, in float32, there may be fewer.
            for way in range(1 if sizes is REHEARSAL else 2 if name == "gate_up" else 3):
                label_of_way = f"{label}, fused, tiles {way + 1}"
                entries.append(_kernel(sizes, label_of_way, "product_fused", place, rows, way))
    return Workload("products", "products of a layer, by what their weights take to read", "call", entries)


def _sampling(sizes: Sizes) -> Workload:
    names = ("greedy", "drawn", "top_p", "penalties", "drafts")
    calls = [(name, rows) for rows in sizes.sampling_rows for name in names]
    entries = [_kernel(sizes, f"choose, {name}, {rows} rows", f"choose_{name}", rows) for name, rows in calls]
    return Workload("sampling", "the choice of a token for each row", "call", entries)


def _kernel(sizes: Sizes, label: str, name: str, *size: int) -> Entry:
    arguments = {"name": name, "shape_name": sizes.kernel_shape, "size": size}
    return Entry(label, "device", "kernel", arguments)
