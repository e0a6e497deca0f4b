"""A user's own program, checkpoints under another layout, recorded partitions: functions called one by one, on both sides of each rule."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hand_plans import BERT, GPT, LLAMA, T5, make_plan, training_for
from msgspec.structs import replace

import orchestrator as so
from orchestrator.engines import ENGINES, translation
from orchestrator.engines import entry as entries
from orchestrator.engines import traced as recorded
from orchestrator.engines.deepspeed import entry as deepspeed
from orchestrator.engines.deepspeed.translate import why_no_exchange
from orchestrator.engines.ds_states import why_no_resume
from orchestrator.engines.engine import Entry
from orchestrator.engines.hf_config import export_fields
from orchestrator.engines.megatron import entry as megatron
from orchestrator.engines.megatron import program
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.job import File, Job
from orchestrator.model.traced import Divided, Traced
from orchestrator.plan import Plan, Prediction, RunSettings
from orchestrator.plan.check import has_states_by_place

JOB = Job(name="j", module="ours", arguments=(), environment={}, files=(), num_nodes=1, ranks_per_node=8, backend="nccl")


def plan(engine: str = "megatron", run: RunSettings | None = None, **choices: Any) -> Plan:
    return replace(make_plan(engine, LLAMA, **choices), run=run or RunSettings())


def entry(*arguments: str, **fields: Any) -> Entry:
    return Entry(**({"program": "mine.py", "arguments": arguments} | fields))


def pairs(words: tuple[str, ...]) -> dict[str, str]:
    """Flags with the word after them."""
    return {word: after for word, after in zip(words, (*words[1:], ""), strict=True) if word.startswith("--")}


# ---- Megatron's programs


def test_a_program_gets_the_plans_flags_and_those_for_a_run_that_nobody_watches() -> None:
    found = megatron.arguments(plan(), entry("--my-flag", "3"))
    assert found[-2:] == ("--my-flag", "3")
    assert "--log-throughput" in found
    assert "--log-straggler" in found
    assert "--log-straggler" not in megatron.arguments(plan(gpu="cpu"), entry())
    saving = RunSettings(save_every=5)
    names = {flag[0] for flag in megatron.useful_flags(plan(run=saving), 30)}
    assert megatron.arguments(plan(run=saving), entry()).count("--load") == 1
    more = {"--async-save", "--use-persistent-ckpt-worker", "--exit-signal-handler", "--exit-signal",
            "--dist-ckpt-optim-fully-reshardable", "--exit-duration-in-mins"}  # fmt: skip
    assert names == {"--log-throughput", "--log-straggler"} | more
    assert {flag[0] for flag in megatron.useful_flags(plan(), 30)} == {"--log-throughput", "--log-straggler"}
    assert "--dist-ckpt-optim-fully-reshardable" not in {flag[0] for flag in megatron.useful_flags(plan(run=saving, zero_stage=0))}
    for minutes, said in ((None, False), (0, False), (-1, False), (1, True)):
        assert any(flag[0] == "--exit-duration-in-mins" for flag in megatron.useful_flags(plan(run=saving), minutes)) is said
    late = plan(run=RunSettings(step_timeout_s=90.0))
    assert ("--distributed-timeout-minutes", "2") in megatron.useful_flags(late)


def test_a_users_flags_replace_ours_where_they_decide_nothing_and_contradict_elsewhere() -> None:
    found = megatron.arguments(plan(), entry("--split", "9,1,0", "--data-path", "/mine"))
    assert found.count("--split") == 1
    assert "--mock-data" not in found
    assert "--mock-data" in megatron.arguments(plan(), entry("--split=9,1,0"))
    for words in (("--micro-batch-size", "2"), ("--lr=1",), ("--hidden-size", "3")):
        with pytest.raises(InputError, match=rf"entry.args={words[0].partition('=')[0]}: the plan says {words[0].partition('=')[0]} "):
            megatron.arguments(plan(), entry(*words))
    assert "--log-straggler" not in megatron.arguments(plan(), entry(without=("--log-straggler",)))
    with pytest.raises(InputError, match=r"entry.without=--lr: is no flag that we add; choose one of --log-throughput, --log-straggler"):
        megatron.arguments(plan(), entry(without=("--lr",)))
    megatron.arguments(plan(), entry(without=("--lr",), trial_steps=3))
    with pytest.raises(InputError, match=r"entry=mine.py: can't be started with this plan: "):
        megatron.arguments(plan(training=training_for(LLAMA, seed=0)), entry())


def test_a_trial_takes_its_steps_at_the_trainings_rates_and_saves_nothing() -> None:
    words = ("--save", "/there", "--eval-interval=5", "--my-flag", "3", "--profile")
    whole, trial = (megatron.arguments(plan(), entry(*words, trial_steps=steps)) for steps in (None, 7))
    assert (pairs(whole)["--train-iters"], pairs(trial)["--train-iters"]) == ("20", "7")
    assert pairs(trial)["--lr-decay-iters"] == "20"
    assert ("--save" in whole, "--save" in trial, "--profile" in trial, "/there" in trial) == (True, False, False, False)
    assert trial[-2:] == ("--my-flag", "3")
    assert megatron.without_flags(["word", "--a", "1", "2", "--b=3", "--c"], ["--a", "--b"]) == ("word", "--c")
    assert megatron.start(plan(), JOB, entry()).program == "mine.py"
    with pytest.raises(InputError, match=r"entry.launcher=deepspeed: starts DeepSpeed's scripts, and the plan is for engine=megatron"):
        megatron.start(plan(), JOB, entry(launcher="deepspeed"))


# ---- DeepSpeed's scripts


CONFIG = File(path="ds_config.json", content=json.dumps({"wandb": {"a": 1}, "wall_clock_breakdown": False, "train_batch_size": 8}))


def started(*words: str, **fields: Any) -> Job:
    job = replace(JOB, files=(CONFIG, replace(CONFIG, path="other.json")), environment={"A": "1"})
    settings = fields.pop("run", None)
    return deepspeed.start(plan("deepspeed", run=settings), job, entry(*words, **fields))


def test_a_script_gets_the_planned_configuration_with_a_monitor() -> None:
    job = started("--lr", "1")
    assert (job.program, job.arguments) == ("mine.py", ("--deepspeed", "ds_config.json", "--lr", "1"))
    first, other = (json.loads(file.content) for file in job.files)
    assert first == {
        "wall_clock_breakdown": False,
        "csv_monitor": deepspeed.MONITOR["csv_monitor"],
        "wandb": {"a": 1},
        "train_batch_size": 8,
    }
    assert other == json.loads(CONFIG.content)
    trial = json.loads(started(trial_steps=3).files[0].content)
    assert trial == deepspeed.MONITOR | {"train_batch_size": 8}, "measured by our monitor alone"
    assert job.environment == {"A": "1"}
    assert started(run=RunSettings(step_timeout_s=61.0)).environment == {"A": "1", "DEEPSPEED_TIMEOUT": "2"}
    assert started(launcher="deepspeed").launcher == "deepspeed"


def test_a_script_may_name_its_configuration_but_not_take_ours_from_us() -> None:
    for words, own in ((("--deepspeed_config", "a.json"), "a.json"), (("--deepspeed_config=b.json",), "b.json"), (("--x",), None),
                       (("--deepspeed_config",), ""), (("a", "--deepspeed", "--deepspeed_config", "c"), "c")):  # fmt: skip
        assert deepspeed.own_config(words) == own
    assert started("--deepspeed", "--deepspeed_config", "a.json").arguments == ("--deepspeed", "--deepspeed_config", "a.json")
    assert started("--deepspeed_config", "ds_config.json", trial_steps=3).arguments == ("--deepspeed_config", "ds_config.json")
    assert started("--deepspeed_config", "./ds_config.json", trial_steps=3).program == "mine.py"
    for words, fields, why in (
        (("--deepspeed",), {}, "entry.args=--deepspeed: is ours: --deepspeed ds_config.json"),
        (
            ("--deepspeed_config", "a.json"),
            {"trial_steps": 3},
            "entry.args=--deepspeed_config a.json: is the same for all plans that",
        ),
        ((), {"without": ("--x", "--y")}, "entry.without=--x: is for Megatron's programs"),
    ):
        with pytest.raises(InputError) as caught:
            started(*words, **fields)  # type: ignore[arg-type]
        assert str(caught.value).startswith(why)


def test_a_timeout_is_whole_minutes_where_it_is_said() -> None:
    default = RunSettings().step_timeout_s
    for seconds, minutes in ((default, None), (0.0, None), (0.5, 1), (60.0, 1), (60.5, 2), (121.0, 3)):
        assert entries.timeout_minutes(plan(run=RunSettings(step_timeout_s=seconds))) == minutes


@pytest.mark.parametrize(("of", "engine"), [("hugging_face", "deepspeed"), ("megatron", "megatron")])
def test_a_copy_of_our_program_loads_and_exports_weights_as_ours_does(of: str, engine: str, tmp_path: Path) -> None:
    """A pretrained classifier with labels of one's own: entry= and model.init_from= excluded each other."""
    program = tmp_path / "mine.py"
    program.write_text(files("orchestrator.programs").joinpath(f"{of}.py").read_text() + "# mine\n")
    assert entries.engine_of_entry(ENGINES, str(program)) == entries.engine_of_copy(ENGINES, str(program)) == engine
    keys = {"recipe": "llama_tiny", "gpus": 2, "cluster": "cpu", "model": {"export_to": str(tmp_path / "out")}}
    answer = so.plan(**keys, entry=str(program))
    assert (answer.plan.engine, answer.plan.run.export_to) == (engine, str(tmp_path / "out"))
    program.write_text("print('mine')\n")
    with pytest.raises(
        InputError, match=r"model.export_to=.* is for our workers; entry=.*mine.py loads and writes weights itself, unless it"
    ):
        so.plan(**keys, entry=str(program))


