"""Mistakes in RMSNorm, SiLU-mul and the fused rotation and KV write."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

TESTS = "tests/kernels/cuda"
RMS_NORM = f"{TESTS}/test_rms_norm_cuda.py"
SILU_MUL = f"{TESTS}/test_silu_mul_cuda.py"
ROPE_KV_WRITE = f"{TESTS}/test_rope_kv_write_cuda.py"

MUTATIONS = [
    Mutation(
        "the mean is over the padded width",
        "kernels.cuda.rms_norm",
        "tl.sum(wide * wide, 1) / D",
        "tl.sum(wide * wide, 1) / wide.shape[1]",
        f"{RMS_NORM}::test_rows_are_accurate",
    ),
    Mutation(
        "a row is not rounded before its weight",
        "kernels.cuda.rms_norm",
        "[:, None]).to(x.dtype)",
        "[:, None])",
        f"{RMS_NORM}::test_rounds_where_the_reference_does",
    ),
    Mutation(
        "the sum is not rounded before it is normalised",
        "kernels.cuda.rms_norm",
        "normalised(total, scale, eps, D)",
        "normalised(added.to(tl.float32) + before.to(tl.float32), scale, eps, D)",
        f"{RMS_NORM}::test_add_rounds_where_the_reference_does",
    ),
    Mutation(
        "every head has the weight of the first",
        "kernels.cuda.rms_norm",
        "weight + (head * WEIGHT_STRIDE)[:, None]",
        "weight + (head * 0)[:, None]",
        f"{RMS_NORM}::test_heads_are_accurate",
    ),
    Mutation(
        "silu is not rounded before the product",
        "kernels.cuda.silu_mul",
        "(1.0 + tl.exp(-wide))).to(gate.dtype)",
        "(1.0 + tl.exp(-wide)))",
        f"{SILU_MUL}::test_rounds_where_the_reference_does",
    ),
    Mutation(
        "gate and up change places",
        "kernels.cuda.silu_mul",
        "wide = gate.to(tl.float32)",
        "gate, up = up, gate\n    wide = gate.to(tl.float32)",
        f"{SILU_MUL}::test_is_accurate",
    ),
    Mutation(
        "row addresses have 32 bits",
        "kernels.cuda.silu_mul",
        "(tl.program_id(0) // blocks).to(tl.int64)",
        "tl.program_id(0) // blocks",
        f"{SILU_MUL}::test_rows_beyond_32_bits",
    ),
    Mutation(
        "keys of padded tokens are written",
        "kernels.cuda.rope_kv_write",
        "is_key = mask & (head >= HEADS) & (slot >= 0)",
        "slot = tl.maximum(slot, 1)\n        is_key = mask & (head >= HEADS)",
        f"{ROPE_KV_WRITE}::test_writes_the_named_slots_and_nothing_else",
    ),
    Mutation(
        "keys are turned the other way",
        "kernels.cuda.rope_kv_write",
        "(a * cos - b * sin)",
        "(a * cos + b * sin)",
        f"{ROPE_KV_WRITE}::test_is_accurate",
    ),
    Mutation(
        "the norm sees the first half of a head",
        "kernels.cuda.rope_kv_write",
        "(tl.sum(a * a, 1) + tl.sum(b * b, 1))",
        "(tl.sum(a * a, 1) + tl.sum(a * a, 1))",
        f"{ROPE_KV_WRITE}::test_is_accurate",
    ),
    Mutation(
        "the norm is not rounded before its weight",
        "kernels.cuda.rope_kv_write",
        "inverse[:, None]).to(half.dtype)",
        "inverse[:, None])",
        f"{ROPE_KV_WRITE}::test_rounds_where_the_three_operations_do",
    ),
    Mutation(
        "slots have 32 bits",
        "kernels.cuda.rope_kv_write",
        "tl.load(slots + token).to(tl.int64)",
        "tl.load(slots + token)",
        f"{ROPE_KV_WRITE}::test_rows_and_slots_beyond_32_bits",
    ),
    Mutation(
        "only the first values are copied",
        "kernels.cuda.rope_kv_write",
        "(block - rotating) * VALUES",
        "(block - rotating) * 0",
        f"{ROPE_KV_WRITE}::test_is_accurate",
    ),
]
