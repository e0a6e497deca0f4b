"""The stacks on megatron-core's model classes: how to build a pipeline chunk, and how to run a micro-batch through it."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import hf_weights, weights
from orchestrator.workers.batch import Batch
from orchestrator.workers.parts import Place

PADDED_LOGIT = -1e4
"""Logits of ids that exist only because the vocabulary is padded: their softmax is exactly zero in fp32, so that the loss does not
depend on the padding, which grows with tp."""

TANH_GELU = partial(F.gelu, approximate="tanh")
"""What a checkpoint of GPT-2 was trained with, where no fused kernel computes it (hf_weights.py)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """`build(config, engine, pre_process, post_process, vp_stage)` makes one chunk; `losses(chunk, batch)` runs it: the loss by token
    [b, s] on the last stage, hidden states before it."""

    build: Callable[..., torch.nn.Module]
    losses: Callable[[torch.nn.Module, Batch], torch.Tensor]


def with_types(config: type, fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a megatron-core configuration with the names of data types and of members of enumerations replaced by themselves."""
    typed = dict(fields)
    for info in dataclasses.fields(config):
        value = typed.get(info.name)
        if isinstance(value, str) and "torch.dtype" in str(info.type):
            typed[info.name] = getattr(torch, value)
        elif isinstance(value, str) and isinstance(info.type, enum.EnumMeta):
            typed[info.name] = info.type[value]
    return typed


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that engine.json calls so."""
    if name == "quick_gelu":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return quick_gelu
    if name == "squared_relu":
        from megatron.core.activations import squared_relu

        return squared_relu
    return TANH_GELU if name == "gelu_tanh" else getattr(F, name)


def transformer_config(engine: dict[str, Any], stage: int, **more: Any) -> TransformerConfig:
    """The TransformerConfig of one pipeline stage from engine.json: names of types and functions become themselves."""
    if engine["module"]["implementation"] == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        why = "the plan counts on Transformer Engine, which is not installed here: install it, or plan with it set to false"
        raise InputError("cluster.software.transformer_engine", "true", why)
    fields = engine["transformer_config"] | engine["per_stage"][stage] | more
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    fields = with_types(kind, fields)
    fields["activation_func"] = activation(fields["activation_func"])
    # perform_initialization stays on, though weights.py fills the weights afterwards: without it parameters lack `tensor_model_parallel`
    # (tensor_parallel/layers.py:160-215), and every gradient norm with tp > 1 is silently too small.
    return kind(**fields)


def complete(config: Any, plan: Plan, engine: dict[str, Any]) -> Any:
    """The TransformerConfig of Megatron's own program with what its command line has no word for: recompute by stage, relu, a checkpoint's
    GELU. `engine`: empty where there is no engine.json."""
    fields = engine.get("transformer_config", {})
    if fields:
        hf_weights.match_activation(engine, plan.run.init_from)
    if fields.get("activation_func") in ("relu", "gelu", "gelu_tanh"):
        config.activation_func = activation(fields["activation_func"])
        config.bias_activation_fusion = fields["bias_activation_fusion"]
    if plan.cluster.is_cpu:
        config.deallocate_pipeline_outputs = False  # gloo still reads what was sent
    stage = torch.distributed.get_rank() // plan.mesh.stride("pp") % plan.pp
    for name, value in engine["per_stage"][stage].items() if engine else ():
        if value is not None or name == "recompute_granularity":
            setattr(config, name, value)
    return config


def build_chunks(stack: str, config: TransformerConfig, engine: dict[str, Any]) -> list[torch.nn.Module]:
    """All chunks of this rank in the order of its virtual stages."""
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in range(vpp) if vpp else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = STACKS[stack].build(config, engine, first, last, vp_stage)
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):  # one a head, of which tp ranks have different ones; untagged, the norm counts the first's
                parameter.tensor_model_parallel = True
        chunks.append(chunk)
    return chunks


def first_weights(chunks: Sequence[torch.nn.Module], config: Any, plan: Plan) -> list[Place]:
    """Fills the chunks with what training begins with: the checkpoint's weights where the plan names one, else those of the seed, in any
    layout. Ids that pad the vocabulary are taken out of the softmax. Returns the places of the weights, where they are exported. `config`:
    TransformerConfig."""
    if plan.run.init_from:
        hf_weights.load(chunks, plan.model, Path(plan.run.init_from))
    else:
        weights.initialise(chunks, config, plan.training.seed)
    for chunk in chunks:
        if getattr(chunk, "output_layer", None) is not None:
            mask_padding(chunk.output_layer, plan.model.vocab_size)
    return weights.places(chunks) if plan.run.export_to else []


