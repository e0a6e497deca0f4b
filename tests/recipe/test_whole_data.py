"""Data is read to its end before anything starts: what the ranks would find late, or never, is refused by file and line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import orchestrator as so
from orchestrator import run
from orchestrator.errors import InputError
from orchestrator.plan import RunSettings
from orchestrator.recipe.documents import HEADER, sequence_lengths
from orchestrator.recipe.sources import existing_tokenizer
from orchestrator.recipe.supervised import counted
from orchestrator.recipe.whole_data import check_first_texts, check_index, check_samples, check_whole


def index(
    folder: Path, *, code: int = 8, count: int = 2, lengths: tuple[int, ...] = (3, 5), pointers: tuple[int, ...] = (0, 6), cut: int = 0
) -> str:
    """A pair of 8 tokens of 2 bytes in two sequences, or with something of it wrong."""
    whole = HEADER + struct.pack("<QBQQ", 1, code, count, 3) + struct.pack("<2i", *lengths) + struct.pack("<2q", *pointers)
    whole += struct.pack("<3q", 0, 1, 2)
    (folder / "a.idx").write_bytes(whole[: len(whole) - cut])
    (folder / "a.bin").write_bytes(b"\0" * 16)
    return str(folder / "a")


WRONG = {
    "an absurd count": ({"count": 10**17}, "has 82 bytes, and the 100,000,000,000,000,000 sequences"),
    "cut": ({"cut": 9}, "has 73 bytes, and the 2 sequences and 3 documents that it counts take 82"),
    "floats": ({"code": 6}, "has tokens of type 6, which is no whole number"),
    "a type that is none": ({"code": 77}, "has tokens of type 77"),
    "a wider type": ({"code": 4}, "sequence 1 is 5 tokens of 4 bytes at byte 6, and a.bin has 16 bytes"),
    "a negative length": ({"lengths": (3, -5)}, "sequence 1 has -5 tokens"),
    "a wild pointer": ({"pointers": (0, 10**15)}, "sequence 1 is 5 tokens of 2 bytes at byte 1,000,000,000,000,000"),
    "a pointer before the file": ({"pointers": (-8, 6)}, "sequence 0 is 3 tokens of 2 bytes at byte -8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_index_that_does_not_fit_its_data_is_refused_by_name(case: str, tmp_path: Path) -> None:
    wrong, said = WRONG[case]
    prefix = index(tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        check_whole(RunSettings(data=f"{prefix}.idx"), supervised=False)
    assert said in str(caught.value)
    assert f"{prefix}.idx" in str(caught.value)


def test_a_sound_index_passes_and_so_does_megatrons_own(tmp_path: Path) -> None:
    check_index(index(tmp_path))
    datasets = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = datasets.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16)
    builder.add_document(torch.arange(7), [3, 4])
    builder.finalize(str(tmp_path / "m.idx"))
    check_index(str(tmp_path / "m"))


def test_an_absurd_count_is_no_traceback_of_a_plan(tmp_path: Path) -> None:
    assert sequence_lengths(index(tmp_path, count=10**17)) is None


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
            "message 2 is the assistant's and says nothing",
        ),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "has half of a surrogate pair"),
        ("[" * 100_000, "is not JSON"),
        ('{"text": "a"}', "is no sample of task=sft"),
    ],
)
def test_chats_are_looked_at_to_the_last_line(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n" * 6000 + "\n" + line)
    with pytest.raises(InputError, match=rf"a.jsonl:6002: {said}"):
        check_samples(str(path), chats=True)
    path.write_text(line)
    with pytest.raises(InputError, match=said):  # where its tokens are counted, too
        counted(str(path), str(tmp_path))


def test_a_start_looks_at_its_data_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = index(tmp_path, pointers=(0, 10**15))
    assert run.main(("recipe=gpt_tiny", "gpus=2", "cluster=cpu", f"data={prefix}", "launch=local", "out=o")) == 2
    assert "a.idx: sequence 1 is 5 tokens" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_what_is_not_started_looks_at_its_data_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "vocab.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 6000 + '{"messages": [{"role": "user", "content": "a"}]}')
    words = ("recipe=llama_tiny_sft", "cluster=dgx_h100", "gpus=2", "data=a.jsonl", "tokenizer=tok", "launch=none", "out=o")
    assert run.main(words) == 2
    assert "a.jsonl:6001: has no message of the assistant: nothing to learn" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_gpus_train_on_nothing_that_nobody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start of a plan for GPUs needs data= or a yes; a plan alone says what it would train on."""
    monkeypatch.chdir(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    words = ("recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100", "launch=slurm", "out=o")
    assert run.main(words) == 2
    said = capsys.readouterr().err
    assert "data: is missing, and 8 x H100-SXM-80GB would train on Python's own sources, byte by byte" in said
    assert "data.made_up=true" in said
    assert not (tmp_path / "o").exists()
    assert run.main((*words, "data.made_up=true")) == 2
    assert "data: is missing" not in capsys.readouterr().err
    assert run.main((*words[:3], "launch=none", "out=p")) == 0
    assert "data: Python's own sources, byte by byte, as data= is not given; a start on GPUs asks for data=PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"foo": 1}', 'is not a JSON object with a string in "text"$'), ("{", "is not a JSON object"), ("", "is not a JSON object"),
     ('{"messages": []}', "task=sft trains on chats and prompts"), ('{"text": 3}', "is not a JSON object")],
)  # fmt: skip
def test_texts_whose_first_line_has_none_are_refused_before_a_job_waits(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(InputError, match=why):
        check_first_texts(RunSettings(data=str(path)))
    with pytest.raises(InputError, match=why):  # a plan's folder would end there too
        so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", data=str(path))
    path.write_text('{"text": "a"}\n{"foo": 1}\n')
    check_first_texts(RunSettings(data=str(path), valid=str(tmp_path / "none.jsonl")))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"tokenizer={tmp_path}: holds no tokenizer: none of tokenizer.json"):
        existing_tokenizer("tokenizer", str(tmp_path))
    (tmp_path / "spiece.model").write_bytes(b"")
    assert existing_tokenizer("tokenizer", str(tmp_path)) == str(tmp_path)
