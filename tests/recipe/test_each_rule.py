"""Rules of keys one by one, each on both of its sides: what is taken as it stands, and what one word more or less makes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.detect import Machine
from orchestrator.engines.hf_config import config_keywords
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.job import SlurmOptions
from orchestrator.model.architecture import Architecture, Run
from orchestrator.model.families import from_hf_config
from orchestrator.model.lora import Lora
from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import Routing
from orchestrator.model.training import Training
from orchestrator.plan import Plan, RunSettings, Source
from orchestrator.recipe import help as schema
from orchestrator.recipe import keys, machine, profiles, resuming, saved, settings, sources, starting, supervised, weights
from orchestrator.recipe import layers as site
from orchestrator.recipe import model as models
from orchestrator.recipe.clusters import load_cluster
from orchestrator.recipe.layers import Flat, filled, flatten, merge
from orchestrator.recipe.read import read_arguments
from orchestrator.units import GIB

GPT = Architecture(
    family="gpt", name="x", num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=260,
    max_position_embeddings=64,
)  # fmt: skip
EXPERTS = Experts(num_experts=4, topk=2, ffn_hidden_size=16)
MOE = replace(GPT, feed_forward=EXPERTS)
TRAINING = Training(global_batch_size=4, seq_length=32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where paths without a folder are looked for."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flat(*words: str) -> Flat:
    return merge([flatten(read_arguments(words), "")])


def held(rule: Callable[[Flat], Any], cases: Iterable[tuple[str, str | None]]) -> None:
    """Each line of words is refused with what begins so, or taken."""
    for words, why in cases:
        try:
            rule(flat(*words.split()))
            said = None
        except InputError as error:
            said = str(error)
        assert (said is None) == (why is None), (words, said)
        assert why is None or (said or "").startswith(why), (words, said)


# ---- settings


def test_questions_are_one_at_a_time_and_for_the_command_that_answers_them() -> None:
    held(settings._targets, [
        ("target.days=3", None), ("target.days=3 target.tokens_per_s=5", None), ("largest=seq_length", None), ("", None),
        ("target.cost=9", "target.cost=9: needs cluster.price_per_gpu_hour beside it"),
        ("target.cost=9 cluster.price_per_gpu_hour=2", None),
        ("target.days=3 largest=seq_length", "largest=seq_length: is another question than target.days; ask one"),
    ])  # fmt: skip


def test_a_tune_needs_several_plans_and_a_start() -> None:
    def rule(has_plan: bool = False, engine: str = "megatron") -> Callable[[Flat], None]:
        return lambda found: settings._check_tune(filled(found, keys.Actions), engine, found, has_plan=has_plan)

    held(rule(), [
        ("", None), ("tune=3", None), ("tune=3 tune.steps=5 tune.rounds=2", None), ("tune=3 launch=local", None),
        ("tune.steps=5", "tune.steps=5: is of the plans that tune=K tries"),
        ("tune.rounds=2", "tune.rounds=2: is of the plans that tune=K tries"),
        ("tune=3 launch=none", "tune=3: measures plans, and launch=none starts nothing; choose one of launch=local, launch=auto"),
    ])  # fmt: skip
    held(rule(has_plan=True), [("", None), ("tune=3", "tune=3: tries several plans, and plan= names one")])
    held(rule(engine="layerwise"), [("", None), ("tune=3", "tune=3: runs plans, and engine=layerwise starts nothing")])


def test_failures_need_a_storage_and_a_restart_needs_failures() -> None:
    held(lambda found: settings._check_failures(filled(found, keys.Actions)), [
        ("", None), ("cluster.storage=40GB/s", None), ("cluster.mtbf=50 cluster.storage=40GB/s", None),
        ("cluster.mtbf=50", "cluster.mtbf=50: needs cluster.storage= beside it"),
        ("cluster.restart_s=60", "cluster.restart_s=60: counts where failures do: cluster.mtbf= beside it"),
        ("cluster.restart_s=300", None),
        ("cluster.restart_s=60 cluster.mtbf=50 cluster.storage=40GB/s", None),
    ])  # fmt: skip


def test_words_of_a_program_need_the_program() -> None:
    own = "is for a program of your own: name it with entry=PATH"
    held(settings._check_entry, [
        ("entry=a.py", None), ("entry=a.py entry.args=--a", None), ("", None), ("entry.args=--a", f"entry.args=--a: {own}"),
        ("entry.preflight=true", f"entry.preflight=true: {own}"), ("env.A=1 slurm.nodes=2", None),
    ])  # fmt: skip


def test_the_batch_is_open_for_the_engine_that_trains_nothing() -> None:
    assert settings._open_batch(flat("search.global_batch_size=auto"), "layerwise") is True
    for engine in ("layerwise", "megatron"):
        assert settings._open_batch(flat(), engine) is settings._open_batch(flat("search.global_batch_size=given"), engine) is False
    held(lambda found: settings._open_batch(found, "megatron"), [
        ("search.global_batch_size=auto", "search.global_batch_size=auto: is for engine=layerwise; other engines train the batch given"),
    ])  # fmt: skip


def test_each_setting_of_a_run_needs_what_it_is_about() -> None:
    about = "is about checkpoints that train.save_every= writes: say train.save_every= beside it"
    dense: list[tuple[str, str | None]] = [
        ("", None),
        ("train.save_every=5 train.async_save=true train.keep_last=2 train.keep_every=10", None),
        ("train.async_save=true", f"train.async_save=true: {about}"),
        ("train.keep_last=2", f"train.keep_last=2: {about}"),
        ("train.keep_every=10", f"train.keep_every=10: {about}"),
        ("train.save_every=5 train.keep_every=10", "train.keep_every=10: is beside train.keep_last=N"),
        ("train.save_every=5 train.keep_last=2", None),
        ("train.async_save=false", None),
        ("lora.merge=true", "lora.merge=True: is of adapters: give lora.rank= beside it"),
        ("lora.merge=true lora.rank=4", None),
        ("lora.merge=true plan=p.json", None),
        ("lora.merge=false", None),
        ("train.trace_routing=true", "train.trace_routing=true: is of experts, and the model has none"),
        ("train.trace_routing=false", None),
        ("train.step_timers=false", None),
        ("train.step_timers=true entry=a.py", None),
        ("train.step_timers=false entry=a.py", "train.step_timers=false: is about our worker; entry= starts another program"),
        ("train.step_timers=false tune=3", "train.step_timers=false: leaves tune= nothing to learn from"),
        ("train.step_timers=true tune=3", None),
        ("wandb.project=p wandb.name=n", None),
        ("wandb.name=n", "wandb.project: is missing"),
        ("train.change=lr", "train.change=lr: is for a run that continues another: train.resume=RUN"),
    ]
    held(lambda found: settings._run(found, RunSettings(), GPT), dense)
    held(lambda found: settings._run(found, RunSettings(), MOE), [
        ("train.trace_routing=true", None),
        ("train.trace_routing=true entry=a.py", "train.trace_routing=true: is written by our worker; entry= starts another program"),
    ])  # fmt: skip
    base = RunSettings(save_every=7, keep_last=3, wandb={"project": "q"}, step_timeout_s=9.0, merge_lora=True)
    assert settings._run(flat(), base, GPT) == base
    assert settings._run(flat("wandb.name=n"), base, GPT).wandb == {"project": "q", "name": "n"}


def test_a_variable_of_the_environment_may_be_empty_and_is_one_text() -> None:
    assert flat("env.X=")["env.X"].value == ""
    assert flat("env.X=1")["env.X"].value == "1"
    for wrong in (None, 3, ["a"], {"a": "b"}, " "):
        with pytest.raises(InputError, match=r"env\.X="):
            keys.variable("env", "X", wrong)


# ---- model and training


def test_a_training_is_sound_at_its_bounds() -> None:
    base = "train.global_batch_size=4 train.seq_length=32"
    held(models.training_of, [
        (base, None), (f"{base} train.lr=1 train.min_lr=1", None), (f"{base} train.warmup=20", None),
        ("train.seq_length=32", "train.global_batch_size: is missing"), ("train.global_batch_size=4", "train.seq_length: is missing"),
        (f"{base} train.lr=1 train.min_lr=1.1", "train.min_lr=1.1: is above train.lr=1.0"),
        (f"{base} train.warmup=21", "train.warmup=21: is longer than the training, train.steps=20"),
        (f"{base} lora.rank=4 lora.alpha=8 lora.dropout=0.1", None),
        (f"{base} lora.alpha=8", "lora.alpha=8: is of adapters: give lora.rank= beside it"),
        (f"{base} lora.dropout=0.1", "lora.dropout=0.1: is of adapters"),
        (f"{base} lora.targets=q", "lora.targets=q: is of adapters"),
        (f"{base} lora.bridge=mcore-bridge", "lora.bridge=mcore-bridge: is of adapters"),
    ])  # fmt: skip
    for tokens, steps in (("128", 1), ("129", 2), ("256", 2), ("1K", 8)):
        assert models.training_of(flat(*base.split(), f"train.tokens={tokens}", "train.warmup=0")).steps == steps
    two = flat("train.global_batch_size=2", "train.seq_length=32", "train.decoder_seq_length=18", "train.tokens=301")
    assert models.training_of(two).steps == 4


def test_positions_and_precisions_end_where_they_end() -> None:
    rope = replace(GPT, position_embedding="rope")
    for a, length, wrong in ((rope, 64, False), (rope, 65, True), (GPT, 65, False), (replace(GPT, position_embedding="none"), 65, False)):
        training = replace(TRAINING, seq_length=length)
        if wrong:
            with pytest.raises(InputError, match=r"train.seq_length=65: is beyond model.max_position_embeddings=64; raise that"):
                models.check_positions(a, training)
        else:
            models.check_positions(a, training)
    h100, v100, b200 = (load_cluster(name, 8) for name in ("dgx_h100", "v100_16gb", "dgx_b200"))
    models.check_precision(replace(TRAINING, precision="fp8"), h100)
    with pytest.raises(InputError, match=r"train.precision=bf16: V100-SXM2-16GB has no fast path for it; choose one of fp16, fp32"):
        models.check_precision(TRAINING, v100)
    eight = replace(TRAINING, precision="fp8")
    assert [models.with_fp8_recipe(eight, one).fp8_recipe for one in (h100, b200)] == ["tensorwise", "mxfp8"]
    assert models.with_fp8_recipe(replace(eight, fp8_recipe="delayed"), b200).fp8_recipe == "delayed"
    assert models.with_fp8_recipe(TRAINING, h100) == TRAINING
    with pytest.raises(InputError, match=r"train.fp8_recipe=delayed: is for train.precision=fp8, not bf16"):
        models.with_fp8_recipe(replace(TRAINING, fp8_recipe="delayed"), h100)


def test_mxfp8_is_fp8_in_its_own_scaling_and_no_other() -> None:
    batch = ("train.global_batch_size=8", "train.seq_length=64")
    said = (("train.precision=mxfp8",), ("train.precision=fp8", "train.fp8_recipe=mxfp8"))
    one, both = (models.training_of(flat(*batch, *words)) for words in said)
    assert one == both
    assert (one.precision, one.fp8_recipe) == ("fp8", "mxfp8")
    with pytest.raises(InputError, match=r"train.fp8_recipe=blockwise: contradicts train.precision=mxfp8"):
        models.training_of(flat(*batch, "train.precision=mxfp8", "train.fp8_recipe=blockwise"))


def test_the_vocabulary_is_padded_for_every_tp_that_divides_gpus_and_heads() -> None:
    for gpus, heads, unit in ((8, 8, 128), (24, 96, 384), (24, 8, 128), (8, 12, 128), (24, 12, 384)):
        one = replace(GPT, num_attention_heads=heads)
        assert models.padded_for_every_layout(one, load_cluster("dgx_h100", gpus)).make_vocab_size_divisible_by == unit
    one = replace(GPT, make_vocab_size_divisible_by=1, num_attention_heads=6)
    assert models.padded_for_every_layout(one, load_cluster("dgx_h100", 4)).make_vocab_size_divisible_by == 2


def test_a_run_without_a_recipe_is_named_after_its_model(folder: Path) -> None:
    named = {
        "model.name=a model.family=gpt": "a", "model.family=gpt": "gpt", "model.hf_config=q/config.json model.family=gpt": "q",
        "model.hf_config=q/w.json": "w", "model.description=d/e.json": "e", "model.code=pkg.mod:make": "mod.make",
        "model.code=pkg.mod:Tiny": "Tiny",
    }  # fmt: skip
    assert {words: models.label_of(flat(*words.split())) for words in named} == named
    with pytest.raises(InputError, match=r"recipe: is missing: name one, or give model.hf_config="):
        models.label_of(flat("gpus=4"))


def test_the_loss_that_balances_experts_is_of_every_layer_of_them() -> None:
    assert models.with_balance(MOE, None) is MOE
    with pytest.raises(InputError, match=r"model.aux_loss_coeff=0.0: is of experts, and the model has none"):
        models.with_balance(GPT, 0.0)
    for words, coefficient in (((), 0.01), (("model.aux_loss_coeff=0",), 0.0)):
        found = settings.load(("recipe=mixtral_8x7b", "cluster=dgx_h100", "gpus=8", *words), Machine(), ("megatron",))
        assert [part.aux_loss_coeff for part in found.architecture.experts] == [coefficient]
    mixed = replace(GPT, pattern=(Run(layers=1), Run(layers=1, feed_forward=EXPERTS)))
    assert [part.aux_loss_coeff for part in models.with_balance(mixed, 0.5).experts] == [0.5]


def test_uneven_routing_is_of_every_layer_of_experts() -> None:
    assert models.with_routing(MOE, None) is MOE
    with pytest.raises(InputError, match=r"model.routing=2: is of experts, and the model has none"):
        models.with_routing(GPT, "2")
    for a in (MOE, replace(GPT, pattern=(Run(layers=1), Run(layers=1, feed_forward=EXPERTS)))):
        (part,) = models.with_routing(a, "2").experts
        assert isinstance(part.routing, Routing)
        assert models.with_routing(a, "1").num_layers == 2
    with pytest.raises(InputError, match=r"model.routing=nowhere: is no number, and as a trace: can't be read"):
        models.with_routing(MOE, "nowhere")


# ---- the machine


EIGHT = Machine(num_gpus=8, gpu_name="NVIDIA H100 80GB HBM3", gpu_types=("NVIDIA H100 80GB HBM3",), catalog_name="H100-SXM-80GB",
                nvlink=True, host_memory=800)  # fmt: skip


def cluster(words: str = "", given: str = "", of: Machine = EIGHT) -> tuple[str, int, str]:
    """Name, GPUs and why."""
    found, why, _ = machine.cluster_of(flat(*words.split(), *given.split()), flat(*given.split()), of)
    return found.name, found.num_gpus, why


def test_the_gpus_found_here_are_taken_where_they_are_enough_and_nothing_else_is_asked_for() -> None:
    assert cluster() == ("here", 8, "cluster here, 8 x H100-SXM-80GB: this machine has 8 (NVIDIA H100 80GB HBM3)")
    assert cluster("cluster=dgx_a100_40gb gpus=8")[:2] == cluster("gpus=8")[:2] == ("here", 8)
    assert cluster("gpus=3")[:2] == ("here", 3)
    name, gpus, why = cluster("cluster=dgx_a100_40gb gpus=16")
    assert (name, gpus) == ("dgx_a100_40gb", 16)
    assert why == "cluster dgx_a100_40gb, 2 nodes of 8 x A100-SXM-40GB: the recipe's, as this machine has 8 of the 16 GPUs"
    assert cluster("gpus=8", given="cluster=dgx_h200")[2] == "cluster dgx_h200, 8 x H200: asked for"
    assert cluster("cluster=dgx_h200 gpus=8", of=Machine())[2].endswith("the recipe's, as this machine has no GPU")
    assert cluster("cluster=cpu gpus=4", of=Machine())[2].startswith("cluster cpu, 4 gloo ranks: ")
    assert cluster("cluster.host_memory=9GB")[2].startswith("cluster here, 8 x H100-SXM-80GB, host_memory=9GB: this machine has 8")
    here, _, _ = machine.cluster_of(flat("gpus=4"), {}, EIGHT)
    assert (here.host_memory, here.gpus_per_node, here.levels[0].size, here.levels[0].name) == (100, 8, 8, "nvlink")
    assert here.levels[0].latency == pytest.approx(1.9e-6)
    slots, _, _ = machine.cluster_of({}, {}, replace(EIGHT, nvlink=False))
    assert (slots.levels[0].name, slots.levels[0].bandwidth, slots.levels[0].latency) == (
        "pcie",
        GPUS["H100-SXM-80GB"].pcie,
        pytest.approx(2.5e-6),
    )
    assert machine.installed(replace(EIGHT, megatron_core="0.15.0")).megatron_core == "0.15.0"


@pytest.mark.parametrize(
    ("words", "of", "why"),
    [
        ("gpus=16", EIGHT, "cluster: is missing: the recipe has none, and this machine has 8 of the 16 GPUs"),
        ("gpus=16", Machine(), "cluster: is missing: the recipe has none, and this machine has no GPU"),
        ("cluster=cpu", Machine(), "gpus: is missing: neither the recipe nor this machine says how many, and this machine has no GPU"),
        ("gpus=2", replace(EIGHT, gpu_name="V3", catalog_name=None), "cluster: is missing: the recipe has none, and V3, of this"),
    ],
)  # fmt: skip
def test_no_cluster_is_no_plan(words: str, of: Machine, why: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster(words, of=of)
    assert str(caught.value).startswith(why)


def test_memory_is_the_gpus_or_less_and_something_is_left_of_it() -> None:
    one, cpu = load_cluster("dgx_h100", 8), load_cluster("cpu", 4)
    has = one.gpu.memory / GIB
    held(lambda found: machine.limit_of(found, one), [
        ("", None), ("memory.limit_gib=40", None), ("memory.limit_gib=40 memory.reserve_gib=39", None), ("memory.risk=1%", None),
        ("memory.limit_gib=80", f"memory.limit_gib=80: is more than a H100-SXM-80GB has, {has:.2f}"),
        ("memory.limit_gib=40 memory.reserve_gib=40", "memory.reserve_gib=40: leaves nothing of 40.0 GiB"),
        ("memory.risk=1% memory.reserve_gib=1", "memory.risk=1%: says how much is kept free, as memory.reserve_gib does; give one"),
    ])  # fmt: skip
    assert machine.limit_of(flat("memory.limit_gib=200"), cpu).limit == 200 * GIB, "a rank of a machine may have more"
    found = machine.limit_of(flat("memory.limit_gib=0.5", "memory.reserve_gib=0.25"), one)
    assert (found.limit, found.reserve, found.risk, found.parts) == (GIB // 2, GIB // 4, None, ())
    assert machine.limit_of({}, one).limit == one.gpu.memory
    assert machine.counted(load_cluster("dgx_h100", 16)) == "2 nodes of 8 x H100-SXM-80GB"


# ---- data and weights


def test_a_source_is_a_file_or_a_whole_pair(folder: Path) -> None:
    for name in ("a.txt", "x.bin", "x.idx", "half.bin", "other.idx"):
        (folder / name).write_text("text")
    (folder / "empty.txt").write_text("")
    (folder / "d").mkdir()
    (folder / "d.bin").write_text("t")
    (folder / "d.idx").write_text("t")
    (folder / "e").mkdir()
    assert sources.existing("data", "a.txt") == str(folder / "a.txt")
    assert sources.existing("data", "x") == str(folder / "x.idx")
    assert sources.existing("data", "d") == str(folder / "d.idx"), "a folder beside a pair of its name"
    for wrong, why in (
        ("no", "no such file, nor DATA.bin and DATA.idx in /"), ("half", "is a Megatron prefix, but half.idx is missing"),
        ("other", "is a Megatron prefix, but other.bin is missing"), ("e", "is a folder; give a text"), ("empty.txt", "is empty"),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            sources.existing("data", wrong)
        assert str(caught.value).startswith(f"data={wrong}: {why}")
    assert sources.existing_folder("tokenizer", "d") == str(folder / "d")
    for wrong, why in (("a.txt", "is a file; a folder is needed"), ("no", "no such folder")):
        with pytest.raises(InputError, match=why):
            sources.existing_folder("tokenizer", wrong)


def test_what_is_evaluated_on_is_a_source_or_a_share_above_nothing(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    nothing = "train.eval_every=5: has nothing to evaluate on"
    held(lambda found: sources.data_settings(found, RunSettings()), [
        ("", None), ("train.eval_every=5", nothing), ("train.eval_every=0", None), ("train.eval_every=5 data.valid=a.txt", None),
        ("train.eval_every=5 data.split=9,1", None), ("train.eval_every=5 data.split=9,0,1", nothing),
        ("train.eval_every=5 data.split=9,0.1", None),
    ])  # fmt: skip
    base = RunSettings(data="old", valid="v", split=(), blend=(), tokenizer="t", eval_every=3, eval_steps=4)
    found = sources.data_settings(flat(), base)
    assert found == {name: getattr(base, name) for name in found}
    taken = sources.data_settings(flat("data.blend=1 a.txt", "data.split=9,1", "train.eval_steps=7"), base)
    assert (taken["data"], taken["valid"], taken["split"], taken["eval_steps"]) == (None, None, (9.0, 1.0), 7)
    assert taken["blend"] == (Source(weight=1.0, path=str(folder / "a.txt")),)
    again = sources.data_settings(flat("data=a.txt", "data.valid=a.txt"), RunSettings(blend=taken["blend"], split=(9.0, 1.0)))
    assert (again["blend"], again["split"], again["valid"]) == ((), (), str(folder / "a.txt"))


def test_weights_are_finite_and_above_nothing_and_shares_but_the_first_may_be_nothing() -> None:
    assert sources.split_of("s", "9,0") == (9.0, 0.0)
    assert sources.split_of("s", "[9, 0, 1]") == sources.split_of("s", ["9", "0", "1"]) == (9.0, 0.0, 1.0)
    for wrong in ("9", "9,1,1,1", "0,1", "9,-1", "9,x", "9,inf", "9,nan", "inf,1", ["9"], [9, 1], 9):
        with pytest.raises(InputError):
            sources.split_of("s", wrong)
    assert [one.weight for one in sources.blend_of("b", [["0.5", "a"], "2 b c"])] == [0.5, 2.0]
    for wrong in ("", "1", "1 a 2", "0 a", "-1 a", "inf a", "nan a", [], [["1"]], [["1", "a", "b"]], [[1, "a"]], {"a": "b"}, 'x "a'):
        with pytest.raises(InputError):
            sources.blend_of("b", wrong)


def test_what_does_not_change_the_model_may_differ_from_a_checkpoint(folder: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
              "vocab_size": 100, "max_position_embeddings": 64, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    ours = from_hf_config(config, "mine")
    with pytest.raises(InputError, match=r"holds no weights; choose one of model.safetensors, model.safetensors.index.json, pytorch_model"):
        weights._check_checkpoint(folder, ours)
    (folder / "pytorch_model.bin").write_text("w")
    free = {"name": "y", "attention_dropout": 0.1, "make_vocab_size_divisible_by": 1, "max_position_embeddings": 128}
    for fields in ({}, *({name: value} for name, value in free.items()), {"kv_channels": 16}, {"num_query_groups": 2}):
        weights._check_checkpoint(folder, replace(ours, **fields))
    wrong = {"num_layers": 3, "kv_channels": 8, "num_query_groups": 4, "norm_epsilon": 1e-6, "rotary_base": 5, "tie_embeddings": True}
    for name, value in wrong.items():
        with pytest.raises(InputError) as caught:
            weights._check_checkpoint(folder, replace(ours, **{name: value}))
        assert str(caught.value).startswith(f"model.{name}={value}: the checkpoint model.init_from={folder} has "), name
        assert (" say it in config.json of a copy of that folder" in str(caught.value)) == (name == "rotary_base"), name
    balanced = replace(EXPERTS, aux_loss_coeff=0.1, bias_update_rate=0.5, routing=Routing(source="x", busiest=(), fullest=(), copied=()))
    assert weights._as_computed(replace(MOE, feed_forward=balanced)) == weights._as_computed(MOE)
    assert weights._as_computed(replace(MOE, feed_forward=replace(EXPERTS, topk=1))) != weights._as_computed(MOE)


def test_weights_go_to_a_new_or_empty_folder(folder: Path) -> None:
    (folder / "file").write_text("x")
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("x")
    (folder / "empty").mkdir()
    for name in ("empty", "new", "new/below"):
        assert sources.new_folder("model.export_to", name) == folder / name
    assert not (folder / "new").exists()
    for name, why in (("file", "is a file; a folder"), ("full", "is a folder with files in it"), ("file/below", "can't be made: ")):
        with pytest.raises(InputError) as caught:
            sources.new_folder("model.export_to", name)
        assert str(caught.value).startswith(f"model.export_to={name}: {why}")
    assert [weights.written(name) for name in ("file", "full", "empty", "no")] == [False, True, False, False]
    assert weights.with_config(flat("gpus=2")) == flat("gpus=2")
    both = flat("model.init_from=full", "model.family=gpt")
    assert weights.with_config(both) == both
    with pytest.raises(InputError, match=r"model.init_from=.*full: its config.json can't be read"):
        weights.with_config(flat("model.init_from=full"))
    (folder / "full" / "config.json").write_text('{"model_type": "gpt2"}')
    assert weights.with_config(flat("model.init_from=full"))["model.hf_config"].value == str(folder / "full" / "config.json")
    assert weights.model_type("full") == "gpt2"


# ---- samples


def test_supervised_samples_are_counted_and_cut(folder: Path) -> None:
    path = folder / "s.jsonl"
    rows = [
        {"prompt": "ab", "completion": "cde"},
        {"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": ""}]},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert [supervised.texts_of(json.dumps(row).encode(), "x") for row in rows] == [["ab", "cde"], ["four", ""]]
    (folder / "tok").mkdir()
    assert [one.tokens for one in supervised.counted(str(path), "tok").samples] == [1 + 5 + 1 + 5, 1 + 5 + 0 + 5], (
        "four bytes a token, five around a message"
    )
    path.write_text(json.dumps(rows[0]))
    assert [one.tokens for one in supervised.counted(str(path), None).samples] == [6], "bytes, and the end"
    found = supervised.lengths([10, 30, 20], 20)
    assert (found.samples, found.longest, found.cut) == (3, 30, 1)
    assert (found.mean, found.mean_square, found.lost) == (pytest.approx(50 / 3), pytest.approx(300), pytest.approx(1 / 6))
    assert [supervised.chosen_length(counts, 100) for counts in ([1], [64], [65], [3, 99])] == [64, 64, 100, 100]
    path.write_text("\n")
    with pytest.raises(InputError, match=r"has no sample"):
        supervised.counted(str(path), None)
    for line, why in (
        (b"x", "is not JSON"), (b"[]", "is no sample of task=sft"), (b'{"prompt": "a"}', "is no sample"), (b'{"messages": []}', "is no"),
        (b'{"prompt": 1, "completion": "a"}', "is no sample"), (b'{"messages": [{"content": "a"}]}', "is no sample"),
        (b'{"messages": ["a"]}', "is no sample"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            supervised.texts_of(line, "s:1")
    with pytest.raises(InputError, match=r"tokenizer: is missing: s:1 is a chat"):
        supervised.texts_of(json.dumps(rows[1]).encode(), "s:1", chats=False)
    whole: dict[str, Any] = {"blend": (), "split": (), "data": None}
    assert supervised.check_data(whole) is None
    assert [supervised.check_data(whole | {"data": name}) for name in ("a.jsonl", "a.json")] == ["a.jsonl", "a.json"]
    for change, key in (({"blend": ("a",)}, "data.blend"), ({"split": (1.0,)}, "data.split"), ({"data": "a.txt"}, "data=a.txt")):
        with pytest.raises(InputError) as caught:
            supervised.check_data(whole | change)
        assert str(caught.value).startswith(key)


def test_supervised_training_packs_where_a_reader_knows_the_layers(folder: Path) -> None:
    sft = replace(TRAINING, task="sft")
    assert models.with_samples(TRAINING, {}) == TRAINING
    with pytest.raises(InputError, match=r"data.packing=true: is of samples: task=sft"):
        models.with_samples(replace(TRAINING, packing=True), {})
    assert models.with_samples(sft, flat("pin.cp=2")).packing is True
    assert models.with_samples(replace(sft, packing=False), {}).packing is False
    (folder / "s.jsonl").write_text('{"prompt": "ab", "completion": "cde"}\n')
    found = models.with_samples(sft, flat("task=sft", "data=s.jsonl"))
    assert found.lengths is not None
    assert found.lengths.samples == 1
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100, **sizes}))
    words = ("task=sft", "model.hf_config=config.json")
    for more, length in (("data=s.jsonl", 64), ("data.lengths=99+0", 100), ("model.max_position_embeddings=80 data.lengths=99+0", 80)):
        assert models.with_sequence_length(flat(*words, *more.split()), "x")["train.seq_length"].value == length
    with pytest.raises(
        InputError, match=r"train.seq_length: is missing: give it, or data= or data.lengths=, whose longest sample says it$"
    ):
        models.with_sequence_length(flat(*words), "x")
    with pytest.raises(InputError, match=r"model\.\w+: is missing"):
        models.with_sequence_length(flat("task=sft", "data=s.jsonl"), "x")
    for some in (("data=s.jsonl",), ("task=sft", "train.seq_length=5")):
        assert models.with_sequence_length(flat(*some), "x") == flat(*some)


# ---- continued runs, containers, profiles


def test_what_a_continued_run_says_of_itself() -> None:
    one = resuming.Checkpoint(folder=Path("/f"), run=Path("/r"), step=5, engine="megatron", plan=None)
    nothing = "; no plan.json says what it was trained with, so that nothing can be compared"
    assert resuming.said(one, replace(TRAINING, steps=6)) == f"continues /f after step 5, written by megatron{nothing}"
    done = "; train.steps=5 are done with it, so that nothing is left to train: train.steps=N train.change=steps goes on"
    assert resuming.said(one, replace(TRAINING, steps=5)) == f"continues /f after step 5, written by megatron{nothing}{done}"
    for words, named in (
        ("recipe=gpt_tiny", True), ("plan=p", True), ("model.family=gpt", True), ("model.hf_config=c", True), ("model.init_from=f", True),
        ("model.num_layers=2", False), ("train.lr=1", False), ("gpus=2", False),
    ):  # fmt: skip
        assert resuming.names_a_model(flat(*words.split())) is named, words
    assert resuming.with_long_form(flat("resume=a")) == {"train.resume": flat("resume=a")["resume"]}
    assert resuming.with_long_form(flat("gpus=2")) == flat("gpus=2")
    lora = Lora(rank=4, alpha=8.0, dropout=0.1, targets=("q", "v"))
    shown = [resuming._short(value) for value in (0.5, (1, 2.0), "a", lora, Source(weight=0.5, path="p"), None)]
    assert shown == ["0.5", "1,2", "a", "rank 4, alpha 8, dropout 0.1, on q,v", "0.5 p", "null"]


def test_a_checkpoint_is_found_in_a_run_in_its_folder_and_by_itself(folder: Path) -> None:
    assert resuming.checkpoint_of(None) is None
    assert resuming.checkpoint_of("nowhere") is None
    step = folder / "run" / "checkpoints" / "step_5"
    step.mkdir(parents=True)
    marker = json.dumps({"step": 5, "folder": "step_5", "layout": {"engine": "megatron"}})
    for place in (step, step.parent):
        (place / "latest.json").write_text(marker)
    for name in ("run", "run/checkpoints", "run/checkpoints/step_5"):
        found = resuming.checkpoint_of(name)
        assert found == resuming.Checkpoint(folder=step, run=folder / "run", step=5, engine="megatron", plan=None), name
    (step.parent / "latest.json").write_text(marker.replace("step_5", "step_6"))
    with pytest.raises(InputError, match=r"names step_6, which is not there"):
        resuming.checkpoint_of("run")
    for wrong in ("{", "[]", '{"layout": 5}', '{"step": "x", "folder": "step_5", "layout": {"engine": "m"}}'):
        (step.parent / "latest.json").write_text(wrong)
        with pytest.raises(InputError, match=r"is not a checkpoint's marker"):
            resuming.checkpoint_of("run")


def test_a_container_has_an_image_and_the_runtime_of_its_image() -> None:
    assert starting.container_options({}) is None
    for image, runtime in (("a.sif", "apptainer"), ("a+b.sqsh", "pyxis"), ("a.sif.old", "pyxis")):
        found = starting.container_options(flat(f"container.image={image}"))
        assert found is not None
        assert found.runtime == runtime
    said = starting.container_options(flat("container.image=a.sif", "container.runtime=pyxis"))
    assert said is not None
    assert said.runtime == "pyxis"
    held(starting.container_options, [("container.mounts=/a", "container.mounts=/a: needs container.image beside it"),
                                      ("gpus=4 container.mounts=/a", "container.mounts=/a: needs container.image")])  # fmt: skip


def test_a_profile_has_figures_above_nothing() -> None:
    layer: dict[str, Any] = {"kind": "e", "count": "2", "parameter_bytes": "4 MiB", "forward_s": {"1": "2 ms"},
                             "saved_bytes": {"1": "8 KiB"}, "output_bytes": "1 GiB"}  # fmt: skip
    found = profiles.read_profile("profile", {"layers": [layer]})
    (one,) = found.layers
    assert (one.count, one.parameter_bytes, one.forward_s, one.saved_bytes, one.output_bytes) == (2, 4 * 2**20, {1: 2e-3}, {1: 8192}, 2**30)
    assert profiles.stand_in(replace(found, layers=(one, replace(one, count=3)))).num_layers == 5
    profiles.read_profile("profile", {"layers": [layer | {"reductions": "0"}], "other_state_bytes": "0"})
    wrong: list[dict[str, Any]] = [
        {"count": "0"}, {"parameter_bytes": "0"}, {"output_bytes": "0"}, {"forward_s": {"1": "0"}}, {"forward_s": {"2": "1 ms"}},
        {"saved_bytes": {}}, {"saved_bytes": {"1": "0"}}, {"saved_bytes": {"1": "inf"}}, {"reductions": "-1"},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(InputError, match=r"profile"):
            profiles.read_profile("profile", {"layers": [layer | change]})
    for name in ("other_state_bytes", "other_saved_bytes", "backward_of_forward", "states_per_weight"):
        for value in ("-1", "nan"):
            with pytest.raises(InputError, match=rf"profile\.{name}"):
                profiles.read_profile("profile", {"layers": [layer], name: value})
    for tree in ("x", {"layers": []}, {"layers": [{}]}):
        with pytest.raises(InputError, match=r"profile"):
            profiles.read_profile("profile", tree)


def test_keys_of_a_plan_are_free_or_must_agree() -> None:
    import orchestrator as so

    plan = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu").plan
    free = ["data=x", "env.A=1", "memory.limit_gib=2", "slurm.nodes=1", "explain.tp=2", "train.save_every=3", "launch=none", "name=n"]
    agreeing = [
        "gpus=2",
        "seed=1234",
        f"train.lr={plan.training.lr}",
        "model.num_layers=4",
        f"pin.tp={plan.tp}",
        "cluster=cpu",
        "cluster=some/where/cpu.yaml",
        "cluster.mixed=refuse",
        "task=pretrain",
        "gpus_per_node=" + str(plan.cluster.gpus_per_node),
    ]
    for word in (*(word for word in free if not word.startswith("data")), *agreeing):
        saved.check_agreement(flat(word), plan)
    search = "is for a search, and plan= takes its place; leave one of them out"
    said = "; edit the plan, or search anew without plan="
    held(lambda found: saved.check_agreement(found, plan), [
        ("gpus=4", f"gpus=4: the plan says 2{said}"), ("seed=7", f"seed=7: the plan says 1234{said}"),
        ("model.num_layers=5", f"model.num_layers=5: the plan says 4{said}"), ("cluster=dgx_h100", "cluster=dgx_h100: the plan says cpu"),
        ("cluster.mixed=slowest", "cluster.mixed=slowest: the plan says refuse"), ("task=sft", "task=sft: the plan says pretrain"),
        ("largest=seq_length", f"largest=seq_length: {search}"), ("target.days=3", f"target.days=3: {search}"),
        ("lora.rank=4", "lora.rank=4: the plan says None"), ("pin.rank_order=tp-cp-ep-pp-dp", "pin.rank_order=tp-cp-ep-pp-dp: the"),
    ])  # fmt: skip


def test_a_configuration_beside_a_plan_is_of_its_model_but_for_what_other_keys_say(folder: Path) -> None:
    import orchestrator as so

    gpt, llama = (so.plan(recipe=recipe, gpus=2, cluster="cpu").plan for recipe in ("gpt_tiny", "llama_tiny"))

    def check(plan: Plan, kind: str, words: str = "", **changes: Any) -> str:
        (folder / "c.json").write_text(json.dumps(config_keywords(plan.model) | {"model_type": kind} | changes))
        try:
            saved._check_config(flat("model.hf_config=c.json", *words.split()), plan)
        except InputError as error:
            return str(error)
        return ""

    assert check(gpt, "gpt2") == check(llama, "llama") == ""
    assert check(gpt, "gpt2", n_layer=5) == "model.hf_config=c.json: its num_layers is 5; the plan says 4"
    assert check(gpt, "gpt2", "model.num_layers=4", n_layer=5) == "", "what another key says is its own to check"
    assert check(gpt, "gpt2", "model.hidden_size=128", n_layer=5) == "model.hf_config=c.json: its num_layers is 5; the plan says 4"
    assert check(gpt, "gpt2", resid_pdrop=0.3, embd_pdrop=0.3) == "", "dropout may change"
    assert check(gpt, "gpt2", n_positions=999) == "model.hf_config=c.json: its max_position_embeddings is 999; the plan says 128"
    assert check(llama, "llama", max_position_embeddings=999) == "", "no table of weights bounds rotary positions"


# ---- the site's file, the schema, Slurm's options


def test_a_site_says_what_no_run_decides_and_no_plan_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "site.yaml"
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv(site.VARIABLE, raising=False)
    assert site.site_layer() == {}, "there is none at the usual place"
    monkeypatch.setenv(site.VARIABLE, str(path))
    words = {"slurm.account": "a", "engine": "megatron", "cluster": "cpu", "gpus_per_node": "4", "cluster.price_per_gpu_hour": "2",
             "cluster.host_memory": "9 GB", "env.A": "1", "launch": "none", "memory.limit_gib": "3"}  # fmt: skip
    path.write_text("".join(f"{name}: {value}\n" for name, value in words.items()))
    assert site.site_layer().keys() == words.keys()
    assert site.site_layer(with_plan=True).keys() == {"slurm.account", "cluster.price_per_gpu_hour", "env.A", "launch"}
    for name in ("train.lr: 1", "model.num_layers: 2", "seed: 3", "pin.tp: 2", "out: x", "name: n", "recipe: gpt_tiny"):
        path.write_text(f"{name}\n")
        with pytest.raises(InputError, match=rf"{name.partition(':')[0]}=.*is a run's own: say it in a recipe or on the command line"):
            site.site_layer()
    for words_given, layers, shipped in (
        ("recipe=gpt_tiny", 1, True), ("recipe=mine.yaml", 1, False), ("recipe=mine.yaml", 2, True), ("recipe=gpt_tiny", 2, True),
    ):  # fmt: skip
        assert site.is_shipped(flat(words_given), [{}] * layers) is shipped


def test_a_schema_bounds_each_key_as_its_declaration_does() -> None:
    found = schema.recipe_schema()["properties"]
    checks: dict[str, dict[str, Any]] = {
        "gpus": {"type": "integer", "minimum": 1, "maximum": keys.MAX_GPUS},
        "train.lr": {"type": "number", "exclusiveMinimum": 0, "default": "0.0003"},
        "model.dropout": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "model.num_query_groups": {"type": ["integer", "null"], "minimum": 1},
        "train.fp8_recipe": {"enum": ["delayed", "tensorwise", "blockwise", "mxfp8", None]},
        "launch.wait": {"type": "boolean", "default": "false"},
        "train.betas": {"type": ["array", "string"], "minItems": 2, "maxItems": 2, "default": "0.9,0.95"},
        "profile": {"type": "object"},
    }  # fmt: skip
    for name, wanted in checks.items():
        assert {field: value for field, value in found[name].items() if field in wanted} == wanted, name
    assert "type" not in found["train.tokens"], "read by rules of its own"
    assert found["train.steps"]["description"].endswith(" (steps)")
    assert found["train.seq_length"]["description"] == "of a sequence (an encoder's) (tokens)"
    assert found["engine"]["description"] == "auto or an engine's name"
    assert found["train"]["properties"]["lr"] == found["train.lr"]
    assert found["train"]["additionalProperties"] is False
    beside = found["data"]["anyOf"]
    assert [one["type"] for one in beside][1] == "object"
    assert "valid" in beside[1]["properties"]
    assert found["env"] == {"description": keys.OPEN_GROUPS["env"].help, "type": "object"}
    assert found["cluster"]["type"] == ["string", "object"]


def test_nodes_of_slurm_have_the_gpus_that_they_are_asked_for() -> None:
    words = ("recipe=llama3_8b", "gpus=128", "cluster=dgx_h100")
    for said in ("slurm.nodes=4", "slurm.nodes=2-4"):
        with pytest.raises(InputError) as refused:
            settings.load((*words, said), Machine(), ("megatron",))
        assert str(refused.value) == (
            f"{said}: would put 32 of the 128 ranks on a node, and one of dgx_h100 has 8 GPUs; choose one of slurm.nodes=16, "
            "gpus_per_node=32 (if a node has so many: it is what prices take)"
        )
    for more in ("slurm.nodes=16", "slurm.nodes=32", "slurm.nodes=4 gpus_per_node=32", "slurm.nodes=3"):  # 3: refused with the scripts
        settings.load((*words, *more.split()), Machine(), ("megatron",))
    ranks = ("recipe=gpt_tiny", "gpus=8", "cluster=cpu", "gpus_per_node=4", "cluster.levels.loopback.size=8", "slurm.nodes=1")
    assert settings.load(ranks, Machine(), ("megatron",)).slurm.nodes == 1


def test_slurms_and_containers_options_are_written_as_they_are_read() -> None:
    assert starting.slurm_tree(SlurmOptions()) == {}
    words = ("slurm.nodes=8-16", "slurm.extra=--comment 'a b'", "slurm.gres=none", "slurm.requeue=2", "slurm.account=abc")
    options = SlurmOptions(**{name: value for name, value in settings.fields_of(flat(*words), SlurmOptions).items() if value is not None})
    tree = starting.slurm_tree(options)
    assert tree == {"nodes": "8-16", "extra": "--comment 'a b'", "gres": "none", "requeue": 2, "account": "abc"}
    again = flat(*(f"slurm.{name}={value}" for name, value in tree.items()))
    assert {name: given.value for name, given in again.items()} == {name: given.value for name, given in flat(*words).items()}
    assert starting.container_tree(None) == {}
    one = starting.container_options(flat("container.image=a.sif", "container.mounts=/a:/b,/c"))
    assert one is not None
    assert (starting.container_tree(one)["mounts"], starting.container_tree(replace(one, mounts=()))["mounts"]) == ("/a:/b,/c", None)


def test_what_differs_in_a_layout_is_said_axis_by_axis() -> None:
    import orchestrator as so

    plan = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", engine="megatron", pin={"pp": 2}).plan
    assert resuming.layout_changes(plan, plan) == ""
    assert resuming.layout_changes(plan, replace(plan, tp=2, dp=3)) == f"tp 1 -> 2, dp {plan.dp} -> 3"
    first, second = plan.stages
    moved = replace(plan, stages=(replace(first, layers=first.layers[:-1]), replace(second, layers=(first.layers[-1], *second.layers))))
    said = resuming.layout_changes(plan, moved)
    counts = [[sum(span.count for span in stage.layers) for stage in one.stages] for one in (plan, moved)]
    assert said == f"layers of the stages {counts[0]} -> {counts[1]}"
    assert counts[0] != counts[1]
    order = ("tp", "cp", "ep", "pp", "dp")
    assert resuming.layout_changes(plan, replace(plan, rank_order=order)) == "rank_order tp,cp,ep,dp,pp -> tp,cp,ep,pp,dp"


def test_a_change_is_named_if_it_may_be_and_only_where_a_run_goes_on() -> None:
    assert {"lr", "steps", "dropout", "data", "tokenizer", "clip"} <= {*resuming.choices()}
    assert {"seed", "seq_length", "optimizer", "lora", "lengths", "packing"}.isdisjoint(resuming.choices())
    resuming.check_names((), None)
    resuming.check_names(("lr", "data"), "old")
    for change, resume, why in (
        (("lr",), None, "train.change=lr: is for a run that continues another: train.resume=RUN"),
        (("lrr",), "old", "train.change=lrr: can't be changed on the way; did you mean lr?"),
        (("zzzzzz",), "old", "train.change=zzzzzz: can't be changed on the way; choose one of"),
    ):
        with pytest.raises(InputError) as caught:
            resuming.check_names(change, resume)
        assert str(caught.value).startswith(why)


# ---- what a continued run may change


def written_by(plan: Plan) -> resuming.Checkpoint:
    return resuming.Checkpoint(folder=Path("/old"), run=Path("/"), step=5, engine="megatron", plan=plan)


def test_what_would_go_on_with_other_weights_data_or_states_is_refused_and_what_may_change_is_named() -> None:
    import orchestrator as so

    plan = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", engine="megatron").plan
    a, t, run = plan.model, plan.training, plan.run
    checkpoint = written_by(plan)

    def said(model: Architecture = a, training: Training = t, settings: RunSettings = run) -> str:
        try:
            resuming.check_changes(checkpoint, model, training, settings)
        except InputError as error:
            return str(error)
        return ""

    assert said() == ""
    for fields in ({"name": "y"}, {"make_vocab_size_divisible_by": 1}):
        assert said(model=replace(a, **fields)) == "", fields
    refused = "train.resume=/old: can't continue with "
    for name, value in (("num_layers", 5), ("tie_embeddings", False), ("max_position_embeddings", 256), ("activation", "relu")):
        assert said(model=replace(a, **{name: value})).startswith(f"{refused}model.{name}="), name
    rotary = replace(a, position_embedding="rope")
    one = replace(checkpoint, plan=replace(plan, model=rotary))
    resuming.check_changes(one, replace(rotary, max_position_embeddings=999), t, run)
    for name, value, key in (
        ("global_batch_size", 8, "train.global_batch_size"),
        ("seq_length", 64, "train.seq_length"),
        ("seed", 5, "seed"),
        ("task", "sft", "task"),
        ("packing", True, "data.packing"),
        ("optimizer", "sgd", "train.optimizer"),
        ("lora", Lora(rank=4), "lora"),
        ("exp_avg_dtype", "bf16", "train.exp_avg_dtype"),
    ):
        assert said(training=replace(t, **{name: value})).startswith(f"{refused}{key}="), name
    why = said(training=replace(t, precision="bf16"))
    assert "train.precision=bf16 (was fp32): the checkpoint's optimizer keeps as master weights: none, this one: fp32" in why
    wide = replace(checkpoint, plan=replace(plan, training=replace(t, precision="bf16")))
    with pytest.raises(InputError, match=r"train.precision=fp8 \(was bf16\)\. If that is meant: train.change=precision"):
        resuming.check_changes(wide, a, replace(t, precision="fp8"), run)
    for name, value in (("lr", 0.5), ("steps", 99), ("clip", 0.0), ("weight_decay", 0.5), ("warmup", 1), ("schedule", "constant")):
        other = replace(t, **{name: value})
        assert f"If that is meant: train.change={name}" in said(training=other), name
        assert said(training=other, settings=replace(run, change=(name,))) == "", name
    drop = replace(a, hidden_dropout=0.1)
    assert said(model=drop).endswith("was trained otherwise: model.hidden_dropout=0.1 (was 0). If that is meant: train.change=dropout")
    assert said(model=drop, settings=replace(run, change=("dropout",))) == ""
    data = replace(run, data="/new.txt")
    assert "data=/new.txt (was null)" in said(settings=data)
    assert said(settings=replace(data, change=("data",))) == ""
    assert "tokenizer=/t (was null)" in said(settings=replace(run, tokenizer="/t"))
    assert "does not differ from the checkpoint's; choose one of nothing: leave it out" in said(settings=replace(run, change=("lr",)))
    two = said(training=replace(t, lr=0.5, clip=0.0), settings=replace(run, change=("clip",)))
    assert "was trained otherwise: train.lr=0.5 (was 0.001). If that is meant: train.change=lr,clip" in two
    constant = replace(checkpoint, plan=replace(plan, training=replace(t, schedule="constant")))
    resuming.check_changes(constant, a, replace(t, schedule="constant", steps=99), run)
    done = replace(t, steps=5)
    change = replace(run, change=("steps",))
    assert said(training=done, settings=change).startswith("train.steps=5: /old has done 5 already; name more (with train.change=steps)")
    assert said(training=done, settings=replace(change, export_to="/w")) == ""
    assert said(training=replace(t, steps=6), settings=change) == ""
    resuming.check_changes(replace(checkpoint, plan=None), replace(a, num_layers=9), t, run)


def test_a_continued_runs_keys_are_taken_over_but_for_what_began_it(folder: Path) -> None:
    import orchestrator as so

    plan = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", engine="megatron").plan
    checkpoint = replace(written_by(plan), run=folder)
    with pytest.raises(InputError, match=r"has no config.yaml that says what is trained; name it: recipe=, or model"):
        resuming.recipe_of(checkpoint, {})
    (folder / "config.yaml").write_text("recipe: gpt_tiny\ngpus: 2\nplan: p.json\ntrain.resume: a\ntrain.change: lr\nmodel.init_from: b\n")
    kept = {"recipe", "gpus", "plan"}
    assert resuming.recipe_of(checkpoint, {}).keys() == kept
    for words, left in (("env.A=1", kept), ("out=x", kept), ("slurm.nodes=2", kept), ("train.save_every=3", kept), ("data=a", kept),
                        ("gpus=4", kept - {"plan"}), ("train.lr=1", kept - {"plan"}), ("pin.tp=1", kept - {"plan"}),
                        ("env.A=1 seed=3", kept - {"plan"})):  # fmt: skip
        assert resuming.recipe_of(checkpoint, flat(*words.split())).keys() == left, words
    (folder / "w").mkdir()
    (folder / "config.yaml").write_text("recipe: gpt_tiny\nmodel.export_to: w\n")
    assert "model.export_to" in resuming.recipe_of(checkpoint, {}), "nothing has been written there"
    (folder / "w" / "x").write_text("x")
    with pytest.raises(InputError, match=r"model.export_to=w: has the weights of the run that is continued"):
        resuming.recipe_of(checkpoint, {})
    done = replace(checkpoint, step=plan.training.steps)
    assert "model.export_to" not in resuming.recipe_of(done, {})
    assert "model.export_to" not in resuming.recipe_of(replace(checkpoint, plan=None), {})
    assert "model.export_to" in resuming.recipe_of(done, flat("model.export_to=v"))
    for word in ("train.steps=99", "train.tokens=1T"):
        with pytest.raises(InputError, match=r"model.export_to=w: has the weights"):
            resuming.recipe_of(done, flat(word))


MAY_BE_NOTHING = """
    seed cluster.restart_s train.step_timeout_s train.min_lr train.weight_decay train.clip memory.reserve_gib slurm.requeue model.dropout
    model.hidden_dropout model.attention_dropout train.betas lora.dropout model.decoder_num_layers model.mtp_num_layers
    model.num_token_types train.keep_last train.eval_every train.save_every train.keep_every train.warmup rl.staleness
    train.muon_momentum model.aux_loss_coeff
