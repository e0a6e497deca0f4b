"""Megatron's settings by name (a flag's destination, or a field of its configurations), wherever they were read, as two things: the keys of
a recipe (model.*, train.*), and the parallel layout and options that were chosen (`Setup`). And back: which flags or fields change where
another setup is chosen. `stack` is the kind of model: "bert", "t5", or "" for a decoder."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from orchestrator.audit.reading import Setup
from orchestrator.engines.passthrough import FIELD_OF, FLAG_OF, flags
from orchestrator.errors import InputError
from orchestrator.strategy.megatron_layout import expand
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, RECOMPUTE_MODULES, Recompute
from orchestrator.words import megatron as words
from orchestrator.words.terms import NOTHING, Term, differs, names, read, short_type

DEFAULTS: Final[dict[str, Any]] = {
    term.theirs: term.default
    for table in (words.NORM, words.ROPE, words.DROPOUT, words.ADAM, words.SCHEDULE, words.LATENT_ATTENTION, words.EXPERTS,
                  words.EXPERT_PARALLEL, words.OPTIONS)
    for term in table
    if term.default is not NOTHING and term.default is not False
} | {
    "make_vocab_size_divisible_by": 128, "adam_beta1": 0.9, "adam_beta2": 0.999, "optimizer": "adam", "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "softmax", "fp8_recipe": "delayed", "data_parallel_sharding_strategy": "no_shard",
}  # fmt: skip
"""Megatron-LM's own (training/arguments.py, core_v0.16.1), those of the tables and what is read by hand."""

NOT_A_MODEL: Final = {
    "hybrid_attention_ratio": "Mamba layers", "hybrid_override_pattern": "Mamba layers", "hybrid_layer_pattern": "Mamba layers",
    "retro_add_retriever": "Retro's retrieval",
    "img_h": "images",
    "num_channels": "images", "language_model_type": "images", "heterogeneous_layers_config_path": "layers of many kinds",
}  # fmt: skip
"""Settings of models that nobody can describe here."""

VOCABULARIES: Final = {
    "GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996, "Llama2Tokenizer": 32000,
    "Llama3Tokenizer": 128256,
}  # fmt: skip
"""Tokens of tokenizers whose name says which it is."""
COMMON_VOCABULARY: Final = 50257
"""GPT-2's, which is assumed where nothing says the tokenizer's."""
SENTINELS: Final = 100
"""Tokens that T5 adds to a vocabulary, one for each span that it leaves out."""
ACTIVATIONS: Final = frozenset(term.theirs for term in (*words.ACTIVATION, *words.OTHER_ACTIVATION))
"""Megatron's switches of activations."""
NORMS: Final = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "low_precision_layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""Norms of plans by the words of Megatron, NeMo and Megatron-DeepSpeed."""
FSDP_STAGES: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What Megatron-FSDP shards (--data-parallel-sharding-strategy), as ZeRO stages."""
MODES: Final[dict[frozenset[str], Recompute]] = {frozenset(modules): mode for mode, modules in RECOMPUTE_MODULES.items()}
"""Our recompute mode for a set of --recompute-modules."""


EXPERT_NAMES: Final = names(words.EXPERTS, words.ROUTING) | {
    "moe_layer_freq", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
}  # fmt: skip
"""What says a model's experts."""


BESIDE: Final = {"shared_gate": "shared_ffn_hidden_size", "pad_to_capacity": "capacity_factor", "bias_update_rate": "expert_bias"}
"""What Megatron looks at beside another of its experts' settings alone."""


LEAST: Final = {
    **dict.fromkeys(
        ("seq_length", "encoder_seq_length", "decoder_seq_length", "max_position_embeddings", "num_layers_per_virtual_pipeline_stage",
         "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size",
         "num_distributed_optimizer_instances"), 1),
    "tensor_model_parallel_size": 0,
}  # fmt: skip
"""The least that sizes may be with which others are reckoned before anything is checked: a plan's own are checked with it (build.py)."""


