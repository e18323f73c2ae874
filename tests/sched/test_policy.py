"""The policies: who is next, that nobody waits for ever, and that nothing is kept of who is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.sched.config import SchedulerConfig
from miro_cy.sched.policy import MAX_IDLE_CLIENTS, FairShare, FirstCome, Policy, PriorityWithAgeing, make_policy

Make = Callable[..., Any]


def take(policy: Policy, prompt: int = 0) -> int | None:
    """Admit the next sequence as the scheduler does."""
    seq = policy.next()
    if seq is not None:
        policy.remove(seq)
        policy.charge(seq, prompt, 0)
    return seq


def take_all(policy: Policy) -> list[int]:
    taken = []
    while (seq := take(policy)) is not None:
        taken.append(seq)
    return taken


def test_settings_name_the_policies() -> None:
    kinds = {name: type(make_policy(SchedulerConfig(policy=name))) for name in ("fcfs", "priority", "fair")}
    assert kinds == {"fcfs": FirstCome, "priority": PriorityWithAgeing, "fair": FairShare}


def test_first_come_first_served() -> None:
    policy = FirstCome()
    for seq in (4, 7, 9, 12):
        policy.add(seq, 0.0, priority=-seq, client=str(seq))
    policy.remove(7)
    assert take_all(policy) == [4, 9, 12]


def test_a_higher_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    policy = PriorityWithAgeing(ageing_s=10.0)
    for seq, now, priority in ((1, 0.0, 0), (2, 1.0, 1), (3, 2.0, 0), (4, 9.0, 1), (5, 11.0, 1), (6, 12.0, 5)):
        policy.add(seq, now, priority, "")
    assert policy.next() == policy.next() == 6
    policy.remove(3)
    assert take_all(policy) == [6, 2, 4, 1, 5], "ten seconds of waiting are a level"


@given(st.lists(st.tuples(st.integers(-100, 100), st.floats(0, 5), st.booleans()), max_size=60), st.floats(0.001, 100))
@settings(deadline=None)
def test_no_priority_passes_one_that_has_aged_by_the_difference(
    steps: list[tuple[int, float, bool]], ageing_s: float
) -> None:
    policy, now = PriorityWithAgeing(ageing_s), 0.0
    waiting: dict[int, tuple[float, int]] = {}
    for seq, (priority, seconds, admit) in enumerate(steps):
        now += seconds
        policy.add(seq, now, priority, "")
        waiting[seq] = (now, priority)
        if admit:
            taken = take(policy)
            assert taken is not None
            arrival, level = waiting.pop(taken)
            for other, its in waiting.values():
                assert level - its + (other - arrival) / ageing_s >= -1e-6


def test_the_client_served_least_goes_first() -> None:
    policy = FairShare()
    for seq in range(20):
        policy.add(seq, 0.0, 0, "many" if seq < 16 else "few")
    taken = [take(policy, prompt=100) for _ in range(10)]
    assert taken == [0, 16, 1, 17, 2, 18, 3, 19, 4, 5]


def test_generated_tokens_count_double_and_long_answers_cost_their_turn() -> None:
    policy = FairShare()
    for seq in range(12):
        policy.add(seq, 0.0, 0, "ab"[seq % 2])
    assert take(policy, prompt=10) == 0
    policy.charge(0, 0, 45)  # 100 in all
    assert [take(policy, prompt=40) for _ in range(4)] == [1, 3, 5, 2]


def test_a_pause_earns_no_credit_and_forgives_no_debt() -> None:
    policy = FairShare()
    policy.add(0, 0.0, 0, "idle")
    take(policy, prompt=10)
    policy.forget(0)
    for seq in range(1, 21):
        policy.add(seq, 0.0, 0, "busy")
    for seq in range(1, 11):
        assert take(policy, prompt=100) == seq
    policy.add(30, 0.0, 0, "idle")
    policy.add(31, 0.0, 0, "idle")
    assert [take(policy, prompt=100) for _ in range(4)] == [30, 11, 31, 12], "turns from now on, not ten in a row"
    policy = FairShare()
    policy.add(0, 0.0, 0, "debtor")
    take(policy, prompt=1000)
    policy.forget(0)
    policy.add(1, 0.0, 0, "debtor")
    policy.add(2, 0.0, 0, "other")
    assert take(policy, prompt=10) == 2


def test_nothing_is_kept_of_clients_that_are_gone() -> None:
    policy = FairShare()
    policy.add(0, 0.0, 0, "blocker")
    for seq in range(1, 3 * MAX_IDLE_CLIENTS):
        policy.add(seq, 0.0, 0, f"client {seq}")
        if seq % 2:
            policy.charge(seq, 5000, 0)
        policy.remove(seq)
        policy.forget(seq)
    sizes = {name: len(part) for name, part in vars(policy).items() if name != "_floor"}
    assert max(sizes.values()) <= MAX_IDLE_CLIENTS + 1, sizes
    assert take_all(policy) == [0]
    policy.forget(0)
    assert not policy._live
    assert not policy._queue
    assert not policy._client


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_promise_no_starvation_between_clients_that_always_want_more(data: st.DataObject) -> None:
    """Each of n clients, whatever the others ask for, is served within a request's cost of its equal share."""
    n = data.draw(st.integers(2, 5))
    policy, served = FairShare(), Counter[str]()
    waiting, seq = Counter[str](), 0
    for _ in range(120):
        for client in map(str, range(n)):
            while waiting[client] < data.draw(st.integers(1, 3)):
                policy.add(seq, 0.0, 0, client)
                waiting[client] += 1
                seq += 1
        chosen = policy.next()
        assert chosen is not None
        client = policy._client[chosen]
        policy.remove(chosen)
        prompt, generated = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 50))
        policy.charge(chosen, prompt, 0)
        policy.charge(chosen, 0, generated)
        policy.forget(chosen)
        waiting[client] -= 1
        served[client] += prompt + 2 * generated
        shares = [served[str(i)] for i in range(n)]
        assert max(shares) - min(shares) <= 200, "a request costs at most 200"


