"""What was planned: a value that is written and read (plan.py), and whether one that somebody wrote is legal (check.py)."""

from __future__ import annotations

from orchestrator.plan.plan import LONG_S, Plan, Prices, Reason, RunSettings, Source, chosen, from_json, json_schema, schema_text, to_json
from orchestrator.strategy.layout import LayerSpan, Prediction, Stage, StagePrediction

__all__ = [
    "LONG_S",
    "LayerSpan",
    "Plan",
    "Prediction",
    "Prices",
    "Reason",
    "RunSettings",
    "Source",
    "Stage",
    "StagePrediction",
    "chosen",
    "from_json",
    "json_schema",
    "schema_text",
    "to_json",
]
