"""Check the nodes of a job before it trains: devices, links, versions, shared folder."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.cluster import launch_options as launched
from torchtitan.cluster.agent import Agent, describe
from torchtitan.cluster.launcher import LaunchOptions, torchrun_words, with_nodes
from torchtitan.cluster.preflight import check_rank
from torchtitan.cluster.schedulers import fill
from torchtitan.config import ConfigError, split_recipe
from torchtitan.device import devices_here, pick
from torchtitan.inputs import require_recipe
from torchtitan.job import JobConfig
from torchtitan.logging import configure, logger
from torchtitan.parallel import Launch
from torchtitan.resilience.stop import status_of_stop
from torchtitan.tools.options import Recipe, RecipeVerb, Text, number, verb
from torchtitan.train import read

REPORT = "TORCHTITAN_PREFLIGHT_REPORT"
"""Variable with the file for the verdict, which the launcher of the node prints."""
fraction = number("a number > 0 and <= 1", lambda value: 0 < value <= 1)
app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def preflight(
    context: typer.Context,
    recipe: Recipe = None,
    least_rate: Annotated[
        float | None,
        Text(
            "F",
            "Least rate of a rank as a fraction of the median (default: 0.8 for devices, 0.5 for "
            "links and folders).",
            parser=fraction,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    processes: launched.Processes = None,
    nnodes: launched.Nodes = None,
    rdzv_endpoint: launched.Endpoint = None,
    rdzv_id: launched.RunName = None,
    rdzv_conf: launched.RendezvousSettings = None,
    local_addr: launched.LocalAddress = None,
    rejoin_minutes: launched.Patience = None,
) -> int:
    words = [*([recipe] if recipe else []), *context.args]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return as_rank(words, least_rate, as_json)
    options, origins = fill(launched.given(context), os.environ, devices_here)
    options.setdefault("processes", devices_here())
    launch = LaunchOptions(**options, max_restarts=0, origins=origins)
    load(words, launch.nnodes[-1] * launch.processes)
    if least_rate:
        words += [f"--least-rate={least_rate}"]
    return with_nodes(launch, lambda options: on_this_node(options, words, as_json))


def load(words: Sequence[str], ranks: int) -> JobConfig:
    """Read the recipe, but for what other nodes may have and this one may not."""
    path, flags = split_recipe(words)
    require_recipe(path, flags, "preflight")
    job = load_job(path, flags, ranks, pick().type, exempt=ELSEWHERE).config
    configure(color=not job.metrics.disable_color_printing, level=job.metrics.log_level)
    return job


def on_this_node(options: LaunchOptions, words: Sequence[str], as_json: bool) -> int:
    """Run the ranks of this node, and print what all ranks found; return the exit status."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        os.environ[REPORT] = str(report)
        apart = replace(options, rdzv_id=f"{options.rdzv_id}-preflight")
        agent = Agent(
            torchrun_words(apart, "torchtitan", "preflight", *words),
            rejoin_seconds=options.patience * 60,
            not_restarted=(),
            is_finished=report.exists,
            at_failure=lambda: None,
            yields_to=options.rdzv_id,
        )
        try:
            agent.work()
        except ChildFailedError as error:
            if agent.stopped_by is None:
                logger.error("%s", describe(error.failures))
        except RendezvousClosedError:
            logger.info("the run has begun on other nodes, so this one is not checked")
            return 0
        except SignalException as error:
            if agent.stopped_by is None:
                return 128 + error.sigval
        if agent.stopped_by:
            return status_of_stop(agent.stopped_by, True)
        return (
            told(json.loads(report.read_text(encoding="utf-8")), as_json) if report.exists() else 1
        )


def as_rank(words: Sequence[str], least_rate: float | None, as_json: bool) -> int:
    """Check this rank, started by a launcher; return the exit status."""
    launch = Launch.read()
    device = pick(launch.local_rank)
    device.make_current()
    job, problem = load(words, launch.size), ""
    try:
        read(words, launch.size, device.type, local_ranks=launch.local_size)
    except ConfigError as error:
        problem = str(error)
    verdict = check_rank(job, device, problem, least_rate)
    found = {"status": verdict.status, "text": [*verdict.lines()], "json": asdict(verdict)}
    if REPORT not in os.environ:
        return told(found, as_json) if launch.rank == 0 else verdict.status
    if launch.local_rank == 0:
        Path(os.environ[REPORT]).write_text(json.dumps(found), encoding="utf-8")
    return 0  # an agent would end the other ranks, which may not have written it yet


def told(found: dict[str, Any], as_json: bool) -> int:
    """Print a verdict; return its exit status."""
    print(json.dumps(found["json"], indent=1) if as_json else "\n".join(found["text"]))
    status: int = found["status"]
    return status
