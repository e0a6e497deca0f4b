"""Recipes, clusters and key=value words become one frozen `Settings` value. The only importer of omegaconf."""

from __future__ import annotations

from orchestrator.recipe.clusters import load_cluster

__all__ = ["load_cluster"]
