"""Starts the ranks of one node, and restarts all when one dies: `torchtitan train --processes N`.

This is torchrun for training runs. A wrong recipe is refused before anything starts, for every
number of ranks that the run may have. A signal asks the ranks to save and exit. After a failure the
launcher prints a report of their traces, and restarts them from the newest checkpoint. There is one
exit status for the outcome; `ExitCode` lists all of them.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan import trainer
from torchtitan.checkpoint import lock, saved_steps
from torchtitan.checks.services import restarts
from torchtitan.cluster.agent import Agent, describe
from torchtitan.cluster.rendezvous import DEFAULT_PORT, LEFT_BEHIND, is_foreign, is_ours
from torchtitan.cluster.schedulers import fill, interface_for_gloo, local_address, node_range
from torchtitan.config import ConfigError, PlannedWorld, kept_for_ranks, local_path, show
from torchtitan.device import devices_here, pick
from torchtitan.flight_recorder import RankTrace, note_path, read_note, read_traces, report, rescue
from torchtitan.job import JobConfig
from torchtitan.logging import configure, logger, tell
from torchtitan.parallel import RANK_ROLE
from torchtitan.remote import StoreError
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.resilience.stop import status_of_stop
from torchtitan.tools.options import LogLevel, Recipe, count, integer, number
from torchtitan.trainer import batch_note, choose, read, refuse, refuse_short_data

# Enough for the hardware failures of a night; immediate failures still end soon.
RESTARTS = 3
# Longer than most network interruptions, and than it takes to replace a node.
REJOIN_MINUTES = 30.0
# In which other nodes copy the notes of their ranks that were killed, if they can.
COPY_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `torchtitan train` on the ranks to start."""

    processes: int
    nnodes: range = range(1, 2)
    rdzv_endpoint: str = "localhost:0"
    rdzv_id: str = "torchtitan"
    rdzv_conf: str = ""
    max_restarts: int | None = None
    """Maximum number of restarts; None: RESTARTS if the recipe allows any."""
    rejoin_minutes: float | None = None
    log_rank: str = "0"
    local_addr: str | None = None
    """Address by which other nodes reach this one; None: that of the route to the endpoint."""
    origins: str = ""
    """Values taken from variables of a scheduler, with their names, for the log."""

    @property
    def patience(self) -> float:
        """Minutes that nodes wait for each other or for the network."""
        if self.rejoin_minutes is not None:
            return self.rejoin_minutes
        said = re.search(r"\bjoin_timeout=(\d+)", self.rdzv_conf)
        return int(said[1]) / 60 if said else REJOIN_MINUTES


@kept_for_ranks()
def start(options: LaunchOptions, words: Sequence[str]) -> int:
    """Run the ranks of this node until they exit; return the exit status.

    `words` are the recipe and its flags.
    """
    try:
        job = check(options, words)
    except ConfigError as error:
        return refuse(error)
    if options.max_restarts is None:
        obstacles = list(restarts(job, PlannedWorld(may_restart=True)))
        options = replace(options, max_restarts=0 if obstacles else RESTARTS)
        if obstacles:
            values = job.flat()
            why = " and ".join(f"{each.path} = {show(values[each.path])}" for each in obstacles)
            logger.info("Automatic restarts are off because %s.", why)

    def run(options: LaunchOptions) -> int:
        command = torchrun_words(options, "torchtitan.train", *words)
        return LaunchedRun(job, command, options.patience * 60).work()

    return with_nodes(options, run)


def with_nodes(options: LaunchOptions, act: Callable[[LaunchOptions], int]) -> int:
    """Call `act` with the complete options, and explain why the nodes did not meet if they do not.

    Returns:
        The exit status.
    """
    if options.origins:
        logger.info("from the environment: %s", options.origins)
    if options.processes > 1:  # ranks share the cores, as with torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return leave(act(at_an_address(options)))
    except ConfigError as error:
        return refuse(error)
    except RendezvousClosedError:
        logger.error("another node ended the run; see its output")
    except (RendezvousError, dist.DistError) as error:
        logger.error("%s", lost(error, options))
    return leave(1)


def at_an_address(options: LaunchOptions) -> LaunchOptions:
    """Complete the address of this node, and check that the port of the endpoint can be used.

    Raises:
        ConfigError: if another program of this node has the port.
    """
    if options.nnodes[-1] == 1:
        return options
    host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, DEFAULT_PORT)
    if is_ours(host) and is_foreign(port):
        raise ConfigError(
            f"--rdzv-endpoint: port {port} of this node is taken by another program; use another"
        )
    address = options.local_addr or local_address(host, port)
    if address is None:
        logger.warning("%s does not resolve here yet; waiting for it", host)
    elif interface := interface_for_gloo(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return replace(options, local_addr=address)


def lost(error: Exception, options: LaunchOptions) -> str:
    """Explain why the nodes did not meet, with a remedy."""
    for_long = f"{options.patience:g} minutes"
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"too few nodes joined the rendezvous at {options.rdzv_endpoint} within {for_long} "
            f"(--rejoin-minutes); {options.nnodes[0]} are needed (--nnodes): start the command "
            "on each node"
        )
    why = str(error).partition("\n")[0]
    return (
        f"gave up after {for_long} (--rejoin-minutes): {why}. The node of --rdzv-endpoint or the "
        "network to it is down: start the command again on that node, or on all nodes with "
        "another --rdzv-endpoint; the run resumes from its newest checkpoint, if it has one"
    )


def check(options: LaunchOptions, words: Sequence[str]) -> JobConfig:
    """Read the recipe, and check it for all numbers of ranks that it may run on.

    Raises:
        ConfigError: with all mistakes.
    """
    nodes, each = options.nnodes, options.processes
    sizes = range(nodes[0] * each, nodes[-1] * each + 1, each)
    ranks = sizes if len(sizes) > 1 else sizes[0]
    device = pick().type
    recipe = read(words, ranks, device, local_ranks=each, may_restart=bool(options.max_restarts))
    job = recipe.config
    configure(color=not job.metrics.disable_color_printing, level=job.metrics.log_level)
    # Else ranks of another node may have started; frequent checkpoints, all ranks find together.
    if nodes[-1] == 1 and not job.checkpoint.frequent.interval:
        with lock(local_path(job.job.dump_folder)):  # which has no other writer
            start = choose(job)
            refuse_short_data(recipe, start, sizes[0])
            batch_note(recipe, start, sizes[0], device)
    return job


def torchrun_words(options: LaunchOptions, module: str, *words: str) -> list[str]:
    """Return the torchrun command that runs a module with these arguments on every rank."""
    return [
        f"--nnodes={options.nnodes[0]}:{options.nnodes[-1]}",
        f"--nproc_per_node={options.processes}",
        f"--max-restarts={options.max_restarts}",
        "--node-rank=0",  # torch would read PET_NODE_RANK, and warn that it ignores it
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={options.rdzv_endpoint}",
        f"--rdzv_id={options.rdzv_id}",
        f"--rdzv_conf={options.rdzv_conf}",
        *([f"--local_addr={options.local_addr}"] if options.local_addr else []),
        f"--local-ranks-filter={options.log_rank}",
        f"--role={RANK_ROLE}",
        "--tee=3",
        "--signals-to-handle=SIGQUIT",
        *("-m", module, *words),
    ]


class LaunchedRun:
    """A run as seen by its launcher: through the agent, and through the traces of the ranks."""

    def __init__(self, job: JobConfig, words: Sequence[str], rejoin_seconds: float) -> None:
        """`words` are the arguments of a torchrun command."""
        self.job = job
        self.folder = local_path(job.job.dump_folder)
        self.agent = Agent(
            words,
            rejoin_seconds=rejoin_seconds,
            not_restarted=(ExitCode.WRONG_RECIPE, ExitCode.DIVERGED),
            is_finished=lambda: self.last_step() >= job.training.steps,
            at_failure=self.explain,
            saves=job.checkpoint.saves,
        )

    def work(self) -> int:
        """Run the ranks until they exit; return the exit status."""
        agent = self.agent
        try:
            agent.work()
        except ChildFailedError as error:
            if agent.stopped_by and self.is_complete():
                return 0
            if self.last_note("step") or agent.stopped_by is None:
                logger.error("%s", describe(error.failures))
                self.explain()
                code: int = error.get_first_failure()[1].exitcode
                return code if code > 0 else 1
        except RendezvousClosedError:
            if not agent.is_finished():
                raise
            logger.info("the other nodes finished the run")
        except SignalException as error:
            if agent.stopped_by and self.is_complete():
                return 0
            if agent.ended_by or agent.stopped_by is None:
                return ExitCode.SIGNALED + (agent.ended_by or error.sigval)
        if agent.is_finished() or not (agent.stopped_by or agent.has_others):
            return 0
        # All nodes end with the same status, or a scheduler would start only some of them again.
        status = status_of_stop(agent.stopped_by or signal.SIGTERM, self.job.checkpoint.saves)
        what = "start it again to resume" if self.job.checkpoint.saves else "nothing was saved"
        by = agent.stopped_by.name if agent.stopped_by else "another node"
        logger.info("stopped by %s: %s (status %d)", by, what, status)
        return status

    def last_step(self) -> int:
        """Return the last step that a rank has reached, or else the last that is saved."""
        if trained := int(self.last_note("step") or 0):
            return trained
        try:
            return max(saved_steps(self.job.checkpoint.path_in(self.folder)), default=0)
        except StoreError as error:
            logger.error("%s", error)
            return 0

    def is_complete(self) -> bool:
        """Whether the ranks have trained and saved the last step, and were about to exit."""
        return self.agent.is_finished() and self.last_note("state") == "finished"

    def last_note(self, key: str) -> Any:
        """Return a value of the newest note since the last start, of rank 0 or one of this node.

        All ranks are in the same step, and with many of them their files are many.
        """
        folder = self.folder / self.job.comm.save_traces_folder
        found = (read_note(note_path(folder, rank)) for rank in {0, *self.ranks()[:1]})
        notes = [note for note in found if note]
        newest = max(notes, key=lambda note: note["time"], default={"time": 0.0})
        return newest.get(key) if newest["time"] >= self.agent.began else None

    def ranks(self) -> list[int]:
        """Return the ranks of this node."""
        return [worker.global_rank for worker in self.agent.get_worker_group().workers]

    def traces(self) -> list[RankTrace]:
        """Return the traces of the ranks since their last start."""
        folder = self.folder / self.job.comm.save_traces_folder
        found = read_traces(folder) if any(folder.glob("*.step")) else []
        return [trace for trace in found if trace.time >= self.agent.began]

    def explain(self) -> None:
        """Print a report of the traces of all nodes, on one node, if they show a failure."""
        folder = self.folder / self.job.comm.save_traces_folder
        rescue(folder, self.ranks())
        is_first = not self.agent.get_worker_group().group_rank
        # Those of all ranks, which the other nodes need not read.
        traces = self.traces() if is_first else []
        until = time.monotonic() + COPY_SECONDS
        while any(trace.kept_at for trace in traces) and time.monotonic() < until:
            time.sleep(1.0)
            traces = self.traces()
        if any(trace.fate != "done" for trace in traces):
            raised = next((trace.rank for trace in traces if trace.fate == "raised"), None)
            files = sorted(folder.glob(f"{raised}.*traceback"), key=lambda p: p.stat().st_mtime)
            where = [f"traceback: {path}" for path in files[-1:]]
            where += [f"traces of all ranks: {folder}"]
            tell(*report(traces), *where)


