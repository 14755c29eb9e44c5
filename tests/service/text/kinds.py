"""A small tokenizer of each common kind: they differ in how they write spaces, bytes and parts of words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<end>"
_TRAINED_ON = (
    "the cat sat on the mat",
    "世界 世界, né € 😀😀",
    '{"name": "x", "age": 12}',
    "aab abb ba 0123456789",
)
_WORDS = ("a", "b", "ab", "ba", "12", "3", "the", "cat", "{", "}", '"', ":", ",", "-", ".")


def byte_level(*, is_split: bool = True) -> Tokenizer:
    """As most models: any bytes. `is_split` False: a token may end one character and begin the next."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINED_ON, trainer)
    return _with_added(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma: unknown characters become bytes; the first space of a text is stripped."""
    pieces = [
        "\u2581",
        *'abcdefgh{}":,0123456789-.',
        "\u2581a",
        "\u2581the",
        "ab",
        "aa",
        "\u2581\u2581",
        "\u00e9",
    ]
    vocab = {END: 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {piece: len(vocab) + number for number, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("a", "b"), ("a", "a"), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    """As T5: pieces with a mark for a space before them."""
    pieces = ["<unk>", "\u2581", *'abc{}":,0123456789', "\u2581a", "\u2581the", "ab", "\u4e16"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def word_pieces() -> Tokenizer:
    """As BERT: words, and continuations of words with a mark."""
    words = ["[UNK]", *_WORDS, *(f"##{word}" for word in _WORDS), "don", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _with_added(tokenizer)


def words() -> Tokenizer:
    """Words, with a space between them."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(_WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(tokenizer)


def adder() -> Tokenizer:
    """The shipped model's tokenizer: twelve characters."""
    root = Path(__file__).resolve().parents[3]
    return Tokenizer.from_file(str(root / "workers" / "models" / "adder" / "tokenizer.json"))


def end_of_word_suffix() -> Tokenizer:
    """As the first GPT: the text of a token depends on whether another follows. Not supported."""
    parts = [(word, end) for end in ("", "</w>") for word in _WORDS]
    tokenizer = Tokenizer(models.BPE({f"{word}{end}": n for n, (word, end) in enumerate(parts)}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def ctc() -> Tokenizer:
    """As speech models: a repeated token is written once. Not supported."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(_WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.CTC(pad_token="-", word_delimiter_token="|", cleanup=False)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_across_words": lambda: byte_level(is_split=False),
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_pieces": word_pieces,
    "words": words,
    "adder": adder,
}


@functools.cache
def kind(name: str) -> Tokenizer:
    return KINDS[name]()


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Adds a special token, and one that is not special and has its own text."""
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer
