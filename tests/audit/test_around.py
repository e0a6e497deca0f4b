"""Files of programs around Megatron and DeepSpeed, as their users have them: what they say, and changes as a diff of the same words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator import folder
from orchestrator.audit import formats
from orchestrator.errors import InputError
from orchestrator.recipe.clusters import on_hub

VERL = """\
#!/usr/bin/env bash
TP=${TP:-2}
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    actor_rollout_ref.rollout.n=4
)
python3 -m verl.trainer.main_ppo model_engine=megatron "${ACTOR[@]}" trainer.nnodes=2 trainer.n_gpus_per_node=8 \\
    data.max_prompt_length=1024 data.max_response_length=3072
"""
FSDP = """\
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
    actor_rollout_ref.actor.fsdp_config.reshard_after_forward=True trainer.n_gpus_per_node=8 actor_rollout_ref.actor.optim.lr=1e-6
"""
SWIFT = """\
NPROC_PER_NODE=8 \\
megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 64 --max_length 4096 \\
    --recompute_granularity none
"""
BRIDGE = """\
CMD="python scripts/training/run_recipe.py --recipe qwen3_8b_pretrain_config -tp 2 -mb 1 \\
  train.global_batch_size=64 model.sequence_parallel=true dataset.seq_length=4096"
torchrun --nnodes 2 --nproc_per_node 8 bash -c "$CMD"
"""
PYTHON = """\
def configure(cfg):
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.micro_batch_size = 1  # one
    cfg.train.global_batch_size = 64
    cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
    cfg.model.head = make_head(cfg)
"""
AXOLOTL = """\
base_model: a/b
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1e-5
gradient_checkpointing: true
bf16: auto
deepspeed: {zero_optimization: {stage: 2}}
"""
SLIME = """\
source models/qwen3-8B.sh
python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 "${MODEL_ARGS[@]}" --tensor-model-parallel-size 2 --micro-batch-size 1 \\
    --global-batch-size 64 --lr 1e-6 --use-kl-loss
"""
FILES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "verl.sh": (VERL, {"tp": 2, "recompute": "full", "zero_stage": 1}, 16, "ppo_micro_batch_size_per_gpu=2"),
    "fsdp.sh": (FSDP, {"zero_stage": 3, "recompute": "full"}, 8, "ppo_micro_batch_size_per_gpu=2"),
    "swift.sh": (SWIFT, {"tp": 2, "recompute": "none"}, 8, "--micro_batch_size 2"),
    "bridge.sh": (BRIDGE, {"tp": 2, "sequence_parallel": True}, 16, "-mb 2"),
    "recipe.py": (PYTHON, {"tp": 2}, 0, "    cfg.train.micro_batch_size = 2  # one"),
    "axolotl.yaml": (AXOLOTL, {"zero_stage": 2, "recompute": "full"}, 0, "micro_batch_size: 2"),
    "slime.sh": (SLIME, {"tp": 2, "zero_stage": 1}, 16, "--micro-batch-size 2"),
}
"""Text, choices, GPUs (0: it does not say), and what another micro-batch looks like."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_its_plan_and_is_changed_in_its_own_words(name: str) -> None:
    text, chosen, gpus, line = FILES[name]
    source = formats.read(text, name)
    reading = source.reading
    assert reading.unknown == ()
    assert {one: getattr(reading.setup, one) for one in chosen} == chosen
    assert reading.keys.get("gpus", 0) == gpus
    after = replace(reading.setup, micro_batch_size=2)
    changed = source.edited(reading.setup, after, 16)
    assert changed is not None
    assert line in changed
    assert formats.read(changed, name).reading.setup == after
    assert len(changed.splitlines()) == len(text.splitlines())


@pytest.mark.parametrize("name", FILES)
def test_its_audit_has_a_plan(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name][0])
    found = so.audit(tmp_path / name, recipe="llama3_8b", cluster="dgx_h100", **({} if FILES[name][2] else {"gpus": 16}))
    assert found.plan is not None
    assert found.legal, found.problem
    assert found.plan.world_size == FILES[name][2] or 16


def test_a_prompt_s_responses_are_samples_and_their_lengths_one_sequence() -> None:
    keys = formats.read(VERL, "verl.sh").reading.keys
    assert (keys["train.global_batch_size"], keys["train.seq_length"]) == (128, 4096)


def test_what_only_running_a_recipe_tells_is_said() -> None:
    reading = formats.read(PYTHON, "recipe.py").reading
    assert reading.keys["train.precision"] == "fp8"
    assert any("model.head is make_head(cfg), which only running it tells" in line for line in reading.assumed)
    with pytest.raises(InputError, match="sets fields of a recipe in 'configure', 'other': keep one of them"):
        formats.read(PYTHON + "def other(cfg):\n    cfg.train.micro_batch_size = 3\n", "recipe.py")


def test_nemo_rl_s_defaults_are_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 4}, train_global_batch_size: 64}\n"
    )
    text = "defaults: base.yaml\npolicy: {megatron_cfg: {pipeline_model_parallel_size: 2}}\n"
    reading = formats.read(text, str(tmp_path / "mine.yaml")).reading
    assert (reading.setup.tp, reading.setup.pp, reading.keys["train.global_batch_size"]) == (4, 2, 64)
    alone = formats.read(text.replace("base", "none"), str(tmp_path / "mine.yaml")).reading
    assert any("defaults: none.yaml is not here" in line for line in alone.assumed)


MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --lr 1e-4 "
    "--train-samples 576 --micro-batch-size 1 --global-batch-size 64"
)

MOE = "--bf16 --num-experts 8 --moe-router-topk 2"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bf16 --rampup-batch-size 30 16 1000", "from 30 to 64 are no whole steps of 16 samples"),
        ("--bf16 --rampup-batch-size 24 8 1000", "rampup_batch_size=24: is no multiple of dp x micro-batch = 16 x 1"),
        ("--bf16 --fp16", "fp16 and bf16: Megatron takes one of them"),
        ("--bf16 --train-iters 9", "train_iters and train_samples: Megatron takes one of them"),
        ('--bf16 --step-batch-size-schedule "0:16 1M:64"', "step_batch_size_schedule and global_batch_size: Megatron takes one of them"),
        ("--bf16 --rampup-batch-size 16 8 1000", "rampup_batch_size=24: is no multiple of dp x micro-batch = 16 x 1"),
        ("--bf16 --overlap-param-gather --use-distributed-optimizer", "overlap_param_gather needs overlap_grad_reduce"),
        ("--bf16 --overlap-param-gather --overlap-grad-reduce", "overlap_param_gather needs use_distributed_optimizer"),
        (
            "--bf16 --recompute-granularity selective --recompute-modules mlp core_atn",
            "recompute_modules=core_atn: Megatron recomputes core_attn",
        ),
        ("--bf16 --recompute-granularity selectiv", "--recompute-granularity selectiv: Megatron's parser takes full, selective"),
        ("--bf16 --optimizer adamw", "--optimizer adamw: Megatron's parser takes adam, sgd, muon"),
        ("--bf16 --ckpt-format=torchdist", "--ckpt-format torchdist: Megatron's parser takes torch, torch_dist"),
        ("--fp16", "fp16 on H100-SXM-80GB: as fast as bf16"),
        ("--bf16 --tensor-model-parallel-size 16", "tp=16 is wider than the 8 GPUs of nvlink"),
        (f"{MOE} --moe-expert-capacity-factor 1.25 --moe-router-load-balancing-type sinkhorn", "Megatron has aux_loss, seq_aux_loss"),
        (f"{MOE} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01", "wants as many numbers in moe_aux"),
        (f"{MOE} --recompute-granularity selective --recompute-modules moe_act", "recompute_modules=moe_act needs moe_grouped_gemm"),
        (f"{MOE} --moe-layer-freq '([0]*2+[1]*5)'", "moe_layer_freq is of 7 layers: Megatron wants one for each of 8"),
        ("--bf16 --recompute-num-layers 4", "recompute_num_layers=4 does nothing without recompute_granularity"),
    ],
)
def test_what_is_wrong_or_hardly_meant_is_named(flags: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {MODEL} {flags}\n")
    found = so.audit(tmp_path / "train.sh", cluster="dgx_h100")
    assert any(said in line for line in (found.problem, *found.remarks, *found.reading.assumed)), found.summary()
    assert said in str(found)


def test_yaml_of_megatron_s_flags_is_read_and_changed(tmp_path: Path) -> None:
    """As Megatron-MoE-ModelZoo has it (model_configs/benchmarking, 1707096)."""
    pairs = MODEL.replace("--", "|--").split("|")[1:]
    lines = [f"  {pair.split()[0]}: {pair.split()[1]}" for pair in pairs]
    text = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --bf16: true\n  --moe-router-pre-softmax: false # no\n  --context-parallel-size: ${CP}\n"
    text += "\n".join(lines) + "\n"
    source = formats.read(text, str(tmp_path / "zoo.yaml"))
    assert source.reading.unknown == ()
    assert any("${CP}, which the script does not say" in line for line in source.reading.assumed)
    changed = source.edited(source.reading.setup, replace(source.reading.setup, tp=2, sequence_parallel=True, micro_batch_size=2), 16)
    assert changed is not None
    assert {"  --micro-batch-size: 2", "  --tensor-model-parallel-size: 2", "  --sequence-parallel: true"} <= {*changed.splitlines()}
    assert "  --moe-router-pre-softmax: false # no" in changed.splitlines()


@pytest.mark.parametrize(("more", "said"), [("", True), (" --packing true", False)])
def test_samples_of_ms_swift_are_priced_at_their_longest_and_it_is_said(more: str, said: bool) -> None:
    found = formats.read(SWIFT.rstrip() + more + "\n", "swift.sh").reading
    assert found.keys["train.seq_length"] == 4096
    assert any("every sequence has max_length = 4096 tokens" in line for line in found.assumed) == said


def test_samples_of_their_own_lengths_are_no_verdict_on_memory_where_the_longest_would_not_fit(tmp_path: Path) -> None:
    """Ms-swift's script for two GPUs of 80 GB was told that it does not fit, by samples that all have max_length."""
    large = SWIFT.replace("--micro_batch_size 1 ", "--micro_batch_size 64 ")
    (tmp_path / "sft.sh").write_text(large)
    given: dict[str, Any] = {"recipe": "qwen3_8b", "gpus": 2, "cluster": "dgx_h100"}
    found = so.audit(tmp_path / "sft.sh", **given)
    assert found.fits is None
    assert "can't be told: with samples that all have the 4096 tokens of max_length it lacks " in str(found)
    (tmp_path / "packed.sh").write_text(large.rstrip() + " --packing true\n")
    assert "samples that all have" not in str(so.audit(tmp_path / "packed.sh", **given))
    assert so.audit(tmp_path / "sft.sh", train={"seq_length": 4096}, **given).fits is False, "the user says how long they are"


def test_what_is_said_of_a_file_has_the_names_of_its_program(tmp_path: Path) -> None:
    text = "base_model: someone/Meta-Llama-3-8B-Chat\nsequence_len: 4096\nmicro_batch_size: 1\noptimizer: lion_8bit\n"
    (tmp_path / "axolotl.yaml").write_text(text)
    given: dict[str, Any] = {"gpus": 8, "cluster": "dgx_h100", "train": {"global_batch_size": 64}}
    found = so.audit(tmp_path / "axolotl.yaml", recipe="llama3_8b", **given).reading
    assert "every sequence has sequence_len = 4096 tokens" in found.assumed
    assert "the model that you give: base_model=someone/Meta-Llama-3-8B-Chat is no folder here" in found.assumed
    assert (found.longest, found.unpriced) == ("sequence_len", ('optimizer="lion_8bit"',))
    with pytest.raises(InputError, match="by its name someone/Meta-Llama-3-8B-Chat is near recipe=llama3_8b"):
        so.audit(tmp_path / "axolotl.yaml", **given)


def test_a_model_that_this_planner_has_not_for_deepspeed_is_no_verdict_on_the_file(tmp_path: Path) -> None:
    """Axolotl publishes and runs such files (examples/gpt-oss/gpt-oss-20b-fft-deepspeed-zero3.yaml)."""
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    found = so.audit(tmp_path / "axolotl.yaml", recipe="gpt_oss_120b", gpus=256, cluster="dgx_h100", train={"seq_length": 4096})
    assert (found.legal, found.problem) == (None, "")
    assert "\nlegal      can't be told: gpt_oss_120b has sinks, router_bias, " in str(found)
    assert "under engine=deepspeed: its own limit, no verdict on the file\n" in str(found)
    other = so.audit(tmp_path / "axolotl.yaml", recipe="gpt_oss_120b", gpus=256, cluster="dgx_h100", train={"global_batch_size": 64})
    assert other.legal is False, "numbers that make no plan are wrong of any model"


NAMED = {
    "axolotl.yaml": AXOLOTL.replace("a/b", "Qwen/Qwen3-8B-Base"),
    "trl.yaml": "model_name_or_path: Qwen/Qwen3-8B\nlearning_rate: 1e-5\nper_device_train_batch_size: 1\nmax_length: 2048\nbf16: true\n",
    "swift.sh": SWIFT,
    "verl.sh": VERL.rstrip() + " actor_rollout_ref.model.path=Qwen/Qwen3-8B\n",
    "fsdp.sh": FSDP.rstrip() + " data.max_prompt_length=512 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-8B\n",
    "nemo_rl.yaml": "policy: {model_name: Qwen/Qwen3-8B, megatron_cfg: {enabled: true, tensor_model_parallel_size: 4}, "
    "train_global_batch_size: 64, train_micro_batch_size: 1, max_total_sequence_length: 4096}\n",
    "slime.sh": SLIME.rstrip() + " --hf-checkpoint Qwen/Qwen3-8B --seq-length 4096\n",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_model_that_a_recipe_describes_is_taken_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(NAMED[name])
    more: dict[str, Any] = {} if FILES.get(name, ("", {}, 0))[2] else {"gpus": 16}
    found = so.audit(tmp_path / name, cluster="dgx_h100", **more)
    assert found.plan is not None, found.problem
    same = so.audit(tmp_path / name, cluster="dgx_h100", recipe="qwen3_8b", **more)
    assert same.plan is not None
    assert replace(found.plan.model, name="") == replace(same.plan.model, name="")
    said = [line for line in found.reading.assumed if line.startswith("the model")]
    assert len(said) == 1
    assert "is recipe=qwen3_8b's, by its name" in said[0]
    assert not any("is recipe=qwen3_8b's" in line for line in same.reading.assumed)


def test_each_recipe_after_a_model_of_the_hub_names_it() -> None:
    folder = Path(so.__file__).parent / "recipes/models"
    for path in folder.glob("*.yaml"):
        lines = path.read_text().splitlines()
        if (of := re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)/blob", lines[0])) is not None and "with a label" not in lines[0]:
            differs = "without YaRN" in lines[0]
            assert on_hub().get(of[1]) == (None if differs else path.stem)


def test_each_setting_of_slime_is_in_the_list_of_what_it_does() -> None:
    reading = formats.read(SLIME.rstrip() + " --colocate --not-known 1\n", "slime.sh").reading
    assert (reading.unpriced, reading.unknown) == (("--colocate",), ("--not-known 1",))
    assert "--use-kl-loss" in reading.result


ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n"
ARGUMENTS = "learning_rate: 1e-5\nper_device_train_batch_size: 1\nmax_length: 2048\nbf16: true\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            AXOLOTL.partition("deepspeed")[0] + "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: ON}\n",
            "fsdp_offload_params",
        ),
        (AXOLOTL.partition("deepspeed")[0] + "fsdp_config: {reshard_after_forward: true, offload_params: ON}\n", "offload_params"),
        (ARGUMENTS + "fsdp: full_shard\nfsdp_config: {cpu_offload: ON}\n", "cpu_offload"),
        (ACCELERATE + "fsdp_config: {fsdp_offload_params: ON, fsdp_version: 2}\n", "fsdp_offload_params"),
    ],
)
def test_fsdps_offload_to_the_host_is_read_and_not_proposed_again(text: str, said: str, tmp_path: Path) -> None:
    def audited_with(on: str) -> so.Audit:
        (tmp_path / "run.yaml").write_text(text.replace("ON", on))
        return so.audit(tmp_path / "run.yaml", gpus=2, cluster="dgx_h100", recipe="llama3_8b")

    on, off = audited_with("true"), audited_with("false")
    assert (on.reading.setup.offload_optimizer, off.reading.setup.offload_optimizer) == (True, False)
    assert f"fsdp_config.{said}=true" in on.reading.unpriced, "the weights' shards are priced as on the GPU"
    assert any(line.startswith(f"fsdp_config.{said}=true: ") for line in on.reading.assumed)
    assert on.judged is not None
    assert off.judged is not None
    states = 12 * 8.03e9 / 2  # fp32 weights and both moments, over two ranks
    assert off.judged.peak_memory_bytes - on.judged.peak_memory_bytes > states
    assert not any("offload_optimizer off" in change.what for change in on.changes)
    assert not any(said in line for line in (*off.reading.unpriced, *off.reading.assumed))


