"""Whatever a user gets wrong: one clear message that names key, value and choices, status 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recipe, run
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.plan import from_json
from orchestrator.recipe.keys import KEYS

MODELS = Path(run.__file__).parent.parent / "recipes" / "models"
TINY = ("recipe=gpt_tiny", "gpus=4", "launch=none")


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], status: int = 2) -> str:
    """The message of a run that must be refused, checked for what holds of every refusal."""
    before = listing(folder)
    assert run.main(words) == status
    output = capsys.readouterr()
    assert listing(folder) == before, "something was written"
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err + output.out
    assert "defect" not in output.err
    return output.err.removeprefix("error: ").strip()


WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    "no words at all": ((), "recipe: is missing"),
    "unknown key": (("recipe=gpt_tiny", "gpu=4"), "gpu=4: is no key; did you mean gpus?"),
    "unknown nested key": (("recipe=gpt_tiny", "train.learning_rate=1"), "train.learning_rate=1: is no key"),
    "a choice without its group": ((*TINY, "tp=2"), "tp=2: is no key; did you mean pin.tp?"),
    "a setting without its group": ((*TINY, "steps=2"), "steps=2: is no key; did you mean train.steps?"),
    "unknown group": (("recipe=gpt_tiny", "optimizer.lr=1"), "optimizer.lr=1: is no key; did you mean train.lr?"),
    "key below a key": (("recipe=gpt_tiny", "gpus.count=4"), "gpus.count=4: is no key"),
    "a group as a value": (("recipe=gpt_tiny", "train={}"), "train={}: is a group of keys"),
    "a group as a number": (("recipe=gpt_tiny", "train=5"), "train=5: is a group of keys"),
    "a key twice": ((*TINY, "gpus=8"), "gpus=8: is given twice, first as gpus=4"),
    "no equals sign": (("recipe=gpt_tiny", "gpus", "4"), "gpus: is not key=value"),
    "a flag": (("recipe=gpt_tiny", "--gpus=4"), "--gpus=4: is no key; did you mean gpus?"),
    "empty key": (("=4",), "is no key"),
    "interpolation": ((*TINY, "data=${oc.env:HOME}"), "data=${oc.env:HOME}: has ${...}"),
    "unknown recipe": (("recipe=gpt_tinny",), "recipe=gpt_tinny: is not known; did you mean gpt_tiny"),
    "recipe that is no file": (("recipe=./nothing.yaml",), "recipe=./nothing.yaml: no such file"),
    "unknown cluster": ((*TINY, "cluster=dgx_h1000"), "cluster=dgx_h1000: is not known; did you mean dgx_h100"),
    "a cluster's name without its memory": ((*TINY, "cluster=dgx_a100"), "is not known; did you mean dgx_a100_40gb or dgx_a100_80gb"),
    "unknown engine": ((*TINY, "engine=deepspeeed"), "engine=deepspeeed: is not known; choose one of auto, megatron"),
    "unknown launch": (("recipe=gpt_tiny", "launch=docker"), "launch=docker: is not known; choose one of auto, none, local, slurm"),
    "unknown family": ((*TINY, "model.family=rwkv"), "model.family=rwkv: is not known; choose one of bert, "),
    "a task by its algorithm": ((*TINY, "task=dpo"), "task=dpo: is not known; task=rl rl.algorithm=dpo plans it; choose one of pretrain"),
    "unknown precision": ((*TINY, "train.precision=int8"), "train.precision=int8: is not known; choose one of bf16, fp16, fp32, fp8"),
    "precision that the GPU lacks": (
        (*TINY, "cluster=v100_16gb", "train.precision=bf16"),
        "train.precision=bf16: V100-SXM2-16GB has no fast path for it; choose one of fp16, fp32",
    ),
    "a precision by its own name": (
        (*TINY, "cluster=dgx_a100_80gb", "train.precision=mxfp8"),
        "train.precision=mxfp8: A100-SXM-80GB has no fast path for it; choose one of bf16, fp16, fp32",
    ),
    "unknown optimizer": ((*TINY, "train.optimizer=lion"), "train.optimizer=lion: is not known; choose one of adamw, sgd"),
    "text for a number": ((*TINY, "train.global_batch_size=many"), "train.global_batch_size=many: is not a whole number"),
    "fraction for a whole number": (("recipe=gpt_tiny", "gpus=1.5"), "gpus=1.5: is not a whole number"),
    "negative GPUs": (("recipe=gpt_tiny", "gpus=-4"), "gpus=-4: must be at least 1"),
    "zero GPUs": (("recipe=gpt_tiny", "gpus=0"), "gpus=0: must be at least 1"),
    "more GPUs than there are on earth": (("recipe=gpt_tiny", "gpus=100000000"), "gpus=100000000: must be at most 1000000"),
    "a number of 400 digits": (("recipe=gpt_tiny", "gpus=" + "9" * 400), "is too long for a number"),
    "negative learning rate": ((*TINY, "train.lr=-1"), "train.lr=-1: must be above 0"),
    "learning rate beyond sense": ((*TINY, "train.lr=100"), "train.lr=100: must be at most 1"),
    "learning rate nan": ((*TINY, "train.lr=nan"), "train.lr=nan: is not a finite number"),
    "learning rate inf": ((*TINY, "train.lr=1e999"), "train.lr=1e999: is not a finite number"),
    "min_lr above lr": ((*TINY, "train.min_lr=1"), "train.min_lr=1.0: is above train.lr=0.001"),
    "a decay of another schedule": ((*TINY, "train.decay_steps=3"), "train.decay_steps=3: is for train.schedule=wsd, and it is cosine"),
    "a decay that the warm-up leaves no room for": (
        (*TINY, "train.schedule=wsd", "train.decay_steps=17", "train.steps=20"),
        "train.decay_steps=17: is longer than what train.warmup=4 leaves of train.steps=20",
    ),
    "no step of warm-up for the square root": (
        (*TINY, "train.schedule=inverse_square_root", "train.warmup=0"),
        "train.warmup=0: must be 1 at least with train.schedule=inverse_square_root",
    ),
    "warm-up longer than the training": (
        (*TINY, "train.steps=3"),
        "train.warmup=4: is longer than the training, train.steps=3; it is the recipe's own, train.warmup= says another: 0 to 3",
    ),
    "zero batch": ((*TINY, "train.global_batch_size=0"), "train.global_batch_size=0: must be at least 1"),
    "zero sequence": ((*TINY, "train.seq_length=0"), "train.seq_length=0: must be at least 1"),
    "sequence beyond the positions": ((*TINY, "train.seq_length=4096"), "train.seq_length=4096: is beyond the learned positions"),
    "sequence beyond the rotary range": (
        ("recipe=llama_tiny", "gpus=4", "train.seq_length=100000"),
        "train.seq_length=100000: is beyond model.max_position_embeddings",
    ),
    "one beta": ((*TINY, "train.betas=0.9"), "train.betas=0.9: needs 2 numbers"),
    "beta of one": ((*TINY, "train.betas=0.9,1"), "train.betas=0.9,1: must be below 1"),
    "dropout of one": ((*TINY, "model.dropout=1"), "model.dropout=1: must be below 1"),
    "dropout said twice": ((*TINY, "model.dropout=0.1", "model.hidden_dropout=0"), "model.dropout=0.1: stands for"),
    "garbage for a truth value": ((*TINY, "pin.sequence_parallel=maybe"), "=maybe: is neither; choose one of true, false"),
    "empty value": ((*TINY, "train.lr="), "train.lr='': is empty"),
    "empty text": ((*TINY, "out="), "out='': is empty"),
    "zero layers": ((*TINY, "model.num_layers=0"), "model.num_layers=0: must be at least 1"),
    "heads that don't divide the width": ((*TINY, "model.num_attention_heads=3"), "num_attention_heads=3: does not divide hidden_size=128"),
    "groups that don't divide the heads": (
        ("recipe=llama_tiny", "gpus=4", "model.num_query_groups=3"),
        "model.num_query_groups=3: does not divide num_attention_heads",
    ),
    "a decoder for a family without": ((*TINY, "train.decoder_seq_length=64"), "decoder_seq_length=64: the gpt family has no decoder"),
    "zero stage 5": ((*TINY, "pin.zero_stage=5"), "pin.zero_stage=5: is not known; choose one of 0, 1, 2, 3"),
    "unknown recompute": ((*TINY, "pin.recompute=some"), "pin.recompute=some: is not known; choose one of none, layernorm, selective,"),
    "pinned tp that doesn't divide the heads": ((*TINY, "pin.tp=3"), "tp=3"),
    "pinned product beyond the GPUs": ((*TINY, "pin.tp=4", "pin.pp=2"), "tp=4"),
    "pinned pp beyond the layers": (("recipe=gpt_tiny", "gpus=16", "launch=none", "pin.pp=16"), "pp=16"),
    "pinned micro-batch that doesn't divide the batch": ((*TINY, "pin.micro_batch_size=5"), "micro_batch_size=5"),
    "a batch smaller than the ranks that need it": ((*TINY, "pin.dp=4", "train.global_batch_size=2"), "dp=4"),
    "GPUs that fill no node": (
        ("recipe=t5_large", "gpus=12", "launch=none"),
        "gpus=12: is no whole number of nodes of 8: gpus=8 and gpus=16 are;",
    ),
    "a layout that drops a layer": ((*TINY, "pin.pp=2", "pin.layout=Et*2|tL"), "pin.layout=Et*2|tL"),
    "a layout that is none": ((*TINY, "pin.pp=2", "pin.layout=EttX|ttL"), "pin.layout=EttX|ttL"),
    "a layout of another number of stages": ((*TINY, "pin.pp=4", "pin.layout=Et*2|t*2L"), "has 2 chunks, which pp=4 does not divide"),
    "impossible memory": ((*TINY, "memory.limit_gib=0.01"), "needs"),
    "more memory than the GPU has": (
        ("recipe=llama2_7b", "cluster=dgx_h100", "gpus=8", "memory.limit_gib=200"),
        "memory.limit_gib=200: is more than a H100-SXM-80GB has, 79.11",
    ),
    "a reserve that leaves nothing": ((*TINY, "memory.reserve_gib=4"), "memory.reserve_gib=4: leaves nothing of 4.0 GiB"),
    "missing data": ((*TINY, "data=nowhere.txt"), "data=nowhere.txt: no such file"),
    "missing tokenizer": ((*TINY, "tokenizer=nowhere"), "tokenizer=nowhere: no such folder"),
    "missing folder to resume from": ((*TINY, "train.resume=nowhere"), "train.resume=nowhere: no such folder"),
    "missing plan": (("plan=nowhere.json",), "plan=nowhere.json: can't be read: No such file"),
    "missing Hugging Face config": ((*TINY, "model.hf_config=nowhere.json"), "model.hf_config=nowhere.json: can't be read"),
    "launch=local without the GPUs": (("recipe=t5_large", "gpus=16", "launch=local"), "launch=local: "),
    "launch=slurm without Slurm": ((*TINY[:2], "launch=slurm"), "launch=slurm: there is no sbatch"),
    "a Slurm number that is none": ((*TINY, "slurm.nodes=two"), "slurm.nodes=two: "),
    "a line break in a script": ((*TINY, "slurm.account=a\nb"), "slurm.account='a\\nb'"),
    "a model without a batch": (
        ("model.family=gpt", "gpus=4", "cluster=cpu"),
        "train.global_batch_size: is missing: the recipe has none, so give it and",
    ),
    "zero bytes in a path": ((*TINY, "out=a\0b"), "out"),
    "zero bytes in another path": ((*TINY, "calibration=a\0b"), "calibration='a\\x00b': can't be read: "),
    "a blend's path that is too long": ((*TINY, f"data.blend=1 {'a' * 300}"), "can't be read: File name too long"),
    "a question for another command": ((*TINY, "target.days=3"), "target.days=3.0: is a question that python -m orchestrator plan answers"),
    "another question": ((*TINY, "largest=seq_length"), "largest=seq_length: is a question that python -m orchestrator plan answers"),
    "a line break in a family": ((*TINY, "model.family=a\nb"), "model.family='a\\nb': is not known"),
    "a line break in a layout": ((*TINY, "pin.pp=2", "pin.layout=Et*2\n|t*2L"), "pin.layout="),
}


@pytest.mark.parametrize("case", WORDS)
def test_words(case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))  # no nvidia-smi, no sbatch
    words, message = WORDS[case]
    said = refused(capsys, folder, words)
    assert message in said


def test_there_are_at_least_forty_kinds() -> None:
    assert len(WORDS) + len(FILES) + len(PLANS) >= 40


@pytest.mark.parametrize("key", [key.name for key in KEYS.values() if key.path])
def test_a_path_that_no_file_system_takes(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = tuple(word for word in TINY if not word.startswith(f"{key}="))
    said = refused(capsys, folder, (*others, f"{key}={'a' * 300}"))
    assert said.startswith(f"{key}=aaa")
    assert "can't be read: File name too long" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other_saved_bytes": "nan"}, "profile.other_saved_bytes=nan: must be a number of at least 0"),
        ({"backward_of_forward": "-1"}, "profile.backward_of_forward=-1.0: must be a number of at least 0"),
        ({"layers": []}, "profile: has no layers"),
        ({"layers": [{"kind": "x"}]}, "profile: is not a profile"),
        ({"layers": [{"forward_s": {"1": "nan"}}]}, "profile.layers.encoder: needs a count of at least 1"),
        ({"layers": [{"output_bytes": "-4"}]}, "profile.layers.encoder: needs a count of at least 1"),
        ({"layers": [{"reductions": "-1"}]}, "profile.layers.encoder: needs a count of at least 1"),
    ],
)
def test_profiles_that_are_none(change: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"parameter_bytes": "4 MiB", "forward_s": {"1": "2 ms"}, "saved_bytes": {"1": "8 MiB"}, "output_bytes": "1 MiB"}
    whole = {"kind": "encoder", "count": "2", **figures}
    layers = [layer if layer == {"kind": "x"} else whole | layer for layer in change.get("layers", [{}])]
    train = {"global_batch_size": 8, "seq_length": 64}
    tree = {"cluster": "dgx_a100_40gb", "gpus": 8, "train": train, "profile": change | {"layers": layers}}
    (folder / "a.yaml").write_text(json.dumps(tree))  # which is YAML too
    assert message in refused(capsys, folder, ("recipe=a.yaml", "engine=layerwise"))


# ------------------------------------------------------------------------------------------------------- files of theirs


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


GOOD = (MODELS / "gpt_tiny.yaml").read_text()
LEVEL = "- {name: a, size: node, bandwidth: 1 GB/s, latency: 1 us}"
CLUSTER = f"""\
gpu: H100-SXM-80GB
gpus_per_node: 8
levels:
{LEVEL}
host_bandwidth: 12 GB/s
host_memory: 1 GB
"""


def cluster(old: str, new: str) -> str:
    """The good one with a part replaced."""
    assert old in CLUSTER
    return CLUSTER.replace(old, new)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}

FILES: dict[str, tuple[str, str | bytes, str, str]] = {
    # what: (name of the file, its content, the key that takes it, what the message must hold)
    "broken YAML": ("a.yaml", "model: [1\n", "recipe", "a.yaml: line 2: is not YAML"),
    "a binary file": ("a.yaml", bytes(range(256)), "recipe", "a.yaml: is not a text file"),
    "a zip by another name": ("a.yaml", b"PK\x03\x04\x14\x00\x00\x00", "recipe", "a.yaml"),
    "an empty file": ("a.yaml", "", "recipe", "a.yaml: is empty"),
    "a list": ("a.yaml", "- 1\n- 2\n", "recipe", "a.yaml: is not a YAML mapping"),
    "a huge file": ("a.yaml", b"#" * 2_000_000, "recipe", "a.yaml: is larger than 1000000 bytes"),
    "a key twice in YAML": ("a.yaml", GOOD + "gpus: 8\n", "recipe", "a.yaml: gpus: line"),
    "an unknown key in YAML": ("a.yaml", GOOD + "gpuz: 8\n", "recipe", "a.yaml: gpuz=8: is no key; did you mean gpus?"),
    "a group that is a number in YAML": ("a.yaml", "train: 5\n", "recipe", "a.yaml: train=5: is a group of keys"),
    "an empty group in YAML": ("a.yaml", "train: {}\n", "recipe", "a.yaml: train={}: is a group of keys"),
    "a list for a number in YAML": ("a.yaml", GOOD.replace("gpus: 4", "gpus: [4, 8]"), "recipe", 'gpus=["4", "8"]: needs one value'),
    "a mapping for a number in YAML": ("a.yaml", GOOD.replace("gpus: 4", "gpus: {a: 1}"), "recipe", "gpus"),
    "interpolation in YAML": ("a.yaml", GOOD + "out: ${oc.env:HOME}\n", "recipe", "out=${oc.env:HOME}: has ${...}"),
    "an alias in YAML": ("a.yaml", GOOD + "seed: &x 1\nout: *x\n", "recipe", "aliases are not taken"),
    "a required field left out": ("a.yaml", GOOD.replace("  num_layers: 4\n", ""), "recipe", "model.num_layers: is missing"),
    "a cluster without levels": ("c.yaml", "gpu: H200\ngpus_per_node: 8\n", "cluster", "c.yaml: levels: is missing"),
    "a cluster with an unknown GPU": ("c.yaml", cluster("H100-", "H101-"), "cluster", "not in the catalog; did you mean H100-SXM-80GB"),
    "a bandwidth without a unit": ("c.yaml", cluster("12 GB/s", "12"), "cluster", "host_bandwidth=12: needs a number and a unit"),
    "a bandwidth that is negative": ("c.yaml", cluster("1 GB/s", "-1 GB/s"), "cluster", "bandwidth=-1 GB/s: must be above 0"),
    "a level with an unknown key": ("c.yaml", cluster("latency", "latencyy"), "cluster", "latencyy: is no key here; did you mean latency"),
    "levels that are a number": ("c.yaml", cluster(f"\n{LEVEL}", " 3"), "cluster", "levels: needs a list"),
    "a cluster too small": ("c.yaml", CLUSTER, "cluster", "gpus=16: is more than the outermost network level"),
    "a Hugging Face config that is no JSON": ("h.json", "{'a': 1}", "model.hf_config", "h.json: is not JSON"),
    "a Hugging Face config that is a list": ("h.json", "[1]", "model.hf_config", "h.json: is not a JSON object"),
    "a Hugging Face config of another family": ("h.json", json.dumps(LLAMA | {"model_type": 7}), "model.hf_config", "model_type"),
    "a Hugging Face config with a hole": ("h.json", json.dumps(LLAMA), "model.hf_config", "vocab_size"),
    "a Hugging Face config with text for a number": ("h.json", json.dumps(LLAMA | {"vocab_size": "many"}), "model.hf_config", "vocab_size"),
    "data that is empty": ("d.txt", "", "data", "d.txt: is empty"),
    "data whose index is missing": ("d.bin", "x", "data", "is a Megatron prefix, but d.idx is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content, key, message = FILES[case]
    path = write(folder / name, content)
    given = str(path.with_suffix("")) if name == "d.bin" else str(path)
    words = {
        "recipe": (f"recipe={given}", "launch=none"),
        "cluster": ("recipe=llama2_7b", "gpus=16", "launch=none", f"cluster={given}"),
    }.get(key, (*TINY, f"{key}={given}"))
    assert message in refused(capsys, folder, words)


@pytest.mark.parametrize("key", ["recipe", "cluster", "plan", "model.hf_config", "data"])
def test_a_folder_where_a_file_is_needed(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "things.yaml").mkdir()
    words = ("recipe=gpt_tiny",) if key not in ("recipe", "plan") else ()
    assert f"{key}=things.yaml: is a folder" in refused(capsys, folder, (*words, "gpus=4", f"{key}=things.yaml"))


@pytest.mark.parametrize("key", ["recipe", "cluster", "plan", "data"])
def test_a_link_that_leads_nowhere(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "link.yaml").symlink_to(folder / "gone")
    words = ("recipe=gpt_tiny",) if key not in ("recipe", "plan") else ()
    assert f"{key}=link.yaml: " in refused(capsys, folder, (*words, "gpus=4", f"{key}=link.yaml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("key", ["recipe", "cluster", "plan", "data"])
def test_a_file_that_may_not_be_read(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "a.yaml", GOOD).chmod(0)
    words = ("recipe=gpt_tiny",) if key not in ("recipe", "plan") else ()
    assert "can't be read: Permission denied" in refused(capsys, folder, (*words, "gpus=4", f"{key}=a.yaml"))


def test_a_socket_where_a_file_is_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.yaml")
        assert "s.yaml: can't be read" in refused(capsys, folder, ("recipe=s.yaml", "gpus=4"))


def test_a_pipe_is_no_recipe_and_is_not_waited_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("p.yaml")
    assert "p.yaml: can't be read: is no regular file" in refused(capsys, folder, ("recipe=p.yaml", "gpus=4"))


@pytest.mark.parametrize(
    ("marker", "words", "message"),
    [
        (None, (), "train.resume=old: holds no finished checkpoint"),
        ("{", (), "old/checkpoints/latest.json is not a checkpoint's marker"),
        ('{"layout": 5}', (), "old/checkpoints/latest.json is not a checkpoint's marker"),
    ],
)
def test_folders_to_resume_from(
    marker: str | None, words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old" / "checkpoints").mkdir(parents=True)
    if marker is not None:
        write(folder / "old" / "checkpoints" / "latest.json", marker)
    assert message in refused(capsys, folder, (*TINY, "train.resume=old", *words))


# ------------------------------------------------------------------------------------------------------------------ out


def test_a_folder_with_files_is_not_written_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "old").mkdir()
    write(folder / "old" / "precious", "x")
    assert "out=old: is a folder with files in it" in refused(capsys, folder, (*TINY, "out=old"))


def test_out_that_is_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "file", "x")
    assert "out=file: is a file" in refused(capsys, folder, (*TINY, "out=file"))
    assert "out=file/below: can't be made" in refused(capsys, folder, (*TINY, "out=file/below"))


def test_out_where_nobody_can_write(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "out=/proc/mine: can't be" in refused(capsys, folder, (*TINY, "out=/proc/mine"))


def test_out_with_a_name_that_is_too_long(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert "out=xxx" in refused(capsys, folder, (*TINY, f"out={name}"))


def test_out_that_is_a_link_to_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "loop").symlink_to("loop")
    assert "out=loop" in refused(capsys, folder, (*TINY, "out=loop"))


# ---------------------------------------------------------------------------------------------------------- saved plans


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A legal plan of two stages, as JSON."""
    out = tmp_path_factory.mktemp("saved") / "out"
    assert run.main((*TINY, "engine=megatron", "pin.tp=2", "pin.pp=2", "pin.vpp=1", f"out={out}")) == 0
    text = (out / "plan.json").read_text()
    from_json(text)
    plan = json.loads(text)
    assert isinstance(plan, dict)
    return plan


