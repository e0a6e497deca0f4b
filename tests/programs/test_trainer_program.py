"""transformers' Trainer (programs/hugging_face.py) trains what transformers and torch alone do, and gives what every run has."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import own_ranks
import plain_transformers
import pytest
import torch
from chats import write_chats, write_tokenizer
from msgspec.structs import replace
from worker_plans import BERT, GPT, LLAMA, MIXTRAL, QWEN3, T5, make_plan

import orchestrator
import orchestrator as so
from orchestrator.engines import ENGINES
from orchestrator.job import ASKED_VARIABLE
from orchestrator.model.lora import Lora
from orchestrator.model.parts.experts import Experts
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.programs import hugging_face_hooks

pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("own_hugging_face")]

STEPS = 4
BALANCED = replace(MIXTRAL, name="balanced_test", feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=40, aux_loss_coeff=0.05))
HF_T5 = replace(T5, activation="relu", normalization="RMSNorm", position_embedding="relative", add_bias_linear=False)
Row = dict[str, Any]


def plan_of(model: Any = LLAMA, **more: Any) -> Plan:
    settings = {"dp": 2, "steps": STEPS, "lr": 3e-3, "weight_decay": 0.1, "schedule": "cosine"}
    return make_plan(model, "deepspeed", run=RunSettings(**more.pop("run", {})), **(settings | more))


CASES: dict[str, Plan] = {
    "llama zero0": plan_of(),
    "llama zero2": plan_of(zero_stage=2, min_lr=3e-4, clip=0.5),
    "llama zero3": plan_of(zero_stage=3),
    "llama tp2": plan_of(tp=2, dp=1, zero_stage=1),
    "llama tp2 dp2": plan_of(tp=2, dp=2, zero_stage=2),
    "llama recomputed": plan_of(zero_stage=1, recompute=["full"]),
    "qwen3 zero3": plan_of(QWEN3, zero_stage=3),
    "gpt zero1": plan_of(GPT, zero_stage=1, schedule="linear", min_lr=3e-4),
    "bert zero2": plan_of(BERT, zero_stage=2),
    "bert tp2": plan_of(BERT, tp=2, dp=1),
    "t5 zero1": plan_of(HF_T5, zero_stage=1),
    "t5 tp2": plan_of(HF_T5, tp=2, dp=1, zero_stage=1),
    "mixtral zero2": plan_of(MIXTRAL, zero_stage=2),
    "mixtral balanced zero2": plan_of(BALANCED, zero_stage=2),
    "mixtral ep2 zero1": plan_of(MIXTRAL, ep=2, zero_stage=1),
    "llama cp2 zero2": plan_of(cp=2, dp=1, zero_stage=2, clip=0.5),
    "llama cp2 zero3": plan_of(cp=2, dp=1, zero_stage=3, clip=0.5),
    "llama tiled zero3": plan_of(zero_stage=3, tiled_mlp=2, tiled_logits=4),
    "llama offloaded zero2": plan_of(zero_stage=2, recompute=["full"], offload_activations=True),
    "llama lora tp2": plan_of(tp=2, dp=1, zero_stage=1, lora=Lora(rank=4)),
    "llama lora zero3": plan_of(zero_stage=3, lora=Lora(rank=4)),
    "llama zero0 bf16": plan_of(precision="bf16", grad_accum_dtype="bf16", grad_reduce_dtype="bf16"),
}


class Workshop:
    """Where runs are made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.context = folder, own_ranks.start_server("own_hf_imports")
        self.kept: dict[str, list[Row]] = {}

    def run(
        self, plan: Plan, name: str, *, more: Sequence[str] = (), meanwhile: Callable[[int], None] = lambda process: None
    ) -> tuple[Path, list[int | None], str]:
        """A run's folder, the exit codes of its ranks, and their logs."""
        out = self.folder / name.replace(" ", "-")
        out.mkdir(exist_ok=True)
        job = ENGINES["deepspeed"].translate(plan)
        for file in job.files:
            (out / file.path).write_text(file.content)
        (out / "plan.json").write_text(to_json(plan))
        codes = own_ranks.run(self.context, job.module, [*job.arguments, *more], out, plan.world_size, meanwhile)
        return out, codes, "".join(f"\n--- {log.name}\n{log.read_text()[-2500:]}" for log in sorted(out.glob("logs/rank-*.log")))

    def trained(self, plan: Plan, name: str, **more: Any) -> list[Row]:
        """The rows of a run that ends well."""
        out, codes, logs = self.run(plan, name, **more)
        assert codes == [0] * plan.world_size, logs
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def plain(self, plan: Plan) -> list[Row]:
        """What transformers and torch alone do on one process, from the weights that the program begins with."""
        from orchestrator.workers import hugging_face

        alone = one_process(plan, plan.global_batch_size)
        fields = json.loads(next(file.content for file in ENGINES["deepspeed"].translate(alone).files if file.path == "engine.json"))
        model = hugging_face.first_model(alone, fields, torch.device("cpu"))
        weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        found = plain_transformers.train(alone, weights, str(self.folder / "corpus"))
        return [{"step": 1 + step, "loss": loss, "grad_norm": norm, "lr": learning_rate(plan.training, step)}
                for step, (loss, norm) in enumerate(zip(found["losses"], found["norms"], strict=True))]  # fmt: skip

    def once(self, plan: Plan, name: str) -> list[Row]:
        """As `trained`; a run of this name has been made, or is made now and kept for other tests."""
        if name not in self.kept:
            self.kept[name] = self.trained(plan, name)
        return self.kept[name]

    def program_alone(self, plan: Plan) -> list[Row]:
        """What the program does on one process, under ZeRO-1 and with micro-batches of the plan's size."""
        alone = one_process(plan, plan.micro_batch_size)
        return self.once(alone, f"alone {zlib.crc32(to_json(alone).encode())}")

    def exported(self, name: str, *, alone: bool = False) -> tuple[list[Row], Path]:
        """The rows of this case, and the folder of its export; `alone`: on one process."""
        plan = one_process(CASES[name], CASES[name].micro_batch_size) if alone else CASES[name]
        folder = self.folder / f"export {name} {plan.world_size}"
        return self.once(replace(plan, run=RunSettings(export_to=str(folder))), f"exporting {name} {plan.world_size}"), folder

    def written(self) -> tuple[list[Row], Path]:
        """A run under ZeRO-1 with a checkpoint after its second and its last step, of its own folder."""
        return self.once(plan_of(zero_stage=1, run={"save_every": 2}), "written"), self.folder / "written" / "checkpoints"


