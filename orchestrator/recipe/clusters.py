"""Clusters: a YAML of ten lines and a number of GPUs become a `Cluster`.

gpu: H100-SXM-80GB            # a catalog name, or its figures: {name, memory, memory_bandwidth, peak_flops, compute_capability};
                              # with mixed: slowest a list of them. 8 x H100-SXM-80GB + 16 x A100-SXM-80GB: two types, in the order of
                              # ranks; each pipeline stage is planned for its own (a list of {type, gpus} where a type has figures)
gpus_per_node: 8
levels:                       # from the inside out; size: a number of GPUs, node, or unlimited
- {name: nvlink, size: node, bandwidth: nvlink, latency: 1.9 us}      # nvlink, pcie: the GPU's own, from the catalog
                              # (pcie among GeForce cards, which have no peer-to-peer: 0.6 of it; say a figure where you measured one)
- {name: infiniband, size: unlimited, bandwidth: 400 Gbit/s, latency: 4 us}
                              # of several types a bandwidth may be a list, one for each: [400 Gbit/s, 200 Gbit/s]
                              # ibgda: false on network cards that are not NVIDIA's (EFA), over which DeepEP and HybridEP don't go
                              # mesh: true where each pair of GPUs has a link of its own and no switch (AMD's Infinity Fabric)
host_bandwidth: pcie          # GPU to host memory, per GPU and direction; pcie / 2: two GPUs share a slot's
host_memory: 256 GB           # per GPU
stack: stock                  # a container as downloaded (the default); tuned: set up as the vendor's benchmarks are
price_per_gpu_hour: 2.5       # and mtbf, storage, restart_s: what a run's cluster.price_per_gpu_hour= would say

cluster: dgx_h100             # in place of all of these: what is not said is as there, by name or path
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.engines.megatron_versions import number
from orchestrator.errors import InputError, nearest, unknown
from orchestrator.hardware.catalog import GPUS, between_slots
from orchestrator.hardware.spec import Cluster, Gpu, Level, Part, Software, Stack, Vendor, is_cpu, segment, slowest
from orchestrator.key import BYTES, FLOPS, RATES, SECONDS, Key, parse, quantity, shown
from orchestrator.recipe.cluster_fields import OF_A_CLUSTER, with_fields
from orchestrator.recipe.keys import MAX_GPUS, Mixed
from orchestrator.recipe.read import Tree, as_texts, read_yaml

PRECISIONS: Final = ("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4")
SUFFIXES: Final = (".yaml", ".yml")
HUB: Final = re.compile("^# Hub: (.+)$", re.MULTILINE)


def stored(folder: str) -> list[str]:
    """Names of the YAML files in the package's `recipes/<folder>`, wherever it is installed."""
    return sorted(item.name.removesuffix(".yaml") for item in _folder(folder).iterdir() if item.name.endswith(".yaml"))


def on_hub() -> dict[str, str]:
    """The package's recipes by the models of Hugging Face's hub whose architecture they have, as their lines "# Hub:" say."""
    lines = {name: HUB.search((_folder("models") / f"{name}.yaml").read_text()) for name in stored("models")}
    return {model: name for name, line in lines.items() if line for model in line[1].split(", ")}


def _folder(folder: str) -> Traversable:
    return resources.files(f"orchestrator.recipes.{folder}")


def read_named(key: str, name: str, folder: str) -> tuple[str, Tree]:
    """(short name, content) of a name in `recipes/<folder>` or of a path to a YAML. Raises InputError with the nearest name."""
    known = stored(folder)
    if name in known:
        with resources.as_file(_folder(folder) / f"{name}.yaml") as path:
            return name, read_yaml(path)
    path = Path(name)
    if "/" in name or name.endswith(SUFFIXES) or path.is_file():
        if not path.exists():
            raise InputError(key, shown(name), "no such file")
        if path.is_dir():
            raise InputError(key, shown(name), "is a folder, not a YAML file")
        return path.stem, read_yaml(path)
    begins = [one for one in known if one.startswith(f"{name}_")]
    close = " or ".join(begins) or nearest(name, known)
    raise InputError(key, shown(name), f"is not known{f'; did you mean {close}' if close else ''}; a path to a YAML works too", known)


