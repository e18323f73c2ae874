"""What a sequence finds of others with the same beginning, and what nobody may find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]


def firsts(world: Any, seq: int) -> list[int]:
    """First positions of all rows that the sequence has had."""
    return [row[1] for log in world.log for row in log if row[0] == seq]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("n_prompt", "shared", "cached"),
    [(30, 20, 20), (30, 21, 20), (30, 19, 16), (30, 3, 0), (21, 20, 20), (20, 20, 16), (17, 17, 16), (16, 16, 12),
     (1, 1, 0)],
)  # fmt: skip
def test_whole_blocks_before_the_last_token_are_not_computed_again(
    make_world: Make, live: bool, n_prompt: int, shared: int, cached: int
) -> None:
    world = make_world()
    world.add(40, 30 if live else 1, shared=40)
    for _ in range(3):
        world.step()
    assert world.scheduler.n_running == live
    seq = world.add(n_prompt, 4, shared=shared)
    world.run()
    assert firsts(world, seq)[0] == world.cached[seq] == cached
    world.check_outputs()


def test_answers_are_found_too(make_world: Make) -> None:
    world = make_world()
    first = world.add(10, 20, shared=10)
    world.run()
    answer = world.outputs[first]
    seq = world.scheduler.add(np.array([*answer, 1], np.int32), 1)
    world.scheduler.plan()
    assert world.scheduler.num_computed(seq) == 28, "29 tokens are in the cache: the last one was never fed back"
    world.scheduler.finish(seq)


def test_salts_and_tags_keep_sequences_apart(make_world: Make) -> None:
    world = make_world()
    for salt in (b"", b"one", b"two"):
        world.add(20, 2, shared=20, salt=salt)
    world.run()
    assert list(world.cached.values()) == [0, 0, 0]
    again = world.add(20, 2, shared=20, salt=b"two")
    world.run()
    assert world.cached[again] == 16
    world.check_outputs()


def test_extras_are_told_apart_by_tag_and_length(make_world: Make) -> None:
    domain = make_world().index.domain
    extras = [
        [], [(b"salt", b"X")], [(b"adapter", b"X")], [(b"salt", b"")], [(b"sal", b"tX")],
        [(b"salt", b"X"), (b"a", b"")], [(b"salt", b"X1:a0:")], [(b"a", b""), (b"salt", b"X")],
    ]  # fmt: skip
    assert len({domain(pairs) for pairs in extras}) == len(extras)
    assert domain(extras[1]) == domain([(b"salt", b"X")])
    assert domain(extras[1]) != make_world().index.domain(extras[1]), "each process has a key of its own"


@pytest.mark.parametrize("hash_bits", [0, 1, 64])
def test_equal_hashes_are_told_apart_by_their_tokens(make_world: Make, hash_bits: int) -> None:
    world = make_world(hash_bits=hash_bits, max_step_tokens=16)
    for like in (0, 1, 2, 0, 1, 2):
        world.add(22, 3, like=like, shared=20, salt=b"ab"[like % 2 :][:1])
        world.run()
    assert list(world.cached.values()) == [0, 0, 0, 20, 20, 20]
    world.check_outputs()
    world.check_index()


def test_the_least_recently_used_go_first(make_world: Make) -> None:
    # Ten blocks: prompts of four each. A, B, A again, then C, which has to take B's.
    world = make_world(n_blocks=10, block_size=4, max_context=32)
    for like, cached in ((0, 0), (1, 0), (0, 16), (2, 0), (0, 16), (2, 16)):
        seq = world.add(17, 1, like=like, shared=17)
        world.run()
        assert world.cached[seq] == cached
    assert world.pool.evictions > 0
    last = world.add(17, 1, like=1, shared=17)
    world.run()
    assert world.cached[last] < 16


def test_the_end_of_a_prefix_goes_before_its_beginning(make_world: Make) -> None:
    world = make_world(n_blocks=10, block_size=4, max_context=40)
    world.add(33, 1, like=0, shared=33)
    world.run()
    assert (world.pool.n_free, world.pool.n_cached) == (2, 8)
    world.add(17, 1, like=1, shared=17)  # five blocks: two free ones, three of the others
    world.run()
    assert world.pool.evictions == 3
    seq = world.add(33, 1, like=0, shared=33)
    world.run()
    assert world.cached[seq] == 20


def test_what_is_in_use_is_never_evicted(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old = world.add(9, 20, shared=9)
    world.step()
    for like in range(1, 5):
        world.add(9, 3, like=like, shared=9)
    world.run()
    assert world.pool.evictions > 0
    assert old in world.outputs
    world.check_outputs()


def test_a_pool_of_one_block_serves_all(make_world: Make) -> None:
    world = make_world(n_blocks=1, block_size=4, max_context=8)
    for like in (0, 0, 1, 0):
        world.add(4, 1, like=like, shared=4)
        world.add(3, 2, like=like, shared=3)
    world.run()
    assert len(world.outputs) == 8
    world.check_outputs()


def test_a_block_is_found_once_its_step_is_over_and_not_before(make_world: Make) -> None:
    world = make_world(max_num_seqs=2)
    first = world.add(20, 2, shared=20)
    failed = world.fail_step()
    assert failed == [first]
    assert world.index.n_entries == 0
    world.scheduler.finish(first)
    second = world.add(20, 2, shared=20)
    world.run()
    assert world.cached[second] == 0
    world.check_outputs()


@pytest.mark.parametrize("how", ["cancelled", "cancelled in its step"])
def test_a_cancelled_sequence_leaves_what_earlier_steps_computed(make_world: Make, how: str) -> None:
    world = make_world(max_step_tokens=10)
    first = world.add(40, 2, shared=40)
    world.step()
    world.step()
    if how == "cancelled in its step":
        world.scheduler.plan()
        sampled = world.forward()
        world.scheduler.finish(first)
        world.scheduler.commit(sampled, 0.01)
    else:
        world.scheduler.finish(first)
    assert world.pool.n_cached == 5
    second = world.add(40, 2, shared=40)
    world.run()
    assert world.cached[second] == 20
    world.check_outputs()


def test_sequences_that_come_together_compute_their_prefix_once(make_world: Make) -> None:
    world = make_world(max_step_tokens=64, max_num_seqs=8)
    seqs = [world.add(50, 3, shared=44) for _ in range(8)]
    world.run()
    assert [world.cached[seq] for seq in seqs] == [0] + [44] * 7
    assert max(len(world.computed[seq]) for seq in seqs[1:]) == 6
    world.check_outputs()


def test_nobody_waits_for_a_prompt_that_is_scored(make_world: Make) -> None:
    world = make_world(max_step_tokens=16, max_score_tokens=4)
    slow = world.add(60, 3, shared=60, logits_from=0)  # four tokens a step
    fast = world.add(60, 3, shared=60)
    while fast not in world.outputs:
        world.step()
    assert world.scheduler.num_computed(slow) < 40
    world.run()
    assert world.cached[slow] == 0
    world.check_outputs()


def test_sequences_with_equal_blocks_hold_them_once(make_world: Make) -> None:
    world = make_world(n_blocks=64)
    for _ in range(4):
        world.add(41, 20, shared=41)
    for _ in range(4):
        world.step()
    owned = world.pool.n_blocks - world.pool.available()
    assert owned == 10 + 4, "ten shared blocks and an own one for each"
    world.run()
    world.check_outputs()


def test_a_preempted_sequence_finds_its_own_blocks(make_world: Make) -> None:
    world = make_world(n_blocks=12, block_size=4, max_context=48)
    old, new = world.add(9, 26), world.add(9, 26)
    while world.scheduler.preemptions == 0:
        world.step()
    n_tokens = len(world.scheduler.tokens(new))
    world.scheduler.finish(old)
    world.step()
    seq, first, n_tok = world.log[-1][0][:3]
    assert (seq, first + n_tok) == (new, n_tokens)
    assert first >= n_tokens - 8, "the other grew by a block since"
    world.run()
    assert world.cached[new] == 0, "its own work is not a gift"
    world.check_outputs()


def test_scored_positions_are_computed_afresh(make_world: Make) -> None:
    world = make_world(max_step_tokens=512, n_blocks=128, max_context=256)
    world.add(200, 1, shared=200)
    world.run()
    plain, scored = world.add(200, 1, shared=200), world.add(200, 1, shared=200, logits_from=26)
    world.run()
    assert (world.cached[plain], world.cached[scored]) == (196, 24)
    assert world.scored[scored] == list(range(26, 200))
    rows = [row[3] for log in world.log for row in log if row[0] == scored]
    assert max(rows) == 64, "at most 64 scored rows a step"
    world.check_outputs()


def test_cached_blocks_that_are_hit_are_not_counted_twice(make_world: Make) -> None:
    """Eight blocks, six of them cached: a hit on all six and two more fits, with another in use it does not."""
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    world.add(25, 1, shared=25)
    world.run()
    assert world.pool.n_cached == 6
    other = world.add(2, 7)
    hit = world.add(31, 1, shared=25)  # eight blocks, of which six are there
    world.step()
    assert world.scheduler.state(hit) == "queued"
    while other not in world.outputs:
        world.step()
    world.run()
    assert world.cached[hit] >= 20
    assert world.scheduler.preemptions == 0
    world.check_outputs()


def test_blocks_that_others_hold_cost_nothing(make_world: Make) -> None:
    world = make_world(n_blocks=9, block_size=4, max_context=32)
    first = world.add(25, 4, shared=25)  # seven blocks
    world.step()
    second = world.add(25, 4, shared=25)  # would need seven more, but six are there already
    assert world.step() == [first, second]
    world.run()
    assert world.scheduler.preemptions == 0
    world.check_outputs()


def test_a_hit_must_hold_in_every_layer_group(make_world: Make) -> None:
    world = make_world(n_blocks=22, block_size=4, n_groups=2, max_context=48)
    for like, n_prompt in ((0, 20), (1, 26), (0, 20), (2, 38), (0, 20), (1, 26)):
        world.add(n_prompt, 4, like=like, shared=n_prompt)
        world.run()
        world.check_index()
    assert list(world.cached.values())[2] == 12
    assert world.pool.evictions > 0
    world.check_outputs()


def test_without_an_index_nothing_is_shared(make_world: Make) -> None:
    world = make_world(prefix=False)
    for _ in range(3):
        world.add(20, 3, shared=20)
    world.run()
    assert list(world.cached.values()) == [0, 0, 0]
    assert world.pool.n_free == world.pool.n_blocks
    world.check_outputs()
