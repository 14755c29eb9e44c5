"""Mistakes in paged attention: masks, windows, splits, and who attends what."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

TESTS = "tests/kernels/cuda"
DECODE = f"{TESTS}/test_decode_attention_cuda.py"
PREFILL = f"{TESTS}/test_prefill_attention_cuda.py"
MIXED = f"{TESTS}/test_paged_attention_cuda.py"
TREES = f"{TESTS}/test_tree_attention_cuda.py"
# Of these widths torch attends, with compiled kernels for the CPU or without.
REFERENCE = "tests/kernels/test_paged_attention.py::test_keys_and_values_of_different_widths"

MUTATIONS = [
    Mutation(
        "slots behind the end are read",
        "kernels.cuda.attention_tiles",
        "rows = tl.load(addresses, mask=present[:, None], other=0.0)",
        "rows = tl.load(addresses)",
        f"{DECODE}::test_lengths_around_pages_and_tiles[bf16-None-1]",
    ),
    Mutation(
        "a token does not see itself",
        "kernels.cuda.attention_tiles",
        "positions[None, :] <= row_positions[:, None]",
        "positions[None, :] < row_positions[:, None]",
        f"{PREFILL}::test_chunks_that_start_anywhere[bf16-17-None]",
    ),
    Mutation(
        "a window is one key too long in prefill",
        "kernels.cuda.attention_tiles",
        "positions[None, :] > row_positions[:, None] - WINDOW",
        "positions[None, :] >= row_positions[:, None] - WINDOW",
        f"{PREFILL}::test_chunks_that_start_anywhere[bf16-17-5]",
    ),
    Mutation(
        "the page numbers of the tile before are used",
        "kernels.cuda.attention_tiles",
        "following = keys + TILE",
        "following = keys",
        f"{DECODE}::test_lengths_around_pages_and_tiles[bf16-None-1]",
    ),
    Mutation(
        "what was summed is not scaled to the new maximum",
        "kernels.cuda.attention_tiles",
        "attended = attended * correction[:, None]",
        "attended = attended * 1.0",
        f"{DECODE}::test_lengths_around_pages_and_tiles[fp32-None-1]",
    ),
    Mutation(
        "page addresses have 32 bits",
        "kernels.cuda.attention_tiles",
        "mask=keys < end, other=0).to(tl.int64)",
        "mask=keys < end, other=0).to(tl.int32)",
        f"{DECODE}::test_pages_past_two_to_the_31_elements",
    ),
    Mutation(
        "a window is one key too long in decode",
        "kernels.cuda.decode_attention",
        "tl.maximum(context - WINDOW, 0)",
        "tl.maximum(context - WINDOW - 1, 0)",
        f"{DECODE}::test_lengths_around_pages_and_tiles[bf16-16-1]",
    ),
    Mutation(
        "splits overlap",
        "kernels.cuda.decode_attention",
        "tl.minimum(begin + tiles_a_split * TILE, context)",
        "context",
        f"{DECODE}::test_lengths_around_pages_and_tiles[bf16-None-2]",
    ),
    Mutation(
        "partial results of empty splits are read",
        "kernels.cuda.combine_splits",
        '(lse > float("-inf"))[:, None]',
        "(splits < num_splits)[:, None]",
        f"{DECODE}::test_more_splits_than_tiles[17]",
    ),
    Mutation(
        "future keys are in the part without masks",
        "kernels.cuda.prefill_attention",
        "tl.maximum(not_behind(first_position + 1, root), 0) // TILE * TILE",
        "tl.cdiv(tl.maximum(not_behind(first_position + 1, root), 0), TILE) * TILE",
        f"{PREFILL}::test_chunks_that_start_anywhere[bf16-17-None]",
    ),
    Mutation(
        "the first block of an item goes to the one before",
        "kernels.cuda.prefill_attention",
        "if begins <= block:",
        "if begins < block:",
        f"{PREFILL}::test_many_items_find_their_blocks",
    ),
    Mutation(
        "rows that a group leaves unused are written",
        "kernels.cuda.prefill_attention",
        "(tokens < query_len) & (rows < BLOCK_Q * GROUP)",
        "(tokens < query_len)",
        f"{PREFILL}::test_groups[fp32-3]",
    ),
    Mutation(
        "padded items are divided by nothing",
        "kernels.cuda.prefill_attention",
        "tl.where(total > 0, total, 1.0)",
        "total",
        f"{PREFILL}::test_padded_and_empty_items[bf16]",
    ),
    Mutation(
        "the others of a mixed batch have the pages of the first",
        "kernels.cuda.paged_attention",
        "batch.page_tables[decodes:]",
        "batch.page_tables",
        f"{MIXED}::test_mixed_batches[decodes first-bf16-None]",
    ),
    Mutation(
        "scores are not capped",
        "kernels.cuda.attention_tiles",
        "softcap_log2 * hyperbolic_tangent(products * (scale_log2 / softcap_log2))",
        "products * scale_log2",
        f"{DECODE}::test_features[bf16-softcap-None-1]",
    ),
    Mutation(
        "a cap does not count in prefill",
        "kernels.cuda.prefill_attention",
        "None if softcap is None else softcap * math.log2(math.e)",
        "None",
        f"{PREFILL}::test_features[bf16-softcap-None]",
    ),
    Mutation(
        "a cap is taken for one to base 2",
        "kernels.cuda.decode_attention",
        "None if softcap is None else softcap * math.log2(math.e)",
        "softcap",
        f"{DECODE}::test_features[bf16-softcap-None-1]",
    ),
    Mutation(
        "the tangent beside zero loses a term",
        "kernels.cuda.attention_tiles",
        "(-5.3045494e-2 + square * 1.7241490e-2)",
        "-5.3045494e-2",
        f"{DECODE}::test_features[fp32-softcap-None-1]",
    ),
    Mutation(
        "keys that are far away count more",
        "kernels.cuda.attention_tiles",
        "keys[None, :] - row_positions[:, None])",
        "row_positions[:, None] - keys[None, :])",
        f"{PREFILL}::test_features[bf16-alibi_slopes-None]",
    ),
    Mutation(
        "all heads have the slope of the first",
        "kernels.cuda.attention_tiles",
        "tl.load(alibi_slopes + heads,",
        "tl.load(alibi_slopes + heads * 0,",
        f"{DECODE}::test_features[bf16-alibi_slopes-None-1]",
    ),
    Mutation(
        "sinks take no share",
        "kernels.cuda.attention_tiles",
        "total += tl.exp2(sink - highest)",
        "total += 0.0 * sink",
        f"{PREFILL}::test_features[bf16-sinks-None]",
    ),
    Mutation(
        "sinks take no share where splits are added up",
        "kernels.cuda.decode_attention",
        "combine_splits(out, partials, partial_lse, sinks)",
        "combine_splits(out, partials, partial_lse)",
        f"{DECODE}::test_features[bf16-sinks-None-3]",
    ),
    Mutation(
        "every split has a sink",
        "kernels.cuda.decode_attention",
        "sinks if partials is None else None",
        "sinks",
        f"{DECODE}::test_features[bf16-sinks-None-3]",
    ),
    Mutation(
        "values lie as far apart as keys",
        "kernels.cuda.attention_tiles",
        "KV_HEADS * V, V, F, MASKED)",
        "KV_HEADS * D, V, F, MASKED)",
        f"{PREFILL}::test_keys_and_values_of_different_widths[bf16-24-16]",
    ),
    Mutation(
        "tokens of a tree see their siblings",
        "kernels.cuda.attention_tiles",
        "(is_ancestor & (places < MAX_TREE_TOKENS)[None, :])",
        "(places < MAX_TREE_TOKENS)[None, :]",
        f"{TREES}::test_trees_that_start_anywhere[bf16-17-None]",
    ),
    Mutation(
        "of a tree only the first words are looked at",
        "kernels.cuda.attention_tiles",
        "tl.where((places < 32)[None, :], low[:, None], high[:, None])",
        "tl.where((places < 64)[None, :], low[:, None], high[:, None])",
        f"{TREES}::test_trees_that_start_anywhere[bf16-17-None]",
    ),
    Mutation(
        "a window over a tree goes by slots",
        "kernels.cuda.attention_tiles",
        "tl.where(among, root + tl.load(depths + places, mask=among, other=0), keys)",
        "keys",
        f"{TREES}::test_trees_that_start_anywhere[bf16-17-5]",
    ),
    Mutation(
        "siblings are in the part without masks",
        "kernels.cuda.prefill_attention",
        "not_behind(first_position + 1, root), 0)",
        "first_position + 64, 0)",
        f"{TREES}::test_trees_that_start_anywhere[bf16-17-None]",
    ),
    Mutation(
        "a window of a block of a tree begins with its first token's",
        "kernels.cuda.prefill_attention",
        "not_behind(first_position, root) - WINDOW",
        "first_position - WINDOW",
        f"{TREES}::test_trees_that_start_anywhere[fp32-17-5]",
    ),
    Mutation(
        "a part of a tree is attended as a decode",
        "kernels.cuda.paged_attention",
        "decodes = min(decodes, next(item for item, is_tree in enumerate(trees.is_tree) if is_tree))",
        "pass",
        f"{TREES}::test_trees_in_parts_beside_decodes_and_chunks[fp32]",
    ),
    Mutation(
        "the reference does not cap scores",
        "kernels.attention_reference",
        "if scoring.softcap is not None:",
        "if False:",
        f"{REFERENCE}[dtype0-24-16-softcap]",
    ),
    Mutation(
        "keys that are far away count more in the reference",
        "kernels.attention_reference",
        "view(kv_heads, -1, 1, 1) * ahead[:, None, None]",
        "view(kv_heads, -1, 1, 1) * -ahead[:, None, None]",
        f"{REFERENCE}[dtype0-24-16-alibi_slopes]",
    ),
    Mutation(
        "sinks take no share in the reference",
        "kernels.attention_reference",
        "torch.cat([scores, sinks], -1).softmax(-1)",
        "scores.softmax(-1)",
        f"{REFERENCE}[dtype0-24-16-sinks]",
    ),
]
