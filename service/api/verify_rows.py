"""Checks of a verify's drafts: the tree, and the mask and draft distribution of each row."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import executor_pb2, types_pb2

from service.api.masks import check_choice, check_vocabulary
from service.api.request_limits import RequestLimits
from service.api.validation import refuse_unknown
from service.errors import InvalidArgument

# The most tokens of a tree: the tree attention mask of a token is a 64-bit number.
MAX_TREE_TOKENS = 64
# The most rows of a verify, and tokens in a draft's list. Checking them does not yield to the event loop.
MAX_ROWS = 64
MAX_DRAFT_TOKENS = 4096
# The sum of probabilities may differ from 1 by this, because of float32 and softmax.
_SUM_ERROR = 1e-3


def check_tree(request: executor_pb2.ForwardVerifyRequest) -> None:
    """Checks that the parents of a verify, if any, form a tree, and that `accept` keeps one path of it."""
    parents, tokens = request.parents, len(request.token_ids)
    if not parents:
        return
    if len(parents) != tokens - 1:
        text = f"{len(parents)} parents for {tokens} tokens: each token but the first needs one"
        raise InvalidArgument("BAD_TREE", "parents", text)
    if tokens > MAX_TREE_TOKENS:
        raise InvalidArgument("BAD_TREE", "parents", f"a tree has at most {MAX_TREE_TOKENS} tokens")
    for index, parent in enumerate(parents):
        if parent > index:
            text = f"the parent of token {index + 1} is token {parent}, which does not precede it"
            raise InvalidArgument("BAD_TREE", f"parents[{index}]", text)
    if request.accept == types_pb2.VERIFY_ACCEPT_ALL:
        raise InvalidArgument("BAD_ACCEPT", "accept", "a tree needs a mode that keeps one path")


def check_verify_rows(request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits) -> None:
    """Checks the options of single rows: masks leave a token allowed, and drafts fit their tokens."""
    parents = request.parents or range(len(request.token_ids) - 1)
    is_speculative = request.accept == types_pb2.VERIFY_ACCEPT_SPECULATIVE
    if not request.rows and not (is_speculative and len(request.token_ids) > 1):
        return
    if len(request.rows) != len(request.token_ids):
        text = f"{len(request.rows)} rows for {len(request.token_ids)} tokens: each token needs one"
        raise InvalidArgument("BAD_VERIFY_ROWS", "rows", text)
    if len(request.rows) > MAX_ROWS:
        raise InvalidArgument("BAD_VERIFY_ROWS", "rows", f"at most {MAX_ROWS} are allowed")
    for index, row in enumerate(request.rows):
        refuse_unknown(row, f"rows[{index}].")
        try:
            if row.HasField("mask"):
                check_choice(row.mask, request.output.sampling, limits)
        except InvalidArgument as error:
            field = f"rows[{index}]{error.field.removeprefix('output')}"
            raise error.at(field) from None
        drawn = [request.token_ids[at] for at, parent in enumerate(parents, start=1) if parent == index]
        if row.HasField("draft") != (is_speculative and bool(drawn)):
            text = "must be given for each token that has a child, and only with VERIFY_ACCEPT_SPECULATIVE"
            raise InvalidArgument("BAD_DRAFT", f"rows[{index}].draft", text)
        if row.HasField("draft"):
            _check_draft(row.draft, drawn, limits, f"rows[{index}].draft")


def _check_draft(
    draft: types_pb2.DraftProbabilities, drawn: Sequence[int], limits: RequestLimits, field: str
) -> None:
    """Checks that a draft is a distribution, and that each drawn token has a probability above 0 in it."""
    import numpy as np  # noqa: PLC0415 - most gateways never get a draft

    if draft.dense:
        if len(draft.dense) != 4 * limits.vocab_size or draft.token_ids or draft.probabilities:
            text = f"must have {4 * limits.vocab_size} bytes, one float32 per token, and excludes the lists"
            raise InvalidArgument("BAD_DRAFT", f"{field}.dense", text)
        probabilities = np.frombuffer(draft.dense, dtype="<f4")
        impossible = [token for token in drawn if not probabilities[token] > 0]
    else:
        count = len(draft.token_ids)
        # Checked before the arrays are made: there may be millions of entries.
        fits = 0 < count == len(draft.probabilities) <= MAX_DRAFT_TOKENS
        if not fits or len(frozenset(draft.token_ids)) < count:
            text = f"must be 1 to {MAX_DRAFT_TOKENS} different tokens with one probability each"
            raise InvalidArgument("BAD_DRAFT", f"{field}.token_ids", text)
        check_vocabulary(draft.token_ids, limits, f"{field}.token_ids")
        ids = np.fromiter(draft.token_ids, dtype=np.int64, count=count)
        probabilities = np.fromiter(draft.probabilities, dtype=np.float32, count=count)
        impossible = [token for token in drawn if not probabilities[ids == token].sum() > 0]
    # Written so that a NaN fails.
    if not (probabilities.min() >= 0 and abs(float(probabilities.sum(dtype=np.float64)) - 1) <= _SUM_ERROR):
        raise InvalidArgument("BAD_DRAFT", field, "probabilities must be at least 0 and sum up to 1")
    if impossible:
        raise InvalidArgument("BAD_DRAFT", field, f"token {impossible[0]} has no probability in it")
