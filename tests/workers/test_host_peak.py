"""The peak of a rank's memory is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engines


def test_a_programs_peak_is_not_that_of_the_process_that_started_it() -> None:
    """Linux's getrusage says 1.5 GB here, which is what the process has that starts it."""
    own = "from orchestrator.workers.metrics import host_peak; block = bytearray(b'x') * (200 << 20); print(host_peak())"
    large = f"import subprocess, sys; block = bytearray(b'x') * (1500 << 20); subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    said = subprocess.run([sys.executable, "-c", large], check=True, capture_output=True, text=True).stdout
    assert 200 << 20 < int(said) < 1200 << 20
