"""What other packages declare as entry points is found, loaded when it is asked for, and refused by one message where it is no good."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.extensions import Extensible

GROUP = "orchestrator.test_numbers"


def package(site: Path, name: str, points: dict[str, str], code: str = "") -> None:
    """An installed package: its metadata, and one module of its name."""
    about = site / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *(f"{point} = {where}" for point, where in points.items())]) + "\n")
    (site / f"{name}.py").write_text(code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def numbers() -> Extensible[int]:
    return Extensible(GROUP, int, {"one": 1})


def test_our_own_come_first_and_others_by_name(site: Path) -> None:
    package(site, "more_numbers", {"two": "more_numbers:TWO", "four": "more_numbers:FOUR"}, "TWO, FOUR = 2, 4")
    found = numbers()
    assert list(found) == ["one", "four", "two"]
    assert "two" in found
    assert "three" not in found
    assert dict(found) == {"one": 1, "two": 2, "four": 4}
    with pytest.raises(KeyError):
        found["three"]


def test_nothing_is_imported_before_it_is_asked_for(site: Path) -> None:
    package(site, "bad_numbers", {"two": "bad_numbers:TWO"}, "raise OSError('no libnumbers.so')")
    found = numbers()
    assert (len(found), found["one"], "two" in found) == (2, 1, True)
    with pytest.raises(InputError, match=r"orchestrator.test_numbers=two: of package bad_numbers can't be loaded: OSError: no libnumbers"):
        found["two"]


def test_what_is_of_another_kind_is_refused(site: Path) -> None:
    package(site, "word_numbers", {"two": "word_numbers:TWO"}, "TWO = 'two'")
    with pytest.raises(InputError, match="of package word_numbers: word_numbers:TWO is no int"):
        numbers()["two"]


def test_two_of_one_name_are_refused(site: Path) -> None:
    package(site, "left_numbers", {"two": "left_numbers:TWO"}, "TWO = 2")
    package(site, "right_numbers", {"two": "right_numbers:TWO"}, "TWO = 3")
    with pytest.raises(InputError, match="is what both left_numbers and right_numbers declare"):
        list(numbers())


def test_one_of_our_names_is_refused(site: Path) -> None:
    package(site, "own_numbers", {"one": "own_numbers:ONE"}, "ONE = 11")
    with pytest.raises(InputError, match="of package own_numbers has the name of one of ours"):
        numbers()["two"]
