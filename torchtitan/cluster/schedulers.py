"""Reads the nodes of a job from variables of schedulers, so that a launch needs no flags.

    PET_*         Kubeflow Trainer, and torchrun's own settings
    SKYPILOT_*    SkyPilot
    TORCHX_*      TorchX, which names only the first node; on Volcano VC_<ROLE>_0_HOSTS does
    SLURM_*       Slurm, in a step with one task on each node, which may have a part of the job's
                  nodes and not all of its variables

The first in this order that has a value provides it, and flags override all. Processes that
torchrun starts are ranks already: they have `RANK` and `WORLD_SIZE`.
"""

import fcntl
import re
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torchtitan.config import ConfigError

PORT = 29500
SLURM_PORTS = 20_000, 10_000
"""First port, and number of ports; jobs that share a node have their own."""
ROUTED = "192.0.2.1"
"""Address without a host (RFC 5737): the route to it is that to other machines."""
SIOCGIFADDR = 0x8915
"""Request of Linux for the address of an interface (linux/sockios.h)."""
COMPARED = {"nodes": "nnodes", "processes": "processes", "rank": "rdzv_endpoint"}
"""Values that must be equal wherever they are given, with the flag that overrides them. A host is
none of them, as a machine may have several names."""

BY_DEVICES = ("auto", "cpu", "gpu")
"""Values of PET_NPROC_PER_NODE that stand for the number of devices."""

Environment = Mapping[str, str]


class Variable(NamedTuple):
    """Value, with the variable that it was read from."""

    value: Any
    variable: str


def node_range(word: str) -> range:
    """Parse a number of nodes, `2`, or a range of them, `1:2`.

    Raises:
        ValueError: if it is neither.
    """
    low, _, high = word.partition(":")
    bounds = [int(bound) if bound.isdecimal() else 0 for bound in (low, high or low)]
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"got {word}; wanted 2, or 1:2 for one or two")
    return range(bounds[0], bounds[1] + 1)


def read(environment: Environment, flags: Collection[str]) -> dict[str, Variable]:
    """Return nodes, processes, rank, host, port and name of the job, as far as they are known.

    Args:
        flags: options that are given, which variables may contradict.

    Raises:
        ConfigError: if two variables contradict each other, or one has no valid value.
    """
    found: dict[str, Variable] = {}
    for source in (_pet, _skypilot, _torchx, _slurm):
        for key, value in source(environment):
            first = found.setdefault(key, value)
            is_compared = key in COMPARED and COMPARED[key] not in flags
            if is_compared and first.value != value.value:
                raise ConfigError(
                    f"{value.variable}: got {environment[value.variable]}, but "
                    f"{first.variable} is {environment[first.variable]}; unset one of them"
                )
    return found


def fill(
    given: Mapping[str, Any], environment: Environment, devices: Callable[[], int]
) -> tuple[dict[str, Any], str]:
    """Complete the options of a launch, of which some are `given` as flags.

    Args:
        devices: called for the number of devices of this node, if no variable has it.

    Returns:
        All options, without `processes` if this process is to train alone; and where those that
        were not given were taken from, if anywhere.

    Raises:
        ConfigError: if variables contradict each other, or something is missing.
    """
    if "RANK" in environment and "WORLD_SIZE" not in environment:
        raise ConfigError(f"RANK is {environment['RANK']}, but WORLD_SIZE is not set; unset RANK")
    if "RANK" in environment or "TORCHELASTIC_RUN_ID" in environment:
        return dict(given), ""
    found = read(environment, given)
    options = dict(given)
    from_where = []

    def take(option: str, value: Any, what: str, shown: Any, key: str) -> None:
        if option not in options:
            options[option] = value
            from_where.append(f"{what}: {shown} ({found[key].variable})")

    if (nodes := found.get("nodes")) and (nodes.value[-1] > 1 or "processes" in found):
        many = f"{nodes.value[0]} to {nodes.value[-1]}" if len(nodes.value) > 1 else nodes.value[0]
        take("nnodes", nodes.value, "nodes", many, "nodes")
    if processes := found.get("processes"):
        take("processes", processes.value, "processes", processes.value, "processes")
    most, rank = options.get("nnodes", range(1, 2))[-1], found.get("rank")
    if rank and nodes and rank.value >= most and "nnodes" not in given:
        raise ConfigError(
            f"{rank.variable}: got {rank.value}; wanted less than {nodes.variable}, "
            f"{environment[nodes.variable]}"
        )
    if environment.get("PET_NPROC_PER_NODE") in BY_DEVICES:
        options.setdefault("processes", devices())
    if most > 1:
        options.setdefault("processes", devices())
        if "host" in found:
            port = found.get("port", Variable(PORT, ""))
            endpoint = f"{found['host'].value}:{port.value}"
            is_ours = "rdzv_endpoint" not in options
            take("rdzv_endpoint", endpoint, "rendezvous", endpoint, "host")
            if is_ours and "rank" in found and "is_host" not in options.get("rdzv_conf", ""):
                holds = f"is_host={str(found['rank'].value == 0).lower()}"
                options["rdzv_conf"] = ",".join(filter(None, (options.get("rdzv_conf"), holds)))
        if "name" in found:
            take("rdzv_id", found["name"].value, "name", found["name"].value, "name")
        if "rdzv_endpoint" not in options:
            where = f"{nodes.variable} is {environment[nodes.variable]}, but " if nodes else ""
            raise ConfigError(
                f"{where}several nodes need a common endpoint; set PET_MASTER_ADDR, or add "
                "--rdzv-endpoint HOST:PORT"
            )
    elif "nnodes" not in options and not nodes:
        first = found.get("host")
        if first and not _is_loopback(first.value):
            raise ConfigError(
                f"{first.variable} is {first.value}, but no variable has the number of nodes; set "
                "PET_NNODES, or add --nnodes"
            )
    return options, "; ".join(from_where)


