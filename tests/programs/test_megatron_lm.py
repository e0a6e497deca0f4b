"""Megatron-LM's own programs, out of a checkout, with the arguments that we emit, train on gloo ranks to our worker's losses.

Needs a checkout of Megatron-LM, tag core_v0.16.1, named by the variable MEGATRON_LM (skips without one), and the package six, which
that tag's tokenizers import. About 10 minutes on two cores: eight of its thirteen tests took 350 CPU seconds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.errors import NO_ROOM
from orchestrator.plan import from_json
from orchestrator.tuning import read_trials

CHECKOUT = os.environ.get("MEGATRON_LM")
HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "orchestrator" / "programs" / "megatron.py"
TAG = "core_v0.16.1"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not CHECKOUT, reason=f"MEGATRON_LM names no checkout of Megatron-LM (tag {TAG})"),
]

STEPS, BATCH, SEQ, VOCAB = 6, 8, 32, 512
SEED = 1234
"""The default of every plan."""
EVERY, EVAL_STEPS = 3, 2
DOCUMENTS = 64
"""Above the 48 samples that are trained on, and the 48 that Megatron asks for to evaluate on: none is drawn twice."""
MODEL = (
    "recipe=gpt_tiny", f"model.vocab_size={VOCAB}", "model.hidden_size=64", "model.num_layers=6", "model.ffn_hidden_size=128",
    f"model.max_position_embeddings={SEQ}", f"train.seq_length={SEQ}", f"train.global_batch_size={BATCH}", f"train.steps={STEPS}",
    "train.warmup=2", "engine=megatron", "launch=local",
)  # fmt: skip
"""A vocabulary without padding: our worker takes padding out of the softmax, Megatron-LM leaves it in."""
OURS = "program=instrument"
EVALUATED = (f"train.eval_every={EVERY}", f"train.eval_steps={EVAL_STEPS}")

PLANS: dict[str, tuple[str, ...]] = {
    "data parallel, ZeRO-1": ("gpus=2", "pin.tp=1", "pin.pp=1", "pin.zero_stage=1"),
    "tensor x pipeline, sequence parallel, modules recomputed": (
        "gpus=4", "pin.tp=2", "pin.pp=2", "pin.vpp=1", "pin.sequence_parallel=true", "pin.recompute=selective", "pin.zero_stage=0"
    ),
    "interleaved, all recomputed": ("gpus=2", "pin.pp=2", "pin.vpp=3", "pin.tp=1", "pin.recompute=full", "pin.zero_stage=0"),
    "uneven stages": ("gpus=4", "pin.pp=4", "pin.vpp=1", "pin.layout=Et|tt|tt|tL"),
    "pipeline ranks as neighbours, ZeRO-1": (
        "gpus=4", "pin.pp=2", "pin.vpp=1", "pin.dp=2", "pin.zero_stage=1", "pin.rank_order=tp-cp-ep-pp-dp", "pin.recompute=none"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workshop:
    """Where runs are made: the corpora in both orders, the programs, and our worker's rows."""

    folder: Path
    train: tuple[Path, Path]
    valid: tuple[Path, Path]
    rows: list[dict[str, Any]]


