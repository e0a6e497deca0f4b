"""Small recipes of pictures that are drawn by class learn what those hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.full
@pytest.mark.engines
@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny"])
def test_small_recipes_learn_what_their_data_hold(name: str, tmp_path: Path) -> None:
    """To 90% of those that were held out."""
    out = tmp_path / "run"
    words = [f"recipe={name}", f"out={out}", "launch=local"]
    subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["valid_accuracy"] >= 0.9
