"""Progress on a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from orchestrator.report.progress import TrainingProgress


def run(console: Console, steps: int, first: int = 1, seconds: float = 0.25, until: int | None = None) -> str:
    with TrainingProgress(console, steps) as progress:
        for number in range(first, (until or steps) + 1):
            progress.step({"step": number, "loss": 3.0 - number / steps, "step_time_s": seconds, "tokens_per_s": 4096.0})
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_log_gets_plain_lines_and_not_too_many() -> None:
    text = run(Console(file=io.StringIO(), width=100, force_terminal=False), 200)
    assert text.splitlines()[0] == "starting the ranks"
    assert text.splitlines()[1] == "step 1/200  loss 2.995  250 ms/step  4,096 tokens/s"
    assert text.splitlines()[-1] == "step 200/200  loss 2  250 ms/step  4,096 tokens/s"
    assert len(text.splitlines()) == 22
    assert "\x1b" not in text


def test_a_long_run_is_not_silent_between_its_first_step_and_a_share_of_it() -> None:
    text = run(Console(file=io.StringIO(), width=100, force_terminal=False), 2000, seconds=4.0, until=73)
    assert [line.split("/")[0] for line in text.splitlines()[1:]] == ["step 1", *(f"step {step}" for step in range(9, 74, 8))]


def test_a_resumed_run_starts_where_it_was() -> None:
    text = run(Console(file=io.StringIO(), width=100, force_terminal=False), 20, first=11)
    assert text.splitlines()[1].startswith("step 11/20")


def test_a_terminal_gets_a_bar_with_loss_and_speed() -> None:
    text = run(Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"}), 20)
    assert "20/20" in text
    assert "loss 2  250 ms/step  4,096 tokens/s" in text
    assert "━" in text


def test_rows_without_numbers_do_no_harm() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    with TrainingProgress(console, 2) as progress:
        progress.step({})
        progress.step({"loss": float("nan")})
    assert console.file.getvalue().splitlines()[1:] == ["step 1/2", "step 2/2  loss nan"]  # type: ignore[attr-defined]
