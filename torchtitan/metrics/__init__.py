"""The reports of a run: a `Meter` collects values on the device, and sinks write them.

`SINKS` maps a name to a class with the constructor and methods of `sinks.Sink`. Those in `TRACKERS`
are used when `[metrics] sinks` names them, as are classes from elsewhere; all others always. The
monitor called `x` in `MONITORS` is opened on the first rank of each node when `[metrics] x` is set.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Final, Literal

from pydantic import Field

from torchtitan.config import (
    Config,
    ConfigError,
    Context,
    Problem,
    Registry,
    allowed_names,
    import_extension,
    lacks,
    load_entry,
    needs_wing,
)
from torchtitan.logging import logger
from torchtitan.metrics.events import EventLog
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.sinks import (
    Console,
    Jsonl,
    MLflow,
    Monitor,
    Sink,
    SinkContext,
    TensorBoard,
    WandB,
)
from torchtitan.metrics.stragglers import StragglerWatch
from torchtitan.packages import install, is_installed

EVENTS_FOLDER: Final = "events"
"""Folder of event logs inside job.dump_folder."""

SINKS = Registry[type[Sink]](
    "sink",
    {
        "jsonl": Jsonl,
        "tensorboard": TensorBoard,
        "wandb": WandB,
        "mlflow": MLflow,
        "console": Console,
    },
)
TRACKERS: Final = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
"""Titles of the sinks that a recipe has to name, which are packages of the same name."""
ENTRY_POINTS: Final = "torchtitan.sinks"
"""Group of the entry points by which an installed package offers sinks."""

MONITORS = Registry[Callable[[str, float, int], AbstractContextManager[Monitor]]]("monitor")
"""Functions that open a monitor, with the value of its key, the seconds after which a rank that
hangs is ended, and the number of restarts so far. They raise OSError if the machine refuses."""


class MetricsConfig(Config):
    """Frequency and destinations of the reports of a run."""

    log_freq: int = Field(10, ge=1)
    """Steps between reports."""
    statistics_freq: int = Field(0, ge=0)
    """Steps between reports of statistics of each layer's activations, gradients and weights (root
    mean square, largest value, mean, fraction of zeros, number of non-finite values); each report
    takes another forward pass; 0: never."""
    straggler_pct: float = Field(10.0, ge=0)
    """Warn if, in several consecutive reports, a rank takes longer in a phase than the median rank
    by more than this percentage of the step time; 0: never."""
    run_name: str | None = None
    """Name of the run, in Weights & Biases for example (default: the name of its dump folder)."""
    tags: tuple[str, ...] = ()
    """Tags of the run, shown next to its name."""
    sinks: tuple[str, ...] = ()
    """Destinations of reports besides the console and metrics.jsonl: "tensorboard", "wandb",
    "mlflow", an entry point of the group torchtitan.sinks, or a class, "package.module:Class"."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files, as with "tensorboard" in `sinks`."""
    disable_color_printing: bool = False
    """Print no colors, even on a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of logged messages; --log-level sets it."""
    save_tb_folder: str = "tb"
    """TensorBoard's folder, inside job.dump_folder."""
    save_for_all_ranks: bool = False
    """Also write metrics.rank{r}.jsonl for every other rank."""
    save_events: bool = True
    """Write an event log of every rank, with the time of each phase of its steps, to
    events/rank{r}.jsonl."""
    serve: str = ""
    """Address at which the first rank of each node serves /healthz and /metrics (Prometheus):
    ":9090" for this machine only, "0.0.0.0:9090" for others too; "": none."""
    enable_wandb: bool = False
    """Report to Weights & Biases (project: WANDB_PROJECT, or torchtitan; WANDB_MODE=offline needs
    no network), as with "wandb" in `sinks`."""

    def requested(self) -> dict[str, str]:
        """Return the names of the sinks that are used besides those always used, with their key."""
        keys = dict.fromkeys(self.sinks, "sinks")
        return keys | {
            name: key for name in TRACKERS if getattr(self, key := f"enable_{name}", False)
        }

    def problems(self, context: Context) -> Iterator[Problem]:
        for name, key in self.requested().items():
            if name not in TRACKERS:
                try:
                    sink_class(name)
                except ConfigError as error:
                    yield Problem(key, str(error))
            elif not is_installed(name):
                yield Problem(key, f"{TRACKERS[name]} is not installed: {install(name)}")
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


def sink_class(name: str) -> type[Sink]:
    """Return the class of a sink that a recipe names.

    Raises:
        ConfigError: if there is none, or it lacks something.
    """
    if name in TRACKERS:
        return SINKS[name]
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    place = name if ":" in name else installed.get(name, "")
    if not place:
        allowed = allowed_names(name, [*TRACKERS, *installed])
        raise ConfigError(f'{name}: {allowed}; or a class, "package.module:Class"')
    try:
        import_extension(place.partition(":")[0])
        found: type[Sink] = load_entry(place)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if lacking := lacks(found, type[Sink]):
        raise ConfigError(f"{name}: it {lacking}")
    return found


def build_sinks(config: MetricsConfig, context: SinkContext) -> list[Sink]:
    """The sinks of one rank: all that are used on rank 0; JSONL alone, or none, elsewhere."""
    if context.rank > 0:
        return [Jsonl(context)] if config.save_for_all_ranks else []
    always = [sink for name, sink in SINKS.items() if name not in (*TRACKERS, "console")]
    made = []
    # The console is last, so that the progress bar starts only when the others have opened.
    for sink in (*always, *map(sink_class, config.requested()), SINKS["console"]):
        try:
            made.append(sink(context))
        except Exception as error:
            message = "%s failed to start: %s; the run continues without it"
            logger.error(message, sink.__name__, error, exc_info=error)
    return made