def read_cluster(name: str, above: tuple[str, ...] = (), key: str = "cluster") -> tuple[str, Tree]:
    """(short name, content) of a cluster by name or path. What a YAML with `cluster: NAME` does not say is as there. Raises InputError."""
    short, tree = read_named(key, name, "clusters")
    base, key = tree.pop("cluster", None), f"{name}: cluster"
    if base is None:
        return short, tree
    if not isinstance(base, str):
        raise InputError(key, shown(base), "must be the name or path of the cluster that this one builds on")
    base = str(Path(name).parent / base) if base.endswith(SUFFIXES) else base
    if base in (*above, name):
        raise InputError(key, shown(base), "is built on itself")
    below = read_cluster(base, (*above, name), key)[1]
    return short, {**{one: value for one, value in below.items() if one != "name"}, **tree}


def load_cluster(name: str, num_gpus: int, gpus_per_node: int | None = None) -> Cluster:
    """A cluster by name or path with this many GPUs. Raises InputError.

    >>> cluster = load_cluster("dgx_h100", 16)
    >>> cluster.num_nodes, [level.size for level in cluster.levels]
    (2, [8, 16])
    """
    short, tree = read_cluster(name)
    return cluster_from(tree, short, name, num_gpus, gpus_per_node)


SOFTWARE: Final = Software()
UNSAID: Final[Stack] = "stock"
"""The stack of a cluster whose YAML says none: nobody has tuned what nobody has spoken of."""
STAGES: Final = "stages"
_PART_KEYS = ("type", "gpus")
_COUNTED = re.compile(r"(\d+) *x *(\S+)")
_CLUSTER_KEYS = ("name", "gpu", "gpus_per_node", "levels", "host_bandwidth", "host_memory", "software", "stack", "mixed")
_LEVEL_KEYS = ("name", "size", "bandwidth", "latency", "source", "mesh", "ibgda")
_GPU_KEYS = ("name", "memory", "peak_flops", "memory_bandwidth", "compute_capability", "source", "pcie", "nvlink", "vendor")


def cluster_from(
    tree: Tree, name: str, where: str, num_gpus: int, gpus_per_node: int | None = None, mixed: str | None = None,
    software: Software = SOFTWARE,
) -> Cluster:  # fmt: skip
    """A cluster from its YAML's content; `where` names the file in messages. `mixed`: over the YAML's own. `software`: the engines'
    versions where the YAML says none. Raises InputError."""
    _check_keys(tree, _CLUSTER_KEYS, _CLUSTER_KEYS[1:6], where, (*OF_A_CLUSTER, "cluster"))
    node = gpus_per_node or _count(f"{where}: gpus_per_node", tree["gpus_per_node"])
    parts = _parts(tree["gpu"], where)
    said = mixed or tree.get("mixed")
    mixed = parse(Key(name=f"{where}: mixed", type=Mixed, help=""), said or (STAGES if parts else "refuse"))
    types = " + ".join(f"{count} x {gpu.name}" for gpu, count in parts)
    if parts and mixed == "refuse":
        raise InputError(f"{where}: gpu", types, f"{SEVERAL}; mixed=refuse was said")
    if mixed == STAGES and not parts:
        raise InputError(f"{where}: gpu", _names(tree["gpu"]), f"mixed=stages needs how many there are of each type: {PARTS_EXAMPLE}")
    gpu = slowest([gpu for gpu, _ in parts]) if parts else _gpus(tree["gpu"], where, mixed)
    counted = sum(count for _, count in parts)
    if parts and counted != num_gpus:
        raise InputError("gpus", num_gpus, f"the cluster's types are {types} = {counted} GPUs; cluster.gpu= says other numbers")
    each = [one for one, _ in parts] or [gpu]
    host_bandwidth = min(_rate(f"{where}: host_bandwidth", tree["host_bandwidth"], one, one.pcie) for one in each)
    host_memory = round(quantity(f"{where}: host_memory", tree["host_memory"], BYTES))
    software = _software(tree.get("software"), where, gpu, software)
    of_each = [_levels(tree["levels"], where, num_gpus, node, one, (index, len(parts))) for index, (one, _) in enumerate(parts)]
    levels = _least(of_each) if parts else _levels(tree["levels"], where, num_gpus, node, gpu)
    if num_gpus > node and num_gpus % node:
        less = num_gpus // node * node
        do = f"gpus={less} and gpus={less + node} are"
        raise InputError("gpus", num_gpus, f"is no whole number of nodes of {node}: {do}; gpus_per_node=N says how many a node has")
    if num_gpus > levels[-1].size:
        outer = levels[-1]
        more = f"cluster.levels.{outer.name}.size={num_gpus}, if it holds more"
        raise InputError("gpus", num_gpus, f"is more than the outermost network level of {where} holds ({outer.size}); {more}")
    return Cluster(
        name=str(tree.get("name") or name),
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=node,
        levels=levels,
        host_bandwidth=host_bandwidth,
        host_memory=host_memory,
        software=software,
        stack=parse(Key(name=f"{where}: stack", type=Stack, help=""), tree.get("stack") or UNSAID),
        mixed=mixed != "refuse" and len(parts) != 1,
        parts=tuple(Part(gpu=one, num_gpus=count, levels=own) for (one, count), own in zip(parts, of_each, strict=True))
        if mixed == STAGES and len(parts) > 1
        else (),
    )


