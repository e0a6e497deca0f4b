"""Translation: exact files, and what must be in them."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from covering_plans import ALL, DEEPSPEED, MEGATRON
from hand_plans import BERT, GPT, LLAMA, T5, engine_fields, make_plan, training_for, workload_of
from msgspec.structs import replace

from orchestrator import api
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron.entry import useful_flags
from orchestrator.engines.megatron.translate import prediction_notes
from orchestrator.engines.megatron_args import common_recompute, megatron_flags, why_not
from orchestrator.engines.transformer_config import layout, recompute_fields
from orchestrator.errors import InputError
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.plan import LayerSpan, Plan, RunSettings, Stage, from_json, to_json
from orchestrator.strategy.legality import broken_rule
from orchestrator.strategy.spec import PP_BEFORE_DP, Recompute

GOLDEN = Path(__file__).parent / "golden"
FLAGS = {"0.16.1": "megatron_flags.csv", "0.19.2": "megatron_flags_0.19.csv"}
"""What the parser of each release's tag takes (tests/megatron_lm/flags.py)."""
REGENERATE = "REGENERATE_GOLDEN"
"""Set this variable to write the golden files anew; then read the difference."""


def without_recompute(plan: Plan) -> Plan:
    stages = tuple(replace(stage, layers=tuple(replace(span, recompute="none") for span in stage.layers)) for stage in plan.stages)
    return replace(plan, stages=stages)


SAID = {name: plan if why_not(plan) is None else without_recompute(plan) for name, plan in MEGATRON.items()}
"""Plans that Megatron's command line can say."""


def of_version(plan: Plan, megatron_core: str) -> Plan:
    software = replace(plan.cluster.software, megatron_core=megatron_core)
    return replace(plan, cluster=replace(plan.cluster, software=software))


def job_of(plan: Plan) -> Job:
    return ENGINES[plan.engine].translate(plan)


def file_of(plan: Plan, path: str) -> str:
    return next(file.content for file in job_of(plan).files if file.path == path)


def listing(job: Job) -> dict[str, str]:
    """Everything of a job as files."""
    rest = {
        "name": job.name,
        "argv": ["-m", job.module, *job.arguments],
        "environment": job.environment,
        "shape": [job.num_nodes, job.ranks_per_node],
        "backend": job.backend,
        "notes": list(job.notes),
    }
    return {"job.json": json.dumps(rest, indent=2) + "\n"} | {file.path: file.content for file in job.files}


