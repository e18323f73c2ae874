"""miro: LLM inference on CPUs. `from miro_cy import Engine, SamplingParams, EngineConfig`.

The packages follow a request's path: `text` (template, tokens) -> `sched` (batching) over `cache` (KV blocks) ->
`model` (forward pass) on `_kernels` -> `sampling` -> `text` again; `engine` ties them together, `formats` reads files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miro_client import __version__

if TYPE_CHECKING:
    from miro_cy.config import EngineConfig
    from miro_cy.engine import Engine
    from miro_cy.requests import Completion, Event, Request
    from miro_cy.sampling.params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Event", "Request", "SamplingParams", "__version__"]

_HOMES = {
    "Completion": "miro_cy.requests",
    "Engine": "miro_cy.engine",
    "EngineConfig": "miro_cy.config",
    "Event": "miro_cy.requests",
    "Request": "miro_cy.requests",
    "SamplingParams": "miro_cy.sampling.params",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `import miro_cy` costs nothing until something is used.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
