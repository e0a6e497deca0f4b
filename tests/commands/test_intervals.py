"""No days, money or rate without its interval: of every command, as text and as JSON, of the API, and on the report's page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so
from orchestrator.__main__ import main
from orchestrator.report.budget import FIGURES
from orchestrator.report.comparison import WRITTEN

RUN = ["recipe=llama3_8b", "train.tokens=1T", "cluster.price_per_gpu_hour=2"]
SCRIPT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 128 --bf16 --train-iters 1000 --tensor-model-parallel-size 4 \\
  --use-distributed-optimizer --sequence-parallel --vocab-size 32000 --make-vocab-size-divisible-by 128
"""
QUESTIONS = {
    "plan": ["plan", *RUN, "gpus=16", "cluster=dgx_h100", "cluster.mtbf=2000", "cluster.storage=20GB/s", "explain.gpus=8"],
    "target": ["plan", *RUN, "cluster=dgx_h100", "target.days=100", "target.cost=1000000"],
    "largest": ["plan", *RUN, "gpus=8", "largest=seq_length"],
    "sweep": ["sweep", *RUN, "gpus=8,16"],
    "compare": ["compare", *RUN, "gpus=16", "pin.tp=1,2"],
    "compare clusters": ["compare", *RUN, "gpus=16", "cluster=dgx_h100,dgx_a100_80gb"],
    "audit": ["audit", "gpus=8", "cluster=dgx_h100"],
    "report": ["report"],
}
NUMBER = r"\d[\d,.]*[KMBT]?"
FIGURE = re.compile(
    rf"(?:cost |MFU ){NUMBER}%?|(?<!one in )(?<![\d,.]){NUMBER} (?:days|GPU-hours|kWh|MWh|(?:tokens|TFLOP)/s(?:/GPU)?)(?![\w/])"
)
INTERVAL = re.compile(rf" \(90%: {NUMBER}\D* to {NUMBER}[^()]*\)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("intervals")
    (place / "train.sh").write_text(SCRIPT)
    so.plan(recipe="llama3_8b", gpus=16, **{"cluster.price_per_gpu_hour": 2}).write(place / "run")
    return place


def words(name: str, folder: Path) -> list[str]:
    more = {"audit": [str(folder / "train.sh")], "report": [str(folder / "run")]}
    return [*QUESTIONS[name], *more.get(name, [])]


def bare(text: str) -> list[str]:
    """The figures of a text that no interval follows."""
    text = " ".join(text.split())
    return [found.group() for found in FIGURE.finditer(text) if not INTERVAL.match(text, found.end())]


def figures(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure of JSON by its name, with the object that has it."""
    if isinstance(value, dict):
        yield from ((name, value) for name in (*FIGURES, "tokens_per_s_per_gpu") if value.get(name) is not None)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from figures(inner)


def test_a_figure_without_an_interval_is_found() -> None:
    assert bare("56.1 days, cost 12,000 (at 2) and 3 days (90%: 2 to 4), 5 tokens/s/GPU") == ["56.1 days", "cost 12,000", "5 tokens/s/GPU"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_answer_has_a_figure_without_its_interval(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(name, folder)) == 0
    said = capsys.readouterr().out
    assert name == "sweep" or bare(said) == []
    if name.startswith("compare"):
        rows = [line for line in said.splitlines() if line.strip().startswith(tuple(f"{heading}  " for heading, *_ in WRITTEN))]
        assert len(rows) == len(WRITTEN)
        assert all(row.count("(90%: ") == 2 for row in rows)
        assert re.search(r"takes [+-][\d.]+% \(90%: ", said), "and so the difference"
    if name == "sweep":
        assert len(re.findall(rf"^ +(?:{NUMBER} to {NUMBER} *){{5}}$", said, re.MULTILINE)) == 2, "five figures of both points"


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "report"])
def test_no_json_has_a_figure_without_its_interval(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(name, folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = [each for part in (answer if isinstance(answer, list) else [answer]) for each in figures({**part, "plan": None})]  # no file
    assert found
    for figure, holder in found:
        low, high = holder[f"{figure}_90"]
        assert low < holder[figure] < high, figure


def test_every_figure_of_the_api_has_its_interval() -> None:
    answer = so.plan(recipe="llama3_8b", gpus=16, **{"cluster.price_per_gpu_hour": 2})
    for name in (*FIGURES, "step_time_s"):
        low, high = getattr(answer, f"{name}_90")
        assert low < getattr(answer, name) < high, name
    low, high = answer.predicted.interval or (0, 0)
    assert answer.days_90 == pytest.approx((answer.days * low / answer.step_time_s, answer.days * high / answer.step_time_s))
    assert answer.mfu_90[1] == pytest.approx(answer.tokens_per_s_90[1] / answer.tokens_per_s * answer.mfu), "a rate falls as the step grows"
    assert so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu").days_90 is None, "nothing is published of CPUs"


def test_the_page_has_no_figure_without_its_interval(folder: Path) -> None:
    pytest.importorskip("bokeh")
    assert main(["report", str(folder / "run")]) == 0
    page = re.sub(r"<(script|style).*?</\1>", "", (folder / "run" / "report.html").read_text(), flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", page)
    assert FIGURE.search(text)
    assert bare(text) == []


def test_what_pairs_of_published_runs_cannot_tell_apart_is_on_the_front_together() -> None:
    from orchestrator.asking.grid import beats

    assert beats((1.0, 1.0), (1.1, 1.0), 0.033)
    assert not beats((1.0, 1.0), (1.03, 1.0), 0.033), "3% of a step is less than prices tell"


def test_a_difference_goes_by_pairs_where_there_are_some_like_it() -> None:
    one, other = (so.plan(recipe="llama3_8b", gpus=16, cluster="dgx_h100", engine="megatron", pin={"tp": tp}) for tp in (1, 2))
    near = so.compare(one, other)
    assert near.difference_90 is not None
    low, high = near.difference_90
    assert (1 + high) / (1 + low) == pytest.approx(1.276, abs=1e-3), "12.2% each way: narrower than either step's own interval"
    far = so.compare(one, so.plan(recipe="llama3_8b", gpus=16, cluster="dgx_a100_80gb", engine="megatron"))
    assert far.pairs is None
    assert far.difference_90 is not None
    assert far.difference_90[0] < far.difference < far.difference_90[1]
    assert "no pair of published runs" in far.difference_text()
