"""Words and YAML files become settings without a value being touched on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Gpu, Software
from orchestrator.key import RATES, Key, parse, quantity
from orchestrator.recipe.clusters import check_cluster, cluster_from, load_cluster, stored, to_tree
from orchestrator.recipe.keys import KEYS
from orchestrator.recipe.layers import flatten
from orchestrator.recipe.read import read_arguments, read_yaml
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)
ENGINES = ("megatron", "megatron_deepspeed", "deepspeed")


def load(*words: str, machine: Machine = NO_GPU) -> recipe.Settings:
    return recipe.load(words, machine, ENGINES)


def text(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


# ------------------------------------------------------------------------------------------------- values stay as typed


@pytest.mark.parametrize("value", ["12:30:00", "0123", "1_000", "0x10", "1e3", "yes", "null", "[1,2]", "{a: b}", "a=b", "é", " x", "$HOME"])
def test_a_slurm_value_arrives_as_it_was_typed(value: str) -> None:
    assert load("recipe=gpt_tiny", f"slurm.account={value}").slurm.account == value


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda value: "${" not in value and value.strip()))
def test_no_text_is_changed_on_the_way_to_the_settings(value: str) -> None:
    assert read_arguments([f"slurm.extra={value}"]) == {"slurm": {"extra": value}}


def test_yaml_scalars_stay_strings_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    text(path, "slurm:\n  time: 12:30:00\n  account: 0123\n  qos: yes\ndata: null\n")
    assert read_yaml(path) == {"slurm": {"time": "12:30:00", "account": "0123", "qos": "yes"}, "data": None}


def test_numbers_are_read_in_the_usual_ways() -> None:
    settings = load("recipe=gpt_tiny", "train.lr=3e-4", "train.betas=[0.8, 0.9]", "train.min_lr=0", "train.steps=1_000", "train.eps=1E-6")
    training = settings.training
    assert (training.lr, training.betas, training.min_lr, training.steps, training.eps) == (3e-4, (0.8, 0.9), 0.0, 1000, 1e-6)


def test_recompute_none_is_a_choice_and_null_is_no_choice() -> None:
    assert load("recipe=gpt_tiny", "pin.recompute=none").pins.recompute == "none"
    assert load("recipe=gpt_tiny", "pin.recompute=null").pins.recompute is None


def test_pins_get_their_types() -> None:
    words = ("pin.tp=2", "pin.pp=2", "pin.zero_stage=1", "pin.sequence_parallel=true", "pin.offload=false", "pin.layout=Et*2|t*2L")
    pins = load("recipe=gpt_tiny", *words).pins
    chosen = {name: value for name, value in msgspec.structs.asdict(pins).items() if value is not None}
    assert chosen == {"tp": 2, "pp": 2, "zero_stage": 1, "sequence_parallel": True, "offload": False, "layout": "Et*2|t*2L"}


def test_the_keys_of_the_issue_exist_by_these_names() -> None:
    wanted = "recipe cluster gpus gpus_per_node engine out launch seed data plan model.hf_config model.dropout search.budget_s"
    train = (
        "global_batch_size seq_length decoder_seq_length precision optimizer lr min_lr schedule warmup betas weight_decay clip "
        "grad_reduce_dtype grad_accum_dtype steps save_every resume"
    )
    pin = "tp pp vpp cp ep etp dp zero_stage micro_batch_size sequence_parallel recompute layout offload"
    slurm = (
        "partition account qos time nodes nodelist exclude constraint gres cpus_per_task mem exclusive reservation dependency "
        "switches segment extra"
    )
    full = wanted.split() + [f"train.{k}" for k in train.split()] + [f"pin.{k}" for k in pin.split()]
    full += [f"slurm.{k}" for k in slurm.split()] + ["memory.limit_gib", "memory.reserve_gib"]
    assert set(full) <= set(KEYS)


# --------------------------------------------------------------------------------------------------------------- layers


def test_the_command_line_wins_over_the_recipe() -> None:
    settings = load("recipe=gpt_tiny", "train.lr=0.5", "model.num_layers=6", "seed=7")
    assert (settings.training.lr, settings.architecture.num_layers, settings.training.seed) == (0.5, 6, 7)
    assert settings.architecture.hidden_size == load("recipe=gpt_tiny").architecture.hidden_size


def test_dropout_stands_for_both_and_a_later_layer_may_refine_it(tmp_path: Path) -> None:
    settings = load("recipe=gpt_tiny", "model.dropout=0.2")
    assert (settings.architecture.hidden_dropout, settings.architecture.attention_dropout) == (0.2, 0.2)
    mine = text(tmp_path / "mine.yaml", Path("recipes/models/gpt_tiny.yaml").read_text().replace("model:", "model:\n  dropout: 0.2"))
    settings = load(f"recipe={mine}", "model.attention_dropout=0")
    assert (settings.architecture.hidden_dropout, settings.architecture.attention_dropout) == (0.2, 0.0)


def hf(tmp_path: Path, **changes: Any) -> str:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    return text(tmp_path / "config.json", json.dumps(config | changes))


def test_a_hugging_face_config_replaces_the_recipes_model(tmp_path: Path) -> None:
    settings = load("recipe=gpt_tiny", f"model.hf_config={hf(tmp_path)}", "model.num_layers=3")
    architecture = settings.architecture
    assert (architecture.family, architecture.num_layers, architecture.query_groups, architecture.vocab_size) == ("llama", 3, 2, 300)
    assert settings.training.lr == load("recipe=gpt_tiny").training.lr


def test_a_hugging_face_config_needs_no_recipe(tmp_path: Path) -> None:
    words = ("train.global_batch_size=8", "train.seq_length=128", "cluster=dgx_h100", "gpus=8")
    settings = load(f"model.hf_config={hf(tmp_path)}", *words)
    assert (settings.recipe, settings.cluster.name, settings.training.seq_length) == (tmp_path.name, "dgx_h100", 128)


# ------------------------------------------------------------------------------------------------------- which cluster

EIGHT = Machine(num_gpus=8, gpu_name="NVIDIA H100 80GB HBM3", catalog_name="H100-SXM-80GB", nvlink=True, host_memory=2**40)


def test_gpus_of_this_machine_are_taken_where_they_are_enough() -> None:
    settings = load("recipe=llama2_7b", "gpus=4", machine=EIGHT)
    assert (settings.cluster.name, settings.cluster.num_gpus, settings.cluster.gpu.name) == ("here", 4, "H100-SXM-80GB")
    assert "this machine has 8" in settings.why_cluster
    assert settings.cluster.levels[0].bandwidth == 450e9


@pytest.mark.parametrize(("gpus", "unit"), [(64, 128), (24, 384)])
def test_the_vocabulary_has_one_size_under_every_layout_that_is_compared(gpus: int, unit: int) -> None:
    """96 heads on 24 GPUs: tp may be 3, and 128 is no multiple of it."""
    settings = load("recipe=gpt3_175b", f"gpus={gpus}")
    assert settings.architecture.num_attention_heads == 96
    assert settings.architecture.make_vocab_size_divisible_by == unit


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.name != "cpu"], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("nvlink", [True, False])
def test_every_gpu_of_the_catalog_makes_a_cluster_here(gpu: Gpu, nvlink: bool) -> None:
    machine = msgspec.structs.replace(EIGHT, catalog_name=gpu.name, gpu_name=gpu.name, nvlink=nvlink)
    cluster = load("recipe=gpt_tiny", "gpus=8", machine=machine).cluster
    slots = gpu.name in ("A10", "A30", "A40", "L4", "L40", "L40S", "H100-NVL") or any(part in gpu.name for part in ("PCIE", "RTX", "die"))
    assert cluster.levels[0].name == ("pcie" if slots or not nvlink else "xgmi" if gpu.vendor == "amd" else "nvlink")


def test_fused_attention_is_not_counted_on_before_ampere_whatever_is_installed() -> None:
    machine = msgspec.structs.replace(EIGHT, transformer_engine=True, flash_attention=True)
    assert load("recipe=gpt_tiny", "gpus=8", machine=machine).cluster.software.transformer_engine
    machine = msgspec.structs.replace(machine, catalog_name="V100-SXM2-32GB", gpu_name="Tesla V100-SXM2-32GB")
    software = load("recipe=gpt_tiny", "gpus=8", machine=machine).cluster.software
    assert not software.transformer_engine
    assert not software.flash_attention


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (NO_GPU, "this machine has no GPU"),
        (EIGHT, "this machine has 8 of the 16 GPUs"),
        (msgspec.structs.replace(EIGHT, catalog_name=None, gpu_name="Voodoo 3", num_gpus=64), "Voodoo 3, of this machine, is not"),
        (msgspec.structs.replace(EIGHT, catalog_name=None, gpu_name=None, num_gpus=64), "several types"),
    ],
)
def test_else_the_recipes_cluster_and_the_reason_is_said(machine: Machine, why: str) -> None:
    settings = load("recipe=t5_large", "gpus=16", machine=machine)
    assert settings.cluster.name == "dgx_a100_40gb"
    assert why in settings.why_cluster


def test_a_cluster_that_was_asked_for_is_taken_whatever_is_here() -> None:
    settings = load("recipe=llama2_7b", "gpus=8", "cluster=dgx_b200", machine=EIGHT)
    assert (settings.cluster.name, settings.why_cluster) == ("dgx_b200", "cluster dgx_b200, 8 x B200: asked for")


def test_memory_is_the_gpus_less_a_reserve_unless_said_otherwise() -> None:
    settings = load("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100")
    assert settings.limit.limit == settings.cluster.gpu.memory
    settings = load("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100", "memory.limit_gib=40", "memory.reserve_gib=0")
    assert (settings.limit.limit, settings.limit.reserve) == (40 * GIB, 0)


# ---------------------------------------------------------------------------------------------------------- own files

TEN_LINES = """\
gpu: {name: X1, memory: 40 GiB, memory_bandwidth: 1.5 TB/s, peak_flops: {bf16: 200 TFLOP/s, fp32: 20 TFLOP/s}}
gpus_per_node: 6
levels:
- {name: fabric, size: node, bandwidth: 200 GB/s, latency: 2 us}
- {name: rack, size: 24, bandwidth: 100 Gbit/s, latency: 4 us}
- {name: core, size: unlimited, bandwidth: 50 Gbit/s, latency: 9 us}
host_bandwidth: 25 GB/s
host_memory: 100 GB
"""


def test_your_own_cluster_in_ten_lines(tmp_path: Path) -> None:
    assert len(TEN_LINES.splitlines()) <= 10
    path = text(tmp_path / "mine.yaml", TEN_LINES)
    cluster = load_cluster(path, 30)
    assert (cluster.name, cluster.gpu.memory, [level.size for level in cluster.levels]) == ("mine", 40 * GIB, [6, 24, 48])
    assert cluster.levels[1].bandwidth == 12.5e9
    assert load("recipe=llama2_7b", f"cluster={path}", "gpus=30").cluster == cluster


@pytest.mark.parametrize(
    ("peaks", "capability", "fused"),
    [
        ("bf16: 1 TFLOP/s, fp8: 2 TFLOP/s", "8.9", True),
        ("bf16: 1 TFLOP/s", "8.0", True),
        ("fp16: 1 TFLOP/s", "7.0", False),
    ],
)
def test_a_gpu_of_which_no_capability_is_stated_has_what_its_precisions_need(
    peaks: str, capability: str, fused: bool, tmp_path: Path
) -> None:
    """Otherwise no engine would train the bf16 that it states; and before Ampere neither engine's attention is fused."""
    path = text(tmp_path / "mine.yaml", TEN_LINES.replace("bf16: 200 TFLOP/s, fp32: 20 TFLOP/s", peaks))
    cluster = load_cluster(path, 6)
    assert cluster.gpu.compute_capability == capability
    assert (cluster.software.transformer_engine, cluster.software.flash_attention) == (fused, fused)
    said = text(tmp_path / "said.yaml", Path(path).read_text() + "software: {transformer_engine: true}\n")
    assert load_cluster(said, 6).software == Software(flash_attention=fused)


