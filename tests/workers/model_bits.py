"""Hashes of what a quantised model computes, to be compared between instruction sets.

`python -m tests.workers.model_bits FILE DTYPE QUANTIZATION TOKENS` prints them; QUANTIZATION may be empty.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.workers.packing import HandPacker, HandSequence, Item, random_texts
from workers.executors.loading import NATIVE, load_served
from workers.models.capture import RowCapture
from workers.models.decoder import Decoder
from workers.models.model import AUTO_KV, BFLOAT16_KV, INT8_KV, PAGE_SIZE, new_pages
from workers.outputs import OutputSpec, Sampling
from workers.row_outputs import build_outputs
from workers.sampling import SamplingRow, choose_tokens

# In chunks of few and of many tokens; over several blocks of attention, and beyond a split of 512 positions.
CHUNKS = (40, 3, 560)
SETTINGS = Sampling(temperature=0.9, top_p=0.95, seed=5)
WANTED = OutputSpec(logprob=True, top_logprobs=3)


def digest(*tensors: torch.Tensor) -> str:
    """Of their bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def lines_of(file: Path, dtype: str, quantization: str | None, count: int) -> Iterator[str]:
    """First the states after each layer of a prefill, then what is computed for each token that is drawn."""
    decoder, _ = load_served(
        file, dtype, torch.device("cpu"), None, backend=NATIVE, self_check=False, quantization=quantization
    )
    assert isinstance(decoder, Decoder)
    (text,) = random_texts(3, (sum(CHUNKS),))
    with torch.inference_mode():
        yield from _layers(decoder, text[: sum(CHUNKS[:2])])
        yield from _tokens(decoder, text, 8, INT8_KV)
        yield from _tokens(decoder, text, 4, BFLOAT16_KV)
        yield from _tokens(decoder, text, count)


def _layers(decoder: Decoder, text: list[int]) -> Iterator[str]:
    """Of a way through the model in which sublayers run one by one."""
    kv, packer, rows = new_pages(decoder, 4), HandPacker(PAGE_SIZE, range(4)), range(len(text))
    capture = RowCapture(dict.fromkeys(range(len(decoder.layers) + 1), rows))
    hidden = decoder.forward(packer.pack([Item(HandSequence(), text, rows)]), kv, capture)
    for layer, states in sorted(capture.found.items()):
        yield f"states {layer}: {digest(states)}"
    yield f"logits: {digest(decoder.logits(hidden))}"


def _tokens(decoder: Decoder, text: list[int], count: int, kv_dtype: str = AUTO_KV) -> Iterator[str]:
    """Sublayers are compiled here."""
    pages = (len(text) + count) // PAGE_SIZE + 1
    packer, sequence = HandPacker(PAGE_SIZE, range(pages)), HandSequence()
    kv = new_pages(decoder, pages, kv_dtype)
    for size in CHUNKS[:-1]:
        decoder.forward(packer.pack([Item(sequence, text[:size], ())]), kv)
        text = text[size:]
    for index in range(count):
        logits = decoder.logits(decoder.forward(packer.pack([Item(sequence, text)]), kv)).float()
        chosen = choose_tokens(logits, [SamplingRow(SETTINGS, position=sequence.length)])
        (output,) = build_outputs(logits, chosen, [WANTED])
        text = chosen.tolist()
        yield f"token {index}: {text[0]} of {digest(logits)}, {output.logprob} {output.top_logprobs}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in lines_of(Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None, int(sys.argv[4])):
        print(line)
