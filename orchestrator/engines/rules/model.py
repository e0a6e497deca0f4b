"""Models that an engine has the parts of, but not in these sizes or together."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.megatron_parts import attentions, delta_nets
from orchestrator.engines.rules.rule import NUMBERS, SEQUENCES, Undivided, first, refused, rule
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload


@rule("seq_pos", "seq_pos: megatron/training/arguments.py:830", "model")
def positions(_: Candidate, workload: Workload) -> str | None:
    available = workload.model.architecture.max_position_embeddings
    lengths = ((name, length) for name in SEQUENCES for length in NUMBERS[name](workload.model))
    return first(f"{name}={length} is above max_position_embeddings={available}" for name, length in lengths if length > available)


ROTARY_BASE: Final = 10000
"""Base of the rotary frequencies of BertModel and T5Model, which give RotaryEmbedding no other than its default, and no scaling
(bert_model.py:118, t5_model.py:206)."""


@rule("window_kinds", "core/transformer/utils.py:451 (is_layer_window_attention); softmax_type", "model")
def window_kinds(_: Candidate, workload: Workload) -> str | None:
    a = workload.model.architecture
    found = attentions(a.each_layer())
    windows = sorted({attention.window for attention in found if attention.window})
    if len(windows) > 1:
        return f"windows of {' and '.join(map(str, windows))} tokens in one model: megatron-core has one"
    if any(attention.sinks for attention in found) and not all(attention.sinks for attention in found):
        return "sinks in some layers only: megatron-core has them in all"
    if a.mtp_num_layers and windows and found[0].window != found[-1].window:
        return "a prediction layer after windows in some layers: megatron-core gives it the window of the first layer, not the last's"
    return None


@rule("hybrid_stages", "core/ssm/mamba_block.py:172-221 of 0.16.1, core/transformer/transformer_config.py:1359-1418", "software pp",
      "single_part_layers !release.lays_out_hybrids")  # fmt: skip
def hybrid_stages(candidate: Candidate, workload: Workload) -> str | None:
    """Refuses more stages than layers; what sizes these stages may have: `Capabilities.even_between`."""
    pp, a, version = candidate.mesh.pp, workload.model.architecture, workload.cluster.software.megatron_core
    said = f"pp={pp} with {a.num_layers} layers of one part: megatron-core {version} wants a layer in every stage"
    return said if pp > a.num_layers else None


@rule("delta_kinds", "core/models/gpt/experimental_attention_variant_module_specs.py:139, attention.py:1265", "model")
def delta_kinds(_: Candidate, workload: Workload) -> str | None:
    layers, nets = workload.model.architecture.kinds_of_layers(), delta_nets(workload.model.architecture)
    if len(nets) > 1:
        return f"gated delta nets of {len(nets)} sizes in one model: megatron-core has one"
    if nets and not all(isinstance(layer.mixer, GatedDeltaNet | GroupedQueryAttention) for layer in layers):
        return "gated delta nets beside another mixer than grouped-query attention: megatron-core alternates these alone"
    if len({mixer.output_gate for mixer in attentions(layers)}) > 1:
        return "gates of attention's output in some layers only: megatron-core has them in all"
    return None


TOWERS: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Kinds of models that look at images whose tower Megatron-Bridge builds of Megatron's layers; other kinds' is transformers', undivided."""
NO_CHUNKS: Final = ("qwen3_vl", "qwen3_vl_moe")
"""Kinds of models whose providers in Megatron-Bridge keep a chunk's number to themselves (models/qwen_vl/qwen3_vl_provider.py:155 and :322;
core/transformer/transformer_layer.py:188, core_v0.19.0, asserts it). Qwen3.5's hand it on."""


UNPLANNED: Final = "tower_unplanned"


def deep_layers(candidate: Candidate, workload: Workload) -> str | None:
    """Why the layers that are given what the tower saw don't stand in the first stage; None: they do."""
    a, pp = workload.model.architecture, candidate.mesh.pp
    deep = 0 if a.vision is None else len(a.vision.deepstack_visual_indexes)
    return None if deep <= a.num_layers // pp else f"pp={pp}: {deep} layers are given what the tower saw, and must stand in the first stage"


head_width = refused("hidden_heads", "hidden_heads: megatron/training/arguments.py:814", "model", "!kv_channels",
                     Undivided("num_attention_heads", "hidden_size"))  # fmt: skip
head_groups = refused("head_groups", "core/tensor_parallel/utils.py divide(), transformer/attention.py:300", "model", "",
                      Undivided("num_query_groups", "num_attention_heads"))  # fmt: skip
