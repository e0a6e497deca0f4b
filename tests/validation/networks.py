"""The machines that published runs were made on, as clusters: GPU and network levels by what the row says."""

from __future__ import annotations

from orchestrator.hardware import catalog
from orchestrator.hardware.spec import Cluster, Gpu, Level, segment
from orchestrator.units import GB, GBIT, GIB, US

GPU_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("h100", "96gb"), "H100-SXM-96GB"),
    (("gb300",), "GB300"),
    (("gb200",), "GB200"),
    (("b300",), "B300"),
    (("b200",), "B200"),
    (("gh200",), "GH200-96GB"),
    (("h200",), "H200"),
    (("h100",), "H100-SXM-80GB"),
    (("h800",), "H800-SXM-80GB"),
    (("a800",), "A800-SXM-80GB"),
    (("a100", "40gb"), "A100-SXM-40GB"),
    (("a100",), "A100-SXM-80GB"),
    (("v100", "16gb"), "V100-SXM2-16GB"),
    (("v100", "32gb"), "V100-SXM2-32GB"),
    *(((name.lower(),), name) for name in ("MI300X", "MI325X", "MI355X")),
    (("rtx-3090",), "RTX-3090"),
    (("rtx-4090",), "RTX-4090"),
)
"""A GPU's printed name holds all the words of one entry; the first entry that fits is taken."""

NVLINK_BANDWIDTH = {
    **{"V100": 150 * GB, "A100": 300 * GB, "A800": 200 * GB, "H100": 450 * GB, "H800": 200 * GB, "H200": 450 * GB, "GH200": 450 * GB},
    **{"B200": 900 * GB, "B300": 900 * GB, "GB200": 900 * GB, "GB300": 900 * GB},
}
"""Bytes/s per GPU and direction by the generation's datasheet (NVLink 2 to 5), the name's first word."""

NVLINK_LATENCY = 1.9 * US
INFINIBAND_LATENCY = 4 * US
"""Seconds of a hop over InfiniBand: NCCL's own tuning constants (src/graph/tuning.cc, ring, LL128)."""
EFA_LATENCY = 130 * US
"""Seconds of a hop over EFA: half of what a ring's hop between nodes takes on AWS p5 by `collective_bandwidth_h100.csv`: 256 MB all-gathers
on 2 to 64 nodes take 240 to 360 us per node beyond their bandwidth's time, and `Calibration.latency_factor` is 2."""
OMNIPATH_LATENCY = 10 * US
SOCKETS_LATENCY = 50 * US
"""Seconds of a hop over TCP sockets between two machines of a cloud: assumed; messages here are of 16 MiB and more."""
VPC_ETHERNET = 2.35 * GB / 0.8
"""Bytes/s of a GPU alone on its node over Ethernet without RDMA, of which all-reduces reach the 2.3 to 2.4 GB/s that the source measured
at `Calibration.outer_efficiency`."""
SLOW_DAY = "slow day"
"""A word in an interconnect's name: NCCL does not use the adapters' own transport."""
SOCKETS = 0.5 * GB / 4
"""Bytes/s per GPU where four share a node's sockets, over each of which a quarter of a message goes: assumed, the source does not say why
those days were slow."""

UNTUNED = ("third_party_", "geodesic_")
"""How the names of tables begin whose runs nobody set up as a vendor's benchmark is: their stack is the stock one. That of all others is
in the constants that were fitted to them."""
FUNCTIONAL = "functional run, not tuned"
"""Words of a row's notes that say the same of one run where that is fine-tuning: of NVIDIA's verification cards, whose times of functional
items "remain sanity checks rather than optimized performance results" (examples/model_verification_cards/qwen3-30b-a3b/card.yaml at
067f987) and whose command (scripts/training/train.sh) binds no rank to cores. Qwen3-8B with tp 4, all of it fine-tuned, takes 3.8 and 6.4
ms for each layer and micro-batch of 2,048 tokens there; 1.6 are priced on a tuned stack and 4.3 on a stock one. Functional pretraining
stays with the tuned: on H100 its longer micro-batches hide either host, and on GB200 it takes .91 to 1.09 of the price on a tuned stack,
.78 to .93 of that on a stock one. Both were chosen after the times were seen; nothing is fitted to any of these rows."""

OUTERMOST = 2**20
"""GPUs that the outermost level of a measured cluster may reach: more than any run."""


