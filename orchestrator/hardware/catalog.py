"""GPUs with their datasheet figures. A new GPU is one entry here.

Peaks are dense: where a datasheet prints them "with sparsity", half of the printed figure stands here. "tf32" is the tensor-core path
for fp32 matrices, which torch leaves off unless asked; a precision that is not listed has no fast path on that GPU and is refused.

Memory is what torch's `total_memory` (and its out-of-memory message) shows under a current driver with ECC as shipped, not the
marketing figure; it differs by a fraction of a per cent between drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import log
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from orchestrator.extensions import Extensible
from orchestrator.hardware.spec import Gpu
from orchestrator.units import GB, GIB, TB, TFLOPS

NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = 150 * GB, 300 * GB, 450 * GB, 900 * GB
"""Bytes/s of a GPU and direction: 6 and 12 links of 25 GB/s, 18 of 25 and of 50 (NVIDIA's datasheets of V100, A100, H100, B200)."""
CUT_NVLINK = 200 * GB
"""Bytes/s of a GPU and direction of the A800 and H800, whose NVLink is cut to 400 GB/s in both directions together."""
XGMI_3, XGMI_4 = 7 * 64 * GB, 7 * 76.8 * GB
"""Bytes/s of a GPU and direction over the links to its node's seven others: 128 and 153.6 GB/s a link in both directions together (AMD's
data sheets of the MI300X and MI355X platforms)."""
PCIE_3, PCIE_4, PCIE_5 = 15.75 * GB, 31.5 * GB, 63 * GB
"""Bytes/s of 16 lanes in one direction, less 128b/130b coding."""


def _gpu(name: str, memory_gib: float, bandwidth: float, capability: str, pcie: float, nvlink: float, source: str, **tflops: float) -> Gpu:
    """An entry in the units that datasheets print: GiB, bytes/s, TFLOP/s by precision. `nvlink` 0: none that reaches all GPUs of a node."""
    peaks = {precision: float(round(value * TFLOPS)) for precision, value in tflops.items()}
    return Gpu(
        name=name,
        memory=round(memory_gib * GIB),
        peak_flops=peaks,
        memory_bandwidth=float(bandwidth),
        compute_capability=capability,
        pcie=float(pcie),
        nvlink=float(nvlink),
        source=source,
    )


_V100 = {"fp32": 15.7, "fp16": 125.0}
_A100 = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_H100_SXM = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp32": 51.2, "tf32": 378.0, "fp16": 756.5, "bf16": 756.5, "fp8": 1513.0}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_H20 = {"fp32": 44.0, "tf32": 74.0, "fp16": 148.0, "bf16": 148.0, "fp8": 296.0}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0, "nvfp4": 9000.0}
_GB200 = {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0, "nvfp4": 10000.0}
_B300 = {**_B200, "nvfp4": 13500.0}  # HGX B300: 108 PFLOP/s dense over 8
_GB300 = {**_GB200, "nvfp4": 15000.0}  # GB300 NVL72: 1,080 PFLOP/s dense over 72
_RTX_3090 = {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}
_RTX_5090 = {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419.0}
_RTX_PRO_6000 = {"fp32": 126.0, "tf32": 251.9, "fp16": 503.8, "bf16": 503.8, "fp8": 1007.6, "nvfp4": 2015.2}
_RTX_PRO_6000_SERVER = {"fp32": 120.0, "tf32": 240.0, "fp16": 480.0, "bf16": 480.0, "fp8": 960.0, "nvfp4": 1920.0}
_MI250X = {"fp32": 23.95, "fp16": 191.5, "bf16": 191.5}  # of one of its two dies
_MI300X = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}
_MI355X = {"fp32": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2}  # no tensor-core path for fp32
_A30 = {"fp32": 10.3, "tf32": 82.0, "fp16": 165.0, "bf16": 165.0}
_A40 = {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7}
_A6000 = {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8}
_L4 = {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5}
_L40 = {"fp32": 90.5, "tf32": 90.5, "fp16": 181.0, "bf16": 181.0, "fp8": 362.0}
_RTX_6000_ADA = {"fp32": 91.1, "tf32": 182.1, "fp16": 364.2, "bf16": 364.2, "fp8": 728.5}
_L40S = {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0}

