"""YAML of accelerate, Hugging Face's Trainer, Megatron-Bridge, NeMo and Megatron-LM becomes a plan, and its changes are diffs of the same
file that say what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit import document, formats
from orchestrator.audit.audit import Audit
from orchestrator.audit.reading import LISTS
from orchestrator.errors import InputError
from orchestrator.model.lora import NF4_BYTES

LLAMA: dict[str, Any] = {"recipe": "llama3_8b", "cluster": "dgx_h100", "gpus": 16}
MODEL = "num_layers: 32\n  hidden_size: 4096\n  num_attention_heads: 32\n  ffn_hidden_size: 11008\n  max_position_embeddings: 4096"

BRIDGE = """\
# overrides of a recipe
model:
  tensor_model_parallel_size: 2   # two ranks
  pipeline_model_parallel_size: 1
  sequence_parallel: true
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
  not_a_field: 3
train:
  global_batch_size: 256
  micro_batch_size: 1
dataset: {seq_length: 8192, path: /data}
checkpoint:
  save: null
  load: /somewhere
mixed_precision: bf16_mixed
"""
NEMO = f"""\
trainer:
  num_nodes: 2
  devices: 8
  precision: bf16
  max_steps: 1000
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 8   # within a node
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  {MODEL}
  kv_channels: null
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  sequence_parallel: ${{model.use_sp}}
  data:
    seq_length: ${{multiply:2, ${{..half}}}}
  half: 2048
  use_flash_attention: true
  optim:
    name: distributed_fused_adam
    lr: 3e-4
    betas: [0.9, 0.95]
    sched: {{name: CosineAnnealing, warmup_steps: 100, min_lr: 3e-5}}
"""
NEMO2 = f"""\
_target_: nemo.collections.llm.pretrain
model:
  config:
    {MODEL.replace(chr(10), chr(10) + "  ")}
    gated_linear_unit: true
    activation_func: {{_target_: torch.nn.functional.silu, _call_: false}}
    normalization: RMSNorm
    add_bias_linear: false
    position_embedding_type: rope
trainer:
  devices: 8
  num_nodes: 2
  max_steps: 100
  strategy:
    tensor_model_parallel_size: 4
    context_parallel_size: 2
    ddp: {{use_distributed_optimizer: true, overlap_grad_reduce: true}}
  plugins: {{precision: bf16-mixed, grad_reduce_in_fp32: true}}
data: {{global_batch_size: 128, micro_batch_size: 1, seq_length: 4096}}
"""
YAML_CFG = f"""\
language_model:
  {MODEL}
  activation_func: swiglu
model_parallel:
  tensor_model_parallel_size: 2
micro_batch_size: 2
global_batch_size: 128
seq_length: 2048
bf16: true
unheard_of: 1
"""
TRAINER = """\
model_name_or_path: some/model-8b
bf16: true
max_seq_length: 4096
per_device_train_batch_size: 16   # as much as fits
gradient_accumulation_steps: 2
gradient_checkpointing: true
learning_rate: 2.0e-05
max_steps: 1000
warmup_ratio: 0.1
report_to: [wandb]
attn_implementation: flash_attention_2
made_up: true
deepspeed:
  zero_optimization: {stage: 1}
  bf16: {enabled: auto}
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: none
  offload_param_device: cpu
mixed_precision: bf16
num_machines: 2
num_processes: 16
odd_one: 1
"""
FSDP = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_activation_checkpointing: true
  fsdp_backward_prefetch: BACKWARD_PRE
"""
PLUGIN = """\
distributed_type: MEGATRON_LM
mixed_precision: bf16
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_sequence_parallelism: true
  megatron_lm_context_parallel_size: 1
  megatron_lm_num_micro_batches: 8
  megatron_lm_use_distributed_optimizer: yes
  megatron_lm_nothing: 1
"""


def audited(tmp_path: Path, text: str, name: str = "run.yaml", **keys: Any) -> Audit:
    (tmp_path / name).write_text(text)
    return so.audit(tmp_path / name, **keys)