class Fields:
    """Settings by name, with which of them have been read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        for name, least in LEAST.items():
            value = self.given.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < least:
                raise InputError(name, value, f"must be at least {least}")
        self.used: set[str] = set()
        """Names that have been read, or that need not be."""
        self.assumed: list[str] = []
        """Sentences for the user: what the file does not say, or what is priced as something else."""
        self.broken: list[str] = []
        """Rules of Megatron that the settings break, a sentence each."""
        self.weak: set[str] = set()
        """Keys of the recipe ("model.vocab_size") whose value was assumed."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str, default: Any = None) -> Any:
        """The setting's value, or the default; it counts as read."""
        self.used.add(name)
        return self.given.get(name, DEFAULTS.get(name) if default is None else default)

    def read(self, *table: Term) -> dict[str, Any]:
        """The settings of this table's names by ours; all of it counts as read."""
        self.used |= names(table)
        return read(table, self.given)

    def need(self, name: str) -> Any:
        """Raises InputError where it is not given."""
        value = self.get(name)
        if value is None:
            raise InputError(name, None, "is missing: the configuration does not say it")
        return value

    def left(self) -> Iterable[str]:
        """Names that nothing has read."""
        return [name for name in self.given if name not in self.used]


def is_unpriced(name: str) -> bool:
    """Whether a setting that a plan does not say changes time or memory.

    >>> is_unpriced("hybrid_context_parallel"), is_unpriced("tensorboard_dir")
    (True, False)
    """
    return words.kind(name) == "cost"


def model_keys(f: Fields, stack: str) -> dict[str, Any]:
    """The keys model.* of a recipe; "model._windows" is no key of one, and for `with_windows`. Raises InputError for what is missing, and
    for models that can't be described."""
    for name, what in NOT_A_MODEL.items():
        if f.given.get(name):
            raise InputError(name, f.given[name], f"a model with {what} can't be described here")
    two = stack == "t5"
    hidden, heads = int(f.need("hidden_size")), int(f.need("num_attention_heads"))
    layers = f.get("encoder_num_layers") or f.get("num_layers")
    if layers is None:
        raise InputError("num_layers", None, "is missing: the configuration does not say it")
    activation = words.activation(f.given) or "gelu"
    f.used |= ACTIVATIONS
    if activation == "gelu":
        f.weak.add("model.activation")  # relu has no flag
    position = "none" if f.get("add_position_embedding", True) is False and "position_embedding_type" not in f else str(
        f.get("position_embedding_type"))  # fmt: skip
    if f.get("use_rotary_position_embeddings"):
        position = "rope"
    if position not in ("learned_absolute", "rope", "relative", "none"):
        f.assumed.append(f"position_embedding_type={position} is priced as rope")
        position = "rope"
    seq = int(f.get("seq_length") or f.get("encoder_seq_length") or f.get("max_position_embeddings") or 0)
    width = f.get("ffn_hidden_size")
    if width is None:  # arguments.py: two thirds of 4 h where the MLP is gated by SiLU
        width = int(4 * hidden * 2 / 3) // 64 * 64 if activation == "swiglu" else 4 * hidden
    keys: dict[str, Any] = {
        "num_layers": int(layers),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": int(width),
        "vocab_size": _vocabulary(f, two),
        "max_position_embeddings": int(f.get("max_position_embeddings") or seq),
        "activation": activation,
        "normalization": NORMS.get(str(f.get("normalization")).lower(), f.get("normalization")),
        "norm_epsilon": float(f.get("layernorm_epsilon")),
        "position_embedding": position,
        "add_bias_linear": bool(f.get("add_bias_linear", True)),
        "add_qkv_bias": bool(f.get("add_qkv_bias", False)),
        "tie_embeddings": _tied(f),
        "hidden_dropout": float(f.get("hidden_dropout")),
        "attention_dropout": float(f.get("attention_dropout")),
    }
    if f.get("kv_channels") is not None and int(f.get("kv_channels")) * heads != hidden:
        keys["kv_channels"] = int(f.get("kv_channels"))
    groups = f.get("num_query_groups")
    if groups is not None and int(groups) != heads and f.get("group_query_attention", True):
        keys["num_query_groups"] = int(groups)
    if position == "rope":
        keys |= {"rotary_base": int(f.get("rotary_base")), "rotary_percent": float(f.get("rotary_percent"))}
        if f.get("use_rope_scaling") or f.get("rope_scaling"):
            keys["rope_scaling_factor"] = float(f.get("rope_scaling_factor") or 8.0)
    else:
        f.used |= {"rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"}
    if f.get("layernorm_zero_centered_gamma") or f.get("apply_layernorm_1p"):
        keys["zero_centered_norm"] = True
    if two:
        keys["decoder_num_layers"] = int(f.get("decoder_num_layers") or layers)
    divisor = int(f.get("make_vocab_size_divisible_by"))
    keys["make_vocab_size_divisible_by"] = divisor * int(f.get("tensor_model_parallel_size") or 1)
    keys |= _mixer(f)
    keys |= _experts(f, int(layers), int(width))
    if f.get("mtp_num_layers"):
        keys["mtp_num_layers"] = int(f.get("mtp_num_layers"))
        f.get("mtp_loss_scaling_factor")
    keys["family"] = _family(stack, keys)
    return {f"model.{name}": value for name, value in keys.items()}