def one_process(plan: Plan, micro_batch_size: int) -> Plan:
    """The plan on one rank, without what needs others or spares memory."""
    plain = {"tp": 1, "dp": 1, "cp": 1, "ep": 1, "world_size": 1, "zero_stage": 1, "tiled_mlp": 1, "tiled_logits": 1}
    plain |= {"micro_batch_size": micro_batch_size, "num_microbatches": plan.global_batch_size // micro_batch_size}
    plain |= {"offload_activations": False}
    stages = tuple(replace(stage, layers=tuple(replace(span, recompute="none") for span in stage.layers)) for stage in plan.stages)
    return replace(plan, stages=stages, **plain)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("own"))


def assert_same(found: list[Row], expected: list[Row], tolerance: float = 1e-5) -> None:
    """Losses, rates and norms of every step."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, ours in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=tolerance), (row, ours)
        assert row["lr"] == pytest.approx(ours["lr"], rel=1e-9), (row, ours)
        assert row["grad_norm"] == pytest.approx(ours["grad_norm"], rel=max(1e-4, tolerance)), (row, ours)
        assert row.get("valid_loss", 0.0) == pytest.approx(ours.get("valid_loss", 0.0), abs=tolerance)


EXPORTED = ("llama zero3", "llama tp2", "llama lora zero3")
LONG = (
    "llama tp2 dp2",
    "llama recomputed",
    "qwen3 zero3",
    "gpt zero1",
    "bert tp2",
    "t5 zero1",
    "mixtral zero2",
    "mixtral ep2 zero1",
    "llama cp2 zero3",
    "llama lora tp2",
)
"""Left to .ci/full: what they have is in others."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in CASES])
def test_it_trains_what_transformers_alone_trains(name: str, workshop: Workshop) -> None:
    """Where transformers alone has no such thing (adapters, the reported loss without that of balance, 16 bits): what one process does."""
    plan = CASES[name]
    training = plan.training
    plain = training.lora is None and plan.model is not BALANCED and training.precision == "fp32"
    found = workshop.exported(name)[0] if name in EXPORTED else workshop.trained(plan, f"own {name}")
    alone = workshop.plain(plan) if plain else workshop.exported(name, alone=True)[0] if name in EXPORTED else workshop.program_alone(plan)
    assert_same(found, alone, 1e-5 if training.precision == "fp32" else 3e-3)


CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed lora": (LLAMA, {"packing": True, "lora": Lora(rank=4)}),
    "padded": (LLAMA, {"packing": False}),
    "ulysses": (LLAMA, {"packing": False, "cp": 2, "dp": 1}),
    "balanced": (BALANCED, {"packing": False}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] if case == "padded" else []) for case in CHATS])
def test_it_trains_and_evaluates_chats_as_one_process_does(case: str, workshop: Workshop) -> None:
    """Their samples have different numbers of answer tokens: a step's loss is the mean over all of its global batch."""
    model, more = CHATS[case]
    folder = workshop.folder / "chats"
    folder.mkdir(exist_ok=True)
    chats = write_chats(folder / "chats.jsonl")
    run = {"data": chats, "tokenizer": write_tokenizer(folder), "valid": chats, "eval_every": 2, "eval_steps": 2}
    plan = plan_of(replace(model, max_position_embeddings=192), zero_stage=2, task="sft", seq_length=192, run=run, **more)
    found = workshop.trained(plan, f"own chats {case}")
    assert ["valid_loss" in row for row in found] == [False, True, False, True]
    assert_same(found, workshop.program_alone(plan))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_its_checkpoint_and_keeps_the_newest(stage: int, workshop: Workshop) -> None:
    """Those of stage 3 are written beside the training. Dropout goes on where it was."""
    plan = plan_of(
        replace(GPT, hidden_dropout=0.1, attention_dropout=0.1),
        zero_stage=stage,
        run={"save_every": 1, "keep_last": 2, "async_save": stage == 3},
    )
    name = f"saved {stage}"
    rows = workshop.trained(plan, name)
    saved = workshop.folder / f"saved-{stage}" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["latest.json", "step_000003", "step_000004"]
    again = replace(plan, run=RunSettings(resume=str(saved / "step_000003")))
    assert_same(workshop.trained(again, f"resumed {stage}"), rows[3:], 1e-6)
    assert_same(workshop.trained(plan, name, more=["--continue"]), rows)


def test_a_run_goes_on_in_another_layout_and_stage(workshop: Workshop) -> None:
    rows, saved = workshop.written()
    layouts: tuple[dict[str, Any], ...] = ({"zero_stage": 3}, {"tp": 2, "dp": 1, "zero_stage": 2})
    for layout in layouts:
        resumed = plan_of(**layout, run={"resume": str(saved / "step_000002")})
        assert_same(workshop.trained(resumed, f"resumed {layout['zero_stage']}"), rows[2:])


def test_what_train_change_says_holds_from_the_first_step_that_is_resumed(workshop: Workshop) -> None:
    plan, (_, saved) = plan_of(zero_stage=1), workshop.written()
    more = replace(plan.training, steps=6, lr=2e-3, min_lr=1e-4, betas=(0.8, 0.9), weight_decay=0.0)
    resumed = replace(plan, training=more, run=RunSettings(resume=str(saved / "step_000002")))
    rows = workshop.trained(resumed, "changed")
    assert [row["lr"] for row in rows] == pytest.approx([learning_rate(more, step) for step in range(2, 6)], rel=1e-9)
    continued = replace(resumed, zero_stage=3)
    assert_same(rows, workshop.trained(continued, "changed under another stage"))
    unchanged = replace(resumed, training=replace(more, betas=plan.training.betas, weight_decay=plan.training.weight_decay))
    other = workshop.trained(unchanged, "not changed")
    assert abs(other[-1]["loss"] - rows[-1]["loss"]) > 1e-4, "betas and decay are in the losses"


def test_a_step_has_its_row_before_its_checkpoint(workshop: Workshop) -> None:
    """A run that ends in between, here as its checkpoint can't be written, has lost no row when it goes on."""
    out = workshop.folder / "unsaved"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "step_000002").write_text("a file where a folder should be")
    _, codes, logs = workshop.run(plan_of(zero_stage=1, run={"save_every": 2}), "unsaved")
    assert codes == [5, 5], logs
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_damaged_checkpoint_is_refused(workshop: Workshop) -> None:
    saved = shutil.copytree(workshop.written()[1].parent, workshop.folder / "damaged") / "checkpoints"
    states = next(path for path in sorted(saved.glob("step_000004/states/*")) if path.stat().st_size > 1000)
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 64
    states.write_bytes(content)
    _, codes, logs = workshop.run(plan_of(zero_stage=1, run={"resume": str(saved)}), "from damaged")
    assert 0 not in codes
    assert f"{states.name} is not what was written" in logs


