"""DeepSpeed's bytes per parameter before sharding, whatever the model is made of."""

from __future__ import annotations

from typing import Final

from orchestrator.strategy.capabilities import StateBytes

STATES: Final = {
    "mixed/0": StateBytes(weight=2, gradient=2, master=4, moments=8, step=4),
    "mixed/1": StateBytes(weight=2, gradient=4, master=4, moments=8, backward=2),
    "mixed/2": StateBytes(weight=2, gradient=4, master=4, moments=8, step=4),
    "mixed/3": StateBytes(weight=2, gradient=4, master=4, moments=8, step=4),
    "fp32/0": StateBytes(weight=4, gradient=4, master=0, moments=8),
    "fp32/1": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
    "fp32/2": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
    "fp32/3": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
}
"""DeepSpeed's bytes per parameter by precision class and stage, whatever the model is made of; `traits` says where they come from."""
