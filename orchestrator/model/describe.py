"""An architecture at a sequence length as layers: one function for all models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from msgspec.structs import replace

from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.ops import Attention, Dispatch, Enter, Exchange, Exit, Gemm, Op, Pointwise, Role, Weight
from orchestrator.model.parts import ends, vision
from orchestrator.model.parts.attention import GroupedQueryAttention, cross_attention
from orchestrator.model.parts.part import Nothing, Part, join, norm, residual_add
from orchestrator.model.parts.vision import Images, Vision
from orchestrator.model.spec import Edge, LayerRun, LayerSpec, ModelSpec


def layers(a: Architecture, seq_length: int, decoder_seq_length: int | None = None, images: Images | None = None) -> ModelSpec:
    """Embedding, the pattern's layers, head. In an encoder-decoder the encoder's output rides along to every decoder layer. What looks at
    images stands between embedding and decoder, where a sample has `images`, or as if it had one of one token. Lengths are in tokens."""
    if a.stack == "encoder_decoder":
        assert decoder_seq_length is not None  # families.describe refuses it
        return _encoder_decoder(a, seq_length, decoder_seq_length)
    if a.stack == "encoder":
        runs = [LayerRun(layer=transformer_layer("encoder", a, a.common_layer, seq_length, causal=False), count=a.num_layers)]
    else:
        runs = list(_decoder_runs(a, seq_length))
    first, last = _first(a, seq_length, seq_length), _last(a, _head(a, seq_length), seq_length)
    if a.vision is None:
        return ModelSpec(architecture=a, seq_length=seq_length, runs=(first, *runs, last))
    images = images or Images(count=1, tokens=a.vision.image_tokens or 1)
    seeing = _vision_runs(a, a.vision, images, first.layer.output_elements)
    embedded = Edge(name="embedded_tokens", source="embedding", target="projector", elements=first.layer.output_elements)
    return ModelSpec(architecture=a, seq_length=seq_length, images=images, runs=(first, *seeing, *runs, last), edges=(embedded,))


def with_tower_first(model: ModelSpec) -> ModelSpec:
    """The model with what looks at images as a part of the embedding, of a pipeline whose first stage has the whole tower (Megatron-Bridge,
    models/qwen_vl/modelling_qwen3_vl): divided by tp as the text model's layers, of whole sequences and in 16 bits, never recomputed
    (transformer_config.py, get_vision_model_config). Other models are as they are."""
    seeing = [run for run in model.runs if vision.part_of(run.layer.kind) != "language"]
    if not seeing:
        return model
    first, *others = (run for run in model.runs if run not in seeing)
    each = [(f"{run.layer.kind}.{index}", run.layer) for run in seeing for index in range(run.count)]
    weights = [_weight_of_tower(name, weight) for name, layer in each for weight in layer.weights]
    ops = [op for _, layer in each for op in _ops_of_tower(layer)]
    # A frozen embedding has no backward pass, the tower or its projector beside it has one.
    layer = replace(first.layer, weights=(*first.layer.weights, *weights), ops=(*first.layer.ops, *ops), forward_only=False)
    return replace(model, runs=(replace(first, layer=layer), *others), edges=())


def _weight_of_tower(layer: str, weight: Weight) -> Weight:
    """A weight under its layer's name; a projector's two linears are divided as an MLP's, by columns and by rows."""
    split = 0 if ".linear_1." in weight.name else 1 if weight.name.endswith(".linear_2.weight") else weight.split
    return replace(weight, name=f"{layer}.{weight.name}", split=split)


def _ops_of_tower(layer: LayerSpec) -> list[Op]:
    """The operations of a layer. Those of one without a backward pass keep nothing and have none either, nor the traffic before a
    region."""
    ops = [_op_of_tower(op) for op in layer.ops]
    if not layer.forward_only:
        return ops
    return [
        replace(op, saves=(), forward_only=True)
        if isinstance(op, Gemm | Attention)
        else replace(op, saves=(), moved_backward=0.0)
        if isinstance(op, Pointwise)
        else op
        for op in ops
        if not isinstance(op, Enter)
    ]