def test_the_trainers_word_offload_is_read_too() -> None:
    reading = formats.read(ARGUMENTS + "fsdp: full_shard auto_wrap offload\n", "run.yaml").reading
    assert reading.setup.offload_optimizer
    assert 'fsdp="full_shard auto_wrap offload"' in reading.unpriced


def test_recompute_that_fsdps_section_says_is_read_where_strategies_are_listed_too() -> None:
    section = "fsdp: [full_shard]\nfsdp_config: {activation_checkpointing: true}\n"
    assert formats.read(ARGUMENTS + section, "run.yaml").reading.setup.recompute == "full"


FULL = (
    "base_model: a/b\nsequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\ngradient_checkpointing: true\nbf16: auto\n"
)


@pytest.mark.parametrize(
    ("more", "gpus", "why"),
    [
        ("expert_parallel_size: 4\n", 4, ""),
        ("expert_parallel_size: 1\n", 8, ""),
        ("expert_parallel_size: 2\ndp_shard_size: 2\nfsdp_config: {fsdp_version: 2}\n", 4, ""),
        ("expert_parallel_size: 4\n", 8, "expert_parallel_size=4 x dp_shard_size=1 must be the 8 GPUs"),
        ("expert_parallel_size: 2\ndp_shard_size: 2\nfsdp_config: {fsdp_version: 2}\n", 8, "=2 x dp_shard_size=2 must be the 8 GPUs"),
        ("expert_parallel_size: 3\n", 3, "expert_parallel_size=3 does not divide the 8 experts of a layer"),
        (
            "expert_parallel_size: 2\ntensor_parallel_size: 2\n",
            4,
            "expert_parallel_size=2 with tensor_parallel_size=2: Axolotl has not both",
        ),
    ],
)
def test_groups_of_axolotls_experts_fill_the_gpus(more: str, gpus: int, why: str, tmp_path: Path) -> None:
    """They were "legal yes" in any number: integrations/expert_parallel/plugin.py raises for these before the model is loaded."""
    (tmp_path / "run.yaml").write_text(FULL + "optimizer: adamw_torch\n" + more)
    recipe = "llama3_8b" if "tensor" in more else "mixtral_8x7b"  # DeepSpeed divides experts by no tensor parallelism either
    found = so.audit(tmp_path / "run.yaml", gpus=gpus, cluster="dgx_h100", recipe=recipe, **{"train.seq_length": 2048})
    assert (found.problem or "").count("rule axolotl_experts") == bool(why)
    assert why in (found.problem or "")