def orchestrator(out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of one run."""
    command = [sys.executable, "-m", "orchestrator.run", *words, f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(out.glob("logs/rank-*.log")))
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:] + logs
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    import corpora

    folder = tmp_path_factory.mktemp("megatron_lm")
    evaluations = STEPS // EVERY + 1  # Megatron counts one at the end too (training.py, get_train_valid_test_num_samples)
    train = corpora.make(folder, "train", DOCUMENTS, corpora.Reading(SEQ, STEPS * BATCH, SEED, VOCAB))
    valid = corpora.make(folder, "valid", DOCUMENTS, corpora.Reading(SEQ, evaluations * EVAL_STEPS * BATCH, SEED, VOCAB), split=1)
    words = (*MODEL, *PLANS["data parallel, ZeRO-1"], *EVALUATED, f"data={train[1]}", f"data.valid={valid[1]}", OURS)
    rows = orchestrator(folder / "ours", *words)
    return Workshop(folder, train, valid, rows)


def started(workshop: Workshop, out: Path, *words: str, by: str = "program=auto") -> list[dict[str, Any]]:
    """The rows of Megatron's own program under these words."""
    checkout = f"env.MEGATRON_LM={Path(CHECKOUT or '').resolve()}"
    return orchestrator(out, *MODEL, f"data={workshop.train[0]}", by, checkout, *words)


def assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every step: losses to 1e-5, the rates that the steps were taken at, gradients' norms."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, ours in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=1e-5), (row, ours)
        assert row["lr"] == pytest.approx(ours["lr"], rel=1e-6), (row, ours)
        assert row["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4), (row, ours)


@pytest.mark.parametrize("name", PLANS)
def test_megatrons_program_trains_as_our_worker(name: str, workshop: Workshop, tmp_path: Path) -> None:
    found = started(workshop, tmp_path / "run", *PLANS[name])
    assert_same_rows(found, workshop.rows)


def test_it_is_tuned_by_its_own_step_times_and_then_trains_as_our_worker(workshop: Workshop, tmp_path: Path) -> None:
    """Two plans of Megatron's own program take four steps each; nothing but the whole training saves."""
    out = tmp_path / "run"
    words = ("gpus=2", "pin.vpp=1", "pin.recompute=none", "pin.zero_stage=0")
    found = started(workshop, out, *words, f"train.save_every={STEPS}", "tune=2", "tune.steps=4", "tune.rounds=1", by=f"entry={PROGRAM}")
    assert_same_rows(found, workshop.rows)
    trials = read_trials(out)
    assert [trial.why for trial in trials] == ["", ""]
    best = min(trials, key=lambda trial: trial.measured_s or 0.0)
    plan = from_json((out / "plan.json").read_bytes(), "plan.json")
    assert plan.candidate == best.plan.candidate
    assert plan.prices is None, "a program without timers teaches no prices"
    for number in "12":
        steps = (out / "tune" / number / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4]
        assert all(json.loads(line)["step_time_s"] > 0 for line in steps)
        assert not (out / "tune" / number / "checkpoints").exists()
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)


MASKED_MODEL = (
    f"model.vocab_size={VOCAB}", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_layers=4", f"train.seq_length={SEQ}",
    f"train.global_batch_size={BATCH}", f"train.steps={STEPS}", "train.warmup=2", "pin.micro_batch_size=2", "engine=megatron",
    "launch=local",
)  # fmt: skip
MASKED_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bert": (
        ("gpus=4", "pin.tp=2", "pin.pp=2", "pin.vpp=1", "pin.sequence_parallel=true", "pin.zero_stage=0"),
        ("gpus=2", "pin.tp=1", "pin.pp=1", "pin.zero_stage=1"),
    ),
    "t5": (
        ("gpus=2", "pin.tp=2", "pin.sequence_parallel=false", "pin.zero_stage=0"),
        ("gpus=2", "pin.tp=1", "pin.zero_stage=1"),
    ),
}
"""Two of each program; Megatron-core has no pipeline for T5."""


@dataclass(frozen=True)
class Masked:
    """A program that masks by rules of its own: its words but for the layout, and, of our worker, the rows and a file of its samples."""

    family: str
    words: tuple[str, ...]
    rows: list[dict[str, Any]]
    samples: Path


