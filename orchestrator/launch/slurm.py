"""Slurm: submits `job.sbatch` of a run folder, or runs it inside the allocation that this process is in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from orchestrator.errors import LaunchError
from orchestrator.job import Job, SlurmOptions
from orchestrator.launch.local import GRACE_S, Outcome, Row, Steps, by_step, now, run_script
from orchestrator.values import Value

TIMEOUT_S = 60.0
"""Seconds that Slurm's commands may take: their own message timeout is 10 s and they retry."""
POLL_S = 2.0
"""Seconds between two questions to the controller about a job: sites ask for no more than one a second or so."""
PATIENCE_S = 300.0
"""Seconds without an answer of the controller after which a job is waited for no more: one that restarts is away for minutes; a job that is
over is forgotten after MinJobAge, by default 300 s."""
LIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT",
        "SIGNALING", "STOPPED", "SPECIAL_EXIT"}  # fmt: skip
"""Job states that are not an end (squeue's manual, JOB STATE CODES)."""
ENDED_FROM_OUTSIDE = {"CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE", "REVOKED"}
REASONS = {
    "TIMEOUT": "Slurm: the time limit was reached",
    "CANCELLED": "Slurm: cancelled",
    "PREEMPTED": "Slurm: preempted",
    "NODE_FAIL": "Slurm: a node failed",
    "OUT_OF_MEMORY": "Slurm: out of host memory",
    "DEADLINE": "Slurm: the deadline was reached",
}
"""What states mean that say more than the ranks can."""
ENDING = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "NodeFail": "NODE_FAIL", "Preempted": "PREEMPTED", "Deadline": "DEADLINE"}
"""Reasons of a job that is being ended (slurm/src/common/slurm_protocol_defs.c, job_reason_string)."""
REASON = re.compile(r"\bReason=(\S+)")
STATE = re.compile(r"\bJobState=(\S+)")
EXIT = re.compile(r"\bExitCode=(\d+):(\d+)")
DOWN = re.compile(r"DOWN|FAIL|NO_RESPOND|NOT_RESPONDING")
FAILED_NODE = re.compile(r"\bFailedNode=([^\s(]+)")
NODES = re.compile(r"\bNodeList=(\S+)")
FIELD = re.compile(r"\b(\w+)=(\S*)")
WARNED = re.compile(r"^#SBATCH --signal=B:USR1@(\d+)$", re.MULTILINE)
"""The line of job.sbatch that says how many seconds a step and a save may take."""


class Submitted(Value, frozen=True, kw_only=True):
    """A job in the queue, and what to do with it."""

    job_id: str
    log: str
    watch: str
    cancel: str
    test: str
    """What `sbatch --test-only` said: when and where the job would start."""
    preempted: str = ""
    """Why it would save nothing where Slurm preempts it."""

    def __str__(self) -> str:
        warning = f"\nwarning: {self.preempted}" if self.preempted else ""
        return f"{self.test}\nSubmitted as job {self.job_id}. Watch: {self.watch}. Cancel: {self.cancel}{warning}"


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs inside a Slurm job."""
    return bool(environment.get("SLURM_JOB_ID") and environment.get("SLURM_JOB_NODELIST"))


def _environment(slurm: SlurmOptions) -> dict[str, str]:
    """This process's environment, less the SBATCH_ variables that would outdo what job.sbatch says (sbatch's manual, INPUT ENVIRONMENT
    VARIABLES)."""
    said = {"EXPORT", "JOB_NAME", "OUTPUT", "GPUS_PER_NODE", "GET_USER_ENV"}
    said |= {name.upper() for name in SlurmOptions.__struct_fields__ if getattr(slurm, name) not in (None, False, ())}
    said |= {"TIMELIMIT"} if slurm.time else set()
    return {name: value for name, value in os.environ.items() if name.removeprefix("SBATCH_") not in said or not name.startswith("SBATCH_")}


def _ask(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False, errors="replace")
    except FileNotFoundError:
        raise LaunchError(f"launch=slurm: there is no {command[0]} on the PATH; submit from a host that has Slurm") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"launch=slurm: {command[0]} gave no answer in {TIMEOUT_S:.0f} s") from None


def submit(out: Path, slurm: SlurmOptions | None = None) -> Submitted:
    """Hand `job.sbatch` of the folder to Slurm, asking `sbatch --test-only` first. `slurm`: what the script was made with, if known; then
    no SBATCH_ variable can outdo it. Raises LaunchError with Slurm's message on refusal; then nothing was submitted."""
    out = out.resolve()
    place, script = f"--chdir={out}", str(out / "job.sbatch")
    environment = _environment(slurm or SlurmOptions())
    test = _ask("sbatch", "--test-only", place, script, environment=environment)
    if test.returncode:
        raise LaunchError(f"launch=slurm: sbatch refuses the job: {_said(test)}")
    done = _ask("sbatch", "--parsable", place, script, environment=environment)
    job_id = done.stdout.strip().split(";")[0]
    if done.returncode or not job_id.isdecimal():
        raise LaunchError(f"launch=slurm: sbatch refuses the job: {_said(done)}")
    log = str(out / f"slurm-{job_id}.log")
    return Submitted(
        job_id=job_id, log=log, watch=f"squeue -j {job_id}; tail -F {shlex.quote(log)}", cancel=f"scancel {job_id}", test=_said(test),
        preempted=_preempted(out, job_id),
    )  # fmt: skip


