#!/usr/bin/env bash
# gpt_tiny: 4 ranks, planned for 1 node(s) of 4. Output of each rank: logs/rank-N.log
#   bash launch.sh
# PYTHON=/path/to/python chooses the interpreter; without it torchrun and python come from the PATH.
# NNODES x RANKS_PER_NODE may be split in another way; several nodes need NODE_RANK, MASTER_ADDR and, where 29500 is taken, MASTER_PORT.
# STARTER=srun: this is one rank, a task of srun, which numbers it. CONTINUE=1 goes on from the newest checkpoint in this folder.
set -euo pipefail
cd -- "$(dirname -- "$0")"

nnodes=${NNODES:-1}
ranks_per_node=${RANKS_PER_NODE:-4}
if (( nnodes * ranks_per_node != 4 )); then
  echo "launch.sh: the plan needs 4 ranks, but NNODES=$nnodes x RANKS_PER_NODE=$ranks_per_node is another number" >&2
  exit 2
fi

export PYTHONUNBUFFERED=1
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( cores > ranks_per_node ? cores / ranks_per_node : 1 ))}"

# Compilers' caches on this node's own disk: on a shared one the ranks of all nodes wait for each other's locks.
cache=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton-$UID}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor-$UID}"
trap "" USR1  # a warning before the time limit: for the workers, which handle it, not for torchrun, which it would end
mkdir -p logs
place=${NODE_RANK:-${SLURM_NODEID:-0}}
if [[ "${STARTER:-torchrun}" == srun ]]; then
  place=rank-$SLURM_PROCID
fi
if command -v flock >/dev/null; then  # held by all that is started here; the ranks before a restart may still be ending
  exec 9>>"logs/held-$place"
  held=0
  flock -w 20 9 || held=$?
  if (( held == 1 )); then  # another status: this file system has no locks (Lustre mounted without flock)
    echo "launch.sh: another launch.sh trains in this folder ($PWD); a second run needs a folder of its own" >&2
    exit 2
  fi
fi
# shellcheck disable=SC2016  # expanded by the bash of each rank
rank='
TZ=UTC printf "=== rank %s on %s%s, %(%FT%TZ)T ===\n" "$RANK" "${SLURMD_NODENAME:-$HOSTNAME}" "${cores:-}" -1 >>"logs/rank-$RANK.log"
if [[ $RANK == 0 ]]; then
  exec "$@" > >(trap "" INT TERM; exec tee -a logs/rank-0.log) 2>&1
fi
exec "$@" >>"logs/rank-$RANK.log" 2>&1
'
if [[ -n "${PYTHON:-}" ]]; then
  PATH="$(dirname -- "$PYTHON"):$PATH"  # programs that came with it, such as ninja
fi
"${PYTHON:-python}" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('orchestrator') is None)" || {
  status=$?
  (( status > 1 )) || echo "launch.sh: ${PYTHON:-python} on $HOSTNAME has no orchestrator: slurm.python= or PYTHON= names one" \
    "that has, and an image must have it installed (docker/README.md)" >&2
  exit "$(( status > 1 ? status : 2 ))"
}
command=("${PYTHON:-python}" -m orchestrator.workers.megatron --plan plan.json --out .)
if [[ -n "${CONTINUE:-}" ]]; then
  command+=(--continue)
fi

if [[ "${STARTER:-torchrun}" == srun ]]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$ranks_per_node
  exec bash -c "$rank" rank "${command[@]}"
fi
torchrun=(torchrun)
if [[ -n "${PYTHON:-}" ]]; then
  torchrun=("$PYTHON" -m torch.distributed.run)
fi
rendezvous=(--standalone --local-addr 127.0.0.1)  # a free port of its own: two runs on one machine don't clash
if (( nnodes > 1 )); then
  node_rank=${NODE_RANK:-${SLURM_NODEID:-}}
  rendezvous=(--nnodes "$nnodes" --node-rank "${node_rank:?NODE_RANK is not set: the number of this node, from 0}"
    --master-addr "${MASTER_ADDR:?is not set: the address of node 0}" --master-port "${MASTER_PORT:-29500}")
fi
exec "${torchrun[@]}" "${rendezvous[@]}" --nproc-per-node "$ranks_per_node" --no-python bash -c "$rank" rank "${command[@]}"
