"""Written files of twelve drawn plans an engine are taken by the programs that they are for: by their own parsers and configuration
classes, in an environment of the test's own. PUBLISHED names a folder with the checkouts of test_published_files.py (at the releases and
commits that each written file names), and beside these

    bridge                      the wheel of megatron-bridge 0.6.2, unpacked (its metadata asks for Python 3.12)
    NVIDIA+Megatron-LM-slime    Megatron-LM at 1dcf0da, which slime's image has
    NVIDIA+Megatron-LM-0.19     Megatron-LM at core_v0.19.0

PROGRAMS names a folder that keeps the environment (900 MB). What is not run: the programs' models, kernels and servers (vLLM, SGLang,
Transformer Engine), which no parser calls, and GPUs; NeMo 2 stands on Megatron-core 0.16.1 in place of the release that its image has, and
its Lightning parts that build a model are absent; Bridge's and NeMo 2's recipe is a stand-in of the same classes, as their own ask Hugging
Face for the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_drawn_ds_configs import drawn as drawn_deepspeed
from test_drawn_plans import drawn as drawn_megatron

from orchestrator.engines import tools
from orchestrator.engines.deepspeed.trainer_files import around
from orchestrator.errors import InputError
from orchestrator.job import File
from orchestrator.plan import Plan
from orchestrator.words.fsdp import SHARDED
from orchestrator.words.tools import TOOLS
from orchestrator.words.trainer import AROUND

pytestmark = pytest.mark.full
FOLDER = os.environ.get("PUBLISHED", "")
NUMBER = 12
WITH = ["transformers==5.8.0", "datasets==4.0.0", "lightning==2.5.5"]
"""Releases that LLaMA-Factory, NeMo-RL and Bridge ask for, with what they need."""
ALONE = [
    "peft==0.20.0", "trl==0.24.0", "hydra-core", "antlr4-python3-runtime==4.9.3", "ray", "torchdata", "tensordict", "pyvers", "orjson",
    "importlib_metadata<9", "zipp", "cloudpickle", "codetiming", "msgpack", "modelscope<1.30", "json_repair", "dacite", "addict",
    "attrdict", "transformers_stream_generator", "mcore-bridge", "nemo_run", "fiddle", "libcst", "catalogue", "inquirerpy", "pfzy",
    "prompt_toolkit", "wcwidth", "torchx", "docstring_parser", "pyre-extensions", "typing_inspect", "mypy_extensions", "typer", "toml",
    "graphviz", "wrapt", "wget", "decorator", "jinja2", "soxr", "lhotse", "braceexpand", "bitsandbytes", "cryptography", "triton",
]  # fmt: skip
"""Packages that the parsers import."""
PATHS = {
    "axolotl": ["axolotl-ai-cloud+axolotl/src"],
    "llama_factory": ["hiyouga+LLaMA-Factory/src"],
    "ms_swift": ["modelscope+ms-swift", "NVIDIA+Megatron-LM-0.19"],
    "verl": ["verl-project+verl"],
    "nemo_rl": ["NVIDIA-NeMo+RL"],
    "slime": ["THUDM+slime", "NVIDIA+Megatron-LM-slime"],
    "bridge": ["bridge", "NVIDIA+Megatron-LM-0.19"],
    "nemo": ["NVIDIA+NeMo"],
}
"""What has a program's parser, in PUBLISHED."""
CASES = [*((name, "megatron") for name in TOOLS), *((name, "deepspeed") for name in dict.fromkeys((*AROUND, *SHARDED)))]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with what the parsers import, before what this one has."""
    if not FOLDER:
        pytest.skip("PUBLISHED names no folder of checkouts")
    folder = Path(os.environ.get("PROGRAMS") or tmp_path_factory.mktemp("programs"))
    interpreter, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = Path(
            subprocess.check_output([interpreter, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True).strip()
        )
        (own / "this_one.pth").write_text(sysconfig.get_paths()["purelib"])
        for packages in (WITH, ["--no-deps", *ALONE]):
            install = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
            asked = subprocess.run(install, check=False, text=True, capture_output=True)
            if asked.returncode:
                pytest.skip(f"the index has not what the programs' parsers import: {asked.stderr.strip().splitlines()[-1]}")
        done.touch()
    return interpreter


def files_of(plan: Plan, name: str) -> list[File]:
    return [around(plan, name)] if tools.is_around(plan, name) else tools.files(plan, tools.written(plan, name))


def said_of(plan: Plan) -> dict[str, Any]:
    """What a program may have of the plan, by the names of program_parsers.py."""
    sizes = {"tp": plan.tp, "pp": plan.pp, "stage": plan.zero_stage, "length": plan.training.seq_length, "lr": plan.training.lr}
    batch = {"micro": plan.micro_batch_size, "batch": plan.global_batch_size, "accumulation": plan.num_microbatches}
    return {**sizes, **batch, "unknown": [], "apart": True, "by words": [plan.micro_batch_size, plan.training.seq_length]}


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_the_program_takes_the_files_of_drawn_plans_as_they_are_meant(name: str, engine: str, python: Path, tmp_path: Path) -> None:
    roots = [Path(FOLDER) / path for path in PATHS[name]]
    if missing := [path for path in roots if not path.exists()]:
        pytest.skip(f"{missing[0]} is not there")
    plans: list[Plan] = []
    paths: list[str] = []
    for plan in drawn_megatron(40 * NUMBER, "0.19.2", seed=34) if engine == "megatron" else drawn_deepspeed(40 * NUMBER, seed=34):
        if len(plans) == NUMBER:
            break
        with suppress(InputError):
            if plan.engine != engine:
                continue
            folder = tmp_path / str(len(plans))
            if tools.is_around(plan, name):  # of supervised samples, which the program has to keep apart
                plan = replace(plan, training=replace(plan.training, task="sft", packing=True))
            files = files_of(plan, name)
            folder.mkdir()
            for file in files:  # NeMo-RL's names its own repository, as its image has it
                (folder / file.path).write_text(file.content.replace("/opt/nemo-rl", f"{FOLDER}/NVIDIA-NeMo+RL"))
            major, minor = plan.cluster.gpu.compute_capability.split(".")
            gpu = {"name": f"NVIDIA {plan.cluster.gpu.name}", "major": int(major), "minor": int(minor)}
            (folder / "gpu.json").write_text(json.dumps(gpu))
            plans.append(plan)
            paths.append(str(folder / files[0].path))
    assert len(plans) == NUMBER
    path = os.pathsep.join(map(str, roots))
    command = [python, Path(__file__).with_name("program_parsers.py"), name, FOLDER, tmp_path, *paths]
    ran = subprocess.run(command, check=False, text=True, capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    taken = [json.loads(line.removeprefix("TAKEN ")) for line in ran.stdout.splitlines() if line.startswith("TAKEN ")]
    assert ran.returncode == 0, f"{ran.stderr[-3000:]}\n{Path(paths[min(len(taken), NUMBER - 1)]).read_text()}"
    for plan, found, file in zip(plans, taken, paths, strict=True):
        meant = said_of(plan)
        assert found == {key: meant[key] for key in found}, Path(file).read_text()
