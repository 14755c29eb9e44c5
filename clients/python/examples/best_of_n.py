"""Best of n: many samples of one prompt, of which the one that the model finds most likely is taken.

The prompt is computed once. Its last token is left to the copies, so that each draws its own first token;
copies share the pages of what they have in common.

Cost: one prefill, one fork, and one decode for each token of each sample. Shares steps: all samples go
forward by one BatchDecode, so that n of them cost hardly more steps than one.

    python clients/python/examples/best_of_n.py [TARGET] [PROMPT] [TEMPERATURE]
"""

from __future__ import annotations

import sys
from collections.abc import Container

from quire import Cache, Client, checked, output_options
from tokenizers import Tokenizer


def samples(
    client: Client, prompt: list[int], n: int, count: int, end: Container[int], temperature: float
) -> list[tuple[float, list[int]]]:
    """`n` texts with their mean log-probabilities, best first. The prompt has two tokens or more."""
    outputs = [output_options(temperature=temperature, seed=seed, logprob=True) for seed in range(n)]
    texts: list[list[int]] = [[] for _ in range(n)]
    logprobs: list[list[float]] = [[] for _ in range(n)]
    root = client.prefill(prompt[:-1])
    copies = root.fork(n, release=[root])
    running: list[tuple[int, Cache]] = list(enumerate(copies))
    while running:
        batch = [(cache, texts[i][-1] if texts[i] else prompt[-1], outputs[i]) for i, cache in running]
        answers = checked(client.batch_decode(batch))
        still = []
        for (i, cache), answer in zip(running, answers, strict=True):
            texts[i].append(answer.token_id)
            logprobs[i].append(answer.logprob)
            if answer.token_id not in end and len(texts[i]) < count:
                still.append((i, cache))
        running = still
    copies[0].fork(0, release=copies)
    scores = [sum(steps) / len(steps) for steps in logprobs]
    return sorted(zip(scores, texts, strict=True), reverse=True)


def main(target: str = "127.0.0.1:50051", prompt: str = "12+34=", temperature: str = "1.2") -> None:
    """Prints the samples with their mean log-probabilities, the best one first."""
    with Client(target, timeout_s=120) as client:
        info = client.model_info(include_tokenizer=True)
        tokenizer = Tokenizer.from_buffer(info.tokenizer_json)
        ids, end = tokenizer.encode(prompt).ids, info.model.eos_token_ids
        for score, text in samples(client, ids, 8, 32, end, float(temperature)):
            print(f"{score:.3f}", prompt + tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
