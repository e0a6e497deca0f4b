"""Random plans' megatron_args.sh through Megatron-LM's own parser, validate_args, sample counts and configuration classes, value by value
against engine.json.

    MEGATRON_LM=CHECKOUT python tests/megatron_lm/thousand.py [NUMBER [SEED]]

Under a tag after core_v0.16.1 the checkout's megatron.core is used too (it needs Triton, also on a machine without a GPU). Prints what
failed by kind, and exits with 1 where something did.

Plans are for the checkout's own release. 2026-11-22, seed 7, with experts, latent attention, prediction heads, windows and groups of
micro-batches in the draw: 1,000 files (of 11,275 drawn, the others illegal) under tag core_v0.16.1 in 138 s, and 1,000 (of 14,921) under
core_v0.19.0 in 197 s, beside each other on two cores: none refused, no value another. Under 0.19 another 21 plans had no arguments, of
models that no worker of ours trains there. 2026-11-23, seed 7, with the experts' exchange beside another micro-batch in the draw: 400 files
under core_v0.16.1 (8 with it, 4 with delayed weight gradients) and 400 under core_v0.19.0 (22 and 6): none refused, no value another. With
gated delta nets in the draw, seed 8: 400 under core_v0.16.1 (20 with them, 12 with gates of attention) and 400 under core_v0.19.0 (23 and
10): none refused, no value another; these are checked against the fields that engine.json would have. 2026-11-24, seed 9, after the words
became tables: 400 files under either tag, none refused, no value another. 2026-11-27, seed 11, with all kinds of CUDA graphs and experts
that pad to a capacity in the draw: 150 under core_v0.16.1 (17 with graphs) and 150 under core_v0.19.0 (16): none refused, no value another.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import types
import typing
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

COMPUTED = {
    # The class of the data-parallel wrapper computes it from the group's size (distributed_data_parallel.py:64-80).
    ("ddp", "bucket_size"),
    # Weights are initialised on the device either way; a machine without a GPU is not what Megatron-LM's programs are for.
    ("transformer_config", "use_cpu_initialization"),
}


ONLY_IN: dict[str, list[dict[str, Any]]] = {
    "0.16.1": [
        {"async_tensor_model_parallel_allreduce": False}, {"scatter_gather_tensors_in_pipeline": False}, {"muon_use_nesterov": True},
    ],
    "0.19.2": [
        {"high_priority_a2a_comm_stream": True}, {"lion_beta1": 0.9}, {"activation_offload_fraction": 0.5}, {"nvtx_ranges": True},
        {"flight_recorder_dump_path": "it's here"}, {"save_tokens_per_expert_interval": 10}, {"delta_offload_bytes_across_pp_ranks": 1},
        {"cuda_graph_modules": ["attn", "mlp"]}, {"pad_vocab_size": True},
    ],
}  # fmt: skip
"""Users' own values that the parser or the classes of one release alone have, by that release."""

COUNTED = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--experimental-attention-variant", "--attention-output-gate",
           "--cuda-graph-impl", "--moe-pad-experts-for-cuda-graph-inference", "--moe-pad-expert-input-to-capacity")  # fmt: skip
"""Flags whose files are counted, as most draws can't have them."""


