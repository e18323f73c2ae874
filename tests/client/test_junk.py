"""Whatever is put into an argument of a client, the typed error that names it is all that comes of it here."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from miro_client import Client
from miro_client.base import check_timeout, drain_body
from miro_client.errors import BadField, ConfigError

SHARED = runpy.run_path(str(Path(__file__).parents[1] / "junk.py"))
JUNK, HUGE, check = SHARED["JUNK"], SHARED["HUGE"], SHARED["check"]
PLACES: list[tuple[Callable[[Any], dict[str, Any]], tuple[str, ...]]] = [
    (lambda value: {"prompt": value}, ("prompt",)),
    (lambda value: {"tokens": value}, ("tokens", "prompt")),
    (lambda value: {"tokens": [value]}, ("tokens",)),
    (lambda value: {"messages": value}, ("messages", "prompt")),
    (lambda value: {"messages": [value]}, ("messages[0]",)),
    (lambda value: {"messages": [{"role": value, "content": "a"}]}, ("messages[0].role",)),
    (lambda value: {"messages": [{"role": "user", "content": value}]}, ("messages[0].content",)),
    (lambda value: {"prompt": "a", "timeout": value}, ("timeout",)),
    *(
        (lambda value, name=name: {"prompt": "a", name: value}, (name,))
        for name in ("priority", "queue_ms", "deadline_ms", "max_tokens", "stop", "colour")
    ),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One that reaches nobody: what is good enough to be sent waits, and is cancelled."""
    with Client(f"ipc://{tmp_path_factory.mktemp('junk')}/c.sock") as client:
        yield client


@pytest.mark.parametrize("at", range(len(PLACES)))
@given(value=JUNK)
def test_arguments_of_a_request(client: Client, at: int, value: Any) -> None:
    place, names = PLACES[at]
    check(client.generate, place(value), BadField, *names)


@given(value=JUNK)
def test_arguments_of_a_client(value: Any) -> None:
    if not isinstance(value, str) and value is not None:  # ZeroMQ judges texts
        check(Client, {"endpoint": value}, ConfigError, "endpoint")
    check(check_timeout, {"timeout": value}, BadField, "timeout")
    check(drain_body, {"grace_ms": value}, BadField, "grace_ms")


@pytest.mark.parametrize("endpoint", ["", "\ud800", "\0", "4GiB", "ipc://" + "x" * 10_000])
def test_endpoints_that_are_no_address(endpoint: str) -> None:
    check(Client, {"endpoint": endpoint}, ConfigError, "endpoint")


@pytest.mark.parametrize(
    "value", [-1000, 1.5, 2**70, HUGE, "\ud800", "high", object(), [1]], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("name", ["priority", "queue_ms", "deadline_ms"])
def test_what_is_no_part_of_sampling_is_named_here_or_by_the_worker(worker, connect, name: str, value: object) -> None:
    with pytest.raises(BadField) as caught:
        connect(worker.endpoint).complete("hello", max_tokens=1, **{name: value})
    assert caught.value.field == name
