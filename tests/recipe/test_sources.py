"""The data, evaluation, monitor and pass-through keys, from words to settings and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recipe
from orchestrator.__main__ import main as command
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.plan import RunSettings, Source
from orchestrator.run import main
from orchestrator.units import GIB

MODEL = """\
model: {family: gpt, num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 64}
model.vocab_size: 260
model.max_position_embeddings: 64
train: {global_batch_size: 4, seq_length: 32, precision: fp32}
cluster: cpu
gpus: 2
"""
ENGINES = ("megatron", "megatron_deepspeed", "deepspeed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c d.txt", "x.bin", "x.idx"):
        (tmp_path / name).write_text("text")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").touch()
    return tmp_path


def load(*words: str) -> recipe.Settings:
    return recipe.load(("recipe=gpt_tiny", *words), Machine(host_memory=16 * GIB), ENGINES)


def run_of(*words: str) -> RunSettings:
    return load(*words).run


def test_data_is_the_short_form_of_data_train(folder: Path) -> None:
    assert run_of("data=a.txt") == run_of("data.train=a.txt")
    assert run_of("tokenizer=tok") == run_of("data.tokenizer=tok")
    assert run_of("data=x").data == str(folder / "x.idx")


@pytest.mark.parametrize("blend", ["0.7 a.txt 0.3 'c d.txt'", '"0.7" a.txt  .3 "c d.txt"'])
def test_a_blend_is_pairs_of_weight_and_source(blend: str, folder: Path) -> None:
    expected = (Source(weight=0.7, path=str(folder / "a.txt")), Source(weight=0.3, path=str(folder / "c d.txt")))
    assert run_of(f"data.blend={blend}").blend == expected


@pytest.mark.parametrize(
    "text",
    [
        "data: {blend: [[0.7, a.txt], [0.3, c d.txt]], split: [99, 1, 0]}",
        "data:\n  blend: [0.7 a.txt, 0.3 c d.txt]\n  split: 99,1,0",
        "data.blend: 0.7 a.txt 0.3 'c d.txt'\ndata.split: 99,1,0",
    ],
)
def test_yaml_may_say_it_as_a_list(text: str, folder: Path) -> None:
    (folder / "mine.yaml").write_text(f"{text}\n{MODEL}")
    found = recipe.load(("recipe=mine.yaml",), Machine(host_memory=16 * GIB), ENGINES).run
    assert [source.weight for source in found.blend] == [0.7, 0.3]
    assert found.blend[1].path == str(folder / "c d.txt")
    assert found.split == (99.0, 1.0, 0.0)
    assert recipe.load(("recipe=mine.yaml", "data=b.txt"), Machine(host_memory=16 * GIB), ENGINES).run.blend == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data=a.txt", "data.train=b.txt"), "data.train=b.txt: data=a.txt is given too, which is its short form"),
        (("data=a.txt", "data.blend=1 b.txt"), "data.blend=1 b.txt: data=a.txt is given too, which takes its place"),
        (("tokenizer=tok", "data.tokenizer=tok"), "is its short form"),
        (("data.valid=a.txt", "data.split=9,1"), "data.split=9,1: data.valid=a.txt is given too"),
        (("data.train=no.txt",), "data.train=no.txt: no such file"),
        (("data.valid=no.txt",), "data.valid=no.txt: no such file"),
        (("data.blend=0.7 a.txt 0.3",), "data.blend=0.7 a.txt 0.3: needs a weight before each source"),
        (("data.blend=a.txt b.txt",), "a.txt is no number above 0"),
        (("data.blend=0 a.txt",), "0 is no number above 0"),
        (("data.blend=1 no.txt",), "data.blend=no.txt: no such file"),
        (("data.blend=1 'a.txt",), "can't be read: No closing quotation"),
        (("data.split=99",), "needs two or three shares"),
        (("data.split=0,1",), "0 is no number above 0"),
        (("data.split=9,-1",), "-1 is no share"),
        (("train.eval_every=5",), "train.eval_every=5: has nothing to evaluate on; choose one of data.valid=PATH, data.split=99,1,0"),
        (("train.eval_every=5", "data.split=99,0,1"), "has nothing to evaluate on"),
        (("train.eval_steps=0",), "train.eval_steps=0: must be at least 1"),
        (("data.tests=a.txt",), "data.tests=a.txt: is no key"),
        (("wandb.name=a",), "wandb.project: is missing"),
        (("megatron.init_methodstd=1",), "did you mean megatron.init_method_std?"),
        (("megatron.init_method_std=1", "megatron.init-method-std=2"), "is given twice, first as megatron.init_method_std"),
        (("ds.zero_optimization.overlap_com=true",), "did you mean ds.zero_optimization.overlap_comm?"),
        (("ds=1",), "ds=1: is a group of keys"),
    ],
)
def test_bad_values_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(*words)
    assert message in str(caught.value)


def test_the_resolved_configuration_gives_the_same_settings(folder: Path) -> None:
    words = ("data.blend=0.7 a.txt 0.3 'c d.txt'", "data.valid=b.txt", "train.eval_every=5", "train.eval_steps=2", "tokenizer=tok",
             "wandb.project=p", "megatron.init-method-std=1e-5", "megatron.bucket_size=null", "megatron.window_size=8,0",
             "ds.zero_optimization.overlap_comm=true", "ds.optimizer.params.torch_adam=true")  # fmt: skip
    first = load(*words)
    (folder / "config.yaml").write_text(recipe.resolved_yaml(first))
    second = recipe.load(("recipe=config.yaml",), Machine(host_memory=16 * GIB), ENGINES)
    assert (second.run, second.extra) == (first.run, first.extra)
    assert second.extra["megatron"] == {"init_method_std": 1e-5, "bucket_size": None, "window_size": [8, 0]}


def planned(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(("recipe=gpt_tiny", "gpus=2", "launch=none", "out=run", *words))
    path = folder / "run" / "plan.json"
    return status, json.loads(path.read_text()) if path.exists() else {}


def test_values_for_deepspeed_leave_the_engines_that_have_it(folder: Path) -> None:
    status, plan = planned(folder, "ds.steps_per_print=7", "megatron.init_method_std=0.05")
    assert status == 0
    assert plan["engine"] == "megatron_deepspeed"
    assert plan["extra"] == {"ds": {"steps_per_print": 7}, "megatron": {"init_method_std": 0.05}}


def test_a_contradiction_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, plan = planned(folder, "megatron.tensor_model_parallel_size=2", "pin.tp=1")
    assert (status, plan) == (2, {})
    said = capsys.readouterr().err
    assert said == "error: megatron.tensor_model_parallel_size=2: contradicts the plan's tp, for which it would be 1; change that one\n"


def test_a_plan_alone_takes_paths_of_the_cluster_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = {"data": "/of/the/cluster/chats.jsonl", "tokenizer": "/of/the/cluster/tok", "model.init_from": "/of/the/cluster/w"}
    paths = [f"{key}={path}" for key, path in there.items()]
    words = ["recipe=llama_tiny_sft", "cluster=dgx_h100", "gpus=8", "data.lengths=90+20", *paths]
    assert command(["plan", *words, "out=o"]) == 0
    said = capsys.readouterr().out
    for key, path in there.items():
        assert f"note: {key}={path} is not on this machine: taken as it is, not checked" in said
        assert json.loads((folder / "o/plan.json").read_text())["run"][key.rpartition(".")[2]] == path
    assert command(["sweep", *words[:2], "gpus=2,4", *words[3:]]) == 0
    assert capsys.readouterr().err.count("note: data=/of/the/cluster/chats.jsonl is not on this machine") == 1
    assert command(["plan", "recipe=llama3_8b", "cluster=dgx_h100", "gpus=8", "data=/of/the/cluster/all", "out=p"]) == 0
    assert "--data-path '/of/the/cluster/all'" in (folder / "p/megatron_args.sh").read_text()
    capsys.readouterr()
    for key, path in there.items():  # a start needs them, and a relative path is of this machine
        assert main([*words[:3], f"{key}={path}", "launch=none"]) == 2
        assert f"{key}={path}: no such f" in capsys.readouterr().err
        assert command(["plan", *words[:3], f"{key}={path[1:]}"]) == 2
        assert f"{key}={path[1:]}: no such f" in capsys.readouterr().err


def test_a_saved_plan_keeps_its_values_and_takes_more(folder: Path) -> None:
    planned(folder, "megatron.init_method_std=0.05", "engine=megatron")
    assert main(("plan=run/plan.json", "launch=none", "out=again", "megatron.bias_dropout_fusion=false", "data=a.txt")) == 0
    again = json.loads((folder / "again" / "plan.json").read_text())
    assert again["extra"]["megatron"] == {"init_method_std": 0.05, "bias_dropout_fusion": False}
    assert again["run"]["data"] == str(folder / "a.txt")
