"""What `tests.gpu.first` tries, in order of importance: sections of rows.

Rows of tests are pytest processes (`parts`). Rows of figures are calls of one process that holds the device
(`benchmarks.gpu.device_peer`). If that process dies or hangs, its row says so, and a new one goes on with the
next row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.shapes import SHAPES
from benchmarks.shapes import Shape
from tests.gpu.figures import Device, Figures
from tests.gpu.parts import Log, Outcome, Part, first_parts, missing, other_parts, run_together
from tests.gpu.report import Row

_PLACES = ("qkv", "output", "gate_up", "down")
_MOST_FUSED_ROWS = 16
# Formats of `benchmarks.gpu.kernels.QUANTISED`, and their bits on a GPU.
_QUANTISED = (("q8_0", 8.5), ("q4_k", 4.625))
# Two busy cores take so many times as long for the interpreter as a device's machine for its tests.
_REHEARSAL_PATIENCE = 4.0
# What nothing here runs without; and what some tests need, or only the gateway.
NEEDED = ("numpy", "torch", "triton", "transformers", "safetensors", "pytest")
_WANTED = (
    *("grpcio", "h11", "httpx2", "hypothesis", "Jinja2", "llguidance", "peft", "prometheus_client"),
    *("protobuf", "psutil", "structlog", "tokenizers", "uvloop"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and rows, for minutes on one H100."""

    shape: str = "qwen3-8b"
    batches: tuple[int, ...] = (1, 64, 256)
    context_tokens: int = 1024
    prefills: tuple[int, ...] = (2048, 8192)
    mixed: tuple[tuple[int, int], ...] = ((64, 512), (64, 2048))
    # Decodes, and tokens of a prompt that lasts for all of their steps.
    beside: tuple[tuple[int, int], ...] = ((64, 8192),)
    profiled: tuple[int, ...] = (1, 64)
    product_rows: tuple[int, ...] = (1, 4, 16, 64, 128)
    attention: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024), (256, 1024), (2, 32_768))
    tiles: tuple[tuple[str, int, int], ...] = (("decode", 64, 1024), ("prefill", 2048, 2048))
    sampled_rows: tuple[int, ...] = (1, 64)
    adapters: tuple[int, ...] = (0, 8, 64)
    adapted_batch: int = 64
    masked_rows: int = 8
    ranks: int = 2
    quantised_batches: tuple[int, ...] = (1, 16, 64)
    experts_shape: str = "qwen3-30b-a3b"
    # Of gpt-oss-20b: experts, those of a token, and the widths; and rows.
    experts: tuple[int, int, int, int] = (32, 4, 2880, 2880)
    experts_rows: tuple[int, ...] = (1, 16, 64, 2048)
    invariant_batches: tuple[int, ...] = (1, 64)
    peer_batches: tuple[int, ...] = (1, 64)
    turns: int = 3


REHEARSAL = Sizes(
    shape="rehearsal",
    batches=(1, 2),
    context_tokens=16,
    prefills=(24,),
    mixed=((2, 12),),
    beside=((2, 24),),
    profiled=(2,),
    product_rows=(2, 20),
    attention=((2, 40),),
    tiles=(("decode", 2, 40), ("prefill", 20, 20)),
    sampled_rows=(2,),
    adapters=(0, 2),
    adapted_batch=2,
    masked_rows=1,
    quantised_batches=(2,),
    experts_shape="rehearsal-experts",
    experts=(4, 2, 64, 32),
    experts_rows=(2, 40),
    invariant_batches=(2,),
    peer_batches=(2,),
    turns=1,
)