def test_a_run_that_goes_on_by_itself_takes_the_newest_whole_checkpoint(workshop: Workshop) -> None:
    """The damaged one is named, kept, and counted no more; where none is whole, nothing is trained."""
    plan = plan_of(zero_stage=1, run={"save_every": 1, "keep_last": 3})
    first = workshop.trained(plan, "attended by nobody")
    out = workshop.folder / "attended-by-nobody"
    saved = out / "checkpoints"
    assert sorted(path.name for path in saved.glob("step_*")) == ["step_000002", "step_000003", "step_000004"]
    states = next(path for path in sorted(saved.glob("step_000004/states/*")) if path.stat().st_size > 1000)
    os.truncate(states, 1000)
    (saved / "step_000003" / "latest.json").write_text("")
    (out / "metrics.jsonl").unlink()
    again = workshop.trained(plan, "attended by nobody", more=["--continue"])
    assert_same(again, first[2:], 1e-6)
    log = (out / "logs" / "rank-0.log").read_text()
    assert "DAMAGED CHECKPOINT step_000004, skipped and kept as checkpoints/damaged_step_000004: " in log
    assert f"checkpoints/step_000004/states/{states.name} has 1,000 bytes" in log
    assert "DAMAGED CHECKPOINT step_000003, skipped and kept" in log
    assert "going on from step_000002" in log
    names = ["step_000002", "step_000003", "step_000004"]
    assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["damaged_step_000003", "damaged_step_000004", *names]
    assert json.loads((saved / "latest.json").read_text())["step"] == 4
    for path in saved.glob("step_*/digests.json"):
        path.write_text("{")
    _, codes, logs = workshop.run(plan, "attended by nobody", more=["--continue"])
    assert 0 not in codes
    assert "has no whole checkpoint: " in logs
    assert sorted(path.name for path in saved.glob("step_*")) == names


@pytest.mark.parametrize("by", ["signal", "file"])
def test_a_warning_of_the_time_limit_saves_and_ends_well(by: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(zero_stage=1, steps=400, run={"save_every": 400, "export_to": str(workshop.folder / "not written")})
    out = workshop.folder / f"warned-by-{by}"
    asked = out / "logs" / "asked"
    monkeypatch.setitem(own_ranks.MORE, ASKED_VARIABLE, str(asked))

    def warn(process: int) -> None:
        metrics, limit = out / "metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < limit and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.05)
        os.kill(process, signal.SIGUSR1) if by == "signal" else asked.touch()

    rows = workshop.trained(plan, f"warned by {by}", meanwhile=warn)
    assert 2 <= len(rows) < 400
    marker = json.loads((out / "checkpoints" / "latest.json").read_text())
    assert marker["step"] == rows[-1]["step"]
    assert not (workshop.folder / "not written").exists()


def test_what_is_held_out_is_evaluated_as_one_process_does(workshop: Workshop) -> None:
    run = {"split": (90.0, 10.0, 0.0), "eval_every": 2, "eval_steps": 2}
    plan = plan_of(zero_stage=1, steps=5, run=run)
    found = workshop.trained(plan, "own evaluated")
    assert ["valid_loss" in row for row in found] == [False, True, False, True, True]
    assert_same(found, workshop.program_alone(plan))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workshop.folder / "own-evaluated" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([row["loss"] for row in found], abs=1e-4)
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 5]


def test_weights_are_exported_after_an_evaluation_too(workshop: Workshop) -> None:
    """ZeRO-3 begins to gather the first weights of a next pass, and "cannot partition a param in flight": the run ended without them."""
    folder = workshop.folder / "evaluated chats"
    folder.mkdir()
    chats = write_chats(folder / "chats.jsonl")
    (folder / "config.json").write_text(json.dumps(SMALL))
    asked = {"task": "sft", "model.hf_config": folder / "config.json", "cluster": "cpu", "engine": "deepspeed", "gpus": 2, "data": chats}
    asked |= {"data.valid": chats, "tokenizer": write_tokenizer(folder), "pin.zero_stage": 3, "model.export_to": folder / "weights"}
    asked["train"] = {"global_batch_size": 8, "seq_length": 256, "steps": 4, "eval_every": 2}
    plan = so.plan(**{name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}).plan
    assert "valid_loss" in workshop.trained(plan, "evaluated chats")[-1]
    assert (folder / "weights" / "model.safetensors").stat().st_size > 2 * 10_000


SMALL = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 176, "vocab_size": 600, "max_position_embeddings": 512}  # fmt: skip


def test_a_loss_that_is_no_number_ends_the_run_with_its_status(workshop: Workshop) -> None:
    _, codes, logs = workshop.run(plan_of(zero_stage=1, lr=1e30, clip=0.0, warmup=0), "diverged")
    assert codes == [3, 3], logs
    assert "NonFiniteLossError: step " in logs


