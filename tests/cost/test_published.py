"""The datasheet's constants against published runs on A100: a rough check that the physics is there, not a fit.

Step times follow from the printed TFLOP/s by the printed formula, 96 B s L h^2 (1 + s/(6h) + V/(16 L h)), which counts recompute
(Narayanan et al., arXiv 2104.04473, table 1, on Selene: 8 A100 and 8 HDR ports a node; full recompute, no flash attention, no
sequence parallelism, fp16), or are printed (Korthikanti et al., arXiv 2205.05198, table 5).
"""

from __future__ import annotations

import pytest
from cost_cases import MEGATRON, UNFUSED, a100, candidate, cost_model, gpt, stages

from orchestrator.model.spec import Architecture
from orchestrator.units import TFLOPS

SEQ, VOCAB = 2048, 51200


def model(layers: int, hidden: int, heads: int) -> Architecture:
    return gpt(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=4 * hidden)


SC21 = [  # layers, hidden, heads, tp, pp, vpp, micro-batch, GPUs, global batch, TFLOP/s a GPU
    pytest.param(24, 2304, 24, 1, 1, 1, 16, 32, 512, 137, id="1.7B"),
    pytest.param(36, 4096, 32, 4, 1, 1, 16, 128, 512, 142, id="7.5B"),
    pytest.param(48, 8192, 64, 8, 2, 1, 4, 512, 1536, 138, id="39B"),
    pytest.param(80, 12288, 96, 8, 8, 1, 2, 1536, 2304, 148, id="145B"),
    pytest.param(128, 25600, 160, 8, 64, 1, 1, 3072, 3072, 163, id="1T"),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "tp", "pp", "vpp", "mbs", "gpus", "batch", "tflops"), SC21)
def test_the_sc21_table_is_priced_within_15_percent_without_fitting(
    layers: int, hidden: int, heads: int, tp: int, pp: int, vpp: int, mbs: int, gpus: int, batch: int, tflops: float
) -> None:
    dp = gpus // (tp * pp)
    cost = cost_model(model(layers, hidden, heads), cluster=a100(gpus), traits=UNFUSED, precision="fp16", global_batch_size=batch)
    cand = candidate(tp=tp, pp=pp, dp=dp, vpp=vpp, micro_batch_size=mbs, num_microbatches=batch // (dp * mbs), recompute="full")
    predicted = cost.score(cand, stages(cost.model, [layers // (pp * vpp)] * (pp * vpp), "full", vpp))[0]
    flops = 96 * batch * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden))
    assert predicted == pytest.approx(flops / (gpus * tflops * TFLOPS), rel=0.15)


KORTHIKANTI = [  # layers, hidden, heads, pp, vpp, batch, micro-batch, seconds with full recompute, with sequence parallelism and selective
    pytest.param(48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10, id="22B"),
    pytest.param(105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83, id="530B"),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "pp", "vpp", "batch", "mbs", "full_s", "selective_s"), KORTHIKANTI)
def test_selective_recompute_with_sequence_parallelism_gains_what_was_measured(
    layers: int, hidden: int, heads: int, pp: int, vpp: int, batch: int, mbs: int, full_s: float, selective_s: float
) -> None:
    cost = cost_model(model(layers, hidden, heads), cluster=a100(8 * pp), traits=UNFUSED, precision="fp16", global_batch_size=batch)
    shape = {"tp": 8, "pp": pp, "vpp": vpp, "micro_batch_size": mbs, "num_microbatches": batch // mbs}
    counts = [layers // (pp * vpp)] * (pp * vpp)
    full = cost.score(candidate(**shape, recompute="full"), stages(cost.model, counts, "full", vpp))[0]
    selective = candidate(**shape, recompute="selective", sequence_parallel=True)
    faster = cost.score(selective, stages(cost.model, counts, "selective", vpp))[0]
    assert full == pytest.approx(full_s, rel=0.1)
    assert faster == pytest.approx(selective_s, rel=0.1)
    assert full / faster == pytest.approx(full_s / selective_s, rel=0.05)


def test_flash_attention_is_faster_and_smaller() -> None:
    """arXiv 2307.08691, table 1: GPT 2.7B at 8k trains about 2.8 times as fast as without."""
    sizes = {"num_layers": 32, "hidden_size": 2560, "num_attention_heads": 20, "ffn_hidden_size": 10240, "max_position_embeddings": 8192}
    cand = candidate(dp=8, zero_stage=1, recompute="full", num_microbatches=1)
    scores = []
    for traits in (MEGATRON, UNFUSED):
        cost = cost_model(gpt(**sizes), cluster=a100(8), traits=traits, seq_length=8192, global_batch_size=8)
        scores.append(cost.score(cand, stages(cost.model, [32], "full")))
    (fast, small), (slow, large) = scores
    assert 1.5 < slow / fast < 4
    assert small < large
