"""JSON of a schema, enforced by the client: llguidance computes the mask of each token.

The same works for any automaton: the server takes a mask of the vocabulary with each call and knows nothing
of grammars. (To let the server do this, use a constraint of Execute.)

Cost: one prefill, one decode for each token, each with a mask of one bit for each token of the vocabulary.
The mask is computed between two decodes. Shares steps: with all callers, masked or not.

    python clients/python/examples/json_schema.py [TARGET] [SCHEMA] [PROMPT]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from quire import Client, output_options
from tokenizers import Tokenizer

# The model's own answer, 46, is none of these.
SCHEMA = '{"type": "integer", "minimum": 0, "maximum": 40}'


def grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, end: int) -> LLTokenizer:
    """The tokenizer for llguidance, or if it cannot read it, one made from the text of each token."""
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=end)
    except ValueError:
        special = [at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        tokens = [tokenizer.decode([at]).encode() for at in range(vocab_size)]
        for at in special:
            tokens[at] = (tokenizer.id_to_token(at) or "").encode()

        class Tokens(SimpleNamespace):
            def __call__(self, text: str) -> list[int]:
                return tokenizer.encode(text).ids

        return LLTokenizer(
            TokenizerWrapper(
                Tokens(eos_token_id=end, bos_token_id=None, tokens=tokens, special_token_ids=special)
            )
        )


def constrained(client: Client, prompt: list[int], matcher: LLMatcher, end: int, count: int) -> list[int]:
    """At most `count` tokens, each the most likely one that the matcher allows."""
    text: list[int] = []
    with client.prefill(prompt, output=output_options(allowed=matcher.compute_bitmask())) as cache:
        while cache.output.token_id != end and len(text) < count:
            text.append(cache.output.token_id)
            matcher.consume_token(text[-1])
            if matcher.is_stopped():
                break
            cache.decode(text[-1], output=output_options(allowed=matcher.compute_bitmask()))
    return text


def main(target: str = "127.0.0.1:50051", schema: str = SCHEMA, prompt: str = "12+34=") -> None:
    """Prints the JSON."""
    with Client(target, timeout_s=120) as client:
        info = client.model_info(include_tokenizer=True)
        tokenizer, end = Tokenizer.from_buffer(info.tokenizer_json), info.model.eos_token_ids[0]
        vocabulary = grammar_tokenizer(tokenizer, info.model.vocab_size, end)
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema))
        if matcher.is_error():
            raise SystemExit(matcher.get_error())
        text = constrained(client, tokenizer.encode(prompt).ids, matcher, end, 200)
    print(tokenizer.decode(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