def built(plan: Plan, engine: dict[str, Any], device: torch.device) -> tuple[TransformerConfig, list[torch.nn.Module], list[Place]]:
    """(the configuration of this rank's stage, its chunks with what training begins with, the places of their weights where they are
    exported). Megatron's groups must be there. A stage frees what it has sent, but for its graph, as in Megatron's own loop: on a GPU the
    stream keeps the memory until the send is done; gloo still reads it, so that interleaved sends would carry garbage."""
    hf_weights.match_activation(engine, plan.run.init_from)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = transformer_config(engine, stage, deallocate_pipeline_outputs=plan.pp > 1 and device.type == "cuda")
    chunks = [chunk.to(device) for chunk in build_chunks(plan.model.stack, config, engine)]
    return config, chunks, first_weights(chunks, config, plan)


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The chunk without what engines put around it (DDP, Float16Module, DeepSpeed's engine)."""
    while hasattr(module, "module"):
        module = module.module
    return module


def mask_padding(output_layer: torch.nn.Module, vocab_size: int) -> None:
    """Take the ids from `vocab_size` on out of the softmax of this vocabulary-parallel output layer."""
    width = output_layer.output_size_per_partition
    real = min(max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * width), width)
    if real == width:
        return

    def hook(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        padded = torch.arange(width, device=logits.device) >= real
        return logits.masked_fill(padded, PADDED_LOGIT), bias

    output_layer.register_forward_hook(hook)


def _gpt(config: TransformerConfig, engine: dict[str, Any], first: bool, last: bool, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    te = engine["module"]["implementation"] == "transformer_engine"
    latent, norms = config.multi_latent_attention, config.normalization
    if config.num_moe_experts:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, te, normalization=norms, vp_stage=vp_stage)
    elif te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, multi_latent_attention=latent)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=norms, qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
        )
    # A head of multi-token prediction has a layer like the model's last, which may stand on another stage.
    last_layer = gpt_layer_specs.get_gpt_decoder_layer_specs(config, te, normalization=norms)[-1] if config.mtp_num_layers else None
    if latent and not te:
        from orchestrator.cpu.latent_attention import complete

        spec, last_layer = complete(spec), last_layer and complete(last_layer)
    head = gpt_layer_specs.get_gpt_mtp_block_spec(config, last_layer, te, vp_stage=vp_stage) if last_layer else None
    return GPTModel(config, spec, pre_process=first, post_process=last, vp_stage=vp_stage, mtp_block_spec=head, **engine["model"])


def packed_samples(bounds: torch.Tensor | None) -> PackedSeqParams | None:
    """The samples of one packed sequence (`context_parallel.sample_bounds`) as megatron-core's attention takes them: what pads them is a
    part of each, so that none has padding behind it, which Transformer Engine wants to be told under context parallelism."""
    if bounds is None:
        return None
    longest = int(bounds.diff().max())
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), bounds)
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **ends)


def _inputs(batch: Batch) -> dict[str, Any]:
    """The keywords of a GPTModel's pass. The mask is for the losses of multi-token prediction, which go into the gradients and not into
    what is returned."""
    packed = packed_samples(batch.get("sample_bounds"))
    return {"labels": batch["labels"], "loss_mask": batch.get("loss_mask"), "packed_seq_params": packed}


def _gpt_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["tokens"], batch["positions"], None, **_inputs(batch))


def schedule_plan(model: Any, batch: Batch) -> Any:
    """A GPTModel's forward pass as megatron-core's plan of its layers' parts."""
    return model.build_schedule_plan(batch["tokens"], batch["positions"], None, **_inputs(batch))


def _bert(config: TransformerConfig, engine: dict[str, Any], first: bool, last: bool, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel

    if engine["module"]["implementation"] == "transformer_engine":
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        spec = bert_layer_specs.bert_layer_local_spec
    return BertModel(config=config, transformer_layer_spec=spec, pre_process=first, post_process=last, vp_stage=vp_stage, **engine["model"])


def _bert_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    tokens = batch["tokens"]
    embedding = getattr(bare(model), "embedding", None)
    # Without segment embeddings megatron-core takes no segment ids (language_model_embedding.py:137).
    types = torch.zeros_like(tokens) if embedding is not None and embedding.num_tokentypes else None
    output = model(tokens, torch.ones_like(tokens), tokentype_ids=types, lm_labels=batch["labels"])
    return output[0] if isinstance(output, tuple) else output


def _t5(config: TransformerConfig, engine: dict[str, Any], first: bool, last: bool, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if not (first and last):
        raise InputError("pin.pp", config.pipeline_model_parallel_size, "megatron-core has no pipeline for t5")
    module = engine["module"]
    num_layers = module["encoder_num_layers"], module["decoder_num_layers"]
    if module["implementation"] == "transformer_engine":
        encoder = t5_spec.get_t5_encoder_with_transformer_engine_block_spec(num_layers[0])
        decoder = t5_spec.get_t5_decoder_with_transformer_engine_block_spec(num_layers[1])
    else:
        # megatron-core's own local block specs take Transformer Engine's norm for the final norm (t5_spec.py:225-248), which is None where
        # it is not installed: the model silently has no final norm.
        encoder = TransformerBlockSubmodules([t5_spec.encoder_model_with_local_spec()] * num_layers[0], layer_norm=t5_spec.LNImpl)
        decoder = TransformerBlockSubmodules([t5_spec.decoder_model_with_local_spec()] * num_layers[1], layer_norm=t5_spec.LNImpl)
    return T5Model(
        config=config,
        encoder_config=transformer_config(engine, 0, num_layers=num_layers[0]),
        transformer_encoder_layer_spec=encoder,
        transformer_decoder_layer_spec=decoder,
        **engine["model"],
    )


def _t5_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    tokens, decoder_tokens = batch["tokens"], batch["decoder_tokens"]
    (size, length), decoder_length = tokens.shape, decoder_tokens.shape[1]
    # True is hidden. Nothing of the encoder is padding; what pads the decoder stands behind all that is predicted.
    seen = torch.zeros((size, 1, length, length), dtype=torch.bool, device=tokens.device)
    causal = torch.ones((decoder_length, decoder_length), dtype=torch.bool, device=tokens.device).triu(1).expand(size, 1, -1, -1)
    cross = torch.zeros((size, 1, decoder_length, length), dtype=torch.bool, device=tokens.device)
    return model(tokens, decoder_tokens, seen, causal, cross, lm_labels=batch["labels"])


STACKS: dict[str, Stack] = {
    "decoder": Stack(build=_gpt, losses=_gpt_losses),
    "encoder": Stack(build=_bert, losses=_bert_losses),
    "encoder_decoder": Stack(build=_t5, losses=_t5_losses),
}
