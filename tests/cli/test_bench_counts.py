"""Lists of numbers as `miro bench` takes them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from miro_client.cli.bench_counts import MAX_COUNTS, Counts, joined


def convert(text: str, low: int = 1, high: int = 256) -> tuple[int, ...]:
    return Counts(low, high).convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        ("1-8,16,32", (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)),
        ("32, 512 ,200", (32, 512, 200)),
        ("7-7", (7,)),
        ("1-256", tuple(range(1, 257))),
    ],
)
def test_numbers_and_ranges(text: str, counts: tuple[int, ...]) -> None:
    assert convert(text, high=512) == counts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,", "0", "257", "-1", "8-1", "1-257", "0-3", "1-", "-", "1--2", "1.5", "1_0", "x", "٣"),
        *("9" * 5000, "1-8-9", "1-256,1", "1 2"),
    ],
)
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        convert(text)
    assert len(error.value.message) < 200


def test_a_range_of_millions_is_refused_before_it_is_made() -> None:
    with pytest.raises(click.BadParameter, match=f"more than {MAX_COUNTS} numbers"):
        convert("1-999999999", high=10**9)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 9)), min_size=1, max_size=20))
def test_what_was_written_is_read(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in parts)
    assert convert(text) == tuple(n for first, more in parts for n in range(first, first + more + 1))


def test_a_repeated_option_gives_each_number_once() -> None:
    @click.command()
    @click.option("--rows", type=Counts(1, 1000), multiple=True, callback=joined, default=("1,8",))
    def command(rows: tuple[int, ...]) -> None:
        click.echo(rows)

    run = lambda *arguments: CliRunner().invoke(command, arguments)  # noqa: E731
    assert run().output == "(1, 8)\n"
    assert run("--rows", "1-3,16", "--rows", "2,4").output == "(1, 2, 3, 16, 4)\n"
    too_many = run("--rows", "1-200", "--rows", "300-400")
    assert (too_many.exit_code, "more than 256 numbers" in too_many.output) == (2, True)