def _preempted(out: Path, job_id: str) -> str:
    """Why this job of the folder would save nothing where jobs of a partition of a higher tier preempt it; "": it is never preempted, or
    saves, or Slurm does not say. What a QOS preempts is not asked for."""
    with contextlib.suppress(LaunchError, OSError, LookupError, ValueError):
        needs_s = int(WARNED.findall((out / "job.sbatch").read_text())[0])
        job, config, shown = (_ask("scontrol", "show", *what).stdout for what in (("job", job_id), ("config",), ("partition",)))
        site = dict(re.findall(r"^(\w+)\s*= *(\S*)", config, re.MULTILINE))
        partitions = [dict(FIELD.findall(one)) for one in shown.strip().split("\n\n")]
        name = dict(FIELD.findall(job))["Partition"]
        own = next(one for one in partitions if one["PartitionName"] == name)
        higher = any(int(one["PriorityTier"]) > int(own["PriorityTier"]) for one in partitions)
        if not higher or site["PreemptType"] != "preempt/partition_prio" or own["PreemptMode"] not in ("REQUEUE", "CANCEL"):
            return ""
        ends = f"Slurm preempts jobs of partition {name} with GraceTime={own['GraceTime']} s, and"
        before = "what was saved before counts (train.save_every=)"
        if int(own["GraceTime"]) < needs_s:
            return f"{ends} a step and a save may take {needs_s} s: {before}"
        if "send_user_signal" not in site.get("PreemptParameters", "") and site["ProctrackType"] != "proctrack/cgroup":
            return f"{ends} {site['ProctrackType']} ends the ranks at once: {before}, or PreemptParameters=send_user_signal of the site"
    return ""


def _said(done: subprocess.CompletedProcess[str]) -> str:
    text = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in (done.stderr or done.stdout).splitlines() if line)
    return text or f"status {done.returncode} without a message"


def state(job_id: str) -> tuple[str, int]:
    """(job state as Slurm calls it, exit status: 128 + signal where one ended it). Raises LaunchError for a job that Slurm has
    forgotten."""
    shown = _ask("scontrol", "show", "job", job_id)
    found, code = STATE.search(shown.stdout), EXIT.search(shown.stdout)
    if found is None:
        raise LaunchError(f"launch=slurm: Slurm knows no job {job_id} any more: {_said(shown)}")
    status, number = (int(code.group(1)), int(code.group(2))) if code else (0, 0)
    return found.group(1), 128 + number if number else status


