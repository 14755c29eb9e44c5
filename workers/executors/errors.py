"""What an executor refuses, by name. A refused call has changed nothing.

    ExecutorError
    ├── KvMissing             a sequence is not known, or shorter than an operation's position
    ├── DuplicateSequence     a sequence twice in one batch, or a fork's child that exists
    ├── EmptyTokens           nothing to append
    ├── TokenOutOfVocabulary
    ├── RowsOutOfRange        more rows than tokens
    ├── SequenceTooLong       past the model's context, or all of the pool
    ├── NoSuchLayer           hidden states of a layer that is not there, or of a model that has none
    ├── TruncateBeyondEnd
    ├── BadTree               parents that are no tree, or one that is too large
    ├── NoTrees               a tree, of a model whose attention takes none
    └── ExecutorClosed        work after `shutdown`

Beside them an executor raises OutOfPages (`workers.kv.page_pool`), which waiting helps, SamplingError
(`workers.sampling`) and DeviceLostError (`workers.runners.base`).
"""

from __future__ import annotations


class ExecutorError(Exception):
    """A call is refused; the message says what is wrong with it."""


class KvMissing(ExecutorError):
    """The sequence is not known, or holds less than the operation's position says."""


class DuplicateSequence(ExecutorError):
    """A sequence occurs twice in one batch, or is to be made and exists."""


class EmptyTokens(ExecutorError):
    """There is nothing to append."""


class TokenOutOfVocabulary(ExecutorError):
    """A token id is not in the model's vocabulary."""


class RowsOutOfRange(ExecutorError):
    """More outputs are wanted than there are tokens, or fewer than none."""


class SequenceTooLong(ExecutorError):
    """The tokens go past what one sequence can have."""


class NoSuchLayer(ExecutorError):
    """Hidden states are wanted that the model does not have."""


class TruncateBeyondEnd(ExecutorError):
    """A sequence cannot be cut to more tokens than it has."""


class BadTree(ExecutorError):
    """A token does not follow one before it, or there are too many of them."""


class NoTrees(ExecutorError):
    """The model computes attention in a way that knows no token trees."""


class ExecutorClosed(ExecutorError):
    """The executor was shut down: it answers questions, and does no more work."""
