"""Classifiers begin with a Hugging Face checkpoint's weights and are exported as one: plain transformers computes the same logits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chats import VOCABULARY, write_tokenizer
from msgspec.structs import replace
from worker_pool import Pool

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.units import GIB

pytest.importorskip("transformers")
import torch
import transformers
from architectures import own_module

from orchestrator.tracing import build
from orchestrator.tracing.trace import described
from orchestrator.workers.traced import loaded

pytestmark = pytest.mark.engines
POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
LENGTH = 24
LABELS = {"id2label": {"0": "low", "1": "high", "2": "mixed"}, "label2id": {"low": 0, "high": 1, "mixed": 2}}
COMMON = {"vocab_size": VOCABULARY + 1, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
COMMON |= LABELS
BERT = COMMON | {
    "model_type": "bert", "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
LLAMA = COMMON | {
    "model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": VOCABULARY, "classifier_dropout": 0.0,
}  # fmt: skip
CASES = {
    "bert sequences": (BERT, "BertForSequenceClassification"),
    "llama tokens": (LLAMA, "LlamaForTokenClassification"),
    "llama sequences": (LLAMA, "LlamaForSequenceClassification"),
    "bert tokens": (BERT, "BertForTokenClassification"),
}
IDS = [[5, 9, 2, 17, 3, 11], [1, 30, 8, 8, 21, 4]]


def recorded(case: str) -> Traced:
    config, head = CASES[case]
    return described(build.Source(config=json.dumps(config | {"architectures": [head]})), LENGTH, None, 4)


def plan_of(case: str, gpus: int, *more: str) -> Plan:
    words = (
        *("engine=deepspeed", "cluster=cpu", f"gpus={gpus}", "train.precision=fp32", "train.global_batch_size=8", "train.steps=4"),
        *("train.lr=1e-2", "train.warmup=0", f"train.seq_length={LENGTH}", "name=classifier"),
        f"model.traced={msgspec.json.encode(recorded(case)).decode()}",
    )
    return Planner(recipe.load((*words, *more), Machine(host_memory=16 * GIB), tuple(ENGINES))).fastest().plan


def saved(case: str, folder: Path, head: str | None = None) -> Path:
    """A checkpoint of plain transformers with this case's sizes, and this class in place of its own."""
    config, own = CASES[case]
    torch.manual_seed(7)
    model: Any = getattr(transformers, head or own)(build.config_of(json.dumps(config)))
    model.save_pretrained(folder)
    return folder


def traced(case: str) -> Any:
    """What is known of the case's model, with an attention that every class has."""
    return replace(recorded(case), attention="eager")


def plain_logits(case: str, folder: Path) -> Any:
    cls: Any = getattr(transformers, CASES[case][1])
    model, told = cls.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(IDS)).logits.float().tolist()


@pytest.mark.parametrize(
    ("case", "pins"),
    [
        ("bert sequences", ("pin.zero_stage=3",)),
        pytest.param("llama tokens", ("pin.zero_stage=1",), marks=pytest.mark.full),
        pytest.param("llama sequences", ("pin.tp=2",), marks=pytest.mark.full),
        pytest.param("bert tokens", ("pin.tp=2",), marks=pytest.mark.full),
    ],
)
def test_two_ranks_compute_the_logits_of_plain_transformers(case: str, pins: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    source, target = saved(case, tmp_path / "source"), tmp_path / "target"
    write_tokenizer(source)
    plan = plan_of(case, 2, "pin.micro_batch_size=2", *pins, f"model.init_from={source}", f"model.export_to={target}")
    found = pool.run("traced_cases.exchanged", 2, to_json(plan), str(tmp_path), IDS)[0]
    before, after = plain_logits(case, source), plain_logits(case, target)
    torch.testing.assert_close(torch.tensor(found["before"]), torch.tensor(before), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["after"]), torch.tensor(after), rtol=1e-4, atol=1e-5)
    assert (torch.tensor(after) - torch.tensor(before)).abs().max() > 1e-3
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [CASES[case][1]]
    assert config["label2id"] == {"low": 0, "high": 1, "mixed": 2}
    assert any(target.glob("tokenizer*"))