# fmt: off
_ENTRIES: tuple[Gpu, ...] = (
    _gpu("V100-SXM2-16GB", 15.78, 900 * GB, "7.0", PCIE_3, NVLINK_2,
         "NVIDIA V100 datasheet (Jan 2020), SXM2; driver memory 16160 MiB", **_V100),
    _gpu("V100-SXM2-32GB", 31.75, 900 * GB, "7.0", PCIE_3, NVLINK_2,
         "NVIDIA V100 datasheet (Jan 2020), SXM2; driver memory 32510 MiB", **_V100),
    _gpu("A100-SXM-40GB", 39.39, 1555 * GB, "8.0", PCIE_4, NVLINK_3,
         "NVIDIA A100 datasheet (Jun 2021), 40GB SXM; torch total 39.39 GiB", **_A100),
    _gpu("A100-SXM-80GB", 79.15, 2039 * GB, "8.0", PCIE_4, NVLINK_3,
         "NVIDIA A100 datasheet (Jun 2021), 80GB SXM; torch total 79.15 GiB", **_A100),
    _gpu("A100-PCIE-40GB", 39.39, 1555 * GB, "8.0", PCIE_4, 0,
         "NVIDIA A100 datasheet (Jun 2021), 40GB PCIe; torch total 39.39 GiB", **_A100),
    _gpu("A100-PCIE-80GB", 79.15, 1935 * GB, "8.0", PCIE_4, 0,
         "NVIDIA A100 datasheet (Jun 2021), 80GB PCIe; torch total as 80GB SXM", **_A100),
    _gpu("A800-SXM-80GB", 79.15, 2039 * GB, "8.0", PCIE_4, CUT_NVLINK,
         "As A100-SXM-80GB; only its NVLink is slower (400 GB/s in all)", **_A100),
    _gpu("H100-SXM-80GB", 79.11, 3350 * GB, "9.0", PCIE_5, NVLINK_4,
         "NVIDIA Hopper whitepaper, table 3; 81559 MiB, torch 79.11 GiB", **_H100_SXM),
    _gpu("H100-SXM-96GB", 94.0, 2400 * GB, "9.0", PCIE_5, NVLINK_4,
         "torchtitan's benchmarks (HBM2e, 2.4 TB/s); memory derived", **_H100_SXM),
    _gpu("H100-PCIE-80GB", 79.11, 2039 * GB, "9.0", PCIE_5, 0,
         "NVIDIA Hopper whitepaper table 3 (HBM2e, 350 W); torch total as SXM", **_H100_PCIE),
    _gpu("H800-SXM-80GB", 79.11, 3350 * GB, "9.0", PCIE_5, CUT_NVLINK,
         "As H100-SXM-80GB; only its NVLink is slower (400 GB/s in all)", **_H100_SXM),
    _gpu("H100-NVL", 93.1, 3900 * GB, "9.0", PCIE_5, 0,
         "NVIDIA H100 NVL datasheet (94 GB HBM3, 3.9 TB/s); 95830 MiB less 0.5%", **_H100_NVL),
    _gpu("H20", 95.1, 4000 * GB, "9.0", PCIE_5, NVLINK_4, "NVIDIA H20 datasheet (96 GB HBM3, 4.0 TB/s); 97871 MiB less 0.5%", **_H20),
    _gpu("GH200-96GB", 94.5, 4000 * GB, "9.0", PCIE_5, NVLINK_4,
         "NVIDIA GH200 datasheet (4 TB/s; NVLink 4 where a node has several); 97871 MiB less 1%", **_H100_SXM),
    _gpu("H200", 139.81, 4800 * GB, "9.0", PCIE_5, NVLINK_4,
         "NVIDIA H200 datasheet (141 GB HBM3e, 4.8 TB/s); 143771 MiB, torch 139.81 GiB", **_H100_SXM),
    _gpu("B200", 178.35, 7.7 * TB, "10.0", PCIE_5, NVLINK_5,
         "NVIDIA DGX B200 and HGX datasheets (dense per GPU, 7.7 TB/s); torch 178.35 GiB", **_B200),
    _gpu("B300", 267.69, 8.0 * TB, "10.3", PCIE_5, NVLINK_5,
         "NVIDIA HGX B300 datasheet (its 2.1 TB are less than what the driver shows); driver memory 275040 MiB, torch 267.69 GiB", **_B300),
    _gpu("GB200", 184.0, 8.0 * TB, "10.0", PCIE_5, NVLINK_5,
         "NVIDIA GB200 NVL72 datasheet (576 TB/s over 72); torch about 184 GiB", **_GB200),
    _gpu("GB300", 276.5, 8.0 * TB, "10.3", PCIE_5, NVLINK_5,
         "NVIDIA GB300 NVL72 datasheet (20 TB over 72 is less than what the driver shows); driver memory 284208 MiB, torch 276.50 GiB",
         **_GB300),
    _gpu("TITAN-RTX", 23.65, 672 * GB, "7.5", PCIE_3, 0,
         "NVIDIA Turing whitepaper (TU102), TITAN RTX; torch total 23.65 GiB", fp32=16.3, fp16=130.5),
    _gpu("RTX-3090", 23.69, 936 * GB, "8.6", PCIE_4, 0, "NVIDIA GA102 whitepaper (fp32 accumulate); torch 23.69 GiB", **_RTX_3090),
    _gpu("RTX-4090", 23.64, 1008 * GB, "8.9", PCIE_4, 0, "NVIDIA Ada whitepaper (fp32 accumulate); torch 23.64 GiB", **_RTX_4090),
    _gpu("RTX-5090", 31.36, 1792 * GB, "12.0", PCIE_5, 0,
         "NVIDIA RTX Blackwell whitepaper (fp32 accumulate); torch 31.36 GiB", **_RTX_5090),
    _gpu("A30", 23.53, 933 * GB, "8.0", PCIE_4, 0, "NVIDIA A30 datasheet (HBM2, 933 GB/s); torch 23.53 GiB", **_A30),
    _gpu("A10", 22.2, 600 * GB, "8.6", PCIE_4, 0,
         "NVIDIA A10 datasheet; 23028 MiB less 1.3%", fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0),
    _gpu("A40", 44.4, 696 * GB, "8.6", PCIE_4, 0, "NVIDIA A40 datasheet; 46068 MiB, torch about 44.4 GiB", **_A40),
    _gpu("RTX-A5000", 23.68, 768 * GB, "8.6", PCIE_4, 0,
         "NVIDIA RTX A5000 datasheet (tensor 222.2 TFLOPS with sparsity); 24564 MiB less 1.3% (ECC is off as shipped)",
         fp32=27.8, tf32=55.6, fp16=111.1, bf16=111.1),
    _gpu("RTX-A6000", 47.5, 768 * GB, "8.6", PCIE_4, 0,
         "NVIDIA GA102 whitepaper, RTX A6000; 49140 MiB less 1% (ECC is off as shipped)", **_A6000),
    _gpu("L4", 22.17, 300 * GB, "8.9", PCIE_4, 0, "NVIDIA L4 datasheet; 23034 MiB, torch about 22.17 GiB", **_L4),
    _gpu("L40", 44.4, 864 * GB, "8.9", PCIE_4, 0, "NVIDIA L40 datasheet; torch 44.40 GiB", **_L40),
    _gpu("RTX-6000-Ada", 44.43, 960 * GB, "8.9", PCIE_4, 0,
         "NVIDIA RTX 6000 Ada datasheet; 46068 MiB with ECC, torch 44.43 GiB", **_RTX_6000_ADA),
    _gpu("RTX-PRO-6000", 94.97, 1792 * GB, "12.0", PCIE_5, 0,
         "NVIDIA RTX PRO Blackwell whitepaper, Workstation Edition (752 tensor cores at 2,617 MHz); 97887 MiB, torch 94.97 GiB",
         **_RTX_PRO_6000),
    _gpu("RTX-PRO-6000-Server", 94.97, 1597 * GB, "12.0", PCIE_5, 0,
         "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (120 TFLOP/s fp32, 1597 GB/s; tensor cores in the Workstation's ratio)",
         **_RTX_PRO_6000_SERVER),
    _gpu("L40S", 44.4, 864 * GB, "8.9", PCIE_4, 0, "NVIDIA L40S datasheet; 46068 MiB, torch about 44.4 GiB", **_L40S),
    *(replace(gpu, vendor="amd") for gpu in (
        _gpu("MI250X-die", 63.98, 1638.4 * GB, "9.0", PCIE_4, 0,
             "AMD Instinct MI250X data sheet (128 GB, 3276.8 GB/s in all), half of it: its two dies are two devices", **_MI250X),
        _gpu("MI300X", 191.98, 5.3 * TB, "9.4", PCIE_5, XGMI_3,
             "AMD Instinct MI300X data sheet (192 GB HBM3, 5.3 TB/s); rocm-smi: 196592 MiB", **_MI300X),
        _gpu("MI325X", 255.98, 6.0 * TB, "9.4", PCIE_5, XGMI_3,
             "AMD Instinct MI325X data sheet (256 GB HBM3E, 6 TB/s; peaks as MI300X)", **_MI300X),
        _gpu("MI355X", 287.98, 8.0 * TB, "9.5", PCIE_5, XGMI_4,
             "AMD Instinct MI355X data sheet (288 GB HBM3E, 8 TB/s)", **_MI355X),
    )),
    # Not a GPU: one gloo rank with one core. 4 GiB is a modest share of any machine that trains the tiny recipes on 4 ranks; the peaks
    # and the bandwidth are the order of magnitude measured on a 2-core AMD EPYC with torch 2.13, one thread (see clusters/cpu.yaml).
    _gpu("cpu", 4.0, 8 * GB, "0.0", 0, 0, "Measured: torch 2.13, 4 ranks of one thread on 2 cores of an AMD EPYC", fp32=0.05, bf16=0.2),
)
# fmt: on

