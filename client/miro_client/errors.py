"""Every error miro raises, and the wire code each travels under.

One tree serves the engine, the worker and the clients: what a call in this process raises is what the same call
raises over a socket. This module is a leaf (standard library only): a client needs neither NumPy nor a compiler.
"""

from __future__ import annotations

from typing import ClassVar


class MiroError(Exception):
    """Base of all errors. `code` is the wire code; `field` names the offending request field, if there is one."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


# --- errors of a request -------------------------------------------------------------------------------------


class RequestError(MiroError):
    """A request was refused or could not be finished; the engine or worker goes on."""


class BadVersion(RequestError):
    code = "bad_version"


class BadFrame(RequestError):
    code = "bad_frame"


class UnknownType(RequestError):
    code = "unknown_type"


class BadField(RequestError, ValueError):
    """A field has the wrong type or lies outside its limits."""

    code = "bad_field"


class Unsupported(RequestError):
    """Well formed, but this model or version cannot do it (text for a model without a tokenizer, say)."""

    code = "unsupported"


class DuplicateId(RequestError):
    code = "duplicate_id"


class UnknownRequest(RequestError):
    code = "unknown_request"


class QueueFull(RequestError):
    """Too many requests wait; `retry_after_ms` says when to try again."""

    code = "queue_full"


class RateLimited(RequestError):
    code = "rate_limited"


class ContextOverflow(RequestError):
    """Prompt and max_tokens do not fit the context."""

    code = "context_overflow"


class Unschedulable(RequestError):
    """The request could never fit, even into an empty KV pool."""

    code = "unschedulable"


class TooLarge(RequestError):
    code = "too_large"


class SlowClient(RequestError):
    code = "slow_client"


class NonFinite(RequestError):
    """The model produced NaN or infinite logits for this request."""

    code = "non_finite"


class AuthError(RequestError):
    code = "auth"


class Draining(RequestError):
    """The worker is shutting down and takes no new work."""

    code = "draining"


class Restarted(RequestError):
    """The worker stopped before the request was finished."""

    code = "restarted"


class InternalError(RequestError):
    code = "internal"


# --- errors that never cross the wire ------------------------------------------------------------------------


class ModelError(MiroError):
    """A model cannot be loaded."""


class ModelNotFound(ModelError):
    """No file or cached model of that name."""


class ModelFormatError(ModelError):
    """The model file is damaged, truncated or inconsistent."""


class UnsupportedModel(ModelError):
    """The file is sound, but its architecture or a tensor type is not supported; the message names it."""


class ConfigError(MiroError, ValueError):
    """An engine or worker setting is out of range; `field` names it."""


class Unavailable(ConfigError):
    """A setting is fine in itself, but what it asks for is taken now: a socket, memory. Later it may not be."""


class EngineClosed(MiroError):
    """The engine was closed, or is used in a process forked from the one that made it."""


class ConnectionLost(MiroError):
    """The worker cannot be reached, or went away in the middle of a request."""


class RequestTimeout(MiroError, TimeoutError):
    """The caller's own deadline passed before an answer came."""


_WIRE_TYPES: tuple[type[RequestError], ...] = (
    BadVersion, BadFrame, UnknownType, BadField, Unsupported, DuplicateId, UnknownRequest, QueueFull, RateLimited,
    ContextOverflow, Unschedulable, TooLarge, SlowClient, NonFinite, AuthError, Draining, Restarted, InternalError,
)  # fmt: skip

#: The one table of wire codes (docs/protocol.md lists them).
CODES: dict[str, type[RequestError]] = {kind.code: kind for kind in _WIRE_TYPES}


def from_wire(code: str, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> RequestError:
    """The exception for a wire code; a code of a newer worker becomes InternalError with the code in its message."""
    kind = CODES.get(code)
    if kind is None:
        return InternalError(f"{code}: {message}", field=field, retry_after_ms=retry_after_ms)
    return kind(message, field=field, retry_after_ms=retry_after_ms)
