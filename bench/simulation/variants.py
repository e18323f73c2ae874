"""What is compared: ways to admit requests, each under the same requests at the same rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from miro_cy.config import Admission, PolicyName
from miro_cy.sched.scheduler import SchedulerConfig
from simulation.figures import Figures, Overhead
from simulation.workload import Arrivals, Shape, make_workload
from simulation.world import Outcome, StepCost, World

#: Names on the command line and in reports.
POLICIES = ("fcfs", "priority", "fair", "reserve")
#: Requests of the run that finds the rate of a load of 1, and the most of them that may wait in it.
CAPACITY_REQUESTS = 2000
#: Of the run that tells what the scheduler costs: so many requests for each that is live.
OVERHEAD_REQUESTS = 3
#: So long a step that this many come to be live at all: with the defaults, prompts wait for streams before that.
OVERHEAD_SETTINGS = {"step_ms": 10_000.0, "max_step_tokens": 8192}

#: what(done, requests)
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What requests are served with, whatever the policy."""

    cost: StepCost = field(default=StepCost())
    kv_tokens: int = 8192
    block_size: int = 32
    max_num_seqs: int = 64
    max_waiting: int = 1024
    step_ms: float = 50.0

    def run(self, shape: Shape, rate: float, config: SchedulerConfig, tell: Callable[[int, int], None]) -> Outcome:
        world = World(
            make_workload(shape, rate), config, self.cost,
            kv_tokens=self.kv_tokens, block_size=self.block_size, tell=tell,
        )  # fmt: skip
        return world.run()

    def config(self, **more: Any) -> SchedulerConfig:
        settings = {"max_num_seqs": self.max_num_seqs, "max_waiting": self.max_waiting, "step_ms": self.step_ms}
        return SchedulerConfig(**(settings | more))


@dataclass(frozen=True, slots=True)
class Variant:
    """policy: "reserve" is first come, first served, with room for all of max_tokens kept from admission on."""

    policy: str
    watermark: float

    @property
    def settings(self) -> dict[str, Any]:
        policy: PolicyName = "fcfs"
        admission: Admission = "watermark"
        if self.policy == "reserve":
            admission = "reserve"
        else:
            policy = self.policy  # type: ignore[assignment]  # one of POLICIES
        return {"policy": policy, "admission": admission, "watermark": self.watermark}


@dataclass(frozen=True, slots=True)
class Row:
    """One run and what came out of it. load: 1 is the rate at which the same requests are served while many wait."""

    arrivals: Arrivals
    load: float
    variant: Variant
    figures: Figures

    def json(self) -> dict[str, Any]:
        return {"arrivals": self.arrivals, "load": self.load, **asdict(self.variant), **asdict(self.figures)}


def variants(policies: Sequence[str], watermarks: Sequence[float]) -> list[Variant]:
    """Each policy with each watermark, reservation, which has none, once."""
    made = [Variant(policy, watermark) for policy in policies for watermark in watermarks if policy != "reserve"]
    return made + [Variant("reserve", 0.0)] * ("reserve" in policies)


def capacity(machine: Machine, shape: Shape, tell: Tell) -> float:
    """Requests a second that the defaults serve while others wait, all being there from the start."""
    few = replace(shape, requests=min(shape.requests, CAPACITY_REQUESTS))
    config = machine.config(max_waiting=few.requests)
    out = machine.run(few, float("inf"), config, partial(tell, "capacity"))
    return out.done / out.emptied


def overhead(machine: Machine, shape: Shape, live: int, tell: Tell) -> Overhead:
    """The scheduler's own cost with so many sequences live and others waiting, in a pool that holds them."""
    many = replace(shape, requests=OVERHEAD_REQUESTS * live)
    roomy = replace(machine, kv_tokens=live * shape.longest, max_num_seqs=live)
    config = roomy.config(max_waiting=many.requests, **OVERHEAD_SETTINGS)
    out = roomy.run(many, float("inf"), config, partial(tell, f"{live} live"))
    return Overhead.of(out, live=live)


def sweep(
    machine: Machine,
    shape: Shape,
    rate: float,
    arrivals: Sequence[Arrivals],
    loads: Sequence[float],
    chosen: Sequence[Variant],
    tell: Tell,
) -> Iterator[Row]:
    """Every variant at every load under every kind of arrivals. rate: of a load of 1."""
    for kind in arrivals:
        for load in loads:
            for variant in chosen:
                about = partial(tell, f"{kind}, load {load:g}, {variant.policy}")
                config = machine.config(**variant.settings)
                out = machine.run(replace(shape, arrivals=kind), load * rate, config, about)
                yield Row(kind, load, variant, Figures.of(out, machine.block_size))
