"""The dtypes of the compiled kernels."""

import torch

# Those that kernels for several have, as the names of their functions end.
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
