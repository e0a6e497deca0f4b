"""Drawn plans of DeepSpeed come back from their ds_config.json as themselves, and what they say there is what they decide."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit import deepspeed, formats, reading
from orchestrator.engines import ENGINES, passthrough, tools
from orchestrator.engines.deepspeed.trainer_files import ACCELERATE, DS_CONFIG, TRAINER, around, why_not_alone
from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.strategy.legality import broken_rule
from orchestrator.words import deepspeed as words
from orchestrator.words import terms
from orchestrator.words.fsdp import SHARDED
from orchestrator.words.trainer import AROUND

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from hand_plans import BERT, GPT, LLAMA, T5, make_plan, training_for, workload_of

CHOSEN = ("tp", "cp", "micro_batch_size", "zero_stage", "zero_shard_size", "offload_optimizer")
"""Of a plan of engine=deepspeed; in others Megatron's words say how a model is divided."""
KEYS = ("precision", "optimizer", "lr", "betas", "eps", "weight_decay", "clip", "grad_reduce_dtype", "grad_accum_dtype")


def drawn(number: int, seed: int) -> list[Plan]:
    """Legal plans of both engines."""
    draw = random.Random(seed)
    one, found = draw.choice, []
    while len(found) < number:
        engine = one(["deepspeed", "megatron_deepspeed"])
        model = one([GPT, LLAMA, LLAMA, BERT, *([T5] if engine == "deepspeed" else [])])
        gpu = one(["H100-SXM-80GB", "A100-SXM-80GB", "V100-SXM2-32GB", "cpu"])
        training = training_for(
            model, precision="fp32" if gpu == "cpu" else one(["bf16", "bf16", "fp16", "fp32"]), optimizer=one(["adamw", "adamw", "sgd"]),
            lr=one([1e-3, 3e-4]), min_lr=one([0.0, 1e-5]), schedule=one(["cosine", "linear", "constant", "wsd", "inverse_square_root"]),
            decay=one(["linear", "minus_sqrt"]), decay_steps=one([None, 3]), warmup=one([0, 1, 5]),
            steps=one([10, 50]), clip=one([0.0, 1.0]), weight_decay=one([0.0, 0.1]), betas=one([(0.9, 0.95), (0.8, 0.9)]),
            eps=one([1e-8, 1e-5]), grad_reduce_dtype=one(["fp32", "bf16"]), grad_accum_dtype=one(["fp32", "bf16"]),
        )  # fmt: skip
        stage, own = one([0, 1, 2, 3]), engine == "deepspeed"
        plan = make_plan(
            engine, model, gpu=gpu, world=one([4, 8, 16]), training=training, tp=one([1, 1, 2]), pp=1 if own else one([1, 1, 2]),
            cp=one([1, 1, 2]) if own else 1, zero_stage=stage, micro_batch_size=one([1, 2]),
            offload_optimizer=stage > 0 and one([True, False]),
            zero_shard_size=one([None, 2]) if stage == 3 else None,
        )  # fmt: skip
        capabilities = ENGINES[engine].capabilities(plan.cluster.software)
        if plan.num_microbatches and broken_rule(capabilities, plan.candidate, workload_of(plan)) is None:
            found.append(plan)
    return found


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_as_itself(number: int) -> None:
    for plan in drawn(number, seed=number):
        (file,) = [file for file in ENGINES[plan.engine].translate(plan).files if file.path == "ds_config.json"]
        reading = formats.read(file.content, file.path).reading
        names = [name for name in CHOSEN if plan.engine == "deepspeed" or name not in ("tp", "cp")]
        assert reading.unknown == ()
        assert {name: getattr(reading.setup, name) for name in names} == {name: getattr(plan, name) for name in names}, file.content
        adam, sums = plan.training.optimizer == "adamw", plan.zero_stage or plan.training.precision == "fp32"
        said = [name for name in KEYS if (adam or name not in ("betas", "eps")) and (sums or name != "grad_accum_dtype")]
        assert {name: reading.keys[f"train.{name}"] for name in said} == {name: plain(getattr(plan.training, name)) for name in said}


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_what_a_drawn_plan_says_may_be_said_again_and_nothing_else(number: int) -> None:
    for plan in drawn(number, seed=number + 1):
        for path, value in terms.say(words.PLAN, plan).items():
            field, there = passthrough.decided_by("ds", path, plan) or ("", None)
            assert (there, bool(field)) == (value, True)
            passthrough._agree(path, value, (field, there))
            with pytest.raises(InputError, match="contradicts the plan's "):
                passthrough._agree(path, "another", (field, there))


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_from_the_trainers_and_accelerates_files(number: int, tmp_path: Path) -> None:
    """With the ds_config that they name, which stands beside them."""
    found = 0
    for plan in drawn(number, seed=number + 2):
        files = {file.path: file.content for file in ENGINES[plan.engine].translate(plan).files}
        if plan.engine != "deepspeed" or why_not_alone(plan) is not None:
            continue
        found += 1
        for path in (TRAINER, DS_CONFIG):
            (tmp_path / path).write_text(files[path])
        reading = formats.read(files[TRAINER], str(tmp_path / TRAINER)).reading
        assert reading.unknown == ()
        names = [name for name in CHOSEN if plan.tp == 1 or name != "tp"]
        assert {name: getattr(reading.setup, name) for name in names} == {name: getattr(plan, name) for name in names}
        assert reading.setup.recompute == plan.strategy.recompute
        training = plan.training
        for name in ("precision", "lr", "betas", "eps", "weight_decay", "clip", "steps", "warmup"):
            assert reading.keys[f"train.{name}"] == plain(getattr(training, name)), (name, files[TRAINER])
        assert reading.keys["seed"] == training.seed
        ends = training.schedule == "linear" and training.min_lr == training.lr
        assert reading.keys["train.schedule"] == ("constant" if ends else training.schedule)
        if training.schedule == "wsd":
            assert (reading.keys["train.decay"], reading.keys["train.decay_steps"]) == (training.decay, training.decay_length)
        if training.schedule == "cosine":
            assert reading.keys["train.min_lr"] == pytest.approx(training.min_lr)
        launched = formats.read(files[ACCELERATE], str(tmp_path / ACCELERATE)).reading
        assert (launched.unknown, launched.keys["gpus"]) == ((), plan.world_size)
        assert (launched.setup.zero_stage, launched.setup.offload_optimizer) == (plan.zero_stage, plan.offload_optimizer)
    assert found > number // 5


