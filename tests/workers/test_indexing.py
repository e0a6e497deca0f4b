"""Text becomes .bin/.idx that give the text back; what ends early leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from worker_plans import make_plan, samples_of

from orchestrator import data as front
from orchestrator.errors import InputError
from orchestrator.plan import RunSettings
from orchestrator.workers import data, indexing

pytestmark = pytest.mark.engines

TEXTS = [f"document {number} " + "é\N{SNOWMAN}x" * (number % 7) for number in range(50)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n" for number, text in enumerate(TEXTS)) + "\n")
    return path


def test_every_line_is_a_document(jsonl: Path) -> None:
    assert [text.decode() for text in indexing.documents(jsonl)] == TEXTS


TEXT = "\n\n  one\nmore of one\n\n \n\ntwo\r\n\r\nthree with a word\nand a line\n\nfour"
CUT = {
    "blank_lines": ["  one\nmore of one", "two", "three with a word\nand a line", "four"],
    "lines": ["  one", "more of one", "two", "three with a word", "and a line", "four"],
    "file": [TEXT],
}


@pytest.mark.parametrize("cut", CUT)
def test_a_text_is_cut_into_documents(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(TEXT.encode())
    assert [text.decode() for text in indexing.documents(path, cut)] == CUT[cut]


@pytest.mark.parametrize(("word", "count"), [("documents=file", 1), ("documents=blank_lines", 4), ("documents=lines", 6)])
def test_the_command_cuts_a_text_as_it_is_asked(word: str, count: int, tmp_path: Path) -> None:
    from orchestrator.recipe.documents import sequence_lengths

    (tmp_path / "in.txt").write_text(TEXT)
    asked = front.arguments([f"input={tmp_path / 'in.txt'}", f"out={tmp_path / 'out'}", "workers=1", word])
    assert run_here([sys.executable, "-m", front.WORKER, *asked]) == 0
    lengths = sequence_lengths(str(tmp_path / "out"))
    assert lengths is not None
    assert len(lengths) == count


def test_the_index_gives_the_text_back_and_trains(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("whole file\n" * 300)
    out = tmp_path / "deep" / "corpus"
    documents, tokens = indexing.index([str(jsonl), str(tmp_path / "more.txt")], out, None, workers=2)
    assert documents == len(TEXTS) + 1
    row = data.indexed_tokens(str(out))
    assert len(row) == tokens
    expected = b"".join(text.encode() + b"\0" for text in [*TEXTS, "whole file\n" * 300])
    found = row
    np.testing.assert_array_equal(np.where(found == data.BYTES, 0, found), np.frombuffer(expected, dtype=np.uint8))
    assert sorted(path.name for path in out.parent.iterdir()) == ["corpus.bin", "corpus.idx"]
    plan = make_plan(run=RunSettings(data=f"{out}.idx"), micro_batch_size=1)
    assert samples_of(plan, tmp_path / "cache").microbatches(0)[0]["tokens"].shape == (1, 32)


def test_what_ends_early_leaves_nothing(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "corpus"
    with jsonl.open("a") as file:
        file.write("no json\n")
    for workers in (1, 2):
        with pytest.raises(InputError, match=r"in.jsonl:52: is not a JSON object"):
            indexing.index([str(jsonl)], out, None, workers=workers)
        assert not list(out.parent.iterdir())


def test_what_can_not_be_written_is_told_in_a_line(
    jsonl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["indexing", "--out", "/proc/nowhere/all", str(jsonl)])
    assert indexing.main() == 2
    assert capsys.readouterr().err == "error: /proc/nowhere: No such file or directory\n"


def run_here(command: list[str]) -> int:
    """The worker's main program in this process, which has the packages imported."""
    assert command[:3] == [sys.executable, "-m", "orchestrator.workers.indexing"]
    before, sys.argv = sys.argv, command[2:]
    try:
        return indexing.main()
    finally:
        sys.argv = before


def test_the_command_uses_a_local_tokenizer(
    jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "document": 2} | {str(number): number + 3 for number in range(50)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>").save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(front, "start", run_here)
    monkeypatch.chdir(tmp_path)
    assert front.main([f"input={jsonl}", "out=corpus", "tokenizer=tokenizer", "workers=1"]) == 0
    said = capsys.readouterr().out
    assert "50 documents" in said
    assert "%" in said
    row = data.indexed_tokens(str(tmp_path / "corpus"))
    assert row[:5].tolist() == [2, 3, 1, 2, 4]


def left_of_group(leader: int) -> bool:
    """Whether a process of this group is there."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.full
def test_ctrl_c_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    # 240 MB of short documents: some seconds.
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": "word " * 80}) + "\n") * 580_000)
    command = [sys.executable, "-m", "orchestrator.data", "input=in.jsonl", "out=corpus", "workers=2"]
    # A shell lets what it starts in the background (.ci/full &) ignore SIGINT, and so all that is started there.
    listens = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True, **listens)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("corpus.bin*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said == "interrupted: nothing is kept, the same command begins anew\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    deadline = time.monotonic() + 30
    while left_of_group(process.pid) and time.monotonic() < deadline:  # multiprocessing's own tracker ends after its parent
        time.sleep(0.1)
    assert not left_of_group(process.pid)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "580,000 documents" in done.stdout