def same(left: Any, right: Any) -> bool:
    """Equal, numbers to 1e-9."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9)
    return type(left) is type(right) and bool(left == right)


@pytest.mark.parametrize("name", ALL)
def test_the_job_is_the_golden_one(name: str) -> None:
    folder = GOLDEN / name
    files = listing(job_of(ALL[name]))
    if os.environ.get(REGENERATE):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for path, content in files.items():
            (folder / path).write_text(content)
    assert {path.name for path in folder.iterdir()} == files.keys()
    for path, content in files.items():
        golden = (folder / path).read_text()
        if path.endswith(".json"):
            assert same(json.loads(content), json.loads(golden)), path
        else:
            assert content == golden, path


@pytest.mark.parametrize("name", ALL)
def test_every_covering_plan_is_legal(name: str) -> None:
    plan = ALL[name]
    capabilities = ENGINES[plan.engine].capabilities(plan.cluster.software)
    broken = broken_rule(capabilities, plan.candidate, workload_of(plan))
    assert broken is None, broken


@pytest.mark.parametrize("name", ALL)
def test_a_plan_read_back_from_json_makes_the_same_job(name: str) -> None:
    plan = ALL[name]
    assert job_of(from_json(to_json(plan))) == job_of(plan)


@pytest.mark.parametrize("version", FLAGS)
@pytest.mark.parametrize("name", SAID)
def test_every_flag_is_known_to_megatrons_parser_with_as_many_values(name: str, version: str) -> None:
    with (Path(__file__).parent / FLAGS[version]).open() as file:
        known = {flag: row for row in csv.DictReader(file) for flag in row["flag"].split("|")}
    flags = megatron_flags(of_version(SAID[name], version))
    assert len({flag[0] for flag in flags}) == len(flags), "a flag twice"
    for flag, *values in flags:
        row = known[flag]
        if row["nargs"] == "0":
            assert not values, flag
        elif row["nargs"] in ("+", "*"):
            assert values, flag
        else:
            assert len(values) == 1, flag
        for value in values:
            if row["type"] == "int":
                int(value)
            if row["type"] == "float":
                float(value)
            if row["choices"]:
                assert f"'{value}'" in row["choices"], (flag, value)


@pytest.mark.parametrize("name", SAID)
def test_bash_reads_back_the_exact_argument_list(name: str, tmp_path: Path) -> None:
    path = tmp_path / "megatron_args.sh"
    path.write_text(file_of(SAID[name], "megatron_args.sh"))
    script = f'source {shlex.quote(str(path))}; printf "%s\\0" "${{MEGATRON_ARGS[@]}}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [word for flag in megatron_flags(SAID[name]) for word in flag]


def test_a_path_can_not_break_out_of_its_quotes(tmp_path: Path) -> None:
    plan = make_plan()
    evil = f"/x'; touch {tmp_path}/broken; $(touch {tmp_path}/broken) \n `id`.bin"
    plan = replace(plan, run=replace(plan.run, data=evil))
    path = tmp_path / "args.sh"
    path.write_text(file_of(plan, "megatron_args.sh"))
    script = f'source {path}; printf "%s\\0" "${{MEGATRON_ARGS[@]}}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert evil.removesuffix(".bin") in done.stdout.split("\0")
    assert not (tmp_path / "broken").exists()


def test_an_even_split_needs_no_layout_and_an_uneven_one_gets_it_chunk_after_chunk() -> None:
    assert layout(make_plan(pp=4)) is None
    assert layout(make_plan(pp=4, sizes=[1, 3, 3, 1])) == "Et|t*3|t*3|tL"
    assert layout(make_plan(pp=2, vpp=2, sizes=[1, 2, 3, 2])) == "Et|t*2|t*3|t*2L"
    assert layout(make_plan(pp=4, sizes=[0, 4, 4, 0])) == "E|t*4|t*4|L"


def test_recompute_of_a_stage_is_block_for_full_and_core_attention_for_selective() -> None:
    plan = make_plan(pp=4, recompute=[("full", 1), ("full", 2), ("selective", 2), ("none", 0)])
    found = [recompute_fields(plan, stage) for stage in range(4)]
    assert [fields["recompute_granularity"] for fields in found] == ["full", "full", "selective", None]
    assert [fields["recompute_num_layers"] for fields in found] == [1, 2, None, None]
    assert found[2]["recompute_modules"] == ["core_attn"]


@pytest.mark.parametrize(
    ("recompute", "sizes", "expected"),
    [
        ([("none", 0), ("none", 0)], None, {}),
        ([("mlp", 4), ("mlp", 4)], None, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        ([("full", 2), ("full", 2)], None, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}),
        ([("full", 5), ("full", 3)], [5, 3], {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5}),
        ([("full", 4), ("full", 3)], [5, 3], {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}),
        ([("none", 0), ("mlp", 8)], [0, 8], {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        ([("full", 4), ("full", 2)], [5, 3], None),
        ([("none", 0), ("full", 1)], None, None),
        ([("full", 1), ("mlp", 4)], None, None),
        ([("layernorm", 4), ("mlp", 4)], None, None),
    ],
)
def test_the_one_recompute_setting_of_the_command_line_is_that_of_every_stage_or_none(
    recompute: list[tuple[Recompute, int]], sizes: list[int] | None, expected: dict[str, Any] | None
) -> None:
    """--recompute-method block takes the first N layers of each chunk, or all where it has fewer (transformer_block.py)."""
    plan = make_plan(model=LLAMA, pp=2, recompute=recompute, sizes=sizes)
    found = common_recompute(plan)
    assert (found and {name: value for name, value in found.items() if value is not None}) == expected
    files = {file.path for file in job_of(plan).files}
    assert ("megatron_args.sh" in files) == (expected is not None)


def test_an_encoder_and_a_decoder_recompute_as_many_layers_each() -> None:
    assert recompute_fields(make_plan(model=T5, recompute=[("full", 3)]), 0)["recompute_num_layers"] == 3


@pytest.mark.parametrize("modes", [("none", "full"), ("selective", "none"), ("full", "selective")])
def test_recompute_that_megatron_can_not_do_is_refused_by_name(modes: tuple[str, str]) -> None:
    plan = make_plan()
    spans = [
        LayerSpan(kind="embedding", first=0, count=1),
        *(LayerSpan(kind="decoder", first=4 * i, count=4, recompute=mode) for i, mode in enumerate(modes)),  # type: ignore[arg-type]
        LayerSpan(kind="head", first=0, count=1),
    ]
    with pytest.raises(InputError, match=r"stages\[0\].recompute"):
        job_of(replace(plan, stages=(Stage(layers=tuple(spans)),)))


def test_two_interleaved_stages_overlap_their_sends() -> None:
    """README, silently wrong 1."""
    fields = engine_fields(make_plan(pp=2, vpp=2))["transformer_config"]
    assert (fields["overlap_p2p_comm"], fields["batch_p2p_comm"]) == (True, False)


@pytest.mark.parametrize("vocab_size", [260, 500, 513])
def test_the_vocabulary_is_padded_to_one_size_under_every_layout(vocab_size: int) -> None:
    """The worker's and the argument list's: Megatron's own default pads 260 to 384 at tp=1 and to 512 at tp=2, and the first loss differs
    by ln(512/384) = 0.28."""
    model = replace(GPT, vocab_size=vocab_size)
    sizes = set()
    for tp in (1, 2, 4, 8):
        plan = make_plan(model=model, tp=tp)
        flags = {flag: values for flag, *values in megatron_flags(plan)}
        sizes.add(engine_fields(plan)["model"]["vocab_size"])
        unit = int(*flags["--make-vocab-size-divisible-by"]) * tp  # Megatron-LM core_v0.16.1, training/tokenizer/tokenizer.py:117
        sizes.add(-(-(int(*flags["--vocab-size"]) + 1) // unit) * unit)
    assert sizes == {-(-vocab_size // 128) * 128}


def test_only_megatron_itself_accumulates_gradients_in_its_own_buffer() -> None:
    """DeepSpeed reads param.grad, which the fused kernel leaves empty."""
    assert engine_fields(make_plan(tp=2))["transformer_config"]["gradient_accumulation_fusion"]
    deepspeed = make_plan("megatron_deepspeed", tp=2)
    assert not engine_fields(deepspeed)["transformer_config"]["gradient_accumulation_fusion"]
    assert engine_fields(deepspeed)["ddp"] is None


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_ds_config_leaves_no_default_that_changes_training(name: str) -> None:
    """README, silently wrong 5, 8, 10 and 12."""
    plan = DEEPSPEED[name]
    config = json.loads(file_of(plan, "ds_config.json"))
    assert config["gradient_clipping"] == plan.training.clip
    assert ("train_batch_size" in config) == (plan.tp == 1)
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.dp == plan.global_batch_size
    assert config["optimizer"]["params"]["lr"] == plan.training.lr
    assert "auto" not in json.dumps(config)
    mixed = plan.training.precision != "fp32"
    stated = config.get("data_types", {}).get("grad_accum_dtype")
    assert stated == (plan.training.grad_accum_dtype if mixed and plan.zero_stage >= 1 else None)
    zero = config["zero_optimization"]
    assert zero["stage"] == plan.zero_stage
    assert zero.get("allgather_bucket_size", 0) % 2 == 0
    if plan.zero_stage == 3:
        assert zero["stage3_max_live_parameters"] >= 2 * zero["stage3_prefetch_bucket_size"]
    engine = json.loads(file_of(plan, "engine.json"))["ds_config"]
    assert engine == {key: value for key, value in config.items() if key != "scheduler"}


def test_megatrons_arguments_are_not_written_where_megatron_can_not_say_the_plan() -> None:
    for plan in (DEEPSPEED["ds_llama3_8b_zero3"], DEEPSPEED["ds_offload"], DEEPSPEED["ds_llama3_8b_zero1_pp"], MEGATRON["gpt_cpu"]):
        job = job_of(plan)
        assert "megatron_args.sh" not in {file.path for file in job.files}
        assert any("megatron_args.sh was not written" in note for note in job.notes)
    geglu = make_plan(model=replace(LLAMA, activation="geglu"))
    assert any("geglu" in note for note in job_of(geglu).notes)


@pytest.mark.parametrize(
    ("model", "training", "why"),
    [
        (GPT, {"seed": 0}, "seed=0"),
        (GPT, {"warmup": 20, "steps": 20}, "train.warmup=20 of train.steps=20"),
        (replace(LLAMA, rope_scaling_factor=32.0), {}, "by 8, not 32"),
        (replace(T5, activation="gelu", decoder_num_layers=2), {}, "4, not 2"),
        (replace(BERT, position_embedding="rope"), {}, "learned positions, not rope"),
    ],
)
def test_what_megatrons_programs_refuse_or_never_give_to_the_model_is_no_argument_list(
    model: Architecture, training: dict[str, Any], why: str
) -> None:
    """Megatron-LM core_v0.16.1: training/initialize.py _set_random_seed, OptimizerParamScheduler; gpt_builders.py gives no scaling factor,
    pretrain_t5.py:115 takes the encoder's layers twice, pretrain_bert.py:66 no kind of positions."""
    job = job_of(make_plan(model=model, training=training_for(model, **training)))
    assert "megatron_args.sh" not in {file.path for file in job.files}
    assert any(why in note for note in job.notes)


