"""How the worker's threads hand work to one another: bounded, without polling."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Wakeup:
    """An eventfd that interrupts a poll. `set` takes no lock: a signal handler may call it.

    The descriptor lives as long as the object, so that a late `set` can never write into a file that reuses its number.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_set = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        self.is_set = True
        # The counter is full: whoever polls has long been woken.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        self.is_set = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._fd)


class Mailbox(Generic[Item]):
    """A bounded queue between threads that can be closed. `notify` is called after something was put."""

    def __init__(self, limit: int, notify: Callable[[], None] | None = None) -> None:
        self._items: deque[Item] = deque()
        self._limit = limit
        self._notify = notify
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Item) -> bool:
        """Put without waiting; False if full or closed."""
        with self._changed:
            if self._closed or len(self._items) >= self._limit:
                return False
            self._append((item,))
        return True

    def put(self, items: Iterable[Item]) -> bool:
        """Put all at once, waiting while the box is full; False if it was closed."""
        with self._changed:
            while not self._closed and len(self._items) >= self._limit:
                self._changed.wait()
            if self._closed:
                return False
            self._append(items)
        return True

    def push(self, item: Item) -> None:
        """Put beyond the limit: for messages whose number is bounded elsewhere and which must not wait."""
        with self._changed:
            if not self._closed:
                self._append((item,))

    def take(self, *, wait: bool, most: int | None = None) -> list[Item] | None:
        """Up to `most` items (all by default). `wait` blocks until there is one. None once closed."""
        with self._changed:
            while wait and not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            count = len(self._items) if most is None else min(most, len(self._items))
            taken = [self._items.popleft() for _ in range(count)]
            if taken:
                self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Drop what is inside and let every waiting thread go."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _append(self, items: Iterable[Item]) -> None:
        self._items.extend(items)
        self._changed.notify_all()
        if self._notify is not None:
            self._notify()
