"""A rank that needs no engine: writes metrics like a worker and then does what its first argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))


def step(number: int) -> None:
    if RANK == 0:
        with Path("metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": number, "loss": 3.0 - number, "step_time_s": 0.01}) + "\n")


def main() -> None:
    traits, value = (*sys.argv[1:], "", "")[:2]
    if traits == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traits = "raise"
    if traits == "saves":
        signal.signal(signal.SIGUSR1, lambda *_: None if value else sys.exit(0))
    for number in range(1, 4):
        step(number)
    Path(f"up-{RANK}").write_text(str(os.getpid()))
    if traits == "show":
        Path(f"shown-{RANK}.json").write_text(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": str(Path.cwd())}))
    if traits in {"finish", "show"}:
        print(f"rank {RANK} is done")
        return
    while not Path("up-0").exists():
        time.sleep(0.02)
    if RANK == 1 and traits == "raise":
        raise ValueError(f"the batch of rank {RANK} is empty")
    if RANK == 1 and traits == "exit":
        print("train.seq_length=7: is odd", file=sys.stderr)
        sys.exit(int(value))
    if RANK == 1 and traits == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    main()
