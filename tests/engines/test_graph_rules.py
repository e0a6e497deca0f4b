"""What CUDA graphs take is refused here exactly where TransformerConfig of the installed release refuses it, and said in its words."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hand_plans import LLAMA, candidate, make_plan
from msgspec.structs import replace
from test_rules import BUFFERED, MIXTURE, RULES, SHARED, SIX, STATES, workload

from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_args import megatron_flags
from orchestrator.engines.megatron_versions import RELEASES
from orchestrator.engines.rules import graphs
from orchestrator.engines.transformer_config import engine_fields, recompute_modules
from orchestrator.hardware.spec import Software
from orchestrator.model.architecture import Run
from orchestrator.model.families import describe
from orchestrator.model.ops import ROUTED
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.routing import times
from orchestrator.model.spec import Dispatch
from orchestrator.strategy.graphs import graphed_modules
from orchestrator.strategy.spec import RECOMPUTE_MODULES

PADDED = replace(LLAMA, feed_forward=replace(SIX, capacity_factor=1.0, pad_to_capacity=True))
DROPPING = replace(LLAMA, feed_forward=replace(SIX, capacity_factor=1.0))
HALF_DENSE = replace(LLAMA, pattern=(Run(layers=1, feed_forward=Mlp()), Run(layers=1, feed_forward=SIX)))
MODELS = {
    "dense": LLAMA, "dropout": replace(LLAMA, hidden_dropout=0.1), "attention dropout": replace(LLAMA, attention_dropout=0.1),
    "experts": MIXTURE, "padded": PADDED, "dropping": DROPPING, "half dense": HALF_DENSE,
}  # fmt: skip
MODULES = (
    None, "attn", "mlp", "attn+mlp", "moe_router", "attn+moe_router", "moe_router+moe_preprocess", "attn+moe_router+moe_preprocess",
    "mlp+moe_router", "moe", "attn+moe",
)  # fmt: skip


def grid() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, impl, modules in product(MODELS, ("local", "transformer_engine"), MODULES):
        for recompute, dispatcher, overlap in product(("none", "selective", "mlp", "full"), ("alltoall", "flex"), (False, True)):
            experts = bool(MODELS[name].experts)
            if (experts or dispatcher == "alltoall") and (experts or not overlap):
                choices = {"cuda_graph_impl": impl, "cuda_graph_modules": modules, "recompute": recompute}
                moe = {"moe_token_dispatcher_type": dispatcher, "overlap_moe_expert_parallel_comm": overlap, "ep": 2} if experts else {}
                found.append((name, choices | moe))
    return found


@pytest.mark.engines
def test_modules_are_refused_exactly_where_the_installed_release_refuses_them() -> None:
    """Over 1,500 settings; full recompute beside the overlap, and an overlap that the model has not, are other rules' (test_rules.py)."""
    import megatron.core
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    software = Software(megatron_core=megatron.core.__version__)
    checks = (graphs.modules_fit, RULES["cuda_graph_overlap"], graphs.beside_recompute)
    differ, refused = [], 0
    for name, choices in grid():
        model = MODELS[name]
        chosen, overlap = candidate(**{"dp": 8} | choices), choices.get("overlap_moe_expert_parallel_comm", False)
        modules, plan = graphed_modules(chosen.strategy, model), make_plan(model=model, software=software)
        if overlap and (choices["recompute"] in ("full", "mlp") or not modules):
            continue
        again = recompute_modules(plan, RECOMPUTE_MODULES.get(choices["recompute"], ()))
        experts = model.experts[0] if model.experts else None
        fields: dict[str, Any] = {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "bf16": True,
            "params_dtype": torch.bfloat16,
        }
        fields |= {"cuda_graph_impl": choices["cuda_graph_impl"], "attention_dropout": model.attention_dropout}
        fields |= {"hidden_dropout": model.hidden_dropout, "normalization": "RMSNorm", "add_bias_linear": False}
        scope = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"
        fields[scope] = [*modules]
        if choices["recompute"] == "full":
            fields |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
        elif again:
            fields |= {"recompute_granularity": "selective", "recompute_modules": again}
        if experts is not None:
            fields |= {"num_moe_experts": experts.num_experts, "moe_router_topk": experts.topk, "expert_model_parallel_size": 2}
            fields |= {"moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1, 0, 1] if name == "half dense" else 1}
            fields |= {"moe_token_dispatcher_type": choices["moe_token_dispatcher_type"], "overlap_moe_expert_parallel_comm": overlap}
            fields |= {"moe_expert_capacity_factor": experts.capacity_factor, "moe_pad_expert_input_to_capacity": experts.pad_to_capacity}
        try:
            TransformerConfig(**fields)
            theirs = ""
        except (AssertionError, ValueError) as error:
            theirs = str(error)
        given = workload(model, software=software)
        if theirs and not any(word in theirs.lower() for word in ("graph", "full recompute")):
            continue  # dropping tokens for another dispatcher
        ours = next((why for check in checks if (why := check.check(chosen, given))), "")
        refused += bool(ours)
        if bool(ours) != bool(theirs):
            differ.append((name, choices, ours, theirs))
    assert differ == []
    assert refused > 100


@pytest.mark.parametrize("version", [release.version for release in RELEASES])
def test_whole_steps_and_modules_are_said_in_the_words_of_the_release(version: str) -> None:
    software = Software(megatron_core=version)
    later = version != RELEASES[0].version
    scope = "cuda_graph_modules" if later else "cuda_graph_scope"

    def said(**choices: Any) -> dict[str, Any]:
        model = choices.pop("model", LLAMA)
        plan = replace(make_plan(model=model, software=software, ep=2 if model.experts else 1), **choices)
        fields = ENGINES["megatron"].translate(plan)
        assert "cuda_graph_impl" not in fields.without_worker or plan.cuda_graph_impl != "local"
        found: dict[str, Any] = engine_fields(plan, ("transformer_config", "ddp"))
        return found["transformer_config"] | {"nan": found["ddp"]["check_for_nan_in_grad"]}

    whole = said(cuda_graph_impl="full_iteration")
    assert whole["cuda_graph_impl"] == ("full_iteration" if later else "local")
    assert whole.get(scope) == (None if later else ["full_iteration"])
    assert whole["nan"] is False
    layers = said(cuda_graph_impl="transformer_engine")
    assert (layers["cuda_graph_impl"], layers.get(scope), layers["nan"]) == ("transformer_engine", None, True)
    routers = said(cuda_graph_impl="transformer_engine", model=MIXTURE)
    assert routers[scope] == ["attn", "moe_router", "moe_preprocess"]


def test_experts_of_one_size_are_replayed_with_the_whole_step() -> None:
    """HybridEP's buffers, of which 0.16.1 has none and DeepEP, before Blackwell, has none either."""
    later = Software(megatron_core="0.19.2")
    choices = {"cuda_graph_impl": "full_iteration", "moe_token_dispatcher_type": "flex", "ep": 2, "dp": 8}
    whole = candidate(**choices)
    given = workload(BUFFERED, gpu="B200", software=later)
    assert RULES["cuda_graphs"].check(whole, given) is RULES["rank_capacity"].check(whole, given) is None
    for gpu, software, dispatcher, why in (
        ("H100-SXM-80GB", later, "flex", "on H100-SXM-80GB: it is HybridEP's"),
        ("B200", later, "alltoall", "moe_token_dispatcher_type=alltoall on B200"),
        ("B200", Software(megatron_core="0.16.1"), "flex", "0.16.1 has none"),
    ):
        other = candidate(**choices | {"moe_token_dispatcher_type": dispatcher})
        assert why in (RULES["rank_capacity"].check(other, workload(BUFFERED, gpu=gpu, software=software)) or "")
    plan = make_plan(model=BUFFERED, gpu="B200", software=later, ep=2)
    flags = {
        flag: values for flag, *values in megatron_flags(replace(plan, moe_token_dispatcher_type="flex", cuda_graph_impl="full_iteration"))
    }
    assert flags["--moe-expert-rank-capacity-factor"] == ["1.5"]
    assert {"--use-transformer-engine-op-fuser", "--no-check-for-nan-in-loss-and-grad"} <= {*flags}
    assert flags["--moe-flex-dispatcher-backend"] == ["hybridep"]


def test_a_buffer_of_one_size_is_computed_whole_and_filled_by_what_is_sent() -> None:
    (layer,) = (run.layer for run in describe(BUFFERED, 64, None).runs if run.layer.recomputable)
    computed = [op.routing for op in layer.ops if op.role in (*ROUTED, "permute")]
    assert [times(routing.busiest, 3) for routing in computed if routing is not None] == [1.5] * 4
    assert [op.routing for op in layer.ops if isinstance(op, Dispatch)] == [None]


def test_unset_modules_are_all_that_can_be_a_graph() -> None:
    def modules(model: Any, **choices: Any) -> str:
        return "+".join(graphed_modules(candidate(cuda_graph_impl="transformer_engine", dp=8, **choices).strategy, model))

    assert modules(LLAMA) == modules(PADDED, ep=2) == ""
    assert modules(HALF_DENSE, ep=2) == "attn+mlp+moe_router+moe_preprocess"
    assert modules(HALF_DENSE, ep=2, overlap_moe_expert_parallel_comm=True) == "attn+moe_router+moe_preprocess"
    assert modules(DROPPING, ep=2) == "attn+moe_router"
    assert modules(replace(STATES, pattern=(Run(layers=1), Run(layers=1, feed_forward=SIX))), ep=2) == "mamba+moe_router+moe_preprocess"
    assert graphed_modules(candidate(dp=8).strategy, MIXTURE) == ()


def test_weight_gradients_are_delayed_past_a_graph_where_a_kernel_adds_them_up_in_place() -> None:
    shared = replace(LLAMA, feed_forward=SHARED)
    choices = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True, "ep": 2, "cuda_graph_impl": "transformer_engine"}
    bare, fused = Software(apex=False), Software(apex=True)
    for model, modules, software, why in (
        (MIXTURE, "attn+moe_router", bare, "needs Apex"),
        (MIXTURE, "attn+moe_router", fused, ""),
        (replace(MIXTURE, add_qkv_bias=True), "attn+moe_router", fused, "attention has biases"),
        (MIXTURE, "moe_router", bare, ""),
        (shared, "moe_router", bare, "needs Apex"),
    ):
        found = RULES["cuda_graph_overlap"].check(
            candidate(dp=8, cuda_graph_modules=modules, **choices), workload(model, software=software)
        )
        assert (found or "").endswith(why) if not why else why in (found or ""), (modules, found)