GPUS: Final = Extensible("orchestrator.gpus", Gpu, {gpu.name: gpu for gpu in _ENTRIES})
"""Catalog by name; other packages' entry points are part of it."""

POWER_W: Final = MappingProxyType(
    {
        **dict.fromkeys(("V100-SXM2-16GB", "V100-SXM2-32GB", "A100-PCIE-80GB", "A40", "RTX-A6000", "L40", "RTX-6000-Ada"), 300.0),
        **dict.fromkeys(("A100-SXM-40GB", "A100-SXM-80GB", "A800-SXM-80GB", "H100-NVL", "H20"), 400.0),
        **dict.fromkeys(("H100-SXM-80GB", "H800-SXM-80GB", "H200"), 700.0), "H100-SXM-96GB": 500.0,
        **dict.fromkeys(("H100-PCIE-80GB", "RTX-3090", "L40S"), 350.0),
        "A100-PCIE-40GB": 250.0, "GH200-96GB": 1000.0, "B200": 1000.0, "B300": 1100.0, "GB200": 1200.0, "GB300": 1400.0,
        "TITAN-RTX": 280.0, "RTX-4090": 450.0, "RTX-5090": 575.0, "A30": 165.0, "A10": 150.0, "RTX-A5000": 230.0, "L4": 72.0,
        "RTX-PRO-6000": 600.0, "RTX-PRO-6000-Server": 600.0,
        "MI250X-die": 280.0, "MI300X": 750.0, "MI325X": 1000.0, "MI355X": 1400.0,
    }
)  # fmt: skip
"""Watts that a GPU may take for long (thermal design power, the highest where a range can be set), by the datasheets named above; GH200's
with its CPU; H100-SXM-96GB's as torchtitan ran it ("the default 500W power limit", benchmarks/llama3_h100_202412_torchtitan.md)."""

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


DRIVER_NAMES: Final = MappingProxyType(
    {
        "A100-SXM4-40GB": "A100-SXM-40GB", "A100-SXM4-80GB": "A100-SXM-80GB", "A100 80GB PCIe": "A100-PCIE-80GB",
        "A800-SXM4-80GB": "A800-SXM-80GB", "H100 80GB HBM3": "H100-SXM-80GB", "H100 PCIe": "H100-PCIE-80GB", "H100 NVL": "H100-NVL",
        "H800": "H800-SXM-80GB", "GH200 480GB": "GH200-96GB", "B300 SXM6 AC": "B300", "TITAN RTX": "TITAN-RTX",
        "GeForce RTX 3090": "RTX-3090", "GeForce RTX 4090": "RTX-4090", "GeForce RTX 5090": "RTX-5090",
        "RTX A5000": "RTX-A5000", "RTX A6000": "RTX-A6000", "RTX 6000 Ada Generation": "RTX-6000-Ada",
        "RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000", "RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Server",
        "MI250X": "MI250X-die",
    }
)  # fmt: skip
"""What the driver calls those whose name here is another (nvidia-smi --query-gpu=name, rocm-smi), without the vendor's words around it."""
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
