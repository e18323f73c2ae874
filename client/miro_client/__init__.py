"""The Python client of a miro worker: Client, and AsyncClient for asyncio. Needs neither NumPy nor a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miro_client.aio import AsyncClient, AsyncGeneration
    from miro_client.client import Client, Generation
    from miro_client.endpoint import default_endpoint
    from miro_client.errors import MiroError, RequestError
    from miro_client.results import Chunk, Result, Timing, TokenLogprob, Usage

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "Generation",
    "MiroError",
    "RequestError",
    "Result",
    "Timing",
    "TokenLogprob",
    "Usage",
    "default_endpoint",
]

_HOMES = {
    "AsyncClient": "aio",
    "AsyncGeneration": "aio",
    "Chunk": "results",
    "Client": "client",
    "Generation": "client",
    "MiroError": "errors",
    "RequestError": "errors",
    "Result": "results",
    "Timing": "results",
    "TokenLogprob": "results",
    "Usage": "results",
    "default_endpoint": "endpoint",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `import miro_client` (and `miro --help`) does not load ZeroMQ.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"miro_client.{home}"), name)
    globals()[name] = value
    return value
