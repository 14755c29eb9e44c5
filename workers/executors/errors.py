"""The errors of an executor. A call that raises one has no effect.

    ExecutorError
    ├── KvMissing             a sequence is not known, or shorter than an operation's position
    ├── DuplicateSequence     a sequence twice in one batch, or a fork's child that exists
    ├── EmptyTokens           nothing to append
    ├── TokenOutOfVocabulary
    ├── RowsOutOfRange        more rows than tokens
    ├── SequenceTooLong       past the model's context, or all of the pool
    ├── NoSuchLayer           hidden states of an unknown layer, or of a model that returns none
    ├── TruncateBeyondEnd
    ├── BadTree               the parents are no tree, or it is too large
    ├── NoTrees               the model does not support token trees
    └── ExecutorClosed        a call after `shutdown`

An executor also raises OutOfPages (`workers.kv.page_pool`), after which a later retry may succeed,
SamplingError (`workers.sampling`) and DeviceLostError (`workers.runners.base`).
"""

from __future__ import annotations


class ExecutorError(Exception):
    """A call is rejected. The message says why."""


class KvMissing(ExecutorError):
    """The sequence is not known, or holds less than the operation's position says."""


class DuplicateSequence(ExecutorError):
    """A sequence occurs twice in one batch, or a new one exists already."""


class EmptyTokens(ExecutorError):
    """There is nothing to append."""


class TokenOutOfVocabulary(ExecutorError):
    """A token id is not in the model's vocabulary."""


class RowsOutOfRange(ExecutorError):
    """The number of wanted rows is negative, or larger than the number of tokens."""


class SequenceTooLong(ExecutorError):
    """The sequence would exceed the maximum length."""


class NoSuchLayer(ExecutorError):
    """The model does not have the requested hidden states."""


class TruncateBeyondEnd(ExecutorError):
    """A sequence cannot be truncated to more tokens than it has."""


class BadTree(ExecutorError):
    """A parent is not before its token, or there are too many tokens."""


class NoTrees(ExecutorError):
    """The model's attention does not support token trees."""


class ExecutorClosed(ExecutorError):
    """The executor was shut down. Only metadata and metrics are available."""