SAID: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "Bridge": (BRIDGE, LLAMA, {"engine": "megatron", "tp": 2, "dp": 8, "zero_stage": 1, "num_microbatches": 32}, "model.not_a_field=3"),
    "NeMo": (NEMO, {"cluster": "dgx_h100"}, {"engine": "megatron", "world_size": 16, "tp": 8, "dp": 2, "zero_stage": 1}, "model.half=2048"),
    "NeMo 2": (NEMO2, {"cluster": "dgx_h100"}, {"engine": "megatron", "world_size": 16, "tp": 4, "cp": 2, "dp": 2, "zero_stage": 1}, ""),
    "--yaml-cfg": (YAML_CFG, {"cluster": "dgx_h100", "gpus": 8}, {"engine": "megatron", "tp": 2, "dp": 4, "micro_batch_size": 2},
                   "unheard_of=1"),
    "Trainer": (TRAINER, LLAMA, {"engine": "deepspeed", "dp": 16, "zero_stage": 1, "micro_batch_size": 16, "num_microbatches": 2},
                "made_up=true"),
    "DeepSpeed": (DEEPSPEED, LLAMA, {"engine": "deepspeed", "dp": 16, "zero_stage": 3, "micro_batch_size": 1}, "odd_one=1"),
    "FSDP": (FSDP, LLAMA, {"engine": "deepspeed", "dp": 16, "zero_stage": 3}, ""),
    "plugin": (PLUGIN, LLAMA, {"engine": "megatron", "tp": 2, "pp": 2, "dp": 4, "zero_stage": 1, "sequence_parallel": True},
               "megatron_lm_config.megatron_lm_nothing=1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_a_file_becomes_its_plan_and_unknown_keys_are_said(kind: str, tmp_path: Path) -> None:
    text, keys, expected, unknown = SAID[kind]
    found = audited(tmp_path, text, **keys)
    assert found.plan is not None, found.problem
    assert {name: getattr(found.plan, name) for name in expected} == expected
    assert found.legal, found.problem
    if unknown:
        assert found.reading.unknown == (unknown,)
    assert found.step_time_s is not None


@pytest.mark.parametrize("kind", SAID)
def test_no_setting_is_dropped(kind: str, tmp_path: Path) -> None:
    """Every value of the file is in the plan or in a list: without it the reading is another, or it is said there."""
    text, *_ = SAID[kind]
    whole = formats.read(text, "run.yaml").reading
    listed = " ".join(said for name in (*LISTS.values(), "assumed") for said in getattr(whole, name))
    for path, value in document.leaves(yaml.safe_load(text)):
        if value is None or path.rpartition(".")[2] in listed:
            continue
        content = yaml.safe_load(text)
        *above, last = path.split(".")
        section = content
        for name in above:
            section = section[name]
        del section[last]
        try:
            without = formats.read(yaml.safe_dump(content), "run.yaml").reading
        except so.InputError:
            continue
        same = without == whole
        assert not same or path in DEFAULTS, path


DEFAULTS = frozenset(
    """compute_environment num_machines model.pipeline_model_parallel_size model.recompute_method model.recompute_num_layers
    model.activations_checkpoint_method model.activations_checkpoint_num_layers model.max_position_embeddings mixed_precision
    model.config.max_position_embeddings trainer.strategy.ddp.overlap_grad_reduce trainer.plugins.grad_reduce_in_fp32
    language_model.max_position_embeddings model.optim.sched.name deepspeed_config.offload_optimizer_device
    model.micro_batch_size data.micro_batch_size train.micro_batch_size deepspeed.bf16.enabled model.optim.betas
    model.config.activation_func._call_ data.seq_length model.data.seq_length model.half
    attn_implementation""".split()  # noqa: SIM905
)
"""Values that are what is taken without them."""


@pytest.mark.parametrize("kind", ["Bridge", "NeMo", "Trainer", "plugin"])
def test_a_change_is_a_diff_of_the_file_alone_and_means_what_it_says(kind: str, tmp_path: Path) -> None:
    text, keys, *_ = SAID[kind]
    found = audited(tmp_path, text, **keys)
    rows = [*found.changes, *([found.together] if found.together else [])]
    said = [row for row in rows if row.text is not None]
    assert said, [row.what for row in rows]
    for row in said:
        again = formats.read(str(row.text), "run.yaml").reading
        assert again.unknown == found.reading.unknown
        changed = [line for line in row.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert len(changed) <= 16
        kept = [line for line in text.splitlines() if "#" in line]
        assert all(any(line.partition("#")[2] in new for new in str(row.text).splitlines()) for line in kept)
    assert found.judged is not None
    assert all(row.judged.rank < found.judged.rank for row in rows)


def test_what_fsdp_can_say_of_stages_and_recompute_is_said() -> None:
    source = formats.read(FSDP, "run.yaml")
    setup = source.reading.setup
    text = str(source.edited(setup, replace(setup, zero_stage=2, recompute="none"), 8))
    assert text == FSDP.replace("FULL_SHARD", "SHARD_GRAD_OP").replace("checkpointing: true", "checkpointing: false")
    assert source.edited(setup, replace(setup, zero_stage=1), 8) is None
    assert source.edited(setup, replace(setup, micro_batch_size=2), 8) is None


AXOLOTL = """\
base_model: llama
sequence_len: 4096
pad_to_sequence_len: true
micro_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 2e-5
bf16: true
gradient_checkpointing: true
optimizer: adamw_torch
fsdp_config: {fsdp_version: 2, reshard_after_forward: true, offload_params: true}
"""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("optimizer: paged_adamw_8bit", "offload_optimizer=True: FSDP has parameters and gradients on the host"),
        ("adapter: lora\nlora_r: 8\nlora_target_linear: true", ""),  # DeepSpeed's rules: lora_offload,
        ("tensor_parallel_size: 2\ncontext_parallel_size: 2", ""),  # autotp_x, offload_ulysses,
        ("fsdp_config: {offload_params: true, fsdp_sharding_strategy: NO_SHARD}", ""),  # and offload_needs
    ],
)
def test_a_file_of_fsdp_is_held_to_fsdps_rules_alone(more: str, problem: str, tmp_path: Path) -> None:
    said = {**yaml.safe_load(AXOLOTL), **yaml.safe_load(more)}
    found = audited(tmp_path, yaml.safe_dump(said), **LLAMA)
    assert "FSDP" in found.reading.format
    assert found.problem.startswith(problem)
    assert found.legal is not bool(problem)
    assert "deepspeed" not in found.problem.lower()


