"""Slurm's and containers' options: from their keys, and back to the text of a recipe."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.key import shown
from orchestrator.recipe.layers import Flat, fields_of
from orchestrator.values import defaults_of


def container_options(flat: Flat) -> ContainerOptions | None:
    """The container's options; None where no key of them is given. A `.sif` image is apptainer's unless `container.runtime` says otherwise.
    Raises InputError where only the image is missing."""
    fields = {name: value for name, value in fields_of(flat, ContainerOptions).items() if value is not None}
    if not fields:
        return None
    if "image" not in fields:
        first = next(name for name in flat if name.startswith("container."))
        raise InputError(first, shown(flat[first].text), "needs container.image beside it")
    fields.setdefault("runtime", "apptainer" if fields["image"].endswith(".sif") else "pyxis")
    return ContainerOptions(**fields)


def slurm_options(flat: Flat, cluster: Cluster) -> SlurmOptions:
    """Slurm's options. Raises InputError for nodes that would need more GPUs than those of the cluster have."""
    options = SlurmOptions(**{name: value for name, value in fields_of(flat, SlurmOptions).items() if value is not None})
    ranks, rest = divmod(cluster.num_gpus, options.most_nodes or cluster.num_nodes)
    if options.most_nodes is not None and not rest and ranks > cluster.gpus_per_node and not cluster.is_cpu:
        why = f"would put {ranks} of the {cluster.num_gpus} ranks on a node, and one of {cluster.name} has {cluster.gpus_per_node} GPUs"
        choices = [f"slurm.nodes={cluster.num_nodes}", f"gpus_per_node={ranks} (if a node has so many: it is what prices take)"]
        raise InputError("slurm.nodes", flat["slurm.nodes"].text, why, choices)
    return options


def slurm_tree(options: SlurmOptions) -> dict[str, Any]:
    """Slurm's options that are not at their defaults, as a recipe says them."""
    found: dict[str, Any] = {}
    for name, default in defaults_of(SlurmOptions).items():
        value = getattr(options, name)
        if value != default:
            found[name] = _text(name, value)
    return found


def _text(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return shlex.join(value) if name == "extra" else "-".join(map(str, value))
    return "none" if (name, value) == ("gres", "") else value


def container_tree(options: ContainerOptions | None) -> dict[str, Any]:
    """The container's options as a recipe says them; nothing without a container."""
    if options is None:
        return {}
    return {**msgspec.structs.asdict(options), "mounts": ",".join(options.mounts) or None}