def _least(of_each: list[tuple[Level, ...]]) -> tuple[Level, ...]:
    """What all types have of each level."""
    by_level = zip(*of_each, strict=True)
    return tuple(msgspec.structs.replace(same[0], bandwidth=min(level.bandwidth for level in same)) for same in by_level)


def _levels(raw: Any, where: str, num_gpus: int, node: int, gpu: Gpu, part: tuple[int, int] = (0, 1)) -> tuple[Level, ...]:
    """The network levels of a cluster. Sizes grow outwards, each a multiple of the one before; the outermost holds the job. `part`: which
    of how many types this GPU is."""
    if not isinstance(raw, list) or not raw:
        raise InputError(f"{where}: levels", None, "needs a list of network levels, from the inside out")
    levels: list[Level] = []
    inner = 1
    for index, item in enumerate(raw):
        key = f"{where}: levels[{index}]"
        if not isinstance(item, dict):
            raise InputError(key, shown(item), f"must be a mapping with {', '.join(_LEVEL_KEYS)}")
        _check_keys(item, _LEVEL_KEYS, _LEVEL_KEYS[:4], key)
        size = _size(f"{key}.size", item["size"], num_gpus, node, inner)
        if size > node and all(isinstance(more, dict) and more.get("size") == "unlimited" for more in raw[index + 1 :]):
            size = segment(size, node, num_gpus)  # of a rack larger than a node
        if size % inner:
            raise InputError(f"{key}.size", size, f"must be a multiple of the level inside it ({inner})")
        levels.append(
            Level(
                name=_text(f"{key}.name", item["name"]),
                size=size,
                bandwidth=_rate(f"{key}.bandwidth", _of_part(f"{key}.bandwidth", item["bandwidth"], part), gpu, between_slots(gpu)),
                latency=quantity(f"{key}.latency", item["latency"], SECONDS, zero=True, most=MOST_LATENCY_S),
                source=str(item.get("source") or ""),
                mesh=parse(Key(name=f"{key}.mesh", type=bool, help=""), item.get("mesh") or "false"),
                ibgda=parse(Key(name=f"{key}.ibgda", type=bool, help=""), item.get("ibgda", "true")),
                stated=said if (said := str(item["size"])) != str(size) else "",
            )
        )
        inner = size
    return tuple(levels)


def _of_part(key: str, raw: Any, part: tuple[int, int]) -> Any:
    """A bandwidth, or of a list of them that of this type."""
    index, types = part
    if not isinstance(raw, list):
        return raw
    if len(raw) != types or types == 1:
        raise InputError(key, _names(raw), f"is a list of {len(raw)} for {types} type{'s' * (types > 1)} of GPU")
    return raw[index]


MOST_LATENCY_S: Final = 0.1
"""A fibre's half around the earth. A search over links that take seconds takes minutes."""
_OWN_LINK = re.compile(r"(nvlink|pcie)(?: */ *([1-9]))?\Z")


