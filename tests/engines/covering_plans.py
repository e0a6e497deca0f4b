"""Named plans that cover what the two engines can say: golden files, DeepSpeed's config and Megatron's classes are checked on these."""

from __future__ import annotations

from hand_plans import BARE, BERT, GPT, LLAMA, LLAMA3_8B, T5, make_plan, training_for
from msgspec.structs import replace

from orchestrator.model.training import Training
from orchestrator.plan import Plan, RunSettings, Source

LONG = Training(global_batch_size=512, seq_length=8192, lr=1.5e-4, min_lr=1.5e-5, warmup=100, steps=1000)
SGD = {"optimizer": "sgd", "clip": 0.0, "schedule": "constant"}

MEGATRON: dict[str, Plan] = {
    "llama3_8b_vpp": make_plan(
        model=LLAMA3_8B, training=LONG, world=32, tp=2, pp=4, vpp=2, sequence_parallel=True, recompute=[("selective", 4)] * 4
    ),
    "llama3_8b_uneven": make_plan(
        model=replace(LLAMA3_8B, rope_scaling_factor=8.0),
        gpu="A100-SXM-80GB",
        training=LONG,
        world=64,
        tp=4,
        pp=4,
        sizes=[7, 9, 9, 7],
        sequence_parallel=True,
        recompute=[("full", 7), ("full", 4), ("none", 0), ("none", 0)],
        run=RunSettings(data="/data/it's here/corpus.bin", tokenizer="/tok", save_every=50),
    ),
    "llama3_8b_b200": make_plan(model=LLAMA3_8B, gpu="B200", training=LONG, world=16, tp=2, sequence_parallel=True),
    "llama3_8b_fp8_delayed": make_plan(
        model=LLAMA3_8B,
        training=replace(LONG, precision="fp8", fp8_recipe="delayed", precision_aware_optimizer=True, exp_avg_dtype="bf16"),
        world=16,
        tp=2,
        sequence_parallel=True,
        recompute=[("mlp", 32)],
    ),
    "llama3_8b_fp8_weights": make_plan(
        model=LLAMA3_8B,
        gpu="B200",
        training=replace(LONG, precision="fp8", fp8_recipe="mxfp8"),
        world=16,
        tp=2,
        sequence_parallel=True,
        fp8_param_gather=True,
    ),
    "llama3_8b_fsdp_fp8": make_plan(
        model=LLAMA3_8B,
        training=replace(LONG, precision="fp8", fp8_recipe="delayed"),
        world=16,
        zero_stage=3,
        megatron_fsdp=True,
        fp8_param_gather=True,
        keep_fp8_transpose_cache=True,
    ),
    "llama3_8b_offload": make_plan(
        model=LLAMA3_8B,
        training=replace(LONG, precision_aware_optimizer=True),
        world=16,
        tp=2,
        sequence_parallel=True,
        offload_optimizer=True,
    ),
    "llama3_8b_offload_modules": make_plan(
        model=LLAMA3_8B, training=LONG, world=16, tp=2, offload_modules="qkv_linear+core_attn+attn_proj"
    ),
    "llama3_8b_muon": make_plan(
        model=LLAMA3_8B,
        training=replace(LONG, optimizer="muon", muon_tp_mode="distributed"),
        world=16,
        tp=2,
        sequence_parallel=True,
        zero_stage=0,
        overlap_grad_reduce=False,
    ),
    "gpt_cpu": make_plan(gpu="cpu", world=4, tp=2, pp=2, zero_stage=0, recompute=[("full", 4), ("none", 0)]),
    "gpt_fp16_v100": make_plan(
        gpu="V100-SXM2-16GB", software=BARE, tp=2, training=training_for(GPT, precision="fp16", schedule="linear", warmup=10)
    ),
    "gpt_bf16_reduce": make_plan(training=training_for(GPT, grad_reduce_dtype="bf16", grad_accum_dtype="bf16"), tp=2, pp=2),
    "gpt_sgd": make_plan(zero_stage=0, training=training_for(GPT, **SGD), software=BARE),
    "gpt_lone_embedding": make_plan(world=4, pp=4, sizes=[0, 4, 4, 0]),
    "gpt_uneven_vpp": make_plan(world=8, pp=2, vpp=3, tp=2, sizes=[1, 2, 1, 1, 2, 1], recompute=[("full", 1), ("full", 2)]),
    "gpt_vpp_groups": replace(
        make_plan(world=4, pp=4, vpp=2, training=training_for(GPT, global_batch_size=10)), microbatch_group_size_per_vp_stage=6
    ),
    "llama_groups_beyond_tp": make_plan(model=LLAMA, tp=8, sequence_parallel=True),
    "bert_pipeline": make_plan(model=BERT, tp=2, pp=2, sequence_parallel=True),
    "bert_uneven": make_plan(model=BERT, pp=4, sizes=[1, 3, 3, 1]),
    "t5_16": make_plan(model=replace(T5, activation="gelu"), gpu="A100-SXM-40GB", world=16, tp=2, recompute=[("full", 2)]),
    "t5_plain": make_plan(
        model=replace(T5, activation="gelu", normalization="LayerNorm", position_embedding="learned_absolute", add_bias_linear=True),
        world=16,
        tp=4,
        recompute=[("selective", 4)],
    ),
    "gpt_blend_and_extra": replace(
        make_plan(tp=2, zero_stage=1, cross_entropy_loss_fusion=True, ddp_bucket_size=1000),
        run=RunSettings(
            blend=(Source(weight=0.7, path="/data/web.idx"), Source(weight=0.3, path="/data/it's code.idx")),
            split=(90.0, 10.0),
            eval_every=50,
            wandb={"project": "it's mine"},
        ),
        extra={
            "megatron": {
                "init_method_std": 0.01,
                "bias_dropout_fusion": False,
                "tensor_model_parallel_size": 2,
                "log_throughput": True,
            }
        },
    ),
}

