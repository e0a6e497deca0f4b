"""What all layers of a model share: widths, heads, vocabulary, norms, positions. Its parts are made from this alone."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from orchestrator.key import Key
from orchestrator.values import Value

Stack = Literal["decoder", "encoder", "encoder_decoder"]
Activation = Literal["gelu", "quick_gelu", "swiglu", "geglu", "reglu", "relu", "relu2", "clamped_swiglu"]
"""Activations of a feed-forward; relu2 is the square of ReLU (Primer, arXiv 2109.08668, section 4.2), reglu a ReLU with a gate (Shazeer,
arXiv 2002.05202), quick_gelu GELU's approximation x * sigmoid(1.702 x) (Hendrycks and Gimpel, arXiv 1606.08415), as CLIP has it."""
MOST_LAYERS: Final = 1_000
"""The most layers that a model may have: as many as DeepNet's (2203.00555), the deepest that was published; a search over 10,000 takes
minutes and gigabytes."""
GATED: Final = ("swiglu", "geglu", "reglu", "clamped_swiglu")
SENTINELS: Final = 100
"""Tokens that T5 adds to a vocabulary, one for each span that it leaves out (Raffel et al., arXiv 1910.10683)."""
STACKS: Final[dict[str, Stack]] = {"bert": "encoder", "t5": "encoder_decoder"}
"""Stack of layers by family; a family that is not listed is a decoder."""


class Shared(Value, frozen=True, kw_only=True):
    """The fields of an `Architecture` that hold for every layer, and what follows from them."""

    family: Annotated[str, Key("model.family", "gpt, llama, t5 or bert")]
    """The reader in model/families whose models are like this one."""
    name: Annotated[str, Key("model.name", "how the model is called")]
    num_layers: Annotated[int, Key("model.num_layers", "of the decoder (gpt, llama) or encoder (bert, t5)", low=1, high=MOST_LAYERS)]
    hidden_size: Annotated[int, Key("model.hidden_size", "width of a token's vector", low=1, high=10**9)]
    num_attention_heads: Annotated[int, Key("model.num_attention_heads", "query heads", low=1, high=10**9)]
    ffn_hidden_size: Annotated[int, Key("model.ffn_hidden_size", "width of the feed-forward", low=1, high=10**9)]
    vocab_size: Annotated[int, Key("model.vocab_size", "unpadded", low=1, high=10**9)]
    max_position_embeddings: Annotated[int, Key("model.max_position_embeddings", "longest sequence", unit="tokens", low=1, high=10**9)]
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
    """Where a layer's norms stand: before attention and MLP ("pre"), after each ("post", OLMo 2), or both (Gemma)."""
    zero_centered_norm: Annotated[bool, Key("model.zero_centered_norm", "norms multiply by 1 + weight")] = False
    position_embedding: Annotated[
        Literal["learned_absolute", "rope", "relative", "none"], Key("model.position_embedding", "how positions are told")
    ] = "learned_absolute"
    rotary_base: Annotated[int, Key("model.rotary_base", "of the rotary frequencies", low=1, high=10**12)] = 10000
    rotary_percent: Annotated[float, Key("model.rotary_percent", "share of a head's width that is rotated", above=0)] = 1.0
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
    embedding_norm: Annotated[bool, Key("model.embedding_norm", "token vectors are normed before the first layer")] = False
    logits_softcap: Annotated[float | None, Key("model.logits_softcap", "logits become softcap * tanh(logits / softcap)", above=0)] = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); None: they stay."""
    hidden_dropout: Annotated[float, Key("model.hidden_dropout", "after attention and feed-forward", low=0, below=1)] = 0.0
    attention_dropout: Annotated[float, Key("model.attention_dropout", "of the attention's weights", low=0, below=1)] = 0.0
    make_vocab_size_divisible_by: Annotated[
        int, Key("model.make_vocab_size_divisible_by", "the vocabulary is padded to a multiple of it", low=1, high=10**9)
    ] = 128
    num_token_types: Annotated[int, Key("model.num_token_types", "segment embeddings (bert)", low=0, high=10**9)] = 0
    """Number of BERT's segment embeddings; 0: the model has none."""

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
    def stretched_by(self) -> str | None:
        """How rotary frequencies are stretched; None: they are not."""
        return None if self.rope_scaling_factor is None else self.rope_scaling_type