def _op_of_tower(op: Op) -> Op:
    """An operation of a tower without sequence parallelism and FP8, whose projectors are divided as `_weight_of_tower` says."""
    if isinstance(op, Enter | Exit | Exchange | Dispatch):
        return op
    inside = op.name.endswith((".linear_2", ".activation"))
    saves = tuple(replace(one, shard="tp" if inside else "none" if one.shard == "sequence" else one.shard) for one in op.saves)
    if isinstance(op, Gemm):
        split = "column" if op.name.endswith(".linear_1") else "row" if inside else op.split
        return replace(op, saves=saves, wide=True, split=split)
    if isinstance(op, Pointwise):
        return replace(op, saves=saves, shard="tp" if inside else "none" if op.shard == "sequence" else op.shard)
    return replace(op, saves=saves)


def tower(v: Vision) -> Architecture:
    """The layers that look at images, as an architecture of their own."""
    return Architecture(
        family=v.model_type,
        name="vision",
        num_layers=v.num_layers,
        hidden_size=v.hidden_size,
        num_attention_heads=v.num_attention_heads,
        ffn_hidden_size=v.ffn_hidden_size,
        vocab_size=1,
        max_position_embeddings=1,
        activation=vision.ACTIVATIONS[v.hidden_act],
        normalization=v.normalization,
        norm_epsilon=v.norm_epsilon,
        position_embedding="rope" if v.rotary else "none",
        mixer=GroupedQueryAttention(qk_norm="hidden" if v.qk_norm else None),
    )


def _vision_runs(a: Architecture, v: Vision, images: Images, output_elements: int) -> Iterator[LayerRun]:
    """Patches, the tower's layers, and the projector, whose `output_elements` are the decoder's input."""
    seeing, elements = tower(v), images.count * images.length(v) * v.hidden_size
    yield LayerRun(layer=_spec("patches", vision.patches(v, seeing, images), 0, elements, recomputable=False), count=1)
    part = layer_parts(seeing, seeing.common_layer, images.count * images.length(v), causal=False)
    windowed = [v.window_size is not None and index not in v.fullatt_block_indexes for index in range(v.num_layers)]
    for windows, group in groupby(windowed):
        kind = "vision_window" if windows else "vision"
        layer = _spec(kind, vision.per_image(v, seeing, images, part, windows=windows), elements, elements)
        yield LayerRun(layer=layer, count=len(list(group)))
    last = vision.projector(v, seeing, a, images)
    yield LayerRun(layer=_spec("projector", last, elements, output_elements, recomputable=False), count=1)


def _encoder_decoder(a: Architecture, seq_length: int, decoder_seq_length: int) -> ModelSpec:
    elements = seq_length * a.hidden_size
    head = join(
        ends.encoder_output(a, seq_length),
        norm("decoder.final_layernorm", a, decoder_seq_length),
        # mcore's T5Model has an output bias where its head is tied (t5_model.py:62); Hugging Face's T5 has none.
        ends.vocabulary_head(a, decoder_seq_length, prefix="lm_head.output_layer", bias=a.tie_embeddings),
    )
    decoder = transformer_layer("decoder", a, a.common_layer, decoder_seq_length, causal=True, context_tokens=seq_length)
    return ModelSpec(
        architecture=a,
        seq_length=seq_length,
        decoder_seq_length=decoder_seq_length,
        runs=(
            _first(a, seq_length + decoder_seq_length, seq_length),
            LayerRun(layer=transformer_layer("encoder", a, a.common_layer, seq_length, causal=False), count=a.num_layers),
            LayerRun(layer=decoder, count=a.decoder_num_layers),
            _last(a, head, decoder_seq_length),
        ),
        edges=(Edge(name="encoder_output", source="encoder", target="decoder", elements=elements),),
    )


def _first(a: Architecture, tokens: int, output_tokens: int) -> LayerRun:
    """The embedding of `tokens`, of which `output_tokens` vectors enter the next layer. It takes token ids: nothing crosses a boundary
    before it."""
    return LayerRun(layer=_spec("embedding", ends.embedding(a, tokens), 0, output_tokens * a.hidden_size, recomputable=False), count=1)


def _last(a: Architecture, head: Part, tokens: int) -> LayerRun:
    """The head gives one loss per token, nothing to carry on."""
    return LayerRun(layer=_spec("head", head, tokens * a.hidden_size, 0, recomputable=False), count=1)


