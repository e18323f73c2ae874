"""What a worker costs when idle, and how fast it answers while it is busy with a long prompt.

    python bench/latency.py smollm2 --idle 60 --prompt 4000

Prints the share of a core that an idle worker takes, and percentiles of PING's round trip (data socket) and of STATS's
(control socket), without load and during the prefill. Runs on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import zmq

from miro_client import wire
from miro_client.endpoint import control_endpoint
from served.worker import worker

DEADLINE_MS = 60_000
#: Between two questions: as often as a monitor would at most, and often enough for a 99th percentile.
PAUSE_S = 0.005


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_share(pid: int, seconds: float) -> float:
    """Share of one core that the process takes while nothing is asked of it."""
    began, used = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / (time.monotonic() - began)


class Prober:
    """One connection that asks and waits."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, body: wire.Request) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(endpoint)
        self._frames = wire.encode(b"probe-id", body)

    def round_trip_ms(self) -> float:
        began = time.perf_counter()
        self.socket.send_multipart(self._frames)
        if not self.socket.poll(DEADLINE_MS):
            raise SystemExit("no answer from the worker")
        self.socket.recv_multipart()
        return (time.perf_counter() - began) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"n": len(times), "p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(times)}


def busy(context: zmq.Context[Any], endpoint: str, tokens: int, probers: dict[str, Prober]) -> dict[str, Any]:
    """Round trips from the sending of a long prompt to its first token."""
    asking = context.socket(zmq.DEALER)
    asking.connect(endpoint)
    body = wire.Generate(tokens=wire.pack_ids([7] * tokens), sampling={"max_tokens": 1}, stream=False)
    times: dict[str, list[float]] = {name: [] for name in probers}
    began = time.monotonic()
    asking.send_multipart(wire.encode(b"the-prompt", body))
    while not asking.poll(0):
        for name, prober in probers.items():
            times[name].append(prober.round_trip_ms())
        time.sleep(PAUSE_S)
    reply = wire.decode_reply(asking.recv_multipart())[1]
    if not isinstance(reply, wire.End):
        raise SystemExit(f"the prompt was refused: {reply}")
    seconds = time.monotonic() - began
    return {"prefill_s": seconds, "tokens": tokens, **{name: summary(found) for name, found in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--idle", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--prompt", type=int, default=4000, metavar="TOKENS")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context: zmq.Context[Any] = zmq.Context()
    with worker(options.model, context=options.prompt + 1, threads=options.threads) as (process, endpoint):
        ping = Prober(context, endpoint, wire.Ping())
        probers = {"ping": ping, "stats": Prober(context, control_endpoint(endpoint), wire.Stats())}
        quiet = {name: summary([prober.round_trip_ms() for _ in range(500)]) for name, prober in probers.items()}
        result: dict[str, Any] = {"quiet": quiet, "prefill": busy(context, endpoint, options.prompt, probers)}
        time.sleep(1)
        result["idle_share"] = idle_share(process.pid, options.idle)
    context.destroy(linger=0)
    if options.json:
        print(json.dumps(result))
        return
    print(f"idle for {options.idle:g} s: {100 * result['idle_share']:.3f} % of a core")
    print(f"prefill of {options.prompt} tokens: {result['prefill']['prefill_s']:.2f} s")
    for state in ("quiet", "prefill"):
        for name in probers:
            found = result[state][name]
            print(f"{name:<6}{state:<8} p50 {found['p50_ms']:7.2f} ms  p99 {found['p99_ms']:7.2f} ms"
                  f"  max {found['max_ms']:7.2f} ms  ({found['n']:.0f})")  # fmt: skip


if __name__ == "__main__":
    main()