FACTORY = """\
stage: sft
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
learning_rate: 1e-5
"""
SWIFTS = "model: a/b\ntuner_type: full\nmax_length: 2048\nper_device_train_batch_size: 1\nlearning_rate: 1e-5\n"


@pytest.mark.parametrize(
    ("text", "by_cause"),
    [
        # Weights, gradients, optimizer's states and what the step has beside them, in bytes per parameter.
        (FULL + "optimizer: paged_adamw_8bit\n", (2, 2, 0, 0)),
        (FULL + "optimizer: adamw_bnb_8bit\n", (2, 2, 2 * (1 + 4 / 256), 0)),
        (FULL + "optimizer: adamw_torch_fused\n", (2, 2, 4, 0)),
        (FULL + "optimizer: adamw_torch\n", (2, 2, 4, 2)),
        (SWIFTS, (2, 2, 4, 0)),
        (FACTORY + "pure_bf16: true\n", (2, 2, 4, 0)),
        (FACTORY + "bf16: true\n", (4, 4, 8, 2)),  # cast to fp32, and autocast's copies
        (ARGUMENTS + "gradient_checkpointing: true\ntorch_dtype: bfloat16\n", (2, 2, 4, 0)),
        (ARGUMENTS + "gradient_checkpointing: true\ntorch_dtype: auto\n", (2, 2, 4, 0)),
        (ARGUMENTS + "gradient_checkpointing: true\ndtype: float32\n", (4, 4, 8, 2)),
    ],
)
def test_without_deepspeed_and_fsdp_states_are_of_the_type_in_which_weights_are_loaded(
    text: str, by_cause: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    found = so.audit(tmp_path / "run.yaml", gpus=1, cluster="dgx_h200", recipe="llama3_8b", **{"train.seq_length": 2048})
    assert found.plan is not None
    assert found.plan.training.precision == "bf16"
    stage = found.plan.prediction.by_stage[0]
    parameters = 8.03e9
    weights, gradients, optimizer, transient = by_cause
    assert stage.memory_by_cause["weights"] == pytest.approx(weights * parameters, rel=0.01)
    assert stage.memory_by_cause["gradients"] == pytest.approx(gradients * parameters, rel=0.01)
    assert stage.memory_by_cause["optimizer"] == pytest.approx(optimizer * parameters, rel=0.01)
    states = (weights + gradients + optimizer + transient) * parameters
    assert states < stage.peak_memory_bytes < states + 16e9, "what is left are activations, logits and the context"
    assert stage.memory_by_cause["buffers"] < 1e9, "one rank reduces nothing"


def test_data_parallel_ranks_have_a_copy_of_all_gradients_in_their_buckets(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FULL + "optimizer: paged_adamw_8bit\n")
    found = so.audit(tmp_path / "run.yaml", gpus=8, cluster="dgx_h200", recipe="llama3_8b")
    assert found.plan is not None
    assert found.plan.prediction.by_stage[0].memory_by_cause["buffers"] == pytest.approx(2 * 8.03e9, rel=0.01)


def test_a_full_fine_tuning_by_axolotl_fits_where_its_bf16_states_do(tmp_path: Path) -> None:
    """examples/llama-3/fft-8b.yaml, of which an fp32 master of 30 GiB was priced that nobody keeps."""
    text = FULL.replace("2048", "8192") + "optimizer: paged_adamw_8bit\nattn_implementation: flash_attention_2\nsample_packing: true\n"
    (tmp_path / "run.yaml").write_text(text)
    found = so.audit(tmp_path / "run.yaml", gpus=1, cluster="dgx_h100", recipe="llama3_8b")
    assert found.fits
    assert not any("attn_implementation" in line or "optim" in line for line in found.reading.unpriced)
    (tmp_path / "run.yaml").write_text(text.replace("8192", "16384").replace("paged_adamw_8bit", "adamw_torch_fused"))
    longer = so.audit(
        tmp_path / "run.yaml", gpus=1, cluster="dgx_a100_40gb", recipe="llama3_8b", **{"model.max_position_embeddings": 16384}
    )
    assert longer.reading.slower == ("sample_packing=true",), "packing fills sequences, as is priced, and its attention takes less time"
    assert longer.fits is False


def test_what_keeps_fp32_weights_is_priced_as_before_and_a_type_that_nobody_says_leaves_doubt(tmp_path: Path) -> None:
    for more in ("deepspeed: {zero_optimization: {stage: 2}}\n", "fsdp: full_shard\n", "use_peft: true\n"):
        assert formats.read(ARGUMENTS + "torch_dtype: bfloat16\n" + more, "run.yaml").reading.states is None
    (tmp_path / "run.yaml").write_text(ARGUMENTS + "packing: true\n")
    found = so.audit(tmp_path / "run.yaml", gpus=1, cluster="dgx_h100", recipe="llama3_8b")
    assert found.judged is not None
    assert found.judged.lacking_bytes
    assert found.fits is None
    assert "torch_dtype (the file does not say it)" in found.reading.unpriced


@pytest.mark.parametrize("section", ["fsdp: true\n", "fsdp: full_shard auto_wrap\n", "fsdp: [full_shard]\n"])
def test_fsdps_section_says_what_is_freed_after_forward_before_its_strategy_does(section: str) -> None:
    text = ARGUMENTS + section + "fsdp_config:\n  version: 2\n  reshard_after_forward: false  # kept\n"
    source = formats.read(text, "run.yaml")
    before = source.reading.setup
    assert before.zero_stage == 2
    assert source.edited(before, replace(before, zero_stage=3), 8) == text.replace("forward: false", "forward: true")
    assert formats.read(ARGUMENTS + section, "run.yaml").reading.setup.zero_stage == 3


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("limit_all_gathers: true", "beside"),
        ("limit_all_gathers: false", "unpriced"),
        ("fsdp_limit_all_gathers: false", "unpriced"),
        ("backward_prefetch: BACKWARD_PRE", "beside"),
        ("backward_prefetch: NO_PREFETCH", "slower"),
        ("forward_prefetch: true", "slower"),
        ("forward_prefetch: false", "beside"),
        ("auto_wrap_policy: TRANSFORMER_BASED_WRAP", "beside"),
        ("auto_wrap_policy: NO_WRAP", "unpriced"),
        ("fsdp_min_num_params: 100000000", "unpriced"),
        ("transformer_layer_cls_to_wrap: MistralDecoderLayer", "beside"),
        ("transformer_layer_cls_to_wrap: MistralModel", "unpriced"),
        ("fsdp_state_dict_type: FULL_STATE_DICT", "beside"),
        ("use_orig_params: true", "beside"),
        ("gathers_of_tomorrow: 3", "unknown"),
    ],
)
@pytest.mark.parametrize("program", [AXOLOTL.split("deepspeed", maxsplit=1)[0], ARGUMENTS + "fsdp: full_shard\n", ACCELERATE])
def test_each_setting_of_fsdps_section_is_in_the_list_of_what_it_does(program: str, setting: str, where: str) -> None:
    reading = formats.read(f"{program}fsdp_config:\n  {setting}\n", "run.yaml").reading
    name, value = setting.split(": ")
    lists = {one for one in ("unknown", "unpriced", "slower", "beside") for line in getattr(reading, one) if f"fsdp_config.{name}=" in line}
    assert lists == {where}, value


