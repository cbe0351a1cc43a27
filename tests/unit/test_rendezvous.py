"""Where nodes meet: whose address it is, and a store that goes and comes."""

import os
import signal
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from tests.ranks import free_port, freeze, run_ranks
from torchtitan.cluster import rendezvous
from torchtitan.cluster.rendezvous import Backend, Store, is_ours


@pytest.fixture
def port():
    return free_port()


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("127.0.0.2", True),  # of the loopback interface, but no name resolves to it
        ("::1", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),  # of a network for documentation, RFC 5737
        ("no-such-host.invalid", False),
    ],
)
def test_an_address_that_can_be_bound_is_ours(host, ours):
    assert is_ours(host) == ours


def test_store_is_held_at_an_address_that_no_name_resolves_to(port):
    store = Store("127.0.0.2", port)
    store.set("key", "value")
    assert TCPStore("127.0.0.2", port, timeout=timedelta(seconds=5)).get("key") == b"value"
    other = Store("127.0.0.2", port)
    assert other.get("key") == b"value"


def goes_and_comes(port):
    """Rank 0 holds the store and is frozen: it refuses no connection, and gives no answer."""
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    store = Store("127.0.0.2", port, is_host=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        store.set("key", "value")
    dist.barrier()
    if dist.get_rank() == 1 and pids[0] is not None:
        assert store.get("key") == b"value"
        freeze(pids[0])
        with pytest.MonkeyPatch.context() as impatient:
            impatient.setattr(rendezvous, "CALL_TIMEOUT", 0.5)
            for _ in range(2):
                with pytest.raises(RendezvousConnectionError, match=f"127.0.0.2:{port} cannot be"):
                    store.get("key")
        assert any(thread.name == rendezvous.LEFT_BEHIND for thread in threading.enumerate())
        os.kill(pids[0], signal.SIGCONT)
        assert store.get("key") == b"value"
    dist.barrier()


def test_store_goes_and_comes(port):
    run_ranks(goes_and_comes, 2, port)


def test_store_that_was_never_there_is_found_when_it_comes(port):
    store = Store("localhost", port, is_host=False)
    with pytest.raises(RendezvousConnectionError, match="Connection refused"):
        store.check(["key"])
    held = Store("localhost", port)
    held.set("key", "value")
    assert store.get("key") == b"value"


def test_errors_pass_through_a_prefix(port):
    held = Store("localhost", port)
    store = PrefixStore("round", held)
    with pytest.raises(RendezvousTimeoutError, match="no node wrote round/key in time"):
        store.wait(["key"], timedelta(seconds=0.2))
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert (store.add("n", 2), store.add("n", 1)) == (2, 3)


def test_state_of_a_store_that_was_started_anew(port):
    """Its token is of a store that is gone, with which no value can be exchanged."""
    backend = Backend(Store("localhost", port), "run")
    assert backend.get_state() is None
    found = backend.set_state(b"first")
    assert found is not None
    state, token, is_written = found
    assert (state, is_written) == (b"first", True)
    assert backend.set_state(b"late") == (b"first", token, False)
    assert backend.set_state(b"second", token) is not None
    anew = Backend(Store("localhost", 0), "run")
    assert anew.set_state(b"third", token) is None
    assert anew.set_state(b"third") is not None
