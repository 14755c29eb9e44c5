"""A model without weights: attention over embeddings computed from a token and its position.

It is for tests and benchmarks of the code around a model. It uses the real paged KV cache, and its numbers
can be checked by hand. The next token depends on the key and the value of every position: a wrong, missing or
misplaced page changes it. Up to the logits there are only whole numbers and exact sums, so the bits are the
same in any batch, in chunks of any size, and on any machine.

Let turn(i, x) = x * 16807^(i + 2) mod P, with the prime P = 2^31 - 1. Let sign(i, x) be 1 if that is below
P / 2, and otherwise -1. An embedding is a row of such signs, where the simplest model of this kind has a
one-hot row. Token t at position p has the embedding, with N = D - 2,

    1, p, and for c = 0 .. N - 1: sign(c, t + 1) * sign(N + c, p + 1)

Key and value are the embedding. Of the two query heads the first accepts all positions, and the other one
those whose embedding has the same sign number c = (p + 1) mod N as that of position p. The score of position
s, whose key is at place a of the sequence, is

    ln 2 * ((p - s) - (p - a) - 128 * (1 if sign c differs, else 0))   without the last term in the first head

The first and the last term are a product of query and key; the middle one is ALiBi's. Keys that are in their
places and accepted have the score 0, and a sink has 64 * ln 2. So each accepted position has the weight
2^-64, others have none in float32, and a head's result times 2^64 is the sum of the accepted embeddings:
whole numbers. A key that is d places behind its own place has 2^d times this weight.

The sums of both heads and all elements but p's, numbered j = 0 .. 2 * D - 1, become one phase for each
i < D / 2: the sum over j of sums[j] * (16807^(2 * i * D + j + 2) mod P), modulo 8191. The logit of token t is

    sum over i of cos(2 * pi * (phase[i] / 8191 - turn(i, t + 1) / P))

computed as a product of rows of cosines and sines, rounded to multiples of a power of 2: an exact sum.

Dimension letters: T tokens of the batch; R wanted rows; H = 2 query heads; D = 32 width of a head; V = 1024
vocabulary; L positions in the table.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kernels.attention_scoring import Scoring
from kernels.cpu import paged_attention as cpu_attention
from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues, Pages
from kernels.paged_attention import paged_attention
from workers.kv.state_tensors import StateShape
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.page_writes import PageWrites

VOCAB_SIZE, NUM_HEADS, HEAD_DIM = 1024, 2, 32
_SIGNS, _PAIRS = HEAD_DIM - 2, HEAD_DIM // 2
_GENERATOR, _PRIME = 16807, 2**31 - 1
# The number of phases, which is small enough for a table.
_PHASES = 8191
# Half of the exponent of 2 that a position loses if it is not accepted: then its weight is 0 in float32.
_ACCEPTANCE = 64.0
# The exponent of the sink, and of the factor that makes a head's results whole numbers: a power of 2, so that
# the kernel recovers it exactly from a natural logarithm in float32.
_SINK = 64
# Whole numbers up to this are exact in float32.
_EXACT = 2**24


class EmbeddingAttention:
    """The model of the module's docstring, as a `Model`. float32."""

    dtype = torch.float32
    # Without norms and a residual stream there are no hidden states.
    has_hidden_states = False
    takes_trees = True
    packs_kv = True
    kv_layers: tuple[LayerKv, ...] = (LayerKv(1, HEAD_DIM, HEAD_DIM),)
    state_shapes: tuple[StateShape, ...] = ()
    batch_invariant = True
    graphable = False
    max_lora_slots = 0
    rotation_bytes = (1 + NUM_HEADS) * HEAD_DIM * torch.float32.itemsize

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Compute the tables of tokens."""
        self.device = torch.device(device)
        logarithm = torch.full((NUM_HEADS,), math.log(2), device=self.device)
        self._scoring = Scoring(math.log(2), sinks=_SINK * logarithm, alibi_slopes=logarithm)
        signs = _signs(VOCAB_SIZE, 0)[:, None]
        self._tokens = functional.pad(signs, (2, 0), value=1.0).to(self.device)  # [V, 1, D]
        # The factors of a token's row at each position, for its key and its queries.
        self._keys, self._queries = torch.empty(0), torch.empty(0)  # [L, 1, D], [L, H, D]
        self._mixing = _mixing().to(self.device)  # [H * D, D / 2]
        self._phases = _circle(torch.arange(_PHASES).double() / _PHASES).to(self.device)
        turns = _turns(VOCAB_SIZE, 0, _PAIRS).double() / _PRIME  # [V, D / 2]
        self._head = _circle(turns).flatten(1).to(self.device)  # [V, D]

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        """Run the attention of the batch.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots.

        Args:
            inputs: The batch. Tokens must be below V.
            kv: Pages of this model's layer and dtype.
            capture: None: it has no hidden states.

        Returns:
            [R, D] cosines and sines of the phases of `inputs.wanted_rows`, in that order.
        """
        assert capture is None, "this model has no hidden states"
        longest = max(inputs.attention.context_lens_host, default=0)
        if longest > self._keys.shape[0]:
            self._lengthen(1 << (longest - 1).bit_length())
        rows = self._tokens.index_select(0, inputs.token_ids)  # [T, 1, D]
        embedded = rows.mul(self._keys.index_select(0, inputs.positions))  # [T, 1, D]
        queries = rows.mul(self._queries.index_select(0, inputs.positions))  # [T, H, D]
        k_pages, v_pages = kv.layer(0)
        if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
            # Not by `paged_attention`, whose checks take longer than the attention here.
            kv_write(embedded, embedded, k_pages, v_pages, inputs.slots)
            attended = torch.empty(queries.shape[0], NUM_HEADS * HEAD_DIM)  # [T, H * D]
            cpu_attention.attend(attended, queries, k_pages, v_pages, inputs.attention, self._scoring)
        else:
            attended = self._attend(embedded, queries, k_pages, v_pages, inputs)
        if inputs.wanted_rows.shape != inputs.token_ids.shape:
            attended = attended.index_select(0, inputs.wanted_rows)  # [R, H * D]
        phases = (attended.double() @ self._mixing).long().remainder_(_PHASES)  # [R, D / 2]
        return self._phases.index_select(0, phases.flatten()).view(-1, HEAD_DIM)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of rows [R, D] from `forward`; owned by the caller."""
        return hidden @ self._head.T

    def _attend(
        self,
        embedded: torch.Tensor,
        queries: torch.Tensor,
        k_pages: Pages,
        v_pages: Pages,
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        """Store keys and values [T, 1, D], and attend with queries [T, H, D], on any device: [T, H * D]."""
        PageWrites(inputs.slots).write(embedded, embedded, k_pages, v_pages)
        scale, sinks, slopes = self._scoring.scale, self._scoring.sinks, self._scoring.alibi_slopes
        attended = paged_attention(
            queries, k_pages, v_pages, inputs.attention, scale=scale, sinks=sinks, alibi_slopes=slopes
        )
        # The compiled kernel uses powers of 2. torch uses exponentials, whose sums are only nearly whole.
        return attended.flatten(1).mul_(2.0**_SINK).round_().mul_(2.0**-_SINK)

    def _lengthen(self, length: int) -> None:
        """Extend the tables of positions to `length`."""
        positions = torch.arange(length)
        signs = _signs(length, _SIGNS)  # [L, N]
        keys = torch.cat((torch.ones(length, 1), positions[:, None].float(), signs), dim=1)
        queries = torch.zeros(length, NUM_HEADS, HEAD_DIM)
        queries[..., 0] = positions[:, None].float()
        queries[..., 1] = -1.0
        queries[:, 1, 0] -= _ACCEPTANCE
        chosen = ((positions + 1) % _SIGNS)[:, None]
        queries[:, 1, 2:].scatter_(1, chosen, _ACCEPTANCE * signs.gather(1, chosen))
        self._keys, self._queries = keys[:, None].to(self.device), queries.to(self.device)


def _turns(count: int, first: int, width: int) -> torch.Tensor:
    """turn(first + c, x + 1) for x < count and c < width: [count, width] int64."""
    multipliers = torch.tensor([pow(_GENERATOR, first + c + 2, _PRIME) for c in range(width)])
    return torch.outer(torch.arange(1, count + 1), multipliers).remainder(_PRIME)


def _signs(count: int, first: int) -> torch.Tensor:
    """sign(first + c, x + 1) for x < count and c < N: [count, N] float32."""
    return (_turns(count, first, _SIGNS) < _PRIME // 2 + 1).float().mul_(2).sub_(1)


def _mixing() -> torch.Tensor:
    """The factors of all heads' results in each phase: [H * D, D / 2] float64, whole numbers times 2^64."""
    numbers = NUM_HEADS * HEAD_DIM
    flat = torch.tensor([pow(_GENERATOR, j + 2, _PRIME) % _PHASES for j in range(_PAIRS * numbers)])
    mixing = flat.view(_PAIRS, numbers).T.double().contiguous()
    mixing[1::HEAD_DIM] = 0  # Sums of positions are not exact.
    return mixing * 2.0**_SINK


def _circle(turns: torch.Tensor) -> torch.Tensor:
    """Cosines and sines, [.., 2] float32, rounded so that products of rows of D / 2 pairs are exact."""
    steps = 2 ** int(math.log2(_EXACT / HEAD_DIM) / 2)
    angles = 2 * math.pi * turns
    return torch.stack((angles.cos(), angles.sin()), dim=-1).mul_(steps).round_().div_(steps).float()