def test_a_change_of_the_micro_batch_leaves_the_batch(tmp_path: Path) -> None:
    found = audited(tmp_path, TRAINER.replace("{stage: 1}", "{stage: 3}"), **LLAMA)
    row = next(row for row in found.changes if row.what.startswith("micro_batch_size"))
    content = yaml.safe_load(str(row.text))
    assert content["per_device_train_batch_size"] * content["gradient_accumulation_steps"] == 32


def test_the_trainer_s_ds_config_may_be_another_file(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z2.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "no_such": 1}, "bf16": {"enabled": "auto"}}))
    head = TRAINER.partition("deepspeed:")[0]
    found = audited(tmp_path, head + "deepspeed: ds/z2.json\n", **LLAMA)
    assert found.plan is not None
    assert (found.plan.zero_stage, found.plan.training.precision) == (2, "bf16")
    assert "z2.json: zero_optimization.no_such=1" in found.reading.unknown


MEGATRON_DEEPSPEED = (
    "deepspeed pretrain_gpt.py --deepspeed --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --lr 1e-4 --bf16 "
    "--micro-batch-size 1 --global-batch-size 256 --vocab-size 32000 --train-iters 9 --max-position-embeddings 2048 --deepspeed_config"
)
NAME_DEEPSPEEDS = {
    "trainer.yaml": (TRAINER.partition("deepspeed:")[0] + "deepspeed: ds/z9.json", "deepspeed=ds/z9.json"),
    "axolotl.yaml": ("base_model: x\nsequence_len: 2048\nmicro_batch_size: 1\nlearning_rate: 1e-4\ndeepspeed: ds/z9.json",
                     "deepspeed=ds/z9.json"),
    "swift.sh": ("NPROC_PER_NODE=8 swift sft --model x --tuner_type full --max_length 2048 --learning_rate 1e-4 --deepspeed $DS",
                 "deepspeed=$DS"),
    "accelerate.yaml": ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: z9.json}\nnum_processes: 8",
                        "deepspeed_config_file=z9.json"),
    "megatron.sh": (f"{MEGATRON_DEEPSPEED} z9.json", "--deepspeed_config=z9.json"),
    "hidden.sh": (f"{MEGATRON_DEEPSPEED} $DS", "--deepspeed_config=$DS"),
}  # fmt: skip


@pytest.mark.parametrize("file", NAME_DEEPSPEEDS)
def test_a_ds_config_that_is_named_and_not_here_gives_no_verdict(tmp_path: Path, file: str) -> None:
    text, said = NAME_DEEPSPEEDS[file]
    path = tmp_path / file
    path.write_text(text + "\n")
    keys: dict[str, Any] = {"gpus": 16, "cluster": "dgx_h100"} | ({} if "pretrain_gpt" in text else LLAMA)
    with pytest.raises(InputError, match=re.escape(f"{said}: is not here, and says the ZeRO stage: put it beside {file}, or say pin.")):
        so.audit(path, **keys)
    found = so.audit(path, **keys, pin={"zero_stage": 2})
    assert found.plan is not None
    assert found.plan.zero_stage == 2
    assert any(f"{said} is not here" in line for line in found.reading.assumed)


