"""The rendezvous of the agents of all nodes, over a network that may be interrupted.

Torch's rendezvous is a small state that all agents read and write: the participants, those that
wait, and the time at which each was last heard of. It is kept in a store on one of the nodes, and
torch gives up when that store does not answer. Here no call waits for longer than `CALL_TIMEOUT`,
and the next one connects again: to the same store, or to a new one at the same address.

It extends what torch documents for that:
https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

import errno
import logging
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed import Store as TorchStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan.logging import logger

DEFAULT_PORT = 29400
# Seconds in which a store answers, or counts as out of reach.
CALL_TIMEOUT = 10.0
# Seconds between two looks for a value that another node is to write.
POLL_INTERVAL = 0.1
# Seconds for a whole attempt to meet; the next one follows.
ATTEMPT = 60
# The name of a thread whose call never returned.
LEFT_BEHIND = "left behind"

Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Rendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous, but ranks continue to train while the store is unreachable."""

    backend: "Backend"

    def num_nodes_waiting(self) -> int:
        """The number of waiting nodes, as far as this node knows."""
        try:
            return super().num_nodes_waiting()
        except RendezvousConnectionError:
            return 0


def open_rendezvous(params: RendezvousParameters, yields_to: str | None = None) -> Rendezvous:
    """The rendezvous at an endpoint; nothing is connected before it is used.

    Args:
        yields_to: name of a rendezvous at the same endpoint that closes this one when it begins.
    """
    # Of each heartbeat that fails; the store says once that it is out of reach.
    logging.getLogger(DynamicRendezvousHandler.__module__).setLevel(logging.ERROR)
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    store = Store(host, port, params.get_as_bool("is_host"))
    store.set_timeout(timedelta(seconds=params.get_as_int("read_timeout", 60) or 60))

    def seconds(name: str) -> timedelta | None:
        value = params.get_as_int(f"{name}_timeout")
        return None if value is None else timedelta(seconds=value)

    last_call = seconds("last_call") or timedelta(seconds=30)
    attempt = max(timedelta(seconds=ATTEMPT), 2 * last_call)
    backend = Backend(store, params.run_id, yields_to)
    made: Rendezvous = Rendezvous.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(attempt, last_call, seconds("close"), seconds("heartbeat")),
        params.get_as_int("keep_alive_interval", 5) or 5,
        params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    made.backend = backend
    return made


class Backend(RendezvousBackend):
    """The state of the rendezvous as one value of a store, which may be restarted empty."""

    name = "c10d"

    def __init__(self, store: "Store", run_id: str, yields_to: str | None = None) -> None:
        self.store, self.key = store, f"torchtitan.rendezvous.{run_id}"
        self.closed_by = yields_to and f"torchtitan.rendezvous.{yields_to}"

    def get_state(self) -> tuple[bytes, bytes] | None:
        """The state and its token, if there is one."""
        if self.closed_by and self.store.check([self.closed_by]):
            raise RendezvousClosedError("another rendezvous has begun")
        if not self.store.check([self.key]):
            return None
        value = self.store.get(self.key)
        return b64decode(value), value

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """Write the state if it is still that of `token`; what is there then, and if it is ours."""
        if token and not self.store.check([self.key]):
            return None
        wanted = b64encode(state)
        found = self.store.compare_set(self.key, token.decode() if token else "", wanted.decode())
        return b64decode(found), found, found == wanted


class Store(TorchStore):
    """The store at an address, over connections that may break; held here if the address is ours.

    Calls raise:
        RendezvousConnectionError: if the store does not answer.
        RendezvousTimeoutError: if a value is not written within the timeout of this store.
    """

    def __init__(self, host: str, port: int, is_host: bool | None = None) -> None:
        """`is_host`: whether this process holds the store; None: if the address is ours."""
        super().__init__()
        self._name, self._at, self._is_host = f"{host}:{port}", (host, port), is_host
        self._server: TCPStore | None = None
        self._client: TCPStore | None = None
        self._lost_at = 0.0
        self._lock, self._thread = threading.Lock(), CallThread()

    def _call(self, name: str, *args: Any) -> Any:
        with self._lock:
            began = time.time()
            try:
                result = self._thread.run(CALL_TIMEOUT, self._connect_and_call, name, *args)
            except (OSError, RuntimeError) as error:
                self._client = None
                words = getattr(error, "strerror", None) or str(error)
                reason = words.partition("\n")[0] or f"no answer in {CALL_TIMEOUT:.0f} s"
                if not self._lost_at:
                    logger.warning("%s cannot be reached: %s; trying again", self, reason)
                    self._lost_at = began
                raise RendezvousConnectionError(f"{self} cannot be reached: {reason}") from error
            if self._lost_at:
                logger.info("reached %s again after %d s", self, time.time() - self._lost_at)
                self._lost_at = 0.0
            return result

    def _connect_and_call(self, name: str, *args: Any) -> Any:
        self._client = self._client or self._connect()
        return getattr(self._client, name)(*args)

    def _connect(self) -> TCPStore:
        host, port = self._at
        if self._server is None and (is_ours(host) if self._is_host is None else self._is_host):
            try:
                server = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
            except DistNetworkError:
                pass  # another process of this node holds it
            else:
                # It has all addresses; the one without a network can always be reached from here.
                self._server, self._at = server, ("localhost", server.port)
                return server
        # Torch's client tries for long, and has much to say about it.
        socket.create_connection(self._at, CALL_TIMEOUT / 2).close()
        return TCPStore(*self._at, timeout=timedelta(seconds=CALL_TIMEOUT / 2))

    def __str__(self) -> str:
        return f"the rendezvous at {self._name}"

    def set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._call("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._call("compare_set", key, expected, desired)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Looks again and again, so that no call waits for others, and other calls can pass."""
        until = time.monotonic() + (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        while not self.check(keys):
            if time.monotonic() > until:
                raise RendezvousTimeoutError(f"no node wrote {', '.join(keys)} in time")
            time.sleep(POLL_INTERVAL)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        values: list[bytes] = self._call("multi_get", keys)
        return values

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._call("multi_set", keys, values)

    def has_extended_api(self) -> bool:
        return True


class CallThread:
    """A thread for calls that may never return; it is then left behind, and another one made."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._worker = threading.Thread(target=work, args=[self._calls], daemon=True)
        self._worker.start()

    def run(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call.

        Raises:
            TimeoutError: if it takes longer.
        """
        result: Future[Any] = Future()
        self._calls.put((result, function, args))
        try:
            return result.result(seconds)
        except TimeoutError:
            if not result.done():
                self._calls.put(None)
                self._worker.name = LEFT_BEHIND
                self._start()
            raise


def work(calls: "SimpleQueue[Call | None]") -> None:
    """Make the calls that come, until there is None."""
    while call := calls.get():
        result, function, args = call
        try:
            result.set_result(function(*args))
        except (OSError, RuntimeError, ValueError) as error:  # those of stores and sockets
            result.set_exception(error)


def is_ours(host: str) -> bool:
    """Whether an address or the address of a name belongs to this machine: it can be bound."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True  # also where it resolves to an address outside, as behind a NAT
    try:
        found: Sequence[Any] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
                raise
            return True
    return False


def is_foreign(port: int) -> bool:
    """Whether a port of this machine is taken by something else than a store."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        return False
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return False
    try:
        Store("localhost", port, is_host=False).check(["torchtitan"])
        return False
    except RendezvousConnectionError:
        return True