@pytest.mark.parametrize("name", EXPORTED)
def test_the_export_is_that_of_one_process(name: str, workshop: Workshop) -> None:
    from safetensors.torch import load_file

    written = []
    for alone in (False, True):
        _, folder = workshop.exported(name, alone=alone)
        written.append(load_file(weights := next(folder.glob("*.safetensors"))))
        assert weights.stat().st_mode == next(folder.glob("*config.json")).stat().st_mode
    assert written[0].keys() == written[1].keys()
    for tensor, value in written[0].items():
        assert value.shape == written[1][tensor].shape
        assert float((value - written[1][tensor]).abs().max()) < 1e-5, tensor


def test_without_deepspeed_it_does_not_train(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate/state.py, PartialState."""
    plan = CASES["llama zero2"]
    monkeypatch.setattr(own_ranks, "MORE", {"ACCELERATE_USE_CPU": "true"})
    _, codes, logs = workshop.run(plan, "left out")
    assert 0 not in codes
    assert "accelerate leaves DeepSpeed out: is ACCELERATE_USE_CPU set?" in logs


@pytest.mark.parametrize("program", [("hugging_face", "hugging_face_hooks", "hugging_face_chats"), ("megatron", "megatron_hooks")])
def test_what_a_user_starts_is_less_than_300_lines(program: tuple[str, ...]) -> None:
    """The program with all that is beside it: its hooks, and what trains chats."""
    room = Path(hugging_face_hooks.__file__).parent
    assert sum(len((room / f"{name}.py").read_text().splitlines()) for name in program) < 300


def test_a_users_own_callback_metric_and_data_set_are_trained_with(tmp_path: Path) -> None:
    """The lines of the recipes' README, in a copy of the program."""
    page = (Path(orchestrator.__file__).parents[1] / "recipes" / "README.md").read_text()
    section = page.split("## Your own callback, metric and data set")[1].split("\n## ")[0]
    mine, command = (
        textwrap.dedent(block) for block in re.findall(r"((?:^    .*\n|^\n(?=    ))+)", section, flags=re.MULTILINE) if block.strip()
    )
    program = Path(hugging_face_hooks.__file__).with_name("hugging_face.py").read_text()
    mine = mine.replace("        return {", "        print(f'mine {len(self)} {index}')\n        return {")
    mine += "\nclass Few(Counting):\n    def __len__(self):\n        return 7\n"
    changed = program.replace("def trainer(", mine + "\n\ndef trainer(").replace("train_dataset=training", "train_dataset=Counting()")
    changed = changed.replace("eval_dataset=valid", "eval_dataset=Few()")
    said = "callbacks=[run, Told()], compute_metrics=accuracy"
    said += ", preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"
    changed = changed.replace("callbacks=[run]", said)
    assert changed.count(said) == 1
    (tmp_path / "mine.py").write_text(changed)
    words = [*command.split()[1:], "gpus=2", "cluster=cpu", "train.steps=4", "pin.tp=1", f"out={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.run", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["valid_accuracy" in row for row in rows] == [False, True, False, True]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "step 4 of mine is done" in log
    read = [int(index) for index in re.findall(r"^mine 4096 (\d+)$", log, flags=re.MULTILINE)]
    assert read != sorted(read), "drawn, not in the data set's order"
    assert {int(index) for index in re.findall(r"^mine 7 (\d+)$", log, flags=re.MULTILINE)} == {0, 1, 2}, "rank 0's half of six"
    assert "evaluation leaves out the last 1 of 7 samples, fewer than 2 ranks" in log


def test_it_begins_with_a_checkpoints_weights_under_the_plans_dropout(workshop: Workshop) -> None:
    """The checkpoint's configuration says others; one that lacks a weight is refused, which transformers would draw."""
    import transformers

    from orchestrator.engines.hf_config import config_keywords

    folder, plan = workshop.folder / "base", plan_of(GPT, zero_stage=2)
    config = transformers.GPT2Config(**config_keywords(GPT) | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5})
    transformers.set_seed(5)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    begun = replace(plan, run=RunSettings(init_from=str(folder)))
    assert_same(workshop.trained(begun, "own begun"), workshop.plain(begun))
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**config_keywords(GPT) | {"n_layer": 1})).save_pretrained(folder)
    _, codes, logs = workshop.run(begun, "lacking")
    assert 0 not in codes
    assert "has no tensor transformer.h.1.attn.c_attn.bias" in logs
