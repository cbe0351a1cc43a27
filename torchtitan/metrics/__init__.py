"""The reports of a run: a `Meter` collects values on the device, and sinks write them.

`SINKS` maps a name to a class with the constructor and methods of `sinks.Sink`. The sink called
`x` is used when `[metrics] enable_x` is true; a sink without such a key is always used. The monitor
called `x` in `MONITORS` is opened on the first rank of each node when `[metrics] x` is set.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Literal

from pydantic import Field

from torchtitan.config import Config, Context, Problem, Registry, needs_wing
from torchtitan.metrics.events import EventLog
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.sinks import Console, Jsonl, Monitor, Sink, SinkContext, TensorBoard, WandB
from torchtitan.metrics.stragglers import StragglerWatch
from torchtitan.packages import install, is_installed

EVENTS_FOLDER: Final = "events"
"""Folder of event logs inside job.dump_folder."""

SINKS = Registry[type[Sink]](
    "sink",
    # The console is last, so that the progress bar starts only when the others have opened.
    {"jsonl": Jsonl, "tensorboard": TensorBoard, "wandb": WandB, "console": Console},
)

MONITORS = Registry[Callable[[str, float, int], AbstractContextManager[Monitor]]]("monitor")
"""Functions that open a monitor, with the value of its key, the seconds after which a rank that
hangs is ended, and the number of restarts so far. They raise OSError if the machine refuses."""


class MetricsConfig(Config):
    """Frequency and destinations of the reports of a run."""

    log_freq: int = Field(10, ge=1)
    """Steps between reports."""
    statistics_freq: int = Field(0, ge=0)
    """Steps between reports of the root mean square, largest value, mean, fraction of zeros and
    number of non-finite values of the activations, gradients and weights of each layer; each report
    takes one more forward pass; 0: never."""
    straggler_pct: float = Field(10.0, ge=0)
    """Warn about a rank that, in several reports in a row, takes longer in a phase than the median
    rank, by more than this percentage of the step time; 0: never."""
    run_name: str | None = None
    """Name of the run, in Weights & Biases for example (default: the name of its dump folder)."""
    tags: tuple[str, ...] = ()
    """Tags of the run, shown next to its name."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    disable_color_printing: bool = False
    """Print no colors, even on a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log; --log-level sets it."""
    save_tb_folder: str = "tb"
    """TensorBoard's folder, inside job.dump_folder."""
    save_for_all_ranks: bool = False
    """Also write metrics.rank{r}.jsonl for every other rank."""
    save_events: bool = True
    """Write an event log of every rank, with the time of each phase of its steps, to
    events/rank{r}.jsonl."""
    serve: str = ""
    """Address at which the first rank of each node answers /healthz and /metrics (Prometheus):
    ":9090" for this machine alone, "0.0.0.0:9090" for others too; "": none."""
    enable_wandb: bool = False
    """Report to Weights & Biases (project: WANDB_PROJECT, or torchtitan; WANDB_MODE=offline needs
    no network)."""

    def problems(self, context: Context) -> Iterator[Problem]:
        for package, title in {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}.items():
            if getattr(self, f"enable_{package}") and not is_installed(package):
                message = f"{title} is not installed: {install(package)}"
                yield Problem(f"enable_{package}", message)
        if self.serve and "serve" not in MONITORS:
            yield Problem("serve", needs_wing("cluster"))
        elif self.serve:
            try:
                parse_address(self.serve)
            except ValueError as error:
                yield Problem("serve", str(error))


def parse_address(serve: str) -> tuple[str, int]:
    """Split `[metrics] serve` into host and port.

    Raises:
        ValueError: if it has neither form.
    """
    found = re.fullmatch(r"([\w.\-]*|\[[\da-fA-F:.]+\]):(\d{1,5})", serve, re.ASCII)
    if not found or not 0 < int(found[2]) < 2**16:
        raise ValueError('wanted a port, as ":9090", or an address with one, as "0.0.0.0:9090"')
    return found[1].strip("[]") or "127.0.0.1", int(found[2])


def build_sinks(config: MetricsConfig, context: SinkContext) -> list[Sink]:
    """The sinks of one rank: all that are enabled on rank 0; JSONL alone, or none, elsewhere."""
    if context.rank > 0:
        return [Jsonl(context)] if config.save_for_all_ranks else []
    return [
        sink(context) for name, sink in SINKS.items() if getattr(config, f"enable_{name}", True)
    ]
