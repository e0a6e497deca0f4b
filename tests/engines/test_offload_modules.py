"""Offload of modules is refused here where TransformerConfig of the installed release refuses it, said in its words and read back."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hand_plans import BERT, GPT, LLAMA, candidate, make_plan
from msgspec.structs import replace
from test_graph_rules import PADDED
from test_rules import LATENT_LLAMA, MIXTURE, RULES, workload

from orchestrator.audit import script
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_args import megatron_args_sh, megatron_flags
from orchestrator.engines.megatron_versions import RELEASES
from orchestrator.engines.transformer_config import recompute_modules
from orchestrator.engines.translation import environment
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.strategy.graphs import graphed_modules
from orchestrator.strategy.offloading import MODULES
from orchestrator.strategy.spec import RECOMPUTE_MODULES

OF_MIXTURE = [module for module in MODULES if module != "attn_norm"]
ALL_OF_MIXTURE = "+".join(OF_MIXTURE)


@pytest.mark.engines
def test_modules_are_refused_exactly_where_the_installed_release_refuses_them() -> None:
    """Every set of up to three modules that a model with experts has, beside recompute, and under 0.19 graphs, of which 0.16.1 asks
    nothing: there our rule refuses them by itself."""
    import megatron.core
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    software = Software(megatron_core=megatron.core.__version__)
    first = software.megatron_core.startswith("0.16")
    scope = "cuda_graph_scope" if first else "cuda_graph_modules"
    sets = [named for size in (1, 2, 3) for named in combinations(OF_MIXTURE, size)]
    differ, refused = [], 0
    graphs = [("none", None), ("local", "attn"), ("transformer_engine", "attn+moe_router"), ("local", "moe_router")]
    for named, mode, (impl, held) in product(sets, ("none", "moe_act"), [graphs[0]] if first else graphs):
        chosen = candidate(
            dp=8, ep=2, recompute=mode, offload_modules="+".join(named), cuda_graph_impl=impl, cuda_graph_modules=held
        )  # fmt: skip
        again = recompute_modules(make_plan(model=MIXTURE, ep=2, software=software), RECOMPUTE_MODULES.get(mode, ()))  # type: ignore[call-overload]
        fields: dict[str, Any] = {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "bf16": True,
            "params_dtype": torch.bfloat16,
        }
        fields |= {"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        fields |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "expert_model_parallel_size": 2,
            "moe_ffn_hidden_size": 32,
            "moe_grouped_gemm": True,
        }
        fields |= {"moe_token_dispatcher_type": "alltoall", "cuda_graph_impl": impl, scope: list(graphed_modules(chosen.strategy, MIXTURE))}
        fields |= {"fine_grained_activation_offloading": True, "offload_modules": list(named)}
        if again:
            fields |= {"recompute_granularity": "selective", "recompute_modules": again}
        try:
            TransformerConfig(**fields)
            theirs = ""
        except (AssertionError, ValueError) as error:
            theirs = str(error)
        ours = RULES["offloaded_modules"].check(chosen, described(MIXTURE, software=software))
        refused += bool(ours)
        if bool(ours) != bool(theirs):
            differ.append((named, mode, impl, held, ours, theirs))
    assert differ == []
    assert refused > 10


def described(of: Any, seq_length: int = 64, **more: Any) -> Any:
    return replace(workload(of, seq_length=seq_length, **more), model=describe(of, seq_length))


def why(of: Any = MIXTURE, modules: str = ALL_OF_MIXTURE, software: Software | None = None, **choices: Any) -> str | None:
    given = described(of, **({} if software is None else {"software": software}))
    chosen = candidate(**{"dp": 8, "offload_modules": modules, **choices})
    found: str | None = RULES["offloaded_modules"].check(chosen, given)
    return found


def test_what_keeps_nothing_or_has_no_offload_is_refused() -> None:
    assert why() is None
    assert why(LLAMA, "qkv_linear+core_attn+attn_proj") is None
    assert why(LATENT_LLAMA, "attn_norm+qkv_linear+core_attn") is None
    told = {
        "offload_modules=attn_norm does nothing": why(LLAMA, "attn_norm"),
        "offload_modules=mlp_norm does nothing": why(LLAMA, "mlp_norm"),
        "offload_modules=moe_act does nothing": why(GPT, "moe_act"),
        "with recompute=full, which keeps none of them": why(recompute="full"),
        "a core_attn that is computed again begins no offload": why(recompute="selective"),
        "keep nothing of expert_fc1, moe_act": why(recompute="mlp"),
        "only Megatron's GPTModel begins and ends an offload": why(BERT, "core_attn"),
        "needs Transformer Engine's layers": why(software=Software(transformer_engine=False)),
        "Megatron takes it beside core_attn alone": why(LLAMA, "attn_proj"),
        "0.16.1 has no offload inside of graphs": why(LLAMA, "core_attn", Software(megatron_core="0.16.1"), cuda_graph_impl="local"),
    }
    assert [said for said, found in told.items() if said not in (found or "")] == []
    later = Software(megatron_core=RELEASES[-1].version)
    whole = why(MIXTURE, "moe_act", later, cuda_graph_impl="full_iteration")
    assert "fine_grained_offloading_max_inflight_offloads" in (whole or "")
    padded = why(PADDED, "moe_act", later, cuda_graph_impl="transformer_engine", cuda_graph_modules="attn+moe")
    assert "experts that pad to a capacity aren't offloaded" in (padded or "")


def test_host_memory_holds_a_micro_batch_of_each_stage() -> None:
    long = replace(LLAMA, max_position_embeddings=2**20)
    given = described(long, 2**20)
    tokens = given.cluster.host_memory // (long.num_layers * 2 * long.hidden_size * 2)  # of which a norm's input and output are kept
    chosen = candidate(dp=8, offload_modules="qkv_linear", micro_batch_size=tokens // 2**20 + 1)
    assert "of host memory a rank" in (RULES["offloaded_modules"].check(chosen, given) or "")
    assert RULES["offloaded_modules"].check(replace(chosen, micro_batch_size=tokens // 2**20), given) is None


def test_it_is_said_with_the_variable_that_megatron_asks_for_and_read_back() -> None:
    plan = make_plan(model=LLAMA, tp=2, offload_modules="qkv_linear+core_attn")
    said = [" ".join(flag) for flag in megatron_flags(plan)]
    assert {"--fine-grained-activation-offloading", "--offload-modules qkv_linear core_attn"} <= {*said}
    assert environment(plan)["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1" not in environment(replace(plan, offload_modules=None))
    text = megatron_args_sh(plan)
    assert "NVTE_CPU_OFFLOAD_V1=1 " in text
    assert "offload of activations" in ENGINES["megatron"].translate(plan).without_worker
    line = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    reading = script.read(f"{line}--fine-grained-activation-offloading --offload-modules core_attn qkv_linear\n").reading
    assert reading.setup.offload_modules == "qkv_linear+core_attn"
    assert reading.unpriced == ()
    alone = script.read(f"{line}--offload-modules qkv_linear\n").reading
    assert alone.setup.offload_modules is None
    assert any("does nothing without fine_grained_activation_offloading" in said for said in alone.assumed)
    fused = script.read(f"{line}--fine-grained-activation-offloading --offload-modules fused_group_mlp core_attn\n").reading
    assert any("fused_group_mlp" in said for said in fused.unpriced)