def _rate(key: str, raw: Any, gpu: Gpu, pcie: float) -> float:
    """Bytes/s: a number and a unit, or the GPU's own link, "nvlink" or "pcie", of which "pcie / 2" is the half. `pcie`: bytes/s of the
    latter, to the host or to another GPU."""
    match = _OWN_LINK.match(raw) if isinstance(raw, str) else None
    if match is None:
        return quantity(key, raw, RATES)
    whole = gpu.nvlink if match.group(1) == "nvlink" else pcie
    if not whole:
        raise InputError(key, shown(raw), f"is not known of {gpu.name}: give a number and a unit, such as 63 GB/s")
    return whole / int(match.group(2) or 1)


def _size(key: str, raw: Any, num_gpus: int, node: int, inner: int) -> int:
    """A number, `node`, or `unlimited`: the job's GPUs, rounded up to whole inner groups."""
    if raw == "unlimited":
        return math.ceil(max(num_gpus, inner) / inner) * inner
    if raw == "node":
        return node
    if isinstance(raw, str) and raw.isdecimal():
        return _count(key, raw)
    raise InputError(key, shown(raw), "is no size", ["a number of GPUs", "node", "unlimited"])


SEVERAL: Final = "are several types"
PARTS_EXAMPLE: Final = "8 x H100-SXM-80GB + 16 x A100-SXM-80GB"


def _names(raw: Any) -> str:
    return ", ".join(str(item) for item in raw) if isinstance(raw, list) else shown(raw)


def _parts(raw: Any, where: str) -> list[tuple[Gpu, int]]:
    """(type, how many) of each, in the order of ranks, where the numbers are said; else none."""
    key = f"{where}: gpu"
    if isinstance(raw, str) and _COUNTED.match(raw.strip()):
        found = [(_COUNTED.fullmatch(item.strip()), item) for item in raw.split("+")]
        wrong = [item.strip() for match, item in found if match is None]
        if wrong:
            raise InputError(key, shown(raw), f"{shown(wrong[0])} is not such as {PARTS_EXAMPLE}")
        parts = [(_gpu(match.group(2), where), _count(key, match.group(1))) for match, _ in found if match is not None]
    elif isinstance(raw, list) and raw and any(isinstance(item, dict) and not item.keys().isdisjoint(_PART_KEYS) for item in raw):
        parts = []
        for index, item in enumerate(raw):
            if not isinstance(item, dict):
                raise InputError(f"{key}[{index}]", shown(item), f"must be a mapping with {', '.join(_PART_KEYS)}, as the others are")
            _check_keys(item, _PART_KEYS, _PART_KEYS, f"{key}[{index}]")
            parts.append((_gpu(item["type"], where), _count(f"{key}[{index}].gpus", item["gpus"])))
    else:
        return []
    names = [gpu.name for gpu, _ in parts]
    if len({*names}) < len(names):
        raise InputError(key, ", ".join(names), "has a type twice: count its GPUs together")
    if len({is_cpu(name) for name in names}) > 1:
        raise InputError(key, ", ".join(names), "are ranks with and without a GPU")
    one_vendor(key, [gpu for gpu, _ in parts])
    return parts


def one_vendor(key: str, gpus: Sequence[Gpu]) -> None:
    """Raises InputError for GPUs of several vendors: a job has one communicator (NCCL's, or RCCL's) and one build of torch."""
    of: dict[str, list[str]] = {}
    for gpu in gpus:
        of.setdefault("AMD" if gpu.vendor == "amd" else "NVIDIA", []).append(gpu.name)
    if len(of) > 1:
        types = " and ".join(f"{vendor}'s {', '.join(names)}" for vendor, names in of.items())
        why = f"no one job can have {types}: NCCL and RCCL don't reach each other; plan each by a command of its own"
        raise InputError(key, ", ".join(gpu.name for gpu in gpus), why)


