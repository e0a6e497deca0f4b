"""Ports for tests that start programs which listen."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """One that nobody listens at, below those that the kernel gives to outgoing connections (ip_local_port_range, from 32768): a rank of
    another test would otherwise take it before the program does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return int(probe.getsockname()[1])
