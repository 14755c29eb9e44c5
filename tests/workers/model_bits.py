"""Prints hashes of what a model computes, to be compared between instruction sets: see test_instruction_sets.py.

`python -m tests.workers.model_bits DIRECTORY DTYPE QUANTIZATION TOKENS`: first the residual stream and the
output after each sublayer of a prefill, then what is computed for each of so many tokens, which are drawn.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from tests.model_factory import load_decoder
from tests.workers.packing import HandPacker, HandSequence, Item, random_texts
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.layers import ForwardContext, Sublayer
from workers.models.model import PAGE_SIZE, new_pages
from workers.operations import OutputSpec, Sampling
from workers.row_outputs import build_outputs
from workers.sampling import SamplingRow, choose_tokens

PROMPT_TOKENS = 150
SETTINGS = Sampling(temperature=0.9, top_p=0.95, seed=5)
WANTED = OutputSpec(logprob=True, top_logprobs=3)


def digest(*tensors: torch.Tensor) -> str:
    """Of their bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def print_sublayers(decoder: Decoder, text: list[int], pages: int) -> None:
    """What is after each of them, where they run one by one."""
    right = Sublayer.__call__

    def call(
        self: Sublayer, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = right(self, x, residual, context)
        print(f"{type(self.body).__name__} {digest(x, residual)}")
        return x, residual

    Sublayer.__call__ = call  # type: ignore[method-assign]
    packer = HandPacker(PAGE_SIZE, range(pages))
    inputs = packer.pack([Item(HandSequence(), text, range(len(text)))])
    capture = RowCapture({0: range(len(text))})
    kv = new_pages(decoder, pages)
    for rope, table in decoder._rotations(inputs.positions, kv).items():
        print(f"rotation {rope.rope_type} {digest(table)}")
    hidden = decoder.forward(inputs, kv, capture)
    print(f"embedding {digest(capture.found[0])}, hidden {digest(hidden)}, logits {digest(decoder.logits(hidden))}")
    Sublayer.__call__ = right  # type: ignore[method-assign]


def print_tokens(decoder: Decoder, text: list[int], count: int, pages: int) -> None:
    """A prefill in two chunks, then token by token; sublayers are compiled."""
    packer, sequence, kv = HandPacker(PAGE_SIZE, range(pages)), HandSequence(), new_pages(decoder, pages)
    decoder.forward(packer.pack([Item(sequence, text[:40], ())]), kv)
    new = text[40:]
    for index in range(count):
        logits = decoder.logits(decoder.forward(packer.pack([Item(sequence, new)]), kv)).float()
        chosen = choose_tokens(logits, [SamplingRow(SETTINGS, position=sequence.length)])
        (output,) = build_outputs(logits, chosen, [WANTED])
        new = chosen.tolist()
        print(f"token {index}: {new[0]}, logits {digest(logits)}, {output.logprob!r} {output.top_logprobs}")


def main(directory: str, dtype: str, quantization: str, count: str) -> None:
    """Print them. `quantization` may be empty."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    decoder = load_decoder(Path(directory), dtype, pack=True, quantization=quantization or None)
    (text,) = random_texts(3, (PROMPT_TOKENS,))
    pages = (PROMPT_TOKENS + int(count)) // PAGE_SIZE + 1
    with torch.inference_mode():
        print_sublayers(decoder, text, pages)
        print_tokens(decoder, text, int(count), pages)


if __name__ == "__main__":
    main(*sys.argv[1:])