BRIDGES = "python scripts/training/run_recipe.py {} model.tensor_model_parallel_size=2 train.micro_batch_size=1 train.global_batch_size=16"


@pytest.mark.parametrize(
    ("flags", "adapters"),
    [
        ("--recipe glm_45v_peft_config", True),
        ("--recipe glm_45v_sft_config --mode=lora", True),
        ("--model glm_45v --mode dora", True),
        ("--recipe glm_45v_sft_config --mode sft", False),
        ("--recipe glm_45v_pretrain_config", False),
    ],
)
def test_adapters_that_bridges_flags_ask_for_are_priced_and_their_rank_said_to_be_the_classs(flags: str, adapters: bool) -> None:
    reading = formats.read(f"{BRIDGES.format(flags)}\n", "run.sh").reading
    assert (reading.keys.get("lora.rank") == 32) == adapters
    assert any(line.startswith("peft.dim=32: the class's own; a recipe") for line in reading.unpriced) == adapters


@pytest.mark.parametrize(
    ("recipe", "more", "freezes"),
    [
        ("qwen3_vl_8b_pretrain_4gpu_h100_bf16_mock_config", "", {"vision": True, "language": True}),
        ("qwen3_vl_30b_a3b_pretrain_8gpu_gb300_bf16_config", "", {"vision": True, "language": True}),
        ("qwen35_vl_35b_a3b_pretrain_mock_config", " model.freeze_language_model=false", {"vision": True, "language": False}),
        ("qwen35_vl_27b_pretrain_mock_config", "", {"vision": True}),
        ("qwen35_vl_35b_a3b_pretrain_8gpu_gb300_bf16_config", "", {}),
        ("qwen35_vl_35b_a3b_pretrain_16gpu_h100_bf16_functional_config", "", {}),
        ("qwen3_vl_8b_sft_config", "", {}),
    ],
)
def test_what_bridges_recipe_freezes_is_read_by_its_name(recipe: str, more: str, freezes: dict[str, bool]) -> None:
    """As its function sets it (Megatron-Bridge 067f987), from a command and in Python that begins with it."""
    python = f"cfg = {recipe}()\ncfg.train.micro_batch_size = 1\n"
    python += "cfg.model.freeze_language_model = False\n" if more else ""
    for text, name in ((BRIDGES.format(f"--recipe {recipe}") + more, "run.sh"), (python, "run.py")):
        reading = formats.read(f"{text}\n", name).reading
        assert reading.freezes == freezes, name
        assert any(line.startswith(f"{recipe} freezes vision") for line in reading.assumed) == bool(freezes)


def test_another_optimizer_of_nemo_rls_fsdp_is_said_to_be_unpriced() -> None:
    text = "policy: {{train_global_batch_size: 8, dtensor_cfg: {{enabled: true}}, optimizer: {{name: {}}}}}"
    plain, other = (formats.read(text.format(name), "run.yaml").reading for name in ("torch.optim.AdamW", "torch.optim.SGD"))
    assert {*other.unpriced} - {*plain.unpriced} == {"policy.optimizer.name=torch.optim.SGD"}


@pytest.mark.parametrize(
    ("said", "mode"),
    [("", "full"), ("gradient_checkpointing: false\n", "full"), ("disable_gradient_checkpointing: true\n", "none")],
)
def test_llama_factory_recomputes_every_layer_unless_it_is_told_not_to(said: str, mode: str) -> None:
    source = formats.read(FACTORY + said, "run.yaml")
    setup = source.reading.setup
    assert setup.recompute == mode
    assert any("LLaMA-Factory's own" in line for line in source.reading.assumed) == ("disable" not in said)
    other = "none" if mode == "full" else "full"
    changed = source.edited(setup, replace(setup, recompute=other), 8)
    assert changed is not None
    assert formats.read(changed, "run.yaml").reading.setup.recompute == other


def test_a_preview_of_llama_factory_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="LLaMA-Factory's v1, a preview"):
        formats.read(
            "model: a/b\nmodel_class: llm\ndist_config: {name: deepspeed}\nmicro_batch_size: 1\nlearning_rate: 1e-5\nnum_train_epochs: 1\n",
            "run.yaml",
        )


