"""The part that a layer lacks whose only part is a mixer, or a feed-forward (Mamba-2, Nemotron-H)."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.model.shared import Shared
from orchestrator.values import Value


class Nothing(Value, frozen=True, kw_only=True, tag="none", tag_field="kind", omit_defaults=True):
    """A part without weights, operations, norm and addition to the residual stream."""

    @property
    def label(self) -> str:
        return ""

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train layers of one part."""
        yield "single_part_layers"
