"""The batcher's policy, one rule a test, without a model (see conftest.World)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.errors import BadField, ConfigError, ContextOverflow, InternalError, QueueFull, Unschedulable
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig

Make = Callable[..., Any]


# --- refusals at the door ----------------------------------------------------------------------------------------


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


# --- a step ------------------------------------------------------------------------------------------------------


def test_decode_rows_come_first_then_prompt_chunks_in_order_of_arrival(make_world: Make) -> None:
    world = make_world(max_step_tokens=20)
    first, second = world.add(6, 8), world.add(5, 8)
    assert world.step() == [first, second]
    third, fourth = world.add(30, 2), world.add(3, 2)
    assert world.step() == [first, second, third]
    assert [row[1:4] for row in world.log[-1]] == [(6, 1, 1), (5, 1, 1), (0, 18, 0)]
    assert world.step() == [first, second, third, fourth]
    assert [row[1:4] for row in world.log[-1]] == [(7, 1, 1), (6, 1, 1), (18, 12, 1), (0, 3, 1)]
    world.run()
    world.check_outputs()


def test_prompts_progress_under_full_decode_load(make_world: Make) -> None:
    world = make_world(n_blocks=400, max_num_seqs=12, max_step_tokens=8, step_ms=0.001)
    for _ in range(11):
        world.add(1, 100)
    while world.scheduler.n_running < 11 or any(world.scheduler.state(s) != "decoding" for s in world.prompts):
        world.step()
    late = world.add(40, 1)
    for done in (8, 16, 24, 32):
        assert len(world.step()) == 12, "every decode row goes, budget or not"
        assert world.scheduler.num_computed(late) == done
    world.step()
    assert late in world.outputs


def test_a_prompt_is_cut_to_the_measured_time(make_world: Make) -> None:
    # 10 ms a step and 1 ms a token: beside one stream about 50 ms means 39 prompt tokens, never 400.
    world = make_world(n_blocks=256, block_size=16, max_context=1024, step_ms=50.0)
    world.add(1, 60)
    world.step()
    for _ in range(5):
        world.step()
    long = world.add(600, 1)
    while long not in world.outputs:
        before = world.now
        world.step()
        assert world.now - before <= 0.060
    assert max(row[2] for log in world.log for row in log) > 32
    world.run()
    world.check_outputs()


def test_a_chunk_can_be_a_single_token(make_world: Make) -> None:
    world = make_world(max_step_tokens=1, max_num_seqs=1)
    seq = world.add(5, 3)
    world.run()
    assert [row[0][2] for row in world.log] == [1] * 7
    assert world.outputs[seq] == world.reference(seq)


def test_nothing_to_do_is_none(make_world: Make) -> None:
    world = make_world()
    assert world.scheduler.plan() is None
    assert world.scheduler.planned() == []
    assert not world.scheduler.has_work


def test_a_failed_step_is_planned_again(make_world: Make) -> None:
    world = make_world(max_step_tokens=8)
    world.add(6, 4)
    world.step()
    world.add(20, 4)
    rows = [(world.scheduler.plan().rows(), world.scheduler.planned()) for _ in range(3)]
    assert rows[0] == rows[1] == rows[2]
    world.scheduler.check_integrity()
    world.run()
    world.check_outputs()


def test_a_plan_that_came_to_nothing_cannot_be_committed(make_world: Make) -> None:
    world = make_world()
    seq = world.add(6, 4)
    world.scheduler.plan()
    world.scheduler.finish(seq)
    assert world.scheduler.plan() is None
    with pytest.raises(ValueError, match="without a plan"):
        world.scheduler.commit(np.array([], np.int32), 0.01)


def test_max_new_0_computes_the_prompt_and_waits_to_be_finished(make_world: Make) -> None:
    world = make_world()
    seq = world.add(6, 0)
    assert world.scheduler.plan().rows() == [(0, 0, 6, 1)]
    world.scheduler.commit(np.array([-1], np.int32), 0.01)
    assert world.scheduler.plan() is None
    assert not world.scheduler.has_work
    world.scheduler.finish(seq)
    assert world.pool.n_free == world.pool.n_blocks


def test_a_sequence_at_its_limit_is_not_decoded_further(make_world: Make) -> None:
    world = make_world()
    seq = world.add(4, 1)
    world.scheduler.plan()
    world.scheduler.commit(world.forward(), 0.01)
    assert world.scheduler.state(seq) == "decoding"
    assert world.scheduler.plan() is None
    assert world.scheduler.tokens(seq).tolist() == world.reference(seq)


# --- commit ------------------------------------------------------------------------------------------------------


def test_commit_refuses_what_does_not_fit_and_changes_nothing(make_world: Make) -> None:
    world = make_world(max_step_tokens=8)
    short, long = world.add(4, 2), world.add(10, 2)
    commit = world.scheduler.commit
    with pytest.raises(ValueError, match="without a plan"):
        commit(np.array([1], np.int32), 0.01)
    world.scheduler.plan()
    for sampled, seconds, message in (
        ([5], 0.01, "1 sampled tokens for 2 rows"),
        ([5, 6], 0.01, "row 1 .* cannot take token 6"),
        ([-2, -1], 0.01, "row 0 .* cannot take token -2"),
        ([5, -1], float("nan"), "cannot take nan seconds"),
        ([5, -1], -1.0, "cannot take -1.0 seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            commit(np.array(sampled, np.int32), seconds)
        assert [world.scheduler.num_computed(s) for s in (short, long)] == [0, 0]
    commit(np.array([5, -1], np.int32), 0.01)
    assert [world.scheduler.num_computed(s) for s in (short, long)] == [4, 4]
    with pytest.raises(ValueError, match="without a plan"):
        commit(np.array([5, -1], np.int32), 0.01)


def test_commit_skips_sequences_finished_since_the_plan(make_world: Make) -> None:
    world = make_world()
    first, second = world.add(4, 3), world.add(4, 3)
    for _ in range(2):  # once as prompts, once as decode rows
        third = world.add(4, 3)
        world.scheduler.plan()
        sampled = world.forward()
        world.scheduler.finish(third)
        world.scheduler.commit(sampled, 0.01)
        world.scheduler.check_integrity()
    world.scheduler.plan()
    sampled = world.forward()
    world.scheduler.finish(first)
    fourth = world.add(4, 3)  # takes the finished one's place in the table, not its row
    world.scheduler.commit(sampled, 0.01)
    assert world.scheduler.num_computed(fourth) == 0
    assert world.reap() == [first, second]
    world.run()
    assert set(world.outputs) == {second, fourth}
    world.check_outputs()


# --- the pool runs out -------------------------------------------------------------------------------------------


def test_the_newest_is_preempted_and_nothing_overtakes_it(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old, new = world.add(7, 20), world.add(7, 20)
    while world.scheduler.preemptions == 0:
        world.step()
    assert world.scheduler.state(new) == "queued"
    assert world.scheduler.num_computed(new) == 0
    tiny = world.add(1, 1)  # would fit, but came later
    while old not in world.outputs:
        assert world.step() == [old]
    assert world.scheduler.state(tiny) == "queued"
    world.run()
    assert world.scheduler.preemptions == 1
    assert list(world.outputs) == [old, tiny, new]
    world.check_outputs()


def test_a_preempted_sequence_returns_only_when_all_its_tokens_fit(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old, new = world.add(7, 20), world.add(7, 20)
    while world.scheduler.preemptions == 0:
        world.step()
    need = world.pool.blocks_for(len(world.scheduler.tokens(new)) + 1)
    while old not in world.outputs:
        assert world.pool.available() < need + 1, "a block is kept for the one that runs"
        world.step()
    assert world.step() == [new], "the first step after the pool is free"


@pytest.mark.parametrize(("max_new", "admitted"), [(20, False), (2, True)])
def test_a_block_is_kept_for_a_sequence_that_may_still_grow(make_world: Make, max_new: int, admitted: bool) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old = world.add(7, max_new)  # two blocks now; with 20 to come it will want more, with 2 it will not
    world.step()
    new = world.add(23, 2)  # exactly the six that are left
    assert world.step() == ([old, new] if admitted else [old])
    world.run()
    assert world.scheduler.preemptions == 0


def test_rows_keep_the_order_of_arrival_when_a_younger_prompt_is_done_first(make_world: Make) -> None:
    world = make_world(max_score_tokens=4)
    old, young = world.add(10, 9, logits_from=0), world.add(3, 9)
    world.step()
    assert [world.scheduler.state(s) for s in (old, young)] == ["prefilling", "decoding"]
    while world.scheduler.state(old) != "decoding":
        world.step()
    assert world.step() == [old, young]
    world.run()
    world.check_outputs()


def test_the_newest_is_preempted_whatever_its_state(make_world: Make) -> None:
    world = make_world(n_blocks=7, block_size=4, max_context=32, max_score_tokens=1)
    old, scored, young = world.add(7, 20), world.add(12, 1, logits_from=0), world.add(3, 9)
    while world.scheduler.preemptions == 0:
        world.step()
    states = [world.scheduler.state(s) for s in (old, scored, young)]
    assert states == ["decoding", "prefilling", "queued"]
    world.run()
    world.check_outputs()


def test_two_prompts_of_60_percent_run_one_after_the_other(make_world: Make) -> None:
    world = make_world(n_blocks=10, block_size=4, max_context=40)
    first, second = world.add(24, 8), world.add(24, 8)
    world.run()
    assert list(world.outputs) == [first, second]
    assert world.scheduler.preemptions == 0
    world.check_outputs()


def test_many_in_a_pool_for_one_all_end(make_world: Make) -> None:
    world = make_world(n_blocks=16, block_size=4, max_context=64, max_step_tokens=16)
    for n_prompt in (1, 17, 30, 3, 62, 20, 9, 40):
        world.add(n_prompt, 64 - n_prompt)
    world.run()
    assert world.scheduler.preemptions > 0
    assert len(world.outputs) == 8
    world.check_outputs()
    assert world.pool.n_free == 16


def test_waste_is_under_one_block_a_sequence(make_world: Make) -> None:
    world = make_world(n_blocks=64, block_size=4)
    seqs = [world.add(n, 30) for n in (1, 4, 7, 8)]
    for _ in range(25):
        world.step()
        held = world.pool.n_blocks - world.pool.n_free
        assert held <= sum(world.pool.blocks_for(len(world.scheduler.tokens(s))) for s in seqs)


@pytest.mark.parametrize("when", ["queued", "mid-prompt", "prefilled", "decoding", "preempted"])
def test_a_cancel_in_any_state_frees_everything_at_once(make_world: Make, when: str) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32, max_step_tokens=8)
    other = world.add(7, 20) if when == "preempted" else None
    seq = world.add(12 if when == "mid-prompt" else 7, 20)
    steps = {"queued": 0, "mid-prompt": 1, "prefilled": 1, "decoding": 3, "preempted": 0}[when]
    for _ in range(steps):
        world.step()
    while other is not None and world.scheduler.preemptions == 0:
        world.step()
    world.scheduler.finish(seq)
    world.scheduler.check_integrity()
    assert not world.scheduler.is_live(seq)
    if other is not None:
        world.scheduler.finish(other)
    assert world.pool.n_free == 8
    assert not world.scheduler.has_work
    for forgotten in (world.scheduler.finish, world.scheduler.tokens, world.scheduler.state, world.scheduler.times):
        with pytest.raises(InternalError, match=f"no live sequence {seq}"):
            forgotten(seq)


def test_layer_groups_share_the_pool(make_world: Make) -> None:
    world = make_world(n_blocks=16, block_size=4, n_groups=2, max_context=32)
    with pytest.raises(Unschedulable):
        make_world(n_blocks=15, block_size=4, n_groups=2, max_context=32).add(30, 2)
    for _ in range(4):
        world.add(10, 20)
    world.run()
    assert world.scheduler.preemptions > 0
    world.check_outputs()


# --- scoring -----------------------------------------------------------------------------------------------------


def test_scored_positions_are_delivered_once_and_bounded(make_world: Make) -> None:
    world = make_world(max_score_tokens=7, max_step_tokens=64)
    scored = [world.add(40, 0, logits_from=0), world.add(40, 3, logits_from=25)]
    plain = world.add(30, 3)
    world.run()
    assert world.scored[scored[0]] == list(range(40))
    assert world.scored[scored[1]] == list(range(25, 40))
    assert plain in world.outputs
    for log in world.log:
        rows = [row[3] for row in log if row[0] in scored and row[1] + row[2] <= 40]
        assert sum(rows) <= 7, "one bound for all scored rows of a step"
    world.check_outputs()


def test_scored_positions_survive_a_preemption(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32, max_score_tokens=5)
    world.add(4, 28)
    scored = world.add(12, 10, logits_from=2)
    world.run()
    assert world.scheduler.preemptions > 0
    assert world.scored[scored] == list(range(2, 12))
    world.check_outputs()


# --- what can be seen --------------------------------------------------------------------------------------------


def test_times_are_those_of_the_clock(make_world: Make) -> None:
    world = make_world(max_step_tokens=8)
    seq = world.add(12, 3)
    assert world.scheduler.times(seq) == (100.0, None, None)
    world.now = 101.0
    world.step()
    assert world.scheduler.times(seq) == (100.0, 101.0, None)
    assert world.scheduler.state(seq) == "prefilling"
    world.step()
    assert world.scheduler.state(seq) == "decoding"
    assert world.scheduler.times(seq) == (100.0, 101.0, world.now)


def test_ids_grow_and_tokens_are_a_copy(make_world: Make) -> None:
    world = make_world()
    first = world.add(4, 2)
    assert world.add(4, 2) > first
    tokens = world.scheduler.tokens(first)
    tokens[:] = 0
    assert world.scheduler.tokens(first).tolist() == world.prompts[first][0]