@pytest.mark.parametrize("name", stored("clusters"))
def test_a_cluster_written_out_is_the_same_cluster(name: str) -> None:
    cluster = load_cluster(name, 16)
    tree = read_yaml_text(recipe.resolved_yaml(msgspec.structs.replace(load("recipe=gpt_tiny"), cluster=cluster)))
    assert cluster_from(tree["cluster"], "x", "x", 16) == cluster


def read_yaml_text(content: str) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text(content)
        return read_yaml(path)


@settings(deadline=None)  # the machine may be busy
@given(st.floats(min_value=1, max_value=1e18, allow_nan=False))
def test_quantities_survive_in_base_units(value: float) -> None:
    assert quantity("x", f"{value!r} B/s", RATES) == value


@pytest.mark.parametrize("name", stored("models"))
def test_every_recipe_loads_and_its_resolved_form_is_the_same(name: str, tmp_path: Path) -> None:
    settings = load(f"recipe={name}", "slurm.time=12:30:00", "slurm.account=0123", "pin.tp=1", "train.betas=0.9,0.98")
    path = text(tmp_path / "config.yaml", recipe.resolved_yaml(settings))
    again = load(f"recipe={path}", machine=EIGHT)  # the machine does not matter: the cluster is written out
    unsaid = {"why_cluster": "", "packs_unasked": False, "assumed": ()}  # the resolved form says all that was assumed
    assert msgspec.structs.replace(again, **unsaid) == msgspec.structs.replace(settings, **unsaid)


