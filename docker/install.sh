#!/usr/bin/env bash
# Installs this package with its engines beside the torch that is there already, which stays as it is, with all that was built against it.
#   install.sh SOURCE_FOLDER [EXTRAS]
set -euo pipefail
source_folder=${1:?the folder with setup.cfg}
extras=${2:-engines}
python=${PYTHON:-python3}

torch_version() { "$python" -c 'import importlib.metadata as m; print(m.version("torch"))'; }
triton_version() { "$python" -c 'import triton; print(triton.__version__)' 2>/dev/null || true; }
before=$(torch_version)
triton=$(triton_version)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# What came with the image is held where it is: pip would replace a torch of NVIDIA's or AMD's by the registry's.
"$python" -m pip list --format=freeze \
  | grep -iE '^(torch[a-z]*|pytorch-triton|triton|transformer[-_]engine[a-z0-9_-]*|flash[-_]attn|apex|deepspeed|numpy|nvidia-[a-z0-9-]*)==' \
  > "$constraints"
"$python" -m pip install --no-cache-dir --constraint "$constraints" "${source_folder}[${extras}]"
after=$(torch_version)
if [[ "$before" != "$after" ]]; then
  echo "install.sh: torch was $before and is $after now" >&2
  exit 1
fi
if [[ -n "$triton" && "$triton" != "$(triton_version)" ]]; then
  echo "install.sh: triton was $triton and is $(triton_version) now" >&2
  exit 1
fi
echo "install.sh: torch $after is as it was"
