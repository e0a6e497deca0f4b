"""The training programs that a job names; the only room that imports torch, megatron or deepspeed."""