def _gpus(raw: Any, where: str, mixed: str) -> Gpu:
    """The GPU that is planned for: of one type, or what all of a list can do."""
    if not isinstance(raw, list) or not raw:
        return _gpu(raw, where)
    gpus = [_gpu(item, where) for item in raw]
    one_vendor(f"{where}: gpu", gpus)
    if len(gpus) > 1 and mixed != "slowest":
        names = ", ".join(gpu.name for gpu in gpus)
        ways = f"{PARTS_EXAMPLE} plans pipeline stages for the type that computes them"
        raise InputError(f"{where}: gpu", names, f"{SEVERAL}; cluster.mixed=slowest plans for what all of them can do, {ways}")
    return slowest(gpus)


def _gpu(raw: Any, where: str) -> Gpu:
    if isinstance(raw, str):
        if raw not in GPUS:
            if kinds := [name for name in GPUS if name.lower().startswith(f"{raw.lower()}-")]:
                raise InputError(f"{where}: gpu", shown(raw), "is of several kinds", kinds)
            raise unknown(f"{where}: gpu", shown(raw), "is not in the catalog", raw, GPUS)
        return GPUS[raw]
    if not isinstance(raw, dict):
        raise InputError(f"{where}: gpu", shown(raw), "must be a catalog name or the figures", _GPU_KEYS)
    _check_keys(raw, _GPU_KEYS, _GPU_KEYS[:4], f"{where}: gpu")
    peaks = raw["peak_flops"]
    if not isinstance(peaks, dict) or not peaks:
        raise InputError(f"{where}: gpu.peak_flops", shown(peaks), "needs a figure by precision", PRECISIONS)
    _check_keys(peaks, PRECISIONS, (), f"{where}: gpu.peak_flops")
    return Gpu(
        name=_text(f"{where}: gpu.name", raw["name"]),
        memory=round(quantity(f"{where}: gpu.memory", raw["memory"], BYTES)),
        peak_flops={name: quantity(f"{where}: gpu.peak_flops.{name}", value, FLOPS) for name, value in peaks.items()},
        memory_bandwidth=quantity(f"{where}: gpu.memory_bandwidth", raw["memory_bandwidth"], RATES),
        compute_capability=_capability(f"{where}: gpu.compute_capability", raw.get("compute_capability"), peaks),
        source=str(raw.get("source") or where),
        vendor=parse(Key(name=f"{where}: gpu.vendor", type=Vendor, help=""), raw.get("vendor") or "nvidia"),
        **{link: quantity(f"{where}: gpu.{link}", raw[link], RATES, zero=True) for link in ("pcie", "nvlink") if link in raw},
    )


LEAST_CAPABILITY: Final = {"nvfp4": "10.0", "fp8": "8.9", "bf16": "8.0", "fp16": "7.0"}
"""The first GPUs with tensor cores for it: Blackwell, Ada, Ampere, Volta (CUDA C programming guide)."""


def _capability(key: str, raw: Any, peaks: Mapping[str, Any]) -> str:
    """CUDA's compute capability, "9.0"; where it is not stated the least that has these precisions."""
    if raw is None:
        return next((least for precision, least in LEAST_CAPABILITY.items() if precision in peaks), "0.0")
    parse(Key(name=key, type=float, help="", low=0), raw)
    return str(raw)


def _software(raw: Any, where: str, gpu: Gpu, base: Software) -> Software:
    """What the YAML says, else the versions of `base` and all that the GPU can have."""
    fused = gpu.has_fused_attention
    base = msgspec.structs.replace(base, transformer_engine=fused, flash_attention=fused)
    if raw is None:
        return base
    if not isinstance(raw, dict):
        raise InputError(f"{where}: software", shown(raw), "must be a mapping", Software.__struct_fields__)
    _check_keys(raw, Software.__struct_fields__, (), f"{where}: software")
    kinds = {name: bool if isinstance(getattr(Software(), name), bool) else str for name in Software.__struct_fields__}
    given = {name: parse(Key(name=f"{where}: software.{name}", type=kinds[name], help=""), value) for name, value in raw.items()}
    found = msgspec.structs.replace(base, **given)
    try:
        number(found.megatron_core)
    except InputError as error:
        raise InputError(f"{where}: software.megatron_core", found.megatron_core, error.why) from None
    return found


