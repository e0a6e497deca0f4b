"""What the machine says, read through a real program on the PATH that answers as nvidia-smi does."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import detect, recipe
from orchestrator.units import GB

EIGHT_H100 = "\n".join(f"{i}, GPU-{i}{i}{i}{i}-aa, Disabled, NVIDIA H100 80GB HBM3" for i in range(8))


def nvidia_smi(folder: Path, text: str, status: int = 0) -> str:
    """A program of that name; returns the PATH that has it."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def found(monkeypatch: pytest.MonkeyPatch, path: str, **environment: str) -> detect.Machine:
    monkeypatch.setenv("PATH", path)
    return detect.machine(environment)


def test_eight_equal_gpus_are_one_type_from_the_catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = found(monkeypatch, nvidia_smi(tmp_path, EIGHT_H100))
    assert (machine.num_gpus, machine.catalog_name) == (8, "H100-SXM-80GB")


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("7", 1), ("0,9,1", 1), ("GPU-2222,GPU-3333-aa", 2)])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, count: int) -> None:
    machine = found(monkeypatch, nvidia_smi(tmp_path, EIGHT_H100), CUDA_VISIBLE_DEVICES=visible)
    assert machine.num_gpus == count


def test_mixed_types_have_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "0, GPU-a, Disabled, NVIDIA H100 80GB HBM3\n1, GPU-b, [N/A], NVIDIA GeForce RTX 4090"
    machine = found(monkeypatch, nvidia_smi(tmp_path, text))
    assert (machine.num_gpus, machine.gpu_name, machine.catalog_name) == (2, None, None)
    assert machine.gpu_types == ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")


def test_gpus_cut_into_slices_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "0, GPU-a, Enabled, NVIDIA A100-SXM4-40GB\n1, GPU-b, Disabled, NVIDIA A100-SXM4-40GB"
    assert found(monkeypatch, nvidia_smi(tmp_path, text)).num_gpus == 1


def test_a_gpu_that_nobody_listed_has_a_name_but_no_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = found(monkeypatch, nvidia_smi(tmp_path, "0, GPU-a, [N/A], NVIDIA T1000"))
    assert (machine.num_gpus, machine.gpu_name, machine.catalog_name) == (1, "NVIDIA T1000", None)


def test_a_broken_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = nvidia_smi(tmp_path, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert found(monkeypatch, path).num_gpus == 0


def test_a_driver_that_hangs_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(detect, "NVIDIA_SMI_S", 0.2)
    assert found(monkeypatch, f"{tmp_path}:/usr/bin:/bin").num_gpus == 0


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(monkeypatch, str(tmp_path)).num_gpus == 0


def test_a_slurm_allocation_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = found(monkeypatch, str(tmp_path), SLURM_JOB_ID="17", SLURM_JOB_NUM_NODES="4")
    assert (inside.slurm_job, inside.slurm_nodes) == ("17", 4)
    outside = found(monkeypatch, str(tmp_path))
    assert (outside.slurm_job, outside.slurm_nodes) == (None, 0)


EIGHT_MI300X = "\n".join(
    [
        "device,Device Name,Device ID,Device Rev,Subsystem ID,GUID",
        *(f"card{i},AMD Instinct MI300X,0x74a1,0x00,0x74a1,{28851 + i}" for i in range(8)),
    ]
)
"""As rocm-smi of ROCm 10 printed it (NVIDIA/NVFlare, fuel/utils/gpu_utils_test.py, "captured real rocm-smi CSV fixtures")."""
OLDER = "device,Card series,Card model,Card vendor,Card SKU\ncard0,AMD Instinct MI300X OAM,0x74a1,AMD,MI3SRIOV"


def rocm_smi(folder: Path, text: str) -> str:
    path = nvidia_smi(folder, text)
    (folder / "nvidia-smi").rename(folder / "rocm-smi")
    return path


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 8), ({"HIP_VISIBLE_DEVICES": "0,3"}, 2), ({"CUDA_VISIBLE_DEVICES": "1"}, 1), ({"HIP_VISIBLE_DEVICES": "9,0"}, 0)],
)
def test_gpus_of_amd_are_found_with_the_links_between_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], count: int
) -> None:
    machine = found(monkeypatch, rocm_smi(tmp_path, EIGHT_MI300X), **environment)
    assert (machine.num_gpus, machine.catalog_name, machine.nvlink) == (count, "MI300X" if count else None, count > 1)


def test_older_releases_head_the_name_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(monkeypatch, rocm_smi(tmp_path, OLDER)).catalog_name == "MI300X"


def test_a_node_of_amds_is_planned_for_as_a_mesh_of_its_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = found(monkeypatch, rocm_smi(tmp_path, EIGHT_MI300X))
    level = recipe.load(["recipe=llama3_8b", "gpus=8"], machine, ["megatron"]).cluster.levels[0]
    assert (level.name, level.size, level.bandwidth / GB, level.mesh) == ("xgmi", 8, 448, True)
