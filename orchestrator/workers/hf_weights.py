"""Hugging Face checkpoints and megatron-core's weights, in any layout.

A table for each kind of model says where the rows of megatron-core's global tensors (`sharded_state_dict`) stand in a Hugging Face
checkpoint. Read one way it loads: a rank reads the rows and columns that its shard holds, nothing else. Read the other way it exports:
ranks write their shards side by side, and rank 0 puts Hugging Face's tensors together from them, one at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import InputError
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan
from orchestrator.workers import parts
from orchestrator.workers.hf_files import CONFIG, KEY, Checkpoint, Rows, write_config, write_files
from orchestrator.workers.parts import WEIGHT, Parts, Place, Whole

PARTS = ".parts"
"""Folder inside an export where ranks leave their shards for rank 0."""
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""transformers' names for the tanh approximation of GELU (activations.py)."""

Gathered = Callable[[torch.nn.Parameter], Any]
"""A context in which the parameter is whole on this rank: DeepSpeed's GatheredParameters, or nothing."""


# ---------------------------------------------------------------------------------------------------------------- tables


Table = Callable[[Architecture, str, int, int], list[Rows]]
"""(architecture, key without the layers' prefix, layer, rows of the global tensor) -> where its rows stand, in order; what is missing at
the end is padding. Raises KeyError for a key that Hugging Face's model has not."""


def _qkv(a: Architecture, q: tuple[str, int], k: tuple[str, int], v: tuple[str, int], transposed: bool = False) -> list[Rows]:
    """The rows of megatron-core's linear_qkv: for each group its queries, its key, its value (attention.py, get_query_key_value_tensors).
    Each tensor by its name and the row where it begins."""
    width, per_group = a.head_dim, a.num_attention_heads // a.query_groups
    found = []
    for group in range(a.query_groups):
        for (name, start), heads in ((q, per_group), (k, 1), (v, 1)):
            begin = start + group * heads * width
            found.append(Rows(name, begin, begin + heads * width, transposed))
    return found


def _gpt(a: Architecture, key: str, layer: int, rows: int) -> list[Rows]:
    """The rows of a weight in transformers' GPT2LMHeadModel. Raises KeyError for a weight that it has not."""
    outside = {
        "embedding.word_embeddings.weight": ("transformer.wte.weight", a.vocab_size),
        "embedding.position_embeddings.weight": ("transformer.wpe.weight", rows),
        "decoder.final_layernorm.weight": ("transformer.ln_f.weight", rows),
        "decoder.final_layernorm.bias": ("transformer.ln_f.bias", rows),
        "output_layer.weight": ("lm_head.weight", a.vocab_size),
    }
    if key in outside:
        return [Rows(outside[key][0], 0, outside[key][1])]
    module, _, kind = key.rpartition(".")
    here = f"transformer.h.{layer}."
    if module == "self_attention.linear_qkv" and kind in ("weight", "bias"):
        name = f"{here}attn.c_attn.{kind}"
        return _qkv(a, (name, 0), (name, a.hidden_size), (name, 2 * a.hidden_size), transposed=kind == "weight")
    if kind.startswith("layer_norm_"):
        norm = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}[module]
        return [Rows(f"{here}{norm}.{kind.removeprefix('layer_norm_')}", 0, rows)]
    linear = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}[module]
    return [Rows(f"{here}{linear}.{kind}", 0, rows, kind == "weight")]


def _llama(a: Architecture, key: str, layer: int, rows: int) -> list[Rows]:
    """The rows of a weight in transformers' LlamaForCausalLM, and in Mistral, Qwen2, Qwen3, Phi-3, Mixtral, Qwen3-MoE, GLM-4.5 and
    DeepSeek-V3, whose names are the same or nearly. Raises KeyError for a weight that it has not."""
    outside = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", a.vocab_size),
        "decoder.final_layernorm.weight": ("model.norm.weight", rows),
        "output_layer.weight": ("lm_head.weight", a.vocab_size),
    }
    if key in outside:
        return [Rows(outside[key][0], 0, outside[key][1])]
    module, _, kind = key.rpartition(".")
    here = f"model.layers.{layer}."
    if kind == "layer_norm_weight":
        return [Rows(f"{here}{NORMS_BEFORE[module]}.weight", 0, rows)]
    if module == "self_attention.linear_qkv":
        if fused(a):
            name, q_rows, kv_rows = f"{here}self_attn.qkv_proj.{kind}", a.num_attention_heads * a.head_dim, a.query_groups * a.head_dim
            return _qkv(a, (name, 0), (name, q_rows), (name, q_rows + kv_rows))
        q, k, v = (f"{here}self_attn.{name}_proj.{kind}" for name in "qkv")
        return _qkv(a, (q, 0), (k, 0), (v, 0))
    if has_latent(a) and module in LATENT_NAMES:
        return [Rows(f"{here}self_attn.{LATENT_NAMES[module]}.weight", 0, rows)]
    if module.startswith("mlp."):
        return [Rows(f"{here}{name}", begin, end) for name, begin, end in _feed_forward(a, module, kind, rows)]
    plain = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.linear_proj": "self_attn.o_proj",
    }
    return [Rows(f"{here}{plain[module]}.{kind}", 0, rows)]


