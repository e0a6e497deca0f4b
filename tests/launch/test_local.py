"""Real torchrun jobs of a small program: what comes back, how fast, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from orchestrator.errors import LaunchError
from orchestrator.job import Job
from orchestrator.launch import local
from orchestrator.launch.local import Metrics, Outcome, last_line, start, write_status
from orchestrator.launch.render import files

PROGRAM = Path(__file__).parent / "rank_program.py"
engines = pytest.mark.engines
SECONDS_TO_END = 10.0
"""Ranks end within seconds of the first dead one: 0.3 s on an idle machine; the gate's may be busy."""
MOMENT_S = 2.0
"""What a killed process has, after its environment is gone and nobody finds it any more, until the kernel says that it has ended."""
PARENT = """
import sys
from pathlib import Path
from test_local import prepared
from orchestrator.launch.local import start, write_status
out = Path(sys.argv[1])
outcome = start(prepared(out, "sleep"), out, saving=lambda: (out / "asked").touch())
write_status(out, outcome)
sys.exit(outcome.exit_status)
"""


def prepared(
    out: Path, *arguments: str, ranks: int = 2, environment: dict[str, str] | None = None,
    launcher: Literal["torchrun", "deepspeed"] = "torchrun",
) -> Job:  # fmt: skip
    """A folder with launch.sh and the program as module `rank_program`."""
    job = Job(name="tiny", module="rank_program", arguments=arguments, environment=environment or {}, files=(), num_nodes=1,
              ranks_per_node=ranks, backend="gloo", launcher=launcher)  # fmt: skip
    out.mkdir(exist_ok=True)
    (out / "rank_program.py").write_bytes(PROGRAM.read_bytes())
    for file in files(job):
        (out / file.path).write_text(file.content)
    return job


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> float:
    """Seconds until `what` holds."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - begin


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def pids(out: Path) -> list[int]:
    return [int((out / f"up-{rank}").read_text()) for rank in range(2)]


@engines
def test_a_run_finishes_and_its_steps_are_followed(tmp_path: Path) -> None:
    out = tmp_path / "a run's folder"
    job = prepared(out, "show", "a 'b' $(c)", environment={"T_NEEDED": "by the plan"})
    (out / "metrics.jsonl").write_text('{"step": 0, "loss": 9.0}\n')
    seen: list[local.Row] = []
    outcome = start(job, out, on_step=seen.append)
    assert (outcome.status, outcome.exit_status) == ("finished", 0)
    assert [row["step"] for row in seen] == [1, 2, 3]
    assert outcome.rows == tuple(seen)
    for rank in range(2):
        head, said = (out / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert head.startswith(f"=== rank {rank} on ")
        assert said == f"rank {rank} is done"
        shown = json.loads((out / f"shown-{rank}.json").read_text())
        assert shown["argv"] == ["show", "a 'b' $(c)"]
        assert shown["cwd"] == str(out)
        assert shown["env"]["T_NEEDED"] == "by the plan"
        assert shown["env"]["HOME"] == os.environ["HOME"]
        assert (shown["env"]["RANK"], shown["env"]["WORLD_SIZE"]) == (str(rank), "2")
        assert shown["env"]["MASTER_ADDR"] == "127.0.0.1"
        assert int(shown["env"]["OMP_NUM_THREADS"]) >= 1


@engines
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["raise"], 1, "ValueError: the batch of rank 1 is empty"),
        (["exit", "7"], 7, "train.seq_length=7: is odd"),
        (["killed"], 137, "ended by SIGKILL (out of memory, or killed by someone)"),
    ],
)
def test_a_dead_rank_ends_the_others_and_its_last_words_come_back(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    job = prepared(tmp_path, *arguments)
    outcome: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcome.append(start(job, tmp_path)))
    thread.start()
    wait_for(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    assert wait_for(lambda: outcome) < SECONDS_TO_END
    thread.join()
    assert (outcome[0].status, outcome[0].exit_status, outcome[0].last_line, outcome[0].rank) == ("failed", status, said, 1)
    assert outcome[0].log == str(tmp_path / "logs" / "rank-1.log")
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), MOMENT_S)


@engines
@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "status", "said", "rank"),
    [
        (["raise"], 1, "ValueError: the batch of rank 1 is empty", 1),
        (["exit", "7"], 7, "a rank ended with status 7; logs/rank-*.log have its last words", None),
        (["killed"], 137, "a rank was ended by SIGKILL (out of memory, or killed by someone)", None),
    ],
)
def test_deepspeeds_launcher_ends_the_others_too(tmp_path: Path, arguments: list[str], status: int, said: str, rank: int | None) -> None:
    outcome = start(prepared(tmp_path, *arguments, launcher="deepspeed"), tmp_path)
    assert (outcome.status, outcome.exit_status, outcome.last_line, outcome.rank) == ("failed", status, said, rank)
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), MOMENT_S)


@engines
def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path: Path) -> None:
    begin = time.monotonic()
    outcome = start(prepared(tmp_path, "deaf"), tmp_path, grace_s=1.0)
    assert time.monotonic() - begin < 15, "torchrun alone waits 30 s"
    assert (outcome.status, outcome.exit_status, outcome.rank) == ("failed", 1, 1)
    assert outcome.last_line == "ValueError: the batch of rank 1 is empty"
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), MOMENT_S)


@engines
@pytest.mark.parametrize(("launcher", "most"), [("torchrun", 1), pytest.param("deepspeed", 4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals, status: int, launcher: str, most: int) -> None:
    """Ctrl-C is answered with a status; kill -9 of the parent leaves no orphan."""
    program = PARENT.replace('"sleep")', f'"sleep", launcher="{launcher}")')
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parent)
    wait_for(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    time.sleep(0.2)
    parent.send_signal(number)
    assert parent.wait(most * SECONDS_TO_END) == status
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), SECONDS_TO_END)
    if number == signal.SIGINT and launcher == "torchrun":
        written = json.loads((tmp_path / "status.json").read_text())
        assert (written["status"], written["error"], written["steps"]) == ("interrupted", "ended by SIGINT", 3)


@engines
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR1], [signal.SIGINT, signal.SIGINT]])
def test_a_first_signal_asks_ranks_that_can_to_save_and_a_second_ends_them(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """Ranks that are deaf to the question end by the second signal."""
    ranks = '"saves"' if len(numbers) == 1 else '"saves", "deaf"'
    parent = subprocess.Popen([sys.executable, "-c", PARENT.replace('"sleep"', ranks), str(tmp_path)], cwd=Path(__file__).parent)
    wait_for(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    parent.send_signal(numbers[0])
    wait_for((tmp_path / "asked").exists)
    if len(numbers) > 1:
        time.sleep(0.3)
        assert parent.poll() is None
        parent.send_signal(numbers[1])
    assert parent.wait(SECONDS_TO_END) == (75 if len(numbers) == 1 else 130)
    written = json.loads((tmp_path / "status.json").read_text())
    said = ("stopped", "ended as asked, nothing saved") if len(numbers) == 1 else ("interrupted", "ended by SIGINT")
    assert (written["status"], written["error"]) == said
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), SECONDS_TO_END)


@engines
def test_killing_torchrun_leaves_no_orphan(tmp_path: Path) -> None:
    job = prepared(tmp_path, "sleep")
    outcome: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcome.append(start(job, tmp_path)))
    thread.start()
    wait_for(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    rank_0 = Path(f"/proc/{pids(tmp_path)[0]}/stat").read_text().rsplit(")", 1)[1].split()
    os.kill(int(rank_0[1]), signal.SIGKILL)
    thread.join(SECONDS_TO_END)
    assert (outcome[0].status, outcome[0].exit_status, outcome[0].last_line) == ("failed", 137, "torchrun was ended by SIGKILL")
    wait_for(lambda: all(ended(pid) for pid in pids(tmp_path)), MOMENT_S)


@pytest.mark.parametrize("started_by", ["TORCHELASTIC_RUN_ID", "CROSS_SIZE", None])
def test_a_rank_ends_with_the_launcher_that_started_it(started_by: str | None, tmp_path: Path) -> None:
    """Also where no command of ours watches: the kernel ends it, even where it waits in a collective. One that was started by hand goes
    on."""
    rank = "import pathlib, time; from orchestrator.workers import orphans; orphans.end_with_launcher(); "
    rank += "pathlib.Path('up').touch(); time.sleep(60)"
    launcher = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); sys.stdin.read()"
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2])} | ({} if started_by is None else {started_by: "1"})
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher, rank], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_for((tmp_path / "up").exists)
        parent.kill()
        parent.wait()
        if started_by is None:
            time.sleep(0.5)
            assert not ended(pid)
        else:
            wait_for(lambda: ended(pid), SECONDS_TO_END)
    finally:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)


@engines
def test_two_runs_on_one_machine_do_not_clash(tmp_path: Path) -> None:
    jobs = {name: prepared(tmp_path / name, "finish") for name in ("one", "two")}
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda n=name, j=job: outcomes.append(start(j, tmp_path / n))) for name, job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outcome.status for outcome in outcomes] == ["finished", "finished"]


def test_a_launch_that_never_gets_to_torchrun_says_why(tmp_path: Path) -> None:
    outcome = start(prepared(tmp_path), tmp_path, python="/no/such/python")
    assert (outcome.status, outcome.exit_status) == ("failed", 127)
    assert "/no/such/python: No such file or directory" in str(outcome.last_line)
    assert outcome.log == str(tmp_path / "logs" / "launch.log")
    (tmp_path / "launch.sh").unlink()
    with pytest.raises(LaunchError, match=r"no launch\.sh"):
        start(prepared(tmp_path / "other"), tmp_path)


def test_the_rank_that_failed_first_is_named_not_the_one_that_lost_its_peer(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    report = ""
    said = {
        0: "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
        1: "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        2: "[rank2]: ValueError: later than rank 1",
        3: "ended by torchrun",
    }
    for index, (rank, line) in enumerate(said.items()):
        log = tmp_path / "logs" / f"rank-{rank}.log"
        log.write_text(f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File x\n{line}\n")
        os.utime(log, (100 + index, 100 + index))
        report += f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : 1 (pid: 5{rank})\n"
    launch_log = tmp_path / "logs" / "launch.log"
    os.utime(tmp_path / "logs" / "rank-3.log", (1, 1))
    launch_log.write_text("W1120 api.py:1028] Sending process 53 closing signal SIGTERM\n" + report)
    failure = local.describe_failure(tmp_path, launch_log, 1)
    assert (failure.status, failure.said, failure.log.name, failure.rank) == (1, said[1].removeprefix("[rank1]: "), "rank-1.log", 1)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", None),
        ("a\nb\n\n", "b"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'a'\n\nDuring handling of the above exception, another occurred:\n\n"
         "Traceback (most recent call last):\n  File\nTypeError: b\n[W1 warning] store closed\n", "TypeError: b"),
        ("Traceback (most recent call last):\n  File\n    x", "x"),
    ],
)  # fmt: skip
def test_last_line_is_that_of_the_last_traceback(log: str, line: str | None) -> None:
    assert last_line(log) == line


@pytest.mark.parametrize(
    ("code", "before", "log", "status", "said"),
    [
        (-6, "", "Traceback (most recent call last):\n  File\nValueError: bad\nFatal Python error: Aborted\n", 134, "ValueError: bad"),
        (-9, "", "Traceback (most recent call last):\n  File\nValueError: caught\n", 137,
         "ended by SIGKILL (out of memory, or killed by someone)"),
        (2, "", "Traceback (most recent call last):\n  File\norchestrator.errors.InputError: data=a.csv:2: is no text\n", 2,
         "data=a.csv:2: is no text"),
        (-11, "", 'Fatal Python error: Aborted\n\nCurrent thread 0x7 (most recent call first):\n  File "/a/b.py", line 3 in step\n'
         '  File "/a/b.py", line 9 in main\n', 139, "ended by SIGSEGV, in step (b.py:3)"),
        (-11, "Traceback (most recent call last):\n  File\nValueError: of the run before\n", "", 139, "ended by SIGSEGV"),
        (3, "KeyError: of the run before\n", "", 3, "ended with status 3 and said nothing"),
    ],
)  # fmt: skip
def test_the_cause_is_the_exception_where_there_was_one_in_this_run(
    tmp_path: Path, code: int, before: str, log: str, status: int, said: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text(f"{before}=== rank 0 on here, 2026-01-01T00:00:00Z ===\n{log}")
    launch_log = tmp_path / "logs" / "launch.log"
    launch_log.write_text(f"  rank      : 0 (local_rank: 0)\n  exitcode  : {code} (pid: 50)\n")
    failure = local.describe_failure(tmp_path, launch_log, 1)
    assert (failure.status, failure.said, failure.host) == (status, said, "here")


@pytest.mark.parametrize(
    ("lines", "status", "rank"),
    [
        (["n1: task 2: Exited with exit code 7", "n0: tasks 0-1: Terminated", "n1: task 3: Killed"], 7, 2),
        (["n1: task 3: Killed", "n0: tasks 0-1: Exited with exit code 1"], 137, 3),
        (["n0: tasks 0,2: Exited with exit code 1"], 1, 2),
        (["n1: task 1: Segmentation fault (core dumped)"], 139, 1),
        (["n0: task 0: Exited with exit code 1", "n1: task 3: Killed", "n1: task 2: Exited with exit code 1"], 137, 3),
        (["n0: task 0: Exited with exit code 1", "n0: task 1: Terminated"], 1, 0),
    ],
)
def test_the_first_task_that_srun_names_is_the_rank_that_failed(tmp_path: Path, lines: list[str], status: int, rank: int) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(4):
        said = "RuntimeError: Connection closed by peer" if number == 0 else "OSError: disk"
        (tmp_path / "logs" / f"rank-{number}.log").write_text(f"=== rank {number} on n{number // 2}, now ===\n{said}\n")
    log = tmp_path / "slurm.log"
    start = "job 7 on n0 n1, rendezvous at 127.0.0.1:1, one task of srun a rank, restart {} of 1\n"
    log.write_text(start.format(0) + "srun: error: n0: task 0: Killed\n" + start.format(1) + "".join(f"srun: error: {x}\n" for x in lines))
    failure = local.describe_failure(tmp_path, log, 1)
    assert (failure.status, failure.rank, failure.host) == (status, rank, f"n{rank // 2}")


TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 21483, "
TAKEN += "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
ENDED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
LOST = "torch.distributed.DistNetworkError: Connection reset by peer"


@pytest.mark.parametrize("ends", [[TAKEN, ENDED], [ENDED, TAKEN], [LOST, TAKEN, ENDED]])
def test_the_node_whose_torchrun_failed_says_why_not_those_that_were_ended_for_it(tmp_path: Path, ends: list[str]) -> None:
    log = tmp_path / "slurm.log"
    said = "job 7 on n0 n1, rendezvous at 127.0.0.1:1, torchrun on each node, restart 0 of 1\n"
    said += "".join(f"Traceback (most recent call last):\n  File x\n    f()\n{end}\n" for end in ends)
    said += "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Terminated\n"
    log.write_text(said)
    failure = local.describe_failure(tmp_path, log, 143)
    assert failure.said.startswith("the rendezvous port 21483 on node 0 is taken by another program; start it again")
    assert (failure.status, failure.rank, failure.host) == (1, None, "n0")


@engines
def test_a_taken_rendezvous_port_is_named_with_what_to_do(tmp_path: Path) -> None:
    prepared(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        places = {"PYTHON": sys.executable, "NNODES": "2", "RANKS_PER_NODE": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(["bash", tmp_path / "launch.sh"], env=os.environ | places | {"MASTER_PORT": str(port)}, capture_output=True,
                              check=False)  # fmt: skip
    (tmp_path / "launch.log").write_bytes(done.stderr)
    failure = local.describe_failure(tmp_path, tmp_path / "launch.log", done.returncode)
    assert failure.status == 1
    assert failure.said.startswith(f"the rendezvous port {port} on node 0 is taken by another program; start it again")
    assert "MASTER_PORT=N" in failure.said


def test_what_python_ignores_and_what_follows_are_no_causes(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\n  File x\n    f()\n"
    log = f"{trace}ValueError: bad\nException ignored in: <function f>\n{trace}RuntimeError: at exit\n{trace}{LOST}\n{trace}{ENDED}\n"
    assert local.traceback_line(log) == "ValueError: bad"
    assert local.traceback_line(f"{trace}{LOST}\n") == LOST


def test_the_watchdogs_verdict_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "hang.json").write_text(json.dumps({"status": 5, "rank": 3, "host": "n1", "said": "step 4 hangs"}))
    failure = local.describe_failure(tmp_path, tmp_path / "slurm.log", 1)
    assert (failure.status, failure.said, failure.rank, failure.host) == (5, "step 4 hangs", 3, "n1")


def test_half_written_metrics_wait_for_their_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    assert metrics.new_rows() == []
    path.write_text('{"step": 1}\nnot json\n[1]\n{"st')
    assert metrics.new_rows() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert metrics.new_rows() == [{"step": 2}]


def test_a_resumed_run_that_drops_later_lines_reports_its_own_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": 3.0}\n{"step": 3, "loss": 2.0}\n')
    metrics = Metrics(path)
    assert metrics.new_rows() == []
    path.write_text('{"step": 1}\n')
    assert metrics.new_rows() == []
    path.write_text('{"step": 1}\n{"step": 2, "loss": 3.1}\n')
    assert metrics.new_rows() == [{"step": 2, "loss": 3.1}]
    with path.open("a") as file:
        file.write('{"step": 3, "loss": 2.1}\n')
    assert metrics.new_rows() == [{"step": 3, "loss": 2.1}]
    assert metrics.new_rows() == []


def test_status_json_says_how_it_ended(tmp_path: Path) -> None:
    outcome = Outcome(status="failed", exit_status=7, started="2026-01-01T00:00:00+00:00", ended="2026-01-01T00:01:00+00:00",
                      last_line="ValueError: x", log="/run/logs/rank-1.log", rank=1, rows=({"step": 4, "loss": 2.5},))  # fmt: skip
    write_status(tmp_path, outcome, predicted_step_time_s=0.5, measured_step_time_s=0.6)
    assert json.loads((tmp_path / "status.json").read_text()) == {
        "status": "failed", "exit_status": 7, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00", "steps": 1,
        "last_loss": 2.5, "error": "ValueError: x", "failed_rank": 1, "log": "/run/logs/rank-1.log", "predicted_step_time_s": 0.5,
        "measured_step_time_s": 0.6, "failed_host": None, "restarts": 0, "preflight": [], "after": [],
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="a small disk needs a mount of its own: unshare")
def test_a_full_disk_is_the_status_of_the_command_and_of_the_run(tmp_path: Path) -> None:
    """A disk of 1 MiB in which the program of the ranks writes until nothing fits."""
    (tmp_path / "job.py").write_text(FILLS)
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs disk && "$0" job.py; status=$?; cat disk/status.json; exit "$status"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, sys.executable]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "mount" in done.stderr and "permission denied" in done.stderr.lower():
        pytest.skip("this machine lets nobody mount")
    assert done.returncode == 5, done.stderr
    status = json.loads(done.stdout)
    assert (status["status"], status["exit_status"]) == ("failed", 5)
    assert "is full" in status["error"] or "No space left" in status["error"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="a machine without a network: unshare")
def test_ranks_are_not_started_where_they_could_not_meet() -> None:
    program = "from orchestrator.launch import local; local.require_loopback()"
    words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip("this machine lets nobody have a network of their own")
    assert "127.0.0.1 can't be reached on this machine" in done.stderr
    local.require_loopback()


FILLS = """
import sys
from pathlib import Path
from orchestrator.launch import local

out = Path("disk")
(out / "fill.sh").write_text("cat /dev/zero >zeros; exit 1")
outcome = local.run_script(out, "fill.sh", environment={})
local.write_status(out, outcome)
sys.exit(outcome.exit_status)
"""
