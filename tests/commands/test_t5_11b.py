"""t5_11b on 16 A100-40GB can't be trained by plain data parallelism: each engine's plan shows by its itemised memory why."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import run
from orchestrator.plan import from_json

STATES = ("weights", "gradients", "optimizer", "activations")


@pytest.mark.parametrize(
    ("engine", "too_large"),
    [("megatron", {"ZeRO-0": 189.0, "ZeRO-1": 71.0}), ("megatron_deepspeed", {"ZeRO-1": 71.0}), ("deepspeed", {"ZeRO-1": 71.0})],
)
def test_the_plan_shows_why_the_model_is_divided(
    engine: str, too_large: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`too_large`: stages that can't hold even a sample in 37.4 GiB, and the GiB of states of 11.3e9 parameters: 18 bytes each without a
    shard; 6, and 12 over 16 ranks, at stage 1."""
    monkeypatch.chdir(tmp_path)
    stage = min(too_large)[-1]
    question = ("explain.tp=1", f"explain.zero_stage={stage}", *(() if engine == "megatron" else ("explain.offload=false",)))
    assert run.main(("recipe=t5_11b", "gpus=16", "launch=none", "verbose=true", "out=a", f"engine={engine}", *question)) == 0
    plan = from_json(Path("a/plan.json").read_bytes())
    assert plan.tp > 1 or plan.zero_stage >= 2
    assert plan.predicted is not None
    itemised = plan.predicted.by_stage[0].memory_by_cause
    assert sum(itemised.values()) == pytest.approx(plan.predicted.by_stage[0].peak_memory_bytes, rel=1e-6)
    said = capsys.readouterr().out
    rows = {line.split()[1]: line for line in said.splitlines() if line.lstrip().startswith(f"{engine} ZeRO-")}
    for name, states in too_large.items():
        numbers = _gibibytes(rows[name])
        assert "fits" not in rows[name]
        assert sum(numbers[:3]) == pytest.approx(states, rel=0.02)
        assert sum(numbers[: len(STATES) + 1]) == pytest.approx(numbers[len(STATES) + 1], abs=0.3)
    both = said[said.index(f"Why not tp=1 zero_stage={stage}") :]
    assert "no plan fits for t5_11b" in both
    for cause in ("weights", "gradients", "optimizer", "activations", "needs", "usable", "lacks"):
        assert any(line.split()[:1] == [cause] for line in both.splitlines()), cause


def _gibibytes(line: str) -> list[float]:
    words = line.split()
    scale = {"B": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
    return [float(words[i - 1]) * scale[word] for i, word in enumerate(words) if word in scale]
