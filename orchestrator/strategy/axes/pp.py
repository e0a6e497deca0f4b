"""Pipeline parallelism: what crosses the border between two stages."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.model.spec import LayerSpec, ModelSpec
from orchestrator.strategy.spec import Strategy

AXIS = "pp"


def boundary_bytes(
    model: ModelSpec,
    before: Iterable[str],
    layer: LayerSpec,
    after: Iterable[str],
    strategy: Strategy,
    micro_batch_size: int,
    itemsize: int,
) -> float:
    """Bytes per micro-batch and direction into `layer`, the first of a stage: its input, and every edge that starts in a kind `before`
    and is needed by a kind `after` the border. Divided by cp, and by tp under sequence parallelism (schedules.py, get_tensor_shapes)."""
    sources, targets = set(before), set(after)
    elements = layer.input_elements + sum(edge.elements for edge in model.edges if edge.source in sources and edge.target in targets)
    mesh = strategy.mesh
    return elements * itemsize * micro_batch_size / (mesh.cp * (mesh.tp if strategy.sequence_parallel else 1))