def test_a_ds_config_beside_a_script_of_megatron_deepspeed_is_read(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    path = tmp_path / "a.sh"
    path.write_text(f"{MEGATRON_DEEPSPEED} z.json\n")
    assert so.audit(path, gpus=16, cluster="dgx_h100").setup.zero_stage == 2


def test_adapters_are_priced_as_adapters(tmp_path: Path) -> None:
    head = TRAINER.partition("deepspeed:")[0]
    found = audited(tmp_path, head + "use_peft: true\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [q_proj, v_proj]\n", **LLAMA)
    assert found.plan is not None
    assert found.plan.training.lora is not None
    assert (found.plan.training.lora.rank, found.plan.training.lora.targets) == (16, ("q_proj", "v_proj"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("program", ["llama_factory", "axolotl", "ms_swift"])
def test_quantised_weights_under_adapters_are_written_read_and_priced(program: str, bits: Literal[4, 8], tmp_path: Path) -> None:
    """The frozen linears take 4.127 bits a weight, or 8 and a scale of 32 for each output, in place of 16: 7.0B of them."""
    keys: dict[str, Any] = {"recipe": "llama3_8b", "lora.rank": 16, "task": "sft", "gpus": 1, "cluster": "dgx_h100", "pin.zero_stage": 1}
    keys |= {"train.seq_length": 4096, "train.global_batch_size": 8, "pin.micro_batch_size": 1, "pin.recompute": "full", "write": program}
    plans = [so.plan(**keys, **more) for more in ({}, {"lora.bits": bits})]
    whole, packed = (plan.plan.prediction.by_stage[0].memory_by_cause["weights"] for plan in plans)
    linears = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    outputs = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    held = linears * NF4_BYTES if bits == 4 else linears + 4 * outputs
    assert whole - packed == pytest.approx(linears * 2 - held, rel=1e-4)
    assert plans[1].step_time_s > plans[0].step_time_s
    plans[1].write(tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / f"{program}.yaml").read_text())
    assert written["gradient_checkpointing_kwargs"] == {"use_reentrant": bits == 8}
    found = so.audit(tmp_path / "run" / f"{program}.yaml", **LLAMA | {"gpus": 1})
    assert found.plan is not None
    assert found.plan.training.lora is not None
    assert found.plan.training.lora.bits == bits
    assert not [name for name in (*found.reading.unknown, *found.reading.unpriced) if "quant" in name or "bit" in name]
    assert not [line for line in found.reading.assumed if "reentrant" in line]


@pytest.mark.parametrize(("more", "said"), [("", True), ("gradient_checkpointing_kwargs: {use_reentrant: true}\n", False)])
def test_inputs_that_bitsandbytes_keeps_beside_checkpoints_are_said(more: str, said: bool, tmp_path: Path) -> None:
    """transformers recomputes by torch's non-reentrant function, whose hooks don't see what MatMul8bitLt holds."""
    head = TRAINER.partition("deepspeed:")[0]
    found = audited(tmp_path, head + "use_peft: true\nlora_r: 16\nload_in_8bit: true\n" + more, **LLAMA)
    assert any("use_reentrant=true: with false bitsandbytes keeps" in line for line in found.reading.assumed) == said


def test_weights_of_other_quantisations_are_refused(tmp_path: Path) -> None:
    head = TRAINER.partition("deepspeed:")[0]
    with pytest.raises(InputError, match=r"can't be priced.*4 or 8 bits of bitsandbytes"):
        audited(tmp_path, head + "finetuning_type: lora\nlora_rank: 8\nquantization_bit: 8\nquantization_method: hqq\n", **LLAMA)


SEEING_HEAD = (
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-5\nbf16: true\ngradient_checkpointing: true\n"
)
SEEING_CONFIG = {
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 4, "embed_dim": 320, "hidden_size": 512, "num_heads": 4, "patch_size": 14},
    "text_config": {
        **{"model_type": "qwen2_vl_text", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000},
        **{"num_key_value_heads": 2, "intermediate_size": 1024, "max_position_embeddings": 4096},
    },
}


@pytest.mark.parametrize(
    ("more", "freeze"),
    [
        ("model_name_or_path: {}\nstage: sft\nfinetuning_type: full\n", ("vision", "projector")),
        ("model_name_or_path: {}\nstage: sft\nfinetuning_type: full\nfreeze_vision_tower: false\n", ("projector",)),
        ("model_name_or_path: {}\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\n", ()),
        ("model: {}\ntuner_type: full\nfreeze_vit: false\nfreeze_aligner: false\nfreeze_llm: true\n", ("language",)),
        ("model: {}\ntuner_type: full\n", ("vision", "projector")),
        ("model: {}\ntrain_type: full\nfreeze_aligner: false\n", ("vision",)),
        ("model: {}\n", ()),  # adapters alone
        ("model_name_or_path: {}\n", ()),
    ],
)
def test_what_a_program_freezes_of_a_model_that_looks_at_images_is_read(more: str, freeze: tuple[str, ...], tmp_path: Path) -> None:
    """LLaMA-Factory freezes tower and projector, as ms-swift does, where nothing is said; the Trainer freezes nothing."""
    (tmp_path / "seeing").mkdir()
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(SEEING_CONFIG))
    length = "cutoff_len" if "stage" in more else "max_length"
    text = SEEING_HEAD + more.format(tmp_path / "seeing") + f"{length}: 2048\nimage_max_pixels: 200704\n"
    found = audited(tmp_path, text, gpus=8, cluster="dgx_h100")
    assert found.plan is not None
    assert found.legal
    assert (found.plan.training.freeze, found.plan.training.images, found.plan.training.image_tokens) == (freeze, 1, 256)
    assert any("one image of 200704 pixels, the most that one may have: 256 tokens" in line for line in found.reading.assumed)
    assert not [line for line in found.reading.unpriced if "freeze" in line or "pixels" in line]