@pytest.mark.parametrize(
    ("text", "changes", "lines"),
    [
        (AXOLOTL.split("deepspeed", maxsplit=1)[0], {"zero_stage": 2, "cp": 2}, ["deepspeed: {", "context_parallel_size: 2", "steps: 8"]),
        (AXOLOTL, {"cp": 2, "recompute": "none"}, ["context_parallel_size: 2", "steps: 8", "gradient_checkpointing: false"]),
        (AXOLOTL.replace("gradient_checkpointing: true\n", ""), {"recompute": "full"}, ["gradient_checkpointing: true"]),
        (AXOLOTL, {"tp": 2}, ["tensor_parallel: {autotp_size: 2}", "steps: 8"]),
        (AXOLOTL.split("deepspeed", maxsplit=1)[0], {"tp": 16}, ["tensor_parallel_size: 16", "steps: 64"]),
        (
            AXOLOTL.replace("deepspeed: {zero_optimization: {stage: 2}}", "fsdp_config: {reshard_after_forward: true}"),
            {"tp": 2, "cp": 2},
            ["tensor_parallel_size: 2", "context_parallel_size: 2", "steps: 16"],
        ),
        (FACTORY, {"zero_stage": 3, "tp": 1}, ["deepspeed: {", "stage: 3"]),
        (ARGUMENTS, {"zero_stage": 1, "offload_optimizer": True}, ["deepspeed: {", "offload_optimizer: {device: cpu}"]),
    ],
)
def test_a_setting_that_the_file_does_not_have_is_added(text: str, changes: dict[str, Any], lines: list[str]) -> None:
    source = formats.read(text, "run.yaml")
    after = replace(source.reading.setup, **changes)
    changed = source.edited(source.reading.setup, after, 16)
    assert changed is not None
    assert all(line in changed for line in lines), changed
    again = formats.read(changed, "run.yaml").reading
    assert again.setup == after
    assert again.unknown == source.reading.unknown
    assert {**again.keys} == {**source.reading.keys}


def test_copies_of_the_model_have_no_groups_beside_them(tmp_path: Path) -> None:
    """accelerate's ParallelismConfig refuses tp and cp beside replicas that nothing shards (parallelism_config.py:336)."""
    text = AXOLOTL.split("deepspeed", maxsplit=1)[0]
    source = formats.read(text, "run.yaml")
    keys: dict[str, Any] = {"recipe": "llama3_8b", "cluster": "dgx_h100", "gpus": 8}
    for axis, name in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size")):
        assert source.edited(source.reading.setup, replace(source.reading.setup, **{axis: 2}), 16) is None
        (tmp_path / "run.yaml").write_text(f"{text}{name}: 2\n")
        found = so.audit(tmp_path / "run.yaml", **keys)
        assert f"{axis}=2" in found.problem
        assert "beside shards alone" in found.problem
        (tmp_path / "run.yaml").write_text(f"{text}{name}: 2\ndeepspeed: {{zero_optimization: {{stage: 2}}}}\n")
        assert so.audit(tmp_path / "run.yaml", **keys).legal
    (tmp_path / "run.yaml").write_text(text)
    shown = so.audit(tmp_path / "run.yaml", **keys)
    rows = [row for row in (*shown.changes, shown.together, shown.searched) if row is not None]
    assert rows
    assert all(row.diff for row in rows), [row.what for row in rows]


NEMO_RLS = """\
policy:
  precision: bfloat16
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}
"""


def test_the_verdict_stands_before_what_is_beside_of_which_many_are_counted(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(NEMO_RLS + "logger: {" + ", ".join(f"of_mine_{index}: 1" for index in range(200)) + "}\n")
    found = so.audit(tmp_path / "run.yaml", recipe="llama3_8b", cluster="dgx_h100", gpus=8)
    lines = str(found).splitlines()
    verdict = [index for index, line in enumerate(lines) if line.startswith(("legal ", "memory     fits"))]
    listed = next(index for index, line in enumerate(lines) if line.startswith("beside "))
    assert len(verdict) == 2
    assert verdict[-1] < listed
    assert lines[listed] == "beside     201 settings of data, logs and checkpoints: --json lists them"
    assert len(found.summary()["beside"]) == 201, "and the switch megatron_cfg.enabled"


def test_a_type_that_was_read_is_not_listed_as_a_setting_beside() -> None:
    reading = formats.read(NEMO_RLS, "run.yaml").reading
    assert reading.keys["train.precision"] == "bf16"
    assert not any("precision" in line for line in reading.beside)


@pytest.mark.parametrize(
    ("text", "name", "etp"),
    [
        (SWIFT.replace("--recompute_granularity none", "--expert_model_parallel_size 4"), "run.sh", 1),
        (SWIFT.replace("--recompute_granularity none", "--expert_model_parallel_size 4 --expert_tensor_parallel_size 2"), "run.sh", 2),
        (BRIDGE.replace("-mb 1", "-mb 1 -ep 4"), "run.sh", 1),
        (SLIME, "run.sh", 2),
        (VERL, "run.sh", 2),
    ],
)
def test_the_experts_own_tp_is_the_programs_default(text: str, name: str, etp: int, tmp_path: Path) -> None:
    """ms-swift's is 1 (megatron_args.py:619), Megatron's own tp: of a file that does not say it, whether it names the experts or not."""
    (tmp_path / name).write_text(text)
    found = so.audit(tmp_path / name, recipe="qwen3_30b_a3b", cluster="dgx_h100")
    assert found.plan is not None
    assert (found.plan.tp, found.plan.etp) == (2, etp)
    said = [line for line in found.reading.assumed if line.startswith("expert_tensor_parallel_size=1")]
    assert bool(said) == (etp == 1)
    assert any("of all but deepseek_v2's, olmoe's, glm_45v's" in line for line in said) == (text.startswith(BRIDGE[:20]) and etp == 1)
    dense = so.audit(tmp_path / name, recipe="qwen3_8b", cluster="dgx_h100")
    assert dense.setup.etp == 1


def test_ms_swifts_batch_is_16_where_nothing_is_said_and_its_words_of_experts_are_known(tmp_path: Path) -> None:
    """megatron_args.py:483; register.py:171 (transformers' experts_implementation)."""
    (tmp_path / "run.sh").write_text(re.sub(r"--global_batch_size \d+", "", SWIFT))
    found = so.audit(tmp_path / "run.sh", recipe="qwen3_8b", cluster="dgx_h100")
    assert found.plan is not None
    assert found.plan.global_batch_size == 16
    assert any(line.startswith("global_batch_size=16: the recipes' own") for line in found.reading.assumed)
    plain = "swift sft --model a/b --tuner_type lora --per_device_train_batch_size 2 --learning_rate 1e-4 --max_length 2048 "
    reading = formats.read(plain + "--experts_impl grouped_mm --router_aux_loss_coef 1e-3", "run.sh").reading
    assert reading.unknown == ()
    assert any(line.startswith("experts_impl=") for line in reading.unpriced)
    assert any(line.startswith("router_aux_loss_coef=") for line in reading.result)


ALL = {"lora.rank": 8, "lora.alpha": 32, "lora.targets": "all-linear", "lora.dropout": 0.05, "lora.bridge": "mcore-bridge"}
ADAPTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("--tuner_type lora", ALL, []),
    ("--train_type lora --lora_rank 16 --lora_alpha 64 --lora_dropout 0", ALL | {"lora.rank": 16, "lora.alpha": 64, "lora.dropout": 0}, []),
    ("--tuner_type lora --target_modules linear_qkv linear_proj --merge_lora true", ALL | {"lora.targets": "linear_qkv,linear_proj"}, []),
    ("--tuner_type lora --lora_rank 4 --use_rslora true", ALL | {"lora.rank": 4, "lora.alpha": 64}, []),
    ("--tuner_type lora --target_modules all-linear all-router", ALL, ["target_modules=all-router"]),
    ("--tuner_type lora --modules_to_save word_embeddings --lora_bias all", ALL, ["modules_to_save=word_embeddings", "lora_bias=all"]),
    ("--tuner_type lora --target_regex '.*fc1'", ALL, ["target_regex=.*fc1"]),
    ("--tuner_type lora --freeze_llm false --freeze_vit true --freeze_aligner true", ALL, []),
    ("--tuner_type lora_llm", ALL, ["tuner_type=lora_llm: trains what looks at images, priced as frozen"]),
    ("--adapters out/checkpoint-100", ALL, ["adapters=out/checkpoint-100"]),
    ("--tuner_type full", {}, []),
    ("", {}, []),
]


