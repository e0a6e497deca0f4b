"""cluster.FIELD=value over what a cluster's YAML says, and a training given in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.recipe.cluster_fields import KNOWN
from orchestrator.units import GB, GIB

HERE = Machine(host_memory=2**34)
FOUND = Machine(num_gpus=4, gpu_name="NVIDIA H200", gpu_types=("NVIDIA H200",), catalog_name="H200", nvlink=True, host_memory=2**40)
BASE = ("recipe=llama3_8b", "gpus=16", "cluster=dgx_h100")


def settings(*words: str, machine: Machine = HERE) -> recipe.Settings:
    return recipe.load(words, machine, ["megatron", "deepspeed"])


def test_each_field_of_a_cluster_can_be_said() -> None:
    values = {
        "gpu": "H200", "host_bandwidth": "10 GB/s", "host_memory": "1 TB", "size": "4", "bandwidth": "3 GB/s", "latency": "9 us",
        "memory": "64 GiB", "memory_bandwidth": "1 TB/s", "compute_capability": "9.1", "pcie": "1 GB/s", "nvlink": "2 GB/s",
        "PRECISION": "5 TFLOP/s", "megatron_core": "0.19.0", "deepspeed": "0.18.0", "transformer_engine": "false",
        "flash_attention": "false", "apex": "false", "deep_ep": "false", "stack": "stock", "ibgda": "false",
    }  # fmt: skip
    base = settings(*BASE).cluster
    for known in KNOWN:
        key = known.replace("NAME", "nvlink").replace("PRECISION", "bf16")
        assert settings(*BASE, f"{key}={values[known.rpartition('.')[2]]}").cluster != base, key


def test_a_link_of_the_gpu_carries_over_to_the_levels_that_name_it() -> None:
    assert settings(*BASE, "cluster.gpu.nvlink=100 GB/s").cluster.levels[0].bandwidth == 100 * GB


def test_the_gpus_found_here_can_be_corrected() -> None:
    cluster = settings("recipe=llama3_8b", "gpus=4", "cluster.gpu.memory=100 GiB", machine=FOUND).cluster
    assert (cluster.name, cluster.num_gpus, cluster.gpu.memory) == ("here", 4, 100 * GIB)


def test_a_resolved_configuration_has_the_field_and_a_recipe_may_say_it(tmp_path: Path) -> None:
    asked = settings(*BASE, "cluster.levels.infiniband.bandwidth=200 Gbit/s", "cluster.price_per_gpu_hour=2.5")
    again = tmp_path / "again.yaml"
    again.write_text(recipe.resolved_yaml(asked))
    assert settings(f"recipe={again}").cluster == asked.cluster
    assert settings(f"recipe={again}").price_per_gpu_hour == 2.5
    more = settings(f"recipe={again}", "gpus=32").cluster
    assert more == settings(BASE[0], BASE[2], "gpus=32", "cluster.levels.infiniband.bandwidth=200 Gbit/s").cluster, (
        "twice the GPUs can be asked"
    )
    larger = settings(f"recipe={again}", "cluster=dgx_h200", "cluster.levels.infiniband.bandwidth=200 Gbit/s")
    assert larger.limit.limit == larger.cluster.gpu.memory > asked.limit.limit, "memory that nobody limited is another GPU's"
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: llama3_8b\ncluster: dgx_h100\ngpus: 16\ncluster.levels.infiniband.bandwidth: 200 Gbit/s\n")
    assert settings(f"recipe={mine}", "cluster=dgx_h100").cluster.levels == asked.cluster.levels


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.levels.ib.bandwidth=3 GB/s", "is of no level that this cluster has; choose one of nvlink, infiniband"),
        ("cluster.levels.nvlink.bandwith=3 GB/s", "is no key; did you mean cluster.levels.NAME.bandwidth?"),
        ("cluster.levels.nvlink.bandwidth=3", "needs a number and a unit"),
        ("cluster.gpu=H2000", "is not in the catalog; did you mean H200"),
        ("cluster.gpu=h100", "is of several kinds; choose one of H100-SXM-80GB, "),
        ("cluster.mixd=slowest", "is no key; did you mean cluster.mixed?"),
        ("cluster.gpu.peak_flops.int4=1 TFLOP/s", "is no key here"),
        ("cluster.software.apex=maybe", "is neither; choose one of true, false"),
        ("cluster.price_per_gpu_hour=0", "must be above 0"),
        ("train.tokens=many", "is not a whole number, such as 1T"),
        ("train.tokens=1.5", "is not a whole number, such as 1T"),
        ("train.tokens=0", "must be at least 1"),
    ],
)
def test_what_can_not_be_said_is_refused(word: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        settings(*BASE, word)
    assert said in str(refused.value)


def test_tokens_are_the_steps_that_it_takes_to_see_them() -> None:
    """1,024 sequences of 8,192 tokens: 8,388,608 a step, so that 1T take 119,209.3; a T5's samples have both lengths."""
    words = (*BASE, "train.global_batch_size=1024", "train.seq_length=8192")
    assert settings(*words, "train.tokens=1T").training.steps == 119_210
    assert settings("recipe=t5_large", "gpus=16", "train.global_batch_size=100", "train.tokens=640K", "train.warmup=0").training.steps == 10


def test_tokens_on_the_command_line_take_the_place_of_a_recipe_s_steps_and_not_beside_steps() -> None:
    with pytest.raises(InputError, match=r"train.tokens=1T: train.steps=3 is given too"):
        settings(*BASE, "train.steps=3", "train.tokens=1T")
