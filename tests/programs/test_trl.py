"""Chats are trained by TRL's SFTTrainer, by its own loss, as by transformers' Trainer with ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import write_chats, write_tokenizer
from msgspec.structs import replace
from test_trainer_program import Row, Workshop, assert_same, plan_of, workshop  # noqa: F401
from worker_plans import GPT, LLAMA, MIXTRAL

from orchestrator.engines import ENGINES
from orchestrator.model.lora import Lora
from orchestrator.plan import Plan
from orchestrator.plan.trl import FLAG, who
from orchestrator.programs import hugging_face, hugging_face_chats
from orchestrator.workers.samples import Drawn

pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("trl")]

LENGTH = 192
CASES: dict[str, dict[str, Any]] = {
    "padded zero0": {"packing": False},
    "packed lora zero2": {"packing": True, "zero_stage": 2, "lora": Lora(rank=4), "micro_batch_size": 2, "global_batch_size": 8},
    "padded zero3": {"packing": False, "zero_stage": 3, "run": {"save_every": 2}},
    "packed lora zero3": {"packing": True, "zero_stage": 3, "lora": Lora(rank=4)},
    "tied packed zero3": {"model": replace(LLAMA, tie_embeddings=True), "packing": True, "zero_stage": 3},
    "gpt zero2": {"model": GPT, "packing": True, "zero_stage": 2},
    "mixtral zero2": {"model": MIXTRAL, "packing": True, "zero_stage": 2},
    "mixtral ep2": {"model": MIXTRAL, "packing": False, "ep": 2, "zero_stage": 1},
}
SHORT = ("padded zero0", "packed lora zero2", "padded zero3")


def of_chats(folder: Path, model: Any = LLAMA, *, run: dict[str, Any] | None = None, **more: Any) -> Plan:
    """A plan of chats, which are written here."""
    folder.mkdir(exist_ok=True)
    chats = write_chats(folder / "chats.jsonl")
    settings = {"data": chats, "tokenizer": write_tokenizer(folder), "valid": chats, "eval_every": 2, "eval_steps": 2} | (run or {})
    return plan_of(replace(model, max_position_embeddings=LENGTH), task="sft", seq_length=LENGTH, run=settings, **more)


def log(workshop: Workshop, name: str) -> str:  # noqa: F811
    return (workshop.folder / name.replace(" ", "-") / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in SHORT else [pytest.mark.full]) for case in CASES])
def test_trl_trains_and_evaluates_chats_as_the_instrument_does(case: str, workshop: Workshop) -> None:  # noqa: F811
    plan = of_chats(workshop.folder / "chats", **CASES[case])
    job = ENGINES["deepspeed"].own_loop.job(plan, ENGINES["deepspeed"].translate(plan), None, None)  # type: ignore[union-attr]
    assert job.arguments[-1] == FLAG
    found = workshop.trained(plan, f"trl {case}", more=[FLAG])
    assert f"trained by {who(None)}" in log(workshop, f"trl {case}")
    assert ["valid_loss" in row for row in found] == [False, True, False, True]
    assert_same(found, workshop.trained(plan, f"instrument {case}"))
    assert "trained by" not in log(workshop, f"instrument {case}")
    if plan.run.save_every:
        saved = workshop.folder / f"trl-{case.replace(' ', '-')}" / "checkpoints" / "step_000002"
        resumed = replace(plan, zero_stage=2, run=replace(plan.run, resume=str(saved), save_every=0))
        assert_same(workshop.trained(resumed, f"resumed {case}", more=[FLAG]), found[2:])


def test_trls_own_loss_counts_and_accuracy_are_what_is_reported(workshop: Workshop) -> None:  # noqa: F811
    """TRL counts the tokens of one sequence of a micro-batch where it has two and no mask (sft_trainer.py, compute_loss)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = of_chats(workshop.folder / "chats", packing=True, zero_stage=1, micro_batch_size=2, global_batch_size=8)
    workshop.trained(plan, "counted", more=[FLAG])
    events = EventAccumulator(str(workshop.folder / "counted" / "tensorboard"))
    events.Reload()
    tokens = [event.value for event in events.Scalars("train/num_tokens")]
    assert tokens == [8 * LENGTH * (step + 1) for step in range(plan.training.steps)]
    accuracy = [event.value for event in events.Scalars("train/mean_token_accuracy")]
    assert all(0 <= value <= 1 for value in accuracy)


def test_the_loss_of_chats_is_not_rounded_to_16_bits(workshop: Workshop) -> None:  # noqa: F811
    """The Trainer gives DeepSpeed all numbers in the training's precision, and a share of a mean is one (trainer.py, _prepare_input)."""
    first = [
        workshop.trained(of_chats(workshop.folder / "chats", packing=True, zero_stage=2, precision=precision), f"chats {precision}")[0]
        for precision in ("fp32", "bf16")
    ]
    assert first[1]["loss"] == pytest.approx(first[0]["loss"], abs=2e-3)


def test_a_label_stands_where_its_token_is_and_the_first_of_a_sample_has_none() -> None:
    """The plan's are of the next token; TRL's loss moves its own."""

    class One(Drawn):
        def sample(self, ordinal: int) -> dict[str, np.ndarray]:
            ids = {
                "tokens": np.array([5, 6, 7, 8, 9, 0]),
                "labels": np.array([6, 7, 0, 9, 0, 0]),
                "positions": np.array([0, 1, 2, 0, 1, 0]),
            }
            return ids | {"loss_mask": np.array([1, 1, 0, 1, 0, 0], dtype=np.float32)}

    rows = hugging_face_chats.InTrlsWords(plan_of(), One(plan_of()), 1)
    found = rows.collate([rows[0]])
    assert found["labels"].tolist() == [[-100, 6, 7, -100, 9, -100]]
    assert found["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0]]


def test_a_plan_that_trl_would_train_otherwise_is_refused_with_its_flag(workshop: Workshop) -> None:  # noqa: F811
    plan = of_chats(workshop.folder / "chats", packing=False, tp=2, dp=1)
    _, codes, logs = workshop.run(plan, "divided head", more=[FLAG])
    assert 0 not in codes
    assert "entry.args=--trl: tp=2: it multiplies by the head's weight itself" in logs


@pytest.mark.full
def test_a_users_own_chats_are_read_by_trl(tmp_path: Path) -> None:
    """In a copy of the program with the recipes' README's lines; TRL writes, cuts and masks them."""
    tokenizer, chats = write_tokenizer(tmp_path), write_chats(tmp_path / "chats.jsonl")
    shutil.copy(chats, tmp_path / "mine.jsonl")
    program = Path(hugging_face.__file__).read_text()
    changed = program.replace("train_dataset=training", 'train_dataset=load_dataset("json", data_files="MINE")["train"]')
    changed = changed.replace("MINE", str(tmp_path / "mine.jsonl")).replace(
        "import torch\n", "import torch\nfrom datasets import load_dataset\n", 1
    )
    (tmp_path / "mine.py").write_text(changed)
    words = ["recipe=llama_tiny_sft", f"data={chats}", f"tokenizer={tokenizer}", "engine=deepspeed", "pin.tp=1", "gpus=2", "cluster=cpu"]
    words += ["train.steps=2", "train.warmup=0", f"entry={tmp_path / 'mine.py'}", "entry.args=--trl", f"out={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.run", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
