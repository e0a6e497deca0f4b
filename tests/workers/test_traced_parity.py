"""Models described by their own code train on several ranks to what one process computes, under plans that the search chose."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from architectures import CASES
from worker_pool import Pool

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.units import GIB

pytest.importorskip("transformers")
from orchestrator.tracing import build
from orchestrator.tracing.trace import described

pytestmark = pytest.mark.engines
NO_GPU = Machine(host_memory=16 * GIB)
TOLERANCE = 1e-4
WAYS: tuple[tuple[str, ...], ...] = (
    ("pin.zero_stage=3", "pin.recompute=full"),
    ("pin.zero_stage=2", "pin.recompute=full"),
    ("pin.zero_stage=1",),
    ("pin.zero_stage=3",),
)
TRAINED = (
    *("swin", "t5", "vit", "granite", "gemma2", "gpt_neox", "stablelm", "cohere", "glm", "starcoder2", "smollm3", "mixtral", "olmoe"),
    *("mamba2", "roberta", "deberta-v2", "modernbert", "bart", "whisper", "dinov2", "convnext", "llava", "wav2vec2", "qwen3_next"),
)
COVERING = ("swin", "t5", "convnext")
"""Stages of different width; two stacks and ties; recompute of a class that has none of its own. The others are for .ci/full."""


@cache
def words_of(name: str, **changes: Any) -> tuple[str, ...]:
    case = CASES[name]
    traced = described(build.Source(config=case.config), case.seq_length, case.decoder_seq_length, 4)
    decoder = () if traced.decoder_seq_length is None else (f"train.decoder_seq_length={traced.decoder_seq_length}",)
    return (f"model.traced={msgspec.json.encode(traced).decode()}", f"train.seq_length={traced.seq_length}", *decoder)


def plan_of(name: str, gpus: int, *more: str) -> Plan:
    words = (
        *("engine=deepspeed", "cluster=cpu", f"gpus={gpus}", "train.precision=fp32", "train.global_batch_size=8", "train.steps=4"),
        *("train.lr=1e-3", "train.warmup=0", f"name={name}", *words_of(name), *more),
    )
    return Planner(recipe.load(words, NO_GPU, tuple(ENGINES))).fastest().plan


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in COVERING else pytest.mark.full) for name in TRAINED])
def test_two_ranks_train_to_the_losses_of_one_process(name: str, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> None:
    way = WAYS[TRAINED.index(name) % len(WAYS)]
    folder = str(tmp_path_factory.mktemp("cache"))
    alone = pool.run("traced_cases.trained", 1, to_json(plan_of(name, 1)), folder)[0]
    plan = plan_of(name, 2, *way)
    assert plan.world_size == 2
    together = pool.run("traced_cases.trained", 2, to_json(plan), folder)[0]
    assert together["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-3)
    assert alone["losses"][0] != alone["losses"][-1]


DIVIDED = (
    *("gemma2", "bert", "qwen3", "vit", "whisper", "phi3", "llama", "gpt_neox", "granite", "modernbert", "dinov2", "llava"),
    *("t5", "mixtral"),
)
"""Architectures with linears that tensor parallelism divides."""
DIVIDED_COVERING = ("bert", "qwen3")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in DIVIDED_COVERING else pytest.mark.full) for name in DIVIDED])
def test_tensor_parallelism_that_was_found_trains_to_the_losses_of_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    alone = pool.run("traced_cases.trained", 1, to_json(plan_of(name, 1)), str(tmp_path))[0]
    plan = plan_of(name, 2, "pin.tp=2", f"pin.zero_stage={DIVIDED.index(name) % 4}")
    assert plan.model.traced is not None
    assert plan.model.traced.divided
    together = pool.run("traced_cases.trained", 2, to_json(plan), str(tmp_path))[0]
    assert together["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-3)


TWO, ONE = ("2", "pin.tp=2", "pin.zero_stage=1"), ("1",)
WAYS_ON: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ((TWO, ONE), (ONE, TWO), (("2", "pin.zero_stage=3"), TWO))


@pytest.mark.parametrize(("before", "after"), [WAYS_ON[0], *(pytest.param(*way, marks=pytest.mark.full) for way in WAYS_ON[1:])])
def test_a_described_model_continues_in_another_layout(before: tuple[str, ...], after: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    """Fused projections are divided part by part: ModernBERT's."""
    name, cache, constant = "modernbert", str(tmp_path / "cache"), "train.schedule=constant"
    whole = pool.run("train_and_save", 1, to_json(plan_of(name, 1, constant)), cache, str(tmp_path / "whole"))[0]
    first = plan_of(name, int(before[0]), constant, *before[1:], "train.save_every=2")
    first = msgspec.structs.replace(first, training=msgspec.structs.replace(first.training, steps=2))
    begun = pool.run("train_and_save", int(before[0]), to_json(first), cache, str(tmp_path / "begun"))[0]
    then = plan_of(name, int(after[0]), constant, *after[1:])
    then = msgspec.structs.replace(then, run=msgspec.structs.replace(then.run, resume=str(tmp_path / "begun")))
    ended = pool.run("train_and_save", int(after[0]), to_json(then), cache, str(tmp_path / "ended"))[0]
    assert [*begun, *ended] == pytest.approx(whole, rel=TOLERANCE)
    assert len(ended) == 2


