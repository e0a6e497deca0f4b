"""A ds_config.json with a model becomes a plan; what it does not say is a key, asked for or said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit import formats
from orchestrator.audit.document import content_of, leaves
from orchestrator.errors import InputError

SAMPLE = Path(__file__).parent / "samples" / "ds_config.json"
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def test_a_ds_config_becomes_its_plan_and_nothing_is_left_out() -> None:
    found = so.audit(SAMPLE, recipe="llama3_8b", cluster="dgx_h100", train={"seq_length": 4096}, pin={"recompute": "full"})
    plan = found.plan
    assert plan is not None
    assert (plan.engine, plan.world_size, plan.dp, plan.zero_stage, plan.micro_batch_size, plan.num_microbatches) == (
        "deepspeed",
        16,
        16,
        3,
        1,
        16,
    )
    assert plan.training.grad_accum_dtype == "bf16"  # DeepSpeed sums in the model's type unless data_types says otherwise
    assert found.legal
    assert found.fits
    assert found.reading.unknown == ("not_a_key=1",)
    assert 'zero_optimization.offload_param.device="cpu"' in found.reading.unpriced
    assert "steps_per_print=10" in found.reading.beside
    assert any("recompute" in what for what in formats.read(SAMPLE.read_text(), str(SAMPLE)).reading.assumed)
    assert not any("recompute" in what for what in found.reading.assumed), "the pin says it"


def test_a_change_of_a_ds_config_is_read_again_as_what_it_says() -> None:
    found = so.audit(SAMPLE, recipe="llama3_8b", cluster="dgx_h100", train={"seq_length": 4096}, pin={"recompute": "full"})
    said = [change for change in found.changes if change.text is not None]
    assert said
    for change in said:
        again = formats.read(str(change.text), "ds_config.json").reading
        assert again.setup.micro_batch_size == change.setup.micro_batch_size
        assert again.setup.zero_stage == change.setup.zero_stage
        content = json.loads(str(change.text))
        assert content["train_batch_size"] == 256


def test_the_fastest_plan_of_the_files_own_engine_is_a_diff_of_it_too() -> None:
    found = so.audit(SAMPLE, recipe="llama3_8b", cluster="dgx_h100")
    assert found.fastest is not None
    assert found.fastest.engine == "megatron"
    best = found.searched
    assert best is not None
    assert found.fastest_here is not None
    assert best.judged.step_time_s == pytest.approx(found.fastest_here.prediction.step_time_s, rel=1e-9)
    assert all(best.judged.step_time_s < row.judged.step_time_s for row in found.changes)
    again = formats.read(str(best.text), "ds_config.json").reading.setup
    assert (again.cp, again.zero_stage) == (best.setup.cp, best.setup.zero_stage)
    changed = [line[1:] for line in best.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) == 9, "what does not change stands as it stood; offload_param is stage 3's alone"
    assert "\nA search of deepspeed over every choice that needs no pin: zero_stage 3 -> 1, cp 1 -> 4: 17.6 s a step, +0.1%, " in str(found)
    assert found.summary()["changes"][-1]["diff"] == best.diff


def test_settings_of_buffers_leave_a_lack_in_doubt_only_where_buffers_make_up_for_it(tmp_path: Path) -> None:
    buffers = {"overlap_comm": True, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    content = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}

    def audited_with(seq_length: int, **zero: object) -> so.Audit:
        (tmp_path / "ds.json").write_text(json.dumps({**content, "zero_optimization": {"stage": 1, **buffers, **zero}}))
        keys = {"recipe": "llama3_8b", "gpus": 8, "cluster": "dgx_h100", "train": {"seq_length": seq_length}}
        return so.audit(tmp_path / "ds.json", **keys)

    far = audited_with(8192)
    assert far.judged is not None
    assert far.judged.lacking_bytes > 200 * 2**30
    assert (len(far.reading.unpriced), far.not_priced, far.fits) == (3, (), False)
    assert "memory     DOES NOT FIT, lacks " in str(far)
    other = audited_with(8192, offload_param={"device": "cpu"})
    assert other.fits is False, "weights are 15 GiB of what is lacking"
    near_weights = audited_with(900, offload_param={"device": "cpu"})
    assert near_weights.judged is not None
    assert 2**30 < near_weights.judged.lacking_bytes < 15 * 2**30
    assert near_weights.fits is None
    assert "knows nothing of zero_optimization.overlap_comm=true and 3 more settings it lacks " in str(near_weights)
    near = audited_with(680)
    assert near.judged is not None
    assert 0 < near.judged.lacking_bytes < 2**30
    assert near.not_priced == near.reading.unpriced
    assert "memory     can't be told: by a price that knows nothing of zero_optimization.overlap_comm=true and 2 more" in str(near)


def test_what_a_ds_config_has_no_place_for_stands_below_the_diff_of_the_rest_with_what_says_it() -> None:
    found = so.audit(SAMPLE, recipe="llama3_8b", cluster="dgx_a100_40gb", **{"search.prefer": "fastest"})
    left = [row for row in (*found.changes, found.together, found.searched) if row is not None and row.elsewhere]
    assert any(row.diff for row in left), "a plan for so little memory recomputes"
    for row in left:
        assert row.text is not None
        assert re.fullmatch(
            r"recompute=\S+ is said by the model's code \(gradient_checkpointing=true of a Trainer, else .*\)", row.elsewhere
        )
        assert f"  ({row.elsewhere})" in str(found)
    assert "no place" not in str(found)


def test_settings_of_one_section_without_a_price_are_one_line(tmp_path: Path) -> None:
    host = {"device": "cpu", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8}
    zero = {"stage": 3, "offload_param": host, "overlap_comm": True, "sub_group_size": 1e9}
    content: dict[str, object] = {"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": zero}
    found = audited(tmp_path, content | {"prescale_gradients": True, "flops_profiler": {"enabled": False}}, 8)
    assert len(found.reading.unpriced) == 7
    lines = [line for line in str(found).splitlines() if line.startswith("unpriced")]
    assert lines == [
        'unpriced   zero_optimization.offload_param: device="cpu", pin_memory=true, buffer_count=5, buffer_size=100000000.0: '
        "the prediction knows nothing of them",
        "unpriced   zero_optimization: overlap_comm=true, sub_group_size=1000000000.0: the prediction knows nothing of them",
        "unpriced   prescale_gradients=true: the prediction knows nothing of it",
    ]


def test_sections_that_files_copy_with_deepspeeds_own_values_say_nothing(tmp_path: Path) -> None:
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    kept = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None, "profile": False}
    content: dict[str, object] = {"train_batch_size": 64, "bf16": {"enabled": True}, "aio": aio, "activation_checkpointing": kept}
    assert audited(tmp_path, content, 8).reading.unpriced == ()
    changed = content | {"aio": aio | {"queue_depth": 32}, "activation_checkpointing": kept | {"cpu_checkpointing": True}}
    assert audited(tmp_path, changed, 8).reading.unpriced == ("aio.queue_depth=32", "activation_checkpointing.cpu_checkpointing=true")


def test_what_is_offered_for_a_batch_that_does_not_count_counts(tmp_path: Path) -> None:
    content: dict[str, object] = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    found = audited(tmp_path, content | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, 8)
    assert "is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks" in found.problem
    rows = [row for row in (*found.changes, found.together, found.searched) if row is not None]
    assert rows
    for row in rows:
        (tmp_path / "again.json").write_text(str(row.text))
        assert so.audit(tmp_path / "again.json", recipe="gpt2_xl", gpus=8, cluster="dgx_h100").legal


def audited(folder: Path, content: dict[str, object], gpus: int) -> so.Audit:
    (folder / "ds_config.json").write_text(json.dumps(content, indent=2))
    return so.audit(folder / "ds_config.json", recipe="gpt2_xl", gpus=gpus, cluster="dgx_h100")


COUNTED = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}


def test_three_numbers_that_are_not_one_for_the_gpus_are_refused_as_deepspeed_does(tmp_path: Path) -> None:
    """64 = 4 x 4 x 4 ranks; on 8 they are 128 (DeepSpeed: "Check batch related parameters"). What is proposed holds for the 8."""
    assert audited(tmp_path, COUNTED, 4).legal
    found = audited(tmp_path, COUNTED, 8)
    assert found.problem == (
        "train_batch_size=64: is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks = 4 x 4 x 8"
    )
    row = next(row for row in found.changes if row.text is not None and "micro_batch_size" in row.what)
    content = json.loads(str(row.text))
    assert content["train_batch_size"] == 64 == content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"] * 8


@pytest.mark.parametrize(("steps", "micro"), [(None, 8), (2, 4)])
def test_a_micro_batch_that_is_left_out_is_what_deepspeed_makes_of_the_batch(steps: int | None, micro: int, tmp_path: Path) -> None:
    """64 samples over 8 ranks: 8 each at once, or 4 in each of two steps; it was taken to be 1."""
    left = {name: value for name, value in COUNTED.items() if name != "train_micro_batch_size_per_gpu"}
    found = audited(tmp_path, left | {"gradient_accumulation_steps": steps}, 8)
    assert found.plan is not None
    assert (found.plan.micro_batch_size, found.plan.num_microbatches, found.legal) == (micro, steps or 1, True)
    assert any(line.startswith(f"micro-batches of {micro}: ") for line in found.reading.assumed)
    assert all(json.loads(row.text)["train_batch_size"] == 64 for row in found.changes if row.text is not None)


@pytest.mark.parametrize("recipe", ["llama3_8b", "gpt2_xl"])
def test_a_plan_of_deepspeed_comes_back_as_itself(recipe: str, tmp_path: Path) -> None:
    answer = so.plan(recipe=recipe, gpus=16, engine="deepspeed", cluster="dgx_h100")
    plan = answer.plan
    (file,) = [file for file in answer.job().files if file.path == "ds_config.json"]
    (tmp_path / file.path).write_text(file.content)
    pins = {"recompute": plan.strategy.recompute}
    found = so.audit(tmp_path / file.path, recipe=recipe, gpus=16, cluster="dgx_h100", pin=pins).plan
    assert found is not None
    for name in (
        "engine",
        "tp",
        "cp",
        "dp",
        "zero_stage",
        "zero_shard_size",
        "micro_batch_size",
        "num_microbatches",
        "offload_optimizer",
        "stages",
    ):
        assert getattr(found, name) == getattr(plan, name), name
    assert found.model == plan.model
    assert found.predicted is not None
    assert plan.predicted is not None
    assert found.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("{", {}, "is not JSON"),
        ("{}", {}, "is no ds_config"),
        ('{"zero_optimization": {"stage": 7}}', {}, "zero_optimization.stage=7"),
        ('{"train_batch_size": "many"}', {}, "is no number"),
        ('{"train_batch_size": 256}', {"recipe": None}, "model: is missing"),
        ('{"train_batch_size": 256}', {"gpus": None, "recipe": None}, "missing"),
        ('{"train_batch_size": 256}', {"pin": {"zero_stage": 9}}, "pin.zero_stage=9"),
        ('{"train_batch_size": 256}', {"explain": {"tp": 8}}, "is not for audit"),
    ],
)
def test_what_cannot_be_audited_is_one_error(text: str, keys: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    given = {name: value for name, value in {"recipe": "llama3_8b", "gpus": 16, "cluster": "dgx_h100", **keys}.items() if value is not None}
    with pytest.raises(so.InputError, match=message):
        so.audit(file, **given)


def test_a_precision_that_is_auto_is_the_recipes_or_the_users_and_what_nobody_says_is_said(tmp_path: Path) -> None:
    def audited_with(recipe: str = "", **keys: object) -> so.Audit:
        content = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        (tmp_path / "ds.json").write_text(json.dumps(content))
        (tmp_path / "half.yaml").write_text("recipe: llama2_7b\ntrain: {precision: fp16}\n")
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        given = {"recipe": recipe.format(tmp_path)} if recipe else {"model.hf_config": tmp_path / "config.json", "train.seq_length": 2048}
        return so.audit(tmp_path / "ds.json", gpus=8, cluster="dgx_a100_80gb", **given, **keys)

    def types(found: so.Audit) -> tuple[str, ...]:
        assert found.plan is not None
        training = found.plan.training
        return training.precision, training.grad_reduce_dtype, training.grad_accum_dtype

    by_recipe = audited_with("llama2_7b")
    assert types(by_recipe) == ("bf16",) * 3
    assert "train.precision=bf16: bf16.enabled is auto, and the recipe's is taken" in by_recipe.reading.assumed
    assert types(audited_with("{}/half.yaml")) == ("fp16",) * 3
    by_key = audited_with("llama2_7b", **{"train.precision": "fp32"})
    assert types(by_key) == ("fp32",) * 3
    assert not any("precision" in line or "bf16" in line for line in by_key.reading.assumed)
    by_nobody = audited_with()
    assert types(by_nobody) == ("bf16",) * 3
    assert any(line.startswith("train.precision=bf16: bf16.enabled is auto, and nobody says") for line in by_nobody.reading.assumed)


def test_a_diff_that_leaves_stage_3_leaves_nothing_that_is_for_stage_3_alone(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu", "pin_memory": True}}
    content = {"bf16": {"enabled": True}, "zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    files = {
        "ds.json": json.dumps(content),
        "run.yaml": "learning_rate: 1e-5\nper_device_train_batch_size: 1\nbf16: true\ndeepspeed: " + json.dumps(content),
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  zero_stage: 3\n  offload_param_device: cpu\n  offload_optimizer_device: cpu\n",
    }
    for name, text in files.items():
        source = formats.read(text, name)
        before = source.reading.setup
        lower, same = (source.edited(before, replace(before, **new), 8) for new in ({"zero_stage": 2}, {"offload_optimizer": False}))
        assert lower is not None, name
        assert same is not None, name
        now, kept = (dict(leaves(content_of(text, name))) for text in (lower, same))
        where = "deepspeed_config.offload_param_device" if "accelerate" in name else "zero_optimization.offload_param.device"
        inside = "deepspeed." if name == "run.yaml" else ""
        assert (now[inside + where], kept[inside + where]) == ("none", "cpu"), name
        if "accelerate" not in name:
            assert now[f"{inside}zero_optimization.offload_optimizer.ratio"] == 1.0
            assert now[f"{inside}zero_optimization.offload_param.pin_memory"] is True


CHECKPOINTED = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
BY_A_TRAINER = """deepspeed --num_gpus=8 run_clm.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-2-7b-hf \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --block_size 2048 --learning_rate 2e-5 --bf16 True \\
  --gradient_checkpointing True --output_dir out --do_train
