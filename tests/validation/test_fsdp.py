"""Peculiarities of trainers on PyTorch's own FSDP, by their own code, and of attention on Hopper."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.cost.price import CostModel
from orchestrator.model.ops import Dispatch
from tests.validation.engines.engine import EAGER, HOPPERS_FLASH_2
from tests.validation.engines.fsdp import TRITON_ATTENTION
from tests.validation.runs import Run
from tests.validation.test_validate import only

DENSE = {
    "engine": "torchtitan FSDP2", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3", "model_name": "Llama", "num_query_groups": "16",
    "recompute": "full", "global_batch_size": "16",
}  # fmt: skip
AUTOMODEL = {**DENSE, "engine": "pytorch FSDP2 (NeMo AutoModel)"}
EXPERTS = {
    **AUTOMODEL,
    "model_name": "DeepSeek V3 671B", "num_experts": "256", "moe_router_topk": "8", "num_gpus": "64", "dp": "64", "ep": "64",
    "global_batch_size": "128",
}  # fmt: skip


def seconds(run: Run) -> float:
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    return prediction.step_time_s


def model_of(run: Run) -> CostModel:
    """The core's prices of the run."""
    return CostModel(run.workload, run.traits, Pricer(zero_shot).model(run).calibration)


def causes(run: Run) -> dict[str, float]:
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    return prediction.by_cause


def test_a_checkpoint_makes_no_product_again_that_it_ends_with() -> None:
    """Of Llama's layer the last product of the MLP, where a whole block is one checkpoint, and that of attention too, where each is one."""
    whole, parts, plain = only(DENSE, AUTOMODEL, {**DENSE, "engine": "fsdp(composer)"})
    for run, ends in ((whole, {"mlp.linear_fc2"}), (parts, {"self_attention.linear_proj", "mlp.linear_fc2"})):
        model = Pricer(zero_shot).model(run)
        (layer,) = (layer for layer in model.kinds.values() if layer.recomputable)
        assert {op.name for op in model.ends(layer)} == ends
    model = Pricer(zero_shot).model(whole)
    (stage,) = whole.stages
    early, bare = (each.sums(whole.candidate, stage.layers) for each in (model, model_of(whole)))
    fc2 = 2 * 2048 * 2 * 8192 * 2048 / (whole.cluster.gpu.peak_flops["bf16"] * model.calibration.gemm_efficiency)
    assert 8 * fc2 < bare.backward_s[0] - early.backward_s[0] < 1.2 * 8 * fc2  # the rate is reached by large products alone
    assert early.forward_s == bare.forward_s
    assert causes(whole)["bubble"] == pytest.approx(0.0, abs=1e-9), "what is saved is no idle time"
    assert not hasattr(Pricer(zero_shot).model(plain), "ends")


def test_what_nobody_computes_again_ends_no_checkpoint() -> None:
    (run,) = only({**DENSE, "recompute": "none"})
    (stage,) = run.stages
    early, bare = (each.sums(run.candidate, stage.layers) for each in (Pricer(zero_shot).model(run), model_of(run)))
    assert early.backward_s == bare.backward_s


def test_a_compiled_torchtitan_fuses_what_is_memory_bound() -> None:
    eager, compiled = only(DENSE, {**DENSE, "precision": "bf16 compile"})
    assert causes(eager)["gemm"] == causes(compiled)["gemm"]
    factors = [Pricer(zero_shot).model(run).calibration.pointwise_factor for run in (eager, compiled)]
    assert factors == [EAGER["pointwise_factor"], 1.0]
    assert seconds(compiled) < seconds(eager)


def test_attention_is_flash_attention_2_on_hopper_for_nanotron_and_torchtitan() -> None:
    """It reaches 35% of an H100's peak; on an A100 and where nobody says so what kernels of the GPU's own generation do."""
    runs = only({}, DENSE, {**DENSE, "gpu": "A100-SXM-80GB"}, {**DENSE, "engine": "InternEvo"})
    found = [run.constants(zero_shot(run)) for run in runs]
    shares = [(each.attention_efficiency, each.attention_backward_efficiency) for each in found]
    assert shares[:2] == [pytest.approx(tuple(HOPPERS_FLASH_2.values()))] * 2
    assert shares[2:] == [(each.attention_efficiency, each.attention_backward_efficiency) for each in map(zero_shot, runs[2:])]
    assert all(forward > 0.5 for forward, _ in shares[2:])


def test_attention_of_mpt_is_tritons_half_as_fast_in_backward_as_flash_attention_2() -> None:
    """On Hopper too, where both were written for Ampere."""
    composer = {**DENSE, "engine": "fsdp(composer)"}
    hopper, ampere, flash_2 = only(composer, {**composer, "gpu": "A100-SXM-80GB"}, DENSE)
    found = [run.constants(zero_shot(run)) for run in (hopper, ampere, flash_2)]
    assert found[0].attention_efficiency == pytest.approx(found[2].attention_efficiency)
    assert found[0].attention_backward_efficiency == pytest.approx(found[2].attention_backward_efficiency / 2)
    assert found[1] == zero_shot(ampere)
    assert found[1].attention_backward_efficiency == TRITON_ATTENTION["attention_backward_efficiency"]
    fitted = replace(zero_shot(hopper), attention_efficiency=0.5)
    assert hopper.constants(fitted).attention_efficiency < found[0].attention_efficiency, "a fit moves it"


