"""The keys of Slurm, containers and variables: texts become typed values before a search, and what is wrong with them is said then."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, SlurmOptions, checked


def slurm_options(values: Mapping[str, str]) -> SlurmOptions:
    """From texts by name, as `slurm.name=text` gives them. Raises InputError that names the key.

    >>> slurm_options({"nodes": "2", "exclusive": "true", "extra": "--comment 'a b'"}).extra
    ('--comment', 'a b')
    >>> slurm_options({"nodes": "two"})
    Traceback (most recent call last):
    orchestrator.errors.InputError: slurm.nodes=two: must be a whole number above 0
    """
    fields: dict[str, str | int | bool | tuple[str, ...]] = {}
    for name, text in values.items():
        key = f"slurm.{name}"
        if name not in SlurmOptions.__struct_fields__ or name == "planner":
            raise InputError(key, text, "is not known", sorted({*SlurmOptions.__struct_fields__} - {"planner"}))
        if name in ("nodes", "cpus_per_task", "requeue"):
            if not text.isascii() or not text.isdecimal() or (name != "requeue" and not int(text)):
                raise InputError(key, text, "must be a whole number" + (" above 0" if name != "requeue" else ""))
            fields[name] = int(text)
        elif name == "style":
            if text not in ("torchrun", "srun"):
                raise InputError(key, text, "is not known", ["torchrun", "srun"])
            fields[name] = text
        elif name == "exclusive":
            if text not in ("true", "false"):
                raise InputError(key, text, "is not a truth value", ["true", "false"])
            fields[name] = text == "true"
        elif name == "extra":
            try:
                fields[name] = tuple(shlex.split(text))
            except ValueError as error:
                raise InputError(key, text, f"can't be split into words: {error}") from None
        else:
            fields[name] = "" if (name, text) == ("gres", "none") else checked(key, text)
    return msgspec.convert(fields, SlurmOptions)


CONTAINER_KEYS = ("image", "mounts", "workdir", "runtime")


def container_options(values: Mapping[str, str]) -> ContainerOptions | None:
    """From texts by name, as `container.name=text` gives them; None without any. A `.sif` image is apptainer's unless
    `container.runtime` says otherwise. Raises InputError that names the key.

    >>> container_options({"image": "/images/mcore.sif", "mounts": "/data:/data:ro,/home"})
    ContainerOptions(image='/images/mcore.sif', mounts=('/data:/data:ro', '/home'), workdir=None, runtime='apptainer')
    """
    for name, text in values.items():
        checked(f"container.{name}", text)
        if name not in CONTAINER_KEYS:
            raise InputError(f"container.{name}", text, "is not known", CONTAINER_KEYS)
    if not values:
        return None
    image = values.get("image")
    if not image:
        raise InputError(f"container.{next(iter(values))}", next(iter(values.values())), "needs container.image beside it")
    runtime = values.get("runtime", "apptainer" if image.endswith(".sif") else "pyxis")
    if runtime not in ("pyxis", "apptainer"):
        raise InputError("container.runtime", runtime, "is not known", ["pyxis", "apptainer"])
    mounts = tuple(part for part in values.get("mounts", "").split(",") if part)
    return msgspec.convert({"image": image, "mounts": mounts, "workdir": values.get("workdir"), "runtime": runtime}, ContainerOptions)


def slurm_tree(options: SlurmOptions) -> dict[str, Any]:
    """What is not as by default, as `slurm_options` reads it."""
    found: dict[str, Any] = {}
    for info in msgspec.structs.fields(SlurmOptions):
        value = getattr(options, info.name)
        if value != info.default:
            found[info.name] = shlex.join(value) if info.name == "extra" else "none" if (info.name, value) == ("gres", "") else value
    return found


def container_tree(options: ContainerOptions | None) -> dict[str, Any]:
    """The same for `container_options`."""
    if options is None:
        return {}
    return {**msgspec.structs.asdict(options), "mounts": ",".join(options.mounts) or None}