"""


def test_a_pinned_recompute_keeps_no_diff_from_a_ds_config_and_is_said_by_its_pin(tmp_path: Path) -> None:
    """The file's words for stage and micro-batch were "no place", as the file read back has no recompute."""
    (tmp_path / "ds.json").write_text(json.dumps(CHECKPOINTED, indent=1))
    found = so.audit(tmp_path / "ds.json", recipe="llama2_7b", gpus=8, cluster="dgx_a100_80gb", pin={"recompute": "full"})
    by_what = {row.what.partition(" ")[0]: row for row in found.changes}
    assert {*by_what} == {"micro_batch_size", "recompute", "zero_stage"}
    for name, path in (("micro_batch_size", "train_micro_batch_size_per_gpu"), ("zero_stage", "zero_optimization.stage")):
        row = by_what[name]
        assert dict(leaves(json.loads(str(row.text))))[path] == getattr(row.setup, name)
        assert (row.diff.count("\n-"), row.diff.count("\n+"), row.elsewhere) == (1, 2, "")
        assert row.setup.recompute == "full"
    assert (by_what["recompute"].diff, by_what["recompute"].elsewhere) == ("", "recompute=none is said by pin.recompute")
    assert "no place" not in str(found)
    assert "\n  (recompute=none is said by pin.recompute)\n" in str(found)


