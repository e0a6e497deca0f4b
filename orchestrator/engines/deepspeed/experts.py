"""Models of experts under DeepSpeed's AutoEP: what it takes, what it gets silently wrong, and its section of the configuration."""

from __future__ import annotations

from typing import Final, get_args

from msgspec.structs import replace

from orchestrator.engines.hf_config import DEEPSEEK_V3, GLM4_MOE, MIXTRAL, QWEN3_MOE
from orchestrator.engines.rules.experts import experts, experts_fold
from orchestrator.engines.rules.rule import NEVER_TRIED, NO_BALANCE, refused, rule
from orchestrator.model.lora import linear_names
from orchestrator.model.parts.experts import BalancedOver
from orchestrator.model.spec import Architecture
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import ITEMSIZE, format_bytes

PRESETS: Final = {
    MIXTRAL.model: "mixtral",
    QWEN3_MOE.model: "qwen3_moe",
    DEEPSEEK_V3.model: "deepseek_v3",
    GLM4_MOE.model: "deepseek_v3",
}
"""AutoEP's preset by class of transformers; GLM-4.5's router is DeepSeek-V3's (modeling_glm4_moe.py), and its own name is no preset."""


def balance(a: Architecture) -> dict[str, float]:
    """What engine.json says of the model's own loss of balance (transformers, load_balancing_loss_func), which is added so many
    times; {}: it has none."""
    found = next((part.aux_loss_coeff for part in a.experts if part.score == "softmax"), 0.0)
    return {"expert_balance": found} if found else {}


def beyond_host(workload: Workload) -> str:
    """What the whole model takes of a rank's host memory, where that has less; "" where it fits."""
    needed = workload.model.parameters * ITEMSIZE["fp32" if workload.training.precision == "fp32" else "bf16"]
    have = workload.cluster.host_memory
    return f"{format_bytes(needed)} a rank of {format_bytes(have)} (cluster.host_memory)" if needed > have else ""


@rule("autoep_host", "autoep: deepspeed/moe/ep_repack.py repack_expert_weights", "ep zero_stage", "ep !zero_stage=3")
def built_in_host_memory(candidate: Candidate, workload: Workload) -> str | None:
    """AutoEP cuts a model that each rank has built whole; zero.Init at stage 3 builds partitions at once."""
    said = f"ep={candidate.mesh.ep} zero_stage={candidate.strategy.zero_stage}: AutoEP builds the whole model in host memory first"
    return f"{said}: {lacking}; zero_stage=3 does not" if (lacking := beyond_host(workload)) else None


def adapters_elsewhere(_: Candidate, workload: Workload) -> str | None:
    """Why adapters go to other linears than those of attention, which a model of experts has in every layer; None: they don't."""
    a, lora = workload.model.architecture, workload.training.lora
    assert lora is not None
    if "latent_attention" in a.features():
        return f"lora.rank={lora.rank}: adapters beside the linears of latent attention were never tried here"
    linears = linear_names(a)
    attention = (*linears["qkv"], *linears["projection"])
    if {*lora.targets} <= {*attention}:
        return None
    why = f"lora.targets={','.join(lora.targets)}: the weights of transformers' experts are no linears, which peft's adapters are for"
    return f"{why}; lora.targets={','.join(attention)} adapts attention alone, engine=megatron plans those of experts too (write=bridge)"


EXPERT_RULES: Final = (
    replace(experts, engine_rule="autoep: deepspeed/module_inject/auto_ep_config.py validate_autoep_post_detection"),
    replace(experts_fold, engine_rule="autoep: deepspeed/utils/groups.py _create_expert_and_data_parallel"),
    refused("capacity", "transformers/models/*/modeling_*.py: no capacity", "model", "experts.capacity_factor",
            "experts.capacity_factor={e.capacity_factor}: transformers' experts take every token, and AutoEP's do"),
    refused("expert_balance", "transformers/models/deepseek_v3/modeling_deepseek_v3.py: no router loss", "model",
            "experts.aux_loss_coeff",
            ("experts.score=sigmoid", "model.aux_loss_coeff={e.aux_loss_coeff}: transformers' {hf.model} has no loss that balances "
             f"experts; {NO_BALANCE} leaves it out"),
            *((f"experts.balanced_over={over}", "model.aux_loss_coeff={e.aux_loss_coeff}: transformers' losses balance experts within a "
               f"micro-batch, this model's within a {over.replace('_', ' ')}; {NO_BALANCE} leaves it out")
              for over in get_args(BalancedOver) if over != "micro_batch")),
    refused("experts_autotp",
            "autoep: deepspeed/module_inject/tp_plan_converter.py:45, auto_ep_folding.py:241; zero/stage_1_and_2.py:2682",
            "tp ep zero_stage", "tp experts",
            ("!ep",
             "tp={mesh.tp} with experts: AutoTP refuses transformers' own plan of them, and takes them beside AutoEP alone (ep above 1)"),
            ("!zero_stage=3", "tp={mesh.tp} with ep={mesh.ep} and zero_stage={strategy.zero_stage}: DeepSpeed clips by a norm without most "
             "of the experts there"),
            "tp={mesh.tp} with experts: AutoTP refuses transformers' own plan of them, and no plan of the attention alone is written here"),
    refused("autoep_class", "autoep: deepspeed/module_inject/auto_ep_presets/registry.py", "ep",
            f"ep experts !hf={'|'.join(PRESETS)}",
            "ep={mesh.ep}: AutoEP is not told here how to divide the experts of transformers' {hf.model}; of "
            f"{', '.join(PRESETS)} it is"),
    refused("autoep", "autoep: deepspeed/runtime/utils.py:413, runtime/engine.py:2220",
            "ep cp zero_stage zero_shard_size offload_optimizer", "ep",
            ("!zero_stage",
             "zero_stage=0 with ep={mesh.ep}: DeepSpeed averages norms of different experts there, silently wrong; 1 to 3 are right"),
            ("zero_stage=3 cp",
             "zero_stage=3 with ep={mesh.ep} and cp={mesh.cp}: AutoEP has stage 3 without sequence parallelism only; 1 and 2 are right"),
            ("zero_shard_size",
             "zero_shard_size={strategy.zero_shard_size} with ep={mesh.ep}: AutoEP has no second copy of divided weights"),
            ("offload_optimizer", "offload_optimizer with ep={mesh.ep}: never tried here")),
    refused("autoep_fp16", NEVER_TRIED, "ep", "ep precision=fp16",
            "ep={mesh.ep} with precision fp16: nobody has tried its loss scale with experts that ranks don't share"),
    refused("lora_experts", "peft: target_modules are linears", "model", "lora experts", adapters_elsewhere),
    refused("lora_autoep", NEVER_TRIED, "ep", "ep lora experts",
            "ep={mesh.ep} with lora.rank={lora.rank}: nobody has tried AutoEP with adapters"),
    built_in_host_memory,
)  # fmt: skip
"""The rules for models with experts."""
