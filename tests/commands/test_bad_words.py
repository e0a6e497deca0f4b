"""Ten bad inputs for each command that asks: one clear error each, on standard error alone, with status 2 and nothing written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.__main__ import main
from orchestrator.pictures import drawable

TINY = ("recipe=gpt_tiny", "cluster=cpu")
H100 = ("gpus=16", "cluster=dgx_h100")
LINE = (
    "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --global-batch-size 16 --bf16 --train-iters 9\n"
)
FILES = {
    "train.sh": LINE,
    "no_flags.sh": "echo hello\n",
    "letters.sh": LINE.replace("--num-layers 4", "--num-layers four"),
    "empty.sh": "",
    "mamba.sh": LINE.replace("pretrain_gpt", "pretrain_mamba"),
    "list.yaml": "- 1\n",
    "broken.yaml": "a: [1\n",
    "other.yaml": "a: 1\n",
    "ours.yaml": "recipe: gpt_tiny\ntrain: {steps: 3}\n",
    "tpu.yaml": "distributed_type: XLA\nnum_processes: 8\n",
    "stage.json": '{"zero_optimization": {"stage": 7}, "train_batch_size": 16}',
    "broken.json": "{",
    "notes.json": '{"a": 1}',
    "empty_plan.json": "{}",
    "no_plan.json": "[]",
}

BAD: list[tuple[tuple[str, ...], str]] = [
    (("plan", *TINY, "gpu=2"), "gpu=2: is no key; did you mean gpus?"),
    (("plan", *TINY, "gpus=two"), "gpus=two: is not a whole number"),
    (("plan", *TINY, "gpus=0"), "gpus=0"),
    (("plan", *TINY, "gpus=2", "model.num_layers=100000000"), "model.num_layers=100000000: must be at most 1000"),
    (("plan", "recipe=gpt_tinny"), "recipe=gpt_tinny"),
    (("plan", *TINY, "gpus=2", "cluster=nowhere"), "cluster"),
    (("plan", *TINY, "gpus=4", "pin.tp=3"), "pin.tp=3"),
    (("plan", *TINY, "gpus=4", "engine=torchtitan"), "engine=torchtitan"),
    (("plan", *TINY, "gpus=4", "train.lr=-1"), "train.lr=-1"),
    (("plan", *TINY, "gpus=4", "train.precision=int4"), "train.precision=int4"),
    (("plan", *TINY, "gpus=4", "memory.risk=2"), "memory.risk=2"),
    (("plan", *TINY, "gpus=4", "gpus=8"), "is given twice"),
    (("plan", *TINY, "gpus=4", "launch=local"), "launch=local: is for a run"),
    (("plan", *TINY, "gpus=4", "tune=5"), "tune=5: is for a run"),
    (("plan", "plan=nothing.json"), "plan=nothing.json: can't be read"),
    (("plan", *TINY, "gpus=2", "target.cost=5"), "target.cost=5: needs cluster.price_per_gpu_hour"),
    (("sweep", *TINY), "no key has several values"),
    (("sweep", *TINY, "gpus=2,2"), "gpus=2,2: has a value twice"),
    (("sweep", *TINY, "gpus=2,"), "gpus=2,"),
    (("sweep", *TINY, "gpus=2,4", "gpus=8"), "is given twice"),
    (("sweep", *TINY, "gpus=2,4", "gpu=8"), "gpu=8: is no key; did you mean gpus?"),
    (("sweep", *TINY, "gpus=2,4", "pin.tq=1,2"), "pin.tq=1,2: is no key"),
    (("sweep", *TINY, "gpus=2,four"), "gpus=four"),
    (("sweep", *TINY, "gpus=2,4", "target.days=3"), "is a question"),
    (("sweep", "recipe=llama3_8b", "gpus=8", "cluster=dgx_h100,dgx_a100"), "cluster=dgx_a100: is not known; did you mean dgx_a100_40gb or"),
    (
        ("sweep", "recipe=gpt_tiny", "cluster=cpu,dgx_h10,nope.yaml"),
        "cluster=dgx_h10,nope.yaml: dgx_h10: is not known; did you mean dgx_h100; a path",
    ),
    (("sweep", "recipe=gpt_tiny", "cluster=cpu,dgx_h10,nope.yaml"), "; nope.yaml: no such file; choose one of aws_g6e, "),
    (("sweep", "cluster=cpu", "gpus=2", "recipe=gpt_tiny,llamaa"), "recipe=llamaa: is not known; did you mean llama"),
    (("sweep", *TINY, "gpus=2", "engine=megatron,megtron"), "engine=megtron: is not known; choose one of auto, megatron, "),
    (("sweep", *TINY, "gpus=2", "engine=megatron,layerwise"), "engine=layerwise: is planned by python -m orchestrator.run"),
    (("sweep", *TINY, "gpus=2,4", "out=x"), "out=x: is for a run"),
    (("sweep", *TINY, "gpus=2,4", "write=pbs"), "write=pbs: is of one plan, and sweep makes several: plan takes it"),
    (("sweep", *TINY, "gpus=2,4", "explain.tp=1"), "explain.tp=1: is of one plan"),
    (("compare", *TINY, "gpus=2,4", "rehearse=true"), "rehearse=true: is of one plan, and compare makes several"),
    (("sweep", *TINY, "gpus=2,4", "memory.limit_gib=0.001"), "none of 2 combinations has a plan"),
    (("sweep", *TINY, f"gpus={','.join(map(str, range(1, 2100)))}"), "at most 2,000"),
    (("compare", *TINY, "gpus=2"), "no key has several values"),
    (("compare", "a.json"), "a.json: is not key=value, and compare takes two folders of runs"),
    (("compare", "a.json", "b.json"), "plan=a.json: can't be read"),
    (("sweep", *TINY, "gpus=2,4", "--jsn"), "--jsn: is not key=value"),
    (("compare", *TINY, "gpus=2,4,8"), "compare takes two values of one key"),
    (("compare", *TINY, "gpus=2,4", "pin.tp=1,2"), "compare takes two values of one key"),
    (("compare", "plan=a.json,b.json"), "plan=a.json: can't be read"),
    (("compare", "plan=empty_plan.json,no_plan.json"), "plan=empty_plan.json"),
    (("compare", *TINY, "gpus=4", "pin.tp=2,3"), "pin.tp=3: has no plan"),
    (("compare", *TINY, "gpus=4", "pin.tp=2,x"), "pin.tp=x"),
    (("compare", *TINY, "gpus=2,4", "gpu=8"), "gpu=8: is no key; did you mean gpus?"),
    (("compare", *TINY, "gpus=4,4"), "gpus=4,4: has a value twice"),
    (("compare", *TINY, "gpus=2,4", "launch=none"), "launch=none: is for a run"),
    (("compare", *TINY, "gpus=2,4", "largest=seq_length"), "is a question"),
    (("audit",), "needs one FILE"),
    (("audit", "a.sh", "b.sh"), "needs one FILE"),
    (("audit", "nowhere.sh", *H100), "can't be read"),
    (("audit", ".", *H100), "is a folder"),
    (("audit", "empty.sh", *H100), "is empty"),
    (("audit", "no_flags.sh", *H100), "no command with Megatron-LM's flags"),
    (("audit", "letters.sh", *H100), "num-layers=four: is no whole number"),
    (("audit", "mamba.sh", *H100), "trains a model that can't be described"),
    (("audit", "train.sh", "cluster=dgx_h100"), "gpus"),
    (("audit", "train.sh", "gpu=16", "cluster=dgx_h100"), "gpu=16: is no key; did you mean gpus?"),
    (("audit", "train.sh", *H100, "explain.tp=2"), "is not for audit"),
    (("audit", "train.sh", *H100, "out=x"), "out: is not for audit"),
    (("audit", "train.sh", *H100, "pin.tp=x"), "pin.tp=x"),
    (("audit", "--fast", *H100), "is no option of audit"),
    (("audit", "list.yaml", *H100), "of no named settings"),
    (("audit", "broken.yaml", *H100), "is not YAML"),
    (("audit", "other.yaml", *H100), "has nothing by which it is known"),
    (("audit", "ours.yaml", *H100), "is a recipe of this planner"),
    (("audit", "tpu.yaml", *H100), "distributed_type=XLA: is not planned for"),
    (("audit", "stage.json", *H100, "recipe=gpt_tiny"), "zero_optimization.stage=7"),
    (("audit", "broken.json", *H100), "is not JSON"),
    (("audit", "notes.json", *H100), "is no ds_config"),
    (("report",), "needs one RUN"),
    (("report", "a", "b"), "needs one RUN"),
    (("report", "nowhere"), "can't be read"),
    (("report", "train.sh"), "is not a plan"),
    (("report", "empty_plan.json"), "is not a plan"),
    (("report", "no_plan.json"), "is not a plan"),
    (("report", "empty_plan.json", "out=x.pdf"), "is no .html"),
    (("report", "empty_plan.json", "ou=x.html"), "did you mean out"),
    (("report", "empty_plan.json", "out="), "needs a value"),
    (("report", "empty_plan.json", "out=a.html", "out=b.html"), "is given twice"),
    (("run", *TINY, "gpus=4", "launch=now"), "launch=now"),
    (("run", *TINY, "gpus=4", "out=."), "out=.: is a folder with files in it"),
    (("run", *TINY, "gpus=4", "target.days=3"), "target.days"),
    (("run", *TINY, "gpus=2,4"), "gpus=2,4"),
    (("run", "resume=nowhere"), "nowhere"),
    (("run", *TINY, "gpus=4", "--jsn"), "--jsn"),
    (("run", *TINY, "gpus=4", "engine="), "engine"),
    (("run", *TINY, "gpus=4", "train.steps=1.5"), "train.steps=1.5"),
    (("run", *TINY, "gpus=4", "ds.no_such=1"), "ds.no_such"),
    (("run", "--help", "pinz"), "pinz"),
]


@pytest.mark.skipif(not drawable(), reason="report wants bokeh")
@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words)[:60] for words, _ in BAD])
def test_bad_input_is_one_error(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == "" or words[0] == "run"  # run says the cluster first
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}


def test_each_command_has_ten() -> None:
    counted = Counter(words[0] for words, _ in BAD)
    assert {*counted} == {"plan", "sweep", "compare", "audit", "report", "run"}
    assert min(counted.values()) >= 10
