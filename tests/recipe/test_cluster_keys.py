"""Keys of Slurm, containers, variables and programs of one's own: what they are taken for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.recipe import Settings, load, resolved_yaml
from orchestrator.run import not_here

ENGINES = ["megatron", "megatron_deepspeed", "deepspeed"]
WORDS = ("recipe=gpt_tiny", "launch=slurm", "launch.wait=true", "env.NCCL_DEBUG=INFO", "env.X=1:2", "slurm.requeue=2", "slurm.style=srun",
         "container.image=a.sif", "entry=train.py", "entry.args=--a 'b c'", "entry.without=--async-save",
         "train.step_timeout_s=60")  # fmt: skip


def settings(*words: str) -> Settings:
    return load(words, Machine(), ENGINES)


def test_they_stand_beside_the_keys_that_they_belong_to() -> None:
    found = settings(*WORDS)
    assert (found.launch, found.wait, found.env) == ("slurm", True, {"NCCL_DEBUG": "INFO", "X": "1:2"})
    assert (found.entry, found.entry_args, found.entry_without) == (str(Path("train.py").absolute()), ("--a", "b c"), ("--async-save",))
    assert (found.slurm, found.container) == (SlurmOptions(requeue=2, style="srun"), ContainerOptions(image="a.sif", runtime="apptainer"))
    assert found.run.step_timeout_s == 60


def test_the_resolved_recipe_says_them_again(tmp_path: Path) -> None:
    found = settings(*WORDS)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(found))
    again = settings(f"recipe={path}", "launch=slurm", "launch.wait=true")
    for name in ("env", "entry", "entry_args", "entry_without", "slurm", "container", "run"):
        assert getattr(again, name) == getattr(found, name), name
    assert yaml.safe_load(path.read_text())["env"] == {"NCCL_DEBUG": "INFO", "X": "1:2"}


TYPES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
MIXED = Machine(num_gpus=4, gpu_types=TYPES, nvlink=True, host_memory=2**40)


def test_gpus_of_several_types_are_named_or_planned_to_what_all_can_do(tmp_path: Path) -> None:
    here = load(["recipe=llama3_8b", "gpus=4"], MIXED, ENGINES)
    assert here.cluster.name != "here"
    assert "of several types (NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB; cluster.mixed=slowest plans" in here.why_cluster
    assert "this machine has NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB; cluster.mixed=slowest" in str(not_here(here, MIXED))
    found = load(["recipe=llama3_8b", "gpus=4", "cluster.mixed=slowest"], MIXED, ENGINES)
    gpu, a100, h100 = found.cluster.gpu, GPUS["A100-SXM-80GB"], GPUS["H100-SXM-80GB"]
    assert (gpu.name, gpu.memory, gpu.memory_bandwidth) == ("A100-SXM-80GB", h100.memory, a100.memory_bandwidth)
    assert (gpu.peak_flops, found.cluster.levels[0].bandwidth) == (a100.peak_flops, 300e9)
    assert (found.cluster.name, found.cluster.mixed) == ("here", True)
    assert not_here(found, MIXED) is None or "installed" in str(not_here(found, MIXED))
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(found))
    assert load([f"recipe={path}"], Machine(), ENGINES).cluster == found.cluster
    unknown = msgspec.structs.replace(MIXED, gpu_types=(*TYPES, "Voodoo 3"))
    assert "Voodoo 3 is not in the catalog" in load(["recipe=llama3_8b", "gpus=4", "cluster.mixed=slowest"], unknown, ENGINES).why_cluster


def test_a_cluster_may_list_its_types(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("""
gpu: [H100-SXM-80GB, A100-SXM-40GB]
gpus_per_node: 8
levels:
- {name: nvlink, size: node, bandwidth: 300 GB/s, latency: 2 us}
- {name: infiniband, size: unlimited, bandwidth: 200 Gbit/s, latency: 4 us}
host_bandwidth: 31.5 GB/s
host_memory: 128 GB
""")
    words = ["recipe=llama3_8b", "gpus=16", f"cluster={path}"]
    with pytest.raises(InputError, match="H100-SXM-80GB, A100-SXM-40GB: are several types; cluster"):
        load(words, Machine(), ENGINES)
    cluster = load([*words, "cluster.mixed=slowest"], Machine(), ENGINES).cluster
    assert (cluster.gpu, cluster.mixed) == (GPUS["A100-SXM-40GB"], True)
    path.write_text(path.read_text() + "mixed: slowest\n")
    assert load(words, Machine(), ENGINES).cluster == cluster


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("cluster.mixed=fastest", "is not known; choose one of refuse, slowest"),
        ("entry.launcher=deepspeed", "is for a program of your own"),
        ("entry.preflight=true", "is for a program of your own"),
        ("env=x", "is a group of keys; write env.NAME=value"),
        ("launch.wait=maybe", "is neither"),
        ("launch.watch=true", "is no key; did you mean launch.wait"),
        ("entry.args=--a", "is for a program of your own: name it with entry=PATH"),
        ("train.step_timeout_s=-1", "must be at least 0"),
        ("slurm.nodes=two", "is not a whole number"),
        ("slurm.extra='", "can't be split into words"),
        ("slurm.style=mpi", "is not known; choose one of torchrun, srun"),
        ("container.mounts=/a", "needs container.image beside it"),
        ("env.MASTER_ADDR=x", "is the launcher's own"),
        ("env.HF_TOKEN=x", "looks like a secret"),
        ("container.img=x", "is no key; did you mean container.image"),
    ],
)
def test_what_they_can_not_be_is_refused(word: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        settings("recipe=gpt_tiny", word)
    assert refused.value.key == word.partition("=")[0]
    assert why in str(refused.value)
