"""Generation is priced by bytes and FLOPs: what a reader can reckon by hand."""

from __future__ import annotations

import pytest
from rl_cases import SMALL, job, question

from orchestrator.model.families import describe
from orchestrator.rl.choose import fastest_generation
from orchestrator.rl.decode import Decoder, EngineConstants, Layout, layout_refused
from orchestrator.rl.generation import generation, played, room
from orchestrator.rl.programs import NEMO_RL, PROGRAMS
from orchestrator.units import GIB

VLLM = EngineConstants()


def decoder(recipe: str, gpus: int, layout: Layout) -> Decoder:
    of = question(f"recipe={recipe}", f"gpus={gpus}", "cluster=dgx_h100", of=(*SMALL[:-1], "rl.max_response_length=800"))
    return Decoder(of.architecture, of.cluster, of.calibration, of.traits, layout, VLLM)


def test_llama_3_8b_has_sixteen_gigabytes_of_weights_and_128_kib_of_cache_a_token() -> None:
    """8.03B parameters of 2 bytes; 32 layers x (keys and values) x 8 groups x 128 x 2 bytes."""
    one = decoder("llama3_8b", 8, Layout())
    assert one.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert one.token_bytes == 32 * 2 * 8 * 128 * 2
    four = decoder("llama3_8b", 8, Layout(tp=4))
    assert (four.weight_bytes, four.token_bytes) == (pytest.approx(one.weight_bytes / 4), one.token_bytes / 4)


@pytest.mark.parametrize("recipe", ["gpt2_xl", "mixtral_8x7b", "gpt_oss_120b", "qwen3_next_80b_a3b", "deepseek_v3"])
def test_an_engine_has_the_models_parameters_but_those_of_prediction_layers(recipe: str) -> None:
    one = decoder(recipe, 8, Layout())
    spec = describe(one.architecture, 64)
    assert one.weight_bytes == pytest.approx(2 * spec.parameters, rel=1e-3)


def test_deepseek_caches_576_numbers_a_token_and_layer_on_every_rank() -> None:
    assert decoder("deepseek_v3", 32, Layout(tp=32)).token_bytes == 61 * (512 + 64) * 2


def test_one_sequence_waits_for_the_weights_to_be_read() -> None:
    one = decoder("llama3_8b", 8, Layout())
    read = (one.weight_bytes - 128256 * 4096 * 2) / (3350e9 * VLLM.weight_efficiency)  # the embedding is looked up
    assert one.step_seconds(1, 0) == pytest.approx(read + VLLM.step_s + VLLM.sequence_s)


def test_many_sequences_wait_for_products_and_caches() -> None:
    one = decoder("llama3_8b", 8, Layout())
    cached = 256 * 1000 * one.token_bytes / (3350e9 * VLLM.cache_efficiency)
    assert one.step_seconds(256, 1000) - one.step_seconds(256, 0) == pytest.approx(cached)
    assert one.step_seconds(4096, 0) > 4096 / 256 * one.step_seconds(256, 0) / 4  # by FLOPs, not by the bytes of the weights


def test_few_tokens_touch_few_experts() -> None:
    """One token reads 8 of 128 experts, 256 read nearly all."""
    one = decoder("qwen3_30b_a3b", 8, Layout())
    few, many = one.step_seconds(1, 0), one.step_seconds(256, 0)
    experts = 48 * 128 * 3 * 2048 * 768 * 2 / (3350e9 * VLLM.weight_efficiency)
    assert many - few == pytest.approx(experts * (1 - 8 / 128) + 255 * VLLM.sequence_s, rel=0.15)


def test_experts_over_data_parallel_ranks_leave_more_room_for_caches() -> None:
    wide, narrow = decoder("qwen3_30b_a3b", 8, Layout(dp=8)), decoder("qwen3_30b_a3b", 8, Layout())
    assert wide.weight_bytes < narrow.weight_bytes / 4
    assert wide.token_bytes == narrow.token_bytes


def test_equal_lengths_take_as_many_steps_as_a_response_has_tokens() -> None:
    one = decoder("llama3_8b", 8, Layout())
    many, few = played(one, [100] * 32, 0, 32)
    assert few == 0
    assert many == pytest.approx(sum(one.step_seconds(32, at) for at in range(1, 101)))


def test_no_more_run_at_once_than_their_caches_have_room_for() -> None:
    """Twice as many sequences as fit take two rounds."""
    one = decoder("llama3_8b", 8, Layout())
    once, twice = (sum(played(one, [100] * count, 0, 32)) for count in (32, 64))
    assert twice == pytest.approx(2 * once)


def test_the_tail_is_the_longest_sequence_alone() -> None:
    one = decoder("llama3_8b", 8, Layout())
    many, few = played(one, [100] * 31 + [1000], 0, 32)
    assert few == pytest.approx(sum(one.step_seconds(1, at) for at in range(101, 1001)))
    assert many < few


def test_room_is_what_weights_and_workspace_leave() -> None:
    one, of = decoder("llama3_8b", 8, Layout()), job(32, 8, 0, 1000)
    found = room(one, of, 40 * GIB)
    assert found.cache_bytes == 40 * GIB - one.weight_bytes - VLLM.workspace
    assert found.running == int(found.cache_bytes / (500 * one.token_bytes))  # half of its tokens in the mean over its steps
    assert "16.0 GiB" in room(one, of, 16 * GIB).lacking


def test_more_memory_is_never_slower() -> None:
    one, of = decoder("qwen3_8b", 8, Layout()), job(64, 32, 200, 2000)
    seconds = [generation(one, of, 8, room(one, of, gib * GIB)).seconds for gib in (24, 30, 40, 70)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.2 * seconds[-1]


def test_the_fastest_layout_is_the_fastest_of_all_that_are_legal() -> None:
    of = question("recipe=qwen3_30b_a3b", "gpus=8", "cluster=dgx_h100")
    best, _ = fastest_generation(of, 8, 70 * GIB)
    each = []
    for tp in (1, 2, 4, 8):
        for dp in (1, 2, 4, 8):
            if tp * dp <= 8 and layout_refused(of.architecture, Layout(tp=tp, dp=dp)) is None:
                one = Decoder(of.architecture, of.cluster, of.calibration, of.traits, Layout(tp=tp, dp=dp), PROGRAMS[NEMO_RL].engine)
                each.append(generation(one, of.job, 8, room(one, of.job, 70 * GIB)).seconds)
    assert len(each) == 10
    assert best is not None
    assert best.seconds == min(each)


@pytest.mark.parametrize(
    ("layout", "why"),
    [(Layout(tp=3), "does not divide num_attention_heads=32"), (Layout(dp=2), "the model has none")],
)
def test_a_layout_is_refused_in_numbers(layout: Layout, why: str) -> None:
    assert why in (layout_refused(decoder("qwen3_8b", 8, Layout()).architecture, layout) or "")