def test_llama_3_1_is_said_on_the_command_line() -> None:
    assert ("--rope-scaling-factor", "8.0") in megatron_flags(make_plan(model=replace(LLAMA, rope_scaling_factor=8.0)))


def test_the_vocabulary_is_the_models_whatever_the_tokenizer_counts() -> None:
    """Megatron pads the tokenizer's own count otherwise (tokenizer.py:111): Qwen2's has 151,665 ids, the model 152,064 rows."""
    plan = make_plan(tp=2, run=RunSettings(data="/data/all.idx", tokenizer="/models/qwen"))
    assert ("--padded-vocab-size", "512") in megatron_flags(plan)


@pytest.mark.parametrize("name", SAID)
def test_the_evaluation_interval_is_always_said(name: str) -> None:
    """None by default, and Megatron-LM divides by it with --eval-iters 0 too (core_v0.16.1 to 0.19.0, training/training.py:3307)."""
    plan = SAID[name]
    flags = {flag: values for flag, *values in megatron_flags(plan)}
    assert flags["--eval-interval"] == [str(plan.run.eval_every or plan.training.steps)]
    assert flags["--eval-iters"] == [str(plan.run.eval_steps if plan.run.eval_every else 0)]


def test_megatron_saves_beside_the_training_only_with_a_worker_for_it() -> None:
    """Without it --async-save is turned off with a warning (Megatron-LM core_v0.16.1, arguments.py:1139)."""
    flags = useful_flags(make_plan(run=RunSettings(save_every=10)))
    assert {("--async-save",), ("--use-persistent-ckpt-worker",)} <= {*flags}


