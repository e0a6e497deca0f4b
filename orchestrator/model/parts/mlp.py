"""Two linears with an activation between."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.model.ops import Enter, Exit, Gemm, Pointwise, Saved
from orchestrator.model.parts.part import READ, WRITE, Part, linear_weights
from orchestrator.model.shared import Shared
from orchestrator.values import Value


class Mlp(Value, frozen=True, kw_only=True, tag="mlp", tag_field="kind", omit_defaults=True):
    """A plain feed-forward, whose activation and biases are the architecture's."""

    ffn_hidden_size: int | None = None
    """Width between the two linears; None: the architecture's `ffn_hidden_size`."""

    @property
    def label(self) -> str:
        return ""

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train this MLP."""
        yield "mlp"

    def part(self, a: Shared, tokens: int) -> Part:
        """A gated MLP has twice the first projection and saves gate, up and their product. ReLU's backward needs only its output, which
        the second linear keeps anyway."""
        h, f = a.hidden_size, self.ffn_hidden_size or a.ffn_hidden_size
        n = 2 * f if a.gated else f
        fc1_input = Saved(name="mlp.linear_fc1.input", elements=tokens * h, group="mlp_norm")
        act_input = Saved(name="mlp.activation.input", elements=tokens * n, shard="tp", group="mlp")
        act_saves, moved = () if a.activation == "relu" else (act_input,), activation_moved(a)
        fc2_input = Saved(name="mlp.linear_fc2.input", elements=tokens * f, shard="tp", group="mlp")
        return Part(
            weights=linear_weights("mlp.linear_fc1", n, h, "column", bias=a.add_bias_linear)
            + linear_weights("mlp.linear_fc2", h, f, "row", bias=a.add_bias_linear),
            ops=(
                Enter(elements=tokens * h),
                Gemm(name="mlp.linear_fc1", role="fc1", tokens=tokens, k=h, n=n, split="column", saves=(fc1_input,)),
                Pointwise(name="mlp.activation", role="activation", elements=tokens * f, moved=moved, shard="tp", saves=act_saves),
                Gemm(name="mlp.linear_fc2", role="fc2", tokens=tokens, k=f, n=h, split="row", saves=(fc2_input,)),
                Exit(elements=tokens * h),
            ),
        )


def activation_moved(a: Shared) -> float:
    """Bytes per element of a fused activation: a gated one reads gate and up."""
    return (2 * READ if a.gated else READ) + WRITE
