"""The names for `model`: the runtimes, and the models that they serve."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.api.server_state import ServerState
from service.errors import NoTokenizer, RuntimeNotFound
from service.printable import escaped
from service.runtimes.router import Router

_MAX_NAME_CHARACTERS = 100
_MANY_TOKENS = 1 << 20
_OWN = runner_pb2.RUNTIME_KIND_LOCAL


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The runtime for a request, and the sampling settings that the model's authors recommend."""

    runtime: str
    is_local: bool
    sampling_defaults: types_pb2.SamplingParams
    # Of a prompt, if known.
    max_tokens: int = _MANY_TOKENS


class Models:
    """Finds and lists models."""

    def __init__(self, router: Router, state: ServerState) -> None:
        self._router = router
        self._state = state
        self._created = int(time.time())

    def resolve(self, model: str) -> ResolvedModel:
        """The runtime that a request's `model` names: by the runtime's name, or by that of its model.

        Raises NoTokenizer, NoWorker or RuntimeNotFound.
        """
        described = [runtime.describe() for runtime in self._router.runtimes]
        for names in ([each.name for each in described], [each.model_id for each in described]):
            if model in names:
                return self._resolved(described[names.index(model)])
        raise _not_found(model)

    def is_remote(self, model: object) -> bool:
        """Whether it is the name of a provider or its model, so that no worker is needed."""
        described = [runtime.describe() for runtime in self._router.runtimes]
        return any(each.runtime_kind != _OWN and model in (each.name, each.model_id) for each in described)

    def _resolved(self, runtime: runner_pb2.Runtime) -> ResolvedModel:
        if runtime.runtime_kind != _OWN:
            return ResolvedModel(runtime.name, is_local=False, sampling_defaults=types_pb2.SamplingParams())
        ready = self._state.first_ready
        if not ready.tokenizer_json:
            raise NoTokenizer
        return ResolvedModel(
            runtime.name,
            is_local=True,
            sampling_defaults=ready.sampling_defaults,
            max_tokens=self._state.limits.max_seq_tokens,
        )

    def listed(self) -> list[dict[str, Any]]:
        """All names that `resolve` accepts, as OpenAI's API lists models."""
        return [self._entry(name, owner) for name, owner in self._owners().items()]

    def entry(self, name: str) -> dict[str, Any]:
        """The entry of a name. Raises RuntimeNotFound."""
        owners = self._owners()
        if name not in owners:
            raise _not_found(name)
        return self._entry(name, owners[name])

    def _owners(self) -> dict[str, str]:
        """For each name the owner: that of the runtime that `resolve` returns for it."""
        described = [runtime.describe() for runtime in self._router.runtimes]
        by_name = {each.name: each.provider or "quire" for each in described}
        owners: dict[str, str] = {}
        for each in described:
            owners[each.name] = by_name[each.name]
            if each.model_id and each.model_id not in by_name:
                owners.setdefault(each.model_id, by_name[each.name])
        return owners

    def _entry(self, name: str, owner: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": owner}


def _not_found(model: str) -> RuntimeNotFound:
    """RuntimeNotFound with a text for callers that name models."""
    shown = escaped(model[:_MAX_NAME_CHARACTERS])
    return RuntimeNotFound(f"there is no model '{shown}': /v1/models lists the models")
