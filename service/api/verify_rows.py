"""What single positions of a verify may say: masks of their own, and what drafts were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import executor_pb2, types_pb2

from service.api.masks import check_choice
from service.api.validation import RequestLimits
from service.api.vocabulary import check_vocabulary
from service.errors import InvalidArgument

# Tokens of a verify that can have rows of their own, and tokens in a draft's list: looked at in one go.
MAX_ROWS = 64
MAX_DRAFT_TOKENS = 4096
# What float32 and a softmax may leave of 1.
_SUM_ERROR = 1e-3


def check_verify_rows(request: executor_pb2.ForwardVerifyRequest, limits: RequestLimits) -> None:
    """What single positions say can be met: masks leave a choice, and drafts could have been drawn."""
    parents = request.parents or range(len(request.token_ids) - 1)
    is_speculative = request.accept == types_pb2.VERIFY_ACCEPT_SPECULATIVE
    if not request.rows and not (is_speculative and len(request.token_ids) > 1):
        return
    if len(request.rows) != len(request.token_ids):
        text = f"{len(request.rows)} rows for {len(request.token_ids)} tokens: one for each is needed"
        raise InvalidArgument("BAD_VERIFY_ROWS", "rows", text)
    if len(request.rows) > MAX_ROWS:
        raise InvalidArgument("BAD_VERIFY_ROWS", "rows", f"at most {MAX_ROWS} are looked at")
    for index, row in enumerate(request.rows):
        try:
            if row.HasField("mask"):
                check_choice(row.mask, request.output.sampling, limits)
        except InvalidArgument as error:
            field = f"rows[{index}]{error.field.removeprefix('output')}"
            raise InvalidArgument(error.reason, field, error.message) from None
        drawn = [request.token_ids[at] for at, parent in enumerate(parents, start=1) if parent == index]
        if row.HasField("draft") != (is_speculative and bool(drawn)):
            text = "needed for each token that another follows, and with VERIFY_ACCEPT_SPECULATIVE only"
            raise InvalidArgument("BAD_DRAFT", f"rows[{index}].draft", text)
        if row.HasField("draft"):
            _check_draft(row.draft, drawn, limits, f"rows[{index}].draft")


def _check_draft(
    draft: types_pb2.DraftProbabilities, drawn: Sequence[int], limits: RequestLimits, field: str
) -> None:
    """A distribution that these tokens can have been drawn from."""
    import numpy as np  # noqa: PLC0415 - most gateways never see a draft

    if draft.dense:
        if len(draft.dense) != 4 * limits.vocab_size or draft.token_ids or draft.probabilities:
            text = f"{4 * limits.vocab_size} bytes hold a probability for each token, and replace the lists"
            raise InvalidArgument("BAD_DRAFT", f"{field}.dense", text)
        probabilities = np.frombuffer(draft.dense, dtype="<f4")
        impossible = [token for token in drawn if not probabilities[token] > 0]
    else:
        ids = np.fromiter(draft.token_ids, dtype=np.int64, count=len(draft.token_ids))
        probabilities = np.fromiter(draft.probabilities, dtype=np.float32, count=len(draft.probabilities))
        fits = 0 < len(ids) == len(probabilities) <= MAX_DRAFT_TOKENS
        if not fits or len(np.unique(ids)) < len(ids):
            text = f"1 to {MAX_DRAFT_TOKENS} different tokens are needed, with a probability each"
            raise InvalidArgument("BAD_DRAFT", f"{field}.token_ids", text)
        check_vocabulary(draft.token_ids, limits, f"{field}.token_ids")
        impossible = [token for token in drawn if not probabilities[ids == token].sum() > 0]
    # Written so that NaN fails.
    if not (probabilities.min() >= 0 and abs(float(probabilities.sum(dtype=np.float64)) - 1) <= _SUM_ERROR):
        raise InvalidArgument("BAD_DRAFT", field, "probabilities must not be below 0, and sum up to 1")
    if impossible:
        raise InvalidArgument("BAD_DRAFT", field, f"token {impossible[0]} cannot have been drawn from it")
