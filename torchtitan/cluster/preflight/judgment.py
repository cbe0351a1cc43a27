"""Comparison of the ranks of a job with each other: which are slow, odd or broken."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

UNITS = {
    "products": "TFLOP/s",
    "memory": "GB/s",
    "free memory": "GiB",
    "to device": "GB/s",
    "from device": "GB/s",
    "pairs inside a node": "GB/s",
    "pairs between nodes": "GB/s",
    "sum in a node": "GB/s",
    "sum": "GB/s",
    "writing": "MB/s",
    "reading": "MB/s",
}
"""Rates by name, in the order in which they are shown."""
LEAST = dict.fromkeys(("products", "memory", "free memory", "to device", "from device"), 0.8)
LEAST_OTHERS = 0.5
"""Least rate of a rank as a fraction of the median: of a device, and of links and folders, which
others may use at the same time."""
CLOCK_SECONDS = 1.0
"""Most that a clock may be off; files and logs of several nodes are ordered by time."""


@dataclass
class RankReport:
    """Measurements of one rank."""

    rank: int
    node: int
    """Number of its node."""
    host: str
    device: str
    facts: dict[str, str] = field(default_factory=dict)
    """Versions and settings that must be equal on all ranks."""
    rates: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Descriptions of everything that failed."""
    problem: str = ""
    """Mistake in the recipe that was found here."""
    clock: float = 0.0
    """Seconds that the clock is ahead of the median."""

    @property
    def place(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True)
class Fault:
    """A finding that ends the job before it trains."""

    what: str
    """A rate, a version, "clock", "recipe" or "broken"."""
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Verdict:
    """Result of a preflight, equal on all ranks."""

    ranks: int
    nodes: int
    seconds: float
    rates: dict[str, dict[str, Any]]
    """By name: unit, median, lowest, its rank and host, and the limit."""
    clock: float
    """Largest offset of a clock from the median, in seconds."""
    faults: list[Fault]

    @property
    def status(self) -> int:
        """Exit status: 2 for a mistake in the recipe that all ranks find, 1 for another fault."""
        everywhere = any(f.what == "recipe" and len(f.ranks) == self.ranks for f in self.faults)
        return 2 if everywhere else int(bool(self.faults))

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        yield f"preflight: {ranks} on {nodes}, {self.seconds:.0f} s"
        if self.rates:
            yield f"  {'':<20}{'':<9}{'median':>9}{'lowest':>9}{'wanted':>9}"
        for name, rate in self.rates.items():
            numbers = "".join(f"{rate[key]:>9.4g}" for key in ("median", "lowest", "least"))
            yield f"  {name:<20}{rate['unit']:<9}{numbers}  rank {rate['rank']} ({rate['host']})"
        yield f"  clocks within {self.clock:.3f} s; wanted {CLOCK_SECONDS:g}"
        if self.ranks == 1:
            yield "  one rank: there is none to compare it with"
        for fault in self.faults:
            yield f"fault: {fault.message}"
        many = len(self.faults)
        yield f"{many} fault{'s' * (many > 1)}" if many else "no faults"


def judge(reports: Sequence[RankReport], seconds: float, least: float | None = None) -> Verdict:
    """Compare the reports of all ranks.

    Args:
        least: least rate as a fraction of the median; None: `LEAST`, or `LEAST_OTHERS`.
    """
    rates = {}
    faults = [*_broken(reports), *_odd(reports)]
    for name, unit in UNITS.items():
        having = [report for report in reports if name in report.rates]
        if not having:
            continue
        slowest = min(having, key=lambda report: report.rates[name])
        middle = median(report.rates[name] for report in having)
        wanted = middle * (least or LEAST.get(name, LEAST_OTHERS))
        rates[name] = {
            "unit": unit,
            "median": middle,
            "lowest": slowest.rates[name],
            "least": wanted,
            "rank": slowest.rank,
            "host": slowest.host,
        }
        for report in having:
            if (rate := report.rates[name]) < wanted:
                message = (
                    f"{report.place}: {name} {rate:.4g} {unit}, {rate / middle:.2f} of the median; "
                    f"wanted {wanted:.4g} or more"
                )
                faults.append(Fault(name, (report.rank,), message))
    late = {report.rank: report for report in reports if abs(report.clock) > CLOCK_SECONDS}
    for rank, report in late.items():
        side = "ahead of" if report.clock > 0 else "behind"
        message = f"{report.place}: the clock is {abs(report.clock):.1f} s {side} the others"
        faults.append(Fault("clock", (rank,), message))
    nodes = len({report.node for report in reports})
    clock = max(abs(report.clock) for report in reports)
    return Verdict(len(reports), nodes, seconds, rates, clock, faults)


def _broken(reports: Sequence[RankReport]) -> Iterator[Fault]:
    """Yield failures, once for all ranks with the same one."""
    said: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        found = [("broken", message) for message in report.faults]
        found += [("recipe", report.problem)] if report.problem else []
        for each in found:
            said.setdefault(each, []).append(report)
    for (what, message), saying in said.items():
        yield Fault(what, tuple(report.rank for report in saying), f"{_places(saying)}: {message}")


def _odd(reports: Sequence[RankReport]) -> Iterator[Fault]:
    """Yield versions and settings that are not those of most ranks."""
    for name in {name: None for report in reports for name in report.facts}:
        counts = Counter(report.facts.get(name, "none") for report in reports)
        (common, _), *others = counts.most_common()
        for value, _ in others:
            odd = [report for report in reports if report.facts.get(name, "none") == value]
            message = f"{_places(odd)}: {name} is {value}; that of most ranks is {common}"
            yield Fault(name, tuple(report.rank for report in odd), message)


def _places(reports: Sequence[RankReport], most: int = 8) -> str:
    shown = ", ".join(report.place for report in reports[:most])
    return shown + f" and {len(reports) - most} more" * (len(reports) > most)
