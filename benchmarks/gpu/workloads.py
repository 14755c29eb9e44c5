"""What is measured on a GPU, the most important first, and how large: there, and in a rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.plan import Comparison, Entry, Workload
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES, Shape

# Least shares of the roof, by model and batch, and of the device's own pace with the host in the loop.
_DECODE_GOALS = {("qwen3-0.6b", 1): 0.4, ("qwen3-8b", 1): 0.75}
_DECODE_GOAL_AT_64 = 0.65
_HOST_GOAL = 0.97
_ATTENTION_GOAL = 0.8
_PREFILL_GOAL = 0.65
_PREFILL_GOAL_TOKENS = 2048
# From this much on, the time that a kernel takes to start and to end is small beside that of reading.
_LARGE_KV_BYTES = 200e6
_STATIC_WAYS = ("graph", "eager", "compiled")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run. Tokens, rows or counts.

    Attributes:
        kernel_shape: The model whose widths the kernels by themselves get.
        row_tokens: Rows that the kernels without attention are given.
        decode_attention: (batch, context) of the decode kernel.
        prefill_attention: (new tokens, context with them) of the prefill kernel.
        shapes: Models, each a workload of its own.
        request_tokens: Prompts and outputs of the many requests (low, high).
    """

    kernel_shape: str
    row_tokens: tuple[int, ...]
    decode_attention: tuple[tuple[int, int], ...]
    prefill_attention: tuple[tuple[int, int], ...]
    sampling_rows: tuple[int, ...]
    shapes: tuple[str, ...]
    decode_batches: tuple[int, ...]
    decode_context: int
    prefill_tokens: tuple[int, ...]
    requests: int
    request_tokens: tuple[int, int]
    step_tokens: int
    static_batches: tuple[int, ...]
    static_ways: tuple[str, ...]
    rounds: tuple[int, int]


# For one H200, all of it within minutes.
REAL = Sizes(
    kernel_shape="qwen3-8b",
    row_tokens=(1, 64, 4096),
    # From the fourth on there are at least 200 MB of keys and values.
    decode_attention=((1, 1024), (8, 1024), (32, 1024), (64, 1024), (256, 1024), (8, 8192), (2, 32_768)),
    prefill_attention=((2048, 2048), (8192, 8192), (2048, 32_768)),
    sampling_rows=(1, 64, 256),
    shapes=(DEFAULT_SHAPE, "qwen3-8b", "qwen3-14b"),
    decode_batches=(1, 8, 32, 64, 256),
    decode_context=1024,
    prefill_tokens=(512, 2048, 8192),
    requests=256,
    request_tokens=(100, 1024),
    step_tokens=8192,
    static_batches=(1, 32),
    static_ways=_STATIC_WAYS,
    rounds=(3, 8),
)
# A fraction of each, with Triton's interpreter.
REHEARSAL = Sizes(
    kernel_shape="rehearsal",
    row_tokens=(1, 3),
    decode_attention=((2, 40),),
    prefill_attention=((20, 40),),
    sampling_rows=(2,),
    shapes=("rehearsal",),
    decode_batches=(1, 2),
    decode_context=16,
    prefill_tokens=(24,),
    requests=3,
    request_tokens=(3, 8),
    step_tokens=32,
    static_batches=(2,),
    static_ways=_STATIC_WAYS[:1],
    rounds=(1, 1),
)


def all_workloads(*, rehearsal: bool) -> list[Workload]:
    """Every workload, in the order in which they run while there is time."""
    sizes = REHEARSAL if rehearsal else REAL
    models = [_model(sizes, SHAPES[name]) for name in sizes.shapes]
    kernels = [_attention(sizes), _requests(sizes), _rows(sizes), _sampling(sizes)]
    return [*models[:2], *kernels, *models[2:], _static(sizes)]


