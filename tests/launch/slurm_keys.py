"""Slurm's and containers' options from their keys' texts, as recipes and words give them."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.recipe.layers import filled, flatten
from orchestrator.recipe.starting import container_options as of_keys


def slurm_options(texts: Mapping[str, str]) -> SlurmOptions:
    return filled(flatten({"slurm": dict(texts)} if texts else {}, ""), SlurmOptions)


def container_options(texts: Mapping[str, str]) -> ContainerOptions | None:
    return of_keys(flatten({"container": dict(texts)}, ""))
