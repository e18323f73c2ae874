"""Bodies from client to worker. They are decoded strictly: types, ranges, no unknown key unless it begins with x_."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from miro_client.checks import MAX_INT32
from miro_client.wire.kinds import MAX_CREDIT, MAX_MESSAGES, MAX_SAMPLING_ITEMS, MAX_SAMPLING_KEYS


class _Request(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the request bodies: strict."""


class Hello(_Request, kw_only=True):
    minor: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    client: Annotated[str, Meta(max_length=256)] = ""
    lang: Annotated[str, Meta(max_length=64)] = ""


class ChatMessage(_Request, kw_only=True):
    """What a chat template may be told, the same as `Engine` takes; what is nil counts as absent.

    content, tool_calls: a text or a list of maps, and a list of maps. A worker reads them later, within limits on depth
    and number of values; to be sent, they may be given as Python's own.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


SamplingItems = Annotated[list[int | str], Meta(max_length=MAX_SAMPLING_ITEMS)]
SamplingValue = None | bool | int | float | str | SamplingItems
Sampling = Annotated[dict[str, SamplingValue], Meta(max_length=MAX_SAMPLING_KEYS)]

#: Fields of GENERATE that are sampling parameters too, of the same values: none of them has a rule of its own.
ALSO_SAMPLING = ("n", "logprobs")


class Generate(_Request, kw_only=True):
    """Exactly one of prompt, tokens (int32 little-endian) and messages is set. `sampling` is checked by the worker, and
    so are n and logprobs, which stand for the parameters of these names.
    """

    prompt: str | None = None
    tokens: bytes | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    sampling: Sampling = {}
    n: SamplingValue | UnsetType = UNSET
    stream: bool = False
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] | None = None
    queue_ms: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    logprobs: SamplingValue | UnsetType = UNSET
    echo: bool = False
    resume: dict[str, int | bytes] | None = None


class Credit(_Request, kw_only=True):
    add: Annotated[int, Meta(ge=1, le=MAX_CREDIT)]


class Cancel(_Request, kw_only=True):
    pass


class Ping(_Request, kw_only=True):
    """echo: any value, nested at most MAX_ECHO_DEPTH deep; it comes back in the PONG."""

    echo: Any = None


class Stats(_Request, kw_only=True):
    pass


class Health(_Request, kw_only=True):
    pass


class Models(_Request, kw_only=True):
    pass


class Drain(_Request, kw_only=True):
    """grace_ms: how long running requests may go on; None leaves it to the worker."""

    grace_ms: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None


Request = Hello | Generate | Credit | Cancel | Ping | Stats | Health | Models | Drain
