"""Which cluster a run is planned for: the one asked for, the GPUs found here, or the recipe's; and how much of their memory it may use."""

from __future__ import annotations

from math import gcd

import msgspec

from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS, between_slots, by_driver_name
from orchestrator.hardware.spec import Cluster, Gpu, Level, Software, slowest
from orchestrator.recipe.cluster_fields import OF_A_CLUSTER
from orchestrator.recipe.clusters import UNSAID, changed, changed_cluster, cluster_from, read_cluster, stored
from orchestrator.recipe.keys import Inputs
from orchestrator.recipe.layers import Flat, filled, flatten, group_of, value_of
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB, US, format_bytes


def cluster_of(merged: Flat, given: Flat, machine: Machine) -> tuple[Cluster, str, Flat]:
    """The cluster, why, and the keys of a run that its own YAML has (price_per_gpu_hour, say). Asked for on the command line, or written
    out in a resolved recipe: that one. Else the GPUs of this machine if they are enough and known; else the recipe's."""
    gpus = value_of(merged, "gpus", None)
    node = value_of(merged, "gpus_per_node", None)
    software = Software() if "container.image" in merged else installed(machine)
    raw = value_of(merged, "cluster", None)
    mixed = value_of(merged, "cluster.mixed", None)
    here, own = _gpu_here(machine, mixed), Flat()
    fixed = "cluster" in given or isinstance(raw, dict)
    fields = group_of(merged, "cluster", declared=False)
    said = "".join(f", {name}={value}" for name, value in fields.items())
    if not fixed and here is not None and machine.num_gpus >= (gpus or 1):
        cluster = _cluster_here(here, gpus or machine.num_gpus, machine, mixed == "slowest")
        cluster = changed_cluster(cluster, fields) if fields else cluster
        why = f"cluster here, {counted(cluster)}{said}: this machine has {machine.num_gpus} ({', '.join(_types(machine))})"
        return cluster, why, {}
    if raw is None:
        why = f"is missing: the recipe has none, and {_not_here(machine, here is not None, gpus)}"
        raise InputError("cluster", None, why, stored("clusters"))
    if gpus is None and group_of(merged, "target"):
        gpus = 1  # how many is the question
    if gpus is None:
        raise InputError(
            "gpus", None, f"is missing: neither the recipe nor this machine says how many, and {_not_here(machine, False, None)}"
        )
    if isinstance(raw, dict):
        if "gpu" not in raw and raw.get("name") in stored("clusters"):
            name, rest = raw["name"], ", ".join(f"cluster.{key}:" for key in raw if key != "name")
            apart = f", with {rest} on lines of their own" if rest else ""
            raise InputError("cluster.name", name, f"describes no cluster: cluster: {name} takes the stored one{apart}")
        cluster = cluster_from(changed(raw, fields), "cluster", "cluster", gpus, node, mixed, software)
        why = "written out in the recipe"
    else:
        short, tree = read_cluster(raw)
        own = flatten({f"cluster.{name}": tree.pop(name) for name in [*tree] if name in OF_A_CLUSTER}, raw)
        cluster = cluster_from(changed(tree, fields), short, raw, gpus, node, mixed, software)
        why = "asked for" if fixed else f"the recipe's, as {_not_here(machine, here is not None, gpus)}"
    return cluster, f"cluster {cluster.name}, {counted(cluster)}{said}: {why}", own


def installed(machine: Machine) -> Software:
    """The engines' versions that are planned for where a cluster says none and ranks run in no image: those of this machine, else the
    newest that the rules were read for."""
    return Software(megatron_core=machine.megatron_core) if machine.megatron_core else Software()


def _types(machine: Machine) -> tuple[str, ...]:
    return machine.gpu_types or ((machine.gpu_name,) if machine.gpu_name else ())


def _gpu_here(machine: Machine, mixed: str | None) -> Gpu | None:
    """The type of this machine's GPUs, with cluster.mixed=slowest what all of them can do; None: several, none, or not in the catalog."""
    if machine.catalog_name:
        return GPUS[machine.catalog_name]
    if mixed != "slowest":
        return None
    found = [by_driver_name(name) for name in machine.gpu_types]
    known = [gpu for gpu in found if gpu is not None]
    return slowest(known) if known and len(known) == len(found) else None


