"""Tensor parallelism of models that are described by their own code: what a partition divides is priced as divided, the rest as whole."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.translate import translate
from orchestrator.errors import NoPlanError
from orchestrator.model.layer import LayerRun, LayerSpec
from orchestrator.model.ops import Attention, Enter, Exit, Gemm, Pointwise, Saved, Weight
from orchestrator.model.traced import Divided, Feed, Traced
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.units import GIB

TOKENS, WIDTH = 128, 4096
WIDE = 4 * WIDTH
BLOCK = LayerSpec(
    kind="Block",
    weights=(Weight(name="up.weight", shape=(WIDE, WIDTH), split=0), Weight(name="down.weight", shape=(WIDTH, WIDE), split=1)),
    ops=(
        Enter(elements=TOKENS * WIDTH),
        Gemm(name="up", tokens=TOKENS, k=WIDTH, n=WIDE, split="column", saves=(Saved(name="hidden", elements=TOKENS * WIDE, shard="tp"),)),
        Pointwise(name="gelu", elements=TOKENS * WIDE, moved=4.0, shard="tp"),
        Gemm(name="down", tokens=TOKENS, k=WIDE, n=WIDTH, split="row"),
        Exit(elements=TOKENS * WIDTH),
        Attention(name="attention", query_len=TOKENS, key_len=TOKENS, heads=1, kv_heads=1, head_dim=64, causal=True, whole=True),
    ),
    input_elements=TOKENS * WIDTH,
    output_elements=TOKENS * WIDTH,
)
EMBEDDING = LayerSpec(
    kind="embedding",
    weights=(Weight(name="position", shape=(TOKENS, WIDTH)),),
    ops=(Pointwise(name="add", elements=TOKENS * WIDTH, moved=4.0, shard="none"),),
    input_elements=0,
    output_elements=TOKENS * WIDTH,
    recomputable=False,
)
HEAD = LayerSpec(
    kind="head",
    weights=(Weight(name="head.weight", shape=(10, WIDTH)),),
    ops=(Gemm(name="head", tokens=1, k=WIDTH, n=10),),
    input_elements=TOKENS * WIDTH,
    output_elements=0,
    recomputable=False,
)
TRACED = Traced(
    model_class="Perceptron",
    code="package.module:factory",
    seq_length=TOKENS,
    fixed_length=True,
    itemsize=2,
    hidden_size=WIDTH,
    ffn_hidden_size=WIDE,
    max_position_embeddings=TOKENS,
    feeds=(Feed(name="x", shape=(TOKENS, WIDTH)),),
    runs=(LayerRun(layer=EMBEDDING, count=1), LayerRun(layer=BLOCK, count=24), LayerRun(layer=HEAD, count=1)),
    divided=(Divided(pattern=r"blocks\.\d+\.up", by="column"), Divided(pattern=r"blocks\.\d+\.down", by="row")),
    tp_divides=WIDE,
    undivided=("head: no other linear alone takes what it gives",),
)


def plan_of(traced: Traced, *words: str) -> Plan:
    given = ("engine=deepspeed", "cluster=dgx_h100", "gpus=8", "train.grad_accum_dtype=bf16", "train.global_batch_size=8", *words)
    given = (*given, "cluster.host_memory=1TB")
    traced_words = (f"model.traced={msgspec.json.encode(traced).decode()}", f"train.seq_length={TOKENS}", "name=perceptron")
    return Planner(recipe.load((*given, *traced_words), Machine(host_memory=16 * GIB), tuple(ENGINES))).fastest().plan


def test_weights_and_what_is_between_a_pair_are_divided_and_two_all_reduces_are_paid() -> None:
    pins = ("pin.zero_stage=0", "pin.recompute=none", "pin.micro_batch_size=1")
    whole, halves = plan_of(TRACED, "pin.tp=1", *pins), plan_of(TRACED, "pin.tp=2", *pins)
    assert whole.predicted is not None
    assert halves.predicted is not None
    assert BLOCK.local_parameters(2) == BLOCK.local_parameters(1) / 2
    assert BLOCK.saved_bytes(2) == BLOCK.saved_bytes(1) / 2
    assert halves.predicted.peak_memory_bytes < 0.6 * whole.predicted.peak_memory_bytes
    assert whole.predicted.by_cause.get("tp", 0.0) == 0.0
    assert halves.predicted.by_cause["tp"] > 0


def test_a_model_that_fits_no_gpu_whole_is_divided_by_the_search() -> None:
    """24 blocks of 134 million weights with 16 bytes each are 52 GB: at stage 0 half of them fits a GPU of 40."""
    plan = plan_of(TRACED, "pin.zero_stage=0", "memory.limit_gib=40")
    assert plan.tp > 1


def test_the_partition_and_what_stays_whole_are_told_to_deepspeed_and_to_the_user() -> None:
    job = translate(plan_of(TRACED, "pin.tp=2"))
    (config,) = (msgspec.json.decode(file.content) for file in job.files if file.path == "ds_config.json")
    assert config["tensor_parallel"] == {
        "autotp_size": 2,
        "vocab_parallel_lm_head": False,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r"blocks\.\d+\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r"blocks\.\d+\.down\.weight$"], "partition_type": "row"},
            ],
        },
    }
    assert any("whole: head: no other linear alone takes what it gives" in note for note in job.notes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp_divides": 3}, "tp=2 does not divide 3"),
        ({"divided": (), "undivided": ("down: one head",)}, "tp=2: nothing of Perceptron can be divided .down: one head"),
        ({"divided": (), "undivided": ()}, "no partition of Perceptron was recorded; describe it anew"),
        ({"no_autotp": "AutoTP needs one number of heads"}, "tp=2: AutoTP needs one number of heads"),
    ],
)
def test_what_can_not_be_divided_is_refused_with_the_reason(changes: dict[str, object], why: str) -> None:
    with pytest.raises(NoPlanError, match=why):
        plan_of(msgspec.structs.replace(TRACED, **changes), "pin.tp=2")


def test_attention_that_stays_whole_costs_every_rank_all_heads() -> None:
    pins = ("pin.zero_stage=0", "pin.recompute=none", "pin.micro_batch_size=1", "pin.tp=2")
    divided = msgspec.structs.replace(
        BLOCK, ops=tuple(msgspec.structs.replace(op, whole=False, heads=64) if isinstance(op, Attention) else op for op in BLOCK.ops)
    )
    whole = msgspec.structs.replace(
        divided, ops=tuple(msgspec.structs.replace(op, whole=True) if isinstance(op, Attention) else op for op in divided.ops)
    )
    times = []
    for block in (divided, whole):
        runs = (TRACED.runs[0], LayerRun(layer=block, count=24), TRACED.runs[-1])
        found = plan_of(msgspec.structs.replace(TRACED, runs=runs), *pins).predicted
        assert found is not None
        times.append(found.by_cause["attention"])
    assert times[1] == pytest.approx(2 * times[0])
