"""Two nodes with a network between them that can be cut, lose packets and be slow."""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.launched import call, mount

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h
# linux/if_tun.h: a device of Ethernet frames, without a header before each.
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65536


class Wire:
    """Passes frames between two devices."""

    def __init__(self, devices):
        self.devices = devices
        self.is_cut, self.loss, self.delay = False, 0.0, 0.0
        """Loss is a share of frames; delay in seconds, each way."""
        self.dropped = 0
        self._random, self._over = random.Random(1), False
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def close(self):
        self._over = True
        self._thread.join()

    def _forward(self):
        late, number, frames = [], 0, select.poll()  # `select.select` refuses 1,024 and above
        for device in self.devices:
            frames.register(device, select.POLLIN)
        while not self._over:
            wait = max(0.0, min(0.1, late[0][0] - time.monotonic())) if late else 0.1
            for source, _ in frames.poll(1000 * wait):
                frame, number = os.read(source, FRAME_BYTES), number + 1
                if self.is_cut or self._random.random() < self.loss:
                    self.dropped += 1
                    continue
                target = self.devices[source == self.devices[0]]
                heapq.heappush(late, (time.monotonic() + self.delay, number, target, frame))
            while late and late[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(late)
                try:
                    os.write(target, frame)
                except OSError:
                    self.dropped += 1  # the device is down


class Network:
    """Nodes `a` and `b` on a wire."""

    def __init__(self, wire, names):
        self.wire, self.names = wire, names
        self.addresses = ("10.97.0.1", "10.97.0.2")

    def on(self, node, command):
        """A command as it is run on one of the nodes."""
        name = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        own = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c", name]
        return [*own, self.names[node], *command]

    def enter(self, node):
        """Move this process, and those that it will start, to one of the nodes."""
        name = self.names[node]
        with Path("/run/netns", name).open() as namespace:
            call("setns", namespace.fileno(), CLONE_NEWNET)
        call("unshare", CLONE_NEWUTS)
        socket.sethostname(name)
        mount("--bind", Path("/etc/netns", name, "hosts"), "/etc/hosts")

    def set_up(self, node, up):
        """Switch the interface of a node on or off."""
        name = self.names[node]
        run("ip", "-n", name, "link", "set", f"{name}-tap", "up" if up else "down")

    def address(self, node, verb, address):
        """Give a node another address ("add"), or take it away ("del")."""
        name = self.names[node]
        run("ip", "-n", name, "address", verb, f"{address}/24", "dev", f"{name}-tap")


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def network(named=True):
    """Two nodes; skips the test where namespaces cannot be made.

    `named`: whether each node resolves the names of both; else of neither.
    """
    names = (f"a{os.getpid()}", f"b{os.getpid()}")
    with ExitStack() as stack:
        try:
            devices = [
                make(name, node, names if named else (), stack) for node, name in enumerate(names)
            ]
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            pytest.skip(f"no network namespaces can be made here: {why}")
        wire = Wire((devices[0], devices[1]))
        stack.callback(wire.close)
        yield Network(wire, names)


def make(name, node, names, stack):
    """A namespace with a device, whose end outside it is returned; it resolves `names`."""
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "del", name)
    # What `ip netns exec` shows as /etc/hosts there.
    folder = Path("/etc/netns", name)
    folder.mkdir(parents=True)
    stack.callback(folder.rmdir)
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"10.97.0.{at} {one}" for at, one in enumerate(names, 1))]
    hosts.write_text("\n".join(lines) + "\n")
    stack.callback(hosts.unlink)
    device = os.open("/dev/net/tun", os.O_RDWR)
    stack.callback(os.close, device)
    request = struct.pack("16sH", f"{name}-tap".encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(device, TUNSETIFF, request)
    run("ip", "link", "set", f"{name}-tap", "netns", name)
    run("ip", "-n", name, "address", "add", f"10.97.0.{node + 1}/24", "dev", f"{name}-tap")
    for interface in ("lo", f"{name}-tap"):
        run("ip", "-n", name, "link", "set", interface, "up")
    return device