# --- in the scheduler --------------------------------------------------------------------------------------------


def admissions(world: Any, steps: int) -> list[int]:
    """Sequences in the order in which they were first computed."""
    order: dict[int, None] = {}
    for _ in range(steps):
        order.update(dict.fromkeys(world.step() or []))
    return list(order)


def test_promise_no_starvation_by_higher_priorities(make_world: Make) -> None:
    """One with the lowest priority, and a flood of the highest that never ends: it runs when it has aged enough."""
    world = make_world(max_num_seqs=1, policy="priority", ageing_ms=100.0, max_waiting=4)
    world.add(4, 2, priority=100)
    world.step()
    low, arrived = world.add(4, 2, priority=-100), world.now
    while low not in world.outputs:
        while world.scheduler.n_waiting < 4:
            world.add(4, 2, priority=100)
        world.step()
        assert world.now < arrived + 200 * 0.1 + 4 * 0.1, "two hundred levels, and the few before it"
    assert world.now > arrived + 10, "and it did wait"
    world.run()
    world.check_outputs()


def test_a_flood_of_one_client_does_not_delay_another(make_world: Make) -> None:
    world = make_world(max_num_seqs=2, policy="fair", n_blocks=256)
    flood = [world.add(8, 6, client="flood") for _ in range(40)]
    for _ in range(4):
        world.step()
    late = world.add(8, 6, client="late")
    while late not in world.outputs:
        world.step()
    assert sum(seq in world.outputs for seq in flood) <= 4
    world.run()
    world.check_outputs()


def test_who_was_admitted_once_keeps_its_place(make_world: Make) -> None:
    """A preempted sequence returns before others of higher priority: its client is in the middle of an answer."""
    world = make_world(n_blocks=8, block_size=4, max_context=32, policy="priority")
    old, new = world.add(7, 20), world.add(7, 20)
    while world.scheduler.preemptions == 0:
        world.step()
    urgent = world.add(1, 1, priority=100)
    while old not in world.outputs:
        assert world.step() == [old]
    world.step()
    assert world.scheduler.state(new) == "prefilling" or world.scheduler.state(new) == "decoding"
    world.run()
    assert list(world.outputs) == [old, urgent, new]
    world.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_cancelled_sequence_leaves_the_queue(make_world: Make, policy: str) -> None:
    world = make_world(max_num_seqs=1, policy=policy)
    seqs = [world.add(4, 3, client=str(i), priority=i) for i in range(5)]
    world.step()
    running = next(s for s in seqs if world.scheduler.state(s) != "queued")
    waiting = [s for s in seqs if s != running]
    for seq in waiting[1::2]:
        world.scheduler.finish(seq)
    world.run()
    assert sorted(world.outputs) == sorted([running, *waiting[::2]])
    order = [list(world.outputs).index(s) for s in waiting[::2]]
    assert all((a < b) == (policy != "priority") for a, b in pairwise(order))
