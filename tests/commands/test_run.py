"""The main path: what it writes, what it starts and where, and what it says."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from orchestrator import folder as folder_of_run
from orchestrator import recipe, run
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError
from orchestrator.hardware.spec import Software
from orchestrator.job import File
from orchestrator.plan import Plan, from_json
from orchestrator.recipe.layers import flatten
from orchestrator.recipe.read import read_yaml
from orchestrator.units import GIB

TINY = ("recipe=gpt_tiny", "gpus=4")


def plan_of(out: Path) -> Plan:
    return from_json((out / "plan.json").read_bytes())


def without_cluster_note(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, predicted=None, rejected=())


# -------------------------------------------------------------------------------------------------------- what it writes


def test_everything_is_written_and_the_first_line_is_the_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main((*TINY, "launch=none", "out=a/b")) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("cluster cpu, 4 gloo ranks: ")
    names = {path.name for path in (folder / "a" / "b").iterdir()}
    assert {"config.yaml", "plan.json", "plan.schema.json", "candidates.csv", "engine.json", "launch.sh", "job.sbatch"} <= names
    assert [path.name for path in (folder / "a").iterdir()] == ["b"]
    assert f"Not started: launch=none. To start it: bash {folder}/a/b/launch.sh" in said
    assert os.access(folder / "a" / "b" / "launch.sh", os.X_OK)


def test_the_plan_is_what_its_schema_says(folder: Path) -> None:
    assert run.main((*TINY, "launch=none", "out=a")) == 0
    jsonschema.validate(json.loads((folder / "a/plan.json").read_text()), json.loads((folder / "a/plan.schema.json").read_text()))


def test_every_candidate_has_a_price_or_a_reason(folder: Path) -> None:
    assert run.main((*TINY, "launch=none", "out=a")) == 0
    with (folder / "a/candidates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 20
    assert all(row["step_time_s"] or row["reason"] for row in rows)
    best = plan_of(folder / "a")
    assert best.predicted is not None
    assert float(rows[0]["step_time_s"]) == pytest.approx(best.predicted.step_time_s, rel=1e-9)


@pytest.mark.parametrize("words", [TINY, ("recipe=t5_large", "gpus=16"), ("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100", "pin.tp=2")])
def test_the_resolved_configuration_gives_the_same_plan(words: tuple[str, ...], folder: Path) -> None:
    assert run.main((*words, "launch=none", "out=a")) == 0
    assert run.main(("recipe=a/config.yaml", "launch=none", "out=b")) == 0
    assert (folder / "a/plan.json").read_text() == (folder / "b/plan.json").read_text()
    assert flatten(read_yaml(folder / "a/config.yaml"), "") == flatten(read_yaml(folder / "b/config.yaml"), "")


def test_the_same_words_give_the_same_bytes(folder: Path) -> None:
    for out in ("a", "b"):
        assert run.main((*TINY, "launch=none", f"out={out}")) == 0
    for name in ("plan.json", "candidates.csv", "engine.json", "launch.sh"):
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()


def test_a_saved_plan_is_priced_and_started_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main((*TINY, "launch=none", "out=a", "pin.tp=2", "pin.pp=2", "engine=megatron")) == 0
    edited = json.loads((folder / "a/plan.json").read_text())
    edited["predicted"] = None
    (folder / "mine.json").write_text(json.dumps(edited))
    capsys.readouterr()
    assert run.main(("plan=mine.json", "launch=none", "out=b")) == 0
    first, second = plan_of(folder / "a"), plan_of(folder / "b")
    assert without_cluster_note(second) == without_cluster_note(first)
    assert second.predicted == first.predicted
    assert not (folder / "b/candidates.csv").exists()
    assert "the plan's" in capsys.readouterr().out.splitlines()[0]
    assert run.main(("recipe=b/config.yaml", "launch=none", "out=c")) == 0
    assert plan_of(folder / "c") == second


def test_a_saved_plan_agrees_with_the_recipe_that_made_it(folder: Path) -> None:
    assert run.main((*TINY, "launch=none", "out=a")) == 0
    assert run.main((*TINY, "plan=a/plan.json", "launch=none", "out=b", "train.save_every=5")) == 0
    assert plan_of(folder / "b").run.save_every == 5


def test_a_run_that_continues_takes_the_engine_of_its_checkpoint(folder: Path) -> None:
    (folder / "old" / "checkpoints").mkdir(parents=True)
    for engine in ("megatron", "megatron_deepspeed"):
        marker = {"layout": {"engine": engine}, "step": 2, "folder": "step_000002"}
        (folder / "old/checkpoints/latest.json").write_text(json.dumps(marker))
        (folder / "old/checkpoints/step_000002").mkdir(exist_ok=True)
        assert run.main((*TINY, "launch=none", "train.resume=old", f"out={engine}")) == 0
        assert plan_of(folder / engine).engine == engine


def test_pins_are_kept(folder: Path) -> None:
    assert run.main((*TINY, "launch=none", "out=a", "pin.tp=2", "pin.pp=2", "pin.micro_batch_size=2")) == 0
    plan = plan_of(folder / "a")
    assert (plan.tp, plan.pp, plan.dp, plan.micro_batch_size) == (2, 2, 1, 2)


def test_what_decides_convergence_is_never_changed(folder: Path) -> None:
    for name, gpus in (("gpt_tiny", 4), ("t5_large", 16), ("llama2_7b", 8), ("bert_large", 8)):
        assert run.main((f"recipe={name}", f"gpus={gpus}", "launch=none", f"out={name}")) == 0
        plan = plan_of(folder / name)
        asked = recipe.load((f"recipe={name}", f"gpus={gpus}"), Machine(), list(ENGINES))
        assert (plan.training, plan.model) == (asked.training, asked.architecture)
        assert plan.micro_batch_size * plan.num_microbatches * plan.dp == plan.global_batch_size == asked.training.global_batch_size


def test_a_container_sees_all_that_the_ranks_read_outside_the_folder(folder: Path) -> None:
    tokenizer, blobs = folder / "cache" / "snapshots", folder / "cache" / "blobs"  # as Hugging Face's cache: links
    for made in (tokenizer, blobs):
        made.mkdir(parents=True)
    (blobs / "1f").write_text("{}")
    (tokenizer / "tokenizer.json").symlink_to(Path("..") / "blobs" / "1f")
    (folder / "corpus.txt").write_text("text")
    words = [
        "recipe=gpt_tiny",
        "gpus=2",
        "cluster=cpu",
        "launch=none",
        "container.image=a/b",
        "data=corpus.txt",
        "tokenizer=cache/snapshots",
    ]
    assert run.main([*words, "out=runs/first"]) == 0
    (line,) = [line for line in (folder / "runs/first/job.sbatch").read_text().splitlines() if line.startswith("srun ")]
    read = ",".join(f"{path}:{path}:ro" for path in map(shlex.quote, map(str, (blobs, tokenizer, folder / "corpus.txt"))))
    assert f' --container-mounts={read},"$PWD":"$PWD" ' in line


def test_what_starts_another_programs_file_stands_in_its_first_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama3_8b", "gpus=16", "cluster=dgx_h100", "launch=none", "write=bridge", "out=there"]
    assert run.main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    there = f"as the first lines of bridge.py, bridge.sh in {folder / 'there'} say"
    assert last == f"Not started: launch=none. To start it: {there} (or, without that program, cd {folder / 'there'} && sbatch job.sbatch)"
    assert "\n# Start: " in f"\n{(folder / 'there' / 'bridge.py').read_text()}"


def test_an_empty_folder_may_be_written_to_and_a_default_name_is_made(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert run.main((*TINY, "launch=none", "out=empty")) == 0
    assert (folder / "empty" / "plan.json").exists()
    for _ in range(2):  # within a second: the second gets another name
        assert run.main((*TINY, "launch=none")) == 0
    made = sorted(path.name for path in (folder / "runs").iterdir())
    assert len(made) == 2
    assert all(name.startswith("gpt_tiny-2") for name in made)


def test_a_folder_belongs_to_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name each run gets another, also within a second; by the same out= the second is refused, and nothing stays of it."""
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    mine = recipe.load([*TINY], Machine(), [*ENGINES])
    same = recipe.load([*TINY, "out=same"], Machine(), [*ENGINES])
    with folder_of_run.held(mine) as first, folder_of_run.held(mine) as second, folder_of_run.held(same):
        assert [first.name, second.name] == ["gpt_tiny-now", "gpt_tiny-now-2"]
        with pytest.raises(InputError, match=rf"out=same: is taken by another run \(process {os.getpid()} on "), folder_of_run.held(same):
            raise AssertionError("it has the folder")
        words = [sys.executable, "-m", "orchestrator.run", *TINY, "launch=none", "out=same"]
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (refused.returncode, "is taken by another run" in refused.stderr) == (2, True)
    assert [*folder.iterdir()] == []


