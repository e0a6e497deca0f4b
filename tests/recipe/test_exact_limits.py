"""What is just allowed, and what is just not: sizes, depths, shares and bytes at their limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import key as quantities
from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Gpu
from orchestrator.recipe import supervised
from orchestrator.recipe.help import kind
from orchestrator.recipe.keys import KEYS
from orchestrator.recipe.read import read_yaml
from orchestrator.recipe.sources import read_text, split_of
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)


def settings(*words: str) -> recipe.Settings:
    return recipe.load(words, NO_GPU, ("megatron", "deepspeed"))


def test_a_recipe_has_at_most_a_million_bytes(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * 1_000_000)
    assert len(read_text(path)) == 1_000_000
    path.write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match="larger than 1000000 bytes"):
        read_text(path)
    assert len(read_text(path, None)) == 1_000_001


@pytest.mark.parametrize("levels", [8, 9])
def test_a_file_is_nested_eight_levels_deep_at_most(levels: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "{a: " * (levels - 1) + "1" + "}" * (levels - 1))
    if levels == 8:
        assert json.dumps(read_yaml(path)).count("{") == 8
        return
    with pytest.raises(InputError, match="line 1: is nested deeper than 8 levels"):
        read_yaml(path)


def test_a_million_gpus_are_a_job_and_one_more_is_a_slip() -> None:
    assert KEYS["gpus"].high == 1_000_000
    assert KEYS["pin.dp"].high == 1_000_000
    with pytest.raises(InputError, match="must be at most 1000000"):
        settings("recipe=gpt_tiny", "gpus=1000001")


def test_the_first_share_is_for_training_and_the_others_may_be_nothing() -> None:
    assert split_of("data.split", "1,0") == (1.0, 0.0)
    assert split_of("data.split", ["98", "0", "2"]) == (98.0, 0.0, 2.0)
    for wrong in ("0,1", "1,-1", "1", "1,1,1,1"):
        with pytest.raises(InputError):
            split_of("data.split", wrong)


def test_all_of_a_gpus_memory_may_be_used_and_not_all_of_it_kept_free() -> None:
    words = ("recipe=gpt_tiny", "gpus=8", "cluster=dgx_a100_80gb")
    whole = GPUS["A100-SXM-80GB"].memory
    assert settings(*words).limit.limit == whole
    assert settings(*words, f"memory.limit_gib={whole / GIB:.12f}").limit.limit == whole
    with pytest.raises(InputError, match="is more than a A100-SXM-80GB has"):
        settings(*words, f"memory.limit_gib={whole / GIB + 0.001}")
    assert settings(*words, "memory.limit_gib=10", "memory.reserve_gib=9.5").limit.usable == GIB // 2
    with pytest.raises(InputError, match=r"leaves nothing of 10\.0 GiB"):
        settings(*words, "memory.limit_gib=10", "memory.reserve_gib=10")


def test_a_chat_is_reckoned_with_five_tokens_around_each_message_and_four_bytes_a_token(tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", tmp_path / "tok"
    folder.mkdir()
    messages = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 41}]
    path.write_text(json.dumps({"messages": messages}) + "\n\n")
    assert [one.tokens for one in supervised.counted(str(path), str(folder)).samples] == [10 + 11 + 2 * 5]
    path.write_text(json.dumps({"prompt": "a" * 40, "completion": "bc"}) + "\n")
    assert [one.tokens for one in supervised.counted(str(path), None).samples] == [43], (
        "without a tokenizer a byte is a token, with one for the end"
    )
    path.write_text("\n")
    with pytest.raises(InputError, match="has no sample"):
        supervised.counted(str(path), None)


def test_a_chosen_length_is_a_multiple_of_64_and_no_longer_than_the_positions() -> None:
    assert [supervised.chosen_length([n], 4096) for n in (1, 64, 65, 4096, 4097)] == [64, 64, 128, 4096, 4096]
    assert supervised.chosen_length([100], 100) == 100


def test_a_sample_that_just_fits_is_not_cut() -> None:
    found = supervised.lengths([8, 8, 9], 8)
    assert (found.cut, found.longest, found.mean) == (1, 9, 8.0)
    assert found.lost == pytest.approx(1 / 25)


def gpu(capability: str) -> Gpu:
    return replace(GPUS["H100-SXM-80GB"], compute_capability=capability)


def test_what_a_generation_can_begins_with_its_first_and_ends_before_the_next() -> None:
    assert [gpu(name).has_mxfp8 for name in ("9.0", "9.9", "10.0", "10.3", "11.0", "12.0", "12.1")] == [
        False, False, True, True, True, False, False,
    ]  # fmt: skip
    assert [gpu(name).has_fused_attention for name in ("7.0", "7.5", "8.0", "8.6")] == [False, False, True, True]


def test_a_gpu_covers_itself_and_none_that_has_more_of_anything() -> None:
    mine = GPUS["A100-SXM-80GB"]
    assert mine.covers(mine)
    assert not mine.covers(replace(mine, memory=mine.memory + 1))
    assert not mine.covers(replace(mine, memory_bandwidth=mine.memory_bandwidth * 1.001))
    assert not mine.covers(replace(mine, peak_flops=mine.peak_flops | {"fp8": 1.0}))
    assert not mine.covers(replace(mine, peak_flops={name: 1.001 * peak for name, peak in mine.peak_flops.items()}))
    assert mine.covers(replace(mine, peak_flops={"bf16": 1.0}, memory=1))


def test_a_key_says_what_its_value_is_made_of() -> None:
    """As many numbers as it has; of texts without an end one."""
    assert kind(tuple[float, float]) == "number,number"
    assert kind(tuple[str, ...]) == "text"
    assert kind(bool | None) == "true or false"
    assert kind(dict[str, str]) == "mapping (YAML only)"


@pytest.mark.parametrize(
    ("units", "least", "times", "names"),
    [
        (quantities.SECONDS, 1e-9, 1000, ("ns", "us", "ms", "s")),
        (quantities.BYTES, 1, 1000, ("B", "KB", "MB", "GB", "TB")),
        (quantities.BYTES, 1024, 1024, ("KiB", "MiB", "GiB")),
        (quantities.RATES, 1, 1000, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s")),
        (quantities.RATES, 1e6 / 8, 1000, ("Mbit/s", "Gbit/s", "Tbit/s")),
        (quantities.FLOPS, 1e9, 1000, ("GFLOP/s", "TFLOP/s", "PFLOP/s")),
    ],
)
def test_a_unit_is_a_thousand_of_the_one_below(units: dict[str, float], least: float, times: int, names: tuple[str, ...]) -> None:
    """Bits are an eighth of a byte, and memory counts in 1,024."""
    for power, name in enumerate(names):
        assert quantities.quantity("key", f"3 {name}", units) == pytest.approx(3 * least * times**power, rel=1e-12)
