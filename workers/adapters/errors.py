"""The error of adapters."""

from __future__ import annotations


class AdapterError(Exception):
    """An adapter cannot be used. The message is one line for the caller, without paths of this machine."""