def gpu_key(text: str) -> str | None:
    """The catalog's name of a GPU as a table prints it; None: unknown.

    >>> gpu_key("A100-SXM-80GB"), gpu_key("H100-SXM-96GB-HBM2e(2.4TB/s,500W)"), gpu_key("Gaudi2")
    ('A100-SXM-80GB', 'H100-SXM-96GB', None)
    """
    lowered = text.lower()
    for words, key in GPU_WORDS:
        if all(word in lowered for word in words):
            return key
    return None


def gpu(key: str) -> Gpu:
    """The catalog's GPU of this name. Raises KeyError."""
    return catalog.GPUS[key]


def fabric(table: str, key: str, interconnect: str) -> tuple[float, float, str]:
    """Bytes/s per GPU and direction between nodes, seconds per step, and where it is from."""
    text = interconnect.lower()
    if SLOW_DAY in text:
        return SOCKETS, OMNIPATH_LATENCY, "Jean Zay on a slow day: about what sockets give"
    if "no rdma" in text:
        return VPC_ETHERNET, SOCKETS_LATENCY, "Ethernet without RDMA, as measured"
    if "omni-path" in text and key.startswith("V100"):
        return 4 * 100 * GBIT / 4, OMNIPATH_LATENCY, "Jean Zay: 4 Omni-Path 100 links for 4 GPUs"
    if "omni-path" in text:
        return 4 * 100 * GBIT / 8, OMNIPATH_LATENCY, "Jean Zay: 4 Omni-Path 100 links for 8 GPUs"
    if "4x 100gb roce" in text:
        return 4 * 100 * GBIT / 8, OMNIPATH_LATENCY, "4 x 100 Gb RoCE for 8 GPUs"
    if "nanotron" in table or "efa" in text:
        return 400 * GBIT, EFA_LATENCY, "AWS p5: 3200 Gb/s EFA for 8 GPUs"
    if "mosaicml" in table and key.startswith("A100"):
        return 1600 * GBIT / 8, INFINIBAND_LATENCY, "1600 Gb/s RoCE for 8 GPUs (printed)"
    if "slingshot" in text:
        return 200 * GBIT, INFINIBAND_LATENCY, "Slingshot 11: one Cassini port a GPU"
    if key.startswith(("A100", "A800")):
        return 200 * GBIT, INFINIBAND_LATENCY, "DGX A100: one HDR200 port a GPU"
    if key.startswith("V100"):
        return 100 * GBIT / 2, INFINIBAND_LATENCY, "DGX-1: 4 EDR ports for 8 GPUs"
    if key in ("B300", "GB300"):
        return 800 * GBIT, INFINIBAND_LATENCY, "DGX B300 and GB300 NVL72 datasheets: a ConnectX-8 of 800 Gb/s a GPU"
    return 400 * GBIT, INFINIBAND_LATENCY, "DGX H100/B200: one NDR400 port a GPU"


NVL72 = 72
"""GPUs that one NVLink domain of GB200 and GB300 racks has."""


def cluster(table: str, key: str, num_gpus: int, gpus_per_node: int, interconnect: str, functional: bool = False) -> Cluster:
    """The cluster that a row names: in a node NVLink (72 GPUs on GB200/GB300 NVL72) or PCIe, and a fabric between nodes. `functional`:
    whether its source calls it so (`FUNCTIONAL`)."""
    device = gpu(key)
    generation = key.split("-", maxsplit=1)[0]
    domain = segment(NVL72, gpus_per_node, num_gpus) if key.startswith("GB") else gpus_per_node
    bandwidth, latency, source = fabric(table, key, interconnect)
    inside = device.nvlink if device.vendor == "amd" else NVLINK_BANDWIDTH.get(generation, device.pcie)
    return Cluster(
        name=f"{table}:{key}",
        gpu=device,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        levels=(
            Level(name="nvlink", size=domain, bandwidth=inside, latency=NVLINK_LATENCY, source="datasheet", mesh=device.vendor == "amd"),
            Level(name="fabric", size=domain * (OUTERMOST // domain), bandwidth=bandwidth, latency=latency, source=source),
        ),
        host_bandwidth=25 * GB if not key.startswith(("H", "B", "G")) else 50 * GB,
        host_memory=128 * GIB,
        stack="stock" if functional or table.startswith(UNTUNED) else "tuned",
    )
