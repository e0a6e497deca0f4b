"""GPUs with their datasheet figures. A new GPU is one row of gpus.csv.

Peaks, in TFLOP/s, are dense: where a datasheet prints them "with sparsity", half of the printed figure stands there. "tf32" is the
tensor-core path for fp32 matrices, which torch leaves off unless asked; a precision without a figure has no fast path on that GPU and is
refused. NVFP4's of B300 and GB300 are of HGX B300 (108 PFLOP/s over 8) and GB300 NVL72 (1,080 over 72); an MI250X has two dies, each a row.

Memory, in GiB, is what torch's `total_memory` (and its out-of-memory message) shows under a current driver with ECC as shipped, not the
marketing figure; it differs by a fraction of a per cent between drivers. Bandwidths are in GB/s.

`power_w`: watts that a GPU may take for long (thermal design power, the highest where a range can be set); GH200's with its CPU;
H100-SXM-96GB's as torchtitan ran it ("the default 500W power limit", benchmarks/llama3_h100_202412_torchtitan.md). `driver`: what the
driver calls it where that is another name (nvidia-smi --query-gpu=name, rocm-smi), without the vendor's words around it.

"cpu" is no GPU: one gloo rank with one core. 4 GiB is a modest share of any machine that trains the tiny recipes on 4 ranks; the peaks and
the bandwidth are the order of magnitude measured on a 2-core AMD EPYC with torch 2.13, one thread (see clusters/cpu.yaml).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import log
from typing import Final

from orchestrator.extensions import Extensible
from orchestrator.hardware.spec import Gpu
from orchestrator.units import GB, GIB, TFLOPS

PRECISIONS: Final = ("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4")
PCIE: Final = {"": 0.0, "3": 15.75 * GB, "4": 31.5 * GB, "5": 63.0 * GB}
"""Bytes/s of 16 lanes in one direction, less 128b/130b coding, by generation."""
LINKS: Final = {
    "": 0.0, "NVLink 2": 150.0 * GB, "NVLink 3": 300.0 * GB, "NVLink 4": 450.0 * GB, "NVLink 5": 900.0 * GB, "cut NVLink": 200.0 * GB,
    "MI300X": 7 * 64.0 * GB, "MI355X": 7 * 76.8 * GB,
}  # fmt: skip
"""Bytes/s of a GPU and direction over the links to its node's other GPUs: 6 and 12 links of 25 GB/s, 18 of 25 and of 50 (NVIDIA's
datasheets of V100, A100, H100, B200); of the A800 and H800, whose NVLink is cut to 400 GB/s in both directions together; over Infinity
Fabric to seven others, 128 and 153.6 GB/s a link in both directions together (AMD's data sheets of the MI300X and MI355X platforms).
"": none that reaches all GPUs of a node."""


def _gpu(row: Mapping[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        memory=round(float(row["memory_gib"]) * GIB),
        peak_flops={name: float(round(float(row[name]) * TFLOPS)) for name in PRECISIONS if row[name]},
        memory_bandwidth=float(row["bandwidth_gb_s"]) * GB,
        compute_capability=row["compute_capability"],
        pcie=PCIE[row["pcie"]],
        nvlink=LINKS[row["links"]],
        source=row["source"],
        vendor="amd" if row["vendor"] == "amd" else "nvidia",
    )


_ROWS: Final = [*csv.DictReader(files("orchestrator.hardware").joinpath("gpus.csv").read_text(encoding="utf-8").splitlines())]
GPUS: Final = Extensible("orchestrator.gpus", Gpu, {row["name"]: _gpu(row) for row in _ROWS})
"""Catalog by name; other packages' entry points are part of it."""
POWER_W: Final = {row["name"]: float(row["power_w"]) for row in _ROWS if row["power_w"]}
DRIVER_NAMES: Final = {row["driver"]: row["name"] for row in _ROWS if row["driver"]}
GEFORCE: Final = tuple(name for driver, name in DRIVER_NAMES.items() if driver.startswith("GeForce"))
"""GPUs whose driver lets none reach another's memory over PCIe: what one sends the other passes the host's ("GeForce cards don't support
GPU Direct P2P", NVIDIA/nccl issue 1309)."""
THROUGH_HOST: Final = 0.6
"""Share of a slot's bandwidth between two of these. nccl-tests' all-reduce on RTX 5090: 35 GB/s among 4, 28 among 8, of 63 (NVIDIA/nccl
issue 1639), 0.56 and 0.44; copies between RTX 4090 in both directions 0.33 to 0.48 of 31.5 each (issue 814). With the share of any link
that collectives reach (calibration's `inner_efficiency`, 0.8) it is 0.48."""


def between_slots(gpu: Gpu) -> float:
    """Bytes/s over PCIe from a GPU to another of its node.

    >>> [round(between_slots(GPUS[name]) / GB, 1) for name in ("RTX-4090", "RTX-A6000")]
    [18.9, 31.5]
    """
    return gpu.pcie * (THROUGH_HOST if gpu.name in GEFORCE else 1.0)


NEAR: Final = 1.25
"""Times as high as another's a GPU's peak may be for the other to tell what it reaches: an H20 has a seventh of an H100's, which no power
bounds."""
POWERS_SHARE: Final = 0.66
"""Exponent by which a generation's reached FLOP/s grow with power, which bounds the clock in a long run: NVIDIA's own peaks of B100, B200
and GB200, one chip at 700, 1,000 and 1,200 W, are 1,750, 2,250 and 2,500 TFLOP/s (datasheets of 2024)."""


def nearest(gpu: Gpu, names: Iterable[str]) -> Gpu | None:
    """The GPU of these names that tells most of another, which is none of them: a module of the same generation (GPUs with NVLink to all
    others of a node) and of nearly its peak; the same chip before another, then of nearly its power and its memory's bandwidth. None: there
    is none.

    >>> measured = ("A100-SXM-80GB", "H100-SXM-80GB", "B200", "GB200")
    >>> [found and found.name for found in (nearest(GPUS[name], measured) for name in ("H200", "GB300", "B300", "H20", "L40S"))]
    ['H100-SXM-80GB', 'GB200', 'B200', None, None]
    """
    modules = (GPUS[name] for name in names if name != gpu.name and GPUS[name].nvlink and gpu.nvlink)
    found = [other for other in modules if other.generation == gpu.generation and 1 / NEAR < _faster(other, gpu) < NEAR]

    def apart(other: Gpu) -> tuple[object, ...]:
        power = POWER_W[other.name] / POWER_W[gpu.name] if {gpu.name, other.name} <= POWER_W.keys() else 1.0
        ratios = _faster(other, gpu), power, other.memory_bandwidth / gpu.memory_bandwidth
        return (other.compute_capability != gpu.compute_capability, *(abs(log(ratio)) for ratio in ratios), other.name)

    return min(found, key=apart, default=None)


def _faster(one: Gpu, other: Gpu) -> float:
    """Times as high as the other's peak in 16 bits."""
    return one.peak_flops["fp16"] / other.peak_flops["fp16"]


def reached(gpu: Gpu, other: Gpu) -> float:
    """The share of its peak that a GPU reaches in products against another's share of its own, by power: no more of it for the same chip,
    and as much where its datasheet's peak is another, which its power has made.

    >>> round(reached(GPUS["GB300"], GPUS["GB200"]), 3), reached(GPUS["H200"], GPUS["H100-SXM-80GB"])
    (1.107, 1.0)
    >>> round(reached(GPUS["H100-SXM-96GB"], GPUS["H100-SXM-80GB"]), 3), reached(GPUS["GH200-96GB"], GPUS["H100-SXM-80GB"])
    (0.801, 1.0)
    """
    if not {gpu.name, other.name} <= POWER_W.keys():
        return 1.0
    share = float((POWER_W[gpu.name] / POWER_W[other.name]) ** POWERS_SHARE / _faster(gpu, other))
    if gpu.compute_capability != other.compute_capability:
        return share
    return min(1.0, share) if _faster(gpu, other) == 1 else 1.0


AROUND_NAMES: Final = re.compile(r"^(?:NVIDIA |Tesla |AMD |Instinct )*|(?: OAM| VF|-O)*$")
"""What stands around a GPU's name: older drivers' "Tesla ", and of AMD's parts how they are mounted and whether a virtual machine has
them."""


def by_driver_name(name: str) -> Gpu | None:
    """The entry for what nvidia-smi, or rocm-smi, calls a GPU, or None.

    >>> by_driver_name("AMD Instinct MI300X OAM").name, by_driver_name("AMD Instinct MI250X").name
    ('MI300X', 'MI250X-die')
    >>> by_driver_name("NVIDIA H100 80GB HBM3").name, by_driver_name("A100-SXM4-40GB").name, by_driver_name("NVIDIA T4")
    ('H100-SXM-80GB', 'A100-SXM-40GB', None)
    """
    bare = AROUND_NAMES.sub("", name.strip())
    return GPUS.get(DRIVER_NAMES.get(bare, bare))  # another package's goes by the driver's own name