def test_what_the_ds_config_of_a_trainers_command_says_is_said_with_its_place(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    (tmp_path / "run.sh").write_text(BY_A_TRAINER)
    found = so.audit(tmp_path / "run.sh", recipe="llama2_7b", gpus=8, cluster="dgx_a100_80gb")
    by_what = {row.what: row for row in (*found.changes, found.together, found.searched) if row is not None}
    row = by_what["offload_optimizer on -> off"]
    assert (row.diff, row.elsewhere) == ("", "offload_optimizer=off is said by zero_optimization.offload_optimizer.device in ds.json")
    mixed = next(row for row in by_what.values() if "offload_optimizer on -> off" in row.what and "recompute full -> none" in row.what)
    assert "+  --gradient_checkpointing false" in mixed.diff
    assert mixed.elsewhere == row.elsewhere
    assert f"  ({by_what['offload_optimizer on -> off'].elsewhere})\n" in str(found)


REFUSED = {
    "two precisions": ('"bf16": {"enabled": true}, "fp16": {"enabled": true}', "fp16 and bf16 are both enabled: DeepSpeed takes one"),
    "a slip in a strict section": ('"zero_optimization": {"overlap_com": true}', "zero_optimization.overlap_com: DeepSpeed refuses what it "
                                   "does not know there; did you mean overlap_comm?"),
    "a section that is none": ('"bf16": true', "bf16=true: is a section, with `enabled`"),
    "a section twice": ('"bf16": {"enabled": true}, "bf16": {"enabled": false}', "bf16 twice in one section: DeepSpeed refuses that"),
    "a batch in quotes": ('"gradient_accumulation_steps": "4"', 'gradient_accumulation_steps="4": a text, and DeepSpeed divides numbers'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_deepspeed_refuses_is_illegal(case: str, tmp_path: Path) -> None:
    """DeepSpeed's own reader of the same file says so too."""
    said, problem = REFUSED[case]
    file = tmp_path / "ds_config.json"
    file.write_text(f'{{"train_batch_size": 64, {said}}}')
    found = so.audit(file, recipe="gpt2_xl", gpus=8, cluster="dgx_a100_80gb")
    assert (found.legal, found.problem) == (False, problem)


@pytest.mark.engines
@pytest.mark.parametrize("case", REFUSED)
def test_deepspeed_refuses_it_itself(case: str, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "ds_config.json"
    file.write_text(f'{{"train_batch_size": 64, {REFUSED[case][0]}}}')
    with pytest.raises((AssertionError, ValueError, TypeError, AttributeError)):
        DeepSpeedConfig(str(file))
    file.write_text('{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"overlap_comm": true}}')
    assert DeepSpeedConfig(str(file)).train_batch_size == 64, "what it takes without a fault"


AXOLOTL = "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 1024\nmicro_batch_size: 1\nbf16: true\n"


@pytest.mark.parametrize("more", ["lora_modules_to_save: [embed_tokens, lm_head]", "attn_implementation: eager"])
def test_what_takes_gigabytes_without_a_price_is_no_plain_fit(more: str, tmp_path: Path) -> None:
    """Whole modules beside adapters, with all their states, and attention that keeps its scores."""
    file = tmp_path / "train.yaml"
    for added, fits in (("", True), (more, None)):
        file.write_text(AXOLOTL + added)
        found = so.audit(file, recipe="llama3_8b", gpus=8, cluster="dgx_h100")
        assert found.fits is fits
    assert f"by a price that knows nothing of {more.partition(':')[0]}\n" in str(found)


def test_whole_modules_that_llama_factory_trains_beside_adapters_are_no_plain_fit(tmp_path: Path) -> None:
    """model/adapter.py:265: additional_target is peft's modules_to_save."""
    file = tmp_path / "train.yaml"
    lines = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\nlora_rank: 16\nlora_target: all\ncutoff_len: 4096\n"
    for added, fits in (("", True), ("additional_target: embed_tokens,lm_head\n", None)):
        file.write_text(f"{lines}{added}output_dir: o\nbf16: true\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n")
        found = so.audit(file, recipe="qwen3_8b", gpus=8, cluster="dgx_a100_80gb")
        assert found.fits is fits
        assert found.reading.unknown == ()


def test_comments_and_a_last_comma_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{\n  // for 8 GPUs\n  "train_batch_size": 64,\n  "zero_optimization": {"stage": 2,},\n  "bf16": {"enabled": true},\n}\n'
    )
    found = so.audit(file, recipe="gpt2_xl", gpus=8, cluster="dgx_a100_80gb")
    assert found.plan is not None
    assert (found.plan.zero_stage, found.plan.training.precision, found.legal) == (2, "bf16", True)
    file.write_text('{"distributed_type": "DEEPSPEED", "num_processes": 8,}')
    with pytest.raises(InputError, match="is not JSON"):
        so.audit(file, recipe="gpt2_xl", gpus=8, cluster="dgx_a100_80gb")


def test_an_offload_to_a_disk_has_seconds_that_no_price_knows(tmp_path: Path) -> None:
    """And is one to the host's memory at other stages, which take the disk for no offload."""
    file = tmp_path / "ds_config.json"
    offload = {"device": "nvme", "nvme_path": "/local"}
    file.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 3, "offload_optimizer": offload}}))
    found = so.audit(file, recipe="gpt2_xl", gpus=8, cluster="dgx_a100_80gb")
    where = "zero_optimization.offload_optimizer.device"
    assert f'{where}="nvme"' in found.reading.slower
    source = formats.read(file.read_text(), str(file))
    changed = source.edited(found.setup, replace(found.setup, zero_stage=1), 8)
    assert changed is not None
    assert dict(leaves(content_of(changed, file.name)))[where] == "cpu"


@pytest.mark.parametrize(
    ("keys", "micro", "said"),
    [
        ({}, 2, "micro-batches of 2: the file does not say; DeepSpeed's are the batch over 8 ranks and 4 accumulation steps"),
        ({"pin": {"micro_batch_size": 2}}, 2, ""),
        ({"pin": {"micro_batch_size": 1}}, 1, "gradient_accumulation_steps=4 is not kept: 64 are no 4 micro-batches of 1 on 8 ranks"),
    ],
)
def test_accelerates_accumulation_says_the_micro_batch_of_a_batch(tmp_path: Path, keys: dict[str, Any], micro: int, said: str) -> None:
    """The batch over it and the ranks: micro-batches of 1 were assumed, and those of the file then advised."""
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
                    "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4}\n")  # fmt: skip
    found = so.audit(file, recipe="gpt2_xl", cluster="dgx_a100_80gb", train={"global_batch_size": 64}, **keys)
    assert found.plan is not None
    assert found.plan.micro_batch_size == micro
    assert [line for line in found.reading.assumed if "micro-batches" in line] == [said] * bool(said)