PADS_INFERENCE = "--moe-pad-experts-for-cuda-graph-inference"


@pytest.mark.parametrize("version", [release.version for release in RELEASES])
def test_experts_over_ranks_in_megatrons_own_graphs_have_the_flag_that_only_0_16_asserts(version: str) -> None:
    plan = make_plan(model=PADDED, software=Software(megatron_core=version))
    for impl, ep, said in (("local", 2, True), ("full_iteration", 2, True), ("local", 1, False), ("transformer_engine", 2, False)):
        flags = [flag for flag, *_ in megatron_flags(replace(plan, ep=ep, cuda_graph_impl=impl))]
        assert (PADS_INFERENCE in flags) == (said and version == "0.16.1"), (impl, ep)


CHECKOUT = os.environ.get("MEGATRON_LM")
OWN_CHECK = """
import contextlib, io, itertools, os, sys
from pathlib import Path
sys.path.insert(0, "tests/megatron_lm")
from thousand import Megatron
megatron = Megatron(os.environ["MEGATRON_LM"])
from hand_plans import make_plan
from msgspec.structs import replace
from test_graph_rules import MIXTURE, PADDED, PADS_INFERENCE
from orchestrator.engines.megatron_args import megatron_flags
from orchestrator.hardware.spec import Software
for model, impl, ep in itertools.product((MIXTURE, PADDED), ("none", "local", "transformer_engine", "full_iteration"), (1, 2)):
    if impl == "full_iteration" and model is MIXTURE:
        continue
    plan = replace(make_plan(model=model, software=Software(megatron_core=megatron.version)), ep=ep, cuda_graph_impl=impl)
    flags = [list(flag) for flag in megatron_flags(plan)]
    given = [flags, [flag for flag in flags if flag[0] != PADS_INFERENCE]]
    for words in given[: 1 + (given[0] != given[1])]:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                args = megatron.read([word for flag in words for word in flag], plan, {})
                megatron.transformer_config(args)
            except AssertionError as error:
                assert words is given[1] and PADS_INFERENCE in str(error), (impl, ep, error)
            else:
                assert words is given[0], (impl, ep, "took it without the flag")
print("checked", megatron.version)
"""


@pytest.mark.engines
@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_megatrons_own_check_takes_the_graphs_of_experts_over_ranks_and_none_without_the_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_CHECK], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env=os.environ | {"MEGATRON_LM": str(Path(CHECKOUT or "").resolve())},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "checked" in done.stdout