def test_internevos_norms_and_residuals_are_kernels_of_their_own() -> None:
    eager, fused = only({"engine": "InternEvo"}, {"engine": "Megatron-core"})
    assert [zero_shot(run).pointwise_factor for run in (eager, fused)] == [EAGER["pointwise_factor"], 1.0]


def test_automodels_even_gate_sends_a_token_to_experts_beside_each_other() -> None:
    """Token i to the experts 8i to 8i + 7 of 256: one group of 32, two ranks of one node; a real router of 8 groups to 4."""
    fake, real = only(EXPERTS, {**EXPERTS, "engine": "NeMo", "zero_stage": "1"})
    limits = [{op.limit for run in each.model.runs for op in run.layer.ops if isinstance(op, Dispatch)} for each in (fake, real)]
    assert limits == [{(32, 1)}, {(8, 4)}]
    assert causes(fake)["ep"] < causes(real)["ep"] / 2


def test_automodel_drains_its_pipeline_behind_every_local_batch() -> None:
    row = {**AUTOMODEL, "num_layers": "16", "pp": "4", "dp": "2", "zero_stage": "1", "micro_batch_size": "1", "global_batch_size": "32"}
    whole, twice, silent = only({**row, "notes": "LBS=16"}, {**row, "notes": "LBS=4"}, row)
    bubbles = [causes(run)["bubble"] for run in (whole, twice, silent)]
    assert bubbles == pytest.approx([bubbles[0], 4 * bubbles[0], bubbles[0]], rel=0.01)
    assert seconds(twice) - seconds(whole) == pytest.approx(3 * bubbles[0], rel=0.01)
    alone, said = only({**row, "pp": "1", "dp": "8"}, {**row, "pp": "1", "dp": "8", "notes": "LBS=1"})
    assert seconds(alone) == seconds(said), "without a pipeline there is nothing to drain"


def test_automodels_page_is_read_as_its_configurations_ran() -> None:
    page = {"engine": AUTOMODEL["engine"], "recompute": "", "notes": "LBS=8"}
    large = {**EXPERTS, **page, "pp": "4", "vpp": "8", "num_gpus": "1024", "dp": "256", "zero_stage": "3", "run_id": "automodel-L19",
             "num_layers": "61", "global_batch_size": "8192", "micro_batch_size": "1"}  # fmt: skip
    dense = {**DENSE, **page, "run_id": "automodel-L25"}
    (experts,), (plain,), (other,) = (only(row) for row in (large, dense, {**dense, "run_id": "automodel-L26"}))
    strategy = experts.candidate.strategy
    assert (strategy.recompute, strategy.zero_stage, experts.candidate.vpp) == ("full", 1, 4)
    assert not experts.model.architecture.mtp_num_layers
    assert experts.fits
    prediction = Pricer(zero_shot).price(experts).prediction
    assert prediction is not None
    assert prediction.peak_memory_bytes < experts.cluster.gpu.memory, "by states and logits in 16 bits, which fp32 ones would not let fit"
    assert [(run.candidate.strategy.recompute, run.candidate.strategy.zero_stage) for run in (plain, other)] == [("full", 3), ("none", 3)]


TRL = {
    "engine": "TRL SFTTrainer (accelerate FSDP2, torch context parallel)", "task": "sft", "model_name": "Qwen3-8B", "num_layers": "36",
    "hidden_size": "4096", "num_attention_heads": "32", "num_query_groups": "8", "head_dim": "128", "ffn_hidden_size": "12288",
    "vocab_size": "151936", "seq_length": "1048576", "gpu": "H100-SXM-80GB", "gpus_per_node": "8", "num_gpus": "8", "precision": "bf16",
    "tp": "1", "pp": "1", "cp": "8", "dp": "1", "zero_stage": "3", "recompute": "full (offloaded)", "offload": "activations",
    "flash_attention": "yes", "micro_batch_size": "1", "global_batch_size": "1", "step_time_s": "380", "peak_memory_gib": "",
}  # fmt: skip


def test_a_million_tokens_of_trl_are_priced_with_the_keys_that_torch_gathers() -> None:
    """huggingface/trl, pull request 6846: Qwen3-8B on eight H100, 380 s a step and 56.2 GB a GPU, of which nobody says whether G is 2^30.
    PR 6845's 2M and 4M tokens on 16 and 32 GPUs took 696 and 1,346 s, and fitted."""
    lengths = {"1048576": ("8", 380), "2097152": ("16", 696), "4194304": ("32", 1346)}
    runs = only(*({**TRL, "seq_length": tokens, "num_gpus": gpus, "cp": gpus} for tokens, (gpus, _) in lengths.items()))
    peaks = []
    for run, (_, measured) in zip(runs, lengths.values(), strict=True):
        assert (run.candidate.strategy.cp_comm_type, run.candidate.strategy.offload_activations) == ("all_gather", True)
        prediction = Pricer(zero_shot).price(run).prediction
        assert prediction is not None
        assert 0.9 < prediction.step_time_s / measured < 1.2
        peaks.append(prediction.peak_memory_bytes)
    assert max(peaks) < runs[0].cluster.gpu.memory
    tensors = sum(run_bytes for cause, run_bytes in causes_of_memory(runs[0]).items() if cause not in ("context", "fragmentation"))
    assert 0.9 < tensors / 56.2e9 < 1.1
    assert 0.9 < tensors / (56.2 * 2**30) < 1.1


def causes_of_memory(run: Run) -> dict[str, float]:
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    return prediction.by_stage[0].memory_by_cause
