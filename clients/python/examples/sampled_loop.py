"""Sampling: temperature, top_p, and a seed that makes the text reproducible.

A draw is a pure function of the seed and the position, so a text can be continued elsewhere or said again,
whatever else the server does. The settings go with each call: another temperature from some token on is
another argument.

Cost: one prefill, one decode for each token; the second prompt finds the first one's KV. Shares steps: each
decode with those of other callers.

    python clients/python/examples/sampled_loop.py [TARGET] [PROMPT] [TEMPERATURE]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Client, OutputOptions, output_options
from tokenizers import Tokenizer


def sample(
    client: Client, prompt: list[int], count: int, end: Container[int], output: OutputOptions
) -> tuple[list[int], float]:
    """At most `count` tokens, and the log-probability of the draws at these settings, in nats."""
    text: list[int] = []
    logprob = 0.0
    with client.prefill(prompt, output=output) as cache:
        while True:
            token = cache.output.token_id
            logprob += cache.output.sampled_logprob
            if token in end:
                return text, logprob
            text.append(token)
            if len(text) == count:
                return text, logprob
            cache.decode(token, output=output)


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=", temperature: str = "1.0") -> None:
    """Prints four texts, one for each seed, with their log-probabilities."""
    with Client(target, timeout_s=120) as client:
        info = client.model_info(include_tokenizer=True)
        tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
        for seed in range(4):
            output = output_options(
                temperature=float(temperature), top_p=0.99, seed=seed, sampled_logprob=True
            )
            text, logprob = sample(client, tokenizer.encode(prompt).ids, 32, info.model.eos_token_ids, output)
            print(seed, f"{logprob:.3f}", prompt + tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