POSITIONS: Final = "position_embedding={a.position_embedding}: megatron-core's {a.family} has learned_absolute, rope"
MODEL_RULES: Final = (
    positions,
    head_width,
    head_groups,
    refused("no_gqa", "bert: core/models/bert; cross attention: core/transformer/attention.py CrossAttention", "model", "!decoder grouped",
            "num_query_groups={a.query_groups} of {a.num_attention_heads} heads: megatron-core's {a.family} has no grouped queries"),
    refused("position_embedding", "models/gpt/gpt_model.py, models/bert/bert_model.py, models/T5/t5_model.py: position_embedding_type",
            "model", "",
            ("decoder position_embedding=relative", f"{POSITIONS}, none"),
            ("encoder_decoder position_embedding=none", f"{POSITIONS}, relative"),
            ("encoder !position_embedding=learned_absolute|rope", POSITIONS),
            (f"!decoder position_embedding=rope !rotary_base={ROTARY_BASE}",
             f"rotary_base={{a.rotary_base}}: megatron-core's {{a.family}} has {ROTARY_BASE}"),
            ("!decoder position_embedding=rope rope_scaling_factor",
             "rope_scaling_factor={a.rope_scaling_factor:g}: megatron-core's {a.family} has none")),
    refused("mixer_kinds", "core/models/gpt/gpt_layer_specs.py: get_gpt_decoder_layer_specs", "model", "latent_attention mixed",
            "latent attention in some layers and another mixer in others: megatron-core has one for all layers"),
    refused("latent_rope", "core/transformer/multi_latent_attention.py: rope_type", "model", "latent_attention !position_embedding=rope",
            "position_embedding={a.position_embedding}: latent attention has rotary positions of its own"),
    refused("latent_sp", "core/transformer/multi_latent_attention.py:608 (the gather of k_pos_emb sums its gradient with "
            "sequence parallelism only)", "tp sequence_parallel", "tp !sequence_parallel latent_attention",
            "tp={mesh.tp} without sequence_parallel: nothing sums the gradient of latent keys' rotary part, silently wrong"),
    window_kinds,
    refused("mamba_groups", "core/ssm/mamba_mixer.py:258", "tp", "", Undivided("tp", "mamba2.num_groups")),
    refused("mamba_cp", "core/ssm/mamba_context_parallel.py; ours: no price", "cp", "cp mamba2",
            "cp={mesh.cp} with Mamba-2 layers: Megatron-core exchanges sequence shards for their heads, which is not priced here"),
    hybrid_stages,
    refused("hybrid_chunks", "ours: Megatron-Bridge 0.6.2, provide; core/ssm/mamba_block.py:173", "vpp", "vpp single_part_layers",
            "vpp={candidate.vpp} with layers of one part: Megatron-Bridge's hybrid models have no interleaving"),
    delta_kinds,
    refused("delta_heads", "core/transformer/transformer_config.py:975", "tp", "", Undivided("tp", "gated_delta_net.num_key_heads")),
    refused("delta_norm", "core/distributed/finalize_model_grads.py:353 (norms with sequence_parallel, and those of queries and keys by "
            "name)", "tp sequence_parallel", "tp !sequence_parallel gated_delta_net",
            "tp={mesh.tp} without sequence_parallel: nothing sums the gradient of a gated delta net's norm, silently wrong"),
    refused("delta_cp", "core/transformer/transformer_config.py:983; from 0.19 ours: no price", "cp", "cp gated_delta_net",
            ("release.delta_net_divides_sequences",
             "cp={mesh.cp} with gated delta nets: Megatron-core exchanges sequence shards for their heads, which is not priced here"),
            "cp={mesh.cp} with gated delta nets: Megatron-core {software.megatron_core} has them in whole sequences alone"),
    refused("mtp_positions", "megatron/training/arguments.py:1229", "model", "mtp !position_embedding=rope|none",
            "position_embedding={a.position_embedding}: Megatron has multi-token prediction with rope and none"),
    refused("mtp_tied", "core/models/common/language_module/language_module.py:343", "pp", "pp mtp tie_embeddings",
            "pp={mesh.pp} with mtp_num_layers={a.mtp_num_layers} and tied embeddings: the last stage has the table twice, and can't name "
            "its weights"),
    refused("relative_te", "core/transformer/dot_product_attention.py:159 (attention_bias)", "model", "relative_bias !te",
            "position_embedding=relative needs Transformer Engine's attention, on GPUs: megatron-core's own takes no bias"),
    # What Megatron-Bridge's models that look at images don't have; as soon as tp is fixed, since what it does not divide has no price.
    refused("tower_tp", "Megatron-Bridge 067f987, models/qwen_vl/modelling_qwen3_vl/transformer_config.py (get_vision_model_config)", "tp",
            "vision", Undivided("tp", "the tower's num_attention_heads"), Undivided("tp", "the tower's ffn_hidden_size")),
    refused("tower", "Megatron-Bridge 067f987, models/qwen_vl/modelling_qwen3_vl/model.py", "model pp vpp", "vision",
            (f"vpp vision.model_type={'|'.join(NO_CHUNKS)}",
             "vpp={candidate.vpp} of {a.vision.model_type}: Megatron-Bridge tells its model no chunk's number, which Megatron asserts"),
            deep_layers),
    refused(UNPLANNED, "ours: what has no price of the models that Megatron-Bridge trains on images", "model cp", "vision",
            (f"!vision.model_type={'|'.join(TOWERS)}",
             f"model.vision of {{a.vision.model_type}}: Megatron-Bridge has Megatron's layers in the towers of {', '.join(TOWERS)} alone"),
            ("task=sft packing",
             "data.packing=true of {a.vision.model_type}, which looks at images: engine=megatron plans it with each sample by itself"),
            ("cp", "cp={mesh.cp} of {a.vision.model_type}: every rank of a sequence looks at all of its images, which is not priced")),
)  # fmt: skip
"""The rules of megatron-core's models."""
