"""Random workloads: whatever arrives, fails, is cancelled, forked, made to wait or joined, and whatever beams do,
nothing leaks, all end, and a replay is identical."""

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
#: Keys that a query of each layer group sees; 0: all.
WINDOWS = [(0,), (0,), (0, 0), (7,), (1,), (0, 5), (0, 2, 2), (0, 0, 9), (6, 6), (11, 3), (4, 1)]


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
        case ("join", victim, generated):
            return world.join(victim, generated)
        case ("hold", victim):
            return world.on_hold.add(victim)
        case ("resume", victim, token):
            return world.resume(victim, token)
        case ("release",):
            return world.release()
        case ("finish", victim):
            return world.cancel(victim) if world.scheduler.is_live(victim) else None
        case ("step", victim, how):
            if world.plan() is None:
                return None
            sampled, world.is_committed = world.forward(), True
            if how == "cancelled meanwhile":
                world.cancel(victim)
            elif victim in world.scheduler.planned():  # its logits were not finite, or two others go on from it
                sampled[world.scheduler.planned().index(victim)] = -1
            world.now += 0.02
            world.commit(sampled, 0.02)
            if how == "parted":
                for token in (1, 2):
                    if world.scheduler.is_live(victim) and world.can_fork(victim):
                        world.fork(victim, token)
            ends = how in ("not finite", "parted") and victim in world.scheduler.planned()
            if ends and world.scheduler.is_live(victim):
                world.cancel(victim)
            return world.reap()
    raise AssertionError(op)


class SchedulerMachine(RuleBasedStateMachine):
    make_world: ClassVar[Callable[..., Any]]

    @initialize(
        n_blocks=st.integers(3, 24),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(WINDOWS),
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
        self.world = self.make_world(**self.sizes)
        self.capacity = next(n for n in range(48, -1, -1) if sum(self.world.most(n)) <= sizes["n_blocks"])
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
            }
        ),
        kind=st.sampled_from([{}, {"sampled": True}, {"beams": True}]),
        count=st.integers(1, 3),
    )
    def add(
        self,
        share: float,
        max_new: int,
        score: float | None,
        shared: float,
        others: dict[str, Any],
        kind: dict[str, bool],
        count: int,
    ) -> None:
        n_prompt = 1 + int(share * min(self.capacity, 40))
        more = {"logits_from": -1 if score is None else int(n_prompt * score), "shared": int(n_prompt * shared)}
        for _ in range(count):
            self.add_one(n_prompt, max_new, others | kind | more)

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
        world, live = self.world, self.live()
        waiting = [seq for seq in live if world.scheduler.has_computed(seq)]  # for a token, or for other beams
        oldest = min((seq for seq in live if seq not in waiting), default=None, key=self.place)
        rows = self.apply("step")
        if rows is None:
            assert not live or any(map(world.can_resume, live)), "while anything wants to be, something is computed"
        elif self.sizes["policy"] == "fcfs" and oldest not in rows:
            older = [seq for seq in waiting if self.place(seq) < self.place(oldest)]
            assert older, "the oldest sequence always advances, unless older ones that wait have its blocks"
        world.scheduler.check_integrity()

    @precondition(lambda self: any(map(self.world.can_fork, self.live())))
    @rule(count=st.integers(1, 4), token=st.integers(0, 5), data=st.data())
    def fork(self, count: int, token: int, data: st.DataObject) -> None:
        for _ in range(count):
            if able := [seq for seq in self.live() if self.world.can_fork(seq)]:
                self.apply("fork", data.draw(st.sampled_from(able)), token)

    @precondition(lambda self: self.free())
    @rule(steps=st.integers(0, 4), data=st.data())
    def hold(self, steps: int, data: st.DataObject) -> None:
        for seq in data.draw(st.lists(st.sampled_from(self.free()), min_size=1, max_size=4, unique=True)):
            self.apply("hold", seq)
        for _ in range(steps):
            self.step()

    @precondition(lambda self: any(map(self.world.can_resume, self.live())))
    @rule(count=st.integers(1, 4), token=st.integers(0, 5), data=st.data())
    def resume(self, count: int, token: int, data: st.DataObject) -> None:
        for _ in range(count):
            if able := [seq for seq in self.live() if self.world.can_resume(seq)]:
                self.apply("resume", data.draw(st.sampled_from(able)), token)

    @precondition(lambda self: any(map(self.world.can_join, self.live())))
    @rule(count=st.integers(1, 3), share=st.floats(0.0, 1.0), token=st.integers(0, 5), data=st.data())
    def join(self, count: int, share: float, token: int, data: st.DataObject) -> None:
        """As beams do that come from one that was preempted: what a relative has generated, up to somewhere."""
        for _ in range(count):
            if able := [seq for seq in self.live() if self.world.can_join(seq)]:
                seq = data.draw(st.sampled_from(able))
                n_prompt, max_new = self.world.size(seq)
                generated = self.world.scheduler.tokens(seq).tolist()[n_prompt:]
                self.apply("join", seq, [*generated[: int(share * max_new)][: max_new - 2], token])

    @precondition(lambda self: self.world.on_hold)
    @rule()
    def release(self) -> None:
        self.apply("release")

    def free(self) -> list[int]:
        """Live sequences that no beam search drives."""
        return [seq for seq in self.live() if self.world.is_free(seq)]

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.apply("settle", data.draw(st.sampled_from(self.free())))

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
        world, chunk = self.world, self.world.pool.blocks_for(self.sizes["max_step_tokens"]) + 1
        bound = 0
        for s in running:
            end = sum(world.size(s)) if reserved else len(scheduler.tokens(s)) + 1
            most = world.most(end) if world.is_committed else [n + chunk for n in world.most(end)]
            bound += sum(min(n, world.pool.blocks_for(end)) for n in most)
        assert world.pool.n_blocks - world.pool.available() <= bound

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        bound, steps = self.world.most_steps() + 1, 0  # one may find all that is left on hold
        while self.live():
            self.apply("release")
            self.step()
            steps += 1
            assert steps <= bound, "the oldest advances by a token a step, so this cannot take longer"
        assert not self.world.scheduler.has_work
        assert self.world.pool.available() == self.world.pool.n_blocks
        self.world.check_index()
        self.world.check_outputs()
        # What is reserved is for forks: who joins has blocks of its own. Beams only do when their family runs alone.
        may_preempt = self.sizes["admission"] != "reserve" or "join" in {op[0] for op in self.ops}
        assert may_preempt or self.world.scheduler.preemptions == 0
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
        assert again.searches.found == self.world.searches.found


def test_random_workloads(make_world: Callable[..., Any]) -> None:
    class Bound(SchedulerMachine):
        pass

    Bound.make_world = staticmethod(make_world)
    run_state_machine_as_test(Bound, settings=settings(max_examples=400, stateful_step_count=50, deadline=None))