NORMS_BEFORE = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "post_attention_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_a_layernorm",
}
"""The norm in transformers that belongs to a linear of megatron-core: Transformer Engine has it in the linear, and local layers' keys say
so too."""
LATENT_NAMES = {
    "self_attention.linear_q_proj": "q_proj",
    "self_attention.linear_q_down_proj": "q_a_proj",
    "self_attention.linear_q_up_proj": "q_b_proj",
    "self_attention.linear_kv_down_proj": "kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "kv_b_proj",
    "self_attention.q_layernorm": "q_a_layernorm",
    "self_attention.kv_layernorm": "kv_a_layernorm",
}
"""transformers' names for megatron-core's modules of latent attention. Both have a head's part without positions before its rotary part,
and a head's key before its value."""


def has_latent(a: Architecture) -> bool:
    return any(isinstance(layer.mixer, LatentAttention) for layer in a.kinds_of_layers())


def _feed_forward(a: Architecture, module: str, kind: str, rows: int) -> Iterator[tuple[str, int, int]]:
    """The rows of a feed-forward's weight: (name in the layer, begin, end). A gated MLP has all of the gate, then all of the other half
    (mlp.py, apply_swiglu_sharded_factory). Experts are written one by one, as in every published checkpoint."""
    mixtral = is_mixtral(a)
    folder = "block_sparse_moe" if mixtral else "mlp"
    if module == "mlp.router":
        yield f"{folder}.gate.{'e_score_correction_bias' if kind == 'expert_bias' else kind}", 0, rows
        return
    mlp, _, linear = module.rpartition(".")
    gate_up = ("gate_up_proj",) if fused(a) else ("gate_proj", "up_proj")
    names: tuple[str, ...] = {"linear_fc1": gate_up, "linear_fc2": ("down_proj",)}[linear]
    if mlp.startswith("mlp.experts."):
        mlp = mlp.replace("mlp", folder, 1)
        if mixtral:
            names = {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}[linear]
    for name in names:
        yield f"{mlp}.{name}.{kind}", 0, rows // len(names)


def fused(a: Architecture) -> bool:
    """Whether a checkpoint has queries, keys and values as one weight, and gate and up as another (modeling_phi3.py)."""
    return a.family == "phi3"


def is_mixtral(a: Architecture) -> bool:
    """Whether transformers' model of these experts is Mixtral, whose checkpoints have names of their own: the one with softmax scores and
    without norms of queries and keys."""
    return bool(a.experts) and not {"qk_norm", "sigmoid_router"} & set(a.features())