def test_recipes_are_found_in_a_checkout_that_shadows_the_installed_package(tmp_path: Path) -> None:
    """`pip install .` and `python -m orchestrator.run` in the clone: the folder's own package comes first, without its recipes inside."""
    root = Path(recipe.__file__).parents[2]
    for name in ("orchestrator", "recipes"):
        (tmp_path / name).symlink_to(root / name)
    code = "import sys; sys.path[:0] = ['.']; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]; "
    code += "from orchestrator.recipe.clusters import stored; print(len(stored('models')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(stored("models"))


def test_recipes_are_found_from_any_folder(tmp_path: Path) -> None:
    code = "from orchestrator.recipe.clusters import stored; print(len(stored('models')), len(stored('clusters')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    assert [int(n) >= 10 for n in done.stdout.split()] == [True, True]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu=16"], "gpu=16: is no key; did you mean gpus?"),
        (["train.learning_rate=1"], "train.learning_rate=1: is no key"),
        (["lr=1"], "did you mean train.lr?"),
        (["train={}"], "train={}: is a group of keys; write train.KEY=value"),
        (["train=5"], "train=5: is a group of keys"),
        (["gpus=4", "gpus=4"], "gpus=4: is given twice, first as gpus=4"),
        (["out=${oc.env:HOME}"], "out=${oc.env:HOME}: has ${...}"),
        (["gpus"], "gpus: is not key=value"),
        (["--hepl"], "did you mean --help?"),
    ],
)
def test_words_that_can_not_be_taken(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_arguments(words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gpus: 4\ngpus: 5\n", "gpus: line 2: is given twice"),
        ("train:\n  lr: 1\n  lr: 2\n", "train.lr: line 3: is given twice"),
        ("a: [1\n", "is not YAML"),
        ("- a\n- b\n", "is not a YAML mapping"),
        ("", "is empty"),
        ("a: &x 1\nb: *x\n", "aliases are not taken"),
        ("out: ${oc.env:HOME}\n", "out=${oc.env:HOME}: has ${...}"),
        ("gpus: 4\n? [a, b]\n: c\n", "line 2: a key must be a plain word"),
        ("a: " + "[" * 20 + "]" * 20, "nested deeper"),
        ("a: !!python/object:os.system x\n", None),
    ],
)
def test_files_that_can_not_be_taken(tmp_path: Path, content: str, message: str | None) -> None:
    path = tmp_path / "a.yaml"
    text(path, content)
    if message is None:
        assert read_yaml(path) == {"a": "x"}  # a tag is only a tag: nothing is built from it
        return
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_key_of_a_file_is_named_with_the_file() -> None:
    with pytest.raises(InputError) as caught:
        flatten({"train": {"learning_rate": "1"}}, "my.yaml")
    assert str(caught.value).startswith("my.yaml: train.learning_rate=1: is no key")


