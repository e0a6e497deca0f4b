"""The training programs that a job names; the only room that imports torch, megatron or deepspeed."""

import warnings

# Said by megatron-core at import, by every rank, once a module: that optional packages are missing. The plan knows (cluster.software).
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*")