def test_a_program_is_started_by_an_engine_that_starts_some_and_from_no_checkpoint_of_ours() -> None:
    assert entries.engine_of_entry(ENGINES, "mine.py") == next(name for name in ENGINES if ENGINES[name].entry is not None)
    assert entries.entry_job(ENGINES, plan(), JOB, entry()).program == "mine.py"
    with pytest.raises(InputError, match=r"train.resume=old: is a checkpoint of our worker, and entry= starts another program"):
        entries.entry_job(ENGINES, plan(run=RunSettings(resume="old")), JOB, entry())
    without = {name: replace(engine, entry=None) if name == "megatron" else engine for name, engine in ENGINES.items()}
    able = [name for name, engine in without.items() if engine.entry is not None]
    with pytest.raises(InputError) as caught:
        entries.entry_job(without, plan(), JOB, entry())
    assert str(caught.value).startswith("entry=mine.py: engine=megatron is our worker's own; a program of yours can be started with one of")
    assert caught.value.choices is not None
    assert list(caught.value.choices) == able


# ---- checkpoints


def test_states_that_stand_by_their_places_go_anywhere_and_others_into_the_same_layout() -> None:
    def of(stage: int = 1, **fields: Any) -> Plan:
        return make_plan("deepspeed", LLAMA, zero_stage=stage, training=training_for(LLAMA, **fields))

    for one, able in ((of(), True), (of(3), True), (of(0), False), (of(0, precision="fp32"), True), (of(1, precision="fp16"), False),
                      (of(1, optimizer="sgd"), False), (of(0, precision="fp32", optimizer="sgd"), False)):  # fmt: skip
        assert has_states_by_place(one) is able
    half = of(0)
    assert why_no_resume(of(1), of(3)) is None
    assert why_no_resume(half, half) is None
    narrow = make_plan("deepspeed", LLAMA, zero_stage=0, tp=2)
    assert why_no_resume(half, narrow) == (
        "was written with tp=1 (now 2), dp=8 (now 4); with zero_stage=0 in bf16 it goes on in the same layout only: "
        "pin.tp=1 pin.pp=1 pin.zero_stage=0 on 8 ranks"
    )
    assert (why_no_resume(half, of(1)) or "").startswith("was written with zero_stage=0 (now 1); ")
    assert (why_no_resume(of(0, precision="fp32"), half) or "").startswith("was written with precision fp32; ")
    packed = [of(1, task="sft", packing=True), make_plan("deepspeed", LLAMA, cp=2, training=training_for(LLAMA, task="sft", packing=True))]
    assert (why_no_resume(*packed) or "").startswith("packs samples padded to a multiple of 1 tokens (cp=1), and cp=2 to one of 4: ")
    assert ENGINES["megatron"].why_no_resume(*packed) == why_no_resume(*packed)
    assert why_no_resume(packed[1], packed[1]) is None
    staged = [make_plan("megatron_deepspeed", LLAMA, zero_stage=0, pp=2, sizes=sizes) for sizes in ([5, 3], [4, 4])]
    assert (why_no_resume(*staged) or "").startswith("was written with stages=[6, 4] (now [5, 5]); ")


