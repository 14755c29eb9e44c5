"""vLLM's calls to load and unload LoRA adapters. Trainers use them to replace an adapter in place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from quire.v1 import admin_pb2

from service.admin import AdminApi
from service.errors import AdapterNotFound, InvalidArgument
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.fields import Fields
from service.extensions.openai.middleware import Access, GuardedRoute
from service.extensions.openai.weight_transfer import OperatorCall

# The names that the fields of LoadAdapter have here.
_NAMES = {"adapter_id": "lora_name", "source": "lora_path"}
# Follows from the adapter's files; and an adapter is always loaded in place.
_IGNORED = frozenset({"base_model_name", "load_inplace", "is_3d_lora_weight"})


class AdapterCalls:
    """The routes. They load and unload adapters that all tenants can use."""

    def __init__(self, admin: AdminApi) -> None:
        self._admin = admin

    def routes(self, bodies: BodyReader) -> list[GuardedRoute]:
        """Returns a route for each call."""
        calls = {
            "/v1/load_lora_adapter": self._load,
            # prime-rl's server has this route at its root.
            "/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }
        return [
            GuardedRoute(path, OperatorCall(call, bodies), Access.LOAD_ADAPTER, ["POST"])
            for path, call in calls.items()
        ]

    async def _load(self, fields: Fields) -> dict[str, Any]:
        request = admin_pb2.LoadAdapterRequest(
            adapter_id=fields.required("lora_name"), source=fields.required("lora_path"), shared=True
        )
        fields.refuse_others(_IGNORED)

        async def requests() -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
            yield request

        with _fields_as_here():
            loaded = await self._admin.LoadAdapter(requests(), cast("Any", None))
        return {"status": "ok", "version": loaded.adapter.version}

    async def _unload(self, fields: Fields) -> dict[str, Any]:
        request = admin_pb2.UnloadAdapterRequest(adapter_id=fields.required("lora_name"), shared=True)
        fields.refuse_others({"lora_int_id"})
        with _fields_as_here():
            response = await self._admin.UnloadAdapter(request, cast("Any", None))
        if not response.unloaded:
            raise AdapterNotFound(request.adapter_id)
        return {"status": "ok"}


@contextlib.contextmanager
def _fields_as_here() -> Iterator[None]:
    """Renames fields in errors to those of these calls."""
    try:
        yield
    except InvalidArgument as error:
        raise error.at(_NAMES.get(error.field, error.field)) from None
