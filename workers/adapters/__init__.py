"""LoRA adapters: read from directories, and kept in the slots of a model."""
