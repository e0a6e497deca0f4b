"""`python -m orchestrator.data` says what is wrong before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import data


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "there.bin").write_text("x")
    for suffix in (".bin", ".idx"):
        (tmp_path / "done").with_suffix(suffix).write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("out=b",), "input: is missing"),
        (("input=a.txt",), "out: is missing"),
        (("input=a.txt", "out=b", "worker=2"), "worker=2: is no key; did you mean workers?"),
        (("input=a.txt", "out=b", "out=c"), "out=c: is given twice, first as out=b"),
        (("input=a.txt", "out=b", "workers=0"), "workers=0: must be at least 1"),
        (("input=a.txt", "out=b", "workers=many"), "workers=many: is not a whole number"),
        (("input=a.txt", "--out", "b"), "--out: is not key=value"),
        (("input=nowhere.txt", "out=b"), "input=nowhere.txt: no such file or folder"),
        (("input=a.txt,,", "out=b"), "has an empty path between commas"),
        (("input=a.txt", "out=b", "documents=pages"), "documents=pages: "),
        (("input=a.txt", "out=there"), "out=there: there.bin is there already"),
        (("input=a.txt", "out=b.bin"), "out=b.bin: is no prefix"),
        (("input=a.txt", "out=a.txt/b"), "out=a.txt/b: can't be made"),
        (("input=a.txt", "out=."), "out=.: is a folder; name a prefix in it"),
        (("input=/dev/null", "out=b"), "input=/dev/null: is neither a file nor a folder"),
        (("input=done.idx", "out=b"), "input=done.idx: is Megatron's own format already"),
        (("input=a.txt", "out=b", "tokenizer=a.txt"), "tokenizer=a.txt: is a file; a folder is needed"),
        (("input=a.txt", "out=b", "tokenizer=no"), "tokenizer=no: no such folder"),
    ],
)
def test_bad_words_give_one_message_and_write_nothing(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert data.main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before
