"""What can be checked of the images without building them; tests/launch/test_images_train.py builds them."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.engines.megatron_versions import RELEASES, unknown

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*[a-z]"))
DOCKERFILES = [path for path in DOCKERFILES if path.suffix != ".dockerignore"]
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "COPY", "ENV", "USER", "WORKDIR", "HEALTHCHECK", "CMD"}
each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def parse(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest), continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(words[0], words[1]) for words in found]


def sources(path: Path) -> list[str]:
    return [word for name, rest in parse(path) if name == "COPY" for word in shlex.split(rest)[:-1]]


def test_there_are_two_images_for_nvidia_and_one_for_amd() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.deepspeed", "Dockerfile.megatron", "Dockerfile.rocm"]


@each
def test_every_instruction_is_one_and_every_file_that_is_copied_exists(path: Path) -> None:
    assert {name for name, _ in parse(path)} <= INSTRUCTIONS
    assert sources(path)
    for source in sources(path):
        assert (ROOT / source).exists(), source


@each
def test_the_context_is_what_is_copied_and_nothing_else(path: Path) -> None:
    rules = [line for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*", "nothing by default"
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(set(sources(path)))
    size = sum(file.stat().st_size for source in sources(path) for file in [*(ROOT / source).rglob("*"), ROOT / source]
               if file.is_file() and not any(fnmatch.fnmatch(str(file), pattern) for pattern in ("*__pycache__*", "*.pyc")))  # fmt: skip
    assert size < 10 * 2**20


@each
def test_the_image_runs_as_a_user_and_looks_after_its_health(path: Path) -> None:
    names = [name for name, _ in parse(path)]
    users = [rest for name, rest in parse(path) if name == "USER"]
    assert users == ["${USER_ID}"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    health = next(rest for name, rest in parse(path) if name == "HEALTHCHECK")
    assert '"python", "-m", "orchestrator.versions"' in health


@each
def test_versions_are_pinned_and_those_of_the_package(path: Path) -> None:
    text = path.read_text()
    engines = (ROOT / "setup.cfg").read_text()
    for pinned in re.findall(r"ARG DEEPSPEED_VERSION=(\S+)", text):
        assert f"deepspeed>={pinned},<" in engines
    for tag in re.findall(r"ARG MEGATRON_LM_TAG=(\S+)", text):  # the images have Python 3.12, for which setup.cfg takes the newest
        assert tag == RELEASES[-1].tag
    assert re.search(r"BASE_IMAGE=\S+:v?[0-9]", text), "no moving tag"
    assert "https" not in text.replace("https://github.com/NVIDIA/Megatron-LM.git", "")


def test_the_install_script_passes_shellcheck() -> None:
    subprocess.run(["bash", "-n", ROOT / "docker" / "install.sh"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / "docker" / "install.sh"], check=True)
    for path in DOCKERFILES:
        if shutil.which("hadolint"):
            subprocess.run(["hadolint", path], check=True)


@pytest.mark.engines
def test_the_health_check_imports_the_engines_and_prints_their_versions() -> None:
    done = subprocess.run([sys.executable, "-m", "orchestrator.versions"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.search(r"^megatron\.core (\S+)$", done.stdout, re.MULTILINE)
    assert said is not None
    assert unknown(said[1]) is None
    assert re.search(r"^deepspeed 0\.19\.8", done.stdout, re.MULTILINE)
