"""Mistakes in RMSNorm, gated activations and the fused rotation and KV write."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

TESTS = "tests/kernels/cuda"
RMS_NORM = f"{TESTS}/test_rms_norm_cuda.py"
GATED_ACTIVATION = f"{TESTS}/test_gated_activation_cuda.py"
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
        "[:, None]).to(weight.dtype)",
        "[:, None])",
        f"{RMS_NORM}::test_rounds_where_the_reference_does",
    ),
    Mutation(
        "a row is rounded before a float32 weight",
        "kernels.cuda.rms_norm",
        "[:, None]).to(weight.dtype)",
        "[:, None]).to(x.dtype)",
        f"{RMS_NORM}::test_a_float32_weight_is_not_preceded_by_a_rounding",
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
        "an activation is not rounded before the product",
        "kernels.cuda.gated_activation",
        "ACTIVATION).to(gate.dtype)",
        "ACTIVATION)",
        f"{GATED_ACTIVATION}::test_is_rounded_before_the_product",
    ),
    Mutation(
        "gelu is not mirrored",
        "kernels.cuda.gated_activation",
        "tl.where(x >= 0.0, 1.0 - below, below)",
        "below",
        f"{GATED_ACTIVATION}::test_is_accurate",
    ),
    Mutation(
        "the tangent of gelu_tanh is that of half its argument",
        "kernels.cuda.gated_activation",
        "-1.5957691216057308 * x",
        "-0.7978845608028654 * x",
        f"{GATED_ACTIVATION}::test_is_accurate",
    ),
    Mutation(
        "gate and up change places",
        "kernels.cuda.gated_activation",
        "rounded = activated(gate.to(tl.float32)",
        "gate, up = up, gate\n    rounded = activated(gate.to(tl.float32)",
        f"{GATED_ACTIVATION}::test_is_accurate",
    ),
    Mutation(
        "row addresses have 32 bits",
        "kernels.cuda.gated_activation",
        "(tl.program_id(0) // blocks).to(tl.int64)",
        "tl.program_id(0) // blocks",
        f"{GATED_ACTIVATION}::test_rows_beyond_32_bits",
    ),
    Mutation(
        "keys of padded tokens are written",
        "kernels.cuda.rope_kv_write",
        "is_key = is_turned & (head >= HEADS) & (slot >= 0)",
        "slot = tl.maximum(slot, 1)\n        is_key = is_turned & (head >= HEADS)",
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
        "squares(first) + squares(second)",
        "squares(first) + squares(first)",
        f"{ROPE_KV_WRITE}::test_is_accurate",
    ),
    Mutation(
        "the norm is not rounded before its weight",
        "kernels.cuda.rope_kv_write",
        "inverse[:, None]).to(weight.dtype)",
        "inverse[:, None])",
        f"{ROPE_KV_WRITE}::test_rounds_where_the_three_operations_do",
    ),
    Mutation(
        "the norm is rounded before a float32 weight",
        "kernels.cuda.rope_kv_write",
        "inverse[:, None]).to(weight.dtype)",
        "inverse[:, None]).to(part.dtype)",
        f"{ROPE_KV_WRITE}::test_rounds_where_the_three_operations_do",
    ),
    Mutation(
        "the norm does not see what is not turned",
        "kernels.cuda.rope_kv_write",
        "total += squares(rest)",
        "total += 0.0",
        f"{ROPE_KV_WRITE}::test_a_part_of_a_head_is_turned",
    ),
    Mutation(
        "the second of a pair is half a head away, whatever is turned",
        "kernels.cuda.rope_kv_write",
        "half: tl.constexpr = R // 2",
        "half: tl.constexpr = D // 2",
        f"{ROPE_KV_WRITE}::test_a_part_of_a_head_is_turned",
    ),
    Mutation(
        "what is not turned is not written",
        "kernels.cuda.rope_kv_write",
        "is_head & (column < D)",
        "is_head & (column < R)",
        f"{ROPE_KV_WRITE}::test_a_part_of_a_head_is_turned",
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
