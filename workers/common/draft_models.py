"""What a gateway and its workers agree on about draft models."""

from __future__ import annotations

# In place of a draft model's directory: the model's own head for multi-token prediction.
MTP_HEAD = "mtp"
