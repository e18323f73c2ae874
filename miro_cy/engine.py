"""The engine: what a Python program embeds, and what the worker steps.

with Engine.load("smollm2") as engine:
    print(engine.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8)).text)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from miro_client.checks import check_items, shown
from miro_cy.completions import Gathered, together
from miro_cy.config import MAX_CONTEXT, MAX_WAITING, EngineConfig
from miro_cy.core import EngineCore
from miro_cy.driver import Driver, Ticket, event_of
from miro_cy.errors import BadField, ConfigError, EngineClosed
from miro_cy.loading import Parts, Progress, load_parts
from miro_cy.model.generation import GenerationDefaults
from miro_cy.prepare import Preparer
from miro_cy.requests import Completion, Event, Prompt, Request
from miro_cy.sampling.params import SamplingParams
from miro_cy.sampling.sampler import log_softmax_rows
from miro_cy.text import Tokenizer

Tokens = NDArray[np.int32]


class Engine:
    """A loaded model that serves requests. Make one with `load`; a context manager, or call `close`.

    `generate`, `stream`, `logits`, `tokenize` and `detokenize` may be called from any number of threads. The step level
    (`add`, `abort`, `step`) is for one thread that drives the engine itself, as the worker does.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pid = os.getpid()
        self._closed = False
        self._preparer = Preparer(
            parts.tokenizer,
            parts.spec.vocab_size,
            parts.context,
            parts.scheduler.check,
            parts.config.seed,
        )
        self._driver = Driver(parts.core)

    @classmethod
    def load(
        cls,
        path_or_name: str | os.PathLike[str],
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a GGUF file or a Hugging Face folder, by path, or a pulled model by its name.

        config, overrides: settings, see EngineConfig; overrides win. progress(done, total) counts tensors.
        Raises ModelNotFound, ModelFormatError, UnsupportedModel or ConfigError.
        """
        if not isinstance(path_or_name, (str, os.PathLike)):
            raise ConfigError(f"a model is a path or a name, not {shown(path_or_name)}", field="path_or_name")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, not {type(config).__name__}", field="config")
        try:
            return cls(load_parts(Path(path_or_name), EngineConfig.build(config, overrides), progress))
        except MemoryError:
            raise ConfigError(f"not enough memory to load {path_or_name}", field="kv_memory") from None

    def close(self) -> None:
        """Stop the step thread and give the memory back; calls that wait raise EngineClosed. May be called twice."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._driver.close()
            self._driver.manual(lambda _: self._parts.executor.close())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # While the interpreter ends, the step thread no longer runs, and waiting for it would never end.
        # Not `in self.__dict__`: CPython makes that dictionary only when it is asked for, and the garbage collector, at
        # work on this engine, would take what is new for a reference from outside and keep all that it holds.
        if hasattr(self, "_driver") and not sys.is_finalizing():
            self.close()

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    @property
    def name(self) -> str:
        """The model file's name."""
        return self._parts.name

    @property
    def context(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return self._parts.context

    @property
    def vocab_size(self) -> int:
        return self._parts.spec.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    @property
    def generation(self) -> GenerationDefaults:
        """What the checkpoint says about generating with it; nothing is applied unless a caller does so."""
        return self._parts.generation

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints give equal bits: checkpoint, compute mode, KV dtype, instruction set, version."""
        return self._parts.fingerprint

    # --- whole requests, any thread ------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # str is a Sequence of itself; the first signature takes it
        self, prompts: Prompt, params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete prompts together; a list gives a list in the same order, a single prompt a single Completion.

        prompts: text, {"messages": [...]} or {"tokens": [...]}, or a list of these. params: one for all or one each.
        Raises BadField, ContextOverflow, Unschedulable or Unsupported before anything runs, and what ended a request.
        """
        self._check_open()
        if isinstance(prompts, (str, Mapping)):
            if params is not None and not isinstance(params, SamplingParams):
                raise BadField("a single prompt takes a single SamplingParams", field="params")
            return self._complete([self.prepare(prompts, params or SamplingParams())])[0]
        prompts = check_items("prompts", prompts, MAX_WAITING, what="prompts", error=BadField)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        params = check_items("params", params, MAX_WAITING, what="SamplingParams", error=BadField)
        if len(params) != len(prompts):
            raise BadField(f"{len(params)} SamplingParams for {len(prompts)} prompts", field="params")
        return self._complete([self.prepare(*pair) for pair in zip(prompts, params, strict=True)])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Complete one prompt, an Event at a time; the last of each choice has finish_reason. Closing it cancels.

        Raises as `generate` does, refusals at once.
        """
        self._check_open()
        return self._stream(self.prepare(prompt, SamplingParams() if params is None else params))

    def logits(
        self, tokens: Iterable[int], *, rows: slice | None = None, log_softmax: bool = False
    ) -> NDArray[np.float32]:
        """Logits after each token, float32 [T, vocab]; `rows` computes only a slice of the T rows.

        log_softmax: natural-log probabilities instead, by the sampler's own kernel.
        Raises BadField for ids outside the vocabulary, ContextOverflow or Unschedulable when too long.
        """
        self._check_open()
        ids = self._preparer.token_ids(tokens)
        try:
            wanted = range(*(slice(None) if rows is None else rows).indices(len(ids)))
        except Exception:  # no slice, or one of no integers
            raise BadField(f"rows must be a slice of integers, step not 0, not {shown(rows)}", field="rows") from None
        if len(wanted) == 0:
            return np.zeros((0, self.vocab_size), np.float32)
        first, last = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
        self._parts.scheduler.check(last + 1, 0)
        out = np.empty((last + 1 - first, self.vocab_size), np.float32)
        events: SimpleQueue[tuple[int, Event | Exception]] = SimpleQueue()
        ticket = Ticket(lambda core: core.score(ids[: last + 1], first, out), events)
        self._wait([ticket], events)
        if log_softmax:
            log_softmax_rows(out)
        return out[[i - first for i in wanted]] if len(wanted) != len(out) or wanted.step != 1 else out

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as a prompt: special tokens are recognised, BOS is added when the model says so."""
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(check_items("ids", ids, MAX_CONTEXT, error=BadField))

    # --- the step level, one thread ------------------------------------------------------------------------------

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request ready to be added: prompt tokenised, every limit checked, seed fixed. Any thread."""
        return self._preparer.prepare(prompt, params)

    def add(self, request: Request) -> int:
        """Queue a request, prepared or not; returns its id. Raises RequestError (queue_full among them)."""
        self._check_open()
        if not isinstance(request, Request):
            raise BadField(f"request must be a Request, not {type(request).__name__}", field="request")
        prepared = self.prepare(request.prompt, request.params)  # cheap for what is prepared, and nothing else can tell
        request = replace(request, prompt=prepared.prompt, params=prepared.params)
        return self._driver.manual(lambda core: core.add(request, self._preparer.max_new(request)))

    def abort(self, request_id: int) -> bool:
        """Cancel a request; its last event comes with the next step. False when it is not (or no longer) live."""
        self._check_open()
        return self._driver.manual(lambda core: core.abort(request_id))

    def step(self) -> list[Event]:
        """Run one step over everything that was added; [] when there is nothing to do."""
        self._check_open()
        return self._driver.manual_step()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self._driver.has_unclaimed or self._parts.core.has_work

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: running, waiting, free_blocks, total_blocks, steps, last_step_age_ms, ..."""
        return {**self._parts.core.stats(), "threads": self._parts.executor.threads, "context": self.context}

    def describe(self) -> dict[str, Any]:
        """What is served, for whoever asks from outside: names, sizes, settings, as JSON takes them."""
        return self._parts.describe()

    def warm_up(self) -> None:
        """Generate one token and forget it, so that the first request finds memory and threads ready.

        Does nothing while requests are live. Raises RequestError if the model cannot give one.
        """
        self._check_open()
        length = min(1, self.context - 1)
        request = self.prepare({"tokens": [0]}, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        self._driver.manual(lambda core: core.warm_up(request, length))

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + cached + owned KV blocks = total."""
        self._driver.manual(EngineCore.check_integrity)

    # --- inside --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed("the engine was made before a fork, in another process; load it in this one instead")
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _tickets(self, requests: list[Request], events: SimpleQueue[tuple[int, Event | Exception]]) -> list[Ticket]:
        preparer = self._preparer  # not self: a ticket must not keep the engine alive, least of all on its own thread

        def submit(request: Request) -> Ticket:
            return Ticket(
                lambda core: core.add(request, preparer.max_new(request)),
                events,
                choices=request.params.n_choices,
                sequences=request.params.n_sequences,
            )

        tickets = [submit(request) for request in requests]
        for index, ticket in enumerate(tickets):
            ticket.index = index
        return tickets

    def _complete(self, requests: list[Request]) -> list[Completion]:
        events: SimpleQueue[tuple[int, Event | Exception]] = SimpleQueue()
        results = [[Gathered(r.params.logprobs is not None) for _ in range(r.params.n_choices)] for r in requests]
        self._wait(self._tickets(requests, events), events, results)
        return [together([choice.completion() for choice in choices]) for choices in results]

    def _wait(
        self,
        tickets: list[Ticket],
        events: SimpleQueue[tuple[int, Event | Exception]],
        results: list[list[Gathered]] | None = None,
    ) -> None:
        """Submit and wait until every ticket has ended; whatever interrupts the wait cancels the rest.

        results: where the events of each choice of each ticket go.
        """
        left = sum(ticket.choices for ticket in tickets)
        done = False
        try:  # around the submission: an interrupt just after it must not leave the requests running
            self._driver.submit(tickets)
            while left:
                index, item = events.get()
                event = event_of(item)
                left -= event.finish_reason is not None
                if results is not None:
                    results[index][event.choice].take(event)
            done = True
        finally:
            if not done:
                self._driver.cancel(tickets)

    def _stream(self, request: Request) -> Iterator[Event]:
        events: SimpleQueue[tuple[int, Event | Exception]] = SimpleQueue()
        tickets = self._tickets([request], events)
        left = request.params.n_choices
        try:  # around the submission: an interrupt just after it must not leave the request running
            self._driver.submit(tickets)
            while left:
                event = event_of(events.get()[1])
                left -= event.finish_reason is not None
                yield event
        finally:
            if left:
                self._driver.cancel(tickets)
