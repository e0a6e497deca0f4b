"""Plans for MI300X are legal by what AMD runs: Megatron-LM of the release that they are for, behind it the checks of AMD's own program
(Primus), and the fork that AMD kept until 2024.

MEGATRON_LM names a checkout of Megatron-LM (tag core_v0.16.1; core_v0.19.0 needs Triton), PRIMUS one of AMD-AGI/Primus, ROCM_MEGATRON_LM
one of ROCm/Megatron-LM (branch rocm_dev); what needs one that is not named is skipped. 2026-11-27: core_v0.16.1, Primus at fd1eeabb and the
fork at 2b855baf (core 0.10.0rc0).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.engines.megatron_versions import release_of

HERE = Path(__file__).resolve().parent
CHECKOUT, PRIMUS, FORK = (os.environ.get(name) for name in ("MEGATRON_LM", "PRIMUS", "ROCM_MEGATRON_LM"))
CASES = {"llama3_8b": 8, "llama3_70b": 8, "deepseek_v3": 512}
"""GPUs by recipe."""

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not (CHECKOUT or FORK), reason="neither MEGATRON_LM nor ROCM_MEGATRON_LM names a checkout"),
]


def release(checkout: str) -> str:
    text = (Path(checkout) / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the fastest plans."""
    there = tmp_path_factory.mktemp("rocm")
    version = release_of(release(CHECKOUT)).version if CHECKOUT else "0.16.1"
    for recipe, gpus in CASES.items():
        words = (f"recipe={recipe}", "cluster=mi300x_8", f"gpus={gpus}", "engine=megatron", f"out={there / recipe}")
        command = [sys.executable, "-m", "orchestrator.run", "plan", *words, f"cluster.software.megatron_core={version}"]
        subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return {recipe: there / recipe for recipe in CASES}


def said(checkout: str, *folders: Path, primus: str | None = None) -> list[dict[str, object]]:
    """What the checkout's Megatron says of these plans (rocm.py)."""
    environment = {name: value for name, value in os.environ.items() if name != "PRIMUS"} | ({"PRIMUS": primus} if primus else {})
    command = [sys.executable, str(HERE / "rocm.py"), checkout, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout).values())


@pytest.mark.skipif(not (CHECKOUT and PRIMUS), reason="MEGATRON_LM and PRIMUS name no checkouts")
def test_amds_program_takes_every_plan(plans: dict[str, Path]) -> None:
    for answer in said(CHECKOUT or "", *plans.values(), primus=PRIMUS):
        assert answer == {"unknown": [], "refused": None}


@pytest.mark.skipif(not (CHECKOUT and PRIMUS), reason="MEGATRON_LM and PRIMUS name no checkouts")
def test_amds_own_check_is_asked(plans: dict[str, Path], tmp_path: Path) -> None:
    """What Megatron takes and AMD refuses is refused: MXFP8 without the variable that turns it on there."""
    folder = shutil.copytree(plans["llama3_8b"], tmp_path / "mxfp8")
    script = folder / "megatron_args.sh"
    script.write_text(script.read_text().replace("  --bf16\n", "  --bf16\n  --fp8-format hybrid\n  --fp8-recipe mxfp8\n"))
    (alone,), (checked,) = (said(CHECKOUT or "", folder, primus=primus) for primus in (None, PRIMUS))
    assert alone["refused"] is None
    assert "NVTE_ROCM_ENABLE_MXFP8=1" in str(checked["refused"])


@pytest.mark.skipif(not FORK, reason="ROCM_MEGATRON_LM names no checkout")
def test_the_old_fork_takes_dense_plans_but_for_the_choice_of_attention(plans: dict[str, Path]) -> None:
    """core 0.10, older than any release that is planned for: its attention is chosen by NVTE_* alone, it wants one queue at tp=1 too, and
    it has nothing of DeepSeek-V3's routing."""
    llama, larger, experts = said(FORK or "", *plans.values())
    assert llama["unknown"] == larger["unknown"] == ["--attention-backend"]
    assert larger["refused"] is None
    assert llama["refused"] is None or "CUDA_DEVICE_MAX_CONNECTIONS" in str(llama["refused"])
    assert {"--moe-router-score-function", "--mtp-num-layers", "--moe-router-enable-expert-bias"} <= {*map(str, experts["unknown"])}  # type: ignore[call-overload]
