"""The images of docker/, built here without Docker (.ci/images), train as their own user, and two Slurm nodes train in one.

Needs root on Debian, 20 GB of the disk while it runs, and MEGATRON_LM (tag core_v0.16.1) for the images with Megatron-LM."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from test_slurm_training import SUBMIT, begin, end, metrics, status

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.full,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/etc/debian_version").exists(), reason="images are built as root, on Debian"),
]
ENTER = """
root=$1 place=$2 mounts=$3
shift 3
for (( ; mounts > 0; mounts-- )); do
  from=${1%%:*} to=${1#*:}
  to=${to%%:*}
  mkdir -p "$root$to"
  mount --bind "$from" "$root$to"
  shift
done
mount -t proc proc "$root/proc"
for name in dev sys; do mount --rbind "/$name" "$root/$name"; done
cp /etc/resolv.conf /etc/hosts "$root/etc/"
chroot=$(command -v chroot)
export PATH=/usr/local/bin:/usr/bin:/bin
exec "$chroot" "$root" bash -c 'cd "$1" && shift && exec "$@"' enter "$place" "$@"
"""
"""Enters an image's files, in a mount namespace of its own: their folder, where to stand, how many mounts, these, the command."""
APPTAINER = f"""#!/bin/bash
# Reads apptainer's words, as job.sbatch says them, and enters the image for real; an image is a file that names the folder of its files.
mounts=()
shift
while [[ $1 == --* ]]; do
  case $1 in
    --nv) shift ;;
    --bind) mounts+=("$2"); shift 2 ;;
    --pwd) place=$2; shift 2 ;;
    *) echo "apptainer: $1?" >&2; exit 2 ;;
  esac
done
image=$1
shift
exec unshare --mount bash -c {shlex.quote(ENTER)} enter "$(cat "$image")" "$place" "${{#mounts[@]}}" "${{mounts[@]}}" "$@"
"""

COMPILED = "import torch, deepspeed.ops.adam.cpu_adam_op; from deepspeed.git_version_info import installed_ops as i; assert i['cpu_adam']"
"""DeepSpeed's CPU Adam was compiled with the image: its extension is there, loads, and is what DeepSpeed will take."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folder of each image's files, by its name."""
    folder = tmp_path_factory.mktemp("images")
    try:
        built = subprocess.run([ROOT / ".ci" / "images", folder], stdout=subprocess.PIPE, text=True, check=True, timeout=5400)
        yield {name: Path(files) for name, files in (line.split() for line in built.stdout.splitlines())}
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if slurm_cluster.missing() is not None:
        pytest.skip(str(slurm_cluster.missing()))
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home") as environment:
        yield environment


def inside(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command in the image as its own user, in their home."""
    user = [
        "setpriv",
        "--reuid=1234",
        "--regid=1234",
        "--clear-groups",
        "env",
        "-i",
        "HOME=/home/trainer",
        "PATH=/usr/local/bin:/usr/bin:/bin",
    ]
    words = ["unshare", "--mount", "bash", "-c", ENTER, "enter", str(folder), "/home/trainer", "0", *user, "bash", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.parametrize(
    ("name", "engine"), [("deepspeed", "deepspeed"), ("megatron", "megatron"), ("rocm", "megatron"), ("rocm", "megatron_deepspeed")]
)
def test_the_main_job_trains_in_each_image(images: dict[str, Path], name: str, engine: str) -> None:
    if name not in images:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM, tag core_v0.16.1")
    versions = inside(images[name], "python -m orchestrator.versions")
    assert versions.returncode == 0, versions.stdout + versions.stderr
    if name != "megatron":
        compiled = inside(images[name], f'python -c "{COMPILED}"')
        assert compiled.returncode == 0, compiled.stderr
    done = inside(
        images[name], f"rm -rf run; python -m orchestrator.run recipe=gpt_tiny gpus=4 engine={engine} out=run && cat run/status.json"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert '"status": "finished"' in done.stdout


def test_two_nodes_of_slurm_train_in_an_image(images: dict[str, Path], cluster: dict[str, str], tmp_path: Path) -> None:
    """Nothing of this machine's Python is in the image; srun's words go to a program that reads apptainer's and enters the image."""
    programs, image, out = tmp_path / "bin", tmp_path / "deepspeed.sif", tmp_path / "run"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    image.write_text(str(images["deepspeed"]))
    words = ("recipe=gpt_tiny", "gpus=4", "engine=deepspeed", "train.steps=3", "train.warmup=1")
    where = (f"container.image={image}", f'slurm.setup=export PATH="{programs}:$PATH"')
    code, said = end(begin(out, cluster, *SUBMIT, *where, train=words), 600)
    assert code == 0, said
    assert (status(out)["status"], len(metrics(out))) == ("finished", 3)
