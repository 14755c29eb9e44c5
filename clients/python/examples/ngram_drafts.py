"""Speculative decoding without a draft model (prompt lookup): drafts are found in the text itself.

If the last tokens occurred before, what followed them then is the draft. Code, quotations, lists and edits
repeat themselves; other texts cost the same as without drafts, since a verify without drafts is a decode. The
text is that of a greedy loop.

Cost: a forward of 1 to WIDTH + 1 tokens appends the accepted drafts and one more token. Shares steps: with
other callers.

    python clients/python/examples/ngram_drafts.py [TARGET] [PROMPT]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Client

LONGEST = 3
WIDTH = 8


def look_up(text: list[int]) -> list[int]:
    """The tokens after an earlier occurrence of the last tokens of `text`: the longest and latest match."""
    for length in range(LONGEST, 0, -1):
        for at in range(len(text) - length - 1, -1, -1):
            if text[at : at + length] == text[-length:]:
                return text[at + length : at + length + WIDTH]
    return []


def generate(client: Client, prompt: list[int], count: int, end: Container[int]) -> tuple[list[int], int]:
    """At most `count` tokens, the end token included, and how many forwards they took after the prompt."""
    forwards = 0
    with client.prefill(prompt) as cache:
        text = [*prompt, cache.output.token_id]
        while len(text) < len(prompt) + count and text[-1] not in end:
            verified = cache.verify([text[-1], *look_up(text)])
            forwards += 1
            for token in verified.tokens:
                text.append(token)
                if token in end:
                    break
    return text[len(prompt) :][:count], forwards


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=") -> None:
    """Prints the text, and the number of forwards."""
    with Client(target, timeout_s=120) as client:
        tokenizer = client.tokenizer()
        text, forwards = generate(client, tokenizer.encode(prompt), 128, tokenizer.end_ids)
    print(prompt + tokenizer.decode(text))
    print(f"{len(text)} tokens, {forwards} forwards")


if __name__ == "__main__":
    main(*sys.argv[1:])