# ---- recorded models


def test_a_partition_is_said_by_patterns_of_names() -> None:
    for divided, spec in (
        (Divided(pattern="up", by="column"), {"patterns": [r"up\.weight$"], "partition_type": "column"}),
        (Divided(pattern="down", by="row"), {"patterns": [r"down\.weight$"], "partition_type": "row"}),
        (Divided(pattern="norm", by="summed"), {"patterns": ["norm$"], "partition_type": "skip", "grad_allreduce": True}),
        (Divided(pattern="qkv", by="column", parts=(4, 4, 4)),
         {"patterns": [r"qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0}),
        (Divided(pattern="qkv", by="column", parts=(8, 4)),
         {"patterns": [r"qkv\.weight$"], "partition_type": "column", "shape": [[8, 4], -1], "partition_dim": 0}),
    ):  # fmt: skip
        assert recorded.partition_config([divided]) == {"use_default_specs": False, "layer_specs": [spec]}
    sizes: dict[str, Any] = {"seq_length": 8, "itemsize": 2, "hidden_size": 8, "ffn_hidden_size": 8, "max_position_embeddings": 8}
    divided = tuple(Divided(pattern=name, by=by) for name, by in (("a", "column"), ("b", "row"), ("c", "summed")))  # type: ignore[arg-type]
    one = Traced(model_class="New", feeds=(), runs=(), divided=divided, **sizes)
    said = "tp=2 divides 2 kinds of linears of New (ds_config.json, tensor_parallel.partition_config)"
    assert recorded.partition_note(one, 2) == f"{said}."
    assert recorded.partition_note(replace(one, undivided=("x is odd", "y too")), 2) == f"{said}; whole: x is odd; y too."
    for choices, built, checkpointed in (({"zero_stage": 3}, True, False), ({"zero_stage": 3, "tp": 2}, False, False),
                                         ({"recompute": [("full", 8)]}, False, True), ({}, False, False)):  # fmt: skip
        base = make_plan("deepspeed", LLAMA, **choices)  # type: ignore[arg-type]
        fields = recorded.traced_fields(replace(base, model=replace(LLAMA, traced=one)))
        assert (fields["zero_init"], fields["gradient_checkpointing"], fields["dtype"]) == (built, checkpointed, "bfloat16")


# ---- what Megatron-LM's programs are told


def test_data_are_looked_at_document_by_document_for_gpt_alone() -> None:
    assert program.of_documents(plan()) == program.words(plan())
    assert program.words(plan())[:2] == ["--num-layers", "8"]
    assert program.of_documents(plan(zero_stage=2)) == (), "no command line says that plan"
    assert program.of_documents(make_plan(model=BERT)) is None
    assert program.of_documents(make_plan(model=T5)) is None


def test_another_plan_beside_a_job_says_how_much_slower_it_is_and_why_it_is_there() -> None:
    ours, other = (replace(plan(**choices), predicted=predicted(seconds)) for choices, seconds in (({}, 10.0), ({"tp": 2}, 12.5)))
    job = replace(JOB, files=(File(path="a", content="b"), File(path="megatron_args.sh", content="old")),
                  notes=("first", f"{program.NOT_WRITTEN}it can't be said"))  # fmt: skip
    found = program.beside(job, ours, other)
    assert [file.path for file in found.files] == ["a", "megatron_args.sh"]
    assert "'--tensor-model-parallel-size' '2'" in found.files[1].content or "--tensor-model-parallel-size '2'" in found.files[1].content
    said = f"megatron_args.sh has another plan, the fastest found that its flags can say: {other.candidate.label()}"
    assert found.notes[:2] == ("first", f"{said}, predicted 12.5 s a step (+25.0%); it can't be said")
    assert program.beside(job, replace(ours, predicted=None), other).notes[1] == f"{said}; it can't be said"
    assert program.beside(replace(job, notes=()), ours, replace(other, predicted=None)).notes[0] == said


def predicted(seconds: float) -> Prediction:
    return Prediction(
        step_time_s=seconds, tokens_per_s_per_gpu=1.0, peak_memory_bytes=1.0, by_stage=(), by_cause={}, model_flops_per_gpu=1.0
    )


# ---- weights that go to transformers and come from it


def test_weights_are_exchanged_where_both_sides_compute_the_same_model() -> None:
    assert translation.why_no_exchange("megatron", LLAMA, "llama") is None
    assert translation.why_no_exchange("megatron", BERT, "megatron-bert") is None
    for a, kind, why in (
        (T5, "t5", "megatron-core's t5 is another function than transformers'"),
        (BERT, "bert", "engine=megatron has a pre-norm BERT (model_type megatron-bert in transformers), the checkpoint's is post-norm"),
        (replace(GPT, position_embedding="none"), "gpt2", "position_embedding=none: transformers' "),
    ):
        assert (translation.why_no_exchange("megatron", a, kind) or "").startswith(why)
    assert why_no_exchange(LLAMA, "llama") is why_no_exchange(BERT, "bert") is None
    assert why_no_exchange(replace(T5, tie_embeddings=True), "t5") is None
    assert (why_no_exchange(replace(T5, tie_embeddings=False), "t5") or "").startswith(
        "tie_embeddings=false: transformers 5 builds every T5"
    )
    assert (why_no_exchange(BERT, "megatron-bert") or "").startswith("engine=deepspeed has a post-norm BERT")
    sizes: dict[str, Any] = {"seq_length": 8, "itemsize": 2, "hidden_size": 8, "ffn_hidden_size": 8, "max_position_embeddings": 8}
    own, theirs = (Traced(model_class="New", config=config, feeds=(), runs=(), **sizes) for config in ("", "{}"))
    assert why_no_exchange(replace(LLAMA, traced=theirs), "x") is None
    assert (why_no_exchange(replace(LLAMA, traced=own), "x") or "").startswith("weights of New, which model.code= makes, are neither")


def test_an_exported_model_is_named_as_transformers_builds_it() -> None:
    for a, names in ((LLAMA, ("LlamaConfig", "LlamaForCausalLM")), (GPT, ("GPT2Config", "GPT2LMHeadModel")),
                     (BERT, ("MegatronBertConfig", "MegatronBertForMaskedLM"))):  # fmt: skip
        found = export_fields(a)
        assert (found["config_class"], found["model_class"]) == names
        assert ("num_key_value_heads" in found["config"]) is (a is LLAMA), "unknown to GPT-2 and BERT"


def test_layers_run_on_the_distributions_of_their_release() -> None:
    def on(version: str, **more: Any) -> dict[str, str]:
        return translation.layers_versions(plan(software=Software(megatron_core=version, **more)).cluster)

    assert on("0.16.1") == {"megatron-core": "0.16.1", "transformer-engine": ""}
    assert on("0.16.1", transformer_engine=False) == {"megatron-core": "0.16.1"}
    assert on("0.19.2", transformer_engine=False) == {"megatron-core": "0.19.2", "triton": ""}
    assert [len(translation.version_notes(plan(software=Software(megatron_core=version)))) for version in ("0.16.1", "0.17.0")] == [
        0,
        1,
    ]
    exported = plan(run=RunSettings(export_to="/w"))
    passes = ENGINES["megatron"].passes
    assert ["export" in translation.layers_fields(one, passes) for one in (plan(), exported)] == [False, True]
