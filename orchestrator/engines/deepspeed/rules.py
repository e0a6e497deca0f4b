"""What DeepSpeed refuses, or gets silently wrong, with Hugging Face models: AutoTP, Ulysses, hpZ."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines import hf_config as hf
from orchestrator.engines.deepspeed.experts import EXPERT_RULES, beyond_host
from orchestrator.engines.deepspeed.fine_tuning import FINE_TUNING_RULES
from orchestrator.engines.rules.model import head_groups, head_width, positions
from orchestrator.engines.rules.rule import NEVER_TRIED, SEQUENCES, Undivided, first, refused, rule
from orchestrator.engines.rules.zero import DEEPSPEED_ZERO_RULES, deepspeed_host_states, lacks_host
from orchestrator.model.hugging_face import divides_head
from orchestrator.strategy.spec import TILED, Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import ITEMSIZE

ULYSSES_CLASSES: Final = tuple(found.model for found in (hf.LLAMA, hf.QWEN2, hf.QWEN3, hf.PHI3, hf.OLMO2, hf.MIXTRAL, hf.QWEN3_MOE))
"""Ulysses' wrapper gives the heads back joined, and GPT-2's attention joins the last two dimensions once more (modeling_gpt2.py:222).
It drops masks and rebuilds causality from position ids (ulysses_sp.py, uattn_wrapper): no encoder, no window. t5's bias is not of a shard's
length."""
AUTOTP_REFUSED: Final = {
    hf.GPT2: "GPT-2, whose linears are Conv1D",
    hf.PHI3: "transformers' {hf.model}, whose projections are fused to one weight",
    hf.OLMO2: "transformers' {hf.model}, whose norm is of all heads' queries together",
    hf.MAMBA2: "transformers' {hf.model}, whose projection to gate, inputs and steps is one weight",
    hf.NEMOTRON_H: "transformers' {hf.model}, whose projection to gate, inputs and steps is one weight",
}
"""What AutoTP can't divide."""


@rule("hf_architecture", "transformers/models/*/configuration_*.py", "model", "!traced")  # which is transformers' own, or the user's
def hf_architecture(_: Candidate, workload: Workload) -> str | None:
    return hf.inexpressible(workload.model.architecture)


def nothing_divided(candidate: Candidate, workload: Workload) -> str | None:
    """Why AutoTP divides no linear of a described model; None: it divides some, or the model is a reader's."""
    traced = workload.model.architecture.traced
    if traced is None or (traced.divided and not traced.no_autotp):
        return None
    why = f"no partition of {traced.model_class} was recorded; describe it anew: python -m orchestrator.describe"
    if traced.undivided:
        whole = next((line for line in reversed(traced.undivided) if line.startswith("all linears")), traced.undivided[0])
        why = f"nothing of {traced.model_class} can be divided ({whole})"
    return f"tp={candidate.mesh.tp}: {traced.no_autotp or why}"


@rule("autotp_divides", "autotp: deepspeed/module_inject/tp_shard.py (uneven shards)", "tp")
def autotp_divides(candidate: Candidate, workload: Workload) -> str | None:
    """AutoTP would cut unevenly; then ranks wait for the widest, and our cost model does not know it."""
    tp, a = candidate.mesh.tp, workload.model.architecture
    if a.traced is not None:
        units = a.traced.tp_divides
        return f"tp={tp} does not divide {units}, of heads and widths of {a.traced.model_class} the common divisor" if units % tp else None
    wholes = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", *(("vocab_size",) if divides_head(a) else ()))
    return first(Undivided("tp", whole)(candidate, workload) for whole in wholes)


@rule("autotp_host", "autotp: deepspeed/runtime/engine.py:942-1080", "tp", "tp")
def autotp_host(candidate: Candidate, workload: Workload) -> str | None:
    """AutoTP cuts a model that each rank has built whole; without it the whole model must fit the GPU or zero.Init divides it at once."""
    lacking = beyond_host(workload)
    return f"tp={candidate.mesh.tp}: AutoTP builds the whole model in host memory first: {lacking}" if lacking else None


