"""`routed_experts` of a choice: the experts that its tokens were routed to, in the forms that trainers read.

There is a row for each token that was the input of a forward: the prompt's from `routed_experts_prompt_start`
on, and all generated ones but the last. A row covers all layers of the model, with zeros for dense layers.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from quire.v1 import types_pb2

from service.extensions.openai.fields import Fields, bad_field, integer
from service.extensions.openai.item_fields import MAX_ID
from service.extensions.openai.models import ResolvedModel

# Values of the setting. NPY is vLLM's form, a .npy file in base64; RAW is prime-rl's, without its header.
NONE, NPY, RAW = "none", "npy", "raw"
_ONE_BYTE_EXPERTS = 256
_START = "routed_experts_prompt_start"
_ROWS_AT_ONCE = 1024


@dataclass(slots=True)
class RoutedExperts:
    """The experts that a request asks for: in a form, from a token of the prompt on.

    Attributes:
        field: The path of the field that has `start`.
        model: The model, once a worker is ready.
    """

    form: str
    start: int
    field: str
    model: types_pb2.ModelDescription = dataclasses.field(default_factory=types_pb2.ModelDescription)

    def check(self, prompt_tokens: int) -> None:
        """Raises InvalidArgument if the prompt ends before `start`."""
        if self.start > prompt_tokens:
            raise bad_field(self.field, f"must be at most {prompt_tokens}, the length of the prompt")

    def encoded(
        self,
        rows: Iterable[bytes],
        num_rows: int,
        string: Callable[[Iterator[str]], Any],
    ) -> Any:
        """The field's value. `rows`: StepOutput.experts of each token. `string`: makes a string of parts."""
        model = self.model
        dtype = np.dtype("u1" if model.num_experts <= _ONE_BYTE_EXPERTS else "<u2")
        shape = (num_rows, model.num_layers, model.experts_per_token)
        parts = _with_all_layers(rows, model, dtype)
        if self.form == NPY:
            file = io.BytesIO()
            head = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, head)
            return string(_base64(itertools.chain([file.getvalue()], parts)))
        # First, because clients search for the data right after the name of the field.
        return {
            "data": string(_base64(parts)),
            "shape": list(shape),
            "start": self.start,
            "dtype": dtype.name,
        }


def routed_experts(
    fields: Fields, form: str, model: ResolvedModel, *, is_stream: bool
) -> RoutedExperts | None:
    """Parses what a request asks for. None: no experts, or the form or runtime has none."""
    start = fields.get(_START, integer, 0, MAX_ID) or 0
    if form == NONE or is_stream or not model.is_local:
        return None
    return RoutedExperts(form, start, fields.path(_START))


def _with_all_layers(
    rows: Iterable[bytes], model: types_pb2.ModelDescription, dtype: np.dtype[Any]
) -> Iterator[bytes]:
    """Yields several rows at a time, with zeros added for layers without experts."""
    left = iter(rows)
    while some := list(itertools.islice(left, _ROWS_AT_ONCE)):
        data = b"".join(some)
        if model.moe_layers < model.num_layers:
            given = np.frombuffer(data, dtype).reshape(len(some), model.moe_layers, model.experts_per_token)
            every = np.zeros((len(some), model.num_layers, model.experts_per_token), dtype)
            every[:, model.moe_layer_ids] = given
            data = every.tobytes()
        yield data


def _base64(parts: Iterable[bytes]) -> Iterator[str]:
    left = b""
    for part in parts:
        data = left + part
        whole = len(data) // 3 * 3
        yield base64.b64encode(data[:whole]).decode()
        left = data[whole:]
    yield base64.b64encode(left).decode()
