"""A report of `miro bench` as lines for a person to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miro_client.cli.bench_earlier import Key
from miro_client.cli.bench_sums import key_of
from miro_client.cli.console import size_text


def heading(report: dict[str, Any]) -> Iterator[str]:
    """What was measured, and how it differs from what was measured earlier. Holds names from files and workers."""
    model, machine = report["model"], report["machine"]
    context = report["settings"]["context"]
    if "worker" in report:
        yield f"{model['name']} at {report['worker']['endpoint']}: {size_text(model['packed_bytes'])} packed"
        yield f"compute {model['compute']}, KV cache {model['kv_dtype']}, context {context:,}"
        yield f"its machine: {machine['isa']}, {machine['threads']} threads"
    else:
        parts = f"{model['parameters'] / 1e6:,.0f} M parameters, {size_text(model['packed_bytes'])} packed"
        yield f"{model['name']}: {model['format']}, {parts}"
        yield f"compute {model['compute']}, KV cache {model['kv_dtype']}, context {context:,}"
        yield f"{machine['cpu']}: {machine['isa']}, {machine['threads']} threads of {machine['cpus']} CPUs"
        limits = report["limits"]
        tiles = limits.get("tile_gflops", 0)
        yield (
            f"limits: read {limits['read_gb_per_s']:.1f} GB/s, float32 {limits['fma_gflops']:,.0f} GFLOP/s, "
            f"int8 {limits['int8_gflops']:,.0f} GFLOP/s" + (f", tiles {tiles:,.0f} GFLOP/s" if tiles else "")
        )
    if (compared := report.get("compare")) is not None:
        yield f"earlier: miro {compared['miro']}; ratio: now / earlier"
        if differences := compared["differences"]:
            listed = "; ".join(f"{d['field']} is {d['now']}, earlier {d['earlier']}" for d in differences)
            yield f"warning: not the same conditions: {listed}"


def body(report: dict[str, Any]) -> Iterator[str]:
    """All figures; no names."""
    yield from _table(report)
    yield from _unmatched(report.get("compare"))
    if lines := [*_attention(report), *_load(report)]:
        yield ""
        yield from lines
    yield from _profiles(report)


def _table(report: dict[str, Any]) -> Iterator[str]:
    with_limits, compared = "limits" in report, report.get("compare")
    matched = {key_of(row): row for row in compared["rows"]} if compared is not None else {}
    titles = f"{'work':<8}{'tokens':>7}{'rows':>6}{'depth':>7}{'tok/s':>10}{'least':>10}{'most':>10}"
    titles += f"{'earlier':>10}{'ratio':>7}" if compared is not None else ""
    yield titles + (f"{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>8}{'of read':>9}  nearer limit" if with_limits else "")
    for row in report["rows"]:
        seconds, key = row["seconds"], key_of(row)
        line = f"{row['work']:<8}{key.each:>7}{row['rows']:>6}{row['depth']:>7}{row['tokens_per_second']:>10,.1f}"
        line += f"{row['tokens'] / seconds['max']:>10,.1f}{row['tokens'] / seconds['min']:>10,.1f}"
        if key in matched:
            line += f"{matched[key]['tokens_per_second']:>10,.1f}{matched[key]['ratio']:>7.2f}"
        elif compared is not None:
            line += f"{'-':>10}{'-':>7}"
        if with_limits:
            line += f"{row['gflops']:>10,.1f}{100 * row['share_of_flops']:>7.1f} %{row['gb_per_s']:>8.2f}"
            line += f"{100 * row['share_of_bandwidth']:>7.1f} %  {row['bound']}"
        yield line


def _unmatched(compared: dict[str, Any] | None) -> Iterator[str]:
    """The works that only one of two reports has."""
    for field, title in (("only_now", "not measured earlier"), ("only_earlier", "measured earlier only")):
        if keys := [Key(**row) for row in (compared or {}).get(field, ())]:
            yield f"{title}: {'; '.join(map(_named, keys))}"


def _named(key: Key) -> str:
    if key.work == "prompt":
        return f"prompt of {key.tokens}"
    return f"decode of {key.rows} x {key.each} at depth {key.depth}"


def _attention(report: dict[str, Any]) -> Iterator[str]:
    for found in report["attention"]:
        yield (
            f"attention, {found['rows']} row{'s' * (found['rows'] > 1)}: {found['ms_per_layer_token']:.4f} ms a layer "
            f"and token more at depth {found['depth']} than at depth {found['than_depth']}"
        )


def _load(report: dict[str, Any]) -> Iterator[str]:
    if (load := report.get("load")) is None:
        return
    seconds, memory = load["seconds"], load["memory_bytes"]
    yield (
        f"load: {seconds['median']:.3f} s ({seconds['min']:.3f} to {seconds['max']:.3f}); "
        f"{size_text(memory['median'])} resident ({size_text(memory['min'])} to {size_text(memory['max'])}) "
        f"beside a KV pool of {size_text(load['pool_bytes'])}"
    )
    if (earlier := (report.get("compare") or {}).get("load")) is not None:
        yield (
            f"load earlier: {earlier['seconds']:.3f} s, ratio {earlier['seconds_ratio']:.2f}; "
            f"{size_text(earlier['memory_bytes'])}, ratio {earlier['memory_ratio']:.2f}"
        )


def _profiles(report: dict[str, Any]) -> Iterator[str]:
    """Milliseconds of a step by part, the longest first."""
    for row in report["rows"]:
        if (profile := row.get("profile")) is None:
            continue
        yield ""
        yield f"{row['work']} of {row['rows']} x {row['tokens'] // row['rows']} tokens, milliseconds a step:"
        total = sum(profile.values())
        for part, seconds in sorted(profile.items(), key=lambda item: -item[1]):
            yield f"  {part:<15}{1e3 * seconds / row['steps']:>10.3f}{100 * seconds / total:>7.1f} %"