@pytest.mark.parametrize("word", ["1.5", "0x10", "1e3", "nan", "", " ", "１", "9" * 30, "--1", "1 000", "True"])
def test_what_is_no_whole_number(word: str) -> None:
    with pytest.raises(InputError):
        parse(KEYS["gpus"], word)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e999", "0x1", "1,5", "", "one", "1_0.0"])
def test_what_is_no_number(word: str) -> None:
    with pytest.raises(InputError):
        parse(KEYS["train.lr"], word)


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=20))
def test_any_text_for_any_key_parses_or_is_refused_by_name(word: str) -> None:
    for key in KEYS.values():
        message = refusal(key, word)
        assert message is None or (message.startswith(f"{key.name}=") and "\n" not in message)


def refusal(key: Key, word: str) -> str | None:
    try:
        parse(key, word)
    except InputError as error:
        return str(error)
    return None


def test_to_tree_is_plain_yaml_content() -> None:
    assert to_tree(load_cluster("dgx_h100", 8))["gpu"]["memory"].endswith(" B")


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.name != "cpu"], ids=lambda gpu: gpu.name)
def test_every_gpu_of_the_catalog_is_planned_for_where_it_is_found(gpu: Gpu) -> None:
    for nvlink in (False, True):
        machine = Machine(num_gpus=4, gpu_name=gpu.name, gpu_types=(gpu.name,), catalog_name=gpu.name, nvlink=nvlink, host_memory=2**38)
        cluster = load("recipe=llama_tiny", "train.precision=fp16", machine=machine).cluster
        linked = nvlink and gpu.nvlink > 0
        links = ("nvlink", gpu.nvlink) if gpu.vendor == "nvidia" else ("xgmi", gpu.nvlink * 3 / 7)  # of seven to the other three
        assert (cluster.name, cluster.gpu, cluster.host_bandwidth) == ("here", gpu, gpu.pcie)
        assert (cluster.levels[0].name, cluster.levels[0].bandwidth) == (
            links if linked else ("pcie", gpu.pcie * (0.6 if gpu.name in GEFORCE else 1))
        )