def _head(a: Architecture, tokens: int) -> Part:
    """Final norm, what comes before the vocabulary, logits and loss; layers of multi-token prediction, which use embedding and output
    matrix again."""
    final = norm("final_layernorm", a, tokens)
    if a.stack == "encoder":
        transform = ends.masked_head_transform(a, tokens)
        return join(final, transform, norm("lm_head.layer_norm", a, tokens), ends.vocabulary_head(a, tokens, bias=True))
    head = join(final, ends.vocabulary_head(a, tokens))
    if a.mtp_num_layers and not a.tie_embeddings:
        head = join(head, Part(weights=(ends.embedding_copy(a),)))
    for index in range(a.mtp_num_layers):
        name = f"mtp.layers.{index}"
        *_, last = a.each_layer()
        parts = layer_parts(a, last, tokens, causal=True)
        layer = Part(tuple(replace(weight, name=f"{name}.mtp_model_layer.{weight.name}") for weight in parts.weights), parts.ops)
        final = norm(f"{name}.final_layernorm", a, tokens)
        head = join(head, ends.prediction_entry(name, a, tokens), layer, final, Part(ops=ends.logits(a, tokens)))
    return head


def _decoder_runs(a: Architecture, tokens: int) -> Iterator[LayerRun]:
    """Kinds are called after their parts ("window128_decoder"); those that cost the same are one kind, whatever else sets them apart."""
    by_spec: dict[tuple[tuple[Weight, ...], tuple[Op, ...]], LayerSpec] = {}
    names: set[str] = set()
    found: list[LayerRun] = []
    for layer, count in a.layer_runs():
        name = "_".join(word for word in (layer.label, "decoder") if word)
        spec = transformer_layer(name, a, layer, tokens, causal=True)
        key = (spec.weights, spec.ops)
        if key not in by_spec:
            while name in names:
                name += "_"
            names.add(name)
            by_spec[key] = replace(spec, kind=name)
        spec = by_spec[key]
        if found and found[-1].layer is spec:
            found[-1] = replace(found[-1], count=found[-1].count + count)
        else:
            found.append(LayerRun(layer=spec, count=count))
    yield from found


def layer_parts(a: Architecture, layer: Layer, tokens: int, *, causal: bool, context_tokens: int = 0) -> Part:
    """Mixer, cross-attention where there is a context, feed-forward, as far as the layer has them, each with its norms and the
    addition to the residual."""
    pieces: list[tuple[str, Role, str, Part]] = []
    if not isinstance(layer.mixer, Nothing):
        pieces.append(("input_layernorm", "input_norm", "self_attn_bda", layer.mixer.part(a, tokens, causal=causal)))
    if context_tokens:
        pieces.append(("pre_cross_attn_layernorm", "norm", "cross_attn_bda", cross_attention(a, tokens, context_tokens)))
    if not isinstance(layer.feed_forward, Nothing):
        pieces.append(("pre_mlp_layernorm", "mlp_norm", "mlp_bda", layer.feed_forward.part(a, tokens)))
    parts: list[Part] = []
    for before, role, add, part in pieces:
        if a.norm_placement != "post":
            parts.append(norm(before, a, tokens, role))
        parts.append(part)
        if a.norm_placement != "pre":
            parts.append(norm(before.replace("input", "post_self_attn").replace("pre_", "post_"), a, tokens))
        parts.append(residual_add(add, a, tokens))
    return join(*parts)


def transformer_layer(kind: str, a: Architecture, layer: Layer, tokens: int, *, causal: bool, context_tokens: int = 0) -> LayerSpec:
    """One layer of `tokens` tokens; `context_tokens` above 0: with cross-attention to that many."""
    elements = tokens * a.hidden_size
    return _spec(kind, layer_parts(a, layer, tokens, causal=causal, context_tokens=context_tokens), elements, elements)


def _spec(kind: str, part: Part, input_elements: int, output_elements: int, *, recomputable: bool = True) -> LayerSpec:
    return LayerSpec(
        kind=kind,
        weights=part.weights,
        ops=part.ops,
        input_elements=input_elements,
        output_elements=output_elements,
        recomputable=recomputable,
    )
