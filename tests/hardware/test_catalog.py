"""The catalog is consistent, and the clusters that come with the package are what their datasheets say."""

from __future__ import annotations

import re
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from orchestrator.hardware.catalog import DRIVER_NAMES, GPUS, POWER_W, by_driver_name, nearest
from orchestrator.hardware.spec import Gpu
from orchestrator.recipe.clusters import load_cluster, stored
from orchestrator.units import GB, GIB, MIB, TB, TFLOPS

MARKETING_GB = {
    "V100-SXM2-16GB": 16,
    "V100-SXM2-32GB": 32,
    "A100-SXM-40GB": 40,
    "A100-SXM-80GB": 80,
    "H100-SXM-80GB": 80,
    "H200": 141,
    "B200": 192,
    "GB200": 192,
    "TITAN-RTX": 24,
    "RTX-A5000": 24,
    **dict.fromkeys(("A100-PCIE-80GB", "A800-SXM-80GB", "H100-PCIE-80GB", "H800-SXM-80GB"), 80),
    **{"A100-PCIE-40GB": 40, "H100-SXM-96GB": 96, "GH200-96GB": 96, "H100-NVL": 94, "H20": 96, "B300": 288, "GB300": 288, "RTX-5090": 32},
    **dict.fromkeys(("RTX-3090", "RTX-4090", "A30", "A10", "L4"), 24),
    **dict.fromkeys(("RTX-PRO-6000", "RTX-PRO-6000-Server"), 96),
    **{"MI250X-die": 64, "MI300X": 192, "MI325X": 256, "MI355X": 288},
    **dict.fromkeys(("A40", "RTX-A6000", "L40", "RTX-6000-Ada", "L40S"), 48),
}
BIGGEST_BINARY = {"H200": 141 * GB, "B200": 192 * GB, "B300": 288 * GB, "GB300": 288 * GB}
"""Where the marketing figure counts decimal bytes; elsewhere it is GiB."""


@pytest.mark.parametrize("name", MARKETING_GB)
def test_driver_memory_is_a_little_less_than_the_marketing_figure(name: str) -> None:
    whole = BIGGEST_BINARY.get(name, MARKETING_GB[name] * GIB)
    assert 0.92 * whole < GPUS[name].memory < MARKETING_GB[name] * GIB


def test_every_gpu_has_its_marketing_figure_here() -> None:
    assert {*GPUS} - {*MARKETING_GB} == {"cpu"}


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.name != "cpu"], ids=lambda gpu: gpu.name)
def test_peaks_double_as_the_precision_halves_and_have_a_source(gpu) -> None:  # type: ignore[no-untyped-def]
    peaks = gpu.peak_flops
    assert gpu.source
    assert peaks["fp32"] < peaks["fp16"]
    assert float(gpu.compute_capability) >= 7.0
    assert ("bf16" in peaks) == (float(gpu.compute_capability) >= 8.0)
    assert ("fp8" in peaks) == (float(gpu.compute_capability) >= (8.9 if gpu.vendor == "nvidia" else 9.4))
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    if "tf32" in peaks:
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.02)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if "nvfp4" in peaks:
        assert peaks["nvfp4"] in (2 * peaks["fp8"], 3 * peaks["fp8"])  # Blackwell, and Blackwell Ultra


QUOTED = (
    (r"torch(?: total)?(?: about)? ([\d.]+) GiB", lambda gpu, figure: gpu.memory / GIB == pytest.approx(figure, abs=0.005)),
    (r"(\d+) MiB", lambda gpu, figure: 0.98 * figure <= gpu.memory / MIB <= 1.0001 * figure),
    (r"(?<!\d )\b([\d.]+) TB/s", lambda gpu, figure: gpu.memory_bandwidth == figure * TB or figure > 500),
    (r"([\d.]+) GB/s(?! in)", lambda gpu, figure: gpu.memory_bandwidth == figure * GB),
)


def test_figures_that_a_source_quotes_are_the_entrys() -> None:
    """Memory that torch shows is what the driver shows or up to 2% less; 576 TB/s are of a whole NVL72."""
    quoted = 0
    for gpu in GPUS.values():
        for pattern, holds in QUOTED:
            for figure in re.findall(pattern, gpu.source):
                quoted += 1
                assert holds(gpu, float(figure)), (gpu.name, figure)
    assert quoted >= 30
    assert GPUS["GB200"].memory_bandwidth == 576 * TB / 72