MEGATRONS = "micro_batch_size: 1\nglobal_batch_size: 16\nmax_length: 2048\ntensor_model_parallel_size: 2\nmodel: Qwen/Qwen3-VL\n"


@pytest.mark.parametrize(
    ("more", "freeze"),
    [("", ("vision", "projector")), ("tuner_type: full\nfreeze_vit: false\n", ("projector",)), ("freeze_aligner: 'false'\n", ("vision",))],
)
def test_what_ms_swift_freezes_under_megatron_is_read(more: str, freeze: tuple[str, ...], tmp_path: Path) -> None:
    """Tower and projector where nothing is said (megatron_args.py:450, MegatronTunerMixin): all parts were priced as trained."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING_CONFIG))
    found = audited(tmp_path, MEGATRONS + more, gpus=8, cluster="dgx_h100", **{"model.hf_config": tmp_path / "config.json"})
    assert found.plan is not None
    assert (found.plan.engine, found.plan.training.freeze) == ("megatron", freeze)
    assert found.reading.unpriced == ()


@pytest.mark.parametrize(
    ("more", "unpriced"),
    [
        ("", ()),
        ("freeze_vit: false\n", ("lora.rank=8: adapters are in vision too, without a price",)),
        ("freeze_llm: true\n", ("lora.rank=8: no adapters are in the language model, which is priced with them",)),
    ],
)
def test_ms_swifts_adapters_of_a_model_that_looks_at_images_are_on_its_language_model(
    more: str, unpriced: tuple[str, ...], tmp_path: Path
) -> None:
    """By its defaults (swift/megatron/utils/utils.py, get_multimodal_target_regex); Bridge's go to the tower too."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING_CONFIG))
    keys = {"cluster": "dgx_h100", "model.hf_config": tmp_path / "config.json"}
    found = audited(tmp_path, f"{MEGATRONS}tuner_type: lora\n{more}", gpus=8, **keys)
    assert found.plan is not None
    assert not found.problem
    assert found.plan.training.lora is not None
    assert found.reading.unpriced == unpriced