def test_a_change_is_what_the_second_setup_says() -> None:
    draw = random.Random(3)
    plans = drawn(20, seed=4)
    setups = [deepspeed.reading_of(terms.nested(terms.say((*words.SIZES, *words.ZERO, *words.OWN_PARALLELISM), plan))).setup
              for plan in plans]  # fmt: skip
    for before in setups:
        after = draw.choice(setups)
        changes = reading.changes(deepspeed.CHANGED, before, after)
        assert changes is not None
        again = deepspeed.reading_of(terms.nested(terms.say(deepspeed.CHANGED, before) | changes)).setup
        assert again == after


def test_every_path_is_decided_or_of_a_kind_and_nothing_that_costs_is_called_harmless() -> None:
    known, decided = {*passthrough.paths()}, terms.names(words.PLAN)
    free = {path for path in known if terms.kind("ds_config", path) not in ("cost", "buffers")}
    assert free.isdisjoint(decided)
    costly = ("zero_optimization.", "bf16.", "tensor_parallel.", "compile.", "activation", "aio", "amp", "offload", "allgather", "gradient")
    assert [path for path in free if path.startswith(costly) and path != "compile.debug_log"] == []
    for path in ("optimizer.params.torch_adam", "curriculum_learning.enabled", "sparse_attention.mode", "elasticity.enabled", "unheard_of"):
        assert terms.kind("ds_config", path) == "cost"
    sections = {section.partition(".")[0] for section in (*passthrough.OPEN_SECTIONS, *known)}
    assert [pattern for pattern in terms.kinds("ds_config") if pattern.partition(".")[0] not in sections] == []


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_from_the_files_of_programs_around_the_trainer(name: str, number: int) -> None:
    found = 0
    for plan in drawn(12 * number, seed=number + 3):
        with suppress(InputError):
            if not tools.is_around(plan, name):
                continue
            file = around(plan, name)
            found += 1
            reading = formats.read(file.content, file.path).reading
            assert reading.unknown == (), file.content
            assert {one: getattr(reading.setup, one) for one in CHOSEN} == {one: getattr(plan, one) for one in CHOSEN}, file.content
            assert reading.setup.recompute == plan.strategy.recompute
            assert (reading.accumulation or reading.steps, reading.keys["train.seq_length"]) == (
                plan.num_microbatches,
                plan.training.seq_length,
            )
            for key in ("precision", "lr", "betas", "eps", "weight_decay", "clip", "steps", "warmup"):
                assert reading.keys[f"train.{key}"] == plain(getattr(plan.training, key)), (key, file.content)
    assert found >= number


