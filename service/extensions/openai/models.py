"""Resolves names of models: runtimes, the models that they serve, and adapters of the local model."""

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
    """The runtime for a request, and the recommended sampling settings of its model."""

    runtime: str
    is_local: bool
    sampling_defaults: types_pb2.SamplingParams
    # The longest prompt, if known.
    max_tokens: int = _MANY_TOKENS
    # The name of the model in answers. Empty: a provider's model.
    model_id: str = ""
    # Empty: the base model.
    adapter_id: str = ""


class Models:
    """Resolves and lists models."""

    def __init__(self, router: Router, state: ServerState) -> None:
        self._router = router
        self._state = state
        self._created = int(time.time())

    def resolve(self, model: str, *, needs_text: bool = True) -> ResolvedModel:
        """The runtime for the `model` of a request.

        Raises NoWorker or RuntimeNotFound; NoTokenizer if `needs_text` and there is no tokenizer.
        """
        runtime = self._named(model)
        if runtime.runtime_kind != _OWN:
            return ResolvedModel(runtime.name, is_local=False, sampling_defaults=types_pb2.SamplingParams())
        ready = self._state.first_ready
        if needs_text and not ready.tokenizer_json:
            raise NoTokenizer
        return ResolvedModel(
            runtime.name,
            is_local=True,
            sampling_defaults=ready.sampling_defaults,
            max_tokens=self._state.limits.max_seq_tokens,
            model_id=ready.model.model_id,
            adapter_id="" if model in (runtime.name, runtime.model_id) else model,
        )

    def is_remote(self, model: object) -> bool:
        """Whether a name is a provider's or its model's, so that no worker is needed."""
        runtime = self._by_name().get(model) if isinstance(model, str) else None
        return runtime is not None and runtime.runtime_kind != _OWN

    def listed(self) -> list[dict[str, Any]]:
        """All names that `resolve` accepts, as OpenAI's API lists models."""
        return [self._entry(name, runtime) for name, runtime in self._by_name().items()]

    def entry(self, name: str) -> dict[str, Any]:
        """The list entry of a name. Raises RuntimeNotFound."""
        return self._entry(name, self._named(name))

    def _entry(self, name: str, runtime: runner_pb2.Runtime) -> dict[str, Any]:
        owner = runtime.provider or "quire"
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": owner}
        if runtime.runtime_kind == _OWN:
            # As in vLLM, for clients that check prompt lengths.
            entry["max_model_len"] = self._state.max_seq_tokens
        return entry

    def _by_name(self) -> dict[str, runner_pb2.Runtime]:
        """The runtimes by their names, then by the names of their models."""
        described = [runtime.describe() for runtime in self._router.runtimes]
        by_name = {each.name: each for each in described}
        for each in described:
            if each.model_id:
                by_name.setdefault(each.model_id, each)
        own = next((each for each in described if each.runtime_kind == _OWN), None)
        if own is not None:
            for adapter_id in self._state.adapter_ids():
                by_name.setdefault(adapter_id, own)
        return by_name

    def _named(self, name: str) -> runner_pb2.Runtime:
        """The runtime with a name. Raises RuntimeNotFound with a message about models."""
        runtime = self._by_name().get(name)
        if runtime is None:
            shown = escaped(name[:_MAX_NAME_CHARACTERS])
            raise RuntimeNotFound(f"there is no model '{shown}': /v1/models lists the models")
        return runtime