@dataclass(slots=True)
class Context:
    """What sections need of a run.

    Attributes:
        device: The process that holds the device.
        log: Has all output.
        jobs: So many parts of tests run at a time.
        note_machine: Is told of the machine.
    """

    device: Device
    log: Log
    sizes: Sizes
    commit: str | None
    jobs: int
    note_machine: Callable[[dict[str, Any]], None]

    def figures(self, section: str, end_s: float) -> Figures:
        """What measures its rows."""
        return Figures(self.device, section, end_s, self.sizes.turns)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong together.

    Attributes:
        share_s: How long they may take.
        run: Yields them. Is given the time.monotonic() at which nothing more may begin.
    """

    name: str
    share_s: float
    run: Callable[[Context, float], Iterator[Row]]


def all_sections() -> list[Section]:
    """In the order in which they run."""
    return [
        Section("versions", 60, _versions),
        Section("tests", 150, _first_tests),
        Section("precompile", 90, _precompile),
        Section("model", 150, _model),
        Section("peer", 40, _peer),
        Section("quantised", 120, _quantised),
        Section("batch-invariant", 20, _batch_invariant),
        Section("ranks", 60, _ranks),
        Section("tiles", 50, _tiles),
        Section("rest", 600, _rest),
    ]


def _versions(context: Context, end_s: float) -> Iterator[Row]:
    for name in missing(_WANTED, older=True):
        yield Row("versions", name, "missing", note="tests that need it are skipped")
    figures = context.figures("versions", end_s)
    row, machine = figures.call("machine", "describe", commit=context.commit)
    if machine is not None:
        context.note_machine(machine)
        row.note = str(machine["gpu"])
    yield row
    row, roof = figures.call("the device itself", "roof")
    if roof is not None:
        context.device.roof = roof
        row.figures = {
            "GB/s read": roof["read"] / 1e9,
            "GB/s copied": roof["copied"] / 1e9,
            "TFLOP/s": roof["flops"] / 1e12,
        }
    yield row


def _precompile(context: Context, end_s: float) -> Iterator[Row]:
    """Before anything is timed: what the model's steps launch, in many processes."""
    sizes, figures = context.sizes, context.figures("precompile", end_s)
    asked = {
        "shape_name": sizes.shape,
        "batch": max(sizes.batches),
        "context_tokens": sizes.context_tokens + max(sizes.prefills),
    }
    row, found = figures.call("kernels of the model", "precompile", **asked)
    if found is not None:
        row.figures = {"kernels": float(found["kernels"])}
        row.note = "slowest: " + ", ".join(f"{name[:60]} {s:.1f} s" for name, s in found["slowest"].items())
    yield row
    for error in [] if found is None else found["errors"]:
        yield Row("precompile", error.partition(":")[0][:80], "failed", note=error)


def _first_tests(context: Context, end_s: float) -> Iterator[Row]:
    yield from _tests(context, "tests", first_parts(), end_s)


def _rest(context: Context, end_s: float) -> Iterator[Row]:
    context.device.close()  # some of them measure the device's memory
    yield from _tests(context, "rest", other_parts(), end_s)


def _tests(context: Context, section: str, parts: Sequence[Part], end_s: float) -> Iterator[Row]:
    patience = _REHEARSAL_PATIENCE if context.sizes is REHEARSAL else 1.0
    for outcome in run_together(parts, context.log, end_s, jobs=context.jobs, patience=patience):
        yield _row_of(section, outcome)


def _row_of(section: str, outcome: Outcome) -> Row:
    figures = {"tests": outcome.tests, "skipped": outcome.skipped, "failures": len(outcome.failures)}
    state = "ok" if outcome.state == "passed" else outcome.state.partition(" (")[0]
    note = "; ".join(outcome.failures[:5])
    return Row(section, outcome.name, state, outcome.seconds, {k: float(v) for k, v in figures.items()}, note)


def _model(context: Context, end_s: float) -> Iterator[Row]:
    sizes, shape = context.sizes, SHAPES[context.sizes.shape]
    figures = context.figures("model", end_s)
    context.device.prepare_with("load", **_load(sizes, max(sizes.batches), max(sizes.prefills)))
    row, told = figures.call("load, compile and capture", "warm")
    yield Row("model", row.name, row.state, row.seconds, told or {}, row.note)
    row, chosen = figures.call("tiles of products of few rows", "chosen_tiles")
    row.note = (
        row.note or "; ".join(f"{place}: {way}" for place, way in chosen.items()) or "none were measured"
    )
    yield row
    for batch in sizes.batches:
        yield from _decodes(figures, shape, batch, sizes.context_tokens)
    for batch in sizes.profiled:
        row, sample = figures.call(f"kernels of a step, batch {batch}", "profile", batch=batch)
        yield Row("model", row.name, row.state, row.seconds, {} if sample is None else sample.more, row.note)
    for tokens in sizes.prefills:
        flops = shape.prefill_flops(1, tokens)
        yield figures.measure(f"prefill, {tokens} tokens", "prefill", flops=flops, seeded=True, tokens=tokens)
    for batch, tokens in sizes.mixed:
        name = f"{batch} decodes and {tokens} tokens of a prompt"
        yield figures.measure(name, "mixed", seeded=True, batch=batch, tokens=tokens)
    for batch, tokens in sizes.beside:
        name = f"{batch} decodes in the step loop beside a prompt"
        yield figures.measure(name, "decode_beside_prompt", seeded=True, batch=batch, tokens=tokens)
    for kind in ("top_p", "mask", "penalties", "logprobs"):
        name = f"decode, batch {sizes.adapted_batch}, {kind}"
        yield figures.measure(name, "decode_in_loop", batch=sizes.adapted_batch, kind=kind)
    batch, masked = sizes.adapted_batch, sizes.masked_rows
    name = f"decode, batch {batch}, {masked} with new masks"
    yield figures.measure(name, "decode_beside_masks", batch=batch, masked=masked)
    yield from _single_kernels(figures, sizes)
    context.device.prepare_with("load", **_load(sizes, sizes.adapted_batch, 0), adapters=max(sizes.adapters))
    for count in sizes.adapters:
        name = f"decode, batch {sizes.adapted_batch}, {count} adapters"
        yield figures.measure(name, "decode_adapted", batch=sizes.adapted_batch, adapters=count)


