"""What this machine has: GPUs, host memory, a Slurm allocation, the packages that training needs. Looks, changes nothing."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.machinery import PathFinder
from itertools import takewhile
from typing import Final

from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import by_driver_name
from orchestrator.values import Value

NVIDIA_SMI_S: Final = 10.0
"""Seconds that nvidia-smi may take: it takes 0.1 to 2; a driver that does not answer in ten is as good as none."""


class Machine(Value, frozen=True, kw_only=True):
    """What this machine has. `gpu_name`: what the driver calls the GPUs; None where there are none or several types. `gpu_types`: all that
    it calls them. `catalog_name`: what the catalog calls them; None: not in it. `slurm_nodes`: nodes of the allocation that this process is
    in; 0 outside. `megatron_core`: its version; "": not installed. `missing`: modules that some engine needs and that are not installed."""

    num_gpus: int = 0
    gpu_name: str | None = None
    gpu_types: tuple[str, ...] = ()
    catalog_name: str | None = None
    nvlink: bool = False
    host_memory: int = 0
    slurm_job: str | None = None
    slurm_nodes: int = 0
    sbatch: bool = False
    transformer_engine: bool = False
    flash_attention: bool = False
    apex: bool = False
    deep_ep: bool = False
    megatron_core: str = ""
    missing: tuple[str, ...] = ()


def machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """What this machine has, as far as this process may use it."""
    names = gpu_names(environment)
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    job = environment.get("SLURM_JOB_ID")
    name = names[0] if len(set(names)) == 1 else None
    gpu = by_driver_name(name) if name else None
    return Machine(
        num_gpus=len(names),
        gpu_name=name,
        gpu_types=tuple(dict.fromkeys(names)),
        catalog_name=gpu.name if gpu else None,
        nvlink=len(names) > 1 and (_has_nvlink() if gpu is None or gpu.vendor == "nvidia" else gpu.nvlink > 0),
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        slurm_job=job,
        slurm_nodes=int(nodes) if job and nodes.isdecimal() else 0,
        sbatch=shutil.which("sbatch") is not None,
        transformer_engine=installed("transformer_engine"),
        flash_attention=installed("flash_attn"),
        apex=installed("apex"),
        deep_ep=installed("deep_ep"),
        megatron_core=_version("megatron-core"),
        missing=tuple(name for name in modules_of_engines() if not installed(name)),
    )


def gpu_names(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that CUDA_VISIBLE_DEVICES (of AMD's HIP_VISIBLE_DEVICES) leaves, one each; empty without a driver. MIG slices are
    not whole GPUs: left out."""
    return _nvidia_names(environment.get("CUDA_VISIBLE_DEVICES")) or _amd_names(
        environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    )


AMD_NAME_COLUMNS: Final = ("Device Name", "Card Series", "Card series")
"""What rocm-smi heads a GPU's name with, by release."""


def _amd_names(visible: str | None) -> list[str]:
    """What rocm-smi calls the GPUs whose numbers `visible` leaves (None: all)."""
    rows = csv.DictReader(_lines("rocm-smi", "--showid", "--showproductname", "--csv"))
    names = [next((row[column] for column in AMD_NAME_COLUMNS if row.get(column) not in (None, "", "N/A")), "") for row in rows]
    if visible is not None:
        wanted = list(takewhile(lambda word: word.isdecimal() and int(word) < len(names), map(str.strip, visible.split(","))))
        names = [names[int(word)] for word in wanted]
    return [name for name in names if name]


def _nvidia_names(visible: str | None) -> list[str]:
    """What nvidia-smi calls the GPUs that `visible` leaves (None: all)."""
    lines = _lines("nvidia-smi", "--query-gpu=index,uuid,mig.mode.current,name", "--format=csv,noheader")
    found = [tuple(part.strip() for part in line.split(",", 3)) for line in lines]
    gpus = [entry for entry in found if len(entry) == 4 and entry[2] != "Enabled"]
    if visible is None:
        return [entry[3] for entry in gpus]
    names = []
    for wanted in (part.strip() for part in visible.split(",")):
        match = [entry[3] for entry in gpus if wanted == entry[0] or (wanted.startswith("GPU-") and entry[1].startswith(wanted))]
        if not match:  # CUDA stops at the first device that it doesn't know (-1 and the empty string hide all)
            break
        names += match
    return names


def _has_nvlink() -> bool:
    """Whether any link of any GPU is up."""
    return any("GB/s" in line for line in _lines("nvidia-smi", "nvlink", "--status"))


def _lines(name: str, *arguments: str) -> list[str]:
    """Lines of a program's output; none where it is missing, fails or hangs."""
    program = shutil.which(name)
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def modules_of_engines() -> list[str]:
    """What any engine's ranks import, each once, in the engines' order."""
    return list(dict.fromkeys(module for engine in ENGINES.values() for module in engine.requirements.modules))


def _version(distribution: str) -> str:
    """Version of an installed distribution, without a build's own suffix; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed(name: str) -> bool:
    """Whether a module is there, without importing it or a package that it is in.

    >>> installed("json.tool"), installed("json.nothing"), installed("nothing.json")
    (True, False, False)
    """
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for depth in range(len(inner)):
            if spec is None:
                return False
            spec = PathFinder.find_spec(".".join((top, *inner[: depth + 1])), spec.submodule_search_locations)
    except (ImportError, ValueError):
        return False
    return spec is not None
