"""The LoRA adapters that callers can name: their versions, their files, and how they are loaded."""
