"""Completion in a real bash: commands, keys, and the values of keys that have few."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.__main__ import main
from orchestrator.console.completion import script


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; compopt() {{ :; }}; _orchestrator"
    text = f"{script('bash')}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()


def test_commands_keys_and_values_are_completed() -> None:
    assert completed("orchestrator", "swe") == ["sweep"]
    assert completed("orchestrator", "plan", "train.glob") == ["train.global_batch_size="]
    assert completed("orchestrator", "plan", "recipe", "=", "llama3_8b") == ["llama3_8b", "llama3_8b_128k"]
    assert completed("orchestrator", "plan", "train.precision", "=") == ["bf16", "fp16", "fp32", "fp8", "nvfp4", "mxfp8"]
    assert completed("orchestrator", "plan", "swe") == []


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_one_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert "choose one of bash, zsh" in capsys.readouterr().err