def _bert(a: Architecture, key: str, layer: int, rows: int) -> list[Rows]:
    """The rows of a weight in transformers' MegatronBertForMaskedLM: pre-norm, as megatron-core's. (BertForMaskedLM is post-norm: another
    function.) Raises KeyError for a weight that it has not."""
    outside = {
        "embedding.word_embeddings.weight": ("bert.embeddings.word_embeddings.weight", a.vocab_size),
        "embedding.position_embeddings.weight": ("bert.embeddings.position_embeddings.weight", rows),
        "embedding.tokentype_embeddings.weight": ("bert.embeddings.token_type_embeddings.weight", rows),
        "encoder.final_layernorm.weight": ("bert.encoder.ln.weight", rows),
        "encoder.final_layernorm.bias": ("bert.encoder.ln.bias", rows),
        "lm_head.dense.weight": ("cls.predictions.transform.dense.weight", rows),
        "lm_head.dense.bias": ("cls.predictions.transform.dense.bias", rows),
        "lm_head.layer_norm.weight": ("cls.predictions.transform.LayerNorm.weight", rows),
        "lm_head.layer_norm.bias": ("cls.predictions.transform.LayerNorm.bias", rows),
        "output_layer.weight": ("cls.predictions.decoder.weight", a.vocab_size),
        "output_layer.bias": ("cls.predictions.bias", a.vocab_size),
    }
    if key in outside:
        return [Rows(outside[key][0], 0, outside[key][1])]
    module, _, kind = key.rpartition(".")
    here = f"bert.encoder.layer.{layer}."
    if kind.startswith("layer_norm_"):
        norm = {"self_attention.linear_qkv": "attention.ln", "mlp.linear_fc1": "ln"}[module]
        return [Rows(f"{here}{norm}.{kind.removeprefix('layer_norm_')}", 0, rows)]
    if module == "self_attention.linear_qkv":
        q, k, v = (f"{here}attention.self.{name}.{kind}" for name in ("query", "key", "value"))
        return _qkv(a, (q, 0), (k, 0), (v, 0))
    linear = {"self_attention.linear_proj": "attention.output", "mlp.linear_fc1": "intermediate", "mlp.linear_fc2": "output"}[module]
    return [Rows(f"{here}{linear}.dense.{kind}", 0, rows)]


def table_of(a: Architecture) -> Table:
    """Raises InputError for an encoder-decoder: megatron-core's scales its scores and has an output bias, Hugging Face's T5 does not."""
    if a.stack == "encoder_decoder":
        raise InputError(KEY, a.family, "weights of this family can't be exchanged with megatron-core", ["gpt", "llama", "bert"])
    if a.stack == "encoder":
        return _bert
    return _llama if a.position_embedding == "rope" else _gpt


LAYERS = ("decoder.layers.", "encoder.layers.")
EXPERTS = "mlp.experts.experts."
"""What megatron-core's keys call a layer's experts, whose number is their place in a stack."""


def place_in_model(key: str, index: tuple[int, ...]) -> tuple[str, int]:
    """(key without the layers' prefix and with the expert's number, layer) of megatron-core's tensor `key` at `index`. Where layers are of
    several kinds megatron-core has the layer's number in the key (transformer_block.py:866), else first in the index.

    >>> place_in_model("decoder.layers.mlp.experts.experts.linear_fc2.weight", (5, 3))
    ('mlp.experts.3.linear_fc2.weight', 5)
    >>> place_in_model("decoder.layers.5.mlp.experts.experts.linear_fc2.weight", (3,))
    ('mlp.experts.3.linear_fc2.weight', 5)
    >>> place_in_model("output_layer.weight", ())
    ('output_layer.weight', 0)
    """
    prefix = next((prefix for prefix in LAYERS if key.startswith(prefix)), None)
    if prefix is None:
        return key, 0
    short = key.removeprefix(prefix)
    number, _, rest = short.partition(".")
    layer, short, inner = (int(number), rest, index) if number.isdigit() else (index[0], short, index[1:])
    return (short.replace(EXPERTS, f"mlp.experts.{inner[0]}.") if inner else short), layer


def sources(a: Architecture, key: str, index: tuple[int, ...], rows: int) -> list[Rows]:
    """Where the rows of megatron-core's tensor `key` at `index` stand. Raises InputError."""
    table = table_of(a)
    try:
        return table(a, *place_in_model(key, index), rows)
    except KeyError:
        raise InputError(KEY, key, f"Hugging Face's model of family {a.family} has no such weight") from None


# ---------------------------------------------------------------------------------------------------------------- reading


def load(models: Sequence[torch.nn.Module], a: Architecture, folder: Path) -> None:
    """Fill every parameter of these model chunks in place from a Hugging Face checkpoint; rows that pad the vocabulary with zeros. Raises
    InputError for a tensor that is missing or of another shape."""
    from orchestrator.workers.weights import shards  # the tables are for engines without megatron-core, too

    checkpoint = Checkpoint(folder)
    with torch.no_grad():
        for shard in shards(models):
            lead = shard.prepend_axis_num
            index = tuple(shard.global_offset[:lead])
            shape, offset = shard.data.shape, shard.global_offset[lead:]
            inner_shape = tuple(shard.global_shape[lead + 1 :])
            inner = tuple(slice(begin, begin + size) for begin, size in zip(offset[1:], shape[1:], strict=True))
            first, last = offset[0], offset[0] + shape[0]
            at = 0
            for rows in sources(a, shard.key, index, shard.global_shape[lead]):
                begin, end = max(first, at), min(last, at + rows.count)
                if begin < end:
                    wanted = Rows(rows.name, rows.begin + begin - at, rows.begin + end - at, rows.transposed)
                    shard.data[begin - first : end - first].copy_(checkpoint.read(wanted, inner, inner_shape))
                at += rows.count
            if at < last:
                shard.data[max(first, at) - first :].zero_()


