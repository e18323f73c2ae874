"""Promises 2, 3 and 4: one terminal reply for every request, every KV block accounted for, everything bounded."""

from collections import Counter

import numpy as np
import pytest

from miro_cy import SamplingParams
from miro_cy.errors import ContextOverflow, QueueFull
from miro_cy.requests import Request


class Workload:
    """Random requests, aborts and steps over one engine; keeps what each request was told."""

    def __init__(self, engine, seed, poison=0.0):
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.poison = poison
        self.added, self.aborted = [], []
        self.tokens, self.ends = Counter(), Counter()
        self.reasons = Counter()
        self.refused = 0
        self.asked = {}

    def spoil(self, view, logits):
        """Executor hook: now and then a row of logits turns to NaN."""
        if self.poison and self.rng.random() < self.poison:
            logits = logits.copy()
            logits[self.rng.integers(len(logits)) :][:1] = np.nan
        return logits

    def add(self):
        rng = self.rng
        prompt = rng.integers(0, self.engine.vocab_size, int(rng.integers(1, 60)))
        params = SamplingParams(max_tokens=int(rng.integers(0, 40)), seed=int(rng.integers(2**32)), top_k=50)
        try:
            request = self.engine.add(Request({"tokens": prompt}, params))
        except QueueFull:
            self.refused += 1
        else:
            self.added.append(request)
            self.asked[request] = params.max_tokens

    def abort(self):
        if self.added:
            request = self.added[int(self.rng.integers(len(self.added)))]
            live = self.ends[request] == 0 and request not in self.aborted and self.asked[request] > 0
            assert self.engine.abort(request) == live
            if live:
                self.aborted.append(request)

    def step(self):
        events = self.engine.step()
        assert max(Counter(event.request_id for event in events).values(), default=0) <= 1
        for event in events:
            assert self.ends[event.request_id] == 0, "an event after the last one"
            assert event.request_id not in self.aborted or event.finish_reason == "cancelled"
            self.tokens[event.request_id] += len(event.tokens)
            if event.finish_reason is not None:
                self.ends[event.request_id] += 1
                self.reasons[event.finish_reason] += 1
                assert event.usage.completion_tokens == self.tokens[event.request_id]
                assert (event.error is not None) == (event.finish_reason == "error")

    def run(self, rounds, after_step):
        for _ in range(rounds):
            what = self.rng.random()
            if what < 0.3:
                self.add()
            elif what < 0.4:
                self.abort()
            else:
                self.step()
                after_step()
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
            after_step()
        raise AssertionError("the workload never ends")


@pytest.fixture
def tight(load, golden):
    """An engine whose pool is much too small for what its queue may hold."""
    block = load(golden("llama"))._parts.spec.kv_bytes_per_token("fp32") * 16
    return load(
        golden("llama"),
        threads=1,
        block_size=16,
        kv_memory=14 * block,
        max_num_seqs=8,
        max_waiting=12,
        max_step_tokens=64,
    )


def check_blocks(engine):
    engine.check_integrity()
    stats = engine.stats()
    assert 0 <= stats["free_blocks"] + stats["cached_blocks"] <= stats["total_blocks"]
    if stats["running"] == 0:
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
    else:
        assert stats["free_blocks"] + stats["cached_blocks"] < stats["total_blocks"]


@pytest.mark.parametrize("seed", range(3))
def test_promise_conservation(tight, seed):
    work = Workload(tight, seed)
    work.run(700, lambda: check_blocks(tight))
    stats = tight.stats()
    assert stats["preemptions"] > 0
    assert work.reasons["cancelled"] > 5
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("seed", range(3))
def test_promise_one_terminal_reply(tight, steer, seed):
    work = Workload(tight, 100 + seed, poison=0.03)
    steer(tight).after = work.spoil
    work.run(700, lambda: None)
    assert dict.fromkeys(work.added, 1) == dict(work.ends)
    assert min(work.reasons[reason] for reason in ("length", "cancelled", "error")) > 3
    assert work.refused > 0
    assert all(work.tokens[request] <= work.asked[request] for request in work.added)
    assert not any(tight.abort(request) for request in work.added)
    tight.check_integrity()


def test_promise_one_terminal_reply_when_every_step_may_fail(tight, steer):
    """The executor itself breaks down now and then: still one end each, and nothing is lost."""
    work = Workload(tight, 7)

    def fail(view):
        if work.rng.random() < 0.02:
            raise RuntimeError("the executor broke")

    steer(tight).before = fail
    work.run(700, lambda: check_blocks(tight))
    assert dict.fromkeys(work.added, 1) == dict(work.ends)
    assert min(work.reasons["error"], work.reasons["length"]) > 3


def test_promise_bounded_queue(tight):
    """The queue takes max_waiting, then says so by name; what was in it is served."""
    ids = [tight.add(Request({"tokens": [i]}, SamplingParams(max_tokens=3, seed=i))) for i in range(12)]
    with pytest.raises(QueueFull) as caught:
        tight.add(Request({"tokens": [1]}, SamplingParams(max_tokens=3)))
    assert caught.value.code == "queue_full"
    assert 0 < caught.value.retry_after_ms <= 60_000
    ends = Counter()
    while tight.has_work:
        ends.update(event.request_id for event in tight.step() if event.finish_reason)
    assert ends == Counter(ids)


def test_promise_bounded_step(tight, steer):
    """However much is asked for at once, a step stays within its tokens, sequences and logits rows."""
    steered = steer(tight)
    waiting = []
    steered.before = lambda view: waiting.append(tight.stats()["waiting"])
    prompts = [{"tokens": list(range(1 + i, 60 + i))} for i in range(60)]
    results = tight.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
    assert [len(result.tokens) for result in results] == [20] * 60
    assert tight.logits(list(range(200))).shape[0] == 200
    for view in steered.views:
        assert len(view) <= 8
        assert sum(n_tok for _, _, n_tok, _ in view) <= 64 + 8
    assert max(waiting) <= 12 + 8  # preempted ones wait beside those that never ran


def test_promise_bounded_logits(load, golden, steer):
    """Scoring a long prompt takes several steps of at most 64 logits rows."""
    engine = load(golden("llama"), threads=1, step_ms=60_000)
    steered = steer(engine)
    engine.logits([1] * 500)
    rows = [sum(n_log for _, _, _, n_log in view) for view in steered.views]
    assert sum(rows) == 500
    assert 32 < max(rows) <= 64


def test_promise_bounded_admission(tight):
    """What can never fit is refused when it arrives, with the limit, and costs nobody a step."""
    for request in (Request({"tokens": [1] * 500}), Request({"tokens": [1] * 10}, SamplingParams(max_tokens=500))):
        with pytest.raises(ContextOverflow, match=str(tight.context)):
            tight.add(request)
    assert not tight.has_work
