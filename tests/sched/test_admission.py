"""What the scheduler refuses at the door, and with which error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.errors import BadField, ConfigError, ContextOverflow, QueueFull, Unschedulable
from miro_cy.sched.rate import QueueRate
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig

Make = Callable[..., Any]


def test_promise_4_what_never_fits_an_empty_pool_is_refused(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=128)
    for n_prompt, max_new, field in ((33, 0, "prompt"), (33, 1, "prompt"), (32, 2, "max_tokens")):
        with pytest.raises(Unschedulable, match="whole pool holds 32") as caught:
            world.add(n_prompt, max_new)
        assert caught.value.field == field
    # The last generated token is never stored: 32 + 1 fits 32.
    fits = world.add(32, 1)
    world.run()
    assert len(world.outputs[fits]) == 33


@pytest.mark.parametrize(
    ("n_prompt", "max_new", "field", "message"),
    [
        (17, 0, "prompt", "the prompt has 17 tokens, the context holds 16"),
        (17, 5, "prompt", "the prompt has 17 tokens, the context holds 16"),
        (16, 1, "max_tokens", r"prompt \(16\) and max_tokens \(1\) exceed the context of 16 tokens"),
    ],
)
def test_context_overflow_names_field_and_numbers(
    make_world: Make, n_prompt: int, max_new: int, field: str, message: str
) -> None:
    world = make_world(max_context=16)
    for refuse in (world.add, world.scheduler.check):
        with pytest.raises(ContextOverflow, match=message) as caught:
            refuse(n_prompt, max_new)
        assert caught.value.field == field
    world.scheduler.check(15, 1)
    world.scheduler.check(16, 0)


def test_bad_arguments_are_named(make_world: Make) -> None:
    world = make_world()
    for arguments, field in (((0, 4), "prompt"), ((4, -1), "max_tokens")):
        with pytest.raises(BadField) as caught:
            world.add(*arguments)
        assert caught.value.field == field
    for logits_from in (-2, 4):
        with pytest.raises(BadField, match="logits_from must be between -1 and 3"):
            world.add(4, 1, logits_from=logits_from)
    with pytest.raises(BadField, match="token 1 of the prompt is -7"):
        world.scheduler.add(np.array([3, -7], np.int32), 1)
    assert not world.scheduler.has_work


def test_a_full_queue_refuses_with_a_time_to_retry(make_world: Make) -> None:
    world = make_world(max_waiting=2, max_num_seqs=1, step_ms=50.0)
    world.add(4, 50)
    world.step()
    world.add(4, 1)
    world.add(4, 1)
    with pytest.raises(QueueFull, match="limit 2") as caught:
        world.add(4, 1)
    assert caught.value.retry_after_ms == 50, "a place has just become free: a step's time"
    world.now += 8.0
    with pytest.raises(QueueFull) as caught:
        world.add(4, 1)
    assert caught.value.retry_after_ms == pytest.approx(8000, abs=50), "the one place so far became free 8 s ago"
    world.now += 1e6
    with pytest.raises(QueueFull) as caught:
        world.add(4, 1)
    assert caught.value.retry_after_ms == 60_000
    assert (world.scheduler.n_running, world.scheduler.n_waiting) == (1, 2)
    world.run()
    assert len(world.outputs) == 3


def test_the_advice_follows_the_measured_rate() -> None:
    rate = QueueRate(least_ms=50.0)
    assert rate.retry_ms(now=10.0, oldest=4.0, n_waiting=3) == 2000, "nothing has left: 6 s for three places"
    for now in range(100, 200, 2):
        rate.left(float(now))
    assert rate.retry_ms(now=198.0, oldest=190.0, n_waiting=100) == pytest.approx(2000, rel=0.05)
    assert rate.retry_ms(now=262.0, oldest=190.0, n_waiting=100) == pytest.approx(4000, rel=0.05), "it has stopped"
    for _ in range(100):
        rate.left(300.0)
    assert rate.retry_ms(now=300.0, oldest=190.0, n_waiting=100) == 50
    assert rate.retry_ms(now=1e9, oldest=190.0, n_waiting=100) == 60_000


@pytest.mark.parametrize(("watermark", "together"), [(0.0, True), (0.25, False)])
def test_the_watermark_keeps_a_share_of_the_pool_free(make_world: Make, watermark: float, together: bool) -> None:
    world = make_world(n_blocks=16, block_size=4, max_context=64, watermark=watermark, prefix=False)
    first, second = world.add(20, 4), world.add(31, 4)  # six blocks and eight; one each may grow by one
    assert world.step() == ([first, second] if together else [first])
    world.run()
    assert world.scheduler.preemptions == 0
    # Whoever is alone may have the whole pool.
    large = world.add(60, 4)
    world.run()
    assert large in world.outputs


def test_reserved_room_is_never_taken_back(make_world: Make) -> None:
    """Prompt and max_tokens are kept from the start, so that fewer run at once, and none is preempted."""
    running, peak = {}, {}
    for admission in ("watermark", "reserve"):
        world = make_world(n_blocks=16, block_size=4, max_context=64, admission=admission)
        for _ in range(6):
            world.add(6, 20)
        running[admission], peak[admission] = [], 0
        while world.step() is not None:
            world.scheduler.check_integrity()
            running[admission].append(world.scheduler.n_running)
            peak[admission] = max(peak[admission], world.scheduler.preemptions)
        world.check_outputs()
        assert len(world.outputs) == 6
    assert max(running["reserve"]) == 2 < max(running["watermark"])
    assert peak["watermark"] > 0 == peak["reserve"]


def test_the_parts_must_fit_each_other() -> None:
    pool, tables, config = BlockPool(8, 4), BlockTables(1, 2, 8), SchedulerConfig(max_num_seqs=2)
    Scheduler(pool, tables, config, max_context=32, clock=float)
    with pytest.raises(ConfigError, match="max_context must be between 1 and the 32 tokens"):
        Scheduler(pool, tables, config, max_context=33, clock=float)
    with pytest.raises(ConfigError, match="max_num_seqs is 3"):
        Scheduler(pool, tables, SchedulerConfig(max_num_seqs=3), max_context=32, clock=float)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_step_tokens", True), ("step_ms", float("nan")), ("step_ms", 0), ("step_ms", "50"),
     ("max_waiting", 2**40), ("max_score_tokens", 1.5), ("policy", "lifo"), ("policy", []), ("admission", None),
     ("watermark", -0.1), ("watermark", 0.6), ("ageing_ms", 0), ("ageing_ms", float("inf")), ("watermark", True)],
)  # fmt: skip
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{field: value})
    assert caught.value.field == field