def random_plan(draw: random.Random, version: str) -> Any:
    """A plan of the megatron engine for this version of Megatron-core from everything that its command line can say; None where these
    choices are not legal together."""
    from hand_plans import BERT, GPT, LLAMA, T5, make_plan, workload_of
    from msgspec.structs import replace

    from orchestrator.engines import ENGINES
    from orchestrator.engines.megatron_args import why_not
    from orchestrator.engines.megatron_versions import release_of
    from orchestrator.errors import InputError
    from orchestrator.hardware.spec import Software
    from orchestrator.model.architecture import Run
    from orchestrator.model.parts.attention import GroupedQueryAttention
    from orchestrator.model.parts.experts import Experts
    from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
    from orchestrator.model.parts.latent_attention import LatentAttention
    from orchestrator.model.training import Training
    from orchestrator.plan import RunSettings, Source
    from orchestrator.strategy.legality import broken_rule
    from orchestrator.strategy.spec import PP_BEFORE_DP

    one = draw.choice
    family = one([GPT, GPT, LLAMA, LLAMA, LLAMA, BERT, T5])
    heads = one([8, 12, 16, 32, 40, 96])
    layers = one([2, 4, 8, 12, 24, 32])
    model = replace(
        family, num_layers=layers, decoder_num_layers=layers if family is T5 else 0, num_attention_heads=heads, hidden_size=64 * heads,
        ffn_hidden_size=one([128, 256]) * heads, kv_channels=one([None, 64]), vocab_size=one([260, 32000, 50257, 128256, 151665]),
        max_position_embeddings=4096, norm_epsilon=one([1e-5, 1e-6]), hidden_dropout=one([0.0, 0.1]), attention_dropout=one([0.0, 0.1]),
        make_vocab_size_divisible_by=one([128, 128, 64, 384]),
    )  # fmt: skip
    if family is LLAMA:
        model = replace(
            model, num_query_groups=one([heads, heads // 2, heads // 4]), rotary_base=one([10000, 500000]), add_qkv_bias=one([True, False]),
            rope_scaling_factor=one([None, None, 8.0]), tie_embeddings=one([True, False]),
        )  # fmt: skip
        if one([True, False]):
            latent = LatentAttention(q_lora_rank=one([None, 96]), kv_lora_rank=64, qk_head_dim=64, qk_rope_head_dim=32, v_head_dim=48)
            experts = Experts(
                num_experts=one([8, 16]), topk=one([2, 4]), ffn_hidden_size=128, shared_ffn_hidden_size=one([0, 128]),
                score=one(["softmax", "sigmoid"]), aux_loss_coeff=one([0.0, 0.01]), groups=one([None, 4]), group_topk=2,
            )  # fmt: skip
            experts = replace(experts, group_topk=2 if experts.groups else None, expert_bias=experts.score == "sigmoid")
            if one([True, False, False]):
                experts = replace(experts, capacity_factor=1.5, pad_to_capacity=one([True, True, False]))
            mixer = one([GroupedQueryAttention(), GroupedQueryAttention(qk_norm="head"), latent])
            pattern = one([(Run(layers=layers, feed_forward=experts),), (Run(layers=1), Run(layers=layers - 1, feed_forward=experts))])
            model = replace(model, mixer=mixer, pattern=pattern, mtp_num_layers=one([0, 1]), rope_scaling_factor=None)
            if one([True, False]):
                keys, values = one([(4, 8), (8, 8), (8, 32)])
                net = GatedDeltaNet(num_key_heads=keys, num_value_heads=values, key_head_dim=64, value_head_dim=one([64, 128]))
                gated = GroupedQueryAttention(qk_norm=one(["head", None]), output_gate=one([True, False]))
                runs = (Run(layers=one([1, 3]), mixer=net, feed_forward=experts), Run(layers=1, mixer=gated, feed_forward=experts))
                model = replace(model, pattern=runs, rotary_percent=one([1.0, 0.25]), zero_centered_norm=one([True, False]))
    elif family is not T5:
        model = replace(model, tie_embeddings=family is BERT or one([True, False]))
    else:
        model = replace(model, activation="gelu")  # relu has no flag
    gpu = one(["H100-SXM-80GB", "H100-SXM-80GB", "A100-SXM-80GB", "B200", "V100-SXM2-32GB"])
    precision = one(["bf16", "bf16", "bf16", "fp16", "fp32", "fp8"])
    optimizer = one(["adamw", "adamw", "adamw", "sgd"])
    reduced = one(["fp32", "fp32", "bf16"]) if precision in ("bf16", "fp8") else "fp32"
    aware = precision in ("bf16", "fp8") and optimizer == "adamw" and one([True, False, False])
    steps = one([10, 100, 1000])
    batch = one([64, 128, 256, 96])
    style = one(["cosine", "linear", "constant", "inverse_square_root", "wsd"])
    shapes = ["linear", "cosine", "minus_sqrt", "exponential"]
    decays = {"decay_steps": one([1, steps // 5]), "decay": one(shapes)} if style == "wsd" else {}
    warmup = 1 if style == "inverse_square_root" else one([0, 1, 3, steps // 2])
    training = Training(
        global_batch_size=batch, seq_length=one([512, 2048, 4096]), decoder_seq_length=256 if family is T5 else None, precision=precision,
        fp8_recipe=one(["delayed", "tensorwise", "blockwise", "mxfp8"]) if precision == "fp8" else None, optimizer=optimizer,
        lr=one([3e-4, 1e-3, 6e-5]), min_lr=one([0.0, 1e-5]), schedule=style, warmup=warmup, steps=steps, **decays,
        betas=one([(0.9, 0.95), (0.9, 0.999)]), eps=one([1e-8, 1e-5]),
        weight_decay=one([0.1, 0.01, 0.0]), clip=one([1.0, 0.0, 0.5]), grad_reduce_dtype=reduced, grad_accum_dtype=reduced,
        precision_aware_optimizer=aware, exp_avg_dtype=one(["fp32", "bf16", "fp8"]) if aware else "fp32", seed=draw.randint(1, 10**6),
    )  # fmt: skip
    world = one([8, 16, 24, 32, 64])
    tp, pp, cp = one([1, 1, 2, 4, 8, 3]), one([1, 1, 2, 4, 8]), one([1, 1, 1, 2])
    if world % (tp * pp * cp) or (pp > 1 and family is T5):
        return None
    dp = world // (tp * pp * cp)
    # The experts' exchange beside another micro-batch, and what it takes of the rest.
    beside = bool(model.experts) and precision != "fp32" and one([True, False])
    vpp = one([2, 3] if beside else [1, 1, 2, 3]) if pp > 1 else 1
    micro = one([1, 2, 4])
    if batch % (dp * micro):
        return None
    chunks = pp * vpp
    sizes = [layers // chunks] * chunks
    if pp > 1 and layers >= chunks and one([True, False]):
        for _ in range(layers - sum(sizes)):
            sizes[draw.randrange(chunks)] += 1
        if min(sizes) > 1:
            sizes[0], sizes[1] = sizes[0] - 1, sizes[1] + 1
    if family is not T5 and (sum(sizes) != layers or min(sizes) < 1):
        return None
    mode = one(["none", "none", "selective", "layernorm", "core_attn+layernorm", *([] if beside else ["mlp", "full"])])
    recompute: list[tuple[str, int]] | None = None
    if mode == "full":  # the first so many layers of every chunk, all of shorter ones; or so many of a stage, as long as that is the same
        first = draw.randint(1, max(sizes))
        recompute = [("full", first if one([True, True, False]) else draw.randint(1, first)) for _ in range(pp)]
    elif mode != "none":
        recompute = [(mode, layers)] * pp
    run: dict[str, Any] = {"save_every": one([0, 10])}
    data = one(["none", "one", "blend", "valid"])
    if data == "one":
        run |= {"data": "/data/corpus.idx", "tokenizer": one([None, "/tok"])}
    elif data == "blend":
        run |= {"blend": (Source(weight=0.7, path="/data/web.idx"), Source(weight=0.3, path="/data/it's code.idx"))}
    elif data == "valid":
        run |= {"data": "/data/corpus.idx", "valid": "/data/valid.idx", "eval_every": one([0, 7]), "eval_steps": 3}
    if data in ("one", "blend") and one([True, False]):
        run |= {"split": one([(90.0, 10.0), (8.0, 1.0, 1.0)]), "eval_every": one([0, 5]), "eval_steps": 2}
    if one([True, False, False]):
        run["wandb"] = {"project": "it's mine"}
    extra = one([{}, {}, {"init_method_std": 0.01}, {"log_throughput": True}, {"bias_dropout_fusion": False},
                 {"average_in_collective": True}, {"window_size": [1024, 0]}, {"bias_activation_fusion": False},
                 *ONLY_IN[release_of(version).version]])  # fmt: skip
    zero = one([0, 1, 1, 1, 2, 3])
    more: dict[str, Any] = {}
    if zero >= 2:
        more["megatron_fsdp"] = True
    if zero == 1 and one([True, False, False]) and dp % 2 == 0 and dp > 2:
        more["zero_shard_size"] = dp * cp // 2
    if tp > 1:
        more["tp_comm_overlap"] = one([True, False, False, False])
    if zero == 1 and reduced == "bf16":
        more["reduce_scatter_with_fp32_accumulation"] = one([True, False])
    if zero and precision == "fp8":
        more["fp8_param_gather"] = one([True, False])
    if vpp > 1:  # interleaving by pp micro-batches, or by more
        more["microbatch_group_size_per_vp_stage"] = one([None, draw.randint(pp, max(pp, batch // (dp * micro)))])
    if cp > 1:
        more["cp_comm_type"] = one(["p2p", "a2a", "all_gather"])
    full = Software(megatron_core=version)
    software = one([full, full, full, replace(full, transformer_engine=False, flash_attention=False, apex=False)])
    if software.transformer_engine and precision != "fp32" and one([True, False, False, False]):
        more["cuda_graph_impl"] = one(["local", "local", "transformer_engine", "full_iteration"])
    plan = make_plan(
        model=model, gpu=gpu, world=world, software=software, training=training, tp=tp, pp=pp, vpp=vpp, cp=cp, zero_stage=zero,
        micro_batch_size=micro, sizes=None if family is T5 else sizes, recompute=recompute,
        sequence_parallel=tp > 1 and one([True, True, False]),
        overlap_grad_reduce=one([True, True, False]), overlap_param_gather=one([True, True, False]), **more,
    )  # fmt: skip
    plan = replace(plan, run=RunSettings(**run), extra={"megatron": extra} if extra else {})
    if model.experts:
        more = {"ep": one([1, 2, 4, 8]), "etp": one([1, tp]), "moe_token_dispatcher_type": one(["alltoall", "allgather", "flex"])}
        if any(part.shared_ffn_hidden_size for part in model.experts):
            more["moe_shared_expert_overlap"] = one([True, False])
        if beside:
            more |= {"ep": one([2, 4, 8]), "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": one([True, False])}
            more |= {"moe_token_dispatcher_type": one(["alltoall", "flex"]), "moe_shared_expert_overlap": False}
        plan = replace(plan, **more)
    if pp > 1 and dp > 1 and one([True, False, False]):
        plan = replace(plan, rank_order=PP_BEFORE_DP)
    rules = ENGINES["megatron"].capabilities(software)
    if broken_rule(rules, plan.candidate, workload_of(plan)) is not None:
        return None
    try:
        return plan if why_not(plan) is None else None
    except InputError as error:  # of stages that recompute some of their layers by modules
        if not error.key.startswith("stages"):
            raise
        return None


def words_of(script: str, folder: Path) -> list[str]:
    """What bash reads in megatron_args.sh."""
    path = folder / "megatron_args.sh"
    path.write_text(script)
    done = subprocess.run(
        ["bash", "-euc", f'source {path}; printf "%s\\0" "${{MEGATRON_ARGS[@]}}"'], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def present(*args: Any, **kwargs: Any) -> None:
    """Stands for a part of Transformer Engine of which Megatron's checks ask only whether it is there."""


class FusedAdam:
    """Stands for Transformer Engine's, of whose arguments Megatron asks (optimizer_config.py)."""

    def __init__(
        self, params: Any = None, master_weights: Any = None, use_decoupled_grad: Any = None, store_param_remainders: Any = None,
        master_weight_dtype: Any = None, exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None,
    ) -> None: ...  # fmt: skip


class Megatron:
    """The checkout's own code, in this process, without a GPU."""

    def __init__(self, checkout: str) -> None:
        sys.path.insert(0, checkout)
        sys.path.insert(1, str(ROOT))
        sys.path.insert(2, str(ROOT / "tests" / "engines"))
        from orchestrator.cpu import training as cpu_training

        cpu_training.without_triton()
        if not hasattr(typing, "override"):  # from 0.17 on Megatron-LM is for Python 3.12
            typing.override = lambda method: method  # type: ignore[attr-defined]
        import torch
        from megatron.training import arguments, global_vars, training

        try:
            from megatron.training.argument_utils import core_transformer_config_from_args
        except ImportError:
            from megatron.training.arguments import core_transformer_config_from_args
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.transformer.moe import moe_utils

        permutations = ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs")
        self.te_parts = {
            rope_utils: ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
            moe_utils: (*permutations, "fused_unpermute"),
        }
        self.torch, self.arguments, self.training, self.globals = torch, arguments, training, global_vars
        self.transformer_config = core_transformer_config_from_args
        release = (Path(checkout) / "megatron" / "core" / "package_info.py").read_text()
        self.version = ".".join(re.search(rf"^{part} = (\d+)", release, re.M).group(1) for part in ("MAJOR", "MINOR", "PATCH"))  # type: ignore[union-attr]
        import megatron.core

        assert Path(megatron.core.__file__).is_relative_to(checkout), megatron.core.__file__

    def read(self, words: list[str], plan: Any, environment: dict[str, str], *, known_alone: bool = False) -> Any:
        """The arguments as the program has them when it starts. `known_alone`: without those that it doesn't know."""
        capability = float(plan.cluster.gpu.compute_capability)
        major = (int(capability), int(10 * capability) % 10)
        self.torch.cuda.get_device_capability = lambda *args: major
        for module in (self.arguments, sys.modules["megatron.training.utils"], sys.modules["megatron.core.utils"]):
            if hasattr(module, "get_device_arch_version"):
                module.get_device_arch_version = lambda: major[0]
        te = plan.cluster.software.transformer_engine
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron.") and "is_te_min_version" in vars(module):
                module.is_te_min_version = lambda *args, **kwargs: te  # type: ignore[attr-defined]
        for module, names in self.te_parts.items():
            for name in names:
                setattr(module, name, present if te else None)
        for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
            sys.modules.pop(name, None)
            if te:
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].FusedAdam = FusedAdam  # type: ignore[attr-defined]
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ |= environment | {"WORLD_SIZE": str(plan.world_size), "RANK": "0", "LOCAL_RANK": "0"}
        sys.argv = ["pretrain_gpt.py", *words]
        args = self.arguments.parse_args(ignore_unknown_args=known_alone)
        self.arguments.validate_args(args)
        args.iteration = 0
        return args


def same(wanted: Any, found: Any, torch: Any) -> bool:
    """Whether a value of engine.json is the one of Megatron's class."""
    if isinstance(found, torch.dtype):
        return getattr(torch, str(wanted), None) is found
    if callable(found):
        return bool(wanted == getattr(found, "__name__", ""))
    if hasattr(found, "name") and not isinstance(found, str):  # an enumeration
        return str(wanted) == found.name
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return all(same(one, other, torch) for one, other in zip(wanted, found, strict=True))
    if isinstance(found, tuple):
        return list(found) == wanted
    if type(found).__name__ == "PipelineParallelLayerLayout":
        return True  # compared by `layout`, as the text that was given
    return bool(wanted == found) or (not wanted and not found)


def differences(megatron: Megatron, plan: Any, engine: dict[str, Any], args: Any) -> list[str]:
    """Every value that Megatron has otherwise than engine.json."""
    from orchestrator.engines.megatron_args import common_recompute
    from orchestrator.engines.passthrough import FLAG_OF
    from orchestrator.model.schedule import learning_rate

    training, torch = megatron.training, megatron.torch
    found: list[str] = []

    def compare(what: str, wanted: Any, there: Any) -> None:
        if not same(wanted, there, torch):
            found.append(f"{what}: engine.json {wanted!r}, Megatron {there!r}")

    config = megatron.transformer_config(args)
    for name, value in (engine["transformer_config"] | common_recompute(plan)).items():
        if ("transformer_config", name) in COMPUTED or name == "transformer_impl":
            continue
        if name == "recompute_modules" and value is None:
            continue  # Megatron's default stands where nothing is recomputed by modules
        if name == "add_qkv_bias":
            value = value or engine["transformer_config"]["add_bias_linear"]  # Megatron says of both that there is one
        compare(f"transformer_config.{name}", value, getattr(config, name))
    compare("transformer_impl", engine["module"]["implementation"], args.transformer_impl)
    (optimizer, *_) = training.get_megatron_optimizer_config(args)
    others = "sgd_" if engine["optimizer"]["optimizer"] == "adam" else "adam_"
    for name, value in engine["optimizer"].items():
        if name.startswith(others):
            continue
        if hasattr(optimizer, name):
            compare(f"optimizer.{name}", value, getattr(optimizer, name))
        elif hasattr(args, name):
            compare(f"optimizer.{name}", value, getattr(args, name))
        elif value != (True if name == "decoupled_weight_decay" else None):
            found.append(f"optimizer.{name}: Megatron has none")
    flags = FLAG_OF | {"grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32"}
    for name, value in engine["ddp"].items():
        if name == "grad_reduce_in_fp32" and plan.training.precision == "fp32":
            continue  # gradients are of the weights' type, fp32, either way
        if ("ddp", name) not in COMPUTED:
            compare(f"ddp.{name}", value, getattr(args, flags.get(name, name)))
    padded = vocabulary(args) if args.padded_vocab_size is None else args.padded_vocab_size
    model = engine["model"]
    compare("vocabulary", model["vocab_size"], padded)
    compare("positions", model["max_sequence_length"], args.max_position_embeddings)
    compare("position_embedding_type", model["position_embedding_type"], args.position_embedding_type)
    compare("tied", model["share_embeddings_and_output_weights"], not args.untie_embeddings_and_output_weights)
    if "rotary_base" in model:
        compare("rotary_base", model["rotary_base"], args.rotary_base)
    compare("rope_scaling", model.get("rope_scaling", False), args.use_rope_scaling)
    sizes = {
        "data_parallel_size": plan.dp, "seq_length": plan.training.seq_length, "train_iters": plan.training.steps,
        "micro_batch_size": plan.micro_batch_size, "global_batch_size": plan.global_batch_size, "seed": plan.training.seed,
    }  # fmt: skip
    for name, value in sizes.items():
        compare(name, value, getattr(args, name))
    compare("rank order", "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp", "-".join(plan.rank_order))
    megatron.globals._GLOBAL_ARGS = args
    train, valid, _ = training.get_train_valid_test_num_samples()
    compare("samples", plan.training.steps * plan.global_batch_size, train)
    evaluations = plan.training.steps // plan.run.eval_every + 1 if plan.run.eval_every else 0
    compare("samples of evaluation", evaluations * plan.run.eval_steps * plan.global_batch_size, valid)
    group: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "max_lr": plan.training.lr, "min_lr": plan.training.min_lr}
    scheduler = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[group]))
    for step in range(min(plan.training.steps, 120)):
        wanted = learning_rate(plan.training, step)
        if abs(group["lr"] - wanted) > 1e-9 * plan.training.lr:
            of = f"of step {step + 1} of a {plan.training.schedule} schedule"
            found.append(f"rate: {of}, ours {wanted:.9g}, Megatron's {group['lr']:.9g}")
            break
        scheduler.step(increment=plan.global_batch_size)
    return found


def vocabulary(args: Any) -> int:
    """NullTokenizer's ids, padded as Megatron pads them."""
    try:
        from megatron.training.vocab_utils import calculate_padded_vocab_size
    except ImportError:
        from megatron.training.tokenizer.tokenizer import _vocab_size_with_padding

        return int(_vocab_size_with_padding(args.vocab_size + 1, args, logging_enabled=False))
    return int(
        calculate_padded_vocab_size(
            args.vocab_size + 1, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
    )


def main(number: int, seed: int) -> int:
    import tempfile

    warnings.filterwarnings("ignore")
    megatron = Megatron(str(Path(os.environ["MEGATRON_LM"]).resolve()))
    from orchestrator.engines import ENGINES
    from orchestrator.engines.megatron.translate import PASSES
    from orchestrator.engines.translation import layers_fields
    from orchestrator.errors import InputError

    draw = random.Random(seed)
    begin = time.perf_counter()
    done, tried, kinds, examples, unsaid = 0, 0, Counter[str](), dict[str, str](), Counter[str]()
    beside: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        while done < number:
            tried += 1
            plan = random_plan(draw, megatron.version)
            if plan is None:
                continue
            try:
                job = ENGINES["megatron"].translate(plan)
            except InputError as error:
                if not error.args and "stages" not in str(error) and "divide" not in str(error):
                    raise
                continue
            files = {file.path: file.content for file in job.files}
            if "megatron_args.sh" not in files:
                unsaid[next(note for note in job.notes if "megatron_args.sh" in note)] += 1
                continue
            words = words_of(files["megatron_args.sh"], Path(folder))
            done += 1
            beside.update(word for word in words if word in COUNTED)
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    args = megatron.read(words, plan, dict(job.environment))
                    # What our worker doesn't train has no engine.json: its fields are those that would stand there.
                    engine = json.loads(files["engine.json"] if "engine.json" in files else json.dumps(layers_fields(plan, PASSES)))
                    wrong = differences(megatron, plan, engine, args)
            except (Exception, SystemExit) as error:
                wrong = [f"refused: {type(error).__name__}: {said.getvalue()[-300:] if isinstance(error, SystemExit) else error}"]
            for text in wrong:
                kind = text.split(":")[0] if not text.startswith("refused") else text[:160]
                kinds[kind] += 1
                examples.setdefault(kind, f"{text}\n      {' '.join(words)[:3000]}")
    print(f"Megatron-LM {megatron.version}: {done} files of {tried} drawn, seed {seed}, {time.perf_counter() - begin:.0f} s")
    print("  " + ", ".join(f"{beside[flag]} with {flag}" for flag in COUNTED))
    for reason, count in unsaid.items():
        print(f"  {count:4} have no arguments: {reason}")
    for kind, count in kinds.most_common():
        print(f"  {count:4} {examples[kind]}")
    return bool(kinds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, default=1000, help="files (1000)")
    parser.add_argument("seed", nargs="?", type=int, default=0, help="of the draw (0)")
    asked = parser.parse_args()
    if "MEGATRON_LM" not in os.environ:
        parser.error("MEGATRON_LM must name a checkout of Megatron-LM, tag core_v0.16.1 or core_v0.19.0")
    sys.exit(main(asked.number, asked.seed))
