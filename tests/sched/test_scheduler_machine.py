"""Random workloads: whatever arrives, fails or is cancelled, nothing leaks, all end, and a replay is identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miro_cy.errors import ContextOverflow, QueueFull, Unschedulable

Op = tuple[Any, ...]


def apply(world: Any, op: Op) -> Any:
    """One operation on a world; `victim` is a sequence that is live."""
    match op:
        case ("add", n_prompt, max_new, more):
            return world.add(n_prompt, max_new, **more)
        case ("step",):
            return world.step()
        case ("failed step", early):
            return world.fail_step(early=early)
        case ("fork", victim, token):
            return world.fork(victim, token)
        case ("settle", victim):
            return world.settle(victim)
        case ("finish", victim):
            return world.scheduler.finish(victim)
        case ("step", victim, how):
            if world.plan() is None:
                return None
            sampled = world.forward()
            if how == "cancelled meanwhile":
                world.scheduler.finish(victim)
            elif victim in world.scheduler.planned():  # its logits were not finite, or two others go on from it
                sampled[world.scheduler.planned().index(victim)] = -1
            world.now += 0.02
            world.commit(sampled, 0.02)
            if how == "parted":
                for token in (1, 2):
                    if world.scheduler.is_live(victim) and world.can_fork(victim):
                        world.fork(victim, token)
            if how in ("not finite", "parted") and victim in world.scheduler.planned():
                world.scheduler.finish(victim)
            return world.reap()
    raise AssertionError(op)


def reserved_and_preempted(world: Any) -> bool:
    return world.config.admission == "reserve" and world.scheduler.preemptions > 0


class SchedulerMachine(RuleBasedStateMachine):
    make_world: ClassVar[Callable[..., Any]]

    @initialize(
        n_blocks=st.integers(3, 24),
        block_size=st.integers(1, 4),
        n_groups=st.sampled_from([1, 1, 2]),
        max_num_seqs=st.integers(1, 6),
        max_step_tokens=st.integers(1, 40),
        max_score_tokens=st.integers(1, 6),
        max_waiting=st.integers(3, 8),
        prefix=st.sampled_from([True, True, True, False]),
        hash_bits=st.sampled_from([64, 2, 0]),
        policy=st.sampled_from(["fcfs", "fcfs", "priority", "fair"]),
        admission=st.sampled_from(["watermark", "watermark", "reserve"]),
        watermark=st.sampled_from([0.0, 0.3]),
    )
    def start(self, **sizes: Any) -> None:
        self.sizes = sizes | {"max_context": 48}
        self.capacity = sizes["n_blocks"] // sizes["n_groups"] * sizes["block_size"]
        self.world = self.make_world(**self.sizes)
        self.ops: list[Op] = []

    def apply(self, *op: Any) -> Any:
        result = apply(self.world, op)
        self.ops.append(op)
        return result

    def live(self) -> list[int]:
        return self.world.live()

    def place(self, seq: int) -> tuple[int, int]:
        """By which a sequence is older or newer when families come in order of arrival."""
        return self.world.family(seq), seq

    @rule(
        share=st.floats(0.0, 1.2),
        max_new=st.integers(0, 20),
        score=st.sampled_from([None, None, 0.0, 0.6]),
        shared=st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0]),
        others=st.fixed_dictionaries(
            {
                "like": st.integers(0, 1),
                "salt": st.sampled_from([b"", b"", b"s"]),
                "priority": st.integers(-2, 2),
                "client": st.sampled_from(["a", "b", "c"]),
                "choices": st.sampled_from([1, 1, 2, 3, 5]),
                "sampled": st.booleans(),
            }
        ),
        count=st.integers(1, 3),
    )
    def add(
        self, share: float, max_new: int, score: float | None, shared: float, others: dict[str, Any], count: int
    ) -> None:
        n_prompt = 1 + int(share * min(self.capacity, 40))
        logits_from = -1 if score is None else int(n_prompt * score)
        for _ in range(count):
            self.add_one(n_prompt, max_new, others | {"logits_from": logits_from, "shared": int(n_prompt * shared)})

    def add_one(self, n_prompt: int, max_new: int, more: dict[str, Any]) -> None:
        try:
            self.apply("add", n_prompt, max_new, more)
        except ContextOverflow:
            assert n_prompt + max_new > 48
        except Unschedulable:
            assert n_prompt + max(max_new - 1, 0) > self.capacity
        except QueueFull:
            times = self.world.scheduler.times
            waiting = sum(self.world.sizes[s] for s in self.live() if times(s)[1] is None)
            assert waiting > 0
            assert waiting + more["choices"] > self.sizes["max_waiting"]
        else:
            assert n_prompt + max_new <= 48
            assert n_prompt + max(max_new - 1, 0) <= self.capacity

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        oldest = min(self.live(), default=None, key=self.place)
        rows = self.apply("step")
        assert (rows is None) == (oldest is None), "while anything is live, something is computed"
        assert not rows or self.sizes["policy"] != "fcfs" or oldest in rows, "the oldest sequence always advances"
        self.world.scheduler.check_integrity()

    @precondition(lambda self: any(map(self.world.can_fork, self.live())))
    @rule(count=st.integers(1, 4), token=st.integers(0, 5), data=st.data())
    def fork(self, count: int, token: int, data: st.DataObject) -> None:
        for _ in range(count):
            if able := [seq for seq in self.live() if self.world.can_fork(seq)]:
                self.apply("fork", data.draw(st.sampled_from(able)), token)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.apply("settle", data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: self.live())
    @rule(
        what=st.sampled_from(["fails", "fails and ends all", "cancel", "cancelled meanwhile", "not finite", "parted"]),
        early=st.booleans(),
        data=st.data(),
    )
    def trouble(self, what: str, early: bool, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.live()))
        if what == "cancel":
            self.apply("finish", victim)
        elif what.startswith("fails"):
            for seq in self.apply("failed step", early):
                if what == "fails and ends all":
                    self.apply("finish", seq)
        else:
            self.apply("step", victim, what)

    @invariant()
    def the_index_is_right(self) -> None:
        self.world.check_index()

    @invariant()
    def promise_3_conservation(self) -> None:
        self.world.scheduler.check_integrity()
        scheduler = self.world.scheduler
        running = [s for s in self.live() if scheduler.state(s) != "queued"]
        assert len(running) == scheduler.n_running <= self.sizes["max_num_seqs"]
        assert len(self.live()) == scheduler.n_running + scheduler.n_waiting
        # Waste: less than a block a sequence and group, beside room for the next token.
        reserved = self.sizes["admission"] == "reserve"
        ends = [sum(self.world.size(s)) if reserved else len(scheduler.tokens(s)) + 1 for s in running]
        blocks = sum(map(self.world.pool.blocks_for, ends))
        assert self.world.pool.n_blocks - self.world.pool.available() <= blocks * self.sizes["n_groups"]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        to_come = {s: self.world.sizes[s] if s in self.world.to_fork else 1 for s in self.live()}
        bound = sum(sum(self.world.size(s)) * n for s, n in to_come.items())
        steps = 0
        while self.live():
            self.step()
            self.world.scheduler.check_integrity()
            steps += 1
            assert steps <= bound, "the oldest advances by a token a step, so this cannot take longer"
        assert not self.world.scheduler.has_work
        assert self.world.pool.available() == self.world.pool.n_blocks
        self.world.check_index()
        self.world.check_outputs()
        assert not reserved_and_preempted(self.world)
        for seq in self.world.outputs:
            first = self.world.logits_from[seq]
            wanted = list(range(first, self.world.size(seq)[0])) if first >= 0 else []
            assert self.world.scored[seq] == wanted, "scored positions come once, in order"
        self.replay()

    def replay(self) -> None:
        again = self.make_world(**self.sizes)
        for op in self.ops:
            apply(again, op)
        assert again.log == self.world.log
        assert again.outputs == self.world.outputs


def test_random_workloads(make_world: Callable[..., Any]) -> None:
    class Bound(SchedulerMachine):
        pass

    Bound.make_world = staticmethod(make_world)
    run_state_machine_as_test(Bound, settings=settings(max_examples=400, stateful_step_count=50, deadline=None))
