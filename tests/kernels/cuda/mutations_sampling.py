"""Mistakes in choosing tokens, cutting, masks and penalties."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

TESTS = "tests/kernels/cuda/test_sampling_cuda.py"

MUTATIONS = [
    Mutation(
        "noise has the digits of float32",
        "kernels.cuda.sampling",
        "tl.rand(key, ids).to(tl.float64)",
        "tl.rand(key, ids)",
        f"{TESTS}::test_noise_has_the_digits_of_float64",
    ),
    Mutation(
        "blocks compete without their noise",
        "kernels.cuda.sampling",
        "scores / temperature + tl.load(block_noise + at, mask=within, other=0.0)",
        "scores / temperature",
        f"{TESTS}::test_a_draw_spreads_over_all_blocks",
    ),
    Mutation(
        "NaN in a block is not reported",
        "kernels.cuda.sampling",
        'tl.store(block_best + out, tl.where(all_usable, best, float("nan")))',
        "tl.store(block_best + out, best)",
        f"{TESTS}::test_unusable_rows_are_marked_and_spare_the_others",
    ),
    Mutation(
        "equals at the end of top_k are counted from the first token",
        "kernels.cuda.sampling_cut",
        "nth_id(row, vocab, cut, kept - above, BLOCK)",
        "nth_id(row, vocab, cut, kept, BLOCK)",
        f"{TESTS}::test_cuts_among_many_equals",
    ),
    Mutation(
        "top_p keeps all equals at its end",
        "kernels.cuda.sampling_cut",
        "tl.where(needed < equals, needed.to(tl.int32), equals)",
        "equals",
        f"{TESTS}::test_cuts_at_exact_shares_of_equals",
    ),
    Mutation(
        "-0.0 is ordered below 0.0",
        "kernels.cuda.sampling_cut",
        "tl.where(values == 0, 0.0, values)",
        "values",
        f"{TESTS}::test_cuts_among_many_equals",
    ),
    Mutation(
        "masks are read most significant bit first",
        "kernels.cuda.sampling_adjust",
        "packed >> (ids % 32)",
        "packed >> (31 - ids % 32)",
        f"{TESTS}::test_masks_forbid_what_they_do_not_name",
    ),
    Mutation(
        "a biased logit is not rounded before its penalty",
        "kernels.cuda.sampling_adjust",
        "kept_finite(old.to(tl.float64) + bias).to(tl.float64)",
        "old.to(tl.float64) + bias",
        f"{TESTS}::test_penalties_round_once_each_and_stay_finite",
    ),
]
