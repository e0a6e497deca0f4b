"""A real Slurm of two nodes on this machine, for tests: Debian's slurm-wlm, loopback, no containers, no accounting. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ports import free_port

from orchestrator.launch.local import _end_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait={kill_wait_s}
SlurmdTimeout={timeout_s}
MessageTimeout={message_s}
BatchStartTimeout=120
FirstJobId={first_job}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={port0} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
"""
PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=n[0-1] MaxTime=INFINITE State=UP PriorityTier=2
"""
FREEZER = Path("/sys/fs/cgroup/freezer")
"""What proctrack/cgroup needs of version 1."""
READY_S = 90.0


def missing() -> str | None:
    """Why no Slurm can be started here (.ci/slurm installs it where it may); None: it can."""
    lacking = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacking:
        return f"no {', '.join(lacking)} here (apt-get install -y slurm-wlm munge)"
    return None if os.geteuid() == 0 else "starting slurmd needs root"


def of_our_worker() -> dict[str, str]:
    """This environment without Slurm's variables, and without the checkout of Megatron-LM (.ci/full) whose own loop would train."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "MEGATRON_LM"))}


@contextlib.contextmanager
def slurm(
    folder: Path, timeout_s: int = 300, tracking: str = "linuxproc", grace_s: int = 0, kill_wait_s: int = 5
) -> Iterator[dict[str, str]]:
    """Yields the environment in which Slurm's commands reach it; ends its daemons afterwards. `timeout_s`: a node that does not answer for
    so long is down; a message may take a fifth of it (10 s at least, Slurm's default), since a busy machine answers late. `tracking`: what
    Slurm knows a task's processes by; with pgid a signal reaches those of its process group, not the ranks that torchrun starts, with
    cgroup, Slurm's default, the task alone. `grace_s`: seconds that a job has which one of the partition "urgent" preempts; 0: there is no
    such partition. `kill_wait_s`: seconds from TERM to KILL."""
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    ports = {name: free_port() for name in ("port", "port0", "port1")}
    # The rendezvous port follows from the job's number: two clusters on this machine must not number alike.
    host, first_job = socket.gethostname().split(".")[0], ports["port"] % 9000 + 1
    times = {"timeout_s": timeout_s, "message_s": max(10, timeout_s // 5), "grace_s": grace_s, "kill_wait_s": kill_wait_s}
    text = CONF + PREEMPTION if grace_s else CONF
    conf.write_text(text.format(host=host, folder=folder, first_job=first_job, tracking=tracking, **times, **ports))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")
    environment = of_our_worker() | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munge.pid",
             f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"]  # fmt: skip
    commands = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
    daemons = []
    try:
        for command in commands:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            daemons.append(subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent(), **quiet))  # noqa: PLW1509
            time.sleep(0.5)
        deadline = time.monotonic() + READY_S
        while True:
            shown = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, check=False).stdout
            if shown.split() == ["idle", "2"]:
                break
            assert time.monotonic() < deadline, f"no Slurm after {READY_S} s: {shown}; logs in {folder}"
            time.sleep(0.3)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
        for group in sorted(FREEZER.glob("slurm_n[01]/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