Edit = Callable[[dict[str, Any]], object]
PLANS: dict[str, tuple[Edit, str]] = {
    "an unknown key": (lambda plan: plan.update(tpp=2), "tpp"),
    "a missing key": (lambda plan: plan.pop("tp"), "tp"),
    "text for a number": (lambda plan: plan.update(tp="two"), "tp"),
    "another version": (lambda plan: plan.update(version=2), "version"),
    "a world that is no product": (lambda plan: plan.update(world_size=8), "world_size=8"),
    "a degree of zero": (lambda plan: plan.update(dp=0), "dp=0"),
    "tp that doesn't divide the heads": (lambda plan: plan.update(tp=3), "tp"),
    "a dropped layer": (lambda plan: plan["stages"][0]["layers"].pop(), "stages"),
    "a layer twice": (lambda plan: plan["stages"][1]["layers"].append(plan["stages"][1]["layers"][0]), "stages"),
    "a stage too few": (lambda plan: plan["stages"].pop(), "stages"),
    "a batch that doesn't come out": (lambda plan: plan.update(num_microbatches=7), "num_microbatches"),
    "a ZeRO stage that the pipeline refuses": (lambda plan: plan.update(zero_stage=3), "zero_stage"),
    "an unknown engine": (lambda plan: plan.update(engine="colossal"), "engine=colossal"),
    "a cluster of another size": (lambda plan: plan["cluster"].update(num_gpus=64), "num_gpus=64"),
    "a model that is none": (lambda plan: plan["model"].update(num_attention_heads=5), "num_attention_heads=5"),
    "a negative number of layers": (lambda plan: plan["stages"][0]["layers"][1].update(count=-1), "stages"),
}


