"""The scripts: exact text, and that nothing in a value can break out of them, shown by running them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_keys import container_options, slurm_options
from test_local import wait_for

from orchestrator import planning
from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, Job, Mount, SlurmOptions
from orchestrator.launch import render
from orchestrator.launch.render import (
    FIRST_PORT,
    PORT_TRIES,
    PORTS,
    container_command,
    files,
    sbatch_quote,
    with_environment,
)

GOLDEN = Path(__file__).parent / "golden"
GPT = Job(
    name="gpt3_175b",
    module="orchestrator.workers.megatron",
    arguments=("--plan", "plan.json", "--out", "."),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"},
    files=(),
    num_nodes=2,
    ranks_per_node=8,
    backend="nccl",
)
TINY = Job(
    name="gpt_tiny", module="orchestrator.workers.megatron", arguments=("--plan", "plan.json", "--out", "."), environment={}, files=(),
    num_nodes=1, ranks_per_node=4, backend="gloo",
)  # fmt: skip
SITE = SlurmOptions(
    partition="h100", account="0123", qos="high", time="12:30:00", nodelist="n[0-1]", exclude="n7", constraint="ib&h100", cpus_per_task=64,
    mem="0", exclusive=True, reservation="us", dependency="afterok:7", switches="1@00:10:00", segment="2", extra=("--comment", "a 'b' #c"),
    python="/opt/my venv/bin/python",
)  # fmt: skip
TASKS = SlurmOptions(style="srun", requeue=3, planner="/opt/venv/bin/python")
IMAGE = ContainerOptions(image="nvcr.io#nvidia/pytorch:26.06-py3", mounts=("/data:/data:ro",))
ENTRY = Job(
    name="gpt3_175b", module="orchestrator.workers.megatron", program="/opt/my fork/pretrain_gpt.py", arguments=("--num-layers", "96"),
    environment={}, files=(), num_nodes=2, ranks_per_node=8, backend="nccl",
)  # fmt: skip
SCRIPT = msgspec.structs.replace(
    ENTRY, program="/my/train.py", arguments=("--deepspeed", "ds_config.json"), launcher="deepspeed", preflight=True
)
STUB = """#!/bin/sh
printf '%s\\0' "$@" > {record}.argv
env -0 > {record}.env
pwd > {record}.cwd
"""
NASTY = ["a b", "'", '"', "$(touch broken)", "`touch broken`", "$HOME", "a\\b", "; touch broken", "#x", "*", "ü→", "-n", "{0}", "!!", "&"]
WORDS = st.one_of(st.sampled_from(NASTY), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12))
LINES = st.one_of(st.sampled_from(NASTY), st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12))


def stub(folder: Path, name: str) -> Path:
    """A program on the PATH that writes down how it was called: `<record>.argv`, `.env`, `.cwd`."""
    folder.mkdir(exist_ok=True)
    record = folder / f"{name}.record"
    program = folder / name
    program.write_text(STUB.format(record=shlex.quote(str(record))))
    program.chmod(0o755)
    return record


def read(record: Path, what: str) -> list[str]:
    return Path(f"{record}.{what}").read_bytes().decode().split("\0")[:-1]


def write(folder: Path, job: Job, slurm: SlurmOptions | None = None, container: ContainerOptions | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files(job, slurm=slurm, container=container):
        (folder / file.path).write_text(file.content)


@pytest.mark.parametrize(
    ("name", "job", "slurm", "container"),
    [("gpt3_175b", GPT, SITE, None), ("gpt_tiny", TINY, None, None), ("entry", ENTRY, TASKS, IMAGE), ("deepspeed", SCRIPT, None, None)],
)
def test_scripts_equal_the_golden_files(name: str, job: Job, slurm: SlurmOptions | None, container: ContainerOptions | None) -> None:
    for file in files(job, slurm=slurm, container=container):
        assert file.executable
        golden = GOLDEN / f"{name}.{file.path}"
        if os.environ.get("UPDATE_GOLDEN"):
            golden.write_text(file.content)
        assert file.content == golden.read_text()


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.*")), ids=lambda path: path.name)
def test_scripts_pass_bash_and_shellcheck(golden: Path) -> None:
    subprocess.run(["bash", "-n", golden], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", golden], check=True)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=LINES, arguments=st.lists(WORDS, max_size=4), values=st.lists(WORDS, max_size=3), folder=st.sampled_from(NASTY), program=LINES,
    launcher=st.sampled_from(["torchrun", "deepspeed"])
)  # fmt: skip
def test_no_value_breaks_out_of_launch_sh(
    tmp_path: Path, name: str, arguments: list[str], values: list[str], folder: str, program: str,
    launcher: Literal["torchrun", "deepspeed"],
) -> None:  # fmt: skip
    record = stub(tmp_path / "bin", launcher)
    environment = {f"T_{index}": value for index, value in enumerate(values)}
    out = tmp_path / f"run {folder.replace('/', '_')}"
    job = Job(name=name, module="pkg.mod", arguments=tuple(arguments), environment=environment, files=(), num_nodes=1, ranks_per_node=2,
              backend="gloo", launcher=launcher, program=program if launcher == "deepspeed" else None)  # fmt: skip
    write(out, job)
    places = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MASTER_PORT": "29500"}
    subprocess.run(["bash", out / "launch.sh"], check=True, cwd=tmp_path, env=places)
    argv = read(record, "argv")
    assert argv[argv.index("rank") + 1 :] == ["python", *([program] if job.program else ["-m", "pkg.mod"]), *arguments]
    assert [line for line in read(record, "env") if line.startswith("T_")] == [f"{name}={value}" for name, value in environment.items()]
    assert Path(f"{record}.cwd").read_text() == f"{out}\n"
    assert not list(tmp_path.rglob("broken"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=LINES, partition=LINES, extra=LINES, python=LINES, image=LINES, mount=LINES, runtime=st.sampled_from(["", "pyxis", "apptainer"])
)
def test_no_value_breaks_out_of_job_sbatch(
    tmp_path: Path, name: str, partition: str, extra: str, python: str, image: str, mount: str, runtime: Literal["", "pyxis", "apptainer"]
) -> None:
    """Run as the batch script would be; the `#SBATCH` lines must stay comments of one line each."""
    record = stub(tmp_path / "bin", "srun")
    stub(tmp_path / "bin", "python3")  # in place of orchestrator.finish
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ $2 = hostnames ] && printf 'n0\\nn1\\n' || echo '  NodeAddr=127.0.0.1 x'\n")
    scontrol.chmod(0o755)
    out = tmp_path / "out"
    slurm = SlurmOptions(partition=partition, extra=(f"--comment={extra}",), python=python)
    job = Job(name=name, module="m", arguments=(), environment={}, files=(), num_nodes=2, ranks_per_node=4, backend="nccl")
    container = ContainerOptions(image=image, mounts=(mount,), workdir=mount, runtime=runtime) if runtime else None
    write(out, job, slurm, container)
    slurm_sets = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CPUS_ON_NODE": "8"}
    subprocess.run(["bash", "job.sbatch"], check=True, cwd=out, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **slurm_sets},
                   stdout=subprocess.DEVNULL)  # fmt: skip
    common = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1", "--export=ALL"]
    both = mount if ":" in mount else f"{mount}:{mount}"
    contained = {
        "": [],
        "pyxis": [f"--container-image={image}", f"--container-mounts={out}:{out},{both}", f"--container-workdir={mount}"],
        "apptainer": ["apptainer", "exec", "--nv", "--bind", str(out), "--bind", mount, "--pwd", mount, image],
    }
    assert read(record, "argv") == [
        *common,
        *contained[runtime],
        "bash",
        "-c",
        render.filled("on_a_node.sh"),
        f"{out}/launch.sh",
    ]
    lines = (out / "job.sbatch").read_text().split("\n")
    assert sum(line.startswith("#SBATCH") for line in lines) == 11
    assert not list(tmp_path.rglob("broken"))


def test_a_rendezvous_port_at_which_something_listens_is_passed_over(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "srun")
    stub(tmp_path / "bin", "python3")  # in place of orchestrator.finish
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ $2 = hostnames ] && printf 'n0\\nn1\\n' || echo '  NodeAddr=127.0.0.1 x'\n")
    scontrol.chmod(0o755)
    write(tmp_path, GPT)
    with socket.socket() as other:
        for port in range(FIRST_PORT, FIRST_PORT + PORTS):  # one that is free here
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port))
                break
        other.listen()
        slurm_sets = {"SLURM_JOB_ID": str(port - FIRST_PORT), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CPUS_ON_NODE": "8"}
        done = subprocess.run(["bash", "job.sbatch"], check=True, cwd=tmp_path, capture_output=True, text=True,
                              env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **slurm_sets})  # fmt: skip
    (taken,) = (int(line.partition("=")[2]) for line in read(record, "env") if line.startswith("MASTER_PORT="))
    assert port < taken <= port + PORT_TRIES
    assert f"rendezvous at 127.0.0.1:{taken}," in done.stdout


def test_every_node_gets_its_own_rank_and_the_first_nodes_address(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "torchrun")
    write(tmp_path, GPT)
    places = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first.host"}
    subprocess.run(["bash", tmp_path / "launch.sh"], check=True, env=places)
    assert read(record, "argv")[:10] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "first.host", "--master-port", "29500",
                          "--nproc-per-node", "8"]  # fmt: skip
    done = subprocess.run(["bash", tmp_path / "launch.sh"], check=False, env={**places, "NNODES": "3"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs 16 ranks" in done.stderr
    del places["MASTER_ADDR"]
    done = subprocess.run(["bash", tmp_path / "launch.sh"], check=False, env=places, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MASTER_ADDR" in done.stderr


def test_deepspeeds_launcher_gets_a_hostfile_and_this_nodes_number(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "deepspeed")
    write(tmp_path, SCRIPT)
    places = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NODE_RANK": "1", "MASTER_ADDR": "first.host"}
    subprocess.run(["bash", tmp_path / "launch.sh"], check=True, env=places)
    argv = read(record, "argv")
    hostfile = tmp_path / argv[argv.index("--hostfile") + 1]
    assert [line.split()[1] for line in hostfile.read_text().splitlines()] == ["slots=8", "slots=8"]
    assert argv[2:11] == ["--no_ssh", "--node_rank", "1", "--master_addr", "first.host", "--master_port", "29500", "--no_python",
                          "--no_local_rank"]  # fmt: skip
    assert argv[-4:] == ["python", "/my/train.py", "--deepspeed", "ds_config.json"]
    with pytest.raises(InputError, match=r"style=srun: starts one task a rank, and entry\.launcher=deepspeed starts the ranks itself"):
        files(SCRIPT, slurm=SlurmOptions(style="srun"))


def test_the_status_of_a_launcher_that_ends_while_it_is_told_to_is_not_lost(tmp_path: Path) -> None:
    """TERM interrupts the wait for it; `kill` is a function here that lasts until it has ended."""
    stub(tmp_path / "bin", "deepspeed")
    (tmp_path / "bin" / "deepspeed").write_text("#!/bin/bash\ntrap 'exit 3' TERM; touch started; while sleep .1; do :; done\n")
    write(tmp_path, msgspec.structs.replace(SCRIPT, num_nodes=1))
    places = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "BASH_FUNC_kill%%": '() { builtin kill "$@" && sleep 1; }'}
    with subprocess.Popen(["bash", "launch.sh"], cwd=tmp_path, env=places) as script:
        wait_for((tmp_path / "started").exists, 30)
        script.terminate()
        assert script.wait(30) == 3


def test_python_variable_chooses_the_interpreter(tmp_path: Path) -> None:
    record = stub(tmp_path / "my env", "python3.11")
    write(tmp_path, TINY)
    subprocess.run(["bash", tmp_path / "launch.sh"], check=True, env={**os.environ, "PYTHON": str(tmp_path / "my env" / "python3.11")})
    argv = read(record, "argv")
    assert argv[:2] == ["-m", "torch.distributed.run"]
    assert "--continue" not in argv
    assert argv[-6:] == ["-m", "orchestrator.workers.megatron", "--plan", "plan.json", "--out", "."]
    assert argv[-7] == str(tmp_path / "my env" / "python3.11")


def test_job_sbatch_refuses_to_run_outside_its_folder(tmp_path: Path) -> None:
    write(tmp_path, TINY)
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(["bash", tmp_path / "job.sbatch"], check=False, cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    assert done.returncode == 2
    assert "sbatch --chdir" in done.stderr


@pytest.mark.parametrize(
    ("job", "slurm", "key"),
    [
        ({"name": "a\nb"}, {}, "recipe"),
        ({"name": "a\udc80"}, {}, "recipe"),
        ({"environment": {"A B": "x"}}, {}, "env.A B"),
        ({"environment": {"A\n": "x"}}, {}, "env.A\n"),
        ({"environment": {"A": "x\0"}}, {}, "env.A"),
        ({"arguments": ("a\0b",)}, {}, "arguments"),
        ({}, {"partition": "a\n#SBATCH --wrap=x"}, "slurm.partition"),
        ({}, {"account": "a\rb"}, "slurm.account"),
        ({}, {"nodes": 3}, "slurm.nodes"),
        ({}, {"nodes": 0}, "slurm.nodes"),
        ({}, {"extra": ("comment",)}, "slurm.extra"),
        ({}, {"extra": ("--comment=a\nb",)}, "slurm.extra"),
        *(
            ({}, {"extra": ("--comment", "x", *words)}, "slurm.extra")
            for words in (
                ("--nodes=3",),
                ("-N3",),
                ("-N", "3"),
                ("--ntasks-per-node", "4"),
                ("--gres=gpu:4",),
                ("-G", "4"),
                ("--signal=B:TERM@300",),
                ("--no-requeue",),
            )
        ),
        ({}, {"gres": "gpu:4"}, "slurm.gres"),
        ({}, {"gres": "nvme:1,gpu:h100:4(S:0-1)"}, "slurm.gres"),
        ({}, {"python": "/a\nb"}, "slurm.python"),
    ],
)
def test_what_no_script_can_hold_is_refused(job: dict[str, object], slurm: dict[str, object], key: str) -> None:
    changed = Job(**{**{field: getattr(GPT, field) for field in GPT.__struct_fields__}, **job})  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        files(changed, slurm=SlurmOptions(**slurm))  # type: ignore[arg-type]
    assert refused.value.key == key


def test_fewer_nodes_than_planned_get_more_ranks_each() -> None:
    script = files(GPT, slurm=SlurmOptions(nodes=1))[1].content
    assert "--gpus-per-node=16" in script
    assert "NNODES=1 RANKS_PER_NODE=16" in script


def read_as_sbatch_does(line: str) -> list[str]:
    """Words of an `#SBATCH` line: quotes keep blanks and `#`, a backslash takes the next character, in quotes too."""
    words, word, quote, characters = [], "", "", iter(line)
    for character in characters:
        if character == "\\":
            word += next(characters)
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote = character
        elif character == "#":
            break
        elif character.isspace():
            words.append(word)
            word = ""
        else:
            word += character
    assert not quote
    return [*words, word]


@given(st.lists(LINES, min_size=1, max_size=4))
def test_sbatch_words_keep_every_character(words: list[str]) -> None:
    assert read_as_sbatch_does(" ".join(sbatch_quote(word) for word in words)) == words


@pytest.mark.parametrize(
    "values", [{"nodes": "0"}, {"nodes": "-1"}, {"cpus_per_task": "x"}, {"exclusive": "yes"}, {"extra": "'"}, {"tme": "1"}, {"planner": ""},
               {"qos": "a\nb"}]
)  # fmt: skip
def test_bad_slurm_keys_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        slurm_options(values)
    assert refused.value.key == f"slurm.{next(iter(values))}"


def test_slurm_keys_are_taken_as_written() -> None:
    """No number is made of what looks like one."""
    options = slurm_options({"time": "12:30:00", "account": "0123", "cpus_per_task": "8", "exclusive": "false", "python": "/p"})
    assert (options.time, options.account, options.cpus_per_task, options.exclusive) == ("12:30:00", "0123", 8, False)
    assert (options.python, options.partition) == ("/p", None)
    assert "gpus" not in files(GPT, slurm=slurm_options({"gres": "none"}))[1].content
    assert "#SBATCH --gpus=16\n" in files(GPT, slurm=SlurmOptions(gres="", extra=("--gpus=16",)))[1].content
    for whole in ("gpu:8", "gpu:h100:8", "gpu:a:4,gpu:b:4", "nvme:1"):
        assert f"#SBATCH --gres={whole}\n" in files(GPT, slurm=SlurmOptions(gres=whole))[1].content
    assert "#SBATCH --gpus-per-node=8\n" in files(GPT, slurm=slurm_options({}))[1].content


def test_a_task_of_srun_is_a_rank_and_continues_after_a_restart(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "python")
    write(tmp_path, TINY)
    task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "NNODES": "2", "RANKS_PER_NODE": "2"}
    places = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STARTER": "srun", "CONTINUE": "1", "SLURMD_NODENAME": "n1", **task}
    subprocess.run(["bash", tmp_path / "launch.sh"], check=True, env=places)
    assert read(record, "argv") == ["-m", "orchestrator.workers.megatron", "--plan", "plan.json", "--out", ".", "--continue"]
    assert {"RANK=3", "LOCAL_RANK=1", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2"} <= {*read(record, "env")}
    assert (tmp_path / "logs" / "rank-3.log").read_text().startswith("=== rank 3 on n1, ")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"WANDB_API_KEY": "x"}, "env.WANDB_API_KEY"),
        ({"hf_token": "x"}, "env.hf_token"),
        ({"MASTER_ADDR": "x"}, "env.MASTER_ADDR"),
        ({"A B": "x"}, "env.A B"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "env.CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_variables_that_can_not_be_added_are_refused_and_secrets_not_repeated(values: dict[str, str], key: str) -> None:
    with pytest.raises(InputError) as refused:
        with_environment(GPT, values)
    assert refused.value.key == key
    assert "=x" not in str(refused.value) or key in ("env.MASTER_ADDR", "env.A B")


def test_added_variables_reach_the_script_beside_those_of_the_plan() -> None:
    script = files(with_environment(GPT, {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}))[0].content
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\nexport NCCL_DEBUG=INFO\nexport NCCL_IB_HCA=mlx5_0,mlx5_1\n" in script


OUTSIDE = (Mount(path="/home/me/weights"), Mount(path="/lustre/a b.txt", is_file=True))
"""What a job reads; container.mounts has the first already."""


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_what_the_ranks_read_outside_the_folder_is_mounted_before_it(tmp_path: Path, runtime: Literal["pyxis", "apptainer"]) -> None:
    job = msgspec.structs.replace(GPT, outside=(*OUTSIDE, Mount(path="/scratch", read_only=False)))
    container = ContainerOptions(image="a/b", mounts=("/home",), runtime=runtime)
    (line,) = [line for line in render.job_sbatch(job, SlurmOptions(), container).splitlines() if line.startswith("srun")]
    said = {
        "pyxis": """ --container-mounts='/lustre/a b.txt:/lustre/a b.txt:ro',/scratch:/scratch,"$PWD":"$PWD",/home:/home """,
        "apptainer": """ --bind '/lustre/a b.txt:/lustre/a b.txt:ro' --bind /scratch:/scratch --bind "$PWD" --bind /home """,
    }
    assert said[runtime] in line
    with pytest.raises(InputError, match=r'container.mounts=/a,b: has ":" or ","'):
        render.job_sbatch(msgspec.structs.replace(GPT, outside=(Mount(path="/a,b"),)), SlurmOptions(), container)


@pytest.mark.parametrize(
    ("image", "program"), [("a b.sif", "apptainer"), ("/i/a $(touch broken).sqsh", "enroot"), ("nv.io#a/b:1", "docker")]
)
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_the_line_for_one_machine_mounts_the_folder_and_starts_it(
    tmp_path: Path, image: str, program: str, vendor: Literal["nvidia", "amd"]
) -> None:
    record = stub(tmp_path / "bin", program)
    out = "/runs/it's $(touch broken)"
    container = container_options({"image": image, "mounts": "/data:/d:ro,/home", "workdir": "/w"})
    assert container is not None
    (tmp_path / "bin" / "stat").write_text("#!/bin/sh\n[ $3 = /dev/kfd ] && echo 104\n")
    (tmp_path / "bin" / "stat").chmod(0o755)
    line = container_command(msgspec.structs.replace(GPT, vendor=vendor, outside=OUTSIDE), container, out)
    subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    mounts = ["/lustre/a b.txt:/lustre/a b.txt:ro", f"{out}:{out}", "/data:/d:ro", "/home:/home"]
    user = f"{os.getuid()}:{os.getgid()}"
    devices = {
        "nvidia": ["--gpus", "all"],
        "amd": ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "104", "--security-opt", "seccomp=unconfined"],
    }
    flag = {"nvidia": "--nv", "amd": "--rocm"}[vendor]
    words = {
        "apptainer": ["exec", flag, "--bind", mounts[0], "--bind", out, "--bind", "/data:/d:ro", "--bind", "/home", "--pwd", "/w", image],
        "enroot": ["start", *(word for mount in mounts for word in ("--mount", mount)), image],
        "docker": ["run", "--rm", *devices[vendor], "--ipc=host", "--ulimit", "memlock=-1", "--user", user,
                   *(word for mount in mounts for word in ("--volume", mount)), "--workdir", "/w", "nv.io/a/b:1"],
    }  # fmt: skip
    assert read(record, "argv") == [*words[program], "bash", f"{out}/launch.sh"]
    assert not list(tmp_path.rglob("broken"))


@pytest.mark.parametrize(
    "values", [{"mounts": "/a"}, {"image": ""}, {"image": "x", "runtime": "docker"}, {"image": "a\nb"}, {"image": "x", "mount": "/a"}]
)
def test_bad_container_keys_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        container_options(values)
    assert refused.value.key.startswith("container.")


def test_a_job_that_takes_every_gpu_of_its_nodes_takes_them_whole() -> None:
    """Else a shared node gives eight ranks one core. What the user says holds, and a site without GPU accounting is not told anything."""
    whole = render.with_whole_nodes(GPT, SlurmOptions(time="1:00:00"), 8)
    assert "#SBATCH --exclusive" in render.job_sbatch(GPT, whole)
    said = with_environment(GPT, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert render.unsaid(said, whole) == ()
    part = render.with_whole_nodes(GPT, SlurmOptions(), 16)
    assert "--exclusive" not in render.job_sbatch(GPT, part)
    limit, cores = render.unsaid(said, part)
    assert "slurm.time=" in limit
    assert "one core to the one task that starts 8 ranks: slurm.cpus_per_task=" in cores
    assert render.unsaid(said, SlurmOptions(time="1:00:00", cpus_per_task=64)) == ()
    for said in (SlurmOptions(exclusive=False), SlurmOptions(exclusive=True), SlurmOptions(gres="")):
        assert render.with_whole_nodes(GPT, said, 8) == said
    assert render.with_whole_nodes(TINY, SlurmOptions(), 4) == SlurmOptions()
    assert render.with_whole_nodes(GPT, SlurmOptions(nodes=4), 8).exclusive is False


def test_what_a_site_gives_each_gpu_is_asked_for_in_either_style_and_by_no_job_without_gpus() -> None:
    site = SlurmOptions(cpus_per_gpu=16, mem_per_gpu="120G", exclusive=False)
    for style in ("torchrun", "srun"):
        script = render.job_sbatch(GPT, msgspec.structs.replace(site, style=style))
        assert "#SBATCH --cpus-per-gpu=16\n#SBATCH --mem-per-gpu=120G\n" in script
        assert not any("core" in line for line in render.unsaid(GPT, msgspec.structs.replace(site, style=style)))
    assert "per-gpu" not in render.job_sbatch(TINY, site)
    for clash in ({"cpus_per_task": 4}, {"mem": "1T"}, {"gres": ""}):
        with pytest.raises(InputError, match="per_gpu"):
            render.job_sbatch(GPT, msgspec.structs.replace(site, **clash))


@pytest.mark.parametrize("text", ["90", "90:30", "12:30:00", "2-12", "2-12:30", "2-12:30:00", "unlimited"])
def test_every_form_of_a_time_limit_that_sbatch_knows_is_taken(text: str) -> None:
    assert slurm_options({"time": text}).time == text


@pytest.mark.parametrize(
    "values", [{"time": "12h"}, {"time": "1:2:3:4"}, {"time": "-5"}, {"mem": "480 GB"}, {"mem": "lots"}, {"mem_per_gpu": "1.5T"}]
)
def test_what_sbatch_would_refuse_is_refused_where_it_is_typed(values: dict[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        slurm_options(values)
    assert refused.value.key == f"slurm.{next(iter(values))}"
    assert refused.value.choices


def test_the_warning_before_the_time_limit_leaves_a_step_and_a_save() -> None:
    """DeepSeek-V3 on 64 H800 nodes: 124 s a step, 9.4 TB of states."""
    long = render.with_warning(SlurmOptions(time="12:00:00"), step_s=124.0, save_s=147.0)
    assert "#SBATCH --signal=B:USR1@580" in render.job_sbatch(GPT, long)
    assert render.with_warning(SlurmOptions(), step_s=1.0, save_s=2.0).warning_s == render.WARNING_S
    assert render.with_warning(SlurmOptions(), step_s=1e5, save_s=2.0).warning_s == render.MOST_WARNING_S
    assert render.with_warning(SlurmOptions(warning_s=30), step_s=124.0, save_s=147.0).warning_s == 30
    with pytest.raises(InputError, match=r"slurm.time=5:00: is no longer than the 580 s before it"):
        render.with_warning(SlurmOptions(time="5:00"), step_s=124.0, save_s=147.0)


def test_whole_nodes_have_all_their_memory() -> None:
    assert "#SBATCH --mem=0" in render.job_sbatch(GPT, SlurmOptions(exclusive=True))
    assert "--mem=0" not in render.job_sbatch(GPT, SlurmOptions(exclusive=True, mem="480G"))
    assert "--mem" not in render.job_sbatch(GPT, SlurmOptions(exclusive=False))


def test_a_registrys_image_is_written_as_pyxis_reads_it() -> None:
    container = ContainerOptions(image="nvcr.io/nvidia/pytorch:26.06-py3")
    assert "--container-image='nvcr.io#nvidia/pytorch:26.06-py3'" in render.job_sbatch(GPT, SlurmOptions(), container)


def test_a_second_launch_in_one_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "HOLD_S", 1)
    write(tmp_path, msgspec.structs.replace(GPT, num_nodes=1, ranks_per_node=1))
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "held-0").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = subprocess.run(["bash", "launch.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == f"launch.sh: another launch.sh trains in this folder ({tmp_path}); a second run needs a folder of its own\n"


def test_a_file_system_without_locks_holds_no_launch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without flock, of which flock(1) says so with status 71."""
    write(tmp_path, msgspec.structs.replace(GPT, num_nodes=1, ranks_per_node=1))
    (tmp_path / "bin").mkdir()
    for name, does in (("flock", "echo 'flock: 9: Function not implemented' >&2; exit 71"), ("torchrun", "echo started; exit 7")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON", raising=False)
    done = subprocess.run(["bash", "launch.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "started\n"), done.stderr


def test_ranks_find_the_modules_of_a_models_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Described from the folder in which the user stands, trained from the run's own: the script says where the first was."""
    place = tmp_path / "it's here"
    place.mkdir()
    (place / "twist.py").write_text("def build(): ...\n")
    monkeypatch.chdir(place)
    job = planning.with_code(msgspec.structs.replace(GPT, num_nodes=1, ranks_per_node=1), "twist:build")
    write(tmp_path / "run", job)
    line = next(line for line in (tmp_path / "run" / "launch.sh").read_text().splitlines() if "PYTHONPATH" in line)
    for before, after in (("", f"{place}"), ("/a:/b", f"{place}:/a:/b")):
        shown = subprocess.run(["bash", "-uc", f'{line}; echo "$PYTHONPATH"'], env={"PYTHONPATH": before}, capture_output=True, text=True,
                               check=True)  # fmt: skip
        assert shown.stdout == f"{after}\n"
    assert planning.with_code(GPT, "json:loads") == GPT, "installed"
    (note,) = planning.with_code(GPT, "nowhere.at.all:build").notes[len(GPT.notes) :]
    assert "nowhere is found neither here nor installed" in note


def allocation(folder: Path, nodes: str = "n[0-1]", **programs: str) -> dict[str, str]:
    """The environment of a job on two nodes, in which `scontrol` answers and `programs` (bash texts) stand for others, srun among them."""
    hosts = "#!/bin/sh\necho \"$@\" >>{0}\n[ $2 = hostnames ] && printf 'n0\\nn1\\n' || echo '  NodeAddr=127.0.0.1 x'\n"
    folder.mkdir(exist_ok=True)
    for name, text in {"scontrol": hosts.format(folder / "scontrol.calls"), "sleep": "#!/bin/sh\nexec /bin/sleep .1\n", **programs}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_CPUS_ON_NODE": "8"}


def test_what_a_site_sets_up_reaches_the_ranks_and_its_failure_ends_the_job(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "srun")
    stub(tmp_path / "bin", "python3")
    setup = 'module() { export LOADED="$1 $2 $MODULEPATH_THAT_IS_NOT_SET"; }\nmodule load cuda/12.8'
    write(tmp_path, GPT, SlurmOptions(setup=setup))
    environment = allocation(tmp_path / "bin")
    subprocess.run(["bash", "job.sbatch"], check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert "LOADED=load cuda/12.8 " in read(record, "env")
    write(tmp_path, GPT, SlurmOptions(setup="source /not/there.sh"))
    done = subprocess.run(["bash", "job.sbatch"], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "slurm.setup failed on" in done.stderr
    assert slurm_options({"setup": "a\nb c"}).setup == "a\nb c"
    with pytest.raises(InputError, match=r"slurm\.setup"):
        slurm_options({"setup": "a\0b"})


@pytest.mark.parametrize(
    ("ranks", "requeued"),
    [
        ("kill -USR1 $PPID; /bin/sleep .3; exit 0", True),
        ("mkdir logs; touch logs/asked; exit 0", True),
        ("mkdir logs; touch logs/asked; kill -TERM $PPID; /bin/sleep .3; exit 143", False),
        ("exit 1", True),
        ("exit 3", False),
        ("exit 0", False),
    ],
)
def test_a_node_without_the_planners_interpreter_loses_no_requeue(tmp_path: Path, ranks: str, requeued: bool) -> None:
    """As orchestrator.finish decides: ranks that were asked to end, or that failed in a way that a restart may mend; not scancel, which
    ends tasks and script by TERM."""
    write(tmp_path, GPT, SlurmOptions(requeue=2, planner="/not/here/python"))
    environment = allocation(tmp_path / "bin", srun=f"#!/bin/bash\n{ranks}\n", python3="#!/bin/sh\nexit 1\n")
    done = subprocess.run(["bash", "job.sbatch"], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "no status.json will be written" in done.stdout
    assert ("requeue 7" in (tmp_path / "bin" / "scontrol.calls").read_text()) is requeued
    assert done.returncode == (75 if requeued else int(ranks.rsplit(maxsplit=1)[-1]))


def test_an_image_without_this_package_is_named_before_the_ranks_start(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "torchrun")
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    write(tmp_path, TINY)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "launch.sh"], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, Path(f"{record}.argv").exists()) == (2, False)
    assert "has no orchestrator" in done.stderr
    write(tmp_path, msgspec.structs.replace(ENTRY, num_nodes=1))  # another program needs it only where it checks
    subprocess.run(["bash", "launch.sh"], check=True, cwd=tmp_path, env=environment)
    assert Path(f"{record}.argv").exists()


def test_a_rank_keeps_to_the_cores_near_its_gpu(tmp_path: Path) -> None:
    """The script's own text, with a folder in place of /sys; nvidia-smi is asked for the second of the GPUs that are visible."""
    core = min(os.sched_getaffinity(0))
    (tmp_path / "sys/bus/pci/devices/0000:0f:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:0f:00.0/numa_node").write_text("1\n")
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text(f"{core}\n")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\n[ "$4" = 6 ] && echo 00000000:0F:00.0\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "logs").mkdir()
    rank = render._rank(GPT).replace("/sys/", f"{tmp_path}/sys/")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": "3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}
    tell = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    allowed = str(sorted(os.sched_getaffinity(0)))
    for added, cores, said in (({}, f"[{core}]", f" on cores {core}, near GPU 0000:0f:00.0,"), ({"BIND": "none"}, allowed, None)):
        subprocess.run(["bash", "-c", rank, "rank", *tell], check=True, cwd=tmp_path, env={**environment, **added})
        log = (tmp_path / "logs" / "rank-3.log").read_text().splitlines()[-2:]
        assert log[1] == cores
        assert render.STARTED.fullmatch(log[0])
        assert said is None or said in log[0]


def test_compilers_caches_are_the_nodes_own_unless_said(tmp_path: Path) -> None:
    record = stub(tmp_path / "bin", "torchrun")
    stub(tmp_path / "bin", "python")
    write(tmp_path, with_environment(TINY, {"TORCHINDUCTOR_CACHE_DIR": "/mine"}))
    subprocess.run(
        ["bash", "launch.sh"], check=True, cwd=tmp_path, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": "/scratch"}
    )
    caches = {name: value for name, _, value in (line.partition("=") for line in read(record, "env")) if name.endswith("CACHE_DIR")}
    assert caches == {"TRITON_CACHE_DIR": f"/scratch/triton-{os.getuid()}", "TORCHINDUCTOR_CACHE_DIR": "/mine"}


def test_nodes_that_get_fewer_ranks_than_priced_are_noted() -> None:
    (line,) = [line for line in render.unsaid(GPT, SlurmOptions(nodes=4)) if line.startswith("slurm.nodes=")]
    assert line == "slurm.nodes=4 puts 4 ranks on a node, and the plan is priced with 8: gpus_per_node=4 plans for it"
    said = "slurm.gres=nvme:1,gpu:h100:12 asks for 12 GPUs of a node, and 8 ranks are there: the others idle"
    assert said in render.unsaid(GPT, SlurmOptions(gres="nvme:1,gpu:h100:12"))
    assert not any(line.startswith("slurm.gres") for line in render.unsaid(GPT, SlurmOptions(gres="gpu:h100:8")))
    for job, nodes in ((GPT, 2), (GPT, None), (TINY, 2)):
        assert not any(line.startswith("slurm.nodes=") for line in render.unsaid(job, SlurmOptions(nodes=nodes)))


def test_the_networks_interface_is_said_or_noted() -> None:
    assert any("NCCL_SOCKET_IFNAME" in note for note in render.unsaid(GPT, SlurmOptions()))
    said = with_environment(GPT, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert not any("NCCL_SOCKET_IFNAME" in note for note in render.unsaid(said, SlurmOptions()))


TASK_ALONE = """#!/bin/bash
# srun under proctrack/cgroup: what it gets goes to the task itself, whose children get nothing
while [[ $1 == --* ]]; do shift; done
SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 "$@" & task=$!
echo "$task" >task
trap 'came=1; kill -USR1 "$task"' USR1
for (( came = 1; came; )); do came=0; status=0; wait "$task" || status=$?; done
exit "$status"
"""
LAUNCHER = """#!/bin/bash
while [[ $1 != --no_python && $1 != --no-python ]]; do shift; done
[[ $2 != --no_local_rank ]] || shift
RANK=0 LOCAL_RANK=0 setsid -w "${@:2}"
"""
LISTENS = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: (open("saved", "w"), os._exit(0)))
open("ready", "w")
time.sleep(60)
os._exit(9)
"""
TWO_NODES = """#!/bin/bash
# srun of an elastic job: its ranks fail while n1 is of them
for word; do case $word in --nodelist=*) export ON=${word#*=} ;; esac; done
case "$*" in
  *launch.sh*) [[ $ON == n0 ]] || { mkdir -p logs; touch logs/failed-7-0-0; exit 1; } ;;
  *heartbeat*) ;;
  *) while [[ $1 == --* ]]; do shift; done; exec "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("vendor", "program", "lines", "kept"),
    [
        ("nvidia", "nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", 1),
        ("amd", "rocm-smi", "card0,0x74a1,0x28", 1),
        ("nvidia", "other", "", 2),
    ],
)
def test_a_node_that_has_lost_a_gpu_is_left_out_of_an_elastic_job(tmp_path: Path, vendor: str, program: str, lines: str, kept: int) -> None:
    """It still starts programs. Without the vendor's program nobody can tell, and both are kept."""
    smi = f"#!/bin/bash\n[[ $ON == n0 ]] && gpus=8 || gpus=7\nfor (( i = 0; i < gpus; i++ )); do echo '{lines}'; done\n"
    planner = '#!/bin/sh\ncase "$2" in *.replan) echo "$4" ;; esac\n'
    environment = allocation(tmp_path / "bin", srun=TWO_NODES, planner=planner, **{program: smi})
    write(tmp_path, msgspec.structs.replace(GPT, vendor=vendor), SlurmOptions(nodes=(1, 2), planner=str(tmp_path / "bin" / "planner")))
    done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ("job.sbatch: 1 of 2 nodes answer with their GPUs: n0" in done.stdout) is (kept == 1), done.stdout + done.stderr
    assert done.returncode == kept - 1


