"""Drawn hostile input at every door, from a fixed seed: whatever it is, a command ends with an answer or with one error, never a defect."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.__main__ import main
from orchestrator.audit.document import changed
from orchestrator.describe import TOLD
from orchestrator.recipe.clusters import load_cluster, to_tree
from orchestrator.recipe.keys import KEYS

SEED = 28
ROUNDS = 40
VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 10**9, 10**18, 10**400, -(10**30), 0.5, 1e-300, 1e300, float("inf"), float("nan"), True, None, "", " ", "a\ud800b", "${A}",
    "a" * 5000, "\x00", "\x1b[31m", "1e30 s", "-4 GB/s", "0 GiB", "[", "{}", "1,2", [], [[]], {}, {"a": {"b": [1]}}, ["x"] * 50,
)  # fmt: skip
"""Of any field."""
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "head_dim": 16, "attention_bias": False,
}  # fmt: skip
TRAINER = {
    "model_name_or_path": "x", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True, "learning_rate": 1e-4,
    "num_train_epochs": 1, "max_steps": 10, "gradient_checkpointing": True, "warmup_steps": 0,
    "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": "auto"},
}  # fmt: skip
DS = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "tensor_parallel": {"autotp_size": 2},
}  # fmt: skip
SCRIPT = {
    "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "max-position-embeddings": 32, "micro-batch-size": 1,
    "global-batch-size": 32, "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "lr": 1e-4, "train-iters": 10,
    "num-layers-per-virtual-pipeline-stage": 1, "num-experts": 4, "vocab-size": 99, "recompute-num-layers": 1,
}  # fmt: skip
PRIVATE = ("out", "launch", "entry", "plan", "tune", "resume", "container", "slurm", "largest", "target", "explain", "calibration")
"""Keys and groups that write, start or search more than once."""


def spoilt(value: Any, draw: random.Random) -> Any:
    """A copy with one thing of it, at any depth, replaced or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        found = dict(value)
        if draw.random() < 0.15:
            del found[name]
        else:
            found[name] = spoilt(value[name], draw)
        return found
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], spoilt(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)


def torn(text: str, draw: random.Random) -> str:
    """The text, in a third of the draws cut off or with something in the middle."""
    at = draw.randrange(len(text))
    return draw.choice(
        (text, text, text, text, text[:at], text[:at] + draw.choice(("{", "\t", "&a [*a]", "\x00", '"', "<<: ")) + text[at:])
    )


def words_of_a_recipe(folder: Path, draw: random.Random) -> tuple[str, ...]:
    names = [name for name in KEYS if name.partition(".")[0] not in PRIVATE and not name.startswith("search.")]
    values = [f"{draw.choice(names)}={draw.choice(VALUES)}" for _ in range(draw.randint(1, 2))]
    return ("plan", "recipe=gpt_tiny", *{value.partition("=")[0]: value for value in ("gpus=4", "cluster=cpu", *values)}.values())


def words_of_a_yaml(folder: Path, draw: random.Random) -> tuple[str, ...]:
    tree = {"recipe": "gpt_tiny", "gpus": 4, "cluster": "cpu", "train": {"lr": 1e-3, "betas": [0.9, 0.95]}, "pin": {"tp": 2}}
    (folder / "a.yaml").write_text(torn(yaml.safe_dump(spoilt(tree, draw)), draw), errors="replace")
    return ("plan", f"recipe={folder / 'a.yaml'}")


def words_of_a_cluster(folder: Path, draw: random.Random) -> tuple[str, ...]:
    (folder / "c.yaml").write_text(torn(yaml.safe_dump(spoilt(to_tree(load_cluster("dgx_h100", 16)), draw)), draw), errors="replace")
    return ("plan", "recipe=gpt_tiny", "gpus=16", "engine=megatron", f"cluster={folder / 'c.yaml'}")


def words_of_a_config(folder: Path, draw: random.Random) -> tuple[str, ...]:
    (folder / "config.json").write_text(torn(json.dumps(spoilt(CONFIG, draw)), draw))
    sizes = ("gpus=2", "cluster=cpu", "engine=megatron", "train.global_batch_size=8", "train.seq_length=64")
    return ("plan", f"model.hf_config={folder / 'config.json'}", *sizes)


def words_of_a_ds_config(folder: Path, draw: random.Random) -> tuple[str, ...]:
    (folder / "ds.json").write_text(torn(json.dumps(spoilt(DS, draw)), draw))
    return ("audit", str(folder / "ds.json"), "recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100")


def words_of_a_trainer(folder: Path, draw: random.Random) -> tuple[str, ...]:
    (folder / "sft.yaml").write_text(torn(yaml.safe_dump(spoilt(TRAINER, draw)), draw), errors="replace")
    return ("audit", str(folder / "sft.yaml"), "recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100")


def words_of_a_script(folder: Path, draw: random.Random) -> tuple[str, ...]:
    flags = SCRIPT | {draw.choice(sorted(SCRIPT)): draw.choice(VALUES) for _ in range(draw.randint(0, 2))}
    said = " ".join(f"--{name} {value}" for name, value in flags.items())
    extra = draw.choice(("", "A=$(expr 5 / 0)\n", "A=`x`\n", "if [ $A -gt", "A=$((9**9**9))\n", "f() { f; f; }\nf\n", "case $1 in\n"))
    (folder / "a.sh").write_text(torn(f"{extra}torchrun pretrain_gpt.py {said} --bf16 $A\n", draw), errors="replace")
    return ("audit", str(folder / "a.sh"), "gpus=8", "cluster=dgx_h100")


DOORS = (
    words_of_a_recipe, words_of_a_yaml, words_of_a_cluster, words_of_a_config, words_of_a_ds_config, words_of_a_trainer, words_of_a_script,
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_drawn_hostile_input_ends_in_an_answer_or_one_error(door: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(SEED)
    for _ in range(ROUNDS):
        words = door(tmp_path, draw)
        status = main(words)
        output = capsys.readouterr()
        content = [path.read_bytes()[:2000] for path in tmp_path.iterdir()]
        assert "defect" not in output.err, (words, content, output.err)
        assert "Traceback" not in output.err
        assert status in (0, 1, 2), (words, content)
        if status == 2:
            said = output.err.removeprefix(f"{TOLD}\n")  # on a machine that is busy
            assert said.startswith("error: "), (words, content, output.err)
            assert said.count("\n") == 1, (words, content, output.err)
            assert len(output.err) < 4000, (words, content)


HEAD = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nlearning_rate: 1.0\ndeepspeed:\n  train_batch_size: 32\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + "  zero_optimization:\n    stage: 2\nwarmup_steps: .inf\nmax_steps: 10\n",
            "is no number",
        ),
        (
            HEAD + "max_steps: 1" + "0" * 400 + "\n",
            "is beyond 1e+18",
        ),
        ("pretrain_gpt.py --num-layers 2 --hidden-size 1" + "0" * 400 + " --num-attention-heads 2\n", "is no whole number"),
        ("pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr inf\n", "is no number"),
    ],
)
def test_a_number_that_is_none_is_refused_by_audit(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ("a.sh" if text.startswith("pretrain") else "a.yaml")
    file.write_text(text)
    assert main(("audit", str(file), "recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100")) == 2
    error = capsys.readouterr().err
    assert words in error or "is beyond" in error
    assert "defect" not in error


def test_a_json_that_is_none_has_no_place_for_a_change() -> None:
    assert changed("a: 1\n", "a.json", {"a": 2}) is None