def match_activation(engine: dict[str, Any], folder: str | None) -> None:
    """Takes the form of GELU of the checkpoint in this folder, if there is one, in engine.json's fields. megatron-core's fused bias + GELU
    is the tanh approximation (fusions/fused_bias_gelu.py:17), unfused it is torch's exact one: the same plan computes one on a GPU and the
    other on a CPU."""
    if folder is None:
        return
    fields, path = engine["transformer_config"], Path(folder, CONFIG)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(KEY, path, f"can't be read: {error}") from None
    if fields["activation_func"] != "gelu" or fields["gated_linear_unit"]:
        return
    if config.get("activation_function", config.get("hidden_act", "gelu_new")) in TANH_GELUS:
        fields["activation_func"] = "gelu" if fields["bias_activation_fusion"] else "gelu_tanh"
    else:
        fields["bias_activation_fusion"] = False


# ---------------------------------------------------------------------------------------------------------------- writing


def export(found: Sequence[Place], plan: Plan, folder: Path, engine: dict[str, Any], gathered: Gathered) -> None:
    """Write a Hugging Face checkpoint into `folder`, which all ranks see. All ranks call this. `engine`: the content of engine.json, with
    "export"."""
    left = folder / PARTS
    snapshot = parts.snapshot(_main_shards(found, gathered), left)
    snapshot.write()
    snapshot.finish()
    if dist.get_rank() == 0:
        dtype = _join_parts(plan.model, Parts(left), folder)
        shutil.rmtree(left)
        write_config(engine["export"], _with_trained_gelu(engine), folder, dtype, plan.run)
    dist.barrier()


def _main_shards(found: Sequence[Place], gathered: Gathered) -> Iterator[tuple[Place, str, torch.Tensor]]:
    """What this rank writes. At stage 3 a collective over the data-parallel ranks, whose places are the same."""
    for place in found:
        with torch.no_grad(), gathered(place.parameter):
            if place.main:
                yield place, WEIGHT, place.of(place.parameter.detach())


def _join_parts(a: Architecture, written: Parts, folder: Path) -> torch.dtype:
    """Writes Hugging Face's tensors, each from all ranks' shards; returns the data type of the first, which is the model's: the biases that
    balance experts are fp32 in any."""
    pieces: dict[str, list[tuple[Rows, Whole, int]]] = {}
    for whole, shape in written.shapes.items():
        at = 0
        for rows in sources(a, *whole[1:], shape[0]):
            pieces.setdefault(rows.name, []).append((rows, whole, at))
            at += rows.count

    def joined(name: str) -> torch.Tensor:
        """Raises RuntimeError where rows are missing."""
        ordered = sorted(pieces[name], key=lambda piece: piece[0].begin)
        if ordered[0][0].begin or any(one[0].end != other[0].begin for one, other in pairwise(ordered)):
            raise RuntimeError(f"{name}: its rows are not all there")
        found = []
        for rows, whole, at in ordered:
            inner = written.shapes[whole][1:]
            found.append(written.read(*whole, (at, *(0 for _ in inner)), (rows.count, *inner)))
        target = torch.cat(found)
        return target.T.contiguous() if ordered[0][0].transposed else target

    like = {}
    for name, several in pieces.items():
        whole, count = several[0][1], sum(rows.count for rows, _, _ in several)
        like[name] = torch.empty((count, *written.shapes[whole][1:]), dtype=written.dtype(whole), device="meta")
    write_files(like, joined, folder)
    return next(iter(like.values())).dtype


def _with_trained_gelu(engine: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the exported config, with the form of GELU that these ranks computed."""
    keywords, trained = dict(engine["export"]["config"]), engine["transformer_config"]
    tanh = trained["activation_func"] == "gelu_tanh" or trained["bias_activation_fusion"]
    for name in ("activation_function", "hidden_act"):
        if keywords.get(name) == "gelu" and tanh and not trained["gated_linear_unit"]:
            keywords[name] = "gelu_new"
    return keywords