def test_the_other_rank_order_has_its_flag_and_only_that() -> None:
    plan = make_plan(pp=2, tp=2)
    other = replace(plan, rank_order=PP_BEFORE_DP)
    assert [flag for flag in megatron_flags(other) if flag not in megatron_flags(plan)] == [("--use-tp-pp-dp-mapping",)]
    assert broken_rule(ENGINES["megatron"].capabilities(plan.cluster.software), other.candidate, workload_of(other)) is None


def test_what_the_command_line_says_otherwise_is_noted() -> None:
    job = job_of(make_plan(model=T5))
    assert any("has no flag for activation=relu; model.activation=gelu is what its programs train" in note for note in job.notes)
    assert not any(file.path == "megatron_args.sh" for file in job.files), "it trained GELU, which keeps more than was priced"
    assert any("one recompute setting for all stages" in note for note in job_of(MEGATRON["gpt_cpu"]).notes)
    notes = job_of(make_plan(model=BERT)).notes
    (needed,) = [note for note in notes if "mock data" in note]
    assert "--legacy-tokenizer" in needed, "or the program fetches a vocabulary from a network"
    assert any("segment embeddings" in note for note in notes)


def test_one_connection_only_where_megatron_asks_for_it() -> None:
    """Rule cuda_conn_1: tensor or context parallelism before Blackwell."""

    def connections(**choices: Any) -> str | None:
        return job_of(make_plan(**choices)).environment.get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert connections(tp=2) == "1"
    assert connections(cp=2) == "1"
    assert connections(pp=2) is None
    assert connections(tp=2, gpu="B200") is None
    assert connections(tp=2, gpu="cpu") is None