def _decodes(figures: Figures, shape: Shape, batch: int, context_tokens: int) -> Iterator[Row]:
    """What the device alone needs for a step, and the shares of that which each way to run one reaches."""
    # A turn fills a page of 16 tokens, so that on average half a page precedes its tokens.
    reads = shape.decode_bytes(batch, context_tokens + 8)
    fed = figures.measure(f"decode, batch {batch}, device-fed", "decode", reads=reads, batch=batch, fed=True)
    yield fed
    ways = {"step loop": "decode_in_loop", "launched ahead": "decode_ahead", "called": "decode"}
    for way, method in ways.items():
        row = figures.measure(f"decode, batch {batch}, {way}", method, reads=reads, batch=batch)
        if "ms" in fed.figures and "ms" in row.figures:
            row.figures["of device-fed"] = fed.figures["ms"] / row.figures["ms"]
        yield row


def _load(sizes: Sizes, batch: int, prompt_tokens: int) -> dict[str, Any]:
    return {
        "shape_name": sizes.shape,
        "batch": batch,
        "context_tokens": sizes.context_tokens,
        "prompt_tokens": prompt_tokens,
    }


def _single_kernels(figures: Figures, sizes: Sizes) -> Iterator[Row]:
    """Products beside cuBLAS, attention, and the choice of tokens; each with a cold cache."""

    def kernel(label: str, name: str, *size: int) -> Row:
        return figures.measure(label, "kernel", kernel=name, shape_name=sizes.shape, size=list(size))

    for rows in sizes.product_rows:
        for place, name in enumerate(_PLACES):
            yield kernel(f"{name}, {rows} rows, cuBLAS", "product_alone", place, rows)
            if rows <= _MOST_FUSED_ROWS:
                # In a rehearsal, in float32, there may be fewer.
                for way in range(1 if sizes is REHEARSAL else 2 if name == "gate_up" else 3):
                    yield kernel(f"{name}, {rows} rows, fused {way + 1}", "product_fused", place, rows, way)
    for batch, tokens in sizes.attention:
        yield kernel(f"decode attention, {batch} x {tokens} tokens", "decode_attention", batch, tokens)
    for rows in sizes.sampled_rows:
        for name in ("greedy", "drawn", "top_p", "penalties", "drafts"):
            yield kernel(f"choose, {name}, {rows} rows", f"choose_{name}", rows)


def _tiles(context: Context, end_s: float) -> Iterator[Row]:
    """Attention with the tiles in use, and with others: `config_for` of its modules is what they change."""
    sizes, figures = context.sizes, context.figures("tiles", end_s)
    context.device.prepare_with("release")
    for kernel, items, context_tokens in sizes.tiles:
        row, names = figures.call(
            f"tiles of {kernel} attention", "attention_tiles", kernel=kernel, shape_name=sizes.shape
        )
        if names is None:
            yield row
        for way, name in enumerate(names or ()):
            yield figures.measure(
                f"{kernel} attention, {items} x {context_tokens}, {name}" + " (in use)" * (not way),
                "attention_with",
                kernel=kernel,
                shape_name=sizes.shape,
                way=way,
                size=[items, context_tokens],
            )


