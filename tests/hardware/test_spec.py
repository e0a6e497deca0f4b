"""GPUs and clusters: what covers what, what all have in common, which rank is of which type."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Cluster, Gpu, Level, Part, segment, slowest

H100, A100, V100 = (GPUS[name] for name in ("H100-SXM-80GB", "A100-SXM-80GB", "V100-SXM2-32GB"))
LEVEL = Level(name="l", size=64, bandwidth=1.0, latency=0.0)


def cluster(*parts: tuple[Gpu, int], gpus: int = 24, node: int = 8) -> Cluster:
    """Of H100s, or of these types."""
    found = tuple(Part(gpu=gpu, num_gpus=many, levels=(LEVEL,)) for gpu, many in parts)
    return Cluster(name="c", gpu=H100, num_gpus=gpus, gpus_per_node=node, levels=(LEVEL,), host_bandwidth=1.0, host_memory=1, parts=found)


def test_a_gpu_covers_another_that_is_no_better_in_anything() -> None:
    assert H100.covers(H100)
    assert not A100.covers(H100)
    assert not H100.covers(replace(H100, memory=H100.memory + 1))
    assert not H100.covers(replace(H100, memory_bandwidth=H100.memory_bandwidth * 1.01))
    assert not H100.covers(replace(H100, peak_flops={"fp16": 2e15}))
    assert not H100.covers(replace(H100, peak_flops={"fp16": 1.0, "nvfp4": 1.0})), "a precision that it lacks"
    assert H100.covers(replace(H100, peak_flops={"fp16": H100.peak_flops["fp16"]}))
    assert H100.covers(replace(A100, memory=1))


def test_what_all_can_do_is_the_least_of_each_figure() -> None:
    found = slowest([H100, V100, A100])
    assert (found.memory, found.memory_bandwidth) == (V100.memory, V100.memory_bandwidth)
    assert found.peak_flops == {"fp32": 15.7e12, "fp16": 125e12}, "precisions that all have"
    assert (found.pcie, found.nvlink, found.compute_capability, found.name) == (V100.pcie, V100.nvlink, "7.0", V100.name)
    ten, nine = replace(H100, compute_capability="10.0"), replace(H100, compute_capability="9.0")
    assert slowest([ten, nine]).compute_capability == "9.0", "10.0 is above 9.0"
    assert slowest([H100]) == H100


def test_fused_attention_is_from_ampere_on_and_mxfp8_data_center_blackwells() -> None:
    of = {value: replace(H100, compute_capability=value) for value in ("7.5", "8.0", "9.0", "10.0", "11.0", "12.0")}
    assert [value for value, gpu in of.items() if gpu.has_fused_attention] == ["8.0", "9.0", "10.0", "11.0", "12.0"]
    assert [value for value, gpu in of.items() if gpu.has_mxfp8] == ["10.0", "11.0"]


def test_ranks_and_stages_are_of_the_type_that_has_their_places() -> None:
    two = cluster((H100, 8), (A100, 16))
    assert [two.part_of(stage, 3) for stage in range(3)] == [0, 1, 1]
    assert [two.part_of(stage, 6) for stage in range(6)] == [0, 0, 1, 1, 1, 1]
    assert [two.gpu_of_rank(rank).name for rank in (0, 7, 8, 23)] == [H100.name, H100.name, A100.name, A100.name]
    assert two.gpu_of(0, 3) == H100
    assert two.types == "8 x H100-SXM-80GB + 16 x A100-SXM-80GB"
    one = cluster()
    assert one.part_of(2, 3) == 0
    assert (one.gpu_of(2, 3), one.gpu_of_rank(23), one.types) == (H100, H100, "24 x H100-SXM-80GB")
    assert [view.gpu for view in two.views()] == [H100, A100]
    assert [(view.parts, view.mixed) for view in two.views()] == [((), False)] * 2


def test_peaks_of_several_types_are_their_mean_by_gpu_where_all_have_one() -> None:
    two = cluster((H100, 8), (A100, 16))
    assert two.peak_flops("bf16") == (8 * 989.4e12 + 16 * 312e12) / 24
    assert two.peak_flops("fp8") is None, "A100s have none"
    assert cluster((A100, 16), (H100, 8)).peak_flops("fp8") is None
    assert cluster().peak_flops("fp8") == H100.peak_flops["fp8"]
    assert cluster().peak_flops("nvfp4") is None


def test_nodes_are_counted_up_and_cpus_by_their_name() -> None:
    assert [cluster(gpus=gpus).num_nodes for gpus in (1, 8, 9, 24)] == [1, 1, 2, 3]
    for name, cpu in (("cpu", True), ("cpu-slow", True), ("cpus", False), ("H100-cpu", False)):
        assert replace(cluster(), gpu=replace(H100, name=name)).is_cpu is cpu


def test_a_domain_is_used_alike_by_whole_nodes_unless_less_than_half_of_it_would_be() -> None:
    """Racks of 72 in nodes of 8 or 4: all of one for up to 72 GPUs or whole racks; 64 of each for 256; 40 for 1,000; never 32 or less."""
    for given, used in (((72, 8, 72), 72), ((72, 8, 144), 72), ((72, 8, 256), 64), ((72, 4, 1000), 40), ((72, 8, 8 * 31), 72),
                        ((72, 4, 36 * 31), 36), ((72, 4, 34 * 31), 72), ((8, 4, 12), 4)):  # fmt: skip
        assert segment(*given) == used, given