@pytest.mark.parametrize(
    ("choices", "asserted"), [({"tp": 2}, True), ({"cp": 2}, True), ({"pp": 2}, False), ({"tp": 2, "gpu": "B200"}, False)]
)
def test_the_command_in_the_header_says_one_connection_where_megatron_asserts_it(choices: dict[str, Any], asserted: bool) -> None:
    """By hand the variable is not set otherwise, and Megatron ends at once (arguments.py:951)."""
    command = file_of(make_plan(**choices), "megatron_args.sh").splitlines()[1]
    assert command.startswith("#   CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun " if asserted else "#   torchrun ")


def test_a_cpu_job_runs_on_gloo_and_tells_deepspeed_so() -> None:
    job = job_of(DEEPSPEED["ds_cpu_zero0"])
    assert (job.backend, job.environment["DS_ACCELERATOR"], job.world_size) == ("gloo", "cpu", 4)
    assert job_of(MEGATRON["t5_16"]).backend == "nccl"


def test_a_world_that_does_not_fill_its_nodes_evenly_is_refused() -> None:
    assert job_of(make_plan(world=12, training=training_for(GPT, global_batch_size=48))).ranks_per_node == 6
    with pytest.raises(InputError, match="gpus=9"):
        job_of(make_plan(world=9, training=training_for(GPT, global_batch_size=9)))


def test_prediction_heads_that_differ_from_one_process_are_said() -> None:
    whole, parts = make_plan(), make_plan(cp=2)
    predicting = replace(LLAMA, mtp_num_layers=1)
    assert prediction_notes(parts) == prediction_notes(replace(whole, model=predicting)) == []
    (note,) = prediction_notes(replace(parts, model=predicting))
    assert note.startswith("cp=2 with mtp_num_layers=1: megatron-core divides the loss of prediction heads by each rank's own tokens")


def test_amds_allocator_is_left_as_it_is() -> None:
    for cluster, said in (("dgx_h100", "expandable_segments:True"), ("mi300x_8", None)):
        job = api.plan(recipe="llama3_8b", gpus=8, cluster=cluster).job()
        assert job.environment.get("PYTORCH_CUDA_ALLOC_CONF") == said


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
for _ in range(20):
    tensor = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(tensor), ctypes.c_size_t(64), ctypes.c_size_t(64 << 20))
    libc.memset(tensor, 1, ctypes.c_size_t(64 << 20))
    libc.free(tensor)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
"""Twenty blocks of 64 MiB, as torch asks for them, one after the other, and how many pages were mapped."""


def test_a_rank_on_cpus_maps_no_tensor_anew() -> None:
    """Its steps took half as long again from the tensors of 32 MiB on, which glibc maps and forgets: 16,384 pages each here."""
    given = os.environ | job_of(MEGATRON["gpt_cpu"]).environment
    found = subprocess.run([sys.executable, "-c", FAULTS], env=given, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 3 * 16_384