@pytest.mark.parametrize(
    ("case", "head", "new", "unused"),
    [
        ("bert sequences", "BertForMaskedLM", [*POOLER, "classifier.weight", "classifier.bias"], "cls."),
        ("bert tokens", "BertModel", ["classifier.weight", "classifier.bias"], "pooler."),
        ("llama sequences", "LlamaForCausalLM", ["score.weight"], "lm_head."),
    ],
)  # fmt: skip
def test_of_a_language_model_everything_below_the_head_is_taken(case: str, head: str, new: list[str], unused: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path / "pretrained", head)
    model, made, left = loaded(traced(case), torch.float32, str(folder))
    assert made == sorted(new)
    assert left
    assert all(name.startswith(unused) for name in left)
    body: Any = getattr(transformers, head).from_pretrained(folder).base_model.state_dict()
    ours = model.base_model.state_dict()
    for name, tensor in ours.items():
        if "pooler" not in name:
            torch.testing.assert_close(tensor, body[name])


def test_norms_of_the_first_bert_checkpoints_are_found_under_their_old_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("bert tokens", tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    renamed = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = {name.replace(*renamed[0]).replace(*renamed[1]): tensor for name, tensor in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, folder / "model.safetensors")
    model, *others = loaded(traced("bert tokens"), torch.float32, str(folder))
    assert others == [[], []]
    torch.testing.assert_close(model.get_parameter("bert.embeddings.LayerNorm.weight"), tensors["bert.embeddings.LayerNorm.weight"])


def test_a_checkpoint_of_other_sizes_or_without_a_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("bert sequences", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(InputError, match="has 3") as error:
        plan_of("bert sequences", 1, f"model.init_from={folder}")
    assert error.value.key == "model.hf_config.num_hidden_layers"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "layer.1.output" not in name}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"has no tensor bert\.encoder\.layer\.1\.output"):
        loaded(traced("bert sequences"), torch.float32, str(folder))


def test_the_command_that_the_refused_export_of_ones_own_module_names_gives_its_weights(pool: Pool, tmp_path: Path) -> None:
    """Two ranks, states divided: torch's own command writes what the module has at the end, by the module's own names."""
    code = described(build.Source(code="architectures:own_module"), 1, None, 4)
    words = (
        *("engine=deepspeed", "cluster=cpu", "gpus=2", "train.precision=fp32", "train.global_batch_size=8", "train.steps=4"),
        *("train.lr=1e-2", "train.warmup=0", "train.seq_length=1", "name=own", "pin.zero_stage=1"),
        f"model.traced={msgspec.json.encode(code).decode()}",
    )

    def planner(*more: str) -> Planner:
        return Planner(recipe.load((*words, *more), Machine(host_memory=16 * GIB), tuple(ENGINES)))

    with pytest.raises(InputError, match="neither loaded nor exported here; ") as refused:
        planner(f"model.export_to={tmp_path / 'exported'}").fastest()
    command = re.search(r"python (.*) CHECKPOINT/states weights.pt writes those of a checkpoint", str(refused.value))
    assert command is not None
    out, target = tmp_path / "run", tmp_path / "weights.pt"
    plan = planner("train.save_every=4").fastest().plan
    own = pool.run("traced_cases.weights_at_the_end", 2, to_json(plan), str(tmp_path / "cache"), str(out))[0]
    states = out / "checkpoints" / "step_000004" / "states"
    subprocess.run([sys.executable, *command[1].split(), str(states), str(target)], check=True)
    written = {name.removeprefix("weight/"): w for name, w in torch.load(target).items() if name.startswith("weight/")}
    model, _ = own_module()
    model.load_state_dict(written)
    assert {name: weight.tolist() for name, weight in written.items()} == own
    assert {name: weight.tolist() for name, weight in model.named_parameters()} == own
