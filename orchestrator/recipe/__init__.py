"""Recipes, clusters and key=value words become one frozen `Settings` value."""

from __future__ import annotations

from orchestrator.recipe.clusters import load_cluster, resized, stored
from orchestrator.recipe.help import help_text, recipe_schema, topic_text
from orchestrator.recipe.keys import KEYS
from orchestrator.recipe.read import as_texts, read_arguments
from orchestrator.recipe.resolved import resolved_yaml
from orchestrator.recipe.settings import Settings, check_no_question, load, load_tree
from orchestrator.recipe.weights import model_type

__all__ = [
    "KEYS",
    "Settings",
    "as_texts",
    "check_no_question",
    "help_text",
    "load",
    "load_cluster",
    "load_tree",
    "model_type",
    "read_arguments",
    "recipe_schema",
    "resized",
    "resolved_yaml",
    "stored",
    "topic_text",
]