@pytest.mark.parametrize("case", PLANS)
def test_edited_plans(case: str, saved: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, message = PLANS[case]
    plan = json.loads(json.dumps(saved))
    edit(plan)
    write(folder / "plan.json", json.dumps(plan))
    assert message in refused(capsys, folder, ("plan=plan.json", "launch=none"))


ODD = (0, -1, 1, 2, 3, 7, 10**6, 10**19, 1.5, -0.5, 1e308, "", "x", "none", "full", None, True, [], {}, [1])


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed, as keys from the outside in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*above, key)
        yield from places(item, (*above, key))


def test_no_edit_of_a_plan_is_met_with_a_traceback(saved: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """120 plans with one value changed or taken out: each is refused with a message, or is legal."""
    chance = random.Random(2024)
    everywhere = list(places({name: value for name, value in saved.items() if name != "rejected"}))
    for number in range(120):
        plan = json.loads(json.dumps(saved))
        *above, last = chance.choice(everywhere)
        inner = plan
        for key in above:
            inner = inner[key]
        if chance.random() < 0.2:
            del inner[last]
        else:
            inner[last] = chance.choice(ODD)
        write(folder / "plan.json", json.dumps(plan))
        status = run.main(("plan=plan.json", "launch=none", f"out=out{number}"))
        said = capsys.readouterr().err
        assert status in (0, 2), (above, last, said)
        assert said.startswith("error: ") or not status


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe\x00", b"null", b'{"version": 1'])
def test_plans_that_are_none(content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "plan.json", content)
    assert "plan=plan.json: " in refused(capsys, folder, ("plan=plan.json", "launch=none"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pin.tp=4", "pin.tp=4: the plan says 2"),
        ("gpus=8", "gpus=8: the plan says 4"),
        ("train.lr=0.5", "train.lr=0.5: the plan says 0.001"),
        ("engine=megatron_deepspeed", "engine=megatron_deepspeed: the plan is for engine=megatron"),
        ("cluster=dgx_h100", "cluster=dgx_h100: the plan says cpu"),
        ("recipe=llama_tiny", "the plan says"),
    ],
)
def test_words_that_contradict_the_plan(
    word: str, message: str, saved: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "plan.json", json.dumps(saved))
    assert message in refused(capsys, folder, ("plan=plan.json", "launch=none", word))


# --------------------------------------------------------------------------------------------------------------- memory


def test_impossible_memory_says_what_was_missing_the_nearest_plan_and_what_to_relax(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, folder, ("recipe=llama3_70b", "cluster=dgx_h100", "gpus=2", "launch=none"))
    assert "GiB" in said
    assert "tp=" in said
    assert any(word in said for word in ("gpus", "memory.limit_gib", "pin."))


# ------------------------------------------------------------------------------------------------- by the real command


@pytest.mark.parametrize("words", [("recipe=gpt_tiny", "gpu=4"), ("recipe=nothing",), (*TINY, "memory.limit_gib=0.01")])
def test_the_command_itself(words: tuple[str, ...], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "orchestrator.run", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert listing(folder) == []


def test_a_defect_of_ours_is_told_in_a_line_with_the_way_to_the_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Planner, "plan", lambda *given, **more: 1 / 0)
    assert run.main(TINY) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "ORCHESTRATOR_DEBUG=1" in said
    assert "Traceback" not in said
    monkeypatch.setenv("ORCHESTRATOR_DEBUG", "1")
    assert run.main(TINY) == 1
    assert "Traceback" in capsys.readouterr().err
    assert listing(folder) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "16"], "--gpus: is not key=value; did you mean gpus=..., one word?"),
        (["train.seq_length=4g"], "train.seq_length=4g: is not a whole number: tokens are counted, without letters"),
        (["train.seq_length=4096k"], "train.seq_length=4194304: is beyond the learned positions"),
        (["train.global_batch_size=4M"], "behind the digits; 4M tokens are 4000000 / train.seq_length of them"),
        (
            ["model.max_position_embeddings=1B"],
            "is not a whole number: tokens are counted, without letters behind the digits, as in 1000000000",
        ),
        (["pin.tensor_parallel=8"], "pin.tensor_parallel=8: is no key; did you mean pin.tp?"),
        (["explain.pipeline_model_parallel_size=8"], "is no key; did you mean explain.pp?"),
        (["expert_parallel=8"], "expert_parallel=8: is no key; did you mean pin.ep?"),
        (["slurm.image=a.sqsh"], "slurm.image=a.sqsh: is no key; did you mean container.image?"),
        (["explain.engine=deepspeed"], "explain.engine=deepspeed: is no key; did you mean engine?"),
        (["pin.mbs=2", "pin.micro_batch_size=2"], "pin.micro_batch_size=2: is given twice, first as pin.micro_batch_size=2"),
    ],
)
def test_what_people_type_first_is_answered_by_what_to_type(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["recipe=gpt_tiny", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_printed_can_be_typed() -> None:
    """Screens and plan notes say mbs and sp."""
    printed = recipe.load(["recipe=gpt_tiny", "gpus=4", "pin.mbs=2", "pin.sp=true"], Machine(), [*ENGINES]).pins
    assert (
        printed
        == recipe.load(["recipe=gpt_tiny", "gpus=4", "pin.micro_batch_size=2", "pin.sequence_parallel=true"], Machine(), [*ENGINES]).pins
    )
    assert printed.micro_batch_size == 2
