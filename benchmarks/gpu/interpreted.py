"""What Triton's interpreter needs to run kernels in place of a GPU."""

from __future__ import annotations

from typing import Any


def convert_scalars() -> None:
    """Triton 3.6 makes integers of arrays with one element, which NumPy does for scalars only since 2.4."""
    from triton.runtime import interpreter  # noqa: PLC0415 - not where kernels are compiled

    patch = interpreter._patch_lang_tensor  # noqa: SLF001

    def patch_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_too  # noqa: SLF001
