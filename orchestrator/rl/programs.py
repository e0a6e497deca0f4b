"""What a program of reinforcement learning does beside the passes themselves, which its own timers count to its phases."""

from __future__ import annotations

from math import inf
from typing import Final

from orchestrator.rl.decode import EngineConstants
from orchestrator.rl.job import ProgramName
from orchestrator.units import GB, US
from orchestrator.values import Value


class Program(Value, frozen=True, kw_only=True):
    """How a program keeps the GPUs waiting."""

    engine: EngineConstants = EngineConstants()
    copies_each_phase: bool = False
    """Whether each phase of a model whose states are in host memory brings them and takes them back, as verl does around log-probabilities,
    updates and the transfer of weights (workers/fsdp_workers.py and megatron_workers.py, 0.5); else they go once, around generation."""
    always_offloads: bool = False
    """Whether states leave the GPU wherever generation has it too (slime, --colocate; NeMo RL, grpo.py, refit_policy_generation)."""
    copy_rate: float = inf
    """Bytes/s of a GPU at which the policy's states are copied, where a PCIe link would carry more: memory is not pinned, or pinned anew
    each time (verl, utils/megatron_utils.py; NeMo RL's offload_to_cpu is Megatron-core's, param_and_grad_buffer.py)."""
    driver_rate: float = inf
    """Bytes/s at which a step's samples, padded to the longest there may be, pass the one process that hands them to the ranks (verl's
    DataProto is pickled with torch.save; protocol.py, 0.5)."""
    balances_updates: bool = True
    """Whether each update's tokens are dealt evenly to the ranks; else only a whole step's are, and an update's come as they fall
    (verl, trainer/ppo/ray_trainer.py, _balance_batch)."""


NEMO_RL: Final = "nemo_rl"
UNPINNED: Final = 2 * GB
PROGRAMS: Final[dict[ProgramName, Program]] = {
    NEMO_RL: Program(engine=EngineConstants(sequence_s=90 * US), always_offloads=True, copy_rate=UNPINNED),
    "slime": Program(engine=EngineConstants(sequence_s=90 * US), always_offloads=True, balances_updates=False),
    "verl": Program(copies_each_phase=True, copy_rate=UNPINNED, driver_rate=0.5 * GB, balances_updates=False),
}
"""NeMo RL and slime have engines return the log-probability of each token; slime's states are in pinned memory (torch_memory_saver), and no
phases of it were held against these. verl's rates are fitted to the phases of Qwen2.5-7B under Megatron on 8, 16 and 32 H100
(rl/README.md): what does not shrink with more GPUs tells them from the passes."""