def test_a_folder_is_free_after_a_run_that_was_killed(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / folder_of_run.HELD).write_text("process 1 on elsewhere\n")
    assert run.main((*TINY, "launch=none", "out=out")) == 0
    assert not (folder / "out" / folder_of_run.HELD).exists()


def test_a_write_that_fails_leaves_nothing(folder: Path) -> None:
    files = [File(path="a.txt", content="x"), File(path="a.txt/b.txt", content="x")]
    with pytest.raises(InputError, match="out"):
        folder_of_run.write_folder(folder / "deep" / "out", files)
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ the other words


def test_cfg_prints_a_recipe_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(("recipe=t5_large", "gpus=16", "train.lr=0.5", "--cfg")) == 0
    printed = capsys.readouterr().out
    (folder / "printed.yaml").write_text(printed)
    assert flatten(read_yaml(folder / "printed.yaml"), "")["train.lr"].value == 0.5
    assert [path.name for path in folder.iterdir()] == ["printed.yaml"]


def test_help_names_every_key_recipe_cluster_and_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(("--help",)) == 0
    text = capsys.readouterr().out
    for name in (*recipe.KEYS, *recipe.stored("models"), *recipe.stored("clusters"), *ENGINES):
        assert name in text


def test_help_has_each_group_once_and_its_keys_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(("--help",)) == 0
    _, *parts = re.split(r"^(\w+)\.\*:\n", capsys.readouterr().out.split("\nrecipes:")[0], flags=re.MULTILINE)
    names, bodies = parts[::2], parts[1::2]
    assert {"model", "train", "pin", "search", "ds"} <= {*names}
    assert len(names) == len({*names})
    for name, body in zip(names, bodies, strict=True):
        assert {line.split(".")[0].strip() for line in body.splitlines() if line.strip()} == {name}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(("--version",)) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_planning_imports_no_engine_and_is_quick(tmp_path: Path) -> None:
    """t5_large on 16 GPUs from the shell: under 3 CPU seconds, no torch on the way."""
    code = (
        "import sys, time; from orchestrator import run; "
        f"status = run.main(['recipe=t5_large', 'gpus=16', 'launch=none', 'out={tmp_path}/o']); "
        "print(status, sorted({'torch', 'megatron', 'deepspeed', 'transformers', 'numba'} & set(sys.modules)), time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, loaded, seconds = done.stdout.splitlines()[-1].split(" ", 2)
    assert (status, loaded) == ("0", "[]")
    assert float(seconds) < 3


# ------------------------------------------------------------------------------------------------------- where it starts

READY = Machine(host_memory=16 * GIB)
NO_TORCH = Machine(missing=("torch", "megatron.core"))
H100 = Machine(num_gpus=8, gpu_name="NVIDIA H100 80GB HBM3", catalog_name="H100-SXM-80GB", nvlink=True, host_memory=2**40)
IN_SLURM = Machine(slurm_job="1", slurm_nodes=2)
CPU = ("recipe=gpt_tiny", "gpus=4")
TWO_NODES = ("recipe=llama2_7b", "gpus=16", "cluster=dgx_h100")


def start(machine: Machine, *words: str) -> run.Start:
    return run.choose_start(recipe.load(words, machine, list(ENGINES)), machine)


@pytest.mark.parametrize(
    ("machine", "words", "how", "why"),
    [
        (READY, CPU, "local", ""),
        (READY, (*CPU, "launch=none"), "none", "launch=none"),
        (READY, (*CPU, "launch=local"), "local", ""),
        (NO_TORCH, CPU, "none", "torch, megatron.core are not installed"),
        (READY, TWO_NODES, "none", "the plan needs 16 x H100-SXM-80GB, and this machine has no GPU"),
        (H100, ("recipe=llama2_7b", "gpus=8"), "local", ""),
        (H100, ("recipe=llama2_7b", "gpus=4"), "local", ""),
        (H100, TWO_NODES, "none", "the plan needs 16 x H100-SXM-80GB, and this machine has 8"),
        (H100, ("recipe=llama2_7b", "gpus=8", "cluster=dgx_b200"), "none", "8 x B200, and this machine has NVIDIA H100"),
        (H100, (*CPU, "cluster=cpu"), "none", "this one has some"),
        (IN_SLURM, TWO_NODES, "allocation", ""),
        (IN_SLURM, (*TWO_NODES, "launch=none"), "none", "launch=none"),
        (IN_SLURM, ("recipe=llama2_7b", "gpus=32", "cluster=dgx_h100"), "none", "this Slurm allocation has 2 nodes of 4"),
        (Machine(sbatch=True), (*TWO_NODES, "launch=slurm"), "slurm", ""),
        (READY, (*CPU, "container.image=a.sif"), "none", "container.image is for the nodes of a Slurm job, or by hand"),
        (IN_SLURM, (*TWO_NODES, "container.image=a.sif"), "allocation", ""),
    ],
)
def test_where_a_job_is_started(machine: Machine, words: tuple[str, ...], how: str, why: str) -> None:
    chosen = start(machine, *words)
    assert chosen.how == how
    assert why in chosen.why


@pytest.mark.parametrize(
    ("machine", "words", "why"),
    [
        (READY, TWO_NODES, "this machine has no GPU"),
        (H100, TWO_NODES, "this machine has 8"),
        (NO_TORCH, CPU, "torch, megatron.core are not installed"),
    ],
)
def test_launch_local_where_it_can_not_is_an_error(machine: Machine, words: tuple[str, ...], why: str) -> None:
    with pytest.raises(LaunchError, match="launch=local: ") as caught:
        start(machine, *words, "launch=local")
    assert why in str(caught.value)
    assert caught.value.status == 2


def test_an_image_with_launch_local_is_refused_with_the_choices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"=a\.sif: is not started by launch=local; choose one of launch=slurm, launch=none"):
        start(READY, *CPU, "container.image=a.sif", "launch=local")
    assert run.main([*CPU, "container.image=a.sif", "launch=none", "out=o"]) == 0
    line = f"To start it: apptainer exec --bind {folder}/o --pwd {folder}/o a.sif bash {folder}/o/launch.sh"
    assert line in " ".join(capsys.readouterr().out.split())