GEFORCE = ("RTX-3090", "RTX-4090", "RTX-5090")
"""Cards without peer-to-peer, whose traffic passes the host's memory."""


@pytest.mark.parametrize("name", ["RTX-3090", "RTX-4090", "RTX-5090", "RTX-A6000", "TITAN-RTX", "L40S", "H100-PCIE-80GB"])
def test_pcie_between_geforce_cards_passes_the_host_s_memory(name: str) -> None:
    """It was the whole slot's, 31.5 GB/s among RTX 4090, of which nccl-tests reach about half."""
    level = {"name": "pcie", "size": "node", "latency": "5 us"}
    tree: dict[str, Any] = {"gpu": name, "gpus_per_node": "4", "host_memory": "64 GB", "host_bandwidth": "pcie"}
    found = cluster_from({**tree, "levels": [{**level, "bandwidth": "pcie"}]}, "c", "c", 4)
    share = 0.6 if name in GEFORCE else 1
    assert found.levels[0].bandwidth == pytest.approx(share * GPUS[name].pcie)
    assert found.host_bandwidth == GPUS[name].pcie
    half = cluster_from({**tree, "levels": [{**level, "bandwidth": "pcie / 2"}]}, "c", "c", 4)
    assert half.levels[0].bandwidth == pytest.approx(share * GPUS[name].pcie / 2)
    assert cluster_from({**tree, "levels": [{**level, "bandwidth": "25 GB/s"}]}, "c", "c", 4).levels[0].bandwidth == 25e9


def test_a_level_takes_the_gpus_own_link(tmp_path: Path) -> None:
    tree = read_yaml(Path(text(tmp_path / "c.yaml", "gpu: A100-SXM-80GB\ngpus_per_node: 8\nhost_memory: 1 GB\nhost_bandwidth: pcie / 2\n"
                               "levels:\n- {name: nvlink, size: node, bandwidth: nvlink, latency: 2 us}\n")))  # fmt: skip
    cluster = cluster_from(tree, "c", "c", 8)
    assert (cluster.levels[0].bandwidth, cluster.host_bandwidth) == (300e9, 15.75e9)
    check_cluster(cluster, "c")
    with pytest.raises(InputError, match="nvlink: is not known of A100-PCIE-40GB: give a number and a unit"):
        cluster_from({**tree, "gpu": "A100-PCIE-40GB"}, "c", "c", 8)
    with pytest.raises(InputError, match="needs a number and a unit"):
        cluster_from({**tree, "host_bandwidth": "pcie / 0"}, "c", "c", 8)


@pytest.mark.parametrize(("said", "value"), [("10M", 1e7), ("2.5M", 2.5e6), ("10k", 1e4), ("10K", 1e4), ("1e6", 1e6), ("0.5", 0.5)])
def test_amounts_of_a_target_may_be_in_short(said: str, value: float) -> None:
    found = load("recipe=llama_tiny", f"target.cost={said}", f"target.tokens_per_s={said}", "cluster.price_per_gpu_hour=2")
    assert (found.targets.cost, found.targets.tokens_per_s) == (value, value)
    with pytest.raises(InputError, match=r"target\.cost=10m: is not a finite number"):
        load("recipe=llama_tiny", "target.cost=10m", "cluster.price_per_gpu_hour=2")


