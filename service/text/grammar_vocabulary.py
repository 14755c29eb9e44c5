"""What each use of llguidance gives to it: a vocabulary, and options. Runs in the process for grammars."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits, TokenizerWrapper

# Masks allow every token that fits the grammar. With forcing, the library would tokenize forced text itself,
# which goes wrong with tokenizers that add or drop spaces.
NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
LIMITS: Final = LLParserLimits(verbose_errors=False)


class Vocabulary(TokenizerWrapper):
    """The vocabulary as the library needs it. The library appends a token for the end of a text."""

    def __init__(self, tokens: list[bytes], special_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = None  # type: ignore[assignment] # the library adds one
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Never called, since nothing is forced."""
        raise NotImplementedError
