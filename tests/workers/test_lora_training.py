"""LoRA on the deepspeed engine is peft's LoRA: the same losses, norms and gradients as peft on one process, states that only adapters have,
files that peft reads, and merged weights that give the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import write_tokenizer
from msgspec.structs import replace
from test_hf_parity import hf_plan, measure
from worker_plans import BERT, GPT, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, make_plan
from worker_pool import Pool

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.engines.hf_config import config_keywords, lora_fields, model_classes
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import Lora, trainable_parameters, with_lora
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.strategy.workload import Workload

pytestmark = pytest.mark.engines

TOLERANCE = 1e-4
LORA = Lora(rank=4)
ATTENTION = Lora(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
"""Beside experts, whose weights are no linears in transformers 5."""
CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "llama dp2 zero2": (LLAMA, {"dp": 2, "zero_stage": 2}),
    "llama dp2 zero3 checkpointing": (LLAMA, {"dp": 2, "zero_stage": 3, "recompute": ["full"]}),
    "mixtral's attention dp2 zero2": (MIXTRAL, {"dp": 2, "zero_stage": 2, "lora": ATTENTION}),
}
MORE: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "qwen3 moe's attention dp2 zero3": (QWEN3_MOE, {"dp": 2, "zero_stage": 3, "lora": ATTENTION}),
    "gpt dp2 zero1": (GPT, {"dp": 2, "zero_stage": 1}),
    "llama dp2 zero0": (LLAMA, {"dp": 2}),
    "llama dp2 zero1 checkpointing": (LLAMA, {"dp": 2, "zero_stage": 1, "recompute": ["full"]}),
    "llama dp2 zero3": (LLAMA, {"dp": 2, "zero_stage": 3}),
    "llama dp4 zero3": (LLAMA, {"dp": 4, "zero_stage": 3}),
    "llama dp2 zero3 checkpoints on the host": (LLAMA, {"dp": 2, "zero_stage": 3, "recompute": ["full"], "offload_activations": True}),
    "llama ulysses2 zero2": (LLAMA, {"cp": 2, "zero_stage": 2, "micro_batch_size": 2}),
    "llama ulysses2 dp2 zero3": (LLAMA, {"cp": 2, "dp": 2, "zero_stage": 3}),
    "llama tp2 zero0": (LLAMA, {"tp": 2}),
    "llama tp2 dp2 zero2": (LLAMA, {"tp": 2, "dp": 2, "zero_stage": 2}),
    "qwen3 q and v tp2 zero1": (QWEN3, {"tp": 2, "zero_stage": 1, "lora": Lora(rank=3, targets=("q_proj", "v_proj"))}),
    "gpt dp2 zero3": (GPT, {"dp": 2, "zero_stage": 3}),
    "bert dp2 zero2": (BERT, {"dp": 2, "zero_stage": 2}),
    "qwen3 q and v dp2 zero2": (QWEN3, {"dp": 2, "zero_stage": 2, "lora": Lora(rank=3, alpha=3.0, targets=("q_proj", "v_proj"))}),
}
ALL = CASES | MORE
LONG = (*MORE, "llama dp2 zero2")
"""Left to .ci/full: the runs that export and resume have ZeRO-2."""


def base_of(plan: Plan) -> Any:
    """transformers' model of a plan, unfilled."""
    import transformers

    config_class, model_class = model_classes(plan.model)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**config_keywords(plan.model)))


