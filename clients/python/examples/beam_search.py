"""Beam search, as transformers does it with early_stopping=True and length_penalty=1.

Beams with several continuations are forked and those with none released, all in one call. So there are never
many more caches than beams, and they share the pages that they have in common.

Cost: one prefill, then for each token a BatchDecode of all beams, and a ForkCaches if any branches.
Shares steps: the beams with one another, and with other callers. A fork copies one page at most.

    python clients/python/examples/beam_search.py [TARGET] [PROMPT]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Cache, Client, checked, output_options

Beam = tuple[float, list[int], Cache]


def beam_search(
    client: Client, prompt: list[int], width: int, count: int, end: Container[int], top: int
) -> list[tuple[float, list[int]]]:
    """At most `count` tokens, with mean log-probabilities. (1 + end tokens) * width are enough of `top`."""
    ask = output_options(top_logprobs=top)
    beams: list[Beam] = [(0.0, [], client.prefill(prompt, output=ask))]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, count + 1):
        candidates = [
            (score + logprob, at, token)
            for at, (score, _, cache) in enumerate(beams)
            for token, logprob in zip(cache.output.top.token_ids, cache.output.top.logprobs, strict=True)
        ]
        children: list[list[tuple[float, int]]] = [[] for _ in beams]
        room = width
        for rank, (score, at, token) in enumerate(sorted(candidates, reverse=True)[:top]):
            if token in end or length == count:
                if rank < width:
                    done.append((score / length, [*beams[at][1], token]))
            elif room:
                children[at].append((score, token))
                room -= 1
        if len(done) >= width or room == width:
            break
        beams = grow(client, beams, children)
        checked(client.batch_decode([(cache, text[-1]) for _, text, cache in beams], output=ask))
    beams[0][2].fork(0, release=[cache for *_, cache in beams])
    return sorted(done, reverse=True)[:width]


def grow(client: Client, beams: list[Beam], children: list[list[tuple[float, int]]]) -> list[Beam]:
    """A cache for each child: its parent's, or a copy. Parents without children are released."""
    dead = [cache for (*_, cache), own in zip(beams, children, strict=True) if not own]
    alive = [(text, cache, own) for (_, text, cache), own in zip(beams, children, strict=True) if own]
    copies: list[list[Cache]] = [[] for _ in alive]
    if dead or len(alive) < sum(map(len, children)):
        copies = client.fork_caches([(cache, len(own) - 1) for _, cache, own in alive], release=dead)
    return [
        (score, [*text, token], heir)
        for (text, cache, own), new in zip(alive, copies, strict=True)
        for (score, token), heir in zip(own, [cache, *new], strict=True)
    ]


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=") -> None:
    """Prints the four best texts with their mean log-probabilities."""
    with Client(target, timeout_s=120) as client:
        tokenizer, vocab_size = client.tokenizer(), client.model_info().model.vocab_size
        end = tokenizer.end_ids
        top = min((1 + len(end)) * 4, vocab_size)
        for score, text in beam_search(client, tokenizer.encode(prompt), 4, 32, end, top):
            print(f"{score:.3f}", prompt + tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
