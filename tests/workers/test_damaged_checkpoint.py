"""A checkpoint of which a file was cut off or is gone: one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.errors import InputError
from orchestrator.workers.parts import WEIGHT, Parts

pytestmark = pytest.mark.engines


@pytest.fixture
def written(tmp_path: Path) -> Path:
    save_file({"0": torch.arange(6.0).reshape(2, 3)}, tmp_path / "rank000000-0000.safetensors")
    about = {"kind": WEIGHT, "key": "w", "index": [], "offset": [0, 0], "shape": [2, 3], "global_shape": [2, 3]}
    (tmp_path / "rank000000-0000.json").write_text(json.dumps([about]))
    return tmp_path


def test_a_whole_one_is_read(written: Path) -> None:
    assert Parts(written).read(WEIGHT, "w", (), (1, 0), (1, 3)).tolist() == [[3.0, 4.0, 5.0]]


def test_a_listing_that_was_cut_off_is_named(written: Path) -> None:
    listing = written / "rank000000-0000.json"
    listing.write_text(listing.read_text()[:20])
    with pytest.raises(InputError, match=r"rank000000-0000\.json: can't be read .*the checkpoint is damaged"):
        Parts(written)


@pytest.mark.parametrize("left", [None, 40])
def test_tensors_that_are_gone_or_cut_off_are_named(written: Path, left: int | None) -> None:
    file = written / "rank000000-0000.safetensors"
    if left is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(InputError, match=r"train\.resume=.*rank000000-0000\.safetensors: can't be read .*the checkpoint is damaged"):
        Parts(written).read(WEIGHT, "w", (), (0, 0), (2, 3))