DEEPSPEED: dict[str, Plan] = {
    "ds_llama3_8b_zero3": make_plan("megatron_deepspeed", LLAMA3_8B, training=LONG, world=64, zero_stage=3, recompute=[("full", 32)]),
    "ds_llama3_8b_zero2_tp": make_plan(
        "megatron_deepspeed", LLAMA3_8B, training=LONG, world=16, tp=4, zero_stage=2, sequence_parallel=True, micro_batch_size=2
    ),
    "ds_llama3_8b_zero1_pp": make_plan("megatron_deepspeed", LLAMA3_8B, training=LONG, world=32, tp=2, pp=4, sizes=[7, 9, 9, 7]),
    "ds_llama3_8b_pipeline": replace(
        make_plan(
            *("megatron_deepspeed", LLAMA3_8B),
            **{"training": LONG, "world": 32, "tp": 2, "pp": 4, "sequence_parallel": True, "sizes": [7, 9, 9, 7]},
            recompute=[("full", 3), ("mlp", 4), ("none", 0), ("none", 0)],
        ),
        schedule="deepspeed_1f1b",
    ),
    "ds_cpu_pipeline": replace(make_plan("megatron_deepspeed", GPT, gpu="cpu", world=4, pp=4, zero_stage=0), schedule="deepspeed_1f1b"),
    "ds_offload": make_plan("megatron_deepspeed", GPT, zero_stage=2, offload_optimizer=True),
    "ds_fp16_v100": make_plan(
        "megatron_deepspeed",
        gpu="V100-SXM2-16GB",
        zero_stage=3,
        training=training_for(GPT, precision="fp16", schedule="linear", min_lr=1e-5),
    ),
    "ds_bf16_linear": make_plan(
        "megatron_deepspeed", LLAMA, tp=2, zero_stage=2, training=training_for(LLAMA, schedule="linear", warmup=5, grad_reduce_dtype="bf16")
    ),
    "ds_bf16_zero0": make_plan("megatron_deepspeed", zero_stage=0, training=training_for(GPT, grad_accum_dtype="bf16")),
    "ds_cpu_zero0": make_plan("megatron_deepspeed", LLAMA, gpu="cpu", world=4, tp=2, zero_stage=0, sequence_parallel=True),
    "ds_cpu_zero1_pp": make_plan("megatron_deepspeed", GPT, gpu="cpu", world=4, pp=2, zero_stage=1),
    "ds_cpu_zero3_sgd": make_plan("megatron_deepspeed", GPT, gpu="cpu", zero_stage=3, training=training_for(GPT, precision="fp32", **SGD)),
    "ds_extra": replace(
        make_plan("megatron_deepspeed", gpu="cpu", world=2, zero_stage=2),
        extra={
            "megatron": {"init_method_std": 0.01},
            "ds": {"zero_optimization.reduce_bucket_size": 1000, "steps_per_print": 7, "comms_logger.enabled": True},
        },
    ),
}

ALL = MEGATRON | DEEPSPEED
