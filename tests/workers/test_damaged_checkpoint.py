"""A checkpoint of which a file was cut off or is gone: one error that names the file."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save

from orchestrator import digests, health
from orchestrator.errors import InputError
from orchestrator.workers import unpickling
from orchestrator.workers.parts import WEIGHT, Parts, Place, snapshot

pytestmark = pytest.mark.engines


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """A tensor by its place, as one rank writes it."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    whole = torch.arange(6.0).reshape(2, 3)
    about = {"key": "w", "index": (4,), "offset": (0, 0), "shape": (2, 3), "global_shape": (2, 3)}
    place = Place(**about, parameter=whole, start=0, first=True, main=True)
    left = snapshot([(place, WEIGHT, whole)], tmp_path / "checkpoint" / "states")
    whole.zero_()  # what is left to write has a copy
    left.write()
    left.finish()
    yield tmp_path
    dist.destroy_process_group()


def test_any_box_of_a_tensor_is_read_with_zeros_behind_its_end(written: Path) -> None:
    found = Parts(written / "checkpoint" / "states")
    assert found.shapes == {(WEIGHT, "w", (4,)): (2, 3)}
    assert found.read(WEIGHT, "w", (4,), (1, 0), (1, 3)).tolist() == [[3.0, 4.0, 5.0]]
    assert found.read(WEIGHT, "w", (4,), (1, 1), (2, 2)).tolist() == [[4.0, 5.0], [0.0, 0.0]]
    assert found.read(WEIGHT, "w", (4,), (2, 0), (1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_a_checkpoint_of_an_earlier_release_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank000000-0000.safetensors").touch()
    with pytest.raises(InputError, match=r"train\.resume=.*has no \.metadata: this release reads torch's distributed checkpoints"):
        Parts(tmp_path)


def test_a_file_that_changed_or_is_gone_is_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit of an exponent, as a storage may return it: the file is read without an error, and its values are others."""
    folder = written / "checkpoint"
    states = folder / "states"
    names = [*digests.written_by(folder, 0), *digests.written_by(folder, None)]
    (folder / digests.LISTING).write_text(json.dumps(digests.digests(folder, names)))
    assert health.main([str(folder)]) == 0
    assert "all 2 files" in capsys.readouterr().err
    file = states / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    last = content.index(struct.pack("<f", 5.0))
    content[last + 3] ^= 0x40
    file.write_bytes(content)
    assert Parts(states).read(WEIGHT, "w", (4,), (1, 2), (1, 1)).item() != 5.0
    assert health.main([str(folder)]) == health.UNFIT
    assert f"{file} is not what was written: its SHA-256 is another" in capsys.readouterr().out

    def said() -> str:
        return next(digests.damages(folder, digests.listed(folder) or {}, 1, 2))

    file.write_bytes(content[:-3])
    assert said() == f"{file} has {len(content) - 3:,} bytes, {len(content):,} were written"
    file.unlink()
    assert said() == f"{file} can't be read: No such file or directory"
    (folder / digests.LISTING).write_text("{")
    with pytest.raises(InputError, match=r"digests\.json: can't be read"):
        digests.listed(folder)


def test_each_rank_answers_for_the_files_that_it_wrote(tmp_path: Path) -> None:
    names = {
        None: [".metadata", "common.pt", "state/mp_rank_00_model_states.pt"],
        0: ["rank000000-0001.json", "__0_0.distcp", "generators-000000.pt"],
        12: ["states/rank000012-0000.safetensors", "__12_3.distcp", "generators-000012.pt"],
    }
    for name in (*names[None], *names[0], *names[12], digests.LISTING, f"{digests.LISTING}.000012"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {rank: digests.written_by(tmp_path, rank) for rank in (None, 0, 1, 12)} == {
        None: names[None],
        0: sorted(names[0]),
        1: [],
        12: sorted(names[12]),
    }


class Harmful:
    """What a stranger's file may hold: reading it by pickle calls a function."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.where),)

    def __init__(self, where: Path) -> None:
        self.where = where


def test_nothing_of_a_checkpoint_is_called(tmp_path: Path) -> None:
    made = tmp_path / "made"
    torch.save({"cpu": Harmful(made)}, tmp_path / "generators-000000.pt")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".metadata").write_bytes(pickle.dumps(Harmful(made)))
    with pytest.raises(InputError, match="no checkpoint's, and was not read"), unpickling.refused(tmp_path):
        torch.load(tmp_path / "generators-000000.pt", weights_only=False)  # as DeepSpeed asks for it
    with pytest.raises(InputError, match=r"it would call (posix|nt)\.mkdir"), unpickling.refused(tmp_path / "sub"):
        raise AssertionError("its metadata was read")
    assert not made.exists()
    assert unpickling.FORCED not in os.environ


def test_a_distributed_checkpoints_metadata_is_read(tmp_path: Path) -> None:
    save({"w": torch.arange(4.0), "n": 3}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with unpickling.refused(tmp_path):
        pass


def test_deepspeeds_own_records_are_read(tmp_path: Path) -> None:
    """ZeRO's files hold its loss scaler, its stage and where parameters lie."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    from orchestrator.workers.deepspeed_states import plain_records

    dynamic = DynamicLossScaler(init_scale=2.0**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
    held = {"stage": ZeroStageEnum(2), "at": fragment_address(numel=4, start=2), "static": LossScaler(scale=8.0), "dynamic": dynamic}
    torch.save(held, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with unpickling.refused(tmp_path), torch.serialization.safe_globals(plain_records()):
        found = torch.load(tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    assert (found["stage"], found["at"]) == (held["stage"], held["at"])
    assert (found["dynamic"].cur_scale, found["static"].cur_scale) == (2.0**16, 8.0)
