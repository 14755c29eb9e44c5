"""Reads GGUF files without torch: for a gateway, which looks at a model before it starts, and for workers."""

from __future__ import annotations


class GgufError(Exception):
    """A file is not what it should be, or not supported. The message is one line, without the file's name."""