def failed_nodes(shown: str) -> list[str]:
    """Nodes that failed, of a job as scontrol shows it: the one that Slurm names, or those of the job that it can't reach."""
    named = FAILED_NODE.search(shown)
    if named:
        return [named.group(1)]
    # A job that is being ended loses its failed node from the list; its own script knows them all.
    nodes = os.environ.get("SLURM_JOB_NODELIST") or next(iter(NODES.findall(shown)), "")
    if nodes in ("", "(null)", "None"):
        return []
    with contextlib.suppress(LaunchError):
        lines = [line.split() for line in _ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").stdout.splitlines()]
        return sorted({line[0] for line in lines if len(line) == 2 and (line[1].endswith("*") or DOWN.search(line[1].upper()))})
    return []


def why_ended(job_id: str) -> tuple[str, str] | None:
    """(job state, what to say) where Slurm knows more than the ranks: out of time, cancelled, a node that failed. None otherwise.

    A job that Slurm ends is COMPLETING as long as its script runs; its reason says why, and scancel leaves none.
    """
    try:
        shown = _ask("scontrol", "show", "job", job_id).stdout
    except LaunchError:
        return None
    found, reason = STATE.search(shown), REASON.search(shown)
    if found is None:
        return None
    name = found.group(1)
    down = failed_nodes(shown)
    if name == "COMPLETING":
        name = ENDING.get(reason.group(1) if reason else "", "NODE_FAIL" if down else "CANCELLED")
    elif down and name not in REASONS:
        name = "NODE_FAIL"
    if name == "NODE_FAIL" and down:
        return name, f"{REASONS[name]}: {', '.join(down)}"
    return (name, REASONS[name]) if name in REASONS else None


def wait(
    submitted: Submitted, *, follow: Callable[[], None] = lambda: None, finished: Callable[[], bool] = lambda: False, poll_s: float = POLL_S
) -> tuple[str, int]:
    """Waits until the job has ended: its last state and exit status. `follow` is called at each look. `finished`: whether the run has said
    that it is through; then a job that is COMPLETING counts as completed: Slurm may wait minutes more for a node that it lost
    (SlurmdTimeout, UnkillableStepTimeout). Raises LaunchError where the controller gives no answer for PATIENCE_S."""
    answered = time.monotonic()
    while True:
        try:
            now, status = state(submitted.job_id)
            answered = time.monotonic()
        except LaunchError:
            if time.monotonic() - answered > PATIENCE_S:
                raise
            time.sleep(poll_s)
            continue
        follow()
        if now == "COMPLETING" and finished():
            return "COMPLETED", 0
        if now not in LIVE:
            return now, status if status or now == "COMPLETED" else 1
        time.sleep(poll_s)


def follow(
    submitted: Submitted, out: Path, *, on_step: Callable[[Row], None] = lambda row: None, poll_s: float = POLL_S, own: bool = True
) -> Outcome:
    """Wait for a submitted job, with the steps of metrics.jsonl as they come; how it ended, by the status.json that it leaves or, without
    one (it never started, its node is gone), by Slurm's word. Ctrl-C ends the following, not the job. Raises LaunchError."""
    steps = Steps(out, on_step, own=own)
    started = now()

    def written() -> dict[str, Any]:
        """The status.json that this job has left; empty: none yet, or it is requeued."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads((out / "status.json").read_text())
            if status["ended"] >= started and status["status"] != "requeued":
                return dict(status)
        return {}

    def finished() -> bool:
        return written().get("status") == "finished"

    last, status = wait(submitted, follow=steps.follow, finished=finished, poll_s=poll_s)
    steps.follow(ended=True)
    outcome = Outcome(status="finished", exit_status=0, started=started, ended=now(), log=submitted.log, rows=by_step(steps.rows))
    left = written()
    with contextlib.suppress(KeyError, msgspec.ValidationError):
        if left:
            fields = {name: left[name] for name in ("status", "exit_status", "started", "ended", "log", "restarts")}
            names = {"last_line": left["error"], "rank": left["failed_rank"], "host": left["failed_host"]}
            return msgspec.convert({**fields, **names, "rows": outcome.rows}, Outcome)
    if last == "COMPLETED":
        return outcome
    how: Literal["failed", "interrupted"] = "interrupted" if last in ENDED_FROM_OUTSIDE else "failed"
    said = REASONS.get(last, f"Slurm: {last.lower().replace('_', ' ')}")
    return replace(outcome, status=how, exit_status=status, last_line=said)


def start_in_allocation(
    job: Job,
    out: Path,
    *,
    on_step: Callable[[Row], None] = lambda row: None,
    enough: Callable[[], bool] = lambda: False,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run `job.sbatch` here, inside an allocation: srun starts the ranks on its nodes. Like `local.start`. Raises LaunchError."""
    if not in_allocation():
        raise LaunchError("launch=slurm: this is no Slurm allocation (SLURM_JOB_ID is not set)")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if nodes.isdecimal() and int(nodes) < job.num_nodes:
        raise LaunchError(f"launch=slurm: this allocation has {nodes} of the {job.num_nodes} nodes that the plan needs")
    for program in ("srun", "scontrol"):
        if shutil.which(program) is None:
            raise LaunchError(f"launch=slurm: inside an allocation, but there is no {program} on the PATH")
    return run_script(out, "job.sbatch", environment={}, on_step=on_step, enough=enough, grace_s=grace_s, own=job.program is None)
