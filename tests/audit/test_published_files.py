"""Published command lines and configurations, and what the audit says of each: published.csv. The files stay where they are published
(their licences); PUBLISHED names a folder with a checkout of each repository, owner+name, for which

    git -C REPOSITORY archive COMMIT | tar x -C PUBLISHED/owner+name

is enough. REGENERATE_PUBLISHED=1 writes the table anew; then read the difference."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

import orchestrator as so
from orchestrator.audit import formats
from orchestrator.audit.audit import Audit

TABLE = Path(__file__).parent / "published.csv"
FOLDER = os.environ.get("PUBLISHED", "")
AT: Final = {
    "NVIDIA/Megatron-LM": "55ac7082517c3878ae653c07c09c534b8aed49f6",
    "bigscience-workshop/bigscience": "9e64edec2ad1fb9263bf39ba616a84ff64b4d947",
    "deepspeedai/Megatron-DeepSpeed": "4efb479d5317ce9b86096b9d8e3e8030b0b5263b",
    "deepspeedai/DeepSpeedExamples": "45b4b7156c8794a3452a5a7d03dbd8d797068569",
    "NVIDIA-NeMo/Megatron-Bridge": "067f987df03b8355b03192d88d70f1709fedf51a",
    "NVIDIA/NeMo-Framework-Launcher": "26e42fa91d9e608897ce485b4911c263a4b57008",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/alignment-handbook": "925acdfe4b2b4e38c3dabd1851bc418f0b656351",
    "hiyouga/LLaMA-Factory": "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
    "verl-project/verl": "1dda039b9c6311889a9c9a26040677e1254814f9",
    "NVIDIA-NeMo/RL": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
    "THUDM/slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "modelscope/ms-swift": "3602360a562313afbf2ef6065fdf61f271a2c5b9",
    "axolotl-ai-cloud/axolotl": "067b021c8b87a9e5e380b9173c704cf7340e30f5",
}
"""Commits of the repositories."""
AROUND: Final = (
    "verl-project/verl", "NVIDIA-NeMo/RL", "THUDM/slime", "modelscope/ms-swift", "axolotl-ai-cloud/axolotl", "hiyouga/LLaMA-Factory",
)  # fmt: skip
"""Programs that people start around Megatron and DeepSpeed."""
COLUMNS: Final = (
    "repository",
    "commit",
    "path",
    "keys",
    "format",
    "gpus",
    "layout",
    "legal",
    "fits",
    "unknown",
    "unpriced",
    "beside",
    "assumed",
)
COUNTED: Final = {"unknown": ["unknown"], "unpriced": ["unpriced", "slower"], "beside": ["result", "beside"], "assumed": ["assumed"]}
"""What columns count of a reading."""
PRICED: Final = ("fits",)
"""Columns that follow the prices; the others are what was read."""


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def keys_of(row: dict[str, str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in row["keys"].split())


def layout(found: Audit) -> str:
    plan = found.plan
    if plan is None:
        return ""
    mode = plan.strategy.recompute
    degrees = f"tp {plan.tp} pp {plan.pp} vpp {plan.vpp} cp {plan.cp} ep {plan.ep} dp {plan.dp}"
    return (
        f"{plan.engine} {degrees} ZeRO-{plan.zero_stage} micro-batch {plan.micro_batch_size} of {plan.global_batch_size} recompute {mode}"
    )


def said(path: Path, row: dict[str, str]) -> dict[str, str]:
    """The row as the audit has it now."""
    text = path.read_text(errors="replace")
    reading = formats.read(text, str(path)).reading
    found = so.audit(path, **keys_of(row))
    return {
        **{name: row[name] for name in ("repository", "commit", "path", "keys")},
        "format": reading.format,
        "gpus": str(found.settings.cluster.num_gpus),
        "layout": layout(found),
        "legal": "yes" if found.legal else found.problem,
        "fits": "" if found.fits is None else "yes" if found.fits else "no",
        **{name: str(sum(len(getattr(reading, one)) for one in lists)) for name, lists in COUNTED.items()},
    }


def test_fifty_published_files_are_cited() -> None:
    table = rows()
    assert len({(row["repository"], row["path"]) for row in table}) == len(table) >= 50
    assert {row["repository"] for row in table} == {*AT}
    assert all(row["commit"] == AT[row["repository"]] for row in table)
    assert len({row["format"] for row in table}) >= 8
    assert sum(row["legal"] == "yes" for row in table) >= 30


def test_of_eighty_files_of_programs_around_the_engines_every_setting_is_known() -> None:
    """The last 47 rows were drawn when the readers were done: of their files ten had a setting that was unknown then."""
    table = [row for row in rows() if row["repository"] in AROUND or (row["path"].endswith(".sh") and "Bridge" in row["repository"])]
    assert len(table) >= 80
    assert {row["repository"] for row in table} >= {*AROUND}
    assert [row["path"] for row in table if row["unknown"] != "0"] == []


def write(table: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Writes the rows in place of the table's."""
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.full
@pytest.mark.skipif(not FOLDER, reason="PUBLISHED names no folder of checkouts")
def test_the_audit_says_of_published_files_what_the_table_has() -> None:
    now = [said(Path(FOLDER) / row["repository"].replace("/", "+") / row["path"], row) for row in rows()]
    if os.environ.get("REGENERATE_PUBLISHED"):
        write(TABLE, COLUMNS, now)
    for row, before in zip(now, rows(), strict=True):
        assert {name: row[name] for name in COLUMNS if name not in PRICED} == {name: before[name] for name in COLUMNS if name not in PRICED}