@pytest.mark.parametrize(
    ("said", "flags", "tokens"),
    [("MAX_PIXELS=200704", "", 256), ("export IMAGE_MAX_TOKEN_NUM=1024", "", 1024), ("MAX_PIXELS=200704", " --max_pixels 100352", 128)],
)
@pytest.mark.parametrize(
    "program", ["swift sft --per_device_train_batch_size 1", "megatron sft --micro_batch_size 1 --global_batch_size 8"]
)
def test_how_many_tokens_an_image_has_is_read_of_ms_swifts_environment(
    program: str, said: str, flags: str, tokens: int, tmp_path: Path
) -> None:
    """Every image had 256 tokens, whatever the script said in front of its command."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING_CONFIG))
    script = tmp_path / "run.sh"
    end = "\n" if said.startswith("export") else " \\\n"
    script.write_text(f"{said}{end}NPROC_PER_NODE=8 \\\n{program} --model a/b --max_length 2048 --bf16 true{flags}\n")
    found = so.audit(script, cluster="dgx_h100", **{"model.hf_config": str(tmp_path / "config.json")})
    assert found.plan is not None
    assert (found.plan.world_size, found.plan.training.image_tokens) == (8, tokens)
    assert any("the most that one may have" in line for line in found.reading.assumed)


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("model: a/b\n", 8),
        ("model: a/b\nlora_rank: 16\n", 16),
        ("model: a/b\ntuner_type: full\n", None),
        ("model_name_or_path: a/b\nstage: sft\n", 8),
        ("model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\n", None),
        ("model_name_or_path: a/b\n", None),
    ],
)
def test_programs_whose_own_tuning_is_lora_are_read_so(text: str, rank: int | None, tmp_path: Path) -> None:
    """ms-swift (base_args.py:93) and LLaMA-Factory (finetuning_args.py:464); both were priced as if all weights were trained."""
    found = audited(tmp_path, f"{SEEING_HEAD}max_length: 2048\n{text}", gpus=8, cluster="dgx_h100", recipe="llama3_8b")
    assert found.plan is not None
    lora = found.plan.training.lora
    assert (None if lora is None else lora.rank) == rank
    said = [line for line in found.reading.assumed if line.endswith("own where the file does not say") and "=lora: " in line]
    assert bool(said) == (rank is not None)


@pytest.mark.parametrize(("said", "tokens"), [("", 752), ("image_max_pixels: 200704\n", 256)])
def test_llama_factorys_images_have_its_own_pixels_where_the_file_does_not_say(said: str, tokens: int, tmp_path: Path) -> None:
    """768 x 768, in patches of 28 x 28 here: every image had 256 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING_CONFIG))
    text = f"{SEEING_HEAD}model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n{said}"
    found = audited(tmp_path, text, gpus=8, cluster="dgx_h100", **{"model.hf_config": tmp_path / "config.json"})
    assert found.plan is not None
    assert found.plan.training.image_tokens == tokens


