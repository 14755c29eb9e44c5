"""The files of a model directory that a load reads beside its weights: names, or patterns of them."""

from __future__ import annotations

SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "quantize_config.json", "quant_config.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
    # Files of sentence-transformers: how hidden states become an embedding.
    "modules.json", "[0-9]_*/config.json",
)  # fmt: skip
# What a tokenizer.json is made from, if there is none.
OTHER_TOKENIZERS = (
    "tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "merges.txt",
)  # fmt: skip
