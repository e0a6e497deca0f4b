"""Hetu-Galvatron's plan file, of a plan made by hand."""

from __future__ import annotations

from orchestrator.strategy.layerwise import TRAITS, ChosenRun, LayerChoice, LayerwisePlan, LayerwiseStage, galvatron_json

WIDE, SHARDED, AGAIN = LayerChoice(tp=2), LayerChoice(zero3=True), LayerChoice(tp=4, recompute=True)


def plan(*stages: tuple[ChosenRun, ...]) -> LayerwisePlan:
    made = tuple(LayerwiseStage(runs=runs, forward_s=1, backward_s=2, exposed_s=0, optimizer_s=0, peak_bytes=1) for runs in stages)
    return LayerwisePlan(
        world_size=8, pp=len(made), global_batch_size=32, num_microbatches=4, stages=made, step_time_s=1.0, peak_memory_bytes=1,
        sequence_parallel=True,
    )  # fmt: skip


def run(kind: str, count: int, choice: LayerChoice) -> ChosenRun:
    return ChosenRun(kind=kind, count=count, choice=choice)


def test_every_layer_has_its_own_entry_and_the_ends_theirs() -> None:
    ends = LayerChoice(tp=2, zero3=True)
    first = (run("embedding", 1, ends), run("decoder", 2, WIDE), run("decoder", 1, SHARDED))
    assert galvatron_json(plan(first, (run("decoder", 3, AGAIN), run("head", 1, ends)))) == {
        "pp_deg": 2,
        "tp_sizes_enc": "2,2,1,4,4,4",
        "tp_consecutive_flags": "1,1,1,1,1,1",
        "dp_types_enc": "0,0,1,0,0,0",
        "use_sp": "0,0,0,0,0,0",
        "checkpoint": "0,0,0,1,1,1",
        "world_size": 8,
        "global_bsz": 32,
        "chunks": 4,
        "pp_division": "3,3",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "ddp",
        "vtp": 2,
        "vsp": 0,
        "embed_sdp": 1,
        "vocab_sdp": 1,
    }


def test_ends_that_are_not_planned_are_whole() -> None:
    file = galvatron_json(plan((run("decoder", 2, SHARDED),)))
    assert (file["vtp"], file["embed_sdp"], file["vocab_sdp"], file["pp_division"]) == (1, 0, 0, "2")
    assert (WIDE.label(), AGAIN.label(), LayerChoice(tp=2, zero3=True, recompute=True).label()) == (
        "tp=2", "tp=4 recompute", "tp=2 zero3 recompute",
    )  # fmt: skip


def test_a_parameter_takes_eighteen_bytes_in_mixed_precision_and_sixteen_in_single() -> None:
    """Megatron-LM's training/theoretical_memory_usage.py: 18 bytes a parameter without the distributed optimizer."""
    for precision, nbytes in (("bf16", 18), ("fp16", 18), ("fp32", 16)):
        states = TRAITS.state_bytes(precision, 0)
        assert states.weight == (4 if precision == "fp32" else 2)
        assert states.weight + states.gradient + states.master + states.moments == nbytes
