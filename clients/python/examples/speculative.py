"""Lossless speculative decoding: one model drafts, another verifies all drafts in one forward.

With each draft goes the distribution that it was drawn from. The server keeps or replaces drafts such that
every token is distributed as the verifying model's own samples. Both models have one vocabulary. Without a
second server the model drafts for itself, which shows how it works and saves nothing.

Cost: for each verify `width` forwards of the drafting model, and one of `width` + 1 tokens, which appends
1 to `width` + 1. Shares steps: verifies with other callers of their server, and drafts with those of theirs.

    python clients/python/examples/speculative.py [TARGET] [DRAFT_TARGET]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Client, draft_from_top, output_options, verify_rows

TOP_K = 16


def speculate(
    target: Client,
    draft: Client,
    prompt: list[int],
    count: int,
    end: Container[int],
    temperature: float = 0.8,
    seed: int = 0,
    width: int = 4,
) -> tuple[list[int], int]:
    """At most `count` tokens, the end token included, and how many verifies they took."""
    output = output_options(temperature=temperature, seed=seed)
    # Another seed than the verifier's, because drafts and acceptance must be independent.
    drafting = output_options(temperature=temperature, top_k=TOP_K, top_logprobs=TOP_K, seed=seed + 1)
    verifies = 0
    with target.prefill(prompt, output=output) as cache, draft.prefill(prompt) as helper:
        text = [*prompt, cache.output.token_id]
        while len(text) < len(prompt) + count and text[-1] not in end:
            if helper.seq_len > cache.seq_len:
                helper.truncate(cache.seq_len)  # The rejected drafts.
            step = helper.extend(text[helper.seq_len :], output=drafting)
            drafts, drawn = [step.token_id], [draft_from_top(step.top, temperature)]
            while len(drafts) < width:
                step = helper.decode(drafts[-1], output=drafting)
                drafts.append(step.token_id)
                drawn.append(draft_from_top(step.top, temperature))
            verified = cache.verify(
                [text[-1], *drafts],
                output=output,
                accept="speculative",
                rows=verify_rows(drawn),
            )
            verifies += 1
            for token in verified.tokens:
                text.append(token)
                if token in end:
                    break
    return text[len(prompt) :][:count], verifies


def main(target: str = "127.0.0.1:50051", draft_target: str = "") -> None:
    """Prints the text, and how many tokens each verify gave."""
    with Client(target, timeout_s=120) as client, Client(draft_target or target, timeout_s=120) as draft:
        tokenizer = client.tokenizer()
        prompt = tokenizer.encode("12+34=")
        text, verifies = speculate(client, draft, prompt, 64, tokenizer.end_ids)
    print("12+34=" + tokenizer.decode(text))
    print(f"{len(text)} tokens, {verifies} verifies")


if __name__ == "__main__":
    main(*sys.argv[1:])
