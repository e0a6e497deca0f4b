"""Files that nobody writes by mistake: too deep, too long, endless, or no text. Each is refused soon, with one error and little memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from orchestrator import recipe
from orchestrator.audit import formats
from orchestrator.audit.audit import Audit
from orchestrator.cost.calibration import CalibrationFile, Constant, read_file
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.key import BYTES, FLOPS, RATES, SECONDS, quantity
from orchestrator.recipe import supervised
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)
SMALL = ("gpus=4", "cluster=dgx_h100", "train.global_batch_size=8", "train.seq_length=64")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
DOUBLING = "A=aaaaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A\n" * 12 + "python pretrain_gpt.py --num-layers 2 --hidden-size $A\n"
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def audited(text: str, name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        return formats.read(text, name)

    return read


def loaded(*words: str, **files: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        for name, content in files.items():
            (folder / name).write_text(content)
        return recipe.load([word.replace("HERE", str(folder)) for word in words], NO_GPU, ("megatron", "deepspeed"))

    return read


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a surrogate pair in a recipe": (loaded("recipe=HERE/a.yaml", **{"a.yaml": 'name: "a\\ud800"\n'}), "half of a surrogate pair"),
    "bytes of a shell that are no text": (loaded("recipe=gpt_tiny", "name=\udcff"), "bytes that are not UTF-8"),
    "a recipe nested 2,000 deep": (
        loaded("recipe=HERE/a.yaml", **{"a.yaml": "a: " + "[" * 2000 + "]" * 2000}),
        "line 1: is nested deeper than 8",
    ),
    "a cluster nested 2,000 deep": (
        loaded("recipe=gpt_tiny", "gpus=4", "cluster=HERE/a.yaml", **{"a.yaml": "a: " + "{a: " * 2000 + "}" * 2000}),
        "line 1: is nested deeper than 8",
    ),
    "a config of 10^9 layers": (
        loaded(*SMALL, "model.hf_config=HERE/a.json", **{"a.json": json.dumps(LLAMA | {"num_hidden_layers": 10**9})}),
        "num_hidden_layers=1000000000: must be an integer above 0, at most 1,000",
    ),
    "a config whose width has 400 digits": (
        loaded(*SMALL, "model.hf_config=HERE/a.json", **{"a.json": json.dumps(LLAMA | {"hidden_size": 10**400})}),
        "must be an integer above 0, at most",
    ),
    "a link's latency of 10^30 s": (
        loaded("recipe=gpt_tiny", "gpus=16", "cluster=dgx_h100", "cluster.levels.infiniband.latency=1e30s"),
        "latency=1e30s: must be from 1e-12 to 0.1 s",
    ),
    "brackets in a chat": (lambda folder: supervised.texts_of(b"[" * 100_000, "a.jsonl:1"), "data=a.jsonl:1: is not JSON"),
    "a YAML of aliases of aliases": (audited(ALIASES, "a.yaml"), "more than 100,000 values"),
    "a YAML that holds itself": (audited("a: &a [*a]\n", "a.yaml"), "nested deeper than 100"),
    "a JSON nested 100,000 deep": (audited('{"a": ' * 100_000, "a.json"), "is not JSON"),
    "half a surrogate pair in a JSON": (audited('{"a": "\\ud800"}', "a.json"), "half of a surrogate pair"),
    "a tag that PyYAML dies of": (audited("a: !!int ''\n", "a.yaml"), "is not YAML"),
    "a script whose variables double": (audited(DOUBLING, "a.sh"), "grow to more than 1,000,000 characters"),
    "a script whose arrays double": (audited("A=(a a)\n" + "A=(${A[@]} ${A[@]})\n" * 40, "a.sh"), "grow to more than"),
    "a script whose functions fan out": (
        audited("".join(f"f{n}() {{\n" + f"f{n + 1} --num-layers 2\n" * 50 + "}\n" for n in range(7)) + "f0\n", "a.sh"),
        "grow to more than",
    ),
    "a script of brackets": (audited("if " * 5000 + "true", "a.sh"), ""),
    "a script of parentheses": (audited("(" * 5000 + "torchrun pretrain_gpt.py" + ")" * 5000, "a.sh"), ""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_soon_and_in_little_memory(case: str, tmp_path: Path) -> None:
    read, said = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()
    assert said in str(caught.value), str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_what_has_no_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(InputError, match="is no regular file"):
            Audit.of(path, {}, NO_GPU)
    large = tmp_path / "large.sh"
    with large.open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(InputError, match="is larger than 1000000 bytes"):
        Audit.of(large, {}, NO_GPU)


def test_a_chat_of_ten_megabytes_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    path.write_text(good + "\n" + json.dumps({"prompt": "a" * 10_000_000, "completion": "b"}) + "\n")
    with pytest.raises(InputError, match=r"a.jsonl:2: is a line of more than 5,000,000 bytes"):
        supervised.counted(str(path), None)


@pytest.mark.parametrize("name", ["gemm_efficiency", "memory_efficiency", "inner_efficiency", "host_adam_bandwidth", "layers_per_message"])
def test_a_calibration_of_zeros_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    constants = {name: Constant(value=0.0, unit="share", origin="fitted")}
    with pytest.raises(ValueError, match=f"{name} is 0, and times are divided by it"):
        calibration(constants)
    path.write_bytes(msgspec.json.encode(calibration({})).replace(b'"constants":{}', b'"constants":' + msgspec.json.encode(constants)))
    with pytest.raises(InputError, match=f"is no calibration: {name} is 0"):
        read_file(path)


def calibration(constants: dict[str, Constant]) -> CalibrationFile:
    return CalibrationFile(
        engine="megatron",
        gpu="H100-SXM-80GB",
        traits="a",
        fitted_on="a run",
        constants=constants,
        fitted_runs=1,
        fitted_median_error=0.0,
        held_out_runs=0,
        held_out_median_error=None,
        interval=None,
    )


@pytest.mark.parametrize(
    ("text", "units"),
    [("1e-30 B/s", RATES), ("1e30 B/s", RATES), ("0.5 B", BYTES), ("1e20 B", BYTES), ("2e6 s", SECONDS), ("1e30 FLOP/s", FLOPS)],
)
def test_a_quantity_beyond_any_computer_is_refused(text: str, units: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be from"):
        quantity("a", text, units)
