"""A table says a value and reads it back as the same, and no setting that costs time or memory is called harmless."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from msgspec.structs import asdict

from orchestrator.audit import script
from orchestrator.engines.passthrough import FIELD_OF, fields, flags
from orchestrator.engines.transformer_config import PLAN
from orchestrator.errors import InputError
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.shared import Activation
from orchestrator.words import megatron as words
from orchestrator.words import terms
from orchestrator.words.tools import activation_of


def drawn_parts(number: int) -> list[tuple[terms.Table, Any]]:
    draw = random.Random(0)
    one = draw.choice
    found: list[tuple[terms.Table, Any]] = []
    for _ in range(number):
        net = GatedDeltaNet(num_key_heads=one([4, 16]), num_value_heads=one([16, 32]), conv_kernel=one([3, 4]))
        latent = LatentAttention(
            q_lora_rank=one([None, 96]), kv_lora_rank=one([32, 64]), qk_head_dim=64, qk_rope_head_dim=32, v_head_dim=48
        )
        groups, capacity, bias, shared = one([None, 4]), one([None, 1.25]), one([True, False]), one([0, 128])
        experts = Experts(
            num_experts=one([8, 16]), topk=one([1, 2, 4]), ffn_hidden_size=one([64, 128]), shared_ffn_hidden_size=shared,
            shared_gate=bool(shared) and one([True, False]), scaling=one([1.0, 2.5]), groups=groups, group_topk=2 if groups else None,
            capacity_factor=capacity, pad_to_capacity=capacity is not None and one([True, False]), expert_bias=bias,
            bias_update_rate=one([1e-3, 1e-2]) if bias else 1e-3,
        )  # fmt: skip
        found += [(words.DELTA_NET, net), (words.LATENT_ATTENTION, latent), ((*words.EXPERTS, *words.ROUTING), experts)]
    return found


@pytest.mark.parametrize(("table", "part"), drawn_parts(50))
def test_a_part_is_read_back_as_itself(table: terms.Table, part: Any) -> None:
    said = terms.say(table, part)
    assert type(part)(**terms.read(table, said)) == part
    assert {name: terms.decided(table, name, part) for name in said} == said
    assert terms.differs(table, part, part) == {}


def test_what_changes_is_told_apart() -> None:
    one = Experts(num_experts=8, topk=2, ffn_hidden_size=64)
    other = Experts(**asdict(one) | {"topk": 4, "scaling": 2.5})
    table = (*words.EXPERTS, *words.ROUTING)
    assert terms.differs(table, one, other) == {"moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    assert terms.differs(table, other, one) == {"moe_router_topk": 2, "moe_router_topk_scaling_factor": terms.NOTHING}
    assert terms.decided(table, "moe_router_topk_scaling_factor", one) == 1.0, "also where nothing is said"
    assert terms.decided(table, "tensor_model_parallel_size", one) is terms.NOTHING


def of_activation(activation: str) -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(activation=activation))


def test_every_activation_is_read_back_or_stands_without_a_switch() -> None:
    for activation in get_args(Activation):
        said = terms.say((*words.ACTIVATION, *words.OTHER_ACTIVATION), of_activation(activation))
        assert words.activation(said) == activation
        assert sum(terms.say(words.ACTIVATION, of_activation(activation)).values()) == (
            activation not in (*words.WITHOUT_SWITCH, "geglu", "reglu", "relu", "quick_gelu")
        )
    assert words.activation({}) is None
    named = "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    assert (activation_of(named, False), activation_of(named, True)) == ("quick_gelu", "clamped_swiglu"), "the gate tells them apart"


KNOWN = {FIELD_OF.get(name, name) for name in flags()} | {name for section in fields().values() for name in section}
COSTLY = (
    "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "fp4_recipe", "step_batch_size_schedule", "cuda_graph_impl", "fp8_param",
    "fp8_recipe", "recompute_modules", "cpu_offloading", "optimizer_cpu_offload", "bucket_size", "cross_entropy_loss_fusion", "nccl_ub",
    "calculate_per_token_loss", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_paged_stash", "fsdp_double_buffer",
    "num_layers_at_start_in_bf16", "eval_micro_batch_size", "log_params_norm", "profile", "reset_attention_mask", "moe_latent_size",
)  # fmt: skip
COST_WORDS = (
    "parallel",
    "recompute",
    "offload",
    "fusion",
    "overlap",
    "moe_",
    "fp8",
    "fp4",
    "cuda_graph",
    "bucket",
    "layers",
    "size",
    "mamba",
)
"""What stands in the names of settings that cost."""
NAMED_SO = (
    "async_ckpt_use_cpu_shm", "ckpt_fully_parallel_load", "ckpt_fully_parallel_load_exchange_algo", "tensorboard_queue_size",
    "ckpt_fully_parallel_load_process_group", "ckpt_fully_parallel_save", "ckpt_fully_parallel_save_process_group",
    "flight_recorder_trace_buffer_size", "log_world_size_to_tensorboard", "data_parallel_random_init", "cuda_graph_warmup_steps",
)  # fmt: skip
"""Harmless ones that are named so: of writing checkpoints and logs, of first weights, and of the steps before graphs are captured."""


READ_ALONE = ("share_embeddings_and_output_weights",)


def test_nothing_that_costs_is_called_harmless() -> None:
    assert [name for name in COSTLY if terms.kind("megatron_lm", name) not in ("cost", "time")] == []
    free = {name for name in KNOWN if terms.kind("megatron_lm", name) not in ("cost", "time")}
    assert sorted(name for name in free if any(part in name for part in COST_WORDS) and name not in NAMED_SO) == []
    decided = {term.theirs for term in PLAN if term.ours}
    assert free.isdisjoint(decided | terms.names(words.DELTA_NET, words.LATENT_ATTENTION, words.EXPERTS, words.ROUTING, words.ACTIVATION))
    assert terms.kind("megatron_lm", "no_such_setting") == "cost"
    assert sorted(name for name in decided if name not in KNOWN) == [*READ_ALONE], "no setting that no program has"


MEANS_NOTHING_ALONE = frozenset(
    (
        # of latent attention, of rotary positions and windows that this model has not, of experts' routers as they are without
        *("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mscale", "mscale_all_dim", "rope_type"),
        *("rotary_scaling_factor", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "window_attn_skip_freq"),
        *("softmax_type", "glu_linear_offset", "activation_func_clamp_value", "moe_shared_expert_gate", "moe_router_bias_update_rate"),
        *("moe_router_load_balancing_type", "moe_router_score_function"),
        # of schedules by samples, or of another decay
        *("lr_decay_iters", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_iters", "lr_wsd_decay_style", "train_samples"),
        # what holds in any case, or with another program
        *("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "moe_permute_fusion", "openai_gelu", "tokenizer_model"),
        *("vocab_extra_ids", "checkpoint_num_layers", "recompute_granularity", "use_flash_attn"),
    )
)
"""Destinations of flags which, alone and with a made-up value, change nothing of what this script trains, nor how."""


def test_no_flag_of_any_release_is_read_in_silence() -> None:
    """Each either changes the plan or the training that is read, or is listed: as not priced, beside, assumed, idle, unknown or broken."""
    base = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --bf16 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-4 --vocab-size 32000 "
        "--tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel "
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    )
    plain = script.read(base).reading
    made_up = {"int": "3", "float": "0.3", "true": "", "false": "", "both": "", "str": "zzz", "list": "3 5"}
    silent = set()
    for flag, (destination, kind) in script.known_flags().items():
        if f"{flag} " in base:
            continue
        values = kind.removesuffix("?").split("|") if "|" in kind else [made_up.get(kind, "3")]
        if all(_says_nothing(f"{base}{flag} {value}\n", plain) for value in values):
            silent.add(destination)
    assert silent - MEANS_NOTHING_ALONE == set()
    assert len(silent) > 20


NEXT = (
    "--enable-mhc-connections", "--mhc-num-residual-streams 4", "--mhc-recompute-layer-num 1", "--mhc-sinkhorn-iterations 3",
    "--mhc-init-gating-factor 0.1", "--gdp-cutedsl-kernel", "--gdp-num-householder 2", "--gdp-num-chunk-states-to-recompute 2",
    "--gtp-remat-nccl-ub", "--gtp-expert-remat-nccl-ub", "--gtp-remat-opt-in-modules qkv", "--megatron-fsdp-version 2",
    "--gtp-remat-reduce-scatter-with-fp32-accumulation", "--moe-combine-bwd-dtype fp8", "--moe-dispatch-fwd-dtype fp8",
    "--moe-use-grouped-tensor", "--mtp-hsm", "--muon-use-syrk", "--output-logit-dtype bf16", "--batch-invariant-backend x",
)  # fmt: skip
"""What is new and changes time, memory or the model in Megatron-LM's main of 2026-08-22 (d98e8a64, core 0.20 in development, of which no
release has a tag): `flags.py KINDS` of it, less logs, checkpoints, generation and reinforcement learning."""
OF_020 = ("--tensor-parallel-num-weight-shards 2", "--expert-tensor-parallel-num-weight-shards 2", "--hybrid-context-parallel")
"""What NVIDIA's recipes set that only 0.20 has whole, though 0.19's parser knows it."""


def test_what_the_next_release_brings_is_unknown_or_unpriced_and_never_silent() -> None:
    base = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    silent = []
    for said in (*NEXT, *OF_020):
        reading = script.read(f"{base}{said}\n").reading
        told = (*reading.unpriced, *(() if said in OF_020 else reading.unknown))
        flag = said.split()[0]
        if not any(flag in each for each in told) or terms.kind("megatron_lm", flag[2:].replace("-", "_")) != "cost":
            silent.append((said, reading.unpriced, reading.unknown))
    assert silent == []


def _says_nothing(text: str, plain: Any) -> bool:
    try:
        return bool(script.read(text).reading == plain)
    except InputError:
        return False


@pytest.mark.parametrize(
    ("said", "needs"),
    [
        ("--data-parallel-sharding-strategy optim_grads_params", "use_megatron_fsdp"),
        ("--recompute-modules core_attn mlp", "recompute_granularity"),
        ("--cuda-graph-modules attn moe_router", "cuda_graph_impl"),
        ("--fp8-recipe blockwise", "fp8"),
        ("--moe-flex-dispatcher-backend hybridep", "moe_token_dispatcher_type=flex"),
    ],
)
def test_a_setting_whose_other_half_is_off_is_said_to_do_nothing(said: str, needs: str) -> None:
    base = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    (line,) = [one for one in script.read(f"{base}{said}\n").reading.assumed if "does nothing without" in one]
    assert line.endswith(f" does nothing without {needs}")
    on = {"fp8": "--bf16 --fp8-format hybrid", "recompute_granularity": "--recompute-granularity selective"}
    on |= {"use_megatron_fsdp": "--use-megatron-fsdp", "cuda_graph_impl": "--cuda-graph-impl local"}
    with_it = on.get(needs, "--num-experts 4 --moe-token-dispatcher-type flex")
    assert not any("does nothing without" in one for one in script.read(f"{base}{said} {with_it}\n").reading.assumed)


@pytest.mark.parametrize(("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", None), ("optim_grads_params", None)])
def test_what_megatrons_fsdp_shares_no_more_of_than_its_data_parallelism_is_said_to_be_priced_as_that(strategy: str, stage: Any) -> None:
    base = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    reading = script.read(f"{base}--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}\n").reading
    priced = [line for line in reading.assumed if "is priced as Megatron's own data parallelism" in line]
    assert [line.endswith(f"zero_stage={stage}") for line in priced] == ([] if stage is None else [True])
    assert reading.setup.megatron_fsdp == (stage is None)


def test_every_pattern_is_of_settings_that_some_program_has() -> None:
    known = KNOWN | {destination for destination, _ in script.known_flags().values()}
    patterns = [*terms.kinds("megatron_lm")]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)] == []
    assert len(set(patterns)) == len(patterns)


def test_costs_of_a_script_are_said_as_costs_and_a_schedule_of_batches_is_read_whole() -> None:
    lost = 'SIZES="0:16 2.4B:320 5B:640"\n'
    line = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    more = "--squared-relu --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4096 --fp4-recipe nvfp4 --cuda-graph-impl full_iteration "
    for said in ("$SIZES", '"$SIZES"', '"0:16 2.4B:320 5B:640"'):
        reading = script.read(f"{lost}{line}{more}--step-batch-size-schedule {said} --lr 1e-3 --train-iters 5\n").reading
        assert reading.unknown == ()
        assert reading.unpriced == ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank 4096", "--fp4-recipe nvfp4")
        assert reading.beside == ()
        assert reading.keys["model.activation"] == "relu2"
        assert reading.keys["train.global_batch_size"] == 640
        assert "step_batch_size_schedule=0:16 2.4B:320 5B:640: the batch at its end is priced, 640" in reading.assumed
        assert [one for one in reading.assumed if one.startswith("hybrid_context_parallel stops Megatron-LM 0.16.1 and 0.19 before")]
        assert reading.setup.cuda_graph_impl == "full_iteration"