def leave(status: int) -> int:
    """Exit immediately if Python would crash while ending a thread that native code blocks."""
    if any(thread.name == LEFT_BEHIND for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


minutes = number("minutes, a number > 0", lambda value: 0 < value < float("inf"))


def nodes(word: str) -> range:
    """Parse `--nnodes`."""
    try:
        return node_range(word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def RankOption(metavar: str, help: str, parser: Callable[[str], Any] = str) -> Any:
    """An option on the ranks to start."""
    return typer.Option(metavar=metavar, help=help, parser=parser, rich_help_panel="Ranks")


Processes = Annotated[int | None, RankOption("N", "Ranks to start on this node.", count)]
Nodes = Annotated[
    range | None,
    RankOption("N", "Number of nodes, or minimum and maximum: 1:2 (default: 1).", nodes),
]
Endpoint = Annotated[
    str | None,
    RankOption("HOST:PORT", "Rendezvous address on one of the nodes, the same on all nodes."),
]
RunName = Annotated[
    str | None,
    RankOption("NAME", "Name of the run, if others share the endpoint (default: torchtitan)."),
]
RendezvousSettings = Annotated[
    str | None,
    RankOption("KEY=VALUE", "Settings of torch's rendezvous, such as last_call_timeout=5."),
]
LocalAddress = Annotated[
    str | None,
    RankOption(
        "HOST", "Address at which other nodes reach this node (default: that of the route)."
    ),
]
Patience = Annotated[
    float | None,
    RankOption(
        "MINUTES",
        f"Time that nodes wait for each other or the network (default: {REJOIN_MINUTES:g}).",
        minutes,
    ),
]


def given(context: typer.Context) -> dict[str, Any]:
    """Return the options of `LaunchOptions` that the command line has."""
    names = [field.name for field in fields(LaunchOptions)]
    return {name: context.params[name] for name in names if context.params.get(name) is not None}


SAVES = f"{RESTARTS} if the recipe saves checkpoints, otherwise 0"


def train(
    context: typer.Context,
    recipe: Recipe = None,
    log_level: LogLevel = None,
    processes: Processes = None,
    nnodes: Nodes = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunName = None,
    rdzv_conf: RendezvousSettings = None,
    local_addr: LocalAddress = None,
    max_restarts: Annotated[
        int | None, RankOption("N", f"Restarts after failures (default: {SAVES}).", integer(0))
    ] = None,
    rejoin_minutes: Patience = None,
    log_rank: Annotated[
        str | None, RankOption("N", "Ranks of this node whose output is shown: 0,1 (default: 0).")
    ] = None,
) -> int:
    """Train in this process; or on several ranks of this node, if their number is known."""
    words = [*([recipe] if recipe else []), *context.args]
    if log_level:
        words += ["--metrics.log_level", log_level]
    own = given(context)
    if processes and "TORCHELASTIC_RUN_ID" in os.environ:
        context.fail("torchrun started this process as a rank; leave out --processes")
    try:
        options, origins = fill(own, os.environ, devices_here)
    except ConfigError as error:
        return trainer.refuse(error)
    if "processes" in options:
        return start(LaunchOptions(**options, origins=origins), words)
    if own:
        option = next(iter(own)).replace("_", "-")
        context.fail(f"--{option} needs the ranks of this node; add --processes N")
    return trainer.main(words)