def _tied(f: Fields) -> bool:
    separate = f.get("untie_embeddings_and_output_weights")
    shared = f.get("share_embeddings_and_output_weights")
    return bool(shared) if shared is not None else not separate


def _family(stack: str, keys: Mapping[str, Any]) -> str:
    if stack in ("bert", "t5"):
        return stack
    mixer, whole = keys.get("mixer", {}), (keys["position_embedding"], keys["normalization"])
    if mixer.get("kind") == "latent_attention":
        return "deepseek"
    if whole != ("rope", "RMSNorm") or keys["activation"] != "swiglu" or keys["add_bias_linear"] or keys["hidden_dropout"]:
        return "gpt"
    if keys.get("feed_forward") or keys.get("pattern"):
        return "mixtral"
    return "qwen3" if mixer else "llama"


def _vocabulary(f: Fields, two_stacks: bool) -> int:
    size = f.get("vocab_size")
    kind = f.get("tokenizer_type")
    more = SENTINELS if two_stacks else 0
    f.get("vocab_extra_ids")
    f.get("tokenizer_model")
    if size is not None:
        more_than = 1 if kind == "NullTokenizer" else 0
        return int(size) + more_than
    f.weak.add("model.vocab_size")
    padded = f.get("padded_vocab_size")
    if padded is not None:
        f.assumed.append(f"vocab_size={padded}: the padded one")
        return int(str(padded))
    if kind in VOCABULARIES:
        of_kind: int = VOCABULARIES[kind] + more
        f.assumed.append(f"vocab_size={of_kind}: that of {kind}")
        return of_kind
    f.assumed.append(f"vocab_size={COMMON_VOCABULARY}: the tokenizer's is not in the file; model.vocab_size= says it")
    return COMMON_VOCABULARY


def _pattern(value: Any, layers: int) -> list[int]:
    """Megatron's frequency: N is every N-th layer from the first, a list or an expression of lists says each.

    >>> _pattern(2, 4), _pattern("([0]*1+[1]*3)", 4)
    ([1, 0, 1, 0], [0, 1, 1, 1])
    """
    if isinstance(value, str):
        if value.isdecimal():
            return _pattern(int(value), layers)
        found = _lists(ast.parse(value.strip(), mode="eval").body)
        return (found * layers)[:layers]
    if isinstance(value, list):
        return ([int(one) for one in value] * layers)[:layers]
    return [int(index % int(value) == 0) for index in range(layers)]