def test_no_gpu_computes_more_for_a_byte_or_a_watt_than_the_field_has_seen() -> None:
    """Dense 16-bit FLOPs: 37 (H20) to 420 (L40S) a byte of memory traffic, .2 to 2.25 TFLOP/s a watt."""
    for gpu in GPUS.values():
        if gpu.name != "cpu":
            assert 35 < gpu.peak_flops["fp16"] / gpu.memory_bandwidth < 430, gpu.name
            assert 0.15e12 < gpu.peak_flops["fp16"] / POWER_W[gpu.name] < 2.3e12, gpu.name


def test_figures_that_everybody_knows() -> None:
    assert GPUS["A100-SXM-80GB"].peak_flops["bf16"] == 312 * TFLOPS
    assert GPUS["H100-SXM-80GB"].peak_flops["bf16"] == 989.4 * TFLOPS
    assert GPUS["V100-SXM2-16GB"].peak_flops["fp16"] == 125 * TFLOPS
    assert GPUS["H200"].memory_bandwidth == 4800 * GB


def test_every_driver_name_leads_to_an_entry_and_old_drivers_do_too() -> None:
    assert {by_driver_name(name) for name in DRIVER_NAMES} <= set(GPUS.values())
    assert by_driver_name("A100-SXM4-80GB") is by_driver_name("NVIDIA A100-SXM4-80GB") is GPUS["A100-SXM-80GB"]
    assert by_driver_name("NVIDIA H100 80GB HBM3") is GPUS["H100-SXM-80GB"]
    assert by_driver_name("Radeon VII") is None


