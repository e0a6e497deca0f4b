"""Thirty ways to resume wrongly: one clear error each where the command is typed, nothing written; and what a right one takes over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from test_bad_input import refused

from orchestrator import api, digests, run
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import from_json, to_json
from orchestrator.recipe import resuming
from orchestrator.recipe.keys import KEYS

TINY = ("recipe=gpt_tiny", "gpus=2", "engine=megatron", "launch=none")
AGAIN = ("train.resume=old", "launch=none")


def finish(out: Path, step: int) -> None:
    """What workers/checkpoint.py leaves of a run in `out` that has saved after `step` steps, but for the weights."""
    checkpoint = out / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    plan = from_json((out / "plan.json").read_text())
    (checkpoint / "plan.json").write_text(to_json(plan))
    marker = json.dumps({"step": step, "folder": checkpoint.name, "layout": {"engine": plan.engine}})
    for place in (checkpoint, checkpoint.parent):
        (place / "latest.json").write_text(marker)


@pytest.fixture
def old(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of gpt_tiny that has done 20 of its 40 steps."""
    assert run.main((*TINY, "out=old")) == 0
    finish(folder / "old", 20)
    (folder / "corpus.txt").write_text("word " * 9000)
    capsys.readouterr()
    return folder / "old"


ANOTHER_MODEL = "the checkpoint is of another model"
DATA_ORDER = "the data would not go on where it stopped"
STATES = "the optimizer's states in the checkpoint are of the other"
MEANT = "If that is meant: train.change="


def test_a_run_that_was_not_asked_to_save_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main((*TINY, "out=plain")) == 0
    assert run.main((*TINY, "train.save_every=5", "out=saving")) == 0
    capsys.readouterr()
    none = "holds no finished checkpoint (checkpoints/latest.json)"
    asked = ("launch=none", "out=new")
    assert refused(capsys, folder, ("resume=plain", *asked)) == (
        f"train.resume=plain: {none}: its run was not asked to save (train.save_every=0)"
    )
    assert refused(capsys, folder, ("resume=saving", *asked)) == f"train.resume=saving: {none}"


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "more layers": (("model.num_layers=8",), f"model.num_layers=8 (was 4): {ANOTHER_MODEL}"),
    "wider": (("model.hidden_size=512",), "model.hidden_size=512 (was 128)"),
    "another vocabulary": (("model.vocab_size=1000",), f"model.vocab_size=1000 (was 260): {ANOTHER_MODEL}"),
    "another activation": (("model.activation=relu",), ANOTHER_MODEL),
    "longer learned positions": (("model.max_position_embeddings=256",), f"model.max_position_embeddings=256 (was 128): {ANOTHER_MODEL}"),
    "another recipe": (("recipe=llama_tiny",), ANOTHER_MODEL),
    "another batch": (("train.global_batch_size=32",), f"train.global_batch_size=32 (was 16): {DATA_ORDER}"),
    "shorter sequences": (("train.seq_length=64",), f"train.seq_length=64 (was 128): {DATA_ORDER}"),
    "another seed": (("seed=7",), f"seed=7 (was 1234): {DATA_ORDER}"),
    "sgd": (("train.optimizer=sgd",), f"train.optimizer=sgd (was adamw): {STATES}"),
    "bf16": (("train.precision=bf16",), "train.precision=bf16 (was fp32): the checkpoint's optimizer keeps as master weights: none"),
    "another rate": (("train.lr=3e-4",), f"train.lr=0.0003 (was 0.001). {MEANT}lr"),
    "more steps, whose cosine has another rate": (("train.steps=80",), f"train.steps=80 (was 40). {MEANT}steps"),
    "both": (("train.steps=80", "train.lr=3e-4"), f"train.lr=0.0003 (was 0.001); train.steps=80 (was 40). {MEANT}lr,steps"),
    "only one of them named": (("train.steps=80", "train.lr=3e-4", "train.change=lr"), f"train.steps=80 (was 40). {MEANT}lr,steps"),
    "another schedule": (("train.schedule=constant",), f"train.schedule=constant (was cosine). {MEANT}schedule"),
    "a warm-up": (("train.warmup=30",), f"train.warmup=30 (was 4). {MEANT}warmup"),
    "other betas": (("train.betas=0.9,0.999",), f"train.betas=0.9,0.999 (was 0.9,0.95). {MEANT}betas"),
    "decay": (("train.weight_decay=0",), f"train.weight_decay=0 (was 0.1). {MEANT}weight_decay"),
    "clipping": (("train.clip=0",), f"train.clip=0 (was 1). {MEANT}clip"),
    "dropout": (("model.dropout=0.1",), f"{MEANT}dropout"),
    "other data": (("data=corpus.txt",), f"corpus.txt (was null). {MEANT}data"),
    "another split": (("data.split=90,10,0",), f"data.split=90,10,0 (was ). {MEANT}data"),
    "a change that is none": (("train.change=lr",), "train.change=lr: does not differ from the checkpoint's; "),
    "a change of what can't be changed": (("train.change=seed",), "train.change=seed: can't be changed on the way"),
    "a slip in a change": (("train.change=step",), "train.change=step: can't be changed on the way; did you mean steps?"),
    "steps that are done": (("train.steps=20", "train.change=steps"), "train.steps=20: "),
    "an engine that trains nothing": (("engine=layerwise",), "engine=layerwise: trains nothing: it can't continue train.resume=old"),
    "an engine that lacks the model": (("engine=deepspeed", "pin.pp=2"), "deepspeed has no pp"),
    "resume and train.resume": (("resume=old",), "train.resume=old: resume=old is given too"),
    "out that is the old run": (("out=old",), "out=old: is a folder with files in it"),
    "a plan that another run has": (("plan=old/plan.json", "gpus=4"), "gpus=4: the plan says 2"),
}  # fmt: skip


