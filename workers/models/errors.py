"""The one exception of model loading.

ModelError: a model directory is unreadable, or asks for something that is not supported.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded. The message names the file, and the setting or tensor that is to blame."""
