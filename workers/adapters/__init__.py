"""LoRA adapters: reading them from directories, and managing them in the slots of a model."""
