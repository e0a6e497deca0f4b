"""What a config.json leaves out is what the installed transformers' class has, read from its file: where a default is a plain number or
word. (test_family_defaults.py asks the classes themselves, which takes torch.)"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.__main__ import main
from orchestrator.errors import InputError
from orchestrator.model.families import FAMILIES, from_hf_config
from orchestrator.model.spec import Architecture

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
TYPES = [name for family in FAMILIES.values() for name in family.hf_model_types]
NOT_PLAIN = ("kimi_k2", "nemotron_h")
"""Read by code beside the checkpoint; a pattern that the class makes."""
SAID: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
"""Without which the class's own defaults are no model."""
LEFT_TO_CODE = ("num_nextn_predict_layers",)
"""transformers trains no further heads, whatever its class says."""


@cache
def folder() -> Path:
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "models"


@cache
def written() -> dict[str, ast.ClassDef]:
    """The class of each model type that there is a reader of."""
    found: dict[str, ast.ClassDef] = {}
    wanted = re.compile(rf'^    model_type(?:: str)? = "({"|".join(map(re.escape, TYPES))})"$', re.MULTILINE)
    for path in sorted(folder().glob("*/configuration_*.py")):
        source = path.read_text()
        if wanted.search(source):
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and (named := wanted.search(ast.get_source_segment(source, node) or "")):
                    found[named.group(1)] = node
    return found


def plain(node: ast.ClassDef) -> dict[str, Any]:
    """Its defaults that are plain."""
    found = {}
    for row in node.body:
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
            found[row.target.id] = value_of(row.value)
    return {name: value for name, value in found.items() if value is not None}


def value_of(node: ast.expr | None) -> Any:
    """Of a number, a word, or a product of numbers; None for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return value_of(node.left) * value_of(node.right)
    return ast.literal_eval(node) if isinstance(node, ast.Constant | ast.UnaryOp) else None


def read(config: dict[str, Any]) -> Architecture:
    found = from_hf_config(config, "x")
    return replace(found, num_query_groups=found.query_groups, kv_channels=found.head_dim)


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in NOT_PLAIN])
def test_a_field_that_is_not_there_is_the_classes(model_type: str) -> None:
    if any(isinstance(row, ast.AnnAssign) and ast.unparse(row.target) == "text_config" for row in written()[model_type].body):
        pytest.skip("of sections, each of which is a class of its own")
    config = {"model_type": model_type} | plain(written()[model_type]) | SAID.get(model_type, {})
    whole, other = read(config), []
    for field in config.keys() - {"model_type", *LEFT_TO_CODE}:
        try:
            other += [field] if read({name: value for name, value in config.items() if name != field}) != whole else []
        except InputError:  # it has to be there
            continue
    assert not other


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, "num_experts=8"),
        ({"n_routed_experts": 64, "kv_lora_rank": 512}, "n_routed_experts=64, kv_lora_rank=512"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
        ({"num_experts": 0, "kv_lora_rank": None}, ""),
        ({"model_type": "mistral", "sliding_window": 64}, ""),
        ({"model_type": "mixtral", "num_local_experts": 8}, ""),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, ""),
    ],
)
def test_fields_of_other_kinds_of_models_are_said_to_be_left_out(
    fields: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | fields))
    words = ["plan", f"model.hf_config={tmp_path / 'config.json'}", "gpus=1", "cluster=cpu", "train.global_batch_size=4"]
    for as_json in ((), ("--json",)):
        assert main([*words, "train.seq_length=64", *as_json]) == 0
        printed = "".join(capsys.readouterr())
        assert (f"note: model.hf_config: {said}: of other kinds of models than its model_type, not read" in printed) == bool(said)
        assert ("of other kinds of models" in printed) == bool(said)


BERT = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "engine", "another", "head"),
    [
        ({"architectures": ["BertModel"]}, "megatron", True, "BertModel"),
        ({"architectures": ["BertForMaskedLM"]}, "megatron", True, ""),
        ({"model_type": "megatron-bert", "architectures": ["MegatronBertForMaskedLM"]}, "megatron", False, ""),
        ({"architectures": ["BertModel"]}, "deepspeed", False, "BertModel"),
        ({"model_type": "megatron-bert"}, "deepspeed", True, ""),
        (LLAMA | {"architectures": ["LlamaForCausalLM"]}, "megatron", False, ""),
        (LLAMA | {"architectures": ["LlamaModel"]}, "megatron", False, "LlamaModel"),
    ],
)
def test_a_model_that_the_engine_has_otherwise_or_with_another_head_is_said(
    fields: dict[str, Any], engine: str, another: bool, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A post-norm BERT, and an embedding model, were planned as megatron-core's pre-norm masked-LM pretraining without a word."""
    (tmp_path / "config.json").write_text(json.dumps(BERT | fields))
    words = [f"model.hf_config={tmp_path / 'config.json'}", "gpus=1", "cluster=cpu", "train.global_batch_size=4", "train.seq_length=64"]
    assert main(["plan", *words, f"engine={engine}"]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    kind = (BERT | fields)["model_type"]
    assert (f"weights of model_type={kind} are another network's: engine={engine} has a " in printed) == another
    assert (f"note: model.hf_config: architectures={head} has no head: planned with the vocabulary's" in printed) == bool(head)
