"""The facts that define a model: embeddings, a pattern of layers in runs, and a head, independent of how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, repeat
from typing import Annotated, Final, Literal

from orchestrator.key import Key
from orchestrator.model.parts import FeedForward, Mixer
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.nothing import Nothing
from orchestrator.model.traced import Traced
from orchestrator.values import Value

Stack = Literal["decoder", "encoder", "encoder_decoder"]
Activation = Literal["gelu", "swiglu", "geglu", "relu", "relu2", "clamped_swiglu"]
"""relu2 is the square of ReLU (Primer, arXiv 2109.08668, section 4.2)."""
MOST_LAYERS: Final = 100_000
"""A plan lists its layers: more would take minutes and gigabytes, and nobody means them."""
GATED: Final = ("swiglu", "geglu", "clamped_swiglu")
STACKS: Final[dict[str, Stack]] = {"bert": "encoder", "t5": "encoder_decoder"}
"""By family; one that is not here is a decoder."""


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


class Architecture(Value, frozen=True, kw_only=True):
    """The flat fields say what all layers share, and what the common layer is: grouped-query attention and an MLP. `pattern` says which
    layers differ: its runs follow each other, over and over, until there are `num_layers` layers.

    `num_layers` counts the decoder's layers, the encoder's (bert) or the encoder's of an encoder-decoder, whose decoder has
    `decoder_num_layers`. `vocab_size` is unpadded.
    """

    family: Annotated[str, Key("model.family", "gpt, llama, t5 or bert")]
    """The reader in model/families whose models are like this one."""
    name: Annotated[str, Key("model.name", "how the model is called")]
    num_layers: Annotated[int, Key("model.num_layers", "of the decoder (gpt, llama) or encoder (bert, t5)", low=1, high=MOST_LAYERS)]
    hidden_size: Annotated[int, Key("model.hidden_size", "width of a token's vector", low=1, high=10**9)]
    num_attention_heads: Annotated[int, Key("model.num_attention_heads", "query heads", low=1, high=10**9)]
    ffn_hidden_size: Annotated[int, Key("model.ffn_hidden_size", "width of the feed-forward", low=1, high=10**9)]
    vocab_size: Annotated[int, Key("model.vocab_size", "unpadded", low=1, high=10**9)]
    max_position_embeddings: Annotated[int, Key("model.max_position_embeddings", "longest sequence", low=1, high=10**9)]
    decoder_num_layers: Annotated[int, Key("model.decoder_num_layers", "of a t5's decoder", low=0, high=MOST_LAYERS)] = 0
    num_query_groups: Annotated[int | None, Key("model.num_query_groups", "key/value heads", low=1, high=10**9)] = None
    """Key/value heads; None: as many as attention heads."""
    kv_channels: Annotated[int | None, Key("model.kv_channels", "width of one head", low=1, high=10**9)] = None
    """Width of one head; None: hidden_size / num_attention_heads."""
    activation: Annotated[Activation, Key("model.activation", "of the feed-forward")] = "gelu"
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], Key("model.normalization", "of a layer's norms")] = "LayerNorm"
    norm_epsilon: Annotated[float, Key("model.norm_epsilon", "under a norm's root", above=0)] = 1e-5
    norm_placement: Annotated[
        Literal["pre", "post", "both"],
        Key("model.norm_placement", "of a layer's norms: before attention and feed-forward, after each, or both"),
    ] = "pre"
    """Of a layer's norms: before attention and MLP, after each (OLMo 2), or both (Gemma)."""
    zero_centered_norm: Annotated[bool, Key("model.zero_centered_norm", "norms multiply by 1 + weight")] = False
    """Norms multiply by 1 + weight (Gemma)."""
    position_embedding: Annotated[
        Literal["learned_absolute", "rope", "relative", "none"], Key("model.position_embedding", "how positions are told")
    ] = "learned_absolute"
    rotary_base: Annotated[int, Key("model.rotary_base", "of the rotary frequencies", low=1, high=10**9)] = 10000
    rotary_percent: Annotated[float, Key("model.rotary_percent", "share of a head's width that is rotated", above=0)] = 1.0
    """Share of a head's width that is rotated."""
    rope_scaling_factor: Annotated[
        float | None,
        Key("model.rope_scaling_factor", "how much longer sequences are than those that the frequencies were made for", above=0),
    ] = None
    """How much longer sequences are than those that the frequencies were made for; None: no scaling."""
    rope_scaling_type: Annotated[
        Literal["llama3", "linear", "yarn", "longrope"], Key("model.rope_scaling_type", "how they are stretched")
    ] = "llama3"
    add_bias_linear: Annotated[bool, Key("model.add_bias_linear", "biases in the linear layers")] = True
    add_qkv_bias: Annotated[bool, Key("model.add_qkv_bias", "biases of query, key and value")] = False
    tie_embeddings: Annotated[bool, Key("model.tie_embeddings", "embedding and head share their weights")] = True
    embedding_scale: Annotated[bool, Key("model.embedding_scale", "token vectors are multiplied by sqrt(hidden_size)")] = False
    """Token vectors are multiplied by sqrt(hidden_size) (Gemma)."""
    logits_softcap: Annotated[float | None, Key("model.logits_softcap", "logits become softcap * tanh(logits / softcap)", above=0)] = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); None: they stay."""
    hidden_dropout: Annotated[float, Key("model.hidden_dropout", "after attention and feed-forward", low=0, below=1)] = 0.0
    attention_dropout: Annotated[float, Key("model.attention_dropout", "of the attention's weights", low=0, below=1)] = 0.0
    make_vocab_size_divisible_by: Annotated[
        int, Key("model.make_vocab_size_divisible_by", "the vocabulary is padded to a multiple of it", low=1, high=10**9)
    ] = 128
    num_token_types: Annotated[int, Key("model.num_token_types", "segment embeddings (bert)", low=0, high=10**9)] = 0
    """Segment embeddings (bert)."""
    mixer: Annotated[
        Mixer | None, Key("model.mixer", "what mixes a layer's tokens: {kind: attention, window: 4096}, {kind: latent_attention, ...}")
    ] = None
    """Of the layers that `pattern` does not say otherwise of; None: plain grouped-query attention."""
    feed_forward: Annotated[
        FeedForward | None,
        Key("model.feed_forward", "what works on each token: {kind: mlp}, {kind: experts, num_experts: 8, topk: 2, ...}"),
    ] = None
    """The same; None: an MLP of `ffn_hidden_size`."""
    pattern: Annotated[
        tuple[Run, ...],
        Key("model.pattern", "runs of layers that differ, repeated until num_layers: [{layers: 3}, {layers: 58, feed_forward: ...}]"),
    ] = ()
    mtp_num_layers: Annotated[int, Key("model.mtp_num_layers", "layers of multi-token prediction", low=0, high=MOST_LAYERS)] = 0
    """Layers of multi-token prediction at the head (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    traced: Annotated[
        Traced | None, Key("model.traced", "layers recorded from the model's own code: what model.description= reads, as JSON")
    ] = None
    """In place of all layers that the other fields would make."""

    @property
    def stack(self) -> Stack:
        """Causal layers, bidirectional ones, or an encoder and a decoder with cross-attention."""
        return STACKS.get(self.family, "decoder")

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: twice the first projection."""
        return self.activation in GATED

    @property
    def common_layer(self) -> Layer:
        """The layer where the pattern says nothing."""
        return Layer(mixer=self.mixer or GroupedQueryAttention(), feed_forward=self.feed_forward or Mlp())

    def each_layer(self) -> Iterator[Layer]:
        """The `num_layers` layers in order."""
        for layer, count in self.layer_runs():
            yield from repeat(layer, count)

    def layer_runs(self) -> list[tuple[Layer, int]]:
        """The same as runs of equal layers, with their lengths."""
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

    def kinds_of_layers(self) -> list[Layer]:
        """The different layers, in order of first appearance."""
        return list(dict.fromkeys(layer for layer, _ in self.layer_runs()))

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The different ones of its layers; none in a dense model."""
        found = (layer.feed_forward for layer in self.kinds_of_layers())
        return tuple(dict.fromkeys(part for part in found if isinstance(part, Experts)))

    @property
    def stretched_by(self) -> str | None:
        """How rotary frequencies are stretched; None: they are not."""
        return None if self.rope_scaling_factor is None else self.rope_scaling_type

    def features(self) -> tuple[str, ...]:
        """What an engine must have to compute this model, as words that capabilities use: of the stack, the layers and the ends."""
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
            ("logits_softcap", self.logits_softcap is not None),
            ("mtp", bool(self.mtp_num_layers)),
        )
        return tuple(dict.fromkeys([*found, *(word for word, used in whole if used)]))
