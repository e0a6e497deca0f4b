#!/usr/bin/env bash
# first_gpu.py on a machine that has a GPU, Python 3.12, torch, transformers, accelerate, peft and scipy, and reaches no package registry.
#   tests/benchmarks/first_gpu.sh wheels FOLDER      where a registry is reached, by any Python 3.12: what such a machine lacks (9 MB)
#   tests/benchmarks/first_gpu.sh run FOLDER [WORD ...]   there: installs FOLDER's wheels beside its own packages, runs first_gpu.py WORD ...
# PYTHON names another interpreter than python3. transformer-engine is not among the wheels (276 MB and a compilation): plans are then for
# Megatron's own layers, and FP8 and captured layers are written as refused.
set -euo pipefail
if [[ $# -lt 2 || ${1:-} == --help || ${1:-} == -h ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 2; fi
python=${PYTHON:-python3} verb=$1 folder=$2
shift 2
case $verb in
wheels)
  platforms=()
  for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  fetch() { "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 --dest "$folder" "$@"; }
  fetch 'megatron-core>=0.19,<0.20' msgspec 'omegaconf>=2.4,<3' hjson pydantic annotated-types typing-inspection
  core=$(unzip -p "$folder"/pydantic-2*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==//p')
  fetch "pydantic-core==$core"
  # These two have no wheels of their own; DeepSpeed compiles what it needs where it runs.
  DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --wheel-dir "$folder" antlr4-python3-runtime==4.9.3 'deepspeed>=0.19.8,<0.20'
  du -sh "$folder"
  ;;
run)
  site=${SITE:-/tmp/first_gpu_site}
  [ -d "$site" ] || "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"/*.whl
  cd "$(dirname "$0")/../.."
  PYTHONPATH=$site:$PWD exec "$python" tests/benchmarks/first_gpu.py "$@"
  ;;
*)
  echo "$verb: no verb here; wheels or run" >&2
  exit 2
  ;;
esac
