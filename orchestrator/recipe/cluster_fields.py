"""cluster.FIELD=value: one figure of a cluster over what its YAML says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.errors import InputError, unknown
from orchestrator.key import one_text, shown

PLAIN: Final = ("gpu", "host_bandwidth", "host_memory", "stack")
LEVEL: Final = ("size", "bandwidth", "latency", "ibgda")
GPU: Final = ("memory", "memory_bandwidth", "compute_capability", "pcie", "nvlink", "peak_flops")
SOFTWARE: Final = ("megatron_core", "deepspeed", "transformer_engine", "flash_attention", "apex", "deep_ep")
KNOWN: Final = (
    *(f"cluster.{name}" for name in PLAIN),
    *(f"cluster.levels.NAME.{name}" for name in LEVEL),
    *(f"cluster.gpu.{name}" for name in GPU[:-1]),
    "cluster.gpu.peak_flops.PRECISION",
    *(f"cluster.software.{name}" for name in SOFTWARE),
)
OTHERS: Final = ("cluster.mixed", "cluster.price_per_gpu_hour", "cluster.mtbf", "cluster.storage", "cluster.restart_s")
"""Keys of the group that are declared with the others (recipe/keys.py)."""
OF_A_CLUSTER: Final = tuple(key.removeprefix("cluster.") for key in OTHERS[1:])
"""Members of a cluster's mapping or YAML that are a run's own keys, and stand there as they do on the command line."""


def cluster_field(group: str, name: str, text: Any) -> str:
    """The text of a field that a cluster can have; recipe/clusters.py reads it with the rest of the YAML. Raises InputError."""
    full = f"{group}.{name}"
    parts = name.split(".")
    known = (
        name in PLAIN
        or (len(parts) == 3 and parts[0] == "levels" and parts[1] != "" and parts[2] in LEVEL)
        or (len(parts) == 2 and parts[0] == "gpu" and parts[1] in GPU[:-1])
        or (len(parts) == 3 and parts[:2] == ["gpu", "peak_flops"])
        or (len(parts) == 2 and parts[0] == "software" and parts[1] in SOFTWARE)
    )
    if not known:
        raise unknown(full, shown(text), "is no key", full, [*KNOWN, *OTHERS])
    return one_text(full, text)


def with_fields(tree: Mapping[str, Any], fields: Mapping[str, str], gpus: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A cluster's YAML with these fields, by what follows `cluster.`; `gpus`: the figures of the catalog by name. Raises InputError for
    a level that the cluster has not.

    >>> tree = {"levels": [{"name": "ib", "bandwidth": "400 Gbit/s"}], "host_memory": "1 TB"}
    >>> with_fields(tree, {"levels.ib.bandwidth": "200 Gbit/s"}, {})["levels"]
    [{'name': 'ib', 'bandwidth': '200 Gbit/s'}]
    """
    found = dict(tree)
    for name, value in sorted(fields.items()):  # cluster.gpu before cluster.gpu.memory
        key, parts = f"cluster.{name}", name.split(".")
        if len(parts) == 1:
            found[name] = value
        elif parts[0] == "levels":
            levels = [dict(level) for level in found["levels"]]
            of_name = [level for level in levels if level.get("name") == parts[1]]
            if not of_name:
                raise InputError(key, shown(value), "is of no level that this cluster has", [level.get("name") for level in levels])
            of_name[0][parts[2]] = value
            found["levels"] = levels
        elif parts[0] == "software":
            found["software"] = {**(found.get("software") or {}), parts[1]: value}
        else:
            gpu = gpus.get(found["gpu"]) if isinstance(found["gpu"], str) else found["gpu"]
            if not isinstance(gpu, Mapping):
                raise InputError(key, shown(value), f"can't be said of gpu {shown(found['gpu'])}")
            gpu = dict(gpu)
            if parts[1] == "peak_flops":
                gpu["peak_flops"] = {**gpu["peak_flops"], parts[2]: value}
            else:
                gpu[parts[1]] = value
            found["gpu"] = gpu
    return found