@rule("ulysses_family", "ulysses: deepspeed/runtime/sequence_parallel/ulysses_sp.py:560", "cp", "cp")
def ulysses_family(candidate: Candidate, workload: Workload) -> str | None:
    cp, a = candidate.mesh.cp, workload.model.architecture
    if a.traced is not None:
        return f"cp={cp}: {a.traced.model_class} can't be run under DeepSpeed's Ulysses here; {', '.join(ULYSSES_CLASSES)} can"
    model, length = hf.class_of(a).model, workload.training.seq_length
    if model not in ULYSSES_CLASSES:
        return f"cp={cp}: transformers' {model} can't be run under DeepSpeed's Ulysses; {', '.join(ULYSSES_CLASSES)} can"
    short = next((window for window in map(hf.window_of, a.each_layer()) if window is not None and window < length), None)
    seen = "tokens: Ulysses drops the mask, and every token would see all before it"
    return None if short is None else f"cp={cp} with a window of {short} {seen}"


@rule("hpz", "hpz: deepspeed/runtime/zero/partition_parameters.py:1118, utils/groups.py", "zero_shard_size zero_stage tp cp",
      "zero_shard_size zero_stage=3")  # fmt: skip
def hpz(candidate: Candidate, _: Workload) -> str | None:
    size, mesh = candidate.strategy.zero_shard_size or 0, candidate.mesh
    if mesh.tp > 1:
        return f"zero_shard_size={size} with tp={mesh.tp}: hpZ's groups are the whole world's, silently wrong with tensor parallelism"
    if mesh.cp > 1:
        return f"zero_shard_size={size} with cp={mesh.cp}: never tried under Ulysses"
    if size < 2 or mesh.world_size % size:
        return f"zero_shard_size={size} must be above 1 and divide the {mesh.world_size} ranks"
    return None


PLAIN: Final = "|".join(found.model for found in (hf.LLAMA, hf.QWEN2, hf.QWEN3))
"""Classes that AutoTP divides with adapters (separate linears with rotary positions, and no norm over a divided width), and whose MLP and
head go in pieces."""


def uneven_pieces(candidate: Candidate, workload: Workload) -> str | None:
    """Why pieces that torch.chunk would not make end in wrong gradients (TiledMLP.backward); None: a sequence divides into them."""
    tokens = workload.model.seq_length // candidate.mesh.cp
    asked = ((name, getattr(candidate.strategy, name)) for name in TILED)
    said = f"the {tokens} tokens of a sequence on a rank"
    return first(f"{name}={pieces} does not divide {said}" for name, pieces in asked if pieces < 1 or tokens % pieces)


OFFLOADED_CLASSES: Final = tuple(
    found.model for found in (hf.GPT2, hf.LLAMA, hf.QWEN2, hf.QWEN3, hf.PHI3, hf.OLMO2, hf.GEMMA3, hf.MIXTRAL, hf.BERT)
)


@rule(
    "activations_host",
    "activation offload: runtime/activation_checkpointing/offload_activations.py:153 (_empty_cpu_like)",
    "model cp dp zero_stage micro_batch_size num_microbatches offload_optimizer offload_activations",
    where="offload_activations",
)
def activations_host(candidate: Candidate, workload: Workload) -> str | None:
    """Checkpoints of all layers but the last, each of the rank's tokens x hidden size, beside what the optimizer may have there."""
    strategy, precision = candidate.strategy, workload.training.precision
    layers = [run for run in workload.model.runs if run.layer.recomputable]
    elements = sum(run.count * run.layer.input_elements for run in layers) - layers[-1].layer.input_elements
    needed = elements * candidate.micro_batch_size * ITEMSIZE["fp32" if precision == "fp32" else "bf16"] / candidate.mesh.cp
    if strategy.offload_optimizer:
        needed += deepspeed_host_states(candidate, workload)
    return lacks_host("offload_activations", needed, workload.cluster)