ROOT = Path(__file__).parents[2]
TEXT: dict[str, tuple[str, ...]] = {
    "smollm3": ("pin.tp=2", "pin.zero_stage=1"),
    "modernbert": ("pin.zero_stage=3",),
    "deberta-v2": ("pin.zero_stage=2",),
    "t5": ("pin.zero_stage=3",),
    "bart": ("pin.zero_stage=1",),
    "mamba2": ("pin.zero_stage=2",),
}
"""Next tokens, masked ones and spans, with the layout on two ranks."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "smollm3" else pytest.mark.full) for name in TEXT])
def test_text_trains_to_the_losses_of_one_process_and_goes_on_where_it_stopped(name: str, pool: Pool, tmp_path: Path) -> None:
    """Two steps on two ranks, then two on one, against four on one."""
    cache, said = str(tmp_path / "cache"), (f"data={ROOT / 'README.md'}", "train.schedule=constant")
    whole = pool.run("train_and_save", 1, to_json(plan_of(name, 1, *said)), cache, str(tmp_path / "whole"))[0]
    first = plan_of(name, 2, *said, *TEXT[name], "train.save_every=2")
    first = msgspec.structs.replace(first, training=msgspec.structs.replace(first.training, steps=2))
    begun = pool.run("train_and_save", 2, to_json(first), cache, str(tmp_path / "begun"))[0]
    then = plan_of(name, 1, *said)
    then = msgspec.structs.replace(then, run=msgspec.structs.replace(then.run, resume=str(tmp_path / "begun")))
    ended = pool.run("train_and_save", 1, to_json(then), cache, str(tmp_path / "ended"))[0]
    assert [*begun, *ended] == pytest.approx(whole, rel=TOLERANCE)
    assert len(ended) == 2


@pytest.mark.full
def test_supervised_samples_and_text_that_is_held_out_train_alike_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    pairs = [(" ".join("abcdefg"[: 1 + i % 7]), "." * (1 + i % 5)) for i in range(60)]
    samples.write_text("".join(json.dumps({"prompt": before, "completion": after}) + "\n" for before, after in pairs))
    evaluated = ("train.eval_every=2", "train.eval_steps=1")
    for said in (("task=sft", f"data={samples}", f"data.valid={samples}"), (f"data={ROOT / 'README.md'}", "data.split=9,1")):
        said = (*said, *evaluated)
        alone = pool.run("traced_cases.trained", 1, to_json(plan_of("smollm3", 1, *said)), str(tmp_path / "cache"))[0]
        plan = plan_of("smollm3", 2, *said, "pin.zero_stage=2")
        together = pool.run("traced_cases.trained", 2, to_json(plan), str(tmp_path / "cache"))[0]
        assert together["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
        assert together["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
        assert alone["losses"][-1] < alone["losses"][0]