def _lists(node: ast.expr) -> list[int]:
    """The value of [0]*3+[1]*2 and the like. Raises InputError."""
    if isinstance(node, ast.List):
        return [int(ast.literal_eval(one)) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _lists(node.left) + _lists(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        one, other = node.left, node.right
        if isinstance(one, ast.Constant):
            one, other = other, one
        times: object = ast.literal_eval(other)
        if isinstance(times, int) and 0 <= times < 100_000:
            return _lists(one) * times
    raise InputError("pattern", ast.unparse(node), "is no list of layers, as in ([0]*3+[1]*2)")


def _mixer(f: Fields) -> dict[str, Any]:
    latent = f.get("multi_latent_attention")
    ranks = names(words.LATENT_ATTENTION)
    if latent:
        found = read(words.LATENT_ATTENTION, f.given)
        f.used |= {*ranks, "qk_layernorm", "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim",
                   "original_max_position_embeddings",
                   "beta_fast", "beta_slow"}  # fmt: skip
        if f.given.get("rope_type") == "yarn" or f.given.get("rotary_scaling_factor"):
            f.assumed.append("YaRN's scaling of rotary positions is left out: it costs nothing that is priced")
        return {"mixer": {"kind": "latent_attention", **found}}
    f.used |= {*ranks, "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"}
    mixer: dict[str, Any] = {}
    if f.get("qk_layernorm"):
        mixer["qk_norm"] = "head"
    if f.get("softmax_type") == "learnable":
        mixer["sinks"] = True
    if f.get("attention_output_gate"):
        mixer["output_gate"] = True
    if variant := f.get("experimental_attention_variant"):
        if variant != "gated_delta_net":
            raise InputError("experimental_attention_variant", variant, "a model with sparse attention can't be described here")
        every = f.need("linear_attention_freq")
        f.used |= names(words.DELTA_NET)
        net = {"kind": "gated_delta_net", **read(words.DELTA_NET, f.given)}
        return {"mixer": {"kind": "attention", **mixer}, "_windows": (_all_but_every(every), net)}
    window = f.get("window_size")
    skip = f.get("window_attn_skip_freq")
    f.used |= {"glu_linear_offset", "activation_func_clamp_value"}
    if window:
        left = int(str(window).strip("()[]").split(",")[0]) if not isinstance(window, list | tuple) else int(window[0])
        windowed = mixer | {"window": left + 1}
        if skip is None:
            return {"mixer": {"kind": "attention", **windowed}}
        return {"mixer": {"kind": "attention", **mixer}, "_windows": (_all_but_every(skip), {"kind": "attention", **windowed})}
    return {"mixer": {"kind": "attention", **mixer}} if mixer else {}


def _all_but_every(skip: Any) -> list[int]:
    """For each of many layers in turn, 1 or 0. A whole number N: every N-th layer is another (transformer_config.py,
    is_layer_window_attention and is_linear_attention_layer).

    >>> _all_but_every(4), _all_but_every("([1]*1+[0]*1)")[:4]
    ([1, 1, 1, 0], [1, 0, 1, 0])
    """
    return [int((index + 1) % int(skip) != 0) for index in range(int(skip))] if str(skip).isdecimal() else _pattern(skip, 1000)


def _experts(f: Fields, layers: int, width: int) -> dict[str, Any]:
    """The model's feed_forward, or a pattern where some layers have no experts. Windows that change from layer to layer make a pattern
    too."""
    count = f.get("num_moe_experts") or f.get("num_experts")
    f.used |= {*EXPERT_NAMES, "num_moe_experts", "num_experts"}
    if not count:
        return {}
    sigmoid = f.get("moe_router_score_function") == "sigmoid"
    part: dict[str, Any] = {
        "kind": "experts",
        "ffn_hidden_size": width,
        **read(words.EXPERTS, f.given),
        "num_experts": int(count),
        **read(words.ROUTING, {name: value for name, value in f.given.items() if value}),
    }
    for name, of in (
        ("shared_gate", "shared_ffn_hidden_size"),
        ("pad_to_capacity", "capacity_factor"),
        ("bias_update_rate", "expert_bias"),
    ):
        if not part.get(of):
            part.pop(name, None)
    if sigmoid:
        part["score"] = "sigmoid"
    elif f.given.get("moe_router_pre_softmax"):
        part["normalized"] = False
    coefficient = f.get("moe_aux_loss_coeff")
    coefficient = coefficient[0] if isinstance(coefficient, list) else coefficient
    if float(coefficient) and f.given.get("moe_router_load_balancing_type") not in ("none", ["none"]):
        part["aux_loss_coeff"] = float(coefficient)
    frequency = f.get("moe_layer_freq", 1)
    has = _pattern(frequency, layers)
    if all(has):
        return {"feed_forward": part}
    runs: list[dict[str, Any]] = []
    for one in has:
        if runs and ("feed_forward" in runs[-1]) == bool(one):
            runs[-1]["layers"] += 1
        else:
            runs.append({"layers": 1} | ({"feed_forward": part} if one else {}))
    return {"pattern": runs}


def with_windows(keys: dict[str, Any]) -> dict[str, Any]:
    """`model_keys` with a pattern in place of "model._windows", which has, where mixers differ from layer to layer, whether
    each layer has the other one (1 or 0, repeated to the model's depth) and what that is. Experts stay where they were."""
    windows = keys.pop("model._windows", None)
    if windows is None:
        return keys
    each, other = windows
    layers, plain = keys["model.num_layers"], keys["model.mixer"]
    each = (each * layers)[:layers]
    parts = [run.get("feed_forward") for run in keys.get("model.pattern", [{"layers": layers}]) for _ in range(run["layers"])]
    runs: list[dict[str, Any]] = []
    for index, one in enumerate(each):
        run = {"mixer": other if one else plain} | ({"feed_forward": parts[index]} if parts[index] else {})
        if runs and {name: value for name, value in runs[-1].items() if name != "layers"} == run:
            runs[-1]["layers"] += 1
        else:
            runs.append({"layers": 1, **run})
    return keys | {"model.pattern": runs}


# ------------------------------------------------------------------------------------------------------------------ training


def training_keys(f: Fields, stack: str) -> dict[str, Any]:
    """The keys train.* of a recipe. Raises InputError for what is missing."""
    micro = int(f.get("micro_batch_size") or 1)
    batch = f.get("global_batch_size")
    if f.get("rampup_batch_size"):
        f.assumed.append(f"rampup_batch_size: the batch at its end is priced, {batch}")
    if schedule := f.get("step_batch_size_schedule"):
        sizes = [size for _, colon, size in (one.partition(":") for one in _texts(schedule)) if colon]
        if sizes and sizes[-1].isdecimal():
            batch = int(sizes[-1])
        f.assumed.append(f"step_batch_size_schedule={' '.join(_texts(schedule))}: the batch at its end is priced, {batch}")
    keys: dict[str, Any] = {"seq_length": int(f.get("seq_length") or f.get("encoder_seq_length") or f.need("max_position_embeddings"))}
    if batch is not None:
        keys["global_batch_size"] = int(batch)
    if stack == "t5":
        keys["decoder_seq_length"] = int(f.get("decoder_seq_length") or keys["seq_length"])
    keys |= _precision(f)
    optimizer = str(f.get("optimizer"))
    if optimizer not in ("adam", "sgd"):
        f.assumed.append(f"optimizer={optimizer} is priced as Adam")
    keys["optimizer"] = "sgd" if optimizer == "sgd" else "adamw"
    lr = f.get("lr")
    if lr:
        keys |= {"lr": float(lr), "min_lr": min(float(f.get("min_lr")), float(lr))}
    style = str(f.get("lr_decay_style"))
    keys["schedule"] = style if style in ("cosine", "linear", "constant") else "cosine"
    if style != keys["schedule"]:
        f.assumed.append(f"lr_decay_style={style} is kept as cosine: no time depends on it")
    steps, warmup = _steps(f, int(batch or micro))
    keys |= {"steps": steps, "warmup": warmup}
    keys |= {"betas": [float(f.get("adam_beta1")), float(f.get("adam_beta2"))], "eps": float(f.get("adam_eps"))}
    keys |= {"weight_decay": float(f.get("weight_decay")), "clip": float(f.get("clip_grad"))}
    if f.get("use_precision_aware_optimizer"):
        keys["precision_aware_optimizer"] = True
        keys |= {name: short_type(f.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if f.get(name) is not None}
    f.used |= {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "lr_decay_iters", "lr_decay_samples"}
    found = {f"train.{name}": value for name, value in keys.items()}
    return found | {"seed": int(f.get("seed"))}


def _texts(value: Any) -> list[str]:
    """The words of a text, or of a list of texts."""
    return str(value).split() if isinstance(value, str) else " ".join(map(str, value)).split()


def _precision(f: Fields) -> dict[str, Any]:
    kind = "bf16" if f.get("bf16") else "fp16" if f.get("fp16") else "fp32"
    fp8 = f.get("fp8")
    in_bf16, in_fp32 = f.get("grad_reduce_in_bf16"), f.get("accumulate_allreduce_grads_in_fp32")
    said = f.get("grad_reduce_in_fp32")
    reduce = "fp32"
    if kind == "bf16":
        reduce = "bf16" if in_bf16 or said is False else "fp32"
    elif kind == "fp16":
        reduce = "fp32" if in_fp32 or said else "fp16"
    keys: dict[str, Any] = {"grad_reduce_dtype": reduce, "grad_accum_dtype": reduce}
    f.used |= {"fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_interval", "params_dtype", "fp8_recipe"}
    if fp8:
        recipe = str(f.get("fp8_recipe"))
        if recipe not in ("delayed", "tensorwise", "blockwise", "mxfp8"):
            f.assumed.append(f"fp8_recipe={recipe} is priced as tensorwise")
            recipe = "tensorwise"
        return keys | {"precision": "fp8", "fp8_recipe": recipe}
    if f.get("fp4"):
        f.assumed.append("fp4 is priced as fp8")
        return keys | {"precision": "fp8"}
    return keys | {"precision": kind}


def _steps(f: Fields, batch: int) -> tuple[int, int]:
    """Steps and steps of warm-up, from iterations or samples of `batch` a step."""
    samples = f.get("train_samples")
    steps = int(f.get("train_iters") or (int(samples) // batch if samples else 0)) or 1
    decay = f.get("lr_decay_iters") or (int(f.get("lr_decay_samples")) // batch if f.get("lr_decay_samples") else steps)
    warmup = int(f.get("lr_warmup_iters") or 0) or int(f.get("lr_warmup_samples") or 0) // batch
    if f.get("lr_warmup_fraction"):
        warmup = round(float(f.get("lr_warmup_fraction")) * int(decay))
    return steps, min(warmup, steps)


# -------------------------------------------------------------------------------------------------------------------- setup


def setup_of(f: Fields, engine: str) -> Setup:
    """Parallel sizes, stages, recompute and options as these settings choose them. Raises InputError for what is missing."""
    said = f.read(*words.SIZES, *words.EXPERT_PARALLEL, *words.OPTIONS, *words.BATCH)
    tp, pp = said["tp"] or 1, said["pp"] or 1
    vpp = f.get("num_virtual_stages_per_pipeline_rank") or f.get("virtual_pipeline_model_parallel_size")
    per_chunk, layout = f.get("num_layers_per_virtual_pipeline_stage"), f.get("pipeline_model_parallel_layout")
    if per_chunk and not vpp:
        layers = int(f.need("num_layers"))
        vpp = max(1, layers // (pp * int(per_chunk)))
        if layers % (pp * int(per_chunk)):
            chunks = f"chunks of {per_chunk} on {pp} stages (num_layers_per_virtual_pipeline_stage)"
            f.broken.append(f"num_layers={layers}: does not divide into {chunks}")
    if layout:
        layout = layout if isinstance(layout, str) else "|".join("".join({"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}.get(
            str(part), "t") for part in chunk) for chunk in layout)  # fmt: skip
        vpp = max(1, len(expand(layout)) // pp)
    stage, fsdp = _zero(f)
    by_blocks = said["fp8_param_gather"] and f.get("fp8_recipe") == "mxfp8"
    if by_blocks and not f.get("reuse_grad_buf_for_mxfp8_param_ag") and not fsdp:
        f.broken.append("fp8_param_gather with fp8_recipe=mxfp8 needs reuse_grad_buf_for_mxfp8_param_ag: Transformer Engine keeps no MXFP8 "
                        "weight in a buffer of Megatron's (pytorch/tensor/utils.py, replace_raw_data)")  # fmt: skip
    mode, first = recompute_of(f)
    f.used |= {"hierarchical_context_parallel_sizes", "world_size", "data_parallel_size"}
    instances = int(f.get("num_distributed_optimizer_instances") or 1)
    if f.given.get("num_experts") or f.given.get("num_moe_experts"):
        said.setdefault("etp", tp)
    else:  # whose settings mean nothing then
        said = {name: value for name, value in said.items() if name not in ("etp", *(term.ours for term in words.EXPERT_PARALLEL[2:]))}
    return Setup(
        **said | {name: False for name in ("sequence_parallel", "tp_comm_overlap") if tp == 1},
        engine=engine,
        vpp=int(vpp or 1),
        microbatch_group_size_per_vp_stage=_group(f, pp),
        experts=bool(f.given.get("num_experts") or f.given.get("num_moe_experts")),
        rank_order=PP_BEFORE_DP if f.get("use_tp_pp_dp_mapping") else RANK_ORDER,
        recompute=mode,
        recompute_layers=first,
        layout=layout,
        first_layers=_count(f, "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
        last_layers=_count(f, "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
        ends_count=(bool(f.get("account_for_embedding_in_pipeline_split")), bool(f.get("account_for_loss_in_pipeline_split"))),
        zero_stage=stage,  # type: ignore[arg-type]
        zero_shard_size=-instances if instances > 1 else None,
        cuda_graph_impl=_cuda_graphs(f),
        megatron_fsdp=fsdp,
    )  # fmt: skip


def _cuda_graphs(f: Fields) -> Literal["none", "local"]:
    """What a plan says of them. What it can't say is priced as nearest to it."""
    said = str(f.get("cuda_graph_impl") or "none")
    if said not in ("none", "local"):
        f.assumed.append(f"cuda_graph_impl={said} is priced as none, which is slower")
    return "local" if said == "local" else "none"


def _count(f: Fields, *names: str) -> int | None:
    found = next((f.get(name) for name in names if f.get(name) is not None), None)
    return None if found is None else int(found)


def _group(f: Fields, pp: int) -> int | None:
    size = f.get("microbatch_group_size_per_vp_stage")
    return None if size is None or int(size) == pp else int(size)


def _zero(f: Fields) -> tuple[int, bool]:
    """(ZeRO stage, whether Megatron's FSDP does it)."""
    stage = FSDP_STAGES.get(str(f.get("data_parallel_sharding_strategy")), 0)
    if f.get("use_megatron_fsdp") or f.get("use_custom_fsdp"):
        return stage, stage >= 2
    if f.get("use_torch_fsdp2"):
        f.assumed.append("use_torch_fsdp2 is priced as Megatron's own FSDP with the same sharding")
        return 3, True
    return (1 if f.get("use_distributed_optimizer") else 0), False


def _priced_modules(f: Fields, named: frozenset[str]) -> frozenset[str]:
    """The modules that Megatron recomputes as plans name them: "mlp" is all feed-forwards of a layer-by-layer schedule, and those of layers
    without experts in the combined one (transformer_layer.py:445, moe_layer.py:432, fine_grained_callables.py:509)."""
    plain = named - {"moe"}
    if not (f.given.get("num_experts") or f.given.get("num_moe_experts")):
        return plain
    if f.get("overlap_moe_expert_parallel_comm"):
        if "moe" in named:
            f.assumed.append("recompute_modules=moe does nothing with overlap_moe_expert_parallel_comm: experts are not computed again")
        return plain
    if "moe" in named:
        if "mlp" not in named:
            f.assumed.append("recompute_modules=moe without mlp: layers without experts are priced as computed again too")
        return plain | {"mlp"}
    if "mlp" in named:
        f.assumed.append("recompute_modules=mlp without moe, the layers without experts alone: priced as kept")
    return plain - {"mlp"}


def recompute_of(f: Fields) -> tuple[Recompute, int | None]:
    """(mode, the first so many layers of each pipeline chunk; None: all)."""
    granularity = f.get("recompute_granularity")
    method, layers = f.get("recompute_method"), f.get("recompute_num_layers")
    modules = f.get("recompute_modules")
    if f.get("recompute_activations"):
        granularity = granularity or "selective"
    if f.get("checkpoint_activations"):  # Megatron's before 2022, and Megatron-DeepSpeed's
        granularity, layers = "full", None
    f.used |= {"activations_checkpoint_method", "checkpoint_num_layers", "activations_checkpoint_num_layers"}
    if granularity == "selective":
        named = [str(one) for one in (modules.split(",") if isinstance(modules, str) else modules or ["core_attn"])]
        if not (wanted := _priced_modules(f, frozenset(named))):
            return "none", None
        mode = MODES.get(wanted)
        if mode is None:
            f.assumed.append(f"recompute_modules={','.join(named)} is priced as no recompute: no such combination is")
        return mode or "none", None
    if granularity == "full":
        if method == "uniform" and layers is not None and int(layers) > 1:
            f.assumed.append(f"recompute_method=uniform keeps one input for {layers} layers: priced as one for each")
        return "full", int(layers) if method == "block" and layers is not None else None
    return "none", None


# ----------------------------------------------------------------------------------------------------------------- flags again

Change = dict[str, list[str] | None]
"""Changes by flag: its values ([] for a switch), or None where it must not stand."""
STAGES: Final = (
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--microbatch-group-size-per-virtual-pipeline-stage",
)  # fmt: skip
RECOMPUTING: Final = (
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules", "--recompute-activations",
    "--checkpoint-activations", "--checkpoint-num-layers",
)  # fmt: skip


def flags_changed(before: Setup, after: Setup) -> Change:
    """What must change on Megatron-LM's command line for the second setup in place of the first."""
    change: Change = {}
    table = (*words.SIZES, *words.EXPERT_PARALLEL, *words.OPTIONS, *words.BATCH)
    for name, value in differs(table, before, after).items():
        flag = flags()[FLAG_OF.get(name, name)][0]
        change[flag] = None if value is NOTHING else [] if value is True else [str(value)]
    if before.etp != after.etp and after.etp == after.tp:
        change["--expert-tensor-parallel-size"] = None if before.etp == before.tp else [str(after.etp)]
    if before.zero_stage != after.zero_stage:
        change["--use-distributed-optimizer"] = [] if after.zero_stage else None
    stages = ("vpp", "layout", "first_layers", "last_layers", "ends_count", "microbatch_group_size_per_vp_stage")
    if any(getattr(before, name) != getattr(after, name) for name in stages):
        change |= dict.fromkeys(STAGES, None)
        if after.layout is not None:
            change["--pipeline-model-parallel-layout"] = [after.layout]
        elif after.vpp > 1:
            change["--num-virtual-stages-per-pipeline-rank"] = [str(after.vpp)]
        if after.microbatch_group_size_per_vp_stage:
            change["--microbatch-group-size-per-virtual-pipeline-stage"] = [str(after.microbatch_group_size_per_vp_stage)]
    if (before.recompute, before.recompute_layers) != (after.recompute, after.recompute_layers):
        change |= dict.fromkeys(RECOMPUTING, None)
        if after.recompute == "full":
            change["--recompute-granularity"] = ["full"]
            block = after.recompute_layers is not None
            change["--recompute-method"] = ["block" if block else "uniform"]
            change["--recompute-num-layers"] = [str(after.recompute_layers if block else 1)]
        elif after.recompute != "none":
            change["--recompute-granularity"] = ["selective"]
            modules = RECOMPUTE_MODULES[after.recompute]
            both = after.experts and not after.overlap_moe_expert_parallel_comm and "mlp" in modules
            change["--recompute-modules"] = [*modules, "moe"] if both else list(modules)
    return change


def fields_changed(before: Setup, after: Setup) -> dict[str, Any]:
    """Changes by the settings' names, as YAML has them; None: the default.

    >>> fields_changed(Setup(engine="megatron", tp=2), Setup(engine="megatron", tp=4, sequence_parallel=True))
    {'tensor_model_parallel_size': 4, 'sequence_parallel': True}
    """
    found: dict[str, Any] = {}
    for flag, texts in flags_changed(before, after).items():
        name = flag.removeprefix("--").replace("-", "_")
        values = [int(word) if word.isdecimal() else word for word in texts or ()]
        whole = values if name == "recompute_modules" else values[0] if values else True
        found[FIELD_OF.get(name, name)] = None if texts is None else whole
    return found