def test_what_a_program_freezes_is_read_of_a_model_that_a_key_gives(tmp_path: Path) -> None:
    """It was unpriced, as the file alone does not say that its model looks at images."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING_CONFIG))
    said = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\nfreeze_vision_tower: true\ncutoff_len: 2048\n"
    given: dict[str, Any] = {"gpus": 8, "cluster": "dgx_h100"}
    found = audited(tmp_path, SEEING_HEAD + said + "image_max_pixels: 200704\n", **given, **{"model.hf_config": tmp_path / "config.json"})
    assert found.plan is not None
    assert (found.plan.training.freeze, found.plan.training.image_tokens) == (("vision", "projector"), 256)
    assert not [line for line in found.reading.unpriced if "freeze" in line or "pixels" in line]
    assert any(change.text for change in found.changes), "the changed file is read so, too"
    text = audited(tmp_path, SEEING_HEAD + said, **given, recipe="llama3_8b")
    assert "freeze_vision_tower=true" in text.reading.unpriced


def test_what_accelerate_s_plugin_takes_by_itself_is_said(tmp_path: Path) -> None:
    """MegatronLMPlugin recomputes in full, and has two context-parallel ranks, where nobody says otherwise."""
    found = formats.read(PLUGIN.replace("  megatron_lm_context_parallel_size: 1\n", ""), "run.yaml").reading
    assert (found.setup.recompute, found.setup.cp) == ("full", 2)
    assert any("context_parallel_size=2" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"a": 2}, "a: 2 # one\nm:\n  x: False\n  e:\n  z: {p: 1}\n# end\n"),
        ({"m.x": True}, "a: 1 # one\nm:\n  x: True\n  e:\n  z: {p: 1}\n# end\n"),
        ({"m.e": 3}, "a: 1 # one\nm:\n  x: False\n  e: 3\n  z: {p: 1}\n# end\n"),
        ({"m.z.q": [1, "b"]}, "a: 1 # one\nm:\n  x: False\n  e:\n  z: {p: 1, q: [1, b]}\n# end\n"),
        ({"m.n": "no"}, "a: 1 # one\nm:\n  x: False\n  e:\n  n: 'no'\n  z: {p: 1}\n# end\n"),
        ({"s.t": None}, "a: 1 # one\ns: {t: null}\nm:\n  x: False\n  e:\n  z: {p: 1}\n# end\n"),
    ],
)
def test_a_value_of_yaml_is_changed_where_it_stands(changes: dict[str, Any], expected: str) -> None:
    text = "a: 1 # one\nm:\n  x: False\n  e:\n  z: {p: 1}\n# end\n"
    assert document.changed(text, "x.yaml", changes) == expected


def test_interpolations_are_resolved_and_what_is_not_there_is_said() -> None:
    found = formats.read(NEMO, "run.yaml").reading
    assert any("model.sequence_parallel is ${model.use_sp}" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("a: [1", {}, "is not YAML: .*line"),
        ("- a\n- b\n", {}, "is YAML of no named settings"),
        ("a: 1\n", {}, "has nothing by which it is known"),
        ("recipe: llama3_8b\ntrain: {steps: 3}\n", {}, "is a recipe of this planner"),
        (BRIDGE, {"recipe": None}, "model"),
        (BRIDGE.replace("parallel_size: 2 ", "parallel_size: two "), {}, "model.tensor_model_parallel_size=two: is no number"),
        (TRAINER, {"gpus": None}, "gpus: is missing"),
        (TRAINER.replace("stage: 1", "stage: 7"), {}, "zero_optimization.stage=7"),
        (DEEPSPEED.replace("DEEPSPEED", "XLA"), {}, "distributed_type=XLA: is not planned for"),
        (DEEPSPEED.replace("bf16", "int3"), {}, "mixed_precision=int3: is not known"),
        (FSDP.replace("FULL_SHARD", "SOME"), {}, "fsdp_sharding_strategy=some: is not known"),
        (NEMO.replace("num_layers: 32", "num_layers: null"), {"recipe": None, "gpus": None}, "num_layers: is missing"),
        (TRAINER + "finetuning_type: freeze\n", {}, "finetuning_type=freeze: can't be priced"),
        (TRAINER, {"explain.tp": 2}, "is not for audit"),
    ],
)
def test_what_is_no_configuration_is_one_error(text: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {name: value for name, value in {**LLAMA, **keys}.items() if value is not None}
    with pytest.raises(so.InputError, match=message):
        audited(tmp_path, text, **given)


@pytest.mark.parametrize(
    ("said", "offloaded", "unpriced"),
    [("", False, []), (", optimizer_offload_fraction: 0.5", False, [0.5]), (", optimizer_offload_fraction: 1.0", True, [])],
)
def test_the_optimizer_is_in_host_memory_as_far_as_the_fraction_says(said: str, offloaded: bool, unpriced: list[float]) -> None:
    """The class's default is none of it, the flag's all."""
    text = BRIDGE + f"optimizer: {{optimizer_cpu_offload: true, use_precision_aware_optimizer: true{said}}}\n"
    reading = formats.read(text, "run.yaml").reading
    assert reading.setup.offload_optimizer is offloaded
    assert [*reading.unpriced] == [f"optimizer.optimizer_offload_fraction={part}" for part in unpriced]


ARGUMENTS = "run.py --model_name_or_path m --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate=1e-5 --bf16"


@pytest.mark.parametrize(
    ("command", "file", "content"),
    [
        (f"deepspeed --num_gpus 8 {ARGUMENTS} --deepspeed zero.yaml", "zero.yaml", "zero_optimization: {stage: 3}"),
        (f"accelerate launch --config_file zero.yaml {ARGUMENTS}", "zero.yaml",
         "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8"),
    ],
)  # fmt: skip
def test_a_command_with_the_trainers_arguments_is_read_with_the_file_that_says_zero(
    command: str, file: str, content: str, tmp_path: Path
) -> None:
    keys = {"recipe": "llama3_8b", "cluster": "dgx_h100"}
    with pytest.raises(InputError, match=r"=zero\.yaml: is not here, and says the ZeRO stage"):
        audited(tmp_path, command + "\n", "a.sh", **keys, gpus=8)
    (tmp_path / file).write_text(content + "\n")
    found = audited(tmp_path, command + "\n", "a.sh", **keys)
    assert found.plan is not None
    assert (found.plan.engine, found.plan.world_size, found.plan.zero_stage, found.plan.micro_batch_size) == ("deepspeed", 8, 3, 2)
    assert (found.plan.num_microbatches, found.plan.training.lr, found.reading.unknown) == (8, 1e-5, ())
    text = formats.read(command, str(tmp_path / "a.sh")).edited(found.reading.setup, replace(found.reading.setup, micro_batch_size=4), 8)
    assert "train_batch_size 4 --gradient_accumulation_steps 4" in str(text)


def test_a_command_whose_program_reads_the_trainers_arguments_from_a_file_is_read_with_it(tmp_path: Path) -> None:
    """alignment-handbook's own: accelerate's file says the shards, TRL's the rest, and a flag stands over it."""
    keys = {"recipe": "llama3_8b", "cluster": "dgx_h100"}
    command = "accelerate launch --config_file recipes/fsdp.yaml scripts/sft.py --config recipes/sft.yaml --learning_rate 3e-5\n"
    (tmp_path / "recipes").mkdir()
    with pytest.raises(InputError, match=r"audit=recipes/sft\.yaml: is what the script's command reads, and is not here"):
        audited(tmp_path, command, "a.sh", **keys)
    fsdp = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\nmixed_precision: bf16\nnum_processes: 8\n"
    (tmp_path / "recipes" / "fsdp.yaml").write_text(fsdp)
    (tmp_path / "recipes" / "sft.yaml").write_text(
        "torch_dtype: bfloat16\nbf16: true\nlearning_rate: 2.0e-05\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
        "gradient_checkpointing: true\nmax_seq_length: 2048\n"
    )
    found = audited(tmp_path, command, "a.sh", **keys)
    assert found.plan is not None
    assert (found.plan.world_size, found.plan.zero_stage, found.plan.micro_batch_size, found.plan.num_microbatches) == (8, 3, 4, 2)
    assert (found.plan.training.lr, found.plan.training.seq_length, found.reading.fsdp) == (3e-5, 2048, True)
    assert any(line.startswith("FSDP's full_shard is priced as") for line in found.reading.assumed)
    unsaid = audited(tmp_path, command.replace("3e-5", "$RATE"), "b.sh", **keys)
    assert "--learning_rate is $RATE, which the script does not say: taken as if it were not there" in unsaid.reading.assumed
    assert not any("without an fp32 copy" in line for line in found.reading.assumed)


