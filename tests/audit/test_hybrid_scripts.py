"""Scripts of models whose layers have one part (pretrain_mamba.py): the model, its stages, and what is changed in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so
from orchestrator.audit.audit import Audit
from orchestrator.audit.build import setup_of
from orchestrator.errors import InputError

PATTERN = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
TEXT = """
torchrun pretrain_mamba.py --num-layers 44 --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 8 \\
  --hybrid-override-pattern {pattern} \\
  --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model \\
  --micro-batch-size 4 --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --lr 0.00015 --bf16 \\
  --disable-bias-linear --normalization RMSNorm --position-embedding-type none --squared-relu --hidden-dropout 0 --attention-dropout 0 \\
  --untie-embeddings-and-output-weights --vocab-size 51200 --use-distributed-optimizer --tensor-model-parallel-size 1 \\
  --pipeline-model-parallel-size {pp} {more}
"""
"""Megatron-LM's own test of a hybrid's pipeline (tests/functional_tests/test_cases/hybrid/hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G,
core_v0.16.1), with the sizes of a config.json of Nemotron-H."""
CONFIG = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 51200, "hidden_size": 1024,
    "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 44,
    "hybrid_override_pattern": PATTERN, "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "mlp_hidden_act": "relu2", "max_position_embeddings": 1024,
}  # fmt: skip

WORK: dict[str, Any] = {"gpus": 8, "cluster": "dgx_a100_40gb", "engine": "megatron", "train": {"seq_length": 1024, "global_batch_size": 32}}


def audited(tmp_path: Path, pp: int = 4, more: str = "", pattern: str = PATTERN, **keys: object) -> Audit:
    file = tmp_path / "train.sh"
    file.write_text(TEXT.format(pattern=f"'{pattern}'", pp=pp, more=more))
    return so.audit(file, **{"gpus": 8, "cluster": "dgx_a100_40gb", **keys})


def test_a_published_pipeline_is_legal_and_its_model_that_of_a_config(tmp_path: Path) -> None:
    found = audited(tmp_path)
    assert (found.problem, found.reading.unpriced, found.reading.slower) == ("", (), ())
    assert found.plan is not None
    assert [sum(span.count for span in stage.layers if span.kind not in ("embedding", "head")) for stage in found.plan.stages] == [11] * 4
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    same = so.plan(**{"model.hf_config": str(tmp_path / "config.json")}, **WORK).plan.model
    ours = found.plan.model
    assert [*ours.each_layer()] == [*same.each_layer()]
    fields = ("hidden_size", "query_groups", "head_dim", "ffn_hidden_size", "activation", "normalization", "position_embedding", "family")
    assert [getattr(ours, name) for name in fields] == [getattr(same, name) for name in fields]


@pytest.mark.parametrize(
    ("pp", "more", "sizes", "why"),
    [
        (3, "", [], "num_layers=44: is no multiple of pp x vpp = 3 x 1"),
        (3, "--decoder-first-pipeline-num-layers 12", [12, 16, 16], ""),
        (3, "--decoder-first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 20", [13, 11, 20], ""),
        (4, "--decoder-first-pipeline-num-layers 44", [], "stages of such a model have a layer each"),
        (4, "--num-virtual-stages-per-pipeline-rank 11", [], "vpp=11 with layers of one part"),
        (
            4,
            "--pipeline-model-parallel-layout 'Et*10|t*12|t*12|t*10L'",
            [],
            "pipeline_model_parallel_layout: stages of layers with one part each are divided without it",
        ),
    ],
)
def test_stages_of_a_hybrid(tmp_path: Path, pp: int, more: str, sizes: list[int], why: str) -> None:
    found = audited(tmp_path, pp, more, gpus=pp)
    assert why in found.problem if why else found.problem == "", found.problem
    if sizes:
        assert found.plan is not None
        assert [sum(s.count for s in stage.layers if s.kind not in ("embedding", "head")) for stage in found.plan.stages] == sizes


def test_other_stages_are_said_by_their_sizes_and_are_legal_then(tmp_path: Path) -> None:
    found = audited(tmp_path, 8, pin={"pp": 8, "recompute": "none", "zero_stage": 1})
    assert "num_layers=44: is no multiple of pp x vpp = 8 x 1" in found.problem
    plan = found.fastest_here
    assert plan is not None
    setup = setup_of(plan, experts=False)
    text = found.source.edited(found.setup, setup, 8)
    assert text is not None
    assert "--pipeline-model-parallel-layout" not in text
    assert re.search(rf"--decoder-first-pipeline-num-layers {setup.first_layers}\b", text)
    assert re.search(rf"--decoder-last-pipeline-num-layers {setup.last_layers}\b", text)
    (tmp_path / "changed.sh").write_text(text)
    again = so.audit(tmp_path / "changed.sh", gpus=8, cluster="dgx_a100_40gb")
    assert again.problem == ""
    assert again.plan is not None
    assert again.plan.stages == plan.stages


@pytest.mark.parametrize(
    ("pattern", "more", "why"),
    [
        (PATTERN[:-1], "", "num_layers=44: is not the 43 layers"),
        (PATTERN[:-1] + "E", "", "num_moe_experts: is missing"),
        (PATTERN[:-1] + "D", "", "has D, which can't be described here; choose one of M, \\*, -, E"),
        (PATTERN[:22] + "|" + PATTERN[22:], "", "has |, which"),
        ("", "--hybrid-attention-ratio 0.1", "can't be described"),
    ],
)
def test_patterns_that_are_refused(tmp_path: Path, pattern: str, more: str, why: str) -> None:
    with pytest.raises(InputError, match=why.replace("|", "\\|")):
        audited(tmp_path, 4, more, pattern)


@pytest.mark.parametrize(
    ("pp", "sizes"), [(4, (11, 11, 11, 11)), (4, (12, 12, 12, 8)), (4, (10, 13, 11, 10)), (3, (13, 11, 20)), (2, (20, 24))]
)
def test_marks_in_a_pattern_are_the_stages(pp: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Megatron-core 0.19's; they were read as even stages, and refused where the script says the model."""
    begins = [sum(sizes[:index]) for index in range(pp)]
    marked = "|".join(PATTERN[at : at + size] for at, size in zip(begins, sizes, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    bridge = "model.hybrid_layer_pattern='{}' model.pipeline_model_parallel_size={} train.micro_batch_size=1 train.global_batch_size=32"
    (tmp_path / "bridge.sh").write_text(f"torchrun run_recipe.py --recipe X dataset.seq_length=1024 {bridge.format(marked, pp)}\n")
    of_bridge = so.audit(tmp_path / "bridge.sh", **{"model.hf_config": tmp_path / "config.json", "gpus": pp, "cluster": "dgx_a100_40gb",
                                                    "cluster.software.megatron_core": "0.19.2"})  # fmt: skip
    (tmp_path / "train.sh").write_text(
        TEXT.format(pattern="", pp=pp, more="").replace("--hybrid-override-pattern", f"--hybrid-layer-pattern '{marked}'")
    )
    of_script = so.audit(tmp_path / "train.sh", gpus=pp, cluster="dgx_a100_40gb", **{"cluster.software.megatron_core": "0.19.2"})
    for found in (of_bridge, of_script):
        assert found.plan is not None, found.problem
        counts = [sum(span.count for span in stage.layers if span.kind not in ("embedding", "head")) for stage in found.plan.stages]
        assert counts == [*sizes]
        for change in found.changes:
            assert change.text is None or change.text.count("|") + 1 == change.setup.pp * change.setup.vpp


@pytest.mark.parametrize("said", ["", "--num-layers 44", "--num-layers 40"])
def test_a_pattern_of_stages_says_how_many_layers_there_are(said: str, tmp_path: Path) -> None:
    """As in Megatron-LM's examples/mamba/train.sh from 0.19 on, which has no --num-layers (arguments.py:761: the pattern overrides it)."""
    text = TEXT.format(pattern=f"'{PATTERN}'", pp=4, more="").replace("--hybrid-override-pattern", "--hybrid-layer-pattern")
    (tmp_path / "train.sh").write_text(text.replace("--num-layers 44", said))
    found = so.audit(tmp_path / "train.sh", gpus=8, cluster="dgx_a100_40gb", **{"cluster.software.megatron_core": "0.19.2"})
    assert found.plan is not None
    assert found.plan.model.num_layers == 44
    assert any("num_layers=40" in one for one in found.reading.assumed) == (said == "--num-layers 40")
