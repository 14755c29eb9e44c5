"""The errors of an executor. A call that raises one has no effect.

An executor also raises OutOfPages (`workers.kv.page_pool`), after which a later retry may succeed,
SamplingError (`workers.sampling`) and DeviceLostError (`workers.runners.base`).
"""

from __future__ import annotations


class ExecutorError(Exception):
    """A call is rejected, as the RPC of the same name rejects it. The message says why."""


class KvMissing(ExecutorError):
    """The sequence is not known, or holds less than the operation's position says."""


class NoTrees(ExecutorError):
    """The model's attention does not support token trees."""