# GB/s per GPU and direction, from the datasheets: NVLink (or PCIe) inside, one network port's share outside.
LINKS = {
    "cpu": (1.0,),
    "dgx_a100_40gb": (300.0, 25.0),
    "dgx_a100_80gb": (300.0, 25.0),
    "dgx_h100": (450.0, 50.0),
    "dgx_h200": (450.0, 50.0),
    "dgx_h800": (200.0, 50.0),
    "dgx_b200": (900.0, 50.0),
    "gb200_nvl72": (900.0, 50.0),
    "dgx_b300": (900.0, 100.0),
    "gb300_nvl72": (900.0, 100.0),
    "aws_g6e": (31.5, 6.25),
    "aws_p4d": (300.0, 6.25),
    "aws_p4de": (300.0, 6.25),
    "aws_p5": (450.0, 50.0),
    "aws_p5en": (450.0, 50.0),
    "aws_p6_b200": (900.0, 50.0),
    "azure_nd_a100_v4": (300.0, 25.0),
    "azure_ndm_a100_v4": (300.0, 25.0),
    "azure_nd_h100_v5": (450.0, 50.0),
    "azure_nd_h200_v5": (450.0, 50.0),
    "gcp_a3_mega": (450.0, 25.0),
    "gcp_a3_ultra": (450.0, 50.0),
    "gcp_a4": (900.0, 50.0),
    "coreweave_h100": (450.0, 50.0),
    "dgx_superpod_h100": (450.0, 50.0),
    "lambda_h100": (450.0, 50.0),
    "azure_nd_mi300x_v5": (448.0, 50.0),
    "mi250x_frontier": (200.0, 50.0, 12.5),
    "mi300x_8": (448.0, 50.0),
    "mi325x_8": (448.0, 50.0),
    "mi355x_8": (537.6, 50.0),
    "oci_mi300x": (448.0, 50.0),
    "gh200_slingshot": (450.0, 25.0),
    "oci_h100": (450.0, 50.0),
    "v100_16gb": (150.0, 6.25),
    "v100_16gb_x4": (150.0, 12.5),
    "rtx_titan_8": (15.75, 1.5625),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_of_the_packaged_clusters(name: str) -> None:
    cluster = load_cluster(name, 16)
    assert tuple(level.bandwidth / GB for level in cluster.levels) == LINKS[name]
    assert all(level.source for level in cluster.levels)


def test_every_packaged_cluster_is_checked_here() -> None:
    assert set(stored("clusters")) == set(LINKS)


@pytest.mark.parametrize("num_gpus", [1, 2, 8, 16, 72, 144, 16384])
def test_levels_nest_and_hold_the_job(num_gpus: int) -> None:
    for name in set(stored("clusters")) - {"cpu"}:
        sizes = [level.size for level in load_cluster(name, num_gpus).levels]
        assert sizes[-1] >= num_gpus
        assert all(outer % inner == 0 for inner, outer in pairwise(sizes))


@pytest.mark.parametrize(("num_gpus", "together"), [(8, 72), (72, 72), (144, 72), (256, 64), (512, 64), (1000, 40)])
def test_a_job_takes_as_many_nodes_of_each_rack(num_gpus: int, together: int) -> None:
    """256 GPUs of racks of 72 are four times 64: expert groups of 64 stay inside one."""
    assert load_cluster("gb200_nvl72", num_gpus).levels[0].size == together


def test_nodes_may_have_any_size() -> None:
    cluster = load_cluster("dgx_h100", 18, gpus_per_node=6)
    assert (cluster.num_nodes, cluster.levels[0].size, cluster.levels[1].size) == (3, 6, 18)


def test_link_speeds_stand_in_the_catalog_alone() -> None:
    """The YAMLs name the GPU's own link; only a network's bandwidth, and Grace's memory link, stand there."""
    for path in (Path(__file__).parents[2] / "recipes" / "clusters").glob("*.yaml"):
        for line in path.read_text().splitlines():
            if line.startswith("- {name: nvlink"):
                assert "bandwidth: nvlink" in line, path
            if line.startswith("- {name: pcie"):
                assert "bandwidth: pcie" in line, path
    assert all(gpu.pcie > 0 for gpu in GPUS.values() if gpu.name != "cpu")
    named = ("V100-SXM2-32GB", "A800-SXM-80GB", "H200", "H100-PCIE-80GB", "GB300")
    assert [GPUS[name].nvlink / GB for name in named] == [150, 200, 450, 0, 900]


def test_amds_gpus_are_an_architecture_of_their_own_whatever_their_version_number() -> None:
    assert [GPUS[name].generation for name in ("H100-SXM-80GB", "MI250X-die", "MI300X", "MI355X")] == ["9", "amd9", "amd9", "amd9"]
    names = (
        "AMD Instinct MI300X",
        "AMD Instinct MI300X OAM",
        "AMD Instinct MI300X VF",
        "MI300X-O",
        "AMD Instinct MI250X",
        "AMD Radeon VII",
    )
    assert [gpu and gpu.name for gpu in map(by_driver_name, names)] == ["MI300X"] * 4 + ["MI250X-die", None]


def test_mxfp8_is_data_center_blackwells() -> None:
    assert [GPUS[name].has_mxfp8 for name in ("H200", "B200", "GB300", "RTX-5090")] == [False, True, True, False]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_links_of_a_gpu_are_faster_from_the_outside_in(gpu: Gpu) -> None:
    """Where there is NVLink, it is faster than the slot, which it is there for, and slower than the GPU's own memory."""
    assert gpu.nvlink == 0 or gpu.pcie < gpu.nvlink < gpu.memory_bandwidth
    assert gpu.pcie == 0 or 15 * GB < gpu.pcie < gpu.memory_bandwidth


CHIPS = {
    # multiprocessors, boost clock in GHz, FLOPs a clock of one: fp32 lanes, dense fp16 tensor cores with fp32 sums
    **dict.fromkeys(("V100-SXM2-16GB", "V100-SXM2-32GB"), (80, 1.530, 128, 1024)),
    **dict.fromkeys(("A100-SXM-40GB", "A100-SXM-80GB", "A100-PCIE-40GB", "A100-PCIE-80GB", "A800-SXM-80GB"), (108, 1.410, 128, 2048)),
    **dict.fromkeys(("H100-SXM-80GB", "H100-SXM-96GB", "H800-SXM-80GB", "GH200-96GB", "H200"), (132, 1.830, 256, 4096)),
    "H100-PCIE-80GB": (114, 1.620, 256, 4096), "TITAN-RTX": (72, 1.770, 128, 1024), "RTX-3090": (82, 1.695, 256, 512),
    "RTX-4090": (128, 2.520, 256, 512), "RTX-5090": (170, 2.407, 256, 512), "A30": (56, 1.440, 128, 2048), "A10": (72, 1.695, 256, 1024),
    "A40": (84, 1.740, 256, 1024), "RTX-A5000": (64, 1.695, 256, 1024), "RTX-A6000": (84, 1.800, 256, 1024), "L4": (58, 2.040, 256, 1024),
    "L40": (142, 2.490, 256, 512), "RTX-6000-Ada": (142, 2.505, 256, 1024), "L40S": (142, 2.520, 256, 1024),
    "MI250X-die": (110, 1.700, 128, 1024), "MI355X": (256, 2.400, 256, 4096),
    **dict.fromkeys(("MI300X", "MI325X"), (304, 2.100, 256, 2048)),
}  # fmt: skip
"""Of NVIDIA's whitepapers of Volta, Turing, Ampere, Ada, Hopper and RTX Blackwell, and AMD's of CDNA 2 to 4 (compute units)."""


def test_peaks_are_multiprocessors_times_clock_times_flops_a_clock() -> None:
    """Within 2%, by which datasheets round; Hopper's vector units run at 1.98 GHz in its SXM modules, a twelfth above the tensor cores'."""
    for name, (processors, clock, lanes, tensor) in CHIPS.items():
        peaks = GPUS[name].peak_flops
        assert peaks["fp16"] == pytest.approx(processors * clock * 1e9 * tensor, rel=0.02), name
        assert peaks["fp32"] == pytest.approx(processors * clock * 1e9 * lanes, rel=0.09), name


def test_slots_have_sixteen_lanes_and_nvlink_whole_links() -> None:
    """8, 16 or 32 GT/s a lane, of 130 bits 128 of data; links of 25 GB/s, on Blackwell of 50."""
    slots = {16 * rate / 8 * 128 / 130 for rate in (8, 16, 32)}
    for gpu in GPUS.values():
        if gpu.name == "cpu":
            continue
        assert any(gpu.pcie / GB == pytest.approx(slot, rel=0.001) for slot in slots), gpu.name
        if gpu.vendor == "amd":
            continue
        generation = 8 if float(gpu.compute_capability) < 8 else 16 if float(gpu.compute_capability) < 9 else 32
        assert gpu.pcie / GB == pytest.approx(16 * generation / 8 * 128 / 130, rel=0.001), gpu.name
        links = gpu.nvlink / (25 * GB)
        assert links in {"7.0": (6,), "8.0": (0, 8, 12), "9.0": (0, 8, 18), "10.0": (36,), "10.3": (36,)}.get(gpu.compute_capability, (0,))


def test_figures_that_are_stated_of_eight_are_eight_times_a_gpus() -> None:
    """DGX and HGX boards as NVIDIA prints them: dense FP8 in PFLOP/s, GPU power in kW."""
    boards = {"H100-SXM-80GB": (15.8, 5.6), "H200": (15.8, 5.6), "B200": (36.0, 8.0), "B300": (36.0, 8.8)}
    for name, (flops, power) in boards.items():
        assert 8 * GPUS[name].peak_flops["fp8"] == pytest.approx(flops * 1e15, rel=0.01), name
        assert 8 * POWER_W[name] == pytest.approx(power * 1e3), name
    racks = {"GB200": (720 * 1e15 / 2, 72), "GB300": (720 * 1e15 / 2, 72)}
    for name, (flops, gpus) in racks.items():
        assert gpus * GPUS[name].peak_flops["fp8"] == pytest.approx(flops), name


def test_of_one_chip_at_several_powers_the_nearest_has_the_same_whatever_their_order() -> None:
    """torchtitan's H100 of 500 W, and Grace's of 1,000 W with its CPU, have the peak of an H200's 700 W too."""
    for names in permutations(("H100-SXM-96GB", "GH200-96GB", "H100-SXM-80GB", "B200")):
        assert nearest(GPUS["H200"], names) is GPUS["H100-SXM-80GB"]
    for names in permutations(("A100-SXM-40GB", "A100-SXM-80GB")):
        assert nearest(GPUS["A800-SXM-80GB"], names) is GPUS["A100-SXM-80GB"]