def local_address(host: str, port: int) -> str | None:
    """Return the address from which this node reaches an endpoint; None: it does not resolve.

    Other nodes reach this one at that address, whether or not they can resolve its name.
    """
    own = _source_address(host, port)
    if own is not None and _is_loopback(own) and not _is_loopback(host):
        return _source_address(ROUTED, port) or own  # a name that is local on its own machine only
    return own


def interface_for_gloo(address: str) -> str | None:
    """Return the interface that has an address, if gloo would not find it by this node's name.

    Gloo resolves the name, and takes the loopback interface if that fails.
    """
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not _is_loopback(named) or _is_loopback(address):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _source_address(host: str, port: int) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        probe = socket.socket(family, kind)
    except OSError:
        return None
    with probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    return own


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _number(environment: Environment, variable: str, least: int = 1) -> Iterator[Variable]:
    """Yield the number that a variable has, if it is set; `gpu:8` is 8."""
    word = environment.get(variable, "")
    digits = word.rpartition(":")[2]
    if word and not (digits.isdecimal() and int(digits) >= least):
        raise ConfigError(f"{variable}: got {word}; wanted an integer >= {least}")
    if word:
        yield Variable(int(digits), variable)


def _nodes(environment: Environment, variable: str) -> Iterator[Variable]:
    if word := environment.get(variable):
        try:
            yield Variable(node_range(word), variable)
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from error


def _pet(environment: Environment) -> Iterator[tuple[str, Variable]]:
    yield from (("nodes", found) for found in _nodes(environment, "PET_NNODES"))
    if environment.get("PET_NPROC_PER_NODE") not in BY_DEVICES:
        yield from (("processes", n) for n in _number(environment, "PET_NPROC_PER_NODE"))
    yield from (("rank", found) for found in _number(environment, "PET_NODE_RANK", 0))
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(f"PET_RDZV_ENDPOINT: got {endpoint}; wanted HOST:PORT")
        yield "host", Variable(host, "PET_RDZV_ENDPOINT")
        yield "port", Variable(int(port), "PET_RDZV_ENDPOINT")
    elif host := environment.get("PET_MASTER_ADDR", ""):
        yield "host", Variable(host, "PET_MASTER_ADDR")
        yield from (("port", found) for found in _number(environment, "PET_MASTER_PORT"))


def _skypilot(environment: Environment) -> Iterator[tuple[str, Variable]]:
    yield from (("nodes", found) for found in _nodes(environment, "SKYPILOT_NUM_NODES"))
    gpus = _number(environment, "SKYPILOT_NUM_GPUS_PER_NODE", 0)
    yield from (("processes", found) for found in gpus if found.value)
    yield from (("rank", found) for found in _number(environment, "SKYPILOT_NODE_RANK", 0))
    if addresses := environment.get("SKYPILOT_NODE_IPS", "").split():
        yield "host", Variable(addresses[0], "SKYPILOT_NODE_IPS")


def _torchx(environment: Environment) -> Iterator[tuple[str, Variable]]:
    of_volcano = [name for name in environment if re.fullmatch(r"VC_\w+_0_HOSTS", name)]
    for variable in ("TORCHX_RANK0_HOST", *sorted(of_volcano)):
        if host := environment.get(variable, "").partition(",")[0]:
            yield "host", Variable(host, variable)
            return


def _slurm(environment: Environment) -> Iterator[tuple[str, Variable]]:

    def first_of(*variables: str) -> str:
        return next((name for name in variables if environment.get(name)), variables[-1])

    step = first_of("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_NODES")
    job_id = first_of("SLURM_JOB_ID", "SLURM_JOBID")
    if not (environment.get(job_id) or environment.get(step)):
        return
    sizes = "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"
    for nodes in _nodes(environment, first_of(*sizes)):
        if nodes.value[-1] > 1 and not environment.get(step):
            raise ConfigError(
                f"{nodes.variable}: got {nodes.value[-1]}, but this is one process outside a "
                "step; start it on all nodes: srun --ntasks-per-node=1 torchtitan train ..."
            )
        yield "nodes", nodes
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE: got {tasks}; wanted one task on each node, which starts "
            "its ranks: srun --ntasks-per-node=1"
        )
    for variable in ("SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE"):
        if environment.get(variable):
            yield from (("processes", found) for found in _number(environment, variable))
            break
    yield from (("rank", found) for found in _number(environment, "SLURM_NODEID", 0))
    nodelist = first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    names = environment.get(nodelist, "")  # such as node[07-09,12].cluster,other
    if listed := re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,]*)", names):
        yield "host", Variable("".join(listed.groups("")), nodelist)
    for job in _number(environment, job_id, 0):
        first, count = SLURM_PORTS
        yield "port", Variable(first + job.value % count, job.variable)
        yield "name", Variable(str(job.value), job.variable)
