"""All that is launched on a GPU, recorded for models that together have each kernel with what it is made for.

Models are in their real sizes, which decide tiles and alignments, and compute without data (see
`benchmarks.gpu.dry_run`). Attention is recorded as well for heads that only models of the library have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.dry_run import Steps, launches_of
from benchmarks.gpu.launches import Device, Launch, Pointer, as_on, recording
from kernels.attention_batch import AttentionBatch
from kernels.cuda.variant import SHARED_BYTES
from kernels.float8_weight import Float8Format
from kernels.gated_delta import GatedDeltaWeights, gated_delta
from kernels.group_formats import FORMATS, integer_groups, table_groups
from kernels.mamba1 import Mamba1Weights, mamba1
from kernels.mamba2 import Mamba2Weights, mamba2
from kernels.packed_pages import LeadingValues
from kernels.paged_attention import CUDA_LATENT_WIDTHS, CUDA_WIDTH_PAIRS, CUDA_WIDTHS, paged_attention
from kernels.short_conv import short_conv, silu_conv
from kernels.state_rows import StateRows
from kernels.weight_formats import OnGpu, WeightFormat
from workers.models.config import ModelConfig
from workers.models.parameters import FormatOf

# By architecture: H100, L40 and A100.
DEVICES = {
    90: Device((9, 0), 132, SHARED_BYTES[90]),
    89: Device((8, 9), 142, SHARED_BYTES[89]),
    80: Device((8, 0), 108, SHARED_BYTES[80]),
}
# Of keys, and of values that are a part of them: those of all models that have them.
_LATENT_WIDTHS = (sum(CUDA_LATENT_WIDTHS), CUDA_LATENT_WIDTHS[0])
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "i1",
}
_STEPS = Steps(max_rows=8, max_pages=512)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The requirements for a compiled kernel.

    Attributes:
        stack_bytes: Of registers that a thread may spill to memory: 0, but for what `_stack_bytes` knows.
        max_shared_bytes: The shared memory that a program may use; SHARED_BYTES applies too.
        wgmma: Whether matrix products must use the warp-group instructions of sm_90.
        kv_buffers: The least number of buffers for each tile that a matrix product reads in a loop; None:
            loads are not pipelined. With one buffer, loads do not overlap with computation.
        fetches: Whether a launch that begins early must fetch into the cache before it waits.
    """

    stack_bytes: int = 0
    max_shared_bytes: int = SHARED_BYTES[90]
    wgmma: bool = False
    kv_buffers: int | None = None
    fetches: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A launch that is compiled for an architecture. `name`: for people."""

    name: str
    launch: Launch
    architecture: int
    expects: Expectations


def _config(
    model_type: str, hidden: int, inner: int, heads: int, kv_heads: int, **others: Any
) -> ModelConfig:
    settings = {
        "model_type": model_type,
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_settings(settings | others)


def _models() -> Iterator[tuple[ModelConfig, torch.dtype, Steps]]:
    """Sizes are those of the models named behind them."""
    yield _config("qwen3", 1024, 3072, 16, 8, head_dim=128), _BF16, Steps(8, 512, lora=(8, 16))  # 0.6B
    qwen3 = _config("qwen3", 4096, 12_288, 32, 8, head_dim=128, tie_word_embeddings=False)  # 8B
    yield qwen3, _BF16, Steps(8, 512, batch_invariant=True, lora=(8, 64))
    # 14B
    yield _config("qwen3", 5120, 17_408, 40, 8, head_dim=128, tie_word_embeddings=False), _BF16, _STEPS
    yield _qwen3_moe(), _BF16, _STEPS
    yield _qwen3_moe(), _FP32, Steps(8, 512, batch_invariant=True)
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2}
    yield _config("mixtral", 4096, 14_336, 32, 8, **mixtral), _FP16, _STEPS  # 8x7B
    # Widths that fill no tile.
    odd = _config("llama", 1008, 2016, 12, 12, head_dim=80, attention_bias=True, hidden_act="gelu")
    yield odd, _BF16, Steps(8, 512, lora=(1, 12))
    yield _config("qwen2", 3584, 18_944, 28, 4, use_sliding_window=False), _BF16, _STEPS  # 2.5 7B
    caps: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    gemma2 = _config("gemma2", 3584, 14_336, 16, 8, head_dim=256, query_pre_attn_scalar=256, **caps)  # 9B
    yield gemma2, _BF16, _STEPS
    yield _config("gemma", 2048, 16_384, 8, 1, head_dim=256, hidden_act="gelu"), _FP32, _STEPS  # 2B
    # V3, whose sizes are the defaults of its family.
    settings = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1}
    yield ModelConfig.from_settings(settings), _BF16, _STEPS
    yield _config("smollm3", 2048, 11_008, 16, 4, no_rope_layers=[1, 0, 1, 1]), _BF16, _STEPS  # 3B


def _quantised() -> dict[str, WeightFormat]:
    """Formats whose code differs, by the place of a matrix: a whole layer, and then one or two of each."""
    named = FORMATS
    rows = integer_groups(4, 0, torch.bfloat16, zeros=False)
    places: dict[str, WeightFormat] = {
        "0.self_attn.": named["q4_k"],
        "0.mlp.": named["q4_k"],
        "1.self_attn.o_": Float8Format(128),
        "1.self_attn.": named["q8_0"],
        "1.mlp.down": table_groups("nf4", 64),
        "1.mlp.": integer_groups(4, 128, torch.float16, zeros=True),
        "2.self_attn.o_": named["q2_k"],
        "2.self_attn.": named["q6_k"],
        "2.mlp.down": rows,
        "2.mlp.": Float8Format(),
    }
    return {"lm_head": named["q6_k"]} | {f"model.layers.{place}": form for place, form in places.items()}


def _format_of(tensor: str) -> OnGpu | None:
    return next((OnGpu(form) for place, form in _quantised().items() if tensor.startswith(place)), None)


def _experts(tensor: str) -> OnGpu | None:
    """Of gate and up, and of down, in each layer: the formats that most files have, and two of 8 bits."""
    int4 = integer_groups(4, 128, torch.float16, zeros=True)
    pairs = (FORMATS["q4_k"], FORMATS["q6_k"]), (int4, int4), (Float8Format(128), FORMATS["q8_0"])
    return OnGpu(pairs[int(tensor.split(".")[2])]["down" in tensor]) if ".experts." in tensor else None


def _mxfp4(tensor: str) -> OnGpu | None:
    return OnGpu(FORMATS["mxfp4"]) if ".experts." in tensor else None


def _quantised_models() -> Iterator[tuple[ModelConfig, FormatOf]]:
    yield _config("qwen3", 4096, 12_288, 32, 8, head_dim=128, tie_word_embeddings=False), _format_of  # 8B
    yield _qwen3_moe(), _experts
    gpt_oss = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
    yield _config("gpt_oss", 2880, 2880, 64, 8, **gpt_oss, attention_bias=True), _mxfp4  # 20b


def _qwen3_moe() -> ModelConfig:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    return _config("qwen3_moe", 2048, 6144, 32, 4, head_dim=128, **experts)  # 30B-A3B


def _attention() -> Iterator[tuple[torch.dtype, tuple[int, int], tuple[int, int], dict[str, Any]]]:
    """Dtypes, widths of keys and values, heads of queries and keys, and what some models have beside."""
    for width in CUDA_WIDTHS:
        yield _BF16, (width, width), (32, 8), {}
    for widths in CUDA_WIDTH_PAIRS:
        yield _BF16, widths, (16, 16), {}
        yield _FP32, widths, (16, 16), {}
    yield _FP32, (64, 64), (32, 8), {}
    for dtype in (_BF16, _FP32):
        yield dtype, _LATENT_WIDTHS, (128, 1), {}
    sinks = torch.empty(64, device="meta")
    for window in (None, 128):
        yield _BF16, (64, 64), (64, 8), {"sinks": sinks, "sliding_window": window}


def _attend(
    dtype: torch.dtype, widths: tuple[int, int], heads: tuple[int, int], others: dict[str, Any]
) -> None:
    """Decodes with and without a work list, and prompts; with the kernels for same bits too."""
    of_queries, of_keys = heads
    query = torch.empty(45, of_queries + 2 * of_keys, widths[0], dtype=dtype, device="meta")[:, :of_queries]
    k_pages, v_pages = (torch.empty(64, 16, of_keys, width, dtype=dtype, device="meta") for width in widths)
    for lengths, table in (([1] * 45, 1), ([1] * 45, 512), ([5, 40], 8)):
        shapes = (len(lengths), table), (len(lengths) + 1,), (len(lengths),)
        tables, starts, contexts = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
        batch = AttentionBatch(tables, starts, contexts, lengths, lengths)
        for batch_invariant in (False, True):
            values = LeadingValues(k_pages, widths[1]) if widths == _LATENT_WIDTHS else v_pages
            paged_attention(
                query, k_pages, values, batch, scale=0.1, batch_invariant=batch_invariant, **others
            )


# Layers with recurrent states, in the sizes of the models named behind them.
_DELTA = ((16, 1), (32, 128))  # Qwen3-Next 80B-A3B; Kimi Linear 48B-A3B, with a decay of each element
_MAMBA2 = (  # Granite 4 H Small; Nemotron-H 8B; Falcon-H1 7B, without a norm
    (128, 64, 1, 128, True),
    (128, 64, 8, 128, True),
    (24, 128, 1, 256, False),
)
_MAMBA1 = (8192, 16)  # Falcon Mamba 7B


def _recurrent(dtype: torch.dtype) -> None:
    """What layers with recurrent states launch between their projections; see `kernels`."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    begins, sources, keeps = (torch.empty(5, dtype=torch.int64, device="meta") for _ in range(3))
    at = StateRows(begins, sources, keeps, torch.empty(3, dtype=torch.int32, device="meta"))
    for width, bias in ((2048, None), (1024, empty(1024))):  # LFM2 1.2B
        short_conv(empty(5, 3 * width), empty(3, width), bias, empty(9, 2, width), at)
    for key_heads, decays in _DELTA:
        convolved = 2 * key_heads * 128 + 32 * 128
        parameters = empty(4, convolved), floats(32 * decays), floats(32), empty(128)
        delta = GatedDeltaWeights(*parameters, key_heads, key_width=128, adjacent=32 // key_heads, eps=1e-6)
        gated_delta(empty(5, sum(delta.widths)), delta, empty(9, 3, convolved), floats(9, 32, 128, 128), at)
    for heads, width, groups, state, has_norm in _MAMBA2:
        inner = heads * width
        convolved, norm = inner + 2 * groups * state, empty(inner) if has_norm else None
        taps, of_head = (empty(4, convolved), empty(convolved)), (floats(heads), floats(heads), floats(heads))
        second = Mamba2Weights(*taps, *of_head, norm, groups, state_width=state, eps=1e-5)
        rows = empty(5, inner + convolved + heads)
        mamba2(rows, second, empty(9, 3, convolved), floats(9, heads, state, width), at)
    inner, state = _MAMBA1
    first = Mamba1Weights(floats(inner), floats(inner // 64, state, 64), floats(inner))
    silu_conv(empty(5, 2 * inner)[:, :inner], empty(4, inner), empty(inner), empty(9, 3, inner), at)
    mamba1(empty(5, 3 * inner + 2 * state), first, floats(9, inner // 64, state, 64), at)


@functools.cache
def launches_on(architecture: int) -> frozenset[Launch]:
    """What is launched on a GPU of an architecture."""
    device = DEVICES[architecture]
    found = set[Launch]()
    for config, dtype, steps in _models():
        found |= launches_of(config, dtype, steps, device)
    for config, format_of in _quantised_models():
        found |= launches_of(config, _BF16, _STEPS, device, format_of)
    with as_on(device), recording() as attended:
        for shape in _attention():
            _attend(*shape)
        for dtype in (_BF16, _FP32):
            _recurrent(dtype)
    return frozenset(found | attended)


def _expectations(launch: Launch) -> Expectations:
    """Products of matrices have their loads pipelined, and use what the tensor cores have."""
    constexprs, options = dict(launch.constexprs), dict(launch.options)
    pointers = [each.dtype for each in launch.arguments if isinstance(each, Pointer)]
    is_half = "float32" not in pointers[1:3]  # what is multiplied, behind the result
    sizes = [each for each in launch.arguments if isinstance(each, int)]
    is_odd = sum(size % 16 != 0 for size in sizes) > 2  # not only the rows and the parts of a product
    expected = {
        "decode_kernel": Expectations(kv_buffers=options["num_stages"] - 1),
        "prefill_kernel": Expectations(wgmma=is_half, kv_buffers=min(2, options["num_stages"] - 1)),
        "grouped_product_kernel": Expectations(wgmma=is_half and constexprs.get("M", 0) >= 64, kv_buffers=2),
        "linear_kernel": Expectations(wgmma=is_half, kv_buffers=2, fetches=True),
        "product_kernel": Expectations(kv_buffers=None if is_odd else 2, fetches=True),
        "quantised_product_kernel": Expectations(kv_buffers=2, fetches=True),
        "shrink_kernel": Expectations(kv_buffers=2),
    }
    found = expected.get(launch.kernel, Expectations())
    return dataclasses.replace(found, stack_bytes=_stack_bytes(launch.kernel, pointers, constexprs))


def _stack_bytes(kernel: str, pointers: Sequence[str], constexprs: Mapping[str, Any]) -> int:
    """What a few launches spill, which wants another tile, measured on a device."""
    is_plain = constexprs.get("ACTIVATION") is None and not constexprs.get("RESIDUAL")
    known = {
        "decode_kernel": 8 if pointers[0] == "float32" and constexprs.get("D") == 256 else 0,
        "draft_kernel": 40,
        "expand_kernel": 8 if constexprs.get("RANK") == 16 else 0,
        "product_kernel": 8 if is_plain and pointers[0] != "float32" else 0,
    }
    return known.get(kernel, 0)


def _name(launch: Launch) -> str:
    """The kernel, its arguments in short, and its constexprs and options."""
    words = [launch.kernel]
    for argument in launch.arguments:
        if isinstance(argument, Pointer):
            words.append(f"*{_SHORT[argument.dtype]}{'' if argument.is_aligned else '?'}")
        else:
            words.append("-" if argument is None else str(argument))
    return " ".join((*words, *(f"{key}={value}" for key, value in (*launch.constexprs, *launch.options))))


def cases(architectures: Collection[int]) -> list[Case]:
    """All of them, for each of these architectures that there is a device of."""
    found = [
        Case(_name(launch), launch, architecture, _expectations(launch))
        for architecture in DEVICES.keys() & architectures
        for launch in launches_on(architecture)
    ]
    return sorted(found, key=lambda case: (case.name, -case.architecture))
