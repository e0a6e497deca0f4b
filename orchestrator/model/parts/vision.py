"""An encoder of images before a decoder, as transformers 5 builds it: patches become vectors, a tower of layers mixes those of one image, a
projector makes vectors of the decoder's width of them."""

from __future__ import annotations

from math import ceil, isqrt
from typing import Final, Literal

from msgspec.structs import replace

from orchestrator.model.ops import Attention, Gemm, Op, Pointwise, Saved, Weight
from orchestrator.model.parts.attention import core_attention
from orchestrator.model.parts.part import READ, WRITE, Part, join, linear_weights, norm, norm_weights
from orchestrator.model.shared import Activation, Shared
from orchestrator.values import Value

ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "swiglu",
}
"""A tower's activation by transformers' name; the only towers with SiLU have a gate."""
Projector = Literal["linears", "pooled", "merger", "shuffled"]


class Vision(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What looks at images. Every image is of one size in a step: `Images` says how many tokens of the decoder it becomes."""

    model_type: str
    """transformers' name of the whole model's kind: llava, qwen2_5_vl, ..."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    hidden_act: str
    """transformers' name of the activation."""
    patch_size: int
    """Pixels of a patch's side."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-6
    num_channels: int = 3
    temporal_patch_size: int = 1
    """Frames of a patch; an image is repeated to fill one."""
    image_size: int | None = None
    """Pixels of an image's side; None: the tower takes images of any size."""
    patch_bias: bool = True
    class_token: bool = False
    """Whether a learned vector goes through the tower beside an image's patches."""
    num_position_embeddings: int = 0
    """Learned positions; 0: the tower has none."""
    rotary: bool = False
    entry_norm: bool = False
    """Whether patches are normed before the first layer (CLIP)."""
    final_norm: bool = False
    """Whether there is a LayerNorm behind the last layer."""
    pooling_head: bool = False
    """Whether a head pools the tower's output, which no decoder here reads (SigLIP)."""
    qkv_bias: bool = True
    qk_norm: bool = False
    """Whether queries and keys are normed over the hidden size (InternViT 6B)."""
    layer_scale: bool = False
    """Whether what attention and MLP give is multiplied by a learned vector each (InternViT)."""
    window_size: int | None = None
    """Pixels of the side of a window, in which attention stays; None: it sees the whole image."""
    fullatt_block_indexes: tuple[int, ...] = ()
    """Layers, counted from 0, whose attention sees the whole image all the same."""
    deepstack_visual_indexes: tuple[int, ...] = ()
    """Layers, counted from 0, whose output is projected too, and added in the decoder's first layers (arXiv 2406.04334)."""
    spatial_merge_size: int = 1
    """Patches a side that become one token of the decoder."""
    projector: Projector = "linears"
    """linears: two linears (LLaVA). pooled: the mean of patches that become one token, a norm, a matrix (Gemma 3). merger: a norm of each
    patch, patches joined, two linears (Qwen). shuffled: patches joined, a norm, two linears (InternVL)."""
    projector_bias: bool = True
    feature_layer: int = -1
    """The layer whose output is projected, counted as transformers lists hidden states (LLaVA: -2 is that before the last)."""
    newline: bool = False
    """Whether a learned vector ends each row of an image's tokens (LLaVA-NeXT)."""
    mrope_section: tuple[int, ...] = ()
    """Channels of a head of the decoder that turn by a token's time, row and column (Qwen); (): they are the class's own."""
    image_token_id: int = 0
    """The id in place of which a token of an image stands."""

    @property
    def image_tokens(self) -> int | None:
        """Tokens of the decoder that one image becomes; None where its size is the data's choice.

        >>> Vision(model_type="llava", num_layers=24, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096,
        ...        hidden_act="quick_gelu", patch_size=14, image_size=336).image_tokens
        576
        """
        return None if self.image_size is None else (self.image_size // self.patch_size // self.spatial_merge_size) ** 2


def part_of(kind: str) -> Literal["vision", "projector", "language"]:
    """The part of a model that looks at images which a layer of this kind is in (describe.py names them)."""
    return "projector" if kind == "projector" else "vision" if kind in ("patches", "vision", "vision_window") else "language"


PROJECTORS: Final = ("visual.merger.", "visual.deepstack_merger_list.", "multi_modal_projector.", "image_newline")
TOWERS: Final = (".visual.", "vision_tower.")


def part_of_weight(name: str) -> Literal["vision", "projector", "language"]:
    """The part that a weight of a model which looks at images is in, by its name in transformers.

    >>> part_of_weight("model.visual.blocks.0.attn.qkv.weight"), part_of_weight("model.visual.merger.ln_q.weight")
    ('vision', 'projector')
    >>> part_of_weight("lm_head.weight")
    'language'
    """
    if any(word in name for word in PROJECTORS):
        return "projector"
    return "vision" if any(word in name for word in TOWERS) else "language"


IMAGE_KEYS: Final = ("image", "path", "url")
"""Names under which a part of a chat's message may have its image itself."""


class Images(Value, frozen=True, kw_only=True):
    """The images of one sample: `count` of them, each of which becomes `tokens` tokens of the decoder."""

    count: int
    tokens: int

    def patches(self, v: Vision) -> int:
        """Patches of one image."""
        return self.tokens * v.spatial_merge_size**2

    def length(self, v: Vision) -> int:
        """Vectors of one image in the tower."""
        return self.patches(v) + v.class_token

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the tokens of one image, as near to a square as their number lets it be.

        >>> Images(count=1, tokens=256).grid, Images(count=1, tokens=200).grid
        ((16, 16), (10, 20))
        """
        rows = next(rows for rows in range(isqrt(self.tokens), 0, -1) if self.tokens % rows == 0)
        return rows, self.tokens // rows


def patches(v: Vision, tower: Shared, images: Images) -> Part:
    """Pixels of all images to vectors, with what is added to them and the norm before the first layer."""
    h, tokens = v.hidden_size, images.count * images.patches(v)
    pixels = v.num_channels * v.temporal_patch_size * v.patch_size**2
    saved = Saved(name="patch_embedding.input", elements=tokens * pixels, shard="none", for_weight=True)
    weights = [*linear_weights("patch_embedding", h, pixels, None, bias=v.patch_bias)]
    ops: list[Op] = [Gemm(name="patch_embedding", tokens=tokens, k=pixels, n=h, saves=(saved,))]
    if v.class_token:
        weights.append(Weight(name="class_embedding", shape=(h,), kind="embedding"))
    if v.num_position_embeddings:
        weights.append(Weight(name="patch_positions.weight", shape=(v.num_position_embeddings, h), kind="embedding"))
        ops.append(Pointwise(name="patch_positions", elements=tokens * h, moved=2 * READ + WRITE, shard="none"))
    found = Part(tuple(weights), tuple(ops))
    return join(found, norm("pre_layernorm", tower, images.count * images.length(v))) if v.entry_norm else found


def per_image(v: Vision, tower: Shared, images: Images, layer: Part, *, windows: bool) -> Part:
    """A layer over all images as one image, with attention inside each of them, or inside its windows."""
    length = images.length(v)
    groups = _windows(v, images) if windows else 1
    inside, whole = ceil(length / groups), replace(tower, num_attention_heads=v.num_attention_heads * images.count * groups)
    whole = replace(whole, num_query_groups=None, kv_channels=v.hidden_size // v.num_attention_heads)
    ops: list[Op] = []
    for op in layer.ops:
        if isinstance(op, Attention):
            op = core_attention("self_attention", whole, inside, inside, causal=False)
        ops.append(op)
        if v.layer_scale and isinstance(op, Gemm) and op.role in ("projection", "fc2"):
            elements = images.count * length * v.hidden_size
            kept = Saved(name=f"{op.name}.scaled", elements=elements, group="residual")
            ops.append(Pointwise(name="layer_scale", elements=elements, moved=READ + WRITE, saves=(kept,)))
    weights = [weight for weight in layer.weights if v.qkv_bias or weight.name != "self_attention.linear_qkv.bias"]
    scales = [Weight(name=name, shape=(v.hidden_size,)) for name in ("lambda_1", "lambda_2") if v.layer_scale]
    return Part((*weights, *scales), tuple(ops))


def _windows(v: Vision, images: Images) -> int:
    """Windows of one image, those at its edges included (transformers, models/qwen2_5_vl, get_vision_window_index)."""
    assert v.window_size is not None
    side = max(1, v.window_size // v.spatial_merge_size // v.patch_size)
    rows, columns = images.grid
    return ceil(rows / side) * ceil(columns / side)


def projector(v: Vision, tower: Shared, text: Shared, images: Images) -> Part:
    """What the tower gives to vectors of the decoder's width, in their places among those of the text; with the tower's last norm, and the
    projectors of layers that the decoder's first ones are given."""
    tokens, h, n = images.count * images.tokens, v.hidden_size, text.hidden_size
    joined = h * v.spatial_merge_size**2
    parts: list[Part] = []
    if v.final_norm:
        parts.append(norm("post_layernorm", replace(tower, normalization="LayerNorm"), images.count * images.length(v)))
    if v.pooling_head:
        parts.append(_pooling_head(v, tower))
    if v.projector == "pooled":
        moved = READ + WRITE / v.spatial_merge_size**2
        pooled = Pointwise(name="pooling", elements=tokens * joined, moved=moved)
        parts.append(Part(ops=(pooled,)))
        parts += [norm("projector.norm", replace(tower, normalization="RMSNorm"), tokens), _linear("projector.linear", tokens, h, n, False)]
    else:
        wide = replace(tower, hidden_size=joined)
        if v.projector == "merger":
            parts.append(norm("projector.norm", tower, images.count * images.patches(v)))
        elif v.projector == "shuffled":
            parts.append(norm("projector.norm", replace(wide, normalization="LayerNorm"), tokens))
        parts.append(_two_linears(v, "projector", tokens, joined, n))
        for index in range(len(v.deepstack_visual_indexes)):
            parts += [norm(f"deepstack.{index}.norm", wide, tokens), _two_linears(v, f"deepstack.{index}", tokens, joined, n)]
            added = Pointwise(name=f"deepstack.{index}.added", elements=tokens * n, moved=2 * READ + WRITE)
            parts.append(Part(ops=(added,)))
    if v.newline:
        parts.append(Part(weights=(Weight(name="image_newline", shape=(n,), kind="embedding"),)))
    placed = Pointwise(name="placed", elements=tokens * n, moved=READ + WRITE)
    return join(*parts, Part(ops=(placed,)))


def _linear(name: str, tokens: int, k: int, n: int, bias: bool) -> Part:
    saved = Saved(name=f"{name}.input", elements=tokens * k, shard="none")
    return Part(linear_weights(name, n, k, None, bias=bias), (Gemm(name=name, tokens=tokens, k=k, n=n, saves=(saved,)),))


def _two_linears(v: Vision, name: str, tokens: int, k: int, n: int) -> Part:
    """Two linears with GELU between; that of Qwen's merger is as wide as what it joins, any other as the decoder."""
    width = k if v.projector == "merger" else n
    kept = Saved(name=f"{name}.activation.input", elements=tokens * width, shard="none")
    act = Pointwise(name=f"{name}.activation", elements=tokens * width, moved=READ + WRITE, shard="none", saves=(kept,))
    first, second = (_linear(f"{name}.{which}", tokens, *sizes, v.projector_bias) for which, sizes in
                     (("linear_1", (k, width)), ("linear_2", (width, n))))  # fmt: skip
    return join(first, Part(ops=(act,)), second)


def _pooling_head(v: Vision, tower: Shared) -> Part:
    """The weights of SigLIP's attention of one learned query over the patches (modeling_siglip.py,
    SiglipMultiheadAttentionPoolingHead): what it computes is a vector an image, whose time is left out."""
    h, f = v.hidden_size, v.ffn_hidden_size
    weights = (
        *(Weight(name="head.probe", shape=(h,), kind="embedding"),),
        *linear_weights("head.attention.in_proj", 3 * h, h, None, bias=True),
        *linear_weights("head.attention.out_proj", h, h, None, bias=True),
        *norm_weights("head.layernorm", tower, h),
        *linear_weights("head.mlp.fc1", f, h, None, bias=True),
        *linear_weights("head.mlp.fc2", h, f, None, bias=True),
    )
    return Part(weights)
