"""A Job is the exact list of files, argument vectors and environment that will be started."""

from __future__ import annotations

from typing import Literal

from orchestrator.values import Value


class File(Value, frozen=True, kw_only=True):
    """A text file of the run folder; `path` is relative to it."""

    path: str
    content: str
    executable: bool = False


class Job(Value, frozen=True, kw_only=True):
    """What every rank runs: `python -m <module> <arguments>`, on `num_nodes` x `ranks_per_node` ranks.

    `program`: a user's own script, run in place of the module. `launcher`: what starts the ranks of a node.
    `environment` is what the plan needs (CUDA_DEVICE_MAX_CONNECTIONS and the like), nothing of the submitter's.
    `notes`: what a user should know of the files ("megatron_args.sh: no such file, because ...").
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    files: tuple[File, ...]
    num_nodes: int
    ranks_per_node: int
    backend: str
    """nccl or gloo."""
    notes: tuple[str, ...] = ()
    without_worker: str = ""
    """Why our worker can't run the plan, where only the engine's own program can (`program`)."""
    program: str | None = None
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    preflight: bool = False
    """Before `program`, each rank runs workers/check.py; our worker does so itself."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node