def test_a_pin_of_the_continued_run_that_forbids_all_plans_says_how_it_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main((*TINY, "out=old", "pin.tp=2")) == 0
    finish(folder / "old", 20)
    capsys.readouterr()
    said = refused(capsys, folder, (*AGAIN, "gpus=1"))
    assert said.endswith("; the pins of the run that is continued are kept: pin.tp=null leaves them out")
    assert run.main((*AGAIN, "gpus=1", "pin.tp=null", "out=new")) == 0


@pytest.mark.parametrize(
    ("done", "words", "message"),
    [
        (40, (), "train.steps=40: "),
        (40, ("train.steps=50", "train.change=steps"), "has the weights of the run that is continued, whose recipe names it; give a new"),
        (20, (), "has the weights of the run that is continued"),
    ],
)
def test_weights_that_the_old_run_exported_are_named_where_the_new_one_would_export(
    done: int, words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is left to train, that is said, and not that the exported weights are there already."""
    assert run.main((*TINY, "out=old", "model.export_to=weights")) == 0
    finish(folder / "old", done)
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_bytes(b"")
    capsys.readouterr()
    said = refused(capsys, folder, (*AGAIN, *words))
    assert message in said
    assert said.startswith("train.steps" if "steps=40" in message else f"model.export_to={folder / 'weights'}: ")


@pytest.mark.parametrize("case", WRONG)
def test_ways_to_resume_wrongly(case: str, old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert message in refused(capsys, folder, (*AGAIN, *words))


def test_there_are_thirty_of_them() -> None:
    assert len(WRONG) >= 30


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("config.yaml", None, "has no config.yaml that says what is trained; name it: recipe="),
        ("checkpoints/step_000020/plan.json", "{", "is not a plan of version 1"),
        ("checkpoints/latest.json", "{", "is not a checkpoint's marker"),
        ("checkpoints/latest.json", '{"layout": {"engine": "megatron"}, "step": 20, "folder": "gone"}', "names gone, which is not there"),
    ],
)
def test_what_is_missing_or_broken_in_the_old_run(
    path: str, content: str | None, message: str, old: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old / path).unlink() if content is None else (old / path).write_text(content)
    assert message in refused(capsys, folder, AGAIN)


def test_a_damaged_checkpoint_is_refused_before_anything_starts_and_the_newest_whole_one_named(
    old: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = old / "checkpoints"
    for step in (5, 10, 15, 20):
        if step != 20:
            finish(old, step)
        written = checkpoints / f"step_{step:06d}"
        (written / "rank000000-0000.bin").write_bytes(bytes(100))
        (written / digests.LISTING).write_text(json.dumps(digests.digests(written, digests.written_by(written, 0))))
    (checkpoints / "latest.json").write_text((checkpoints / "step_000020/latest.json").read_text())
    file = checkpoints / "step_000020/rank000000-0000.bin"
    file.write_bytes(bytes(99) + b"\1")
    (checkpoints / "step_000015/rank000000-0000.bin").write_bytes(bytes(99))
    said = refused(capsys, folder, AGAIN)
    assert said.startswith(f"train.resume={checkpoints}/step_000020: is damaged: {file} is not what was written: its SHA-256 is another; ")
    assert said.endswith(f"the newest whole one is resume={checkpoints}/step_000010")
    file.write_bytes(bytes(100))
    assert run.main(("train.resume=old", "launch=none", "out=again")) == 0
    (checkpoints / "step_000020/plan.json").write_text("{")
    assert refused(capsys, folder, AGAIN).endswith(f"; the newest whole one is resume={checkpoints}/step_000010")
    shutil.rmtree(checkpoints / "step_000020")
    assert refused(capsys, folder, AGAIN).endswith(
        "names step_000020, which is not there; the newest whole one is resume=old/checkpoints/step_000010"
    )


def test_changes_and_retention_are_for_runs_that_have_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is for a run that continues another" in refused(capsys, folder, (*TINY, "train.change=lr"))
    assert "train.save_every= writes: say train.save_every= beside it" in refused(capsys, folder, (*TINY, "train.keep_last=2"))
    assert "is beside train.keep_last=N" in refused(capsys, folder, (*TINY, "train.save_every=1", "train.keep_every=2"))


def planned(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    assert run.main(words) == 0, capsys.readouterr().err
    out = next(word.removeprefix("out=") for word in words if word.startswith("out="))
    return from_json((Path(out) / "plan.json").read_text()), capsys.readouterr().out


def test_a_run_knows_its_recipe(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same plan again, from the checkpoint, under the name and settings of the old run."""
    plan, said = planned((*AGAIN, "out=new"), capsys)
    before = from_json((old / "plan.json").read_text())
    same = {"run": before.run, "rejected": before.rejected}  # the checkpoint's engine alone was searched: others are refused by nobody
    assert msgspec.structs.replace(plan, **same) == before
    assert plan.run.resume == str(old)
    assert f"continues {old}/checkpoints/step_000020 after step 20, written by megatron" in said
    assert "From the checkpoint to this plan: the same layout" in said
    assert "training: 20 steps left of 40, 41K tokens: " in said
    left, whole = api.plan(resume="old").budget, api.plan(recipe="gpt_tiny", gpus=2, engine="megatron").budget
    assert (left.steps, left.tokens, left.seconds, left.step_s) == (20, whole.tokens / 2, whole.seconds / 2, whole.step_s)
    checkpoint = resuming.checkpoint_of(str(old))
    assert checkpoint is not None
    assert checkpoint.plan is not None
    training = checkpoint.plan.training
    assert resuming.said(checkpoint, training).endswith("written by megatron")
    done = resuming.said(checkpoint, msgspec.structs.replace(training, steps=20))
    assert "train.steps=20 are done with it, so that nothing is left" in done


def test_a_rate_that_jumps_is_said_before_the_start(old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cosine that ended after 40 steps is anew in its middle where 80 are asked for."""
    finish(old, 40)
    plan, said = planned((*AGAIN, "train.steps=80", "train.change=steps", "out=new"), capsys)
    before = from_json((old / "plan.json").read_text()).training
    new = learning_rate(plan.training, 40)
    rates = (
        f"step 40 had {learning_rate(before, 39):.3g} and the next would have {before.min_lr:.3g}, by this run's schedule it has {new:.3g}"
    )
    assert f"; THE LEARNING RATE JUMPS: {rates} (" in said
    assert new > 2 * before.min_lr
    _, said = planned((*AGAIN, "train.steps=80", f"train.lr={before.min_lr}", "train.schedule=constant", "train.change=steps,lr,schedule",
                       "out=newer"), capsys)  # fmt: skip
    assert "JUMPS" not in said


def test_what_a_continued_run_may_not_change_is_not_offered(old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, folder, (*AGAIN, "gpus=7"))
    assert said.endswith("to relax: gpus=4 or 8")


def test_the_next_allocation_has_other_gpus(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`resume=RUN gpus=4` is planned anew, and the way from the old layout to the new one is said."""
    plan, said = planned(("resume=old", "gpus=4", "launch=none", "out=new"), capsys)
    before = from_json((old / "plan.json").read_text())
    assert (plan.world_size, plan.training) == (4, before.training)
    assert "world_size 2 -> 4" in said


def test_named_changes_are_made_and_are_the_next_runs_own(old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that continues the changed one takes its settings over, not its changes."""
    plan, _ = planned((*AGAIN, "train.lr=3e-4", "train.steps=80", "train.change=lr,steps", "out=new"), capsys)
    assert (plan.training.lr, plan.training.steps, plan.run.change) == (3e-4, 80, ("lr", "steps"))
    finish(folder / "new", 60)
    further, _ = planned(("train.resume=new", "launch=none", "out=newest"), capsys)
    assert (further.training, further.run.change) == (plan.training, ())
    written = yaml.safe_load((folder / "new" / "config.yaml").read_text())
    assert written["train"]["change"] == "lr,steps"


@pytest.mark.parametrize("engine", ["megatron_deepspeed", "deepspeed"])
def test_each_engine_reads_its_own_checkpoints_and_takes_the_weights_of_others(
    engine: str, old: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, folder, (*AGAIN, f"engine={engine}", "pin.zero_stage=1"))
    assert f"engine={engine}: reads its own checkpoints, and resume={old}/checkpoints/step_000020 is of engine=megatron" in message
    assert "model.export_to=" in message
    assert "model.init_from=" in message


def test_a_constant_rate_may_go_on_for_longer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned((*TINY, "train.schedule=constant", "out=old"), capsys)
    finish(folder / "old", 40)
    plan, _ = planned((*AGAIN, "train.steps=80", "out=new"), capsys)
    assert plan.training.steps == 80


def test_a_finished_run_is_converted(old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(old, 40)
    plan, _ = planned((*AGAIN, "model.export_to=weights", "out=new"), capsys)
    assert plan.run.export_to == str(folder / "weights")


def test_a_saved_plan_is_continued_unless_something_else_is_asked_for(old: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(("plan=old/plan.json", "launch=none", "out=by_plan"), capsys)
    finish(folder / "by_plan", 20)
    again, _ = planned(("train.resume=by_plan", "launch=none", "out=again"), capsys)
    assert again.stages == from_json((old / "plan.json").read_text()).stages
    wider, _ = planned(("train.resume=by_plan", "gpus=4", "launch=none", "out=wider"), capsys)
    assert wider.world_size == 4


def test_a_deepspeed_checkpoint_for_one_layout_is_not_promised_to_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    types = ("train.precision=bf16", "train.grad_reduce_dtype=bf16", "train.grad_accum_dtype=bf16")
    words = ("recipe=gpt_tiny", "engine=deepspeed", "launch=none", "pin.zero_stage=0", *types)
    planned((*words, "gpus=2", "out=old"), capsys)
    finish(folder / "old", 20)
    message = refused_or_none(capsys, folder, ("train.resume=old", "gpus=4", "launch=none", "out=new"))
    assert "with zero_stage=0 in bf16 it goes on in the same layout only" in message


def refused_or_none(capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...]) -> str:
    assert run.main(words) == 2
    assert not (folder / "new").exists()
    return capsys.readouterr().err


def test_every_setting_of_the_training_is_the_data_the_states_or_a_choice() -> None:
    """A new field of Training can't be forgotten: it is a choice until it is declared otherwise. And each has a key."""
    from orchestrator.model.training import Training

    fields = {*resuming.DATA_ORDER, *resuming.STATES, *resuming.MEASURED, *(set(resuming.choices()) - {"dropout", "data", "tokenizer"})}
    assert fields == set(Training.__struct_fields__)
    settings = fields - {*resuming.MEASURED, "lora"}
    assert all(resuming.UNGROUPED.get(name, f"train.{name}") in KEYS for name in settings)
    assert "lora.rank" in KEYS


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 260, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(("trained", "kept"), [(("lora.rank=4",), True), ((), False)])
def test_weights_that_a_run_did_not_train_are_those_it_began_with_when_it_goes_on(
    trained: tuple[str, ...], kept: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters went on beside a base drawn from the seed, without a word: no checkpoint has frozen weights."""
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "base" / "model.safetensors").write_bytes(b"")
    words = ("engine=deepspeed", "cluster=cpu", "gpus=2", "train.seq_length=64", "train.global_batch_size=8", "train.steps=40")
    planned(("model.init_from=base", *trained, *words, "launch=none", "out=old"), capsys)
    finish(folder / "old", 20)
    base = str((folder / "base").resolve())
    plan, _ = planned((*AGAIN, "out=new"), capsys)
    assert plan.run.init_from == (base if kept else None)
    finish(folder / "new", 30)
    plan, _ = planned(("train.resume=new", "launch=none", "out=newer"), capsys)
    assert plan.run.init_from == (base if kept else None), "and those of a run that went on"
    config = ("recipe=old/config.yaml", "model.init_from=null", "out=newest")
    plan, _ = planned((*AGAIN, *config), capsys)
    assert plan.run.init_from == (base if kept else None), "or of a recipe that says none"
    shutil.rmtree(folder / "base")
    if kept:
        assert f"model.init_from={base}: no such folder" in refused(capsys, folder, (*AGAIN, "out=last"))