@pytest.mark.parametrize("flag", ["--vocab-file gpt2-vocab.json", "--vocab-file=gpt2-vocab.json"])
def test_a_file_that_another_flag_names_is_no_configuration(flag: str, tmp_path: Path) -> None:
    """Megatron's own examples: the vocabulary is not here, and is not asked for."""
    command = (f"torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --bf16 {flag} "
               "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --lr 1e-4\n")  # fmt: skip
    found = audited(tmp_path, command, "a.sh", gpus=8, cluster="dgx_h100")
    assert found.plan is not None
    assert found.plan.dp == 8


def test_a_pin_that_divides_the_states_is_of_an_optimizer_with_an_fp32_copy(tmp_path: Path) -> None:
    """12 bytes a parameter on 8 ranks; alone the file trains bf16 weights as they were loaded, without such a copy."""
    text = "torch_dtype: bfloat16\nbf16: true\nlearning_rate: 2.0e-05\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 1\n"
    keys = {"recipe": "llama3_8b", "cluster": "dgx_h100", "gpus": 8, "train.seq_length": 2048}
    alone, pinned = audited(tmp_path, text, "sft.yaml", **keys), audited(tmp_path, text, "sft.yaml", **keys, **{"pin.zero_stage": 3})
    of_copies = "without an fp32 copy of any"
    assert [any(of_copies in line for line in found.reading.assumed) for found in (alone, pinned)] == [True, False]
    assert any(line.startswith("pin.zero_stage=3: as DeepSpeed divides the states, with an fp32 copy") for line in pinned.reading.assumed)
    assert pinned.plan is not None
    optimizer = pinned.plan.prediction.by_stage[0].memory_by_cause["optimizer"]
    assert optimizer == pytest.approx(12 * 8.03e9 / 8, rel=0.01)


def test_samples_of_another_length_than_the_model_are_named(tmp_path: Path) -> None:
    """NeMo-Framework-Launcher's conf/training/mixtral/mixtral_8x22b.yaml has 65,536 and 4,096, on two stages."""
    apart = NEMO.replace("half: 2048", "half: 1024")
    found = audited(tmp_path, apart, cluster="dgx_h100")
    assert found.legal
    assert found.settings.training.seq_length == 2048
    assert any("model.data.seq_length=2048 beside model.encoder_seq_length=4096" in line for line in found.reading.assumed)
    two = apart.replace("pipeline_model_parallel_size: 1", "pipeline_model_parallel_size: 2")
    assert audited(tmp_path, two, cluster="dgx_h100").problem.startswith("model.data.seq_length=2048 beside model.encoder_seq_length=4096")
    assert audited(tmp_path, two.replace("half: 1024", "half: 2048"), cluster="dgx_h100").legal