def test_the_line_for_an_image_on_amds_gpus_is_amds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama3_8b", "gpus=8", "cluster=mi300x_8", "container.image=a/b:1", "launch=none"]
    assert run.main([*words, "out=o"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 'docker run --rm --device /dev/kfd --device /dev/dri --group-add "$(stat' in said
    assert f"megatron-core {Software().megatron_core}; assumed of the image: cluster.software.megatron_core= " in said
    assert run.main([*words, "cluster.software.megatron_core=0.16.1", "out=p"]) == 0
    assert "assumed of the image" not in capsys.readouterr().out


NO_DEEPSPEED = Machine(megatron_core="0.16.1", host_memory=16 * GIB, missing=("deepspeed",))
LEFT_OUT = "is left out: deepspeed is not installed (pip install -e '.[engines]'); launch=none plans for it too"


def test_engines_that_can_not_start_here_are_not_searched_for_a_start_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the best plan is another engine's, none would start."""
    started: list[Plan] = []
    monkeypatch.setattr(run.detect, "machine", lambda: NO_DEEPSPEED)
    monkeypatch.setattr(run, "follow", lambda start, settings, found, job, out: started.append(found.plan) or 0)
    for words in ((), ("launch=local",)):
        assert run.main((*TINY, *words, f"out=o{len(words)}")) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
        assert said == [f"engine=megatron_deepspeed {LEFT_OUT}", f"engine=deepspeed {LEFT_OUT}"]
        with (folder / f"o{len(words)}" / "candidates.csv").open(newline="") as file:
            assert {row["engine"] for row in csv.DictReader(file)} == {"megatron"}
    assert [plan.engine for plan in started] == ["megatron", "megatron"]


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (NO_DEEPSPEED, ("launch=none",)),
        (NO_DEEPSPEED, ("cluster=dgx_h100",)),
        (Machine(missing=("torch", "megatron.core", "deepspeed", "transformers")), ()),
    ],
)
def test_a_plan_that_starts_elsewhere_may_be_any_engines(
    folder: Path, machine: Machine, words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.detect, "machine", lambda: machine)
    assert run.main((*TINY, *words, "out=o")) == 0
    said = capsys.readouterr().out
    assert "left out" not in said
    assert "Not started: " in said
    with (folder / "o" / "candidates.csv").open(newline="") as file:
        assert {row["engine"] for row in csv.DictReader(file)} == set(ENGINES)