DEEPSPEED_RULES: Final = (
    replace(positions, engine_rule="transformers: n_positions, max_position_embeddings of the model's config"),
    replace(head_width, engine_rule="transformers/models/gpt2/modeling_gpt2.py GPT2Attention"),
    replace(head_groups, engine_rule="transformers/models/llama/modeling_llama.py repeat_kv"),
    hf_architecture,
    refused("autotp_family", "autotp: deepspeed/module_inject/auto_tp.py:300 (supported)", "tp", "tp", nothing_divided,
            ("!traced vision", "tp={mesh.tp}: AutoTP was never tried with transformers' {hf.model}, which looks at images"),
            *((f"!traced hf={of.model}", f"tp={{mesh.tp}}: AutoTP refuses {what}") for of, what in AUTOTP_REFUSED.items())),
    autotp_divides,
    autotp_host,
    refused("autotp_x", "autotp_x: deepspeed/runtime/engine.py:957", "tp cp", "tp cp",
            "tp={mesh.tp} cp={mesh.cp}: AutoTP takes the place of the mpu that Ulysses needs"),
    ulysses_family,
    refused("ulysses", "ulysses: runtime/sequence_parallel/ulysses_sp.py:143-152", "cp", "", Undivided("cp", "num_attention_heads"),
            Undivided("cp", "num_query_groups", or_multiple=True)),
    refused("ulysses_seq", "ulysses: runtime/sequence_parallel/ulysses_sp.py:707", "cp", "",
            *(Undivided("cp", length) for length in SEQUENCES)),
    hpz,
    # AutoTP takes peft's wrapper for a linear (it has a two-dimensional `weight`), so that linears with adapters are divided by name.
    refused("lora_tp", "autotp: deepspeed/module_inject/auto_tp.py:1079", "tp model", "tp lora",
            *((facts, "tp={mesh.tp} with lora.rank={lora.rank}: adapters are divided with the linears of Llama, Qwen2 and Qwen3 alone")
              for facts in ("traced", f"!hf={PLAIN}"))),
    refused("lora_hpz", NEVER_TRIED, "zero_stage zero_shard_size", "zero_shard_size lora",
            "zero_shard_size={strategy.zero_shard_size} with lora.rank={lora.rank}: never tried with frozen weights"),
    refused("lora_offload", NEVER_TRIED, "offload_optimizer", "offload_optimizer lora",
            "offload_optimizer with lora.rank={lora.rank}: never tried with frozen weights, whose states are few"),
    refused("tiles", "tiles: runtime/sequence_parallel/ulysses_sp.py:729-1050 (sequence_tiled_compute, TiledMLP)",
            "model tp cp tiled_mlp tiled_logits", "", uneven_pieces,
            *((f"{name} {facts}", f"{name}={{strategy.{name}}}{why}") for facts, why in (
                *((facts, ": pieces of the MLP and the head of Llama, Qwen2 and Qwen3 alone") for facts in ("traced", f"!hf={PLAIN}")),
                ("tp", " with tp={mesh.tp}: never tried under AutoTP"),
                ("lora", " with lora.rank={lora.rank}: never tried with adapters"),
            ) for name in TILED),
            # Its weight would be said to be ready before its embedding's gradient is there.
            ("tiled_logits tie_embeddings", "tiled_logits={strategy.tiled_logits} with tie_embeddings=true: the head's gradient would be "
             "reduced before the embedding's is added")),
    # What DeepSpeed takes away is the tensor that a layer's checkpoint keeps (CheckpointHiddenStatesOffload), and only from a GPU.
    refused("activation_offload", "activation offload: runtime/activation_checkpointing/offload_activations.py:92, 330",
            "model tp ep recompute offload_activations", "offload_activations",
            ("cpu", "offload_activations moves checkpoints out of a GPU's memory: here there is none"),
            ("!recompute=full",
             "offload_activations with recompute={strategy.recompute}: only full recompute keeps checkpoints of layers"),
            *((facts, f"offload_activations: tried with transformers' {', '.join(OFFLOADED_CLASSES)} alone")
              for facts in ("traced", f"!hf={'|'.join(OFFLOADED_CLASSES)}")),
            *((axis, "offload_activations with tp={mesh.tp} ep={mesh.ep}: never tried under AutoTP or AutoEP") for axis in ("tp", "ep"))),
    activations_host,
    refused("eight_bit_adam",
            "transformers/training_args.py: OptimizerNames.ADAMW_8BIT; bitsandbytes/optim/adamw.py, whose kernels are a GPU's", "model",
            "eight_bit cpu", "optimizer={training.optimizer} is bitsandbytes', on GPUs"),
    *EXPERT_RULES,
    *FINE_TUNING_RULES,
    *DEEPSPEED_ZERO_RULES,
    refused("offload_ulysses", NEVER_TRIED, "offload_optimizer cp", "offload_optimizer cp",
            "offload_optimizer with cp={mesh.cp}: never tried under Ulysses"),
)  # fmt: skip
"""The rules of DeepSpeed's engine on transformers' layers."""