@pytest.mark.parametrize(("flags", "keys", "unpriced"), ADAPTED)
def test_ms_swifts_adapters_under_megatron_are_read(flags: str, keys: dict[str, Any], unpriced: list[str]) -> None:
    """With its own defaults (megatron_args.py:448, MegatronTunerMixin): all weights were priced as trained. What has no price is listed, so
    that what does not fit can't be told."""
    export = "NPROC_PER_NODE=1 \\\nmegatron export --merge_lora true\n"
    reading = formats.read(f"{SWIFT.rstrip()} {flags}\n{export}", "run.sh").reading
    assert reading.keys["gpus"] == 8
    assert {name: value for name, value in reading.keys.items() if name.startswith("lora.")} == keys
    assert [*reading.unpriced] == unpriced
    assert any(line.startswith("lora_rank=8 ") for line in reading.assumed) == (bool(keys) and "lora_rank" not in flags)


def test_ms_swifts_adapters_take_what_its_published_run_of_qwen3_30b_a3b_does(tmp_path: Path) -> None:
    """examples/megatron/lora/moe.sh of 3602360 says 2 * 62 GiB, at samples of at most 2,048 tokens; each of 128 experts has adapters of its
    own, which were priced as one for all of a rank's."""
    more = (
        "--tuner_type lora --lora_rank 8 --expert_model_parallel_size 2 --recompute_granularity full --recompute_method uniform "
        "--recompute_num_layers 1 --sequence_parallel true --cross_entropy_loss_fusion true"
    )
    one = "--micro_batch_size 8 --global_batch_size 16 --max_length 2048"
    (tmp_path / "run.sh").write_text(f"NPROC_PER_NODE=2 megatron sft --model a/b {one} {more}\n")
    found = so.audit(tmp_path / "run.sh", recipe="qwen3_30b_a3b", cluster="dgx_a100_80gb")
    assert found.plan is not None
    assert found.legal
    assert found.plan.prediction.peak_memory_bytes / 2**30 == pytest.approx(62, rel=0.05)
    experts, others = 64 * 48 * 8 * (2048 + 1536 + 768 + 2048), 48 * 8 * (2048 + 5120 + 4096 + 2048)
    causes = found.plan.prediction.by_stage[0].memory_by_cause
    assert causes["optimizer"] == pytest.approx(12 * (experts + others / 2), rel=1e-3), "of 64 experts on this rank alone, of the rest half"


@pytest.mark.parametrize("name", ["run.sh", "run.yaml"])
def test_ms_swifts_recompute_is_turned_off_by_its_own_word(name: str) -> None:
    """No place was found for it: a null is the word None to its reader, and the method beside `none` does nothing."""
    flags = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
    text = SWIFT.replace("--recompute_granularity none", flags)
    if name == "run.yaml":
        said = (word.split() for word in text.replace("\\", "").split(" --")[1:])
        text = "".join(f"{flag}: {value}\n" for flag, value in said)
    source = formats.read(text, name)
    assert source.reading.setup.recompute == "full"
    changed = source.edited(source.reading.setup, replace(source.reading.setup, recompute="none"), 8)
    assert changed is not None
    assert re.search("recompute_granularity:? none", changed)
    assert formats.read(changed, name).reading.setup == replace(source.reading.setup, recompute="none")


def test_a_change_of_ms_swifts_tp_that_the_experts_follow_is_written() -> None:
    source = formats.read(SWIFT.replace("--tensor_model_parallel_size 2", "--expert_model_parallel_size 4"), "run.sh")
    changed = source.edited(source.reading.setup, replace(source.reading.setup, tp=2, etp=2), 8)
    assert changed is not None
    assert "--expert_tensor_parallel_size 2" in changed


def test_adapters_of_a_model_with_experts_are_on_its_attention_as_other_programs_have_them(tmp_path: Path) -> None:
    """ms-swift's published examples/models/qwen3_vl/zero3.sh was told that it is illegal: our engine's own rule was said of its program."""
    (tmp_path / "run.yaml").write_text(SWIFTS.replace("full", "lora\nlora_rank: 8\ntarget_modules: all-linear\ndeepspeed: zero3"))
    found = so.audit(tmp_path / "run.yaml", recipe="qwen3_30b_a3b", cluster="dgx_h100", gpus=8)
    assert found.legal, found.problem
    assert any(line.startswith("adapters are on the attention's linears") for line in found.reading.assumed)
    assert found.plan is not None
    # Rank 8 on q, k, v and o of 48 layers: (in + out) each.
    assert folder.saved_bytes(found.plan) == 14 * 48 * 8 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert not any("ep " in change.what for change in found.changes), "nobody has tried AutoEP with adapters"