def peft_alone(plan: Plan, weights: dict[str, np.ndarray], corpus: str) -> dict[str, Any]:
    """peft on one process, from these weights (by the worker's names): losses, norms, the adapters' first gradients."""
    import peft
    import plain_transformers
    import torch

    training = plan.training
    assert training.lora is not None
    model = peft.get_peft_model(base_of(plan), peft.LoraConfig(**lora_fields(plan.model, training.lora)))
    with torch.no_grad():
        parameters = {name.removeprefix("base_model.model."): parameter for name, parameter in model.named_parameters()}
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    kwargs = {"lr": training.lr, "betas": training.betas, "eps": training.eps, "weight_decay": training.weight_decay}
    optimizer = torch.optim.AdamW(trained.values(), **kwargs)
    return plain_transformers.steps(model, replace(plan, dp=1, micro_batch_size=8, num_microbatches=1), trained, optimizer, corpus)


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in ALL])
def test_a_plan_computes_what_peft_computes_on_one_process(case: str, pool: Pool, corpus: str) -> None:
    model, fields = ALL[case]
    plan = hf_plan(model, **({"lora": LORA, "clip": 0.1, "lr": 1e-2} | fields))
    found = measure(pool, corpus, plan)
    expected = peft_alone(plan, found["weights"], corpus)
    assert any(np.abs(value).max() > 0 for name, value in expected["gradients"].items() if "lora_B" in name)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        close = TOLERANCE * max(1e-3, np.abs(gradient).max())
        np.testing.assert_allclose(found["gradients"][name], gradient, rtol=0, atol=close, err_msg=name)


@pytest.mark.full
def test_adapters_begin_as_peft_draws_them_and_the_base_as_without(pool: Pool, corpus: str) -> None:
    """A uniform up to 1 / sqrt(in) (kaiming_uniform_ with a = sqrt 5), B zero; frozen weights are those of a run without adapters."""
    found = measure(pool, corpus, hf_plan(LLAMA, dp=2, zero_stage=3, lora=Lora(rank=8), steps=1))["weights"]
    plain = measure(pool, corpus, hf_plan(LLAMA, dp=2, zero_stage=3, steps=1))["weights"]
    for name, value in found.items():
        if "lora_A" in name:
            limit = value.shape[1] ** -0.5
            assert np.abs(value).max() <= limit
            assert value.std() == pytest.approx(limit / 3**0.5, rel=0.15)
        elif "lora_B" in name:
            assert not value.any()
        else:
            np.testing.assert_array_equal(value, plain[name.replace(".base_layer", "")], err_msg=name)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_a_rank_holds_the_bytes_that_the_plan_counts_state_by_state(stage: int, pool: Pool, corpus: str) -> None:
    """In bf16 with gradients summed in fp32: frozen weights 2 bytes and nothing else; of adapters weights 2, gradients 4 (and 2 in passing
    at stage 1), master weights and moments 12."""
    ranks, lora = 2, Lora(rank=8)
    plan = hf_plan(LLAMA, dp=ranks, zero_stage=stage, precision="bf16", steps=2, lora=lora)
    spec = describe(LLAMA, plan.training.seq_length)
    trained, frozen = trainable_parameters(with_lora(hugging_face(spec), lora)), hugging_face(spec).parameters
    assert trained == LLAMA.num_layers * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # q and o, k and v, the MLP's three
    expected = {
        "frozen": frozen * 2 / (ranks if stage == 3 else 1),
        "weights": trained * 2 / (ranks if stage == 3 else 1),
        "gradients": trained * (4 / ranks if stage >= 2 else 4 + 2),
        "optimizer": trained * 12 / ranks,
    }
    for held in pool.run("hf_cases.state_bytes", ranks, to_json(plan), corpus):
        assert held == pytest.approx(expected, rel=0.02)
    cluster = replace(plan.cluster, gpu=replace(plan.cluster.gpu, peak_flops={"bf16": 1e11, "fp32": 5e10}))  # to be priced at all
    traits = ENGINES["deepspeed"].traits(cluster.software)
    costs = CostModel(Workload(model=spec, training=plan.training, cluster=cluster), traits, datasheet(cluster, traits))
    layers = [(costs.layer(plan.candidate, run.layer.kind, "none"), run.count) for run in spec.runs]
    planned = {
        "weights": sum(count * cost.weight_bytes for cost, count in layers),
        "gradients": sum(count * (cost.gradient_bytes + cost.backward_bytes) for cost, count in layers),
        "optimizer": sum(count * cost.optimizer_bytes for cost, count in layers),
    }
    assert planned == pytest.approx(
        {"weights": expected["frozen"] + expected["weights"], "gradients": expected["gradients"], "optimizer": expected["optimizer"]}
    )


