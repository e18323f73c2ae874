"""What the scheduler refuses at the door, and with which error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.errors import BadField, ConfigError, ContextOverflow, QueueFull, Unschedulable
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
    assert caught.value.retry_after_ms == 50, "nothing waited yet: a step's time"
    world.now += 8.0
    with pytest.raises(QueueFull) as caught:
        world.add(4, 1)
    assert caught.value.retry_after_ms == 4000, "8 s for two places"
    world.now += 1e6
    with pytest.raises(QueueFull) as caught:
        world.add(4, 1)
    assert caught.value.retry_after_ms == 60_000
    assert (world.scheduler.n_running, world.scheduler.n_waiting) == (1, 2)
    world.run()
    assert len(world.outputs) == 3


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
     ("max_waiting", 2**40), ("max_score_tokens", 1.5)],
)  # fmt: skip
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{field: value})
    assert caught.value.field == field
