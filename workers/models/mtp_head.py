"""A model's own head for multi-token prediction (MTP), with which it drafts: one more decoder layer.

From the model's last hidden state h[i - 1] and the next token t[i] the layer computes a state from which the
model's output head computes the logits of t[i + 1]:

    x[i] = projection(norm(embedding(t[i])), norm(h[i - 1]))
    g[i] = layer(x[i]), which attends to x[1] .. x[i];  logits = head(norm(g[i]))

It can take its own g[i] in place of h[i]. So one head drafts any number of tokens.

Its keys and values are in the pages of the model, as of one more layer: row i in the slot of token i. A
forward of the model writes them, so that they always match the sequence. The h[i - 1] before the first token
of a forward is a recurrent state of the sequence (`workers.kv.states`). There is no h[-1], so position 0 is
never attended to.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2, and the models `deepseek_mtp` and `qwen3_next_mtp` of
vLLM. The transformers library reads no such tensors.

Dimension letters: T tokens of the batch; N items; C hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kernels.state_rows import rows_before
from workers.kv.state_tensors import StateShape
from workers.models.layers import ForwardContext, Norm, Sublayer
from workers.models.linear import Linear, LoadTarget


class MtpHead:
    """The parts of the head that it does not share with the model.

    Attributes:
        state: The index of the head's tensor among the model's recurrent states. Set by the decoder.
    """

    def __init__(
        self,
        projection: Linear,
        of_embedding: Norm,
        of_hidden: Norm,
        layer: Sequence[Sublayer],
        norm: Norm,
        *,
        feeds_normed: bool,
    ) -> None:
        """Take ownership of parameters.

        Args:
            projection: [C, 2 * C], of the embedding and the hidden row, in this order.
            of_embedding: The norm of the embedding before it.
            of_hidden: The norm of the hidden row before it.
            layer: Attention, and an MLP or experts.
            norm: The norm before the model's output head.
            feeds_normed: See `Family`.
        """
        self.state = 0
        self._projection = projection
        self._of_embedding, self._of_hidden = of_embedding, of_hidden
        self._layer = layer
        self._norm = norm
        self._feeds_normed = feeds_normed

    @property
    def state_shape(self) -> StateShape:
        """The state that is kept of a sequence: the last hidden state."""
        weight = self._projection.weight
        return StateShape((1, weight.shape[0]), weight.dtype)

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor, by its name in a checkpoint of DeepSeek."""
        for norm in (self._of_embedding, self._of_hidden, self._norm):
            yield from norm.targets(prefix)
        yield from self._projection.targets(prefix)
        for sublayer in self._layer:
            yield from sublayer.targets(prefix)

    def pack(self) -> None:
        """Pack the filled weights for the matrix library."""
        self._projection.pack()
        for sublayer in self._layer:
            sublayer.body.pack()

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> None:
        """Write the keys and values of a forward of the model, and its last rows as states.

        Args:
            embedded: [T, C] the embeddings of its tokens.
            hidden: [T, C] its rows after the final norm.
            context: The context of that forward.
        """
        assert context.kv.states is not None and context.states is not None
        before = rows_before(hidden, context.kv.states.tensors[self.state], context.states)
        # No row is wanted, so the layer ends with its keys and values.
        inputs = replace(context.inputs, wanted_rows=context.inputs.wanted_rows[:0])
        only_writes = replace(context, inputs=inputs, lora_slots=None, wanted_lora_slots=None, routing=None)
        self._layer[0](None, self._projected(embedded, before, context), only_writes)

    def __call__(
        self, embedded: torch.Tensor, before: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for the model's output head, and `before` of the next call: [N, C] each.

        Args:
            embedded: [N, C] the embeddings of one token of each item.
            before: [N, C] the model's hidden rows of the previous tokens, or the second result for them.
            context: A forward over these tokens with all rows wanted. Keys and values are written.
        """
        residual = self._projected(embedded, before, context)
        x: torch.Tensor | None = None
        for sublayer in self._layer:
            x, residual = sublayer(x, residual, context)
        assert x is not None
        rows = self._norm.of_sum(x, residual)
        return rows, rows if self._feeds_normed else residual

    def _projected(
        self, embedded: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        both = torch.cat([self._of_embedding(embedded), self._of_hidden(hidden)], dim=1)  # [T, 2 * C]
        return self._projection(both, batch_invariant=context.batch_invariant)
