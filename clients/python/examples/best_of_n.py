"""Best of n: draws n samples of one prompt and returns the most likely one.

The prompt is computed once, and the first tokens of all samples are drawn from it, each with its own seed.
Forks share the pages that they have in common.

Cost: one prefill, one fork, and one decode for each further token of each sample. Shares steps: all samples
advance in one BatchDecode, so n of them take hardly more steps than one.

    python clients/python/examples/best_of_n.py [TARGET] [PROMPT] [TEMPERATURE]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Client, checked, output_options


def samples(
    client: Client, prompt: list[int], n: int, count: int, end: Container[int], temperature: float
) -> list[tuple[float, list[int]]]:
    """`n` texts of at most `count` tokens with their mean log-probabilities, best first."""
    outputs = [output_options(temperature=temperature, seed=seed, logprob=True) for seed in range(n)]
    root = client.prefill(prompt, output=outputs[0], sample_seeds=range(n))
    caches = [root, *root.fork(n - 1)]
    texts = [[sample.token_id] for sample in root.samples]
    logprobs = [[sample.logprob] for sample in root.samples]
    while running := [i for i in range(n) if texts[i][-1] not in end and len(texts[i]) < count]:
        batch = [(caches[i], texts[i][-1], outputs[i]) for i in running]
        for i, answer in zip(running, checked(client.batch_decode(batch)), strict=True):
            texts[i].append(answer.token_id)
            logprobs[i].append(answer.logprob)
    root.fork(0, release=caches)
    scores = [sum(steps) / len(steps) for steps in logprobs]
    return sorted(zip(scores, texts, strict=True), reverse=True)


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=", temperature: str = "1.2") -> None:
    """Prints the samples with their mean log-probabilities, the best one first."""
    with Client(target, timeout_s=120) as client:
        tokenizer = client.tokenizer()
        ids = tokenizer.encode(prompt)
        for score, text in samples(client, ids, 8, 64, tokenizer.end_ids, float(temperature)):
            print(f"{score:.3f}", prompt + tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