def test_a_recipe_builds_on_the_one_it_names(tmp_path: Path) -> None:
    base = load("recipe=llama_tiny")
    text(tmp_path / "mine.yaml", "recipe: llama_tiny\ntrain:\n  steps: 7\n  warmup: 2\npin: {dp: 2}\n")
    path = text(tmp_path / "longer.yaml", "recipe: mine.yaml\ntrain.warmup: 3\n")
    found = load(f"recipe={path}", "train.seq_length=64")
    assert (found.recipe, found.architecture) == ("longer", msgspec.structs.replace(base.architecture, name="longer"))
    assert (found.training.steps, found.training.warmup, found.training.seq_length, found.pins.dp) == (7, 3, 64, 2)
    assert (found.training.lr, found.cluster) == (base.training.lr, base.cluster)
    resolved = text(tmp_path / "config.yaml", recipe.resolved_yaml(found))
    said = {"why_cluster": "", "batch_of_length": None, "steps_of_tokens": None}  # of where the keys stood
    assert msgspec.structs.replace(load(f"recipe={resolved}"), **said) == msgspec.structs.replace(found, **said)


def test_a_base_that_is_not_there_or_is_built_on_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="recipe=llama_tony: is not known; did you mean llama_tiny"):
        load(f"recipe={text(tmp_path / 'a.yaml', 'recipe: llama_tony')}")
    text(tmp_path / "b.yaml", "recipe: c.yaml")
    with pytest.raises(InputError, match=r"is built on itself: .*b\.yaml on .*c\.yaml on .*b\.yaml"):
        load(f"recipe={text(tmp_path / 'c.yaml', 'recipe: b.yaml')}".replace("c.yaml", "b.yaml"))


@pytest.mark.parametrize("words", [["env.A=1", "env.A.B=2"], ["env.A.B=2", "env.A=1"]])
def test_a_key_is_a_value_or_has_keys_below_it(words: list[str]) -> None:
    with pytest.raises(InputError, match="given as a value"):
        read_arguments(words)


def test_a_field_of_the_cluster_stands_before_or_behind_its_name() -> None:
    words = ["cluster=dgx_h100", "cluster.gpu.memory=90e9"]
    assert read_arguments(words) == read_arguments(words[::-1])


@pytest.mark.parametrize(("path", "name"), [("qwen2-72b/config.json", "qwen2-72b"), ("folder/q72.json", "q72")])
def test_a_run_is_named_after_its_models_file(path: str, name: str, tmp_path: Path) -> None:
    config = tmp_path / path
    config.parent.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
    config.write_text(json.dumps({"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes}))
    train = ("train.global_batch_size=4", "train.seq_length=16")
    assert load(f"model.hf_config={config}", *train, "cluster=cpu", "gpus=2").recipe == name


def test_a_model_of_hugging_faces_cache_has_its_own_name(tmp_path: Path) -> None:
    """There config.json is a link to a file that is called by its digest, in a folder that is called by its commit."""
    folder = tmp_path / "models--acme--Acme-1B" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(Path(hf(tmp_path)).rename(tmp_path / ("f" * 64)))
    train = ("train.global_batch_size=4", "train.seq_length=16")
    assert load(f"model.hf_config={folder / 'config.json'}", *train, "cluster=cpu", "gpus=2").recipe == "Acme-1B"


def test_a_run_s_own_keys_of_a_cluster_stand_in_its_mapping_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: llama3_8b\ncluster: {mtbf: 2000, storage: 20GB/s}\ngpus: 64\n")
    settings = load(f"recipe={path}")
    assert (settings.cluster.name, settings.mtbf_hours, settings.storage_bandwidth) == ("dgx_h100", 2000, 20e9)
    for mapping, said in (
        ("{mtbf: {hours: 3}}", r"run\.yaml: cluster\.mtbf=.*: needs one value"),
        ("{mtbf: soon}", r"run\.yaml: cluster\.mtbf=soon: "),
        (
            "{name: dgx_a100_80gb, host_memory: 1 TB}",
            r"cluster\.name=dgx_a100_80gb: .*: dgx_a100_80gb .* with cluster\.host_memory:",
        ),
    ):
        path.write_text(f"recipe: llama3_8b\ncluster: {mapping}\ngpus: 64\n")
        with pytest.raises(InputError, match=said):
            load(f"recipe={path}")