def test_programs_around_the_trainer_are_told_to_pack_and_what_is_trained() -> None:
    plan = so.plan(recipe="llama3_8b", gpus=8, cluster="dgx_h100", task="sft", engine="deepspeed", train={"global_batch_size": 64}).plan
    for packing in (True, False):
        found = replace(plan, training=replace(plan.training, packing=packing))
        files = {name: yaml.safe_load(around(found, name).content) for name in AROUND}
        assert (files["llama_factory"]["packing"], files["llama_factory"]["neat_packing"]) == (packing, packing)
        assert (files["axolotl"]["sample_packing"], files["ms_swift"]["packing"]) == (packing, packing)
        assert files["llama_factory"]["stage"] == "sft"
        named = {"axolotl": "attn_implementation", "llama_factory": "flash_attn", "ms_swift": "attn_impl"}
        said = {name: files[name][setting] for name, setting in named.items()}
        assert said == {"axolotl": "flash_attention_2", "llama_factory": "fa2", "ms_swift": "flash_attn"}
    text = replace(plan, training=replace(plan.training, task="pretrain", packing=None))
    of_text = yaml.safe_load(around(text, "llama_factory").content)
    assert of_text["stage"] == "pt"
    assert "packing" not in of_text
    software = replace(plan.cluster.software, flash_attention=False)
    without = replace(plan, training=replace(plan.training, packing=True), cluster=replace(plan.cluster, software=software))
    assert yaml.safe_load(around(without, "axolotl").content)["attn_implementation"] == "sdpa"
    with pytest.raises(InputError, match="packs samples by flash attention alone, which the plan has not; data"):
        around(without, "ms_swift")


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_from_the_files_of_programs_with_fsdp(name: str, number: int) -> None:
    """But for what the file says it can't."""
    found = whole = 0
    lost = {"zero_optimization.stage": "zero_stage", "tensor_parallel.autotp_size": "tp", "zero_shard_size": "zero_shard_size",
            "communication_data_type": ""}  # fmt: skip
    for plan in drawn(30 * number, seed=number + 4):
        if plan.engine != "deepspeed":
            continue
        with suppress(InputError):
            written = tools.written(plan, name)
            found, whole = found + 1, whole + (not written.unsaid)
            (file,) = tools.files(plan, written)
            reading = formats.read(file.content, file.path).reading
            assert reading.unknown == (), file.content
            unsaid = {lost[one.partition("=")[0]] for one in written.unsaid}
            names = [
                one for one in (*CHOSEN, "recompute") if one not in unsaid and not (one == "offload_optimizer" and plan.zero_stage == 0)
            ]
            had = {one: getattr(plan, one) for one in CHOSEN} | {"recompute": plan.strategy.recompute}
            assert {one: getattr(reading.setup, one) for one in names} == {one: had[one] for one in names}, file.content
            assert reading.keys["train.global_batch_size"] == plan.global_batch_size
            for key in ("precision", "lr", "betas", "weight_decay", "clip", "steps"):
                assert reading.keys[f"train.{key}"] == plain(getattr(plan.training, key)), (key, file.content)
    assert found >= number
    assert whole >= 2
