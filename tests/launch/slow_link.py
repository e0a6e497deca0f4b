"""Two sites on one machine with a slow link between them: network namespaces, joined by a link of this rate and delay in user space.

The kernel here need not know netem: each site has a TUN interface whose packets this process reads, holds as long as the link would, and
writes to the other site's. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h"""
MTU = 9000
"""Bytes: small beside what the link carries in a step, large enough that Python keeps up."""
INTERFACE = "link0"


def possible() -> bool:
    """Whether this process may make namespaces and interfaces."""
    return sys.platform.startswith("linux") and os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _interface(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class SlowLink:
    """`rate`: bytes/s in each direction; `delay_s`: of each packet, one way. `carried`: bytes so far, by the site that sent them."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self.sites = tuple(f"site{os.getpid()}{letter}" for letter in "ab")
        self.addresses = ("10.99.0.1", "10.99.0.2")
        self.carried = [0, 0]
        self._ended = threading.Event()

    def __enter__(self) -> SlowLink:
        self._descriptors = [_interface(f"tun{os.getpid() % 100000}{letter}") for letter in "ab"]
        for site, letter, mine, other in zip(self.sites, "ab", self.addresses, reversed(self.addresses), strict=True):
            inside = ("ip", "-n", site)
            _run("ip", "netns", "add", site)
            _run("ip", "link", "set", f"tun{os.getpid() % 100000}{letter}", "netns", site, "name", INTERFACE, "mtu", str(MTU))
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "addr", "add", mine, "peer", other, "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)
        for descriptor in self._descriptors:
            os.close(descriptor)
        for site in self.sites:
            subprocess.run(["ip", "netns", "del", site], check=False, capture_output=True)

    def _carry(self) -> None:
        """A packet leaves when those before it have, takes its bytes over the rate, and arrives after the delay."""
        free = [0.0, 0.0]
        waiting: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while not self._ended.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, to, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(self._descriptors[to], packet)
            pause = min(0.1, max(0.0, waiting[0][0] - now)) if waiting else 0.1
            ready, _, _ = select.select(self._descriptors, [], [], pause)
            now = time.monotonic()
            for descriptor in ready:
                site = self._descriptors.index(descriptor)
                with contextlib.suppress(BlockingIOError):
                    while packet := os.read(descriptor, MTU + 100):
                        free[site] = max(free[site], now) + len(packet) / self.rate
                        self.carried[site] += len(packet)
                        heapq.heappush(waiting, (free[site] + self.delay_s, next(order), 1 - site, packet))

    def command(self, site: int, *command: str) -> list[str]:
        """The command as it runs in a site, under a host name of the site's."""
        named = 'hostname "$0"; exec "$@"'
        return ["ip", "netns", "exec", self.sites[site], "unshare", "--uts", "bash", "-c", named, f"site-{'ab'[site]}", *command]


@contextlib.contextmanager
def _running(commands: list[list[str]], folder: Path, environments: list[Mapping[str, str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = []
    try:
        for index, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with (folder / f"site-{index}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def train(link: SlowLink, out: Path, *, nodes: int = 2, ranks: int = 4, seconds: float = 600.0) -> None:
    """Run the launch.sh of a folder on both sites until it ends. Raises AssertionError with the logs' ends where it ends badly."""
    shared = {
        "PYTHON": sys.executable,
        "NNODES": str(nodes),
        "RANKS_PER_NODE": str(ranks // nodes),
        "MASTER_ADDR": link.addresses[0],
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
    }
    commands = [link.command(site, "bash", "launch.sh") for site in range(nodes)]
    with _running(commands, out, [{**shared, "NODE_RANK": str(site)} for site in range(nodes)]) as processes:
        ends = [process.wait(seconds) for process in processes]
    said = "".join(path.read_text(errors="replace")[-1500:] for path in [*out.glob("site-*.log"), *(out / "logs").glob("rank-*.log")])
    assert ends == [0] * nodes, said
