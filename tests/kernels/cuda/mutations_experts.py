"""Mistakes in the mixture of experts."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

MODULE = "kernels.cuda.experts"
TESTS = "tests/kernels/cuda/test_experts_cuda.py"

MUTATIONS = [
    Mutation(
        "blocks of an expert are counted rounded down",
        MODULE,
        "(end - begin + M - 1) // M",
        "(end - begin) // M",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "every block of an expert has its first pairs",
        MODULE,
        "+ (block - before) * M",
        "+ (block - before) * 0",
        f"{TESTS}::test_all_rows_on_one_expert",
    ),
    Mutation(
        "too few blocks are launched where every pair has an expert of its own",
        MODULE,
        "begun = min(experts, len(pairs))",
        "begun = 1",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "rows of x are taken by pair",
        MODULE,
        "pair // TOP_K if GATHER",
        "pair if GATHER",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "results are left in the order of experts",
        MODULE,
        "out_row = place if GATHER else pair",
        "out_row = place",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "all experts have the matrix of the first",
        MODULE,
        "expert.to(tl.int64) * (OUTPUTS * INPUTS)",
        "expert.to(tl.int64) * 0",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "matrices of experts have addresses of 32 bits",
        MODULE,
        "expert.to(tl.int64) * (OUTPUTS * INPUTS)",
        "expert.to(tl.int32) * (OUTPUTS * INPUTS)",
        f"{TESTS}::test_matrices_beyond_32_bits",
    ),
    Mutation(
        "inputs beyond the last are added",
        MODULE,
        "is_input = column < INPUTS",
        "is_input = column < INPUTS + K",
        f"{TESTS}::test_is_accurate",
    ),
    Mutation(
        "the sum over k is in the dtype of the results",
        MODULE,
        "total += values.to(tl.float32) * weight.to(tl.float32)",
        "total = (total + values.to(tl.float32) * weight.to(tl.float32)).to(values.dtype).to(tl.float32)",
        f"{TESTS}::test_rounds_where_the_reference_does",
    ),
    Mutation(
        "weights are rounded to the dtype of the results",
        MODULE,
        "weight.to(tl.float32)",
        "weight.to(values.dtype).to(tl.float32)",
        f"{TESTS}::test_rounds_where_the_reference_does",
    ),
    Mutation(
        "the last choice of a token is left out",
        MODULE,
        "tl.static_range(TOP_K)",
        "tl.static_range(TOP_K - 1)",
        f"{TESTS}::test_is_accurate",
    ),
]
