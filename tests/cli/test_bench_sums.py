"""What is computed from a report's figures, and the text that tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_reports import full, report, row, spread

from miro_client.cli.bench_earlier import Earlier, read_earlier
from miro_client.cli.bench_sums import attention, compare
from miro_client.cli.bench_text import body, heading

NOW = (row("prompt", 1, 0, 40, 0.5), row("decode", 1, 5, 4, 2.0), row("decode", 3, 5, 12, 2.0))
EARLIER = (row("prompt", 1, 0, 40, 1.0), row("decode", 1, 5, 4, 1.0), row("decode", 8, 5, 32, 1.0))


def earlier(tmp_path: Path, made: dict[str, Any]) -> Earlier:
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(made))
    return read_earlier(str(path))


def test_attention_is_what_a_deeper_step_takes_more() -> None:
    rows = [row("prompt", 1, 0, 40, 0.5)]
    rows += [row("decode", 1, depth, 4, seconds) for depth, seconds in ((100, 1.2), (5, 1.0), (400, 2.0))]
    rows += [row("decode", 8, depth, 32, seconds) for depth, seconds in ((5, 2.0), (100, 1.6))]
    rows += [row("decode", 2, 5, 8, 1.0), row("decode", 3, 5, 12, 1.0), row("decode", 3, 9, 24, 1.0)]
    found = attention(report(*rows))
    assert [(f["rows"], f["depth"], f["than_depth"]) for f in found] == [(1, 100, 5), (1, 400, 5), (8, 100, 5)]
    # 0.2 s in 4 steps of one token and 10 layers; 1 s; -0.4 s in 4 steps of 8 tokens
    assert [f["ms_per_layer_token"] for f in found] == pytest.approx([5.0, 25.0, -1.25])
    assert attention(report(*rows, model_layers=0)) == [], "a worker that does not tell"


def test_rows_are_matched_by_their_work(tmp_path: Path) -> None:
    found = compare(report(*NOW), earlier(tmp_path, report(*EARLIER)))
    assert found["miro"] == "9.9.9"
    assert found["differences"] == []
    assert found["rows"] == [
        {"work": "prompt", "rows": 1, "depth": 0, "tokens": 40, "tokens_per_second": 40.0, "ratio": 2.0},
        {"work": "decode", "rows": 1, "depth": 5, "tokens": 4, "tokens_per_second": 4.0, "ratio": 0.5},
    ]
    assert found["only_now"] == [{"work": "decode", "rows": 3, "depth": 5, "tokens": 12}]
    assert found["only_earlier"] == [{"work": "decode", "rows": 8, "depth": 5, "tokens": 32}]
    assert found["load"] is None


def test_loads_are_compared_where_both_have_one(tmp_path: Path) -> None:
    now = {"seconds": spread(3), "memory_bytes": spread(100), "pool_bytes": 7}
    before = {"seconds": spread(2), "memory_bytes": spread(400), "pool_bytes": 7}
    found = compare(report(load=now), earlier(tmp_path, report(load=before)))["load"]
    assert found == {"seconds": 2, "seconds_ratio": 1.5, "memory_bytes": 400, "memory_ratio": 0.25}
    assert compare(report(load=now), earlier(tmp_path, report()))["load"] is None
    assert compare(report(), earlier(tmp_path, report(load=before)))["load"] is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"machine_threads": 1}, "machine.threads"),
        ({"machine_isa": "v4"}, "machine.isa"),
        ({"machine_cpu": "Another"}, "machine.cpu"),
        ({"model_name": "large"}, "model.name"),
        ({"model_file_bytes": 1}, "model.file_bytes"),
        ({"model_compute": "exact"}, "model.compute"),
        ({"model_kv_dtype": "fp32"}, "model.kv_dtype"),
        ({"settings_context": 64}, "settings.context"),
        ({"worker": {"endpoint": "ipc://x"}}, "measured"),
    ],
)
def test_what_differs_is_told(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    found = compare(report(), earlier(tmp_path, report(**changes)))
    assert [difference["field"] for difference in found["differences"]] == [named]
    text = "\n".join(heading(report(compare=found)))
    (warning,) = [line for line in text.splitlines() if line.startswith("warning: ")]
    difference = found["differences"][0]
    assert f"{named} is {difference['now']}, earlier {difference['earlier']}" in warning


def test_what_only_one_report_tells_is_no_difference(tmp_path: Path) -> None:
    before = report(machine={"isa": "v3", "threads": 2}, settings={"context": 512, "block_size": 32})
    assert compare(report(), earlier(tmp_path, before))["differences"] == []
    assert not any("warning" in line for line in heading(report(compare=compare(report(), earlier(tmp_path, before)))))


def test_the_table_has_earlier_figures_beside_its_own(tmp_path: Path) -> None:
    made = full(report(*NOW, attention=[]))
    made["compare"] = compare(made, earlier(tmp_path, report(*EARLIER)))
    titles, prompt, one, three, *rest = body(made)
    assert titles.split()[4:9] == ["tok/s", "least", "most", "earlier", "ratio"]
    assert prompt.split()[4:9] == ["80.0", "40.0", "160.0", "40.0", "2.00"]
    assert one.split()[4:9] == ["2.0", "1.0", "4.0", "4.0", "0.50"]
    assert three.split()[4:9] == ["6.0", "3.0", "12.0", "-", "-"]
    assert len({line.index("%") for line in (prompt, one, three)}) == 1, "columns are aligned"
    assert rest == [
        "not measured earlier: decode of 3 x 4 at depth 5",
        "measured earlier only: decode of 8 x 4 at depth 5",
    ]


def test_a_workers_table_is_compared_too(tmp_path: Path) -> None:
    made = report(*NOW, attention=[])
    del made["limits"]
    made["compare"] = compare(made, earlier(tmp_path, report(*NOW)))
    titles, *rows = body(made)
    assert titles.endswith("   earlier  ratio")
    assert [line.split()[-1] for line in rows] == ["1.00"] * 3


def test_lines_on_attention_and_loading(tmp_path: Path) -> None:
    load = {"seconds": spread(1.5), "memory_bytes": spread(2e6), "pool_bytes": 3000}
    made = full(report(row("decode", 1, 5, 4, 1.0), row("decode", 1, 100, 4, 1.2), load=load))
    made["attention"] = attention(made)
    assert list(body(made))[3:] == [
        "",
        "attention, 1 row: 5.0000 ms a layer and token more at depth 100 than at depth 5",
        "load: 1.500 s (0.750 to 3.000); 2.0 MB resident (1.0 MB to 4.0 MB) beside a KV pool of 3.0 kB",
    ]
    before = {"seconds": spread(3), "memory_bytes": spread(4e6), "pool_bytes": 3000}
    made["compare"] = compare(made, earlier(tmp_path, report(load=before)))
    assert list(body(made))[-1] == "load earlier: 3.000 s, ratio 0.50; 4.0 MB, ratio 0.50"
