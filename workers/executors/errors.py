"""The errors of an engine. A call that raises one has no effect.

It also raises OutOfPages (`workers.kv.page_pool`), after which a later retry may succeed, SamplingError
(`workers.sampling`) and DeviceLostError (`workers.runners.base`).
"""

from __future__ import annotations


class KvMissing(Exception):
    """The sequence is not known, or holds less than the operation's position says."""


class NoTrees(Exception):
    """The model's attention does not support token trees."""