def _model(sizes: Sizes, shape: Shape) -> Workload:
    """Decodes with the host in the loop and fed by the device itself, and prefills."""
    entries, comparisons = [], []
    for batch in sizes.decode_batches:
        # A step reads what stands before its token: in the mean half of the page that a turn fills.
        read = shape.decode_bytes(batch, sizes.decode_context + 8)
        goal = _DECODE_GOALS.get((shape.name, batch), _DECODE_GOAL_AT_64 if batch == 64 else None)
        label, fed = f"decode, batch {batch}", f"decode, batch {batch}, device-fed"
        entries.append(Entry(label, "device", "decode", {"batch": batch}, bytes_read=read, goal=goal))
        entries.append(Entry(fed, "device", "decode", {"batch": batch, "fed": True}, bytes_read=read))
        comparisons.append(Comparison(label, fed, _HOST_GOAL))
    for tokens in sizes.prefill_tokens:
        goal = _PREFILL_GOAL if tokens >= _PREFILL_GOAL_TOKENS else None
        flops = shape.prefill_flops(1, tokens)
        label = f"prefill, {tokens} tokens"
        entries.append(Entry(label, "device", "prefill", {"tokens": tokens}, flops=flops, goal=goal))
    return Workload(
        name=shape.name,
        title=f"{shape.name}, {sizes.decode_context} tokens of context",
        unit="step",
        entries=entries,
        comparisons=comparisons,
        prepare=_load(shape.name, sizes, max(sizes.decode_batches), max(sizes.prefill_tokens)),
        warm={},
        rounds=sizes.rounds,
    )


def _static(sizes: Sizes) -> Workload:
    """transformers beside us, at the same batch and context."""
    shape, entries, comparisons = sizes.shapes[0], [], []
    for batch in sizes.static_batches:
        ours, arguments = f"Quire, batch {batch}", {"batch": batch}
        entries.append(Entry(ours, "device", "decode", arguments))
        for way in sizes.static_ways:
            label = f"transformers, {way}, batch {batch}"
            entries.append(Entry(label, f"static-{way}", "decode", arguments, ours=False))
            comparisons.append(Comparison(ours, label))
    return Workload(
        name="peer",
        title=f"{shape} beside transformers with a static cache, {sizes.decode_context} tokens of context",
        unit="step",
        entries=entries,
        comparisons=comparisons,
        prepare=_load(shape, sizes, max(sizes.static_batches), 0),
        warm={},
        rounds=sizes.rounds,
    )


def _requests(sizes: Sizes) -> Workload:
    low, high = sizes.request_tokens
    arguments = {"count": sizes.requests, "low": low, "high": high, "step_tokens": sizes.step_tokens}
    return Workload(
        name="workload",
        title=f"{sizes.requests} requests at once, prompts and outputs of {low} to {high} tokens",
        unit="run",
        entries=[Entry(sizes.shapes[0], "device", "serve", arguments)],
        prepare=_load(sizes.shapes[0], sizes, sizes.requests, high),
        rounds=(1, 1),
    )


def _load(shape: str, sizes: Sizes, batch: int, prefill_tokens: int) -> tuple[str, dict[str, object]]:
    arguments = {"batch": batch, "context_tokens": sizes.decode_context, "prefill_tokens": prefill_tokens}
    return "load", {"shape_name": shape} | arguments


def _attention(sizes: Sizes) -> Workload:
    shape = SHAPES[sizes.kernel_shape]
    entries = []
    for batch, context in sizes.decode_attention:
        read = 2 * 2 * batch * context * shape.num_key_value_heads * shape.head_dim
        goal = _ATTENTION_GOAL if read >= _LARGE_KV_BYTES else None
        entries.append(
            _kernel(
                sizes,
                f"decode attention, {batch} x {context} tokens",
                "decode_attention",
                goal,
                batch,
                context,
            )
        )
    entries += [
        _kernel(
            sizes, f"prefill attention, {new} of {context} tokens", "prefill_attention", None, new, context
        )
        for new, context in sizes.prefill_attention
    ]
    return Workload(
        "attention", "attention kernels, over pages in random order", "call", entries, rounds=sizes.rounds
    )


def _rows(sizes: Sizes) -> Workload:
    names = ("rms_norm", "add_rms_norm", "silu_mul", "rope_kv_write")
    entries = [
        _kernel(sizes, f"{name}, {tokens} tokens", name, None, tokens)
        for tokens in sizes.row_tokens
        for name in names
    ]
    return Workload("rows", "what is done to each token by itself", "call", entries, rounds=sizes.rounds)


def _sampling(sizes: Sizes) -> Workload:
    entries = [
        _kernel(sizes, f"choose, {name}, {rows} rows", f"choose_{name}", None, rows)
        for rows in sizes.sampling_rows
        for name in ("greedy", "drawn")
    ]
    return Workload("sampling", "the choice of a token for each row", "call", entries, rounds=sizes.rounds)


def _kernel(sizes: Sizes, label: str, name: str, goal: float | None, *size: int) -> Entry:
    arguments = {"name": name, "shape_name": sizes.kernel_shape, "size": size}
    return Entry(label, "device", "kernel", arguments, goal=goal)