def as_megatrons(family: str, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One of our worker's samples by the names of Megatron's dataset. Attention sees all of it, but for what a decoder has not read yet."""
    tokens, loss_mask = sample["tokens"], sample["loss_mask"].astype(np.int64)
    if family == "bert":
        none = np.zeros_like(tokens)
        return {"text": tokens, "types": none, "labels": sample["labels"], "is_random": none[0], "loss_mask": loss_mask,
                "padding_mask": none + 1, "truncated": none[0]}  # fmt: skip
    decoder = sample["decoder_tokens"]
    return {"text_enc": tokens, "text_dec": decoder, "labels": sample["labels"], "loss_mask": loss_mask, "enc_mask": np.ones_like(tokens),
            "dec_mask": np.ones_like(decoder), "truncated": np.int64(0)}  # fmt: skip


@pytest.fixture(scope="module", params=MASKED_LAYOUTS)
def masked(request: pytest.FixtureRequest, workshop: Workshop) -> Masked:
    from orchestrator.workers import data
    from orchestrator.workers.samples import TextSamples

    family, out = request.param, workshop.folder / f"ours-{request.param}"
    more = {"bert": ("model.num_token_types=0",), "t5": ("model.decoder_num_layers=4", "train.decoder_seq_length=16")}[family]
    words = (f"recipe={family}_tiny", *MASKED_MODEL, *more)
    rows = orchestrator(out, *words, *MASKED_LAYOUTS[family][0], f"data={workshop.train[1]}", OURS)
    plan = from_json((out / "plan.json").read_bytes(), "plan.json")
    corpus = data.open_corpus(plan, out / "data", build=True, wait=lambda: None)
    batches = TextSamples(plan, corpus.train, corpus.specials)
    samples = [as_megatrons(family, batches.sample(ordinal)) for ordinal in range(STEPS * BATCH)]
    file = workshop.folder / f"samples-{family}.npz"
    np.savez(file, **{name: np.stack([sample[name] for sample in samples]) for name in samples[0]})
    return Masked(family, words, rows, file)


def started_masked(masked: Masked, workshop: Workshop, out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of BERT's or T5's own program, on sentences of its own where no samples are given. Without a network BertWordPieceLowerCase
    reads its vocabulary only with --legacy-tokenizer."""
    import corpora

    sentences, vocabulary = corpora.sentences(workshop.folder)
    given = any(word.startswith("env.SAMPLES=") for word in words)
    program = (f"entry={HERE / 'given_samples.py' if given else PROGRAM}", f"env.MEGATRON_LM={Path(CHECKOUT or '').resolve()}")
    data = f"entry.args=--data-path {sentences} --vocab-file {vocabulary} --legacy-tokenizer"
    return orchestrator(out, *masked.words, *program, data, *words)


@pytest.mark.parametrize("layout", [0, 1])
def test_the_programs_that_mask_train_as_our_worker_on_its_samples(layout: int, masked: Masked, workshop: Workshop, tmp_path: Path) -> None:
    words = MASKED_LAYOUTS[masked.family][layout]
    found = started_masked(masked, workshop, tmp_path / "run", *words, f"env.SAMPLES={masked.samples}")
    assert_same_rows(found, masked.rows)


def test_the_programs_that_mask_train_alike_in_two_layouts_on_their_own_samples(masked: Masked, workshop: Workshop, tmp_path: Path) -> None:
    one, other = (
        started_masked(masked, workshop, tmp_path / f"layout-{index}", *words) for index, words in enumerate(MASKED_LAYOUTS[masked.family])
    )
    assert_same_rows(one, other)
    assert one[0]["loss"] == pytest.approx(math.log(VOCAB), abs=0.1), "nothing of the vocabulary is padding"
    assert one[-1]["loss"] < one[0]["loss"] - 0.03
    assert abs(one[1]["loss"] - masked.rows[1]["loss"]) > 1e-4, "their samples are not our worker's"


def test_it_evaluates_as_our_worker_and_goes_on_in_another_layout(workshop: Workshop, tmp_path: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "continued"
    alone = ("pin.zero_stage=0", "pin.vpp=1")
    evaluated = (*EVALUATED, f"data.valid={workshop.valid[0]}")
    first = started(workshop, saved, "gpus=2", "pin.tp=2", *alone, *evaluated, f"train.save_every={EVERY}")
    assert_same_rows(first, workshop.rows)
    both = (first, workshop.rows)
    theirs, ours = ({row["step"]: row["valid_loss"] for row in rows if row.get("valid_loss") is not None} for rows in both)
    assert [*theirs] == [*ours] == [EVERY, STEPS]
    assert theirs[EVERY] == pytest.approx(ours[EVERY], abs=1e-5), "later ones: Megatron reads on, our worker has the same samples"

    more = f"resume={saved / 'checkpoints' / f'iter_{EVERY:07d}'}"
    rest = started(workshop, out, "gpus=2", "pin.pp=2", "pin.tp=1", "pin.zero_stage=0", "pin.vpp=1", more)
    assert_same_rows(rest, workshop.rows[EVERY:])


def test_a_killed_writer_of_the_checkout_ends_the_run_at_once(tmp_path: Path) -> None:
    """0.16 forks processes that write, and waits for them without a limit."""
    out = tmp_path / "run"
    model = (word for word in MODEL if not word.startswith("train.steps="))
    saving = ("train.steps=400", "train.save_every=1", "train.keep_last=2", "train.step_timeout_s=120")
    words = (*model, "gpus=2", "pin.tp=2", *saving)
    command = [sys.executable, "-m", "orchestrator.run", *words, f"env.MEGATRON_LM={CHECKOUT}", f"out={out}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = None
    while killed is None and run.poll() is None:
        killed = next((writer for writer in map(int, own_children(out)) if is_writing(writer)), None)
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
    begun = time.monotonic()
    said, _ = run.communicate(timeout=200)
    assert killed is not None, said[-2000:]
    assert run.returncode == NO_ROOM, said[-2000:]
    assert time.monotonic() - begun < 60
    assert "the checkpoint can't be written: a process that writes it for this rank was ended by signal 9 (Killed)" in said


def own_children(out: Path) -> list[str]:
    """The processes whose parent works in this folder, as they do."""
    inside = [path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if resolves(path) == str(out)]
    return [pid for pid in inside if parent_of(pid) in inside]


def resolves(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def parent_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def is_writing(pid: int) -> bool:
    """Whether it is a writer: its own parent trains, and it has a part of a checkpoint open."""
    return any(".distcp" in resolves(file) for file in Path(f"/proc/{pid}/fd").glob("*"))