"""


def test_a_number_is_at_least_one_unless_nothing_of_it_makes_sense() -> None:
    """tune.steps alone must be two: one to warm up. What is above nothing has no least; shares are below one; the rest ends at a round
    number that nobody reaches, or at 64 rounds of tuning, or rows of a table."""
    bounded = [key for name, key in keys.KEYS.items() if not name.startswith(("pin.", "explain.")) and key.low is not None]
    assert {key.name for key in bounded if key.low == 0} == set(MAY_BE_NOTHING.split())
    assert {key.name for key in bounded if key.low not in (0, 1)} == {"tune.steps"}
    assert keys.KEYS["tune.steps"].low == 2
    everything = keys.KEYS.values()
    assert {key.above for key in everything} == {None, 0}
    assert {key.below for key in everything} == {None, 1}
    assert {key.high for key in everything} == {None, 1, 64, 65535, 2**31 - 1, 10**3, 10**6, 10**9, 10**12, 10**18}
    assert [key.name for key in everything if key.high == 65535] == ["slurm.warning_s"]  # sbatch's own, --signal
    assert {key.name for key in everything if key.high == 64} == {"take", "tune", "tune.rounds", "train.muon_num_ns_steps"}
    assert [key.name for key in everything if key.high == 1] == ["train.lr"]
    counted = [key for key in everything if key.name.startswith(("gpus", "pin.", "lora.rank", "tune.steps"))]
    assert [key.name for key in counted if key.high not in (None, keys.MAX_GPUS)] == ["pin.ddp_bucket_size"]  # parameters
    assert {keys.KEYS[name].high for name in ("model.num_layers", "model.decoder_num_layers", "model.mtp_num_layers")} == {10**3}
    assert {keys.KEYS[name].high for name in ("train.steps", "train.warmup", "train.eval_every", "train.save_every")} == {10**12}