def test_an_engine_that_is_asked_for_and_not_installed_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.detect, "machine", lambda: NO_DEEPSPEED)
    assert run.main((*TINY, "engine=deepspeed", "launch=local", "out=o")) == 2
    assert "launch=local: deepspeed is not installed" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- for real


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.run", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.engines
def test_the_main_job_trains_on_four_ranks_with_a_falling_loss(folder: Path) -> None:
    process = command(folder, *TINY, "train.steps=8", "train.warmup=2", "out=a")
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    rows = metrics(folder / "a")
    losses = [row["loss"] for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    status = json.loads((folder / "a/status.json").read_text())
    assert (status["status"], status["exit_status"], status["steps"]) == ("finished", 0, 8)
    assert "measured / predicted" in said
    assert len(list((folder / "a/logs").glob("rank-*.log"))) == 4


@pytest.mark.engines
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_saves_and_ends_and_a_second_one_ends_with_status_130(folder: Path, *, again: bool) -> None:
    process = command(folder, "recipe=gpt_tiny", "gpus=2", "train.steps=100000", "pin.tp=2", "out=a")
    deadline = time.monotonic() + 180
    while not metrics(folder / "a") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metrics(folder / "a"), process.communicate(timeout=5)
    process.send_signal(signal.SIGINT)
    if again:
        process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    status = json.loads((folder / "a/status.json").read_text())
    if again:
        assert (process.returncode, status["status"]) == (130 if status["error"] == "ended by SIGINT" else 143, "interrupted")
    else:
        step = metrics(folder / "a")[-1]["step"]
        assert (process.returncode, status["status"], status["exit_status"]) == (75, "stopped", 75)
        assert json.loads((folder / "a/checkpoints/latest.json").read_text())["step"] == step
        assert run.SAVING in said
        assert said.endswith(f"Stopped as asked, saved after step {step} of 100000; resume={folder / 'a'} goes on\n")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in left


def test_a_search_that_fails_leaves_the_garbage_collector_on(tmp_path: Path) -> None:
    assert gc.isenabled()
    assert run.main(["recipe=gpt_tiny", "gpus=4", "pin.tp=3", f"out={tmp_path / 'x'}", "launch=none"]) == 2
    assert gc.isenabled()


def test_routers_of_transformers_write_no_trace_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=qwen3_moe_tiny", "gpus=2", "cluster=cpu", "engine=deepspeed", "train.trace_routing=true", "launch=none"]
    assert run.main([*words, f"out={tmp_path / 'x'}"]) == 2
    assert "train.trace_routing=true: engine=deepspeed has no routers of megatron-core" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
