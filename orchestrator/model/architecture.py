"""The facts that define a model: embeddings, a pattern of layers in runs, and a head, independent of how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import cycle, repeat
from typing import Annotated

from msgspec.structs import replace

from orchestrator.key import Key
from orchestrator.model.parts import FeedForward, Mixer
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing
from orchestrator.model.parts.vision import Vision
from orchestrator.model.shared import MOST_LAYERS, Shared
from orchestrator.model.traced import Traced
from orchestrator.values import Value


class Layer(Value, frozen=True, kw_only=True):
    """One layer: what mixes its tokens, and what works on each of them."""

    mixer: Mixer
    feed_forward: FeedForward

    @property
    def label(self) -> str:
        """What sets it apart from a layer of plain attention and a plain MLP: "latent_experts", "window128", or nothing. A layer of
        one part is called after that: "mamba2", "attention", "mlp"."""
        for part, other in ((self.mixer, self.feed_forward), (self.feed_forward, self.mixer)):
            if isinstance(other, Nothing):
                return part.label or str(part.__struct_config__.tag)
        return "_".join(word for word in (self.mixer.label, self.feed_forward.label) if word)


class Run(Value, frozen=True, kw_only=True, omit_defaults=True):
    """`layers` layers in a row. A part that is not said is the architecture's own."""

    layers: int
    mixer: Mixer | None = None
    feed_forward: FeedForward | None = None


class Architecture(Shared, frozen=True, kw_only=True, dict=True):
    """The flat fields say what all layers share, and what the common layer is: grouped-query attention and an MLP. `pattern` says which
    layers differ: its runs follow each other, over and over, until there are `num_layers` layers.

    `num_layers` counts the decoder's layers, the encoder's (bert) or the encoder's of an encoder-decoder, whose decoder has
    `decoder_num_layers`. `vocab_size` is unpadded.
    """

    mixer: Annotated[
        Mixer | None, Key("model.mixer", "what mixes a layer's tokens: {kind: attention, window: 4096}, {kind: latent_attention, ...}")
    ] = None
    """The mixer of every layer for which `pattern` names no other; None: plain grouped-query attention."""
    feed_forward: Annotated[
        FeedForward | None,
        Key("model.feed_forward", "what works on each token: {kind: mlp}, {kind: experts, num_experts: 8, topk: 2, ...}"),
    ] = None
    """The feed-forward of every layer for which `pattern` names no other; None: an MLP of `ffn_hidden_size`."""
    pattern: Annotated[
        tuple[Run, ...],
        Key("model.pattern", "runs of layers that differ, repeated until num_layers: [{layers: 3}, {layers: 58, feed_forward: ...}]"),
    ] = ()
    mtp_num_layers: Annotated[int, Key("model.mtp_num_layers", "layers of multi-token prediction", low=0, high=MOST_LAYERS)] = 0
    """Layers of multi-token prediction at the head (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    vision: Annotated[
        Vision | None, Key("model.vision", "what looks at images before the decoder, as JSON: what model.hf_config= reads")
    ] = None
    """What looks at images before the decoder; None: the model sees none."""
    traced: Annotated[
        Traced | None, Key("model.traced", "layers recorded from the model's own code: what model.description= reads, as JSON")
    ] = None
    """The layers recorded from the model's own code, which then stand in place of those that the other fields would make; None: nothing was
    recorded."""

    @property
    def common_layer(self) -> Layer:
        """The layer where the pattern says nothing."""
        return Layer(mixer=self.mixer or GroupedQueryAttention(), feed_forward=self.feed_forward or Mlp())

    def each_layer(self) -> Iterator[Layer]:
        """The `num_layers` layers in order."""
        for layer, count in self.layer_runs():
            yield from repeat(layer, count)

    def layer_runs(self) -> list[tuple[Layer, int]]:
        """The `num_layers` layers in order as runs of equal layers: (layer, how many in a row)."""
        common = self.common_layer
        unit = [(Layer(mixer=run.mixer or common.mixer, feed_forward=run.feed_forward or common.feed_forward), run.layers)
                for run in self.pattern] or [(common, self.num_layers)]  # fmt: skip
        found: list[tuple[Layer, int]] = []
        left = self.num_layers
        for layer, count in cycle(unit):
            before = found.pop()[1] if found and found[-1][0] == layer else 0
            found.append((layer, before + min(count, left)))
            left -= min(count, left)
            if not left:
                break
        return found

    def kinds_of_layers(self) -> tuple[Layer, ...]:
        """The different layers, in order of first appearance."""
        return self._kinds

    @cached_property
    def _kinds(self) -> tuple[Layer, ...]:
        return tuple(dict.fromkeys(layer for layer, _ in self.layer_runs()))

    @cached_property
    def experts(self) -> tuple[Experts, ...]:
        """The different ones of its layers; none in a dense model."""
        found = (layer.feed_forward for layer in self.kinds_of_layers())
        return tuple(dict.fromkeys(part for part in found if isinstance(part, Experts)))

    def with_experts(self, change: Callable[[Experts], Experts]) -> Architecture:
        """The architecture with what `change` makes of each of its experts in their place.

        >>> base = Architecture(family="llama", name="m", num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=8,
        ...                     vocab_size=8, max_position_embeddings=8, feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=8))
        >>> base.with_experts(lambda experts: replace(experts, topk=1)).experts[0].topk
        1
        """

        def changed(part: FeedForward | None) -> FeedForward | None:
            return change(part) if isinstance(part, Experts) else part

        pattern = tuple(replace(run, feed_forward=changed(run.feed_forward)) for run in self.pattern)
        return replace(self, feed_forward=changed(self.feed_forward), pattern=pattern)

    @property
    def why_drawn(self) -> str | None:
        """Why it is given no data, and trains on drawn batches; None: it learns from text."""
        if self.vision is not None:
            takes = f"{self.vision.model_type} takes images, which no data here have"
        elif self.traced is not None and self.traced.text_stack is None:
            takes = (
                f"{self.traced.model_class} takes {', '.join(feed.name for feed in self.traced.feeds)}, which no data here have together"
            )
        else:
            return None
        own = "a data set of your own is a few lines of a program (entry=; recipes/README.md)"
        return f"{takes}; leave data out, and its batches are drawn; {own}"

    def features(self) -> tuple[str, ...]:
        """What an engine must have to compute this model, as words that capabilities use: of the stack, the layers and the ends."""
        return self._features

    @cached_property
    def _features(self) -> tuple[str, ...]:
        if self.traced is not None:
            return self.traced.features()
        found: list[str] = []
        for layer in self.kinds_of_layers():
            found += [*layer.mixer.features(self), *layer.feed_forward.features(self)]
        whole = (
            ("encoder", self.stack == "encoder"),
            ("encoder_decoder", self.stack == "encoder_decoder"),
            ("post_norm", self.norm_placement == "post"),
            ("sandwich_norm", self.norm_placement == "both"),
            ("zero_centered_norm", self.zero_centered_norm),
            ("relative_bias", self.position_embedding == "relative"),
            ("partial_rotary", self.position_embedding == "rope" and self.rotary_percent != 1.0),
            (f"{self.rope_scaling_type}_rope", self.stretched_by is not None and "latent_yarn" not in found),
            ("clamped_swiglu", self.activation == "clamped_swiglu"),
            ("embedding_scale", self.embedding_scale),
            ("embedding_norm", self.embedding_norm),
            ("logits_softcap", self.logits_softcap is not None),
            ("mtp", bool(self.mtp_num_layers)),
            ("vision", self.vision is not None),
        )
        return tuple(dict.fromkeys([*found, *(word for word, used in whole if used)]))