def _not_here(machine: Machine, known: bool, gpus: int | None) -> str:
    if not machine.num_gpus:
        return "this machine has no GPU"
    if machine.gpu_name is None:
        types = ", ".join(machine.gpu_types)
        unknown = [name for name in machine.gpu_types if by_driver_name(name) is None]
        what = f"{unknown[0]} is not in the catalog" if unknown else "cluster.mixed=slowest plans for what all of them can do"
        return f"the {machine.num_gpus} GPUs of this machine are of several types ({types}; {what})"
    if not known:
        return f"{machine.gpu_name}, of this machine, is not in the catalog"
    return f"this machine has {machine.num_gpus} of the {gpus} GPUs"


def counted(cluster: Cluster) -> str:
    """`4 x H200` or `2 nodes of 8 x H100-SXM-80GB`; ranks on a machine without GPUs."""
    if cluster.parts:
        return cluster.types + _of_several(cluster)
    what = "gloo ranks" if cluster.is_cpu else f"x {cluster.gpu.name}"
    if cluster.num_nodes == 1:
        return f"{cluster.num_gpus} {what}"
    return f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} {what}"


def _of_several(cluster: Cluster) -> str:
    """What is said of nodes that have GPUs of several types, which ranks in the order of types make where a type fills no whole number of
    nodes; "" where there are none."""
    if not (shared := cluster.shared_nodes):
        return ""
    size, apart = cluster.gpus_per_node, gcd(cluster.gpus_per_node, *(part.num_gpus for part in cluster.parts))
    nodes = "one node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    return f" ({nodes} of {size}, and one node has {', one '.join(shared)}; gpus_per_node={apart} plans each type on nodes of its own)"


def _cluster_here(gpu: Gpu, num_gpus: int, machine: Machine, mixed: bool) -> Cluster:
    """The GPUs of this machine as one node; the link between them from what the driver says of NVLink. Bridged pairs of PCIe cards count
    as PCIe: a job over all cards crosses it."""
    linked = machine.nvlink and gpu.nvlink > 0
    amd = gpu.vendor == "amd"
    links = ("xgmi", gpu.nvlink * min(1.0, (machine.num_gpus - 1) / XGMI_PEERS)) if amd else ("nvlink", gpu.nvlink)
    name, bandwidth, latency = (*links, NVLINK_LATENCY) if linked else ("pcie", between_slots(gpu), PCIE_LATENCY)
    source = "rocm-smi, AMD data sheets" if amd else "nvidia-smi, NVIDIA datasheets"
    return Cluster(
        name="here",
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=machine.num_gpus,
        levels=(Level(name=name, size=machine.num_gpus, bandwidth=bandwidth, latency=latency, source=source, mesh=amd and linked),),
        host_bandwidth=gpu.pcie,
        host_memory=machine.host_memory // machine.num_gpus,
        software=msgspec.structs.replace(
            installed(machine),
            transformer_engine=machine.transformer_engine and gpu.has_fused_attention,
            flash_attention=machine.flash_attention and gpu.has_fused_attention,
            apex=machine.apex,
            deep_ep=machine.deep_ep,
        ),
        stack=UNSAID,
        mixed=mixed,
    )


XGMI_PEERS = 7
"""The other GPUs of a node, to each of which one of AMD's has one of its links."""
NVLINK_LATENCY, PCIE_LATENCY = 1.9 * US, 2.5 * US
"""Seconds of a hop in NCCL's own tuning constants (src/graph/tuning.cc, ring, LL128)."""


def largest_gpu(cluster: Cluster) -> Gpu:
    """The type with the most memory."""
    return max((part.gpu for part in cluster.parts), default=cluster.gpu, key=lambda gpu: gpu.memory)


def limit_of(merged: Flat, cluster: Cluster) -> MemoryLimit:
    largest = largest_gpu(cluster)
    has, asked = largest.memory, filled(merged, Inputs)
    limit = has if asked.limit_gib is None else round(asked.limit_gib * GIB)
    if limit > has and not cluster.is_cpu:
        raise InputError("memory.limit_gib", merged["memory.limit_gib"].text, f"is more than a {largest.name} has, {has / GIB:.2f}")
    reserve = None if asked.reserve_gib is None else round(asked.reserve_gib * GIB)
    if reserve is not None and reserve >= limit:
        raise InputError("memory.reserve_gib", merged["memory.reserve_gib"].text, f"leaves nothing of {format_bytes(limit)}")
    if asked.risk is not None and reserve is not None:
        raise InputError("memory.risk", merged["memory.risk"].text, "says how much is kept free, as memory.reserve_gib does; give one")
    return MemoryLimit(limit=limit, reserve=reserve, parts=tuple(min(limit, part.gpu.memory) for part in cluster.parts), risk=asked.risk)
