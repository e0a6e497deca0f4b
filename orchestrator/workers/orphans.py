"""A rank ends with the launcher that started it. Needs nothing but Python."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""The prctl of linux/prctl.h that sets the signal a process gets when the thread that started it ends."""
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
"""What torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py) and DeepSpeed's launcher (deepspeed/launcher/launch.py) put
into the environment of the ranks that they start and watch."""


def end_with_launcher() -> None:
    """A rank whose torchrun or DeepSpeed launcher is killed ends with it, by SIGTERM from the kernel: nobody would end it when another
    rank dies, and it would keep its GPU. A rank that somebody started alone, or srun, goes on when its parent ends."""
    if not sys.platform.startswith("linux") or not any(name in os.environ for name in LAUNCHERS):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended in between
        os._exit(128 + signal.SIGTERM)
