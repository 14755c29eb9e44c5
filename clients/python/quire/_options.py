"""Makes OutputOptions, DraftProbabilities and VerifyRows from plain Python values."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from quire._enums import number_of
from quire._masks import Allowed, token_mask
from quire.v1 import types_pb2
from quire.v1.sampling_settings import SamplingSettings

# The distribution that a token was drawn from: the probability of each token that could have been drawn, as a
# mapping or as pairs; or a float32 row over the whole vocabulary, as little-endian bytes or as an array.
DraftDistribution: TypeAlias = Mapping[int, float] | Sequence[tuple[int, float]] | bytes | Any


def output_options(  # noqa: PLR0913 - the fields of OutputOptions
    *,
    logprob: bool = False,
    sampled_logprob: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Iterable[int] = (),
    logits: str = "",
    hidden: bool | Iterable[int] = False,
    hidden_format: str = "f32",
    experts: bool = False,
    entropy: bool = False,
    allowed: Allowed | None = None,
    sampling: types_pb2.SamplingParams | None = None,
    **settings: Unpack[SamplingSettings],
) -> types_pb2.OutputOptions:
    """How the next token is chosen, and what is returned about it.

    Args:
        logprob: Return the log-probability of the chosen token under the model's own distribution.
        sampled_logprob: Return its log-probability under the distribution it was drawn from: after mask,
            penalties, and the other settings.
        top_logprobs: Return this many of the most likely tokens, with their log-probabilities.
        logprob_token_ids: Return the log-probabilities of these tokens.
        logits: "f32", "bf16" or "f16": return the row of logits in this format. Empty: do not return it.
        hidden: Return hidden states: True for the last one, after the final norm, or the layers' indexes in
            the transformers library's `hidden_states`, where 0 is the embedding. The output's `hidden` has
            one tensor for each layer, in this order; see `floats`.
        hidden_format: "f32", "bf16" or "f16".
        experts: Return the experts that the row's token was routed to, in a model that has any; see
            `expert_ids`.
        entropy: Return the entropy of the model's own distribution, in nats.
        allowed: The tokens that may be chosen: ids, or a packed mask as bytes; see `token_mask`. None: all.
        sampling: Default settings, such as `model_info().sampling_defaults`.
        settings: Fields of SamplingParams, such as temperature, top_k, top_p, seed. None: as in `sampling`.

    Raises:
        ValueError: `logits` or `hidden_format` is none of these formats, `hidden` has no layers, or a number
            is out of range.
        TypeError: An argument has the wrong type, or a setting has a name that SamplingParams does not have.
    """
    hidden_dtype = number_of("hidden_format", types_pb2.DataType, hidden_format)
    output = types_pb2.OutputOptions(
        logits=number_of("logits", types_pb2.DataType, logits or None),
        top_logprobs=top_logprobs,
        logprob_token_ids=logprob_token_ids,
        mask=None if allowed is None else token_mask(allowed),
        logprob=logprob,
        sampled_logprob=sampled_logprob,
        experts=experts,
        entropy=entropy,
    )
    if hidden is not False:
        output.hidden.layers.extend(() if hidden is True else hidden)
        if not output.hidden.layers and hidden is not True:
            raise ValueError("hidden has no layers: True stands for the last one, and False for none")
        output.hidden.dtype = hidden_dtype
    chosen = sampling_params(settings)
    if sampling is not None or chosen.ByteSize():
        output.sampling.MergeFrom(sampling or types_pb2.SamplingParams())
        output.sampling.MergeFrom(chosen)
    return output


def sampling_params(settings: SamplingSettings) -> types_pb2.SamplingParams:
    """Raises TypeError or ValueError, which name the setting."""
    try:
        return types_pb2.SamplingParams(**settings)
    except (TypeError, ValueError):
        known = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        for name, value in settings.items():
            if name not in known:
                names = ", ".join((*(output_options.__kwdefaults__ or ()), *known))
                raise TypeError(f"there is no setting {name}: there are {names}") from None
            try:
                types_pb2.SamplingParams(**{name: value})  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
        raise


def draft_probabilities(drawn: DraftDistribution) -> types_pb2.DraftProbabilities:
    """The distribution that a draft was drawn from, for `verify(accept="speculative")`.

    Args:
        drawn: {token: probability} or [(token, probability), ...] of all tokens that could have been drawn,
            which sum to 1; or a dense row [vocab_size], as little-endian float32 bytes, or as an array of
            float32 (numpy's, `array("f")`).

    Raises:
        TypeError: `drawn` is an array of another element type, or not an array.
    """
    if isinstance(drawn, bytes):
        return types_pb2.DraftProbabilities(dense=drawn)
    if isinstance(drawn, Mapping):
        return types_pb2.DraftProbabilities(token_ids=drawn.keys(), probabilities=drawn.values())
    if isinstance(drawn, list | tuple):
        token_ids, probabilities = zip(*drawn, strict=True) if drawn else ((), ())
        return types_pb2.DraftProbabilities(token_ids=token_ids, probabilities=probabilities)
    array: Any = drawn
    row = memoryview(array)
    if row.format != "<f" and (row.format, sys.byteorder) != ("f", "little"):
        raise TypeError(f"a dense row has elements of little-endian float32, not of the format {row.format}")
    return types_pb2.DraftProbabilities(dense=row.tobytes())


def draft_from_top(top: types_pb2.TopLogprobs, temperature: float = 1.0) -> types_pb2.DraftProbabilities:
    """The distribution that a draft was drawn from, computed from the draft model's response.

    Correct if the draft model used this temperature, a `top_k` equal to `top_logprobs`, and no other setting;
    at temperature 0, if it was greedy.
    """
    if temperature == 0:
        return types_pb2.DraftProbabilities(token_ids=top.token_ids[:1], probabilities=[1.0])
    weights = [math.exp((logprob - top.logprobs[0]) / temperature) for logprob in top.logprobs]
    total = math.fsum(weights)
    return types_pb2.DraftProbabilities(
        token_ids=top.token_ids, probabilities=[weight / total for weight in weights]
    )


def verify_rows(
    drafts: Sequence[types_pb2.DraftProbabilities | DraftDistribution | None] = (),
    masks: Sequence[Allowed | None] = (),
) -> list[types_pb2.VerifyRow]:
    """The `rows` of a verify: one for each token, that is one more than the number of drafts.

    Args:
        drafts: The distribution of each draft, which only "speculative" needs. Empty: none.
        masks: The mask for each draft, and for the token after the last one. An item that is None, or no
            masks at all: the mask in `output`.

    Raises:
        ValueError: Both are given, and the number of masks is not that of drafts plus one.
    """
    if drafts and masks and len(masks) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts have {len(drafts) + 1} masks, not {len(masks)}")
    rows = [types_pb2.VerifyRow() for _ in range(len(masks) or len(drafts) + 1)]
    for row, draft in zip(rows, drafts, strict=False):
        if isinstance(draft, types_pb2.DraftProbabilities):
            row.draft.CopyFrom(draft)
        elif draft is not None:
            row.draft.CopyFrom(draft_probabilities(draft))
    for row, mask in zip(rows, masks, strict=False):
        if mask is not None:
            row.mask.CopyFrom(token_mask(mask))
    return rows
