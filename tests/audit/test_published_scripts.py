"""Every script of Megatron-LM's examples that starts a decoder, BERT or T5 is read, and none of its flags is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.audit import script, shell
from orchestrator.audit.reading import LISTS
from orchestrator.errors import InputError

CHECKOUT = os.environ.get("MEGATRON_LM", "")
KNOWN_REASONS = ("can't be described", "no command with Megatron-LM's flags", "hidden_size: is missing", "num_layers: is missing")


@pytest.mark.full
@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout")
def test_the_examples_of_megatron_lm_are_read() -> None:
    read, refused = 0, []
    for path in sorted((Path(CHECKOUT) / "examples").rglob("*.sh")):
        text = path.read_text(errors="replace")
        if "--num-layers" not in text and "--micro-batch-size" not in text:
            continue
        try:
            found = script.read(text, str(path)).reading
        except InputError as error:
            refused.append(f"{path}: {error}")
            continue
        read += 1
        line = script.training_line(shell.read(text), text)
        known = script.known_flags()
        listed = {said.split()[0] for said in (line for name in LISTS.values() for line in getattr(found, name))}
        for flag in line.flags:
            assert flag.name in listed or flag.name in known, f"{path}: {flag.name} is lost"
    assert read >= 45, refused
    assert [said for said in refused if not any(reason in said for reason in KNOWN_REASONS)] == []
