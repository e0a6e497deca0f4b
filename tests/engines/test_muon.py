"""Muon: what its rules refuse, what its buffers take beside Megatron's own layout, what scripts say of it, what its update costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hand_plans import LLAMA, LLAMA3_8B, candidate
from msgspec.structs import replace
from test_rules import RULES, workload

import orchestrator as so
from orchestrator.audit import formats
from orchestrator.cost.calibration import datasheet
from orchestrator.cost.muon import padding
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.parts.experts import Experts
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

LATER = Software(megatron_core="0.19.2")
MOE = replace(LLAMA, feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=32))


def muon(model: Any = LLAMA, software: Software = LATER, **fields: Any) -> Workload:
    return workload(model, software=software, optimizer="muon", **fields)


@pytest.mark.parametrize(
    ("given", "choices", "why"),
    [
        (muon(), {"zero_stage": 1}, None),
        (muon(software=replace(LATER, megatron_core="0.16.1")), {"overlap_grad_reduce": False}, None),
        (muon(software=replace(LATER, megatron_core="0.16.1")), {}, "overlap_grad_reduce"),
        (muon(), {"zero_stage": 1, "zero_shard_size": 4}, "zero_shard_size=4"),
        (muon(precision="fp16"), {}, "precision=fp16"),
        (muon(precision="fp32"), {"zero_stage": 1}, "precision=fp32"),
        (muon(precision="fp32"), {}, None),
        (muon(replace(MOE, add_bias_linear=True)), {"zero_stage": 1}, "experts with biases"),
        (muon(replace(MOE, add_bias_linear=True)), {}, None),
        (muon(), {"zero_stage": 1, "fp8_param_gather": True}, "fp8_param_gather"),
    ],
)
def test_the_rule_holds_by_release(given: Workload, choices: dict[str, Any], why: str | None) -> None:
    found = RULES["muon"].check(candidate(**({"dp": 8} | choices)), given)
    assert found is None if why is None else why in str(found)


def priced(given: Workload, **choices: Any) -> tuple[Any, Candidate]:
    traits = ENGINES["megatron"].traits(given.cluster.software)
    given = replace(given, model=describe(LLAMA3_8B, 128))  # at its own widths
    return CostModel(given, traits, datasheet(given.cluster, traits)), candidate(**({"dp": 8} | choices))


def test_matrices_have_one_moment_and_the_embedding_two() -> None:
    """Per parameter on each of 8 ranks of ZeRO-0: 8 bytes of fp32 weight and momentum, against Adam's 12."""
    for kind, share in (("decoder", 8 / 12), ("embedding", 1.0)):
        own, adam = (priced(given, zero_stage=0) for given in (muon(), workload(software=LATER)))
        bytes_of = [model.layer(chosen, kind, "none").optimizer_bytes for model, chosen in (own, adam)]
        assert bytes_of[0] == pytest.approx(share * bytes_of[1], rel=1e-3)


def test_the_update_is_divided_with_the_states_and_grows_with_its_iterations() -> None:
    def seconds(given: Workload, **choices: Any) -> float:
        model, chosen = priced(given, **choices)
        return float(model.layer(chosen, "decoder", "none").optimizer_s)

    whole, divided = (seconds(muon(), zero_stage=stage) for stage in (0, 1))
    assert whole / 8 <= divided < whole / 6
    assert seconds(muon(muon_num_ns_steps=10), zero_stage=0) > 1.5 * whole
    tp = {"dp": 4, "tp": 2, "sequence_parallel": True}
    by_mode = [seconds(muon(muon_tp_mode=mode), **tp) for mode in ("blockwise", "distributed", "duplicated")]
    assert by_mode == sorted(by_mode), by_mode


@dataclass
class Ddp:
    """What the layout reads of Megatron's DistributedDataParallelConfig."""

    pad_buckets_for_high_nccl_busbw: bool = False


@pytest.mark.engines
@pytest.mark.parametrize(("layers", "ranks", "bucket"), [(4, 8, 40_000), (32, 64, 40_000), (3, 64, 40_000), (32, 2, 400_000)])
def test_buffers_are_as_long_as_megatrons_own(layers: int, ranks: int, bucket: int) -> None:
    torch = pytest.importorskip("torch")
    optimizer = pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
    if not hasattr(optimizer, "_compute_per_buffer_param_layout"):
        pytest.skip("Megatron-core 0.19 lays them out")
    sizes = [384 * 256, 256 * 256, 1792 * 256, 896 * 256] * layers
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in reversed(sizes)]
    layout = optimizer._compute_per_buffer_param_layout(parameters, bucket, ranks, Ddp())
    assert layout.bucket_indices[-1][1] / sum(sizes) == pytest.approx(padding(sizes, ranks, bucket), rel=1e-3)


@pytest.mark.parametrize(("said", "stage"), [("muon", 0), ("dist_muon", 1), ("muon --use-distributed-optimizer", 1)])
def test_scripts_are_read_as_muon(said: str, stage: int) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 512"
    steps = "--micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-4 --bf16 --muon-num-ns-steps 7"
    reading = formats.read(f"torchrun pretrain_gpt.py {sizes} {steps} --optimizer {said}\n", "train.sh").reading
    assert (reading.keys["train.optimizer"], reading.keys["train.muon_num_ns_steps"], reading.setup.zero_stage) == ("muon", 7, stage)
    assert not any("Adam" in line for line in reading.assumed)


def test_an_overlap_that_its_release_lacks_is_off_unasked() -> None:
    """No plan was found, by an option that nobody had asked for."""
    words: dict[str, Any] = {"recipe": "qwen3_8b", "cluster": "dgx_h100", "gpus": 8, "train": {"optimizer": "muon"}}
    answer = so.plan(**words)
    assert not answer.plan.overlap_grad_reduce
    assert "overlap_grad_reduce=false: train.optimizer=muon is without it in megatron-core 0.16.1" in str(answer)
    with pytest.raises(NoPlanError, match="overlap_grad_reduce"):
        so.plan(**words, **{"pin.overlap_grad_reduce": True})
