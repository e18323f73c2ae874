"""A step's policy, one rule a test, without a model (see conftest.World)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]


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
    assert world.pool.available() == world.pool.n_blocks


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