DATA_PARALLEL = ({"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3})
TENSOR_PARALLEL = ({"tp": 2, "zero_stage": 1}, {"dp": 1, "tp": 2, "zero_stage": 0})


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param(LLAMA, DATA_PARALLEL, id="llama"),
        pytest.param(GPT, DATA_PARALLEL, id="gpt", marks=pytest.mark.full),
        pytest.param(LLAMA, TENSOR_PARALLEL, id="llama tp2", marks=pytest.mark.full),
    ],
)
def test_an_exported_adapter_and_merged_weights_give_the_same_logits_in_plain_transformers(
    model: Architecture, layouts: tuple[dict[str, Any], dict[str, Any]], pool: Pool, corpus: str, tmp_path: Path
) -> None:
    """From a base in transformers' format: one run exports peft's adapter, one in another layout merged weights. Both train the same."""
    import peft
    import torch
    import transformers

    lora = Lora(rank=4, targets=("q_proj", "down_proj") if model is LLAMA else ("all-linear",))
    plan = hf_plan(model, **layouts[0], lora=lora, lr=3e-2)
    torch.manual_seed(3)
    base_of(plan).save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    run = RunSettings(init_from=str(tmp_path / "base"), export_to=str(tmp_path / "adapter"))
    pool.run("train_and_save", 2, to_json(replace(plan, run=run)), corpus, str(tmp_path / "first"))
    whole = replace(run, export_to=str(tmp_path / "merged"), merge_lora=True)
    other = replace(hf_plan(model, **layouts[1], lora=lora, lr=3e-2), run=whole)
    pool.run("train_and_save", 2, to_json(other), corpus, str(tmp_path / "second"))
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    kind = transformers.AutoModelForCausalLM
    base = kind.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        untrained = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        merged = kind.from_pretrained(tmp_path / "merged")(ids).logits
    assert (adapted - untrained).abs().max() > 1e-2
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tmp_path / "base")
    assert described["task_type"] == "CAUSAL_LM", "by which peft finds the class, and what serves it the task"
    written = sorted(path.name for path in (tmp_path / "adapter").iterdir() if "token" not in path.name)
    assert written == ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2 to zero3": ({"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3}),
    "bf16 zero0 to the same": ({"dp": 2, "precision": "bf16"}, {"dp": 2, "precision": "bf16"}),
    "zero3 to zero0": ({"dp": 2, "zero_stage": 3}, {}),
    "tp2 to zero2": ({"tp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 2}),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.full if name != "zero2 to zero3" else ()) for name in RESUMED])
def test_a_resumed_run_continues_the_curve_and_keeps_no_frozen_weight(case: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    before, after = RESUMED[case]

    def run(name: str, settings: RunSettings, fields: dict[str, Any]) -> list[float]:
        plan = make_plan(LLAMA, "deepspeed", run=settings, steps=4, lr=3e-2, lora=Lora(rank=1, targets=("q_proj",)), **fields)
        return list(pool.run("train_and_save", plan.world_size, to_json(plan), corpus, str(tmp_path / name))[0])

    whole = run("first", RunSettings(save_every=2), before)
    half = tmp_path / "first" / "checkpoints" / "step_000002"
    resumed = run("second", RunSettings(resume=str(half)), after)
    np.testing.assert_allclose(resumed, whole[2:], rtol=0, atol=1e-4)
    frozen = hugging_face(describe(LLAMA, 32)).parameters
    assert sum(path.stat().st_size for path in half.rglob("*") if path.is_file() and "generators" not in path.name) < 2 * frozen