def _peer(context: Context, end_s: float) -> Iterator[Row]:
    sizes, figures = context.sizes, context.figures("peer", end_s)
    for way in ("graph", "eager"):
        asked = {"shape_name": sizes.shape, "way": way, "context_tokens": sizes.context_tokens}
        context.device.prepare_with("load_peer", **asked)
        for batch in sizes.peer_batches:
            reads = SHAPES[sizes.shape].decode_bytes(batch, sizes.context_tokens + 8)
            yield figures.measure(
                f"transformers, {way}, batch {batch}", "decode_peer", reads=reads, batch=batch
            )


def _ranks(context: Context, end_s: float) -> Iterator[Row]:
    sizes, figures = context.sizes, context.figures("ranks", end_s)
    batch, ranks = sizes.adapted_batch, sizes.ranks
    context.device.prepare_with("release")
    yield figures.measure(
        f"decode, batch {batch}, {ranks} ranks, few layers",
        "decode_on_ranks",
        shape_name=sizes.shape,
        ranks=ranks,
        batch=batch,
    )


def _quantised(context: Context, end_s: float) -> Iterator[Row]:
    """Products and steps with weights that stay quantised, beside those of the section "model"."""
    sizes, figures = context.sizes, context.figures("quantised", end_s)
    for rows in sizes.experts_rows:
        yield figures.measure(
            f"experts in mxfp4, {rows} rows",
            "kernel",
            kernel="experts_mxfp4",
            shape_name=sizes.shape,
            size=[rows, *sizes.experts],
        )
    yield from _quantised_model(context, figures, sizes.experts_shape, *_QUANTISED[-1])
    for number, (name, bits) in enumerate(_QUANTISED[: 1 if sizes is REHEARSAL else None]):
        yield from _quantised_model(context, figures, sizes.shape, name, bits)
        for rows in sizes.product_rows[:3]:
            for place, product in enumerate(_PLACES):
                yield figures.measure(
                    f"{name}: {product}, {rows} rows",
                    "kernel",
                    kernel="product_quantised",
                    shape_name=sizes.shape,
                    size=[place, rows, number],
                )


def _quantised_model(
    context: Context, figures: Figures, shape_name: str, name: str, bits: float
) -> Iterator[Row]:
    """A model in a format of so many bits a weight: its kernels, steps and a prompt."""
    sizes, shape = context.sizes, SHAPES[shape_name]
    most, context_tokens, tokens = max(sizes.quantised_batches), sizes.context_tokens, sizes.prefills[0]
    label = name if shape_name == sizes.shape else f"{shape_name} in {name}"
    asked = {"shape_name": shape_name, "batch": most, "context_tokens": context_tokens}
    row, found = figures.call(f"kernels of {label}", "precompile", **asked, quantization=name)
    row.note = row.note or "; ".join([] if found is None else found["errors"])
    yield row
    loaded = _load(sizes, most, tokens) | {"shape_name": shape_name}
    context.device.prepare_with("load", **loaded, quantization=name)
    for batch in sizes.quantised_batches:
        kv = shape.kv_bytes(batch * (context_tokens + 8))
        reads = kv + int((shape.decode_bytes(batch, context_tokens + 8) - kv) * bits / 16)
        yield figures.measure(
            f"{label}: decode, batch {batch}, device-fed", "decode", reads=reads, batch=batch, fed=True
        )
    flops = shape.prefill_flops(1, tokens)
    yield figures.measure(
        f"{label}: prefill, {tokens} tokens", "prefill", flops=flops, seeded=True, tokens=tokens
    )


def _batch_invariant(context: Context, end_s: float) -> Iterator[Row]:
    sizes, figures = context.sizes, context.figures("batch-invariant", end_s)
    loaded, shape = _load(sizes, max(sizes.invariant_batches), sizes.prefills[0]), SHAPES[sizes.shape]
    context.device.prepare_with("load", **loaded, batch_invariant=True)
    for batch in sizes.invariant_batches:
        reads = shape.decode_bytes(batch, sizes.context_tokens + 8)
        yield figures.measure(
            f"decode, batch {batch}, device-fed", "decode", reads=reads, batch=batch, fed=True
        )
    tokens = sizes.prefills[0]
    flops = shape.prefill_flops(1, tokens)
    yield figures.measure(f"prefill, {tokens} tokens", "prefill", flops=flops, seeded=True, tokens=tokens)