SLIMES = """\
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
PERF_ARGS=(
  --tensor-model-parallel-size 2
)
python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} ${PERF_ARGS[@]} --micro-batch-size 1 --lr 1e-6 \\
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4 --use-kl-loss
"""
SLIMES_MODEL = """\
arr=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < 3 )); then
    arr+=(0)
  else
    arr+=(1)
  fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=(--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-experts 8 --moe-ffn-hidden-size 512 --swiglu
  --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-layer-freq "$MOE_LAYER_FREQ" --vocab-size ${VOCABULARY:-32000})
"""


def test_a_file_that_a_script_sources_from_its_own_folder_is_read(tmp_path: Path) -> None:
    """The model of all of slime's scripts stands in such a file, with the layers that have experts in an array that a loop fills."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text("NLAYERS=8\nVOCABULARY=50000\n" + SLIMES_MODEL)
    (tmp_path / "run.sh").write_text(SLIMES)
    found = so.audit(tmp_path / "run.sh", cluster="dgx_h100")
    plan = found.plan
    assert plan is not None
    assert (plan.model.num_layers, plan.model.vocab_size, plan.moe_token_dispatcher_type) == (8, 50000, "alltoall")
    assert [run.layers for run in plan.model.pattern or ()] == [3, 5]
    (tmp_path / "models/small.sh").write_text("N=3\nM=5\n" + SLIMES_MODEL.replace('"$MOE_LAYER_FREQ"', "[0]*$N+[1]*$M"))
    assert [run.layers for run in so.audit(tmp_path / "run.sh", cluster="dgx_h100").settings.architecture.pattern or ()] == [3, 5]
    assert (plan.global_batch_size, plan.training.seq_length) == (32 * 8 // 4, 4096)
    assert any("every sequence has 4096 tokens: slime's own" in line for line in found.reading.assumed)
    longer = so.audit(tmp_path / "run.sh", cluster="dgx_h100", train={"seq_length": 9216})
    assert longer.settings.training.seq_length == 9216
    assert not any("every sequence has" in line for line in longer.reading.assumed)
    before = found.reading.setup
    assert found.source.edited(before, replace(before, tp=4, etp=4), 16) == SLIMES.replace("size 2\n", "size 4\n")
    assert found.source.edited(before, replace(before, moe_token_dispatcher_type="flex"), 16) is None, "it stands in the other file"


def test_slime_fills_a_pass_with_tokens(tmp_path: Path) -> None:
    """As many of the longest samples that it lets in as its tokens hold, of all of a sequence's ranks; a power of two that divides the 64
    samples of a step over 4 replicas."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text("NLAYERS=8\n" + SLIMES_MODEL)

    def audited(more: str) -> tuple[int, int, str, tuple[str, ...]]:
        (tmp_path / "run.sh").write_text(f"{SLIMES.rstrip()} --context-parallel-size 2 --use-dynamic-batch-size {more}\n")
        found = so.audit(tmp_path / "run.sh", cluster="dgx_h100")
        assert found.plan is not None
        return found.plan.micro_batch_size, found.plan.training.seq_length, found.reading.longest, found.reading.unpriced

    longest = "--rollout-max-response-len"
    assert audited(f"{longest} 8192 --max-tokens-per-gpu 9216") == (2, 8192, "", ())
    assert audited(f"{longest} 7168 --rollout-max-prompt-len 2048 --max-tokens-per-gpu 9216")[:2] == (2, 9216)
    assert audited(f"{longest} 8192 --max-tokens-per-gpu 2048") == (1, 8192, longest, ()), "a longer sample goes alone"
    assert audited("--max-tokens-per-gpu 65536")[:2] == (16, 4096), "no more than a replica has"
    assert audited("") == (1, 4096, "--seq-length", ("--use-dynamic-batch-size",))


def test_a_sourced_file_that_is_not_here_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIMES.replace("python3 train.py", "python3 train.py --global-batch-size 64"))
    assumed = formats.read((tmp_path / "run.sh").read_text(), str(tmp_path / "run.sh")).reading.assumed
    assert 'line 2: `source "${SCRIPT_DIR}/models/small.sh"` is not here: what it sets is not known' in assumed


def test_a_file_that_sources_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIMES + "source run.sh\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text("NLAYERS=8\n" + SLIMES_MODEL + 'source "$(dirname "$0")/small.sh"\n')
    assert formats.read((tmp_path / "run.sh").read_text(), str(tmp_path / "run.sh")).reading.keys["model.num_layers"] == 8


@pytest.mark.parametrize(
    ("queues", "flags", "cluster", "problem"),
    [
        ("32", "--tensor-model-parallel-size 2", "dgx_h100", "CUDA_DEVICE_MAX_CONNECTIONS=32: Megatron asserts 1 under tensor or context"),
        ("1", "--tensor-model-parallel-size 2", "dgx_h100", ""),
        ("32", "--tensor-model-parallel-size 2", "dgx_b200", ""),
        ("32", "", "dgx_h100", ""),
        ("1", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
         "--no-gradient-accumulation-fusion", "dgx_h100", "CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron-FSDP asserts more"),
    ],
)  # fmt: skip
def test_a_script_s_queues_are_those_that_megatron_asserts(queues: str, flags: str, cluster: str, problem: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    start = f"export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-{queues}}}\ntorchrun --nproc-per-node 8 pretrain_gpt.py"
    script.write_text(f"{start} {MODEL} --bf16 --use-distributed-optimizer {flags}\n")
    found = so.audit(script, gpus=8, cluster=cluster)
    assert found.problem.startswith(problem) if problem else not found.problem


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (SWIFT.replace("granularity none", "granularity full"), "run.sh", "recompute_granularity=full needs recompute_method"),
        (SWIFT.replace("granularity none", "granularity selective --recompute_method uniform"), "run.sh", "recompute_method is of "),
        (SWIFT.replace("granularity none", "granularity full --recompute_method uniform --recompute_num_layers 1"), "run.sh", None),
        (FACTORY + "bf16: true\nfp16: true\n", "full.yaml", "bf16 and fp16: TrainingArguments takes one"),
        (FACTORY + "bf16: true\nfp16: false\n", "full.yaml", None),
    ],
)
def test_what_megatron_s_and_the_trainer_s_classes_refuse_is_refused_in_other_programs_files(
    text: str, name: str, problem: str | None
) -> None:
    broken = formats.read(text, name).reading.broken
    assert next(iter(broken), "").startswith(problem) if problem else broken == ()