PLANNER = '#!/bin/sh\ncase "$2" in *.replan) echo 1 ;; *.finish) echo "$5" >ended ;; esac\n'


STYLES = {
    "torchrun": (ENTRY, SlurmOptions()),
    "elastic": (ENTRY, SlurmOptions(nodes=(1, 1))),
    "deepspeed": (SCRIPT, SlurmOptions()),
    "srun": (ENTRY, SlurmOptions(style="srun")),
}


def ended_by(tmp_path: Path, style: str, number: signal.Signals, *, to_task: bool, failed: bool = False) -> str:
    """What is told orchestrator.finish of a job whose script, or whose task alone, gets this signal once its rank is ready. `failed`:
    another task of the step has said that it failed."""
    job, options = STYLES[style]
    environment = allocation(tmp_path / "bin", srun=TASK_ALONE, torchrun=LAUNCHER, deepspeed=LAUNCHER, planner=PLANNER)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "listens.py").write_text(LISTENS)
    rank = msgspec.structs.replace(job, program="listens.py", arguments=(), num_nodes=1, ranks_per_node=1, backend="gloo", preflight=False)
    write(tmp_path, rank, msgspec.structs.replace(options, planner=str(tmp_path / "bin" / "planner")))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "failed-7-0-0").touch()  # of an earlier job
    with subprocess.Popen(["bash", "job.sbatch"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as script:
        try:
            wait_for((tmp_path / "ready").exists, 60)
            if failed:
                (tmp_path / "logs" / "failed-7-0-0").touch()
            os.kill(int((tmp_path / "task").read_text()) if to_task else script.pid, number)
            script.wait(60)
        finally:
            script.kill()
    return (tmp_path / "ended").read_text()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("style", STYLES)
def test_a_warning_that_slurm_gives_a_task_alone_reaches_the_ranks(tmp_path: Path, style: str, number: signal.Signals) -> None:
    """And ends neither the task nor a launcher; the ranks are not of its session. USR1 comes through job.sbatch before the time limit, TERM
    to the tasks alone where Slurm preempts the job."""
    assert ended_by(tmp_path, style, number, to_task=number == signal.SIGTERM) == "0\n"
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "logs" / "asked").exists(), "for ranks that the signal does not reach"


def test_a_task_that_is_ended_since_another_failed_ends_at_once(tmp_path: Path) -> None:
    """srun ends the others by TERM too; their ranks wait for the lost one, and could save nothing."""
    assert ended_by(tmp_path, "srun", signal.SIGTERM, to_task=True, failed=True) == "143\n"
    assert not (tmp_path / "saved").exists()
    assert not (tmp_path / "logs" / "asked").exists()