def _check_keys(
    tree: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...], where: str, of_a_file: tuple[str, ...] = ()
) -> None:
    """Raises InputError for a key that is not known, and for one that is missing. `of_a_file`: what a file may say, read before."""
    for name in tree:
        if name not in known:
            all_known = (*known, *of_a_file)
            close = nearest(name, all_known)
            raise InputError(f"{where}: {shown(name)}", None, f"is no key here{f'; did you mean {close}' if close else ''}", all_known)
    for name in needed:
        if tree.get(name) is None:
            raise InputError(f"{where}: {name}", None, "is missing")


def _count(key: str, raw: Any) -> int:
    return int(parse(Key(name=key, type=int, help="", low=1, high=MAX_GPUS), raw))


def _text(key: str, raw: Any) -> str:
    return str(parse(Key(name=key, type=str, help=""), raw))


def gpu_tree(gpu: Gpu) -> dict[str, Any]:
    """A GPU's figures as YAML content, exact."""
    return {
        "name": gpu.name,
        "memory": f"{gpu.memory} B",
        "peak_flops": {name: f"{value!r} FLOP/s" for name, value in gpu.peak_flops.items()},
        "memory_bandwidth": f"{gpu.memory_bandwidth!r} B/s",
        "compute_capability": gpu.compute_capability,
        "source": gpu.source,
        "pcie": f"{gpu.pcie!r} B/s",
        "nvlink": f"{gpu.nvlink!r} B/s",
        **({} if gpu.vendor == "nvidia" else {"vendor": gpu.vendor}),
    }


def to_tree(cluster: Cluster) -> dict[str, Any]:
    """The cluster as YAML content, exact: numbers in base units, sizes of levels as its own YAML says them."""
    return {
        "name": cluster.name,
        "gpu": [{"type": gpu_tree(part.gpu), "gpus": part.num_gpus} for part in cluster.parts] or gpu_tree(cluster.gpu),
        "gpus_per_node": cluster.gpus_per_node,
        "levels": [
            {
                "name": level.name,
                "size": level.stated or level.size,
                "bandwidth": [f"{part.levels[index].bandwidth!r} B/s" for part in cluster.parts] or f"{level.bandwidth!r} B/s",
                "latency": f"{level.latency!r} s",
                "source": level.source,
                **({"mesh": True} if level.mesh else {}),
                **({} if level.ibgda else {"ibgda": False}),
            }
            for index, level in enumerate(cluster.levels)
        ],
        "host_bandwidth": f"{cluster.host_bandwidth!r} B/s",
        "host_memory": f"{cluster.host_memory} B",
        "software": msgspec.structs.asdict(cluster.software),
        "stack": cluster.stack,
        **({"mixed": STAGES if cluster.parts else "slowest"} if cluster.mixed else {}),
    }


def changed(tree: Tree, fields: Mapping[str, str]) -> Tree:
    """A cluster's YAML content with fields of cluster.FIELD=value over it. Raises InputError."""
    trees = {name: as_texts(gpu_tree(gpu)) for name, gpu in GPUS.items()} if any(name.startswith("gpu.") for name in fields) else {}
    return with_fields(tree, fields, trees)


def changed_cluster(cluster: Cluster, fields: Mapping[str, str]) -> Cluster:
    """A cluster that did not come from YAML with fields of cluster.FIELD=value over it. Raises InputError."""
    tree = changed(as_texts(to_tree(cluster)), fields)
    return cluster_from(tree, cluster.name, "cluster", cluster.num_gpus, cluster.gpus_per_node)


def resized(cluster: Cluster, num_gpus: int) -> Cluster:
    """The cluster with another number of GPUs in use, at most what its outermost level can hold. Raises InputError.

    >>> cluster = load_cluster("dgx_h100", 32)
    >>> [resized(cluster, gpus).num_nodes for gpus in (24, 64)]
    [3, 8]
    """
    return cluster_from(as_texts(to_tree(cluster)), cluster.name, "cluster", num_gpus, cluster.gpus_per_node)


def check_cluster(cluster: Cluster, where: str) -> None:
    """Hold a cluster that did not come from YAML to the rules of one that did. Raises InputError."""
    cluster_from(as_texts(to_tree(cluster)), cluster.name, where, cluster.num_gpus)
