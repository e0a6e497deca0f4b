"""Servers that processes of tests are forked from, with everything imported that each would import for itself."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Sequence
from multiprocessing import forkserver


def fork_server(preload: Sequence[str], folder: str) -> mp.context.ForkServerContext:
    """The context of a server that has imported these modules, of which some lie in `folder`. Python keeps one server a process: one that
    has imported others is stopped first, and its children live on.

    The server finds modules in its environment's path alone (Python 3.11's is told sys.path and forgets it), and passes over what it does
    not find."""
    context = mp.get_context("forkserver")
    running = forkserver._forkserver  # type: ignore[attr-defined]
    if running._preload_modules != [*preload]:
        running._stop()
    context.set_forkserver_preload([*preload])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
