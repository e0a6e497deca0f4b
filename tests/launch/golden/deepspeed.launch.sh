#!/usr/bin/env bash
# gpt3_175b: 16 ranks, planned for 2 node(s) of 8. Output of each rank: logs/rank-N.log
#   on every node: NODE_RANK=<0..1> MASTER_ADDR=<host of node 0> bash launch.sh
# PYTHON=/path/to/python chooses the interpreter; without it torchrun and python come from the PATH.
# NNODES x RANKS_PER_NODE may be split in another way; several nodes need NODE_RANK, MASTER_ADDR and, where 29500 is taken, MASTER_PORT.
# STARTER=srun: this is one rank, a task of srun, which numbers it. CONTINUE=1 goes on from the newest checkpoint in this folder.
# Ranks are bound to the cores of their GPU's NUMA node; BIND=none leaves them to the system.
set -euo pipefail
cd -- "$(dirname -- "$0")"

nnodes=${NNODES:-2}
ranks_per_node=${RANKS_PER_NODE:-8}
if (( nnodes * ranks_per_node != 16 )); then
  echo "launch.sh: the plan needs 16 ranks, but NNODES=$nnodes x RANKS_PER_NODE=$ranks_per_node is another number" >&2
  exit 2
fi

export PYTHONUNBUFFERED=1

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
set -- "$@" "--local_rank=$LOCAL_RANK"  # as the deepspeed launcher gives it
if [[ ${BIND:-} != none ]] && command -v nvidia-smi >/dev/null && command -v taskset >/dev/null; then
  IFS=, read -ra seen <<<"${CUDA_VISIBLE_DEVICES:-}"
  bus=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader -i "${seen[LOCAL_RANK]:-$LOCAL_RANK}" 2>/dev/null)
  if [[ $bus =~ ^([0-9A-F]+):(.*)$ ]]; then
    printf -v bus "%04x:%s" "$(( 16#${BASH_REMATCH[1]} ))" "${BASH_REMATCH[2],,}"
    numa=$(cat "/sys/bus/pci/devices/$bus/numa_node" 2>/dev/null)
    near=$(cat "/sys/devices/system/node/node$numa/cpulist" 2>/dev/null)
    [[ -n $near ]] && taskset -cp "$near" "$$" >/dev/null 2>&1 && cores=" on cores $near, near GPU $bus"
  fi
fi
TZ=UTC printf "=== rank %s on %s%s, %(%FT%TZ)T ===\n" "$RANK" "${SLURMD_NODENAME:-$HOSTNAME}" "${cores:-}" -1 >>"logs/rank-$RANK.log"
"${PYTHON:-python}" -m orchestrator.workers.check --plan plan.json --out . >>"logs/rank-$RANK.log" 2>&1 || exit "$?"
if [[ $RANK == 0 ]]; then
  exec "$@" > >(trap "" INT TERM; exec tee -a logs/rank-0.log) 2>&1
fi
exec "$@" >>"logs/rank-$RANK.log" 2>&1
'
if [[ -n "${PYTHON:-}" ]]; then
  PATH="$(dirname -- "$PYTHON"):$PATH"  # programs that came with it, such as ninja
fi
command=("${PYTHON:-python}" /my/train.py --deepspeed ds_config.json)

if [[ "${STARTER:-torchrun}" == srun ]]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$ranks_per_node
  exec bash -c "$rank" rank "${command[@]}"
fi
deepspeed=(deepspeed)
if [[ -n "${PYTHON:-}" ]]; then
  deepspeed=("$PYTHON" -m deepspeed.launcher.runner)
fi
node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
port=${MASTER_PORT:-29500}
if (( nnodes == 1 )) && [[ -z "${MASTER_PORT:-}" ]]; then  # a free one: two runs on one machine don't clash
  port=$("${PYTHON:-python}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
if [[ -z "${HOSTFILE:-}" ]]; then  # job.sbatch has the hosts; by hand their order counts, not their names, since each starts its own
  HOSTFILE=logs/hostfile-$node_rank
  for (( node = 0; node < nnodes; node++ )); do
    echo "node-$node slots=$ranks_per_node"
  done >"$HOSTFILE"
fi
# DeepSpeed's launcher does not pass signals on: it gets a process group of its own, which they are sent to.
set -m
"${deepspeed[@]}" --hostfile "$HOSTFILE" --no_ssh --node_rank "$node_rank" --master_addr "${MASTER_ADDR:-127.0.0.1}" \
  --master_port "$port" --no_python --no_local_rank bash -c "$rank" rank "${command[@]}" >&2 &
launcher=$!
trap 'came=TERM; kill -TERM -- "-$launcher" 2>/dev/null || true' TERM INT HUP
came=start
while [[ -n "$came" ]]; do  # while we waited
  came=
  status=0
  wait "$launcher" || status=$?
done
exit "$status"
