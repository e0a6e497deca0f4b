"""Megatron's settings by name (a flag's destination, or a field of its configurations), wherever they were read, as two things: the keys of
a recipe (model.*, train.*), and the parallel layout and options that were chosen (`Setup`). And back: which flags or fields change where
another setup is chosen. `stack` is the kind of model: "bert", "t5", or "" for a decoder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from orchestrator.audit import shell
from orchestrator.audit.ramp import grown, ramp, scheduled
from orchestrator.audit.reading import Reading, Setup, listed, recipe_keys
from orchestrator.engines.passthrough import FLAG_OF, flags
from orchestrator.errors import InputError
from orchestrator.model.parts.experts import USUALLY_OVER
from orchestrator.model.shared import SENTINELS
from orchestrator.recipe.clusters import on_hub, read_named
from orchestrator.recipe.layers import flatten
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.graphs import modules_of
from orchestrator.strategy.megatron_layout import expand
from orchestrator.strategy.offloading import MODULES
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, RECOMPUTE_MODULES, RECOMPUTE_ORDER, Recompute
from orchestrator.words import megatron as words
from orchestrator.words import terms
from orchestrator.words.terms import NOTHING, Term, differs, names, read

DEFAULTS: Final[dict[str, Any]] = {
    "make_vocab_size_divisible_by": 128, "optimizer": "adam", "moe_aux_loss_coeff": 0.0, "moe_router_score_function": "softmax",
    "fp8_recipe": "delayed", "data_parallel_sharding_strategy": "no_shard",
} | {
    term.theirs: term.default
    for table in (words.NORM, words.ROPE, words.DROPOUT, words.BETAS, words.EPSILON, words.SCHEDULE, words.EXPERTS, words.EXPERT_PARALLEL,
                  words.LATENT_ATTENTION, words.OPTIONS)
    for term in table
    if term.default is not NOTHING
}  # fmt: skip
"""Megatron-LM's own (training/arguments.py, core_v0.16.1)."""

NOT_A_MODEL: Final = {
    "retro_add_retriever": "Retro's retrieval", "img_h": "images", "num_channels": "images", "language_model_type": "images",
    "heterogeneous_layers_config_path": "layers of many kinds",
}  # fmt: skip
"""Settings of models that nobody can describe here."""

VOCABULARIES: Final = {
    "GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996, "Llama2Tokenizer": 32000,
    "Llama3Tokenizer": 128256,
}  # fmt: skip
"""Tokens of tokenizers whose name says which it is."""
COMMON_VOCABULARY: Final = 50257
"""GPT-2's, which is assumed where nothing says the tokenizer's."""
ACTIVATIONS: Final = frozenset(term.theirs for term in (*words.ACTIVATION, *words.OTHER_ACTIVATION))
"""Megatron's switches of activations."""

BESIDE: Final = {"shared_gate": "shared_ffn_hidden_size", "pad_to_capacity": "capacity_factor", "bias_update_rate": "expert_bias"}
"""What Megatron looks at beside another of its experts' settings alone."""

LEAST: Final = {
    "seq_length": 1, "encoder_seq_length": 1, "decoder_seq_length": 1, "max_position_embeddings": 1, "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": 1, "num_virtual_stages_per_pipeline_rank": 1, "num_distributed_optimizer_instances": 1,
    "tensor_model_parallel_size": 0,
}  # fmt: skip
"""The least that sizes may be with which others are reckoned before anything is checked: a plan's own are checked with it (build.py)."""
STACK: Final = "core/ssm/mamba_block.py:172-221, core_v0.16.1"
UNREAD: Final = ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""What says the stages of other models alone."""
RECOMPUTED: Final = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
"""Modules that Megatron recomputes by name (transformer_config.py:1198, core_v0.16.1; the last :1777, core_v0.19.0)."""
NO_NORMS: Final = " does nothing: Transformer Engine's norms are part of the linears behind them"


class Fields:
    """Settings by name, with which of them have been read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = {words.ALIASES.get(name, name): value for name, value in given.items()}
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
        self.rules: list[Rule] = []
        """Rules of Megatron that a plan is to keep beside the engine's."""
        self.unpriced: list[str] = []
        """Parts of settings of which the prediction knows nothing."""
        self.slower: list[str] = []
        """Parts of settings that take time without a price, and no memory."""
        self.weak: set[str] = set()
        """Keys of the recipe ("model.vocab_size") whose value was assumed."""

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


def model_keys(f: Fields, stack: str) -> dict[str, Any]:
    """The keys model.* of a recipe. Raises InputError for what is missing, and for models that can't be described."""
    pattern = _hybrid_pattern(f)
    for name, what in NOT_A_MODEL.items():
        if f.given.get(name):
            raise InputError(name, f.given[name], f"a model with {what} can't be described here")
    two = stack == "t5"
    hidden, heads = int(f.need("hidden_size")), int(f.need("num_attention_heads"))
    layers = f.get("encoder_num_layers") or _letters(f, pattern) or f.need("num_layers")
    activation = str(f.get("activation") or words.activation(f.given) or "gelu")
    f.used |= ACTIVATIONS
    if activation == "gelu":
        f.weak.add("model.activation")  # relu has no flag
    said = f.read(*words.SHAPE, *words.NORM, *words.ROPE, *words.BIASES, *words.TIED, *words.DROPOUT)
    keys = {name.removeprefix("model."): value for name, value in said.items()} | {"activation": activation}
    if f.get("add_position_embedding", True) is False and "position_embedding_type" not in f.given:
        keys["position_embedding"] = "none"
    if f.get("embed_layernorm"):  # of BigScience's Megatron-DeepSpeed (megatron/mpu/layers.py, VocabParallelEmbedding)
        keys["embedding_norm"] = True
    if f.get("use_rotary_position_embeddings"):
        keys["position_embedding"] = "rope"
    if keys["position_embedding"] not in ("learned_absolute", "rope", "relative", "none"):
        f.assumed.append(f"position_embedding_type={keys['position_embedding']} is priced as rope")
        keys["position_embedding"] = "rope"
    # arguments.py: two thirds of 4 h where the MLP is gated by SiLU
    width = int(keys.setdefault("ffn_hidden_size", int(4 * hidden * 2 / 3) // 64 * 64 if activation == "swiglu" else 4 * hidden))
    seq = int(f.get("seq_length") or f.get("encoder_seq_length") or keys.get("max_position_embeddings", 0))
    keys |= {"num_layers": int(layers), "vocab_size": _vocabulary(f, two)}
    keys.setdefault("max_position_embeddings", seq)
    if f.get("kv_channels") is not None and int(f.get("kv_channels")) * heads != hidden:
        keys["kv_channels"] = int(f.get("kv_channels"))
    groups = f.get("num_query_groups")
    if groups is not None and int(groups) != heads and f.get("group_query_attention", True):
        keys["num_query_groups"] = int(groups)
    scaled, factor = f.get("use_rope_scaling"), f.get("rope_scaling_factor")
    if keys["position_embedding"] != "rope":
        keys = {name: value for name, value in keys.items() if not name.startswith("rotary")}
    elif scaled:
        keys["rope_scaling_factor"] = float(factor or 8.0)
    if f.get("layernorm_zero_centered_gamma"):
        keys["zero_centered_norm"] = True
    if two:
        keys["decoder_num_layers"] = int(f.get("decoder_num_layers") or layers)
    divisor = int(f.get("make_vocab_size_divisible_by"))
    keys["make_vocab_size_divisible_by"] = divisor * int(f.get("tensor_model_parallel_size") or 1)
    keys |= _layers(f, int(layers), width) if pattern is None else _hybrid_layers(f, pattern, int(layers), width)
    if f.get("mtp_num_layers"):
        keys["mtp_num_layers"] = int(f.get("mtp_num_layers"))
        f.get("mtp_loss_scaling_factor")
    keys["family"] = _family(f, stack, keys)
    return {f"model.{name}": value for name, value in keys.items()}


def _family(f: Fields, stack: str, keys: Mapping[str, Any]) -> str:
    if stack in ("bert", "t5"):
        return stack
    if any(run.get("feed_forward") == {"kind": "none"} for run in keys.get("pattern", ())):
        return "nemotron_h"
    mixer, whole = keys.get("mixer", {}), (keys["position_embedding"], keys["normalization"])
    if mixer.get("kind") == "latent_attention":
        return "deepseek"
    if whole != ("rope", "RMSNorm") or keys["activation"] != "swiglu" or keys["add_bias_linear"] or keys["hidden_dropout"]:
        return "gpt"
    if f.given.get("num_moe_experts"):
        return "mixtral"
    return "qwen3" if mixer else "llama"


def _vocabulary(f: Fields, two_stacks: bool) -> int:
    kind, size, named = f.get("tokenizer_type"), f.get("vocab_size"), str(f.get("tokenizer_model") or "")
    f.used |= {"vocab_extra_ids"}
    if size is not None:
        return int(size) + int(kind == "NullTokenizer")
    f.weak.add("model.vocab_size")
    if (padded := f.get("padded_vocab_size")) is not None:
        f.assumed.append(f"vocab_size={padded}: the padded one")
        return int(str(padded))
    if kind in VOCABULARIES:
        size = VOCABULARIES[kind] + (SENTINELS if two_stacks else 0)
        f.assumed.append(f"vocab_size={size}: that of {kind}")
        return int(size)
    size, of = COMMON_VOCABULARY, "GPT-2's, as the file names no tokenizer"
    if (ours := on_hub().get(named.rstrip("/"))) is not None:
        size, of = int(flatten(read_named("recipe", ours, "models")[1], ours)["model.vocab_size"].text), f"recipe={ours}'s, by {named}"
    elif named or kind:
        of = f"GPT-2's, as {f'tokenizer_model={named}' if named else f'tokenizer_type={kind}'} is not read"
    f.assumed.append(f"vocab_size={size}: {of}; model.vocab_size=, or --vocab-size in a script, says another")
    return size


def _pattern(value: Any, layers: int | None) -> list[int]:
    """Megatron's frequency: N is every N-th layer from the first, a list or an expression of lists says each; `layers` None: as many as it
    says, none for a number.

    >>> _pattern(2, 4), _pattern("([0]*1+[1]*3)", 4)
    ([1, 0, 1, 0], [0, 1, 1, 1])
    """
    if isinstance(value, str):
        if value.isdecimal():
            return _pattern(int(value), layers)
        try:
            value = [int(one) for one in shell.evaluate(value)]
        except (ValueError, TypeError):
            raise InputError("pattern", value, "is no list of layers, as in ([0]*3+[1]*2)") from None
    if isinstance(value, list):
        return [int(one) for one in value] if layers is None else ([int(one) for one in value] * layers)[:layers]
    return [int(index % int(value) == 0) for index in range(layers or 0)]


def _layers(f: Fields, layers: int, width: int) -> dict[str, Any]:
    """The keys of what layers are made of: mixer and feed_forward where all have the same, and a pattern where that changes."""
    mixer, other, has_other = _mixers(f)
    experts, has_experts = _experts(f, layers, width)
    common = {"mixer": mixer} | ({"feed_forward": experts} if all(has_experts) else {})
    keys = {name: part for name, part in common.items() if part}
    if other is None and all(has_experts):
        return keys
    each = (
        ({"mixer": other if one else mixer} if other else {}) | ({"feed_forward": experts} if two and not all(has_experts) else {})
        for one, two in zip((has_other * layers)[:layers] if other else has_experts, has_experts, strict=False)
    )
    return keys | {"pattern": [{"layers": len(list(run)), **layer} for layer, run in groupby(each)]}


def _hybrid_pattern(f: Fields) -> str | None:
    """The letters of layers that have one part each; None: the model's have not. Raises InputError where ratios alone place them, or the
    pattern says something else."""
    given = {name: f.get(name) for name in ("hybrid_override_pattern", "hybrid_layer_pattern") if f.given.get(name)}
    for ratio in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):
        if f.get(ratio) and not given:
            raise InputError(ratio, f.given[ratio], "Mamba layers placed by a ratio can't be described here; a hybrid_override_pattern can")
    for name, pattern in given.items():
        pattern = str(pattern).replace("|", "") if name == "hybrid_layer_pattern" else pattern  # of the stages, from 0.19 on
        if other := sorted({*str(pattern)} - {*words.LETTERS}):
            raise InputError(name, pattern, f"has {' '.join(other)}, which can't be described here", list(words.LETTERS))
        f.used |= {"spec", "is_hybrid_model", *names(words.MAMBA)}
        f.broken += [f"{other}: stages of layers with one part each are divided without it ({STACK})" for other in UNREAD if f.get(other)]
        return str(pattern)
    return None


def _letters(f: Fields, pattern: str | None) -> int | None:
    """The layers of hybrid_layer_pattern, which stand for num_layers beside it; None: there is no such pattern."""
    if not f.given.get("hybrid_layer_pattern") or pattern is None:
        return None
    if (said := f.get("num_layers")) not in (None, len(pattern)):
        f.assumed.append(f"num_layers={said}: hybrid_layer_pattern has {len(pattern)} layers, which Megatron-core takes (arguments.py:761)")
    return len(pattern)


def _hybrid_layers(f: Fields, pattern: str, layers: int, width: int) -> dict[str, Any]:
    """The keys of layers that have one part each. Raises InputError where there are more or fewer letters than layers, as Megatron does."""
    if len(pattern) != layers:
        raise InputError("num_layers", layers, f"is not the {len(pattern)} layers of the pattern {pattern}")
    mamba = read(words.MAMBA, f.given)
    mamba.setdefault("num_heads", 2 * int(f.need("hidden_size")) // mamba["head_dim"])  # mamba_mixer.py: it expands by 2
    parts = {"mamba2": mamba | {"conv_bias": True, "chunk_size": 128}, "attention": _mixers(f)[0], "experts": _experts(f, layers, width)[0]}
    if "E" in pattern and not parts["experts"]:
        raise InputError("num_moe_experts", None, f"is missing: the pattern {pattern} has layers of experts")
    made = {letter: [{"kind": kind} | parts.get(kind, {}) for kind in kinds] for letter, kinds in words.LETTERS.items()}
    runs = [(made[letter], len(list(run))) for letter, run in groupby(pattern)]
    return {"pattern": [{"layers": count, "mixer": mixer, "feed_forward": other} for (mixer, other), count in runs]}


def _mixers(f: Fields) -> tuple[dict[str, Any], dict[str, Any] | None, list[int]]:
    """(The mixer of layers, empty for plain attention; that of some of them, and for each of many layers in turn whether it has that, 1 or
    0); None: there is no other."""
    f.used |= {*names(words.LATENT_ATTENTION), "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"}
    if f.get("multi_latent_attention"):
        f.used |= {"qk_layernorm", "original_max_position_embeddings", "beta_fast", "beta_slow"}
        if f.given.get("rope_type") == "yarn" or f.given.get("rotary_scaling_factor"):
            f.assumed.append("YaRN's scaling of rotary positions is left out: it costs nothing that is priced")
        return {"kind": "latent_attention", **read(words.LATENT_ATTENTION, f.given)}, None, []
    found = {
        "qk_norm": "head" if f.get("qk_layernorm") else None,
        "sinks": f.get("softmax_type") == "learnable",
        "output_gate": bool(f.get("attention_output_gate")),
    }
    attention: dict[str, Any] = {"kind": "attention", **{name: value for name, value in found.items() if value}}
    if variant := f.get("experimental_attention_variant"):
        if variant != "gated_delta_net":
            raise InputError("experimental_attention_variant", variant, "a model with sparse attention can't be described here")
        every = f.need("linear_attention_freq")
        return attention, {"kind": "gated_delta_net", **f.read(*words.DELTA_NET)}, _all_but_every(every)
    window, skip = f.get("window_size"), f.get("window_attn_skip_freq")
    f.used |= {"glu_linear_offset", "activation_func_clamp_value"}
    if not window:
        return (attention if len(attention) > 1 else {}), None, []
    left = window[0] if isinstance(window, list | tuple) else str(window).strip("()[]").split(",")[0]
    try:
        windowed = attention | {"window": int(left) + 1}
    except (TypeError, ValueError):
        raise InputError("window_size", window, "is no pair of numbers") from None
    return (windowed, None, []) if skip is None else (attention, windowed, _all_but_every(skip))


def _all_but_every(skip: Any) -> list[int]:
    """For each of many layers in turn, 1 or 0. A whole number N: every N-th layer is another (transformer_config.py,
    is_layer_window_attention and is_linear_attention_layer).

    >>> _all_but_every(4), _all_but_every("([1]*1+[0]*1)")[:4]
    ([1, 1, 1, 0], [1, 0, 1, 0])
    """
    return [int((index + 1) % int(skip) != 0) for index in range(int(skip))] if str(skip).isdecimal() else _pattern(skip, 1000)


def _experts(f: Fields, layers: int, width: int) -> tuple[dict[str, Any], list[int]]:
    """(The experts of layers, empty where there are none; for each layer whether it has what all or some have, 1 or 0)."""
    count = f.get("num_moe_experts")
    f.used |= {*words.EXPERT_SETTINGS, "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}
    if not count:
        return {}, [1] * layers
    part: dict[str, Any] = {
        "kind": "experts",
        "ffn_hidden_size": width,
        **read(words.EXPERTS, f.given),
        "num_experts": int(count),
        **read(words.ROUTING, {name: value for name, value in f.given.items() if value}),
    }
    part = {name: value for name, value in part.items() if name not in BESIDE or part.get(BESIDE[name])}
    if f.get("moe_router_score_function") == "sigmoid":
        part["score"] = "sigmoid"
    elif f.given.get("moe_router_pre_softmax"):
        part["normalized"] = False
    coefficient = f.get("moe_aux_loss_coeff")
    coefficient = float(coefficient[0] if isinstance(coefficient, list) else coefficient)
    balanced = f.given.get("moe_router_load_balancing_type") or "aux_loss"
    over = {kind: over for over, kind in words.BALANCED_OVER.items()}.get(balanced[0] if isinstance(balanced, list) else balanced)
    if coefficient and over:
        part["aux_loss_coeff"] = coefficient
        if over != USUALLY_OVER[part.get("score", "softmax")]:
            part["aux_loss_over"] = over
    frequency = f.get("moe_layer_freq", 1)
    if (said := _pattern(frequency, None)) and len(said) != layers:
        f.broken.append(f"moe_layer_freq is of {len(said)} layers: Megatron wants one for each of {layers} (gpt_layer_specs.py:589)")
    return part, _pattern(frequency, layers)


# ------------------------------------------------------------------------------------------------------------------ training


AS_PRICED: Final[Mapping[str, tuple[Any, ...]]] = dict.fromkeys((
    "moe_grouped_gemm", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion", "use_flash_attn",
    "gradient_accumulation_fusion", "attention_softmax_in_fp32"), (True,)) | {"transformer_impl": ("transformer_engine",),
    "attention_backend": tuple(f"{prefix}{name}" for prefix in ("", "AttnBackend.") for name in ("flash", "fused", "auto"))}  # fmt: skip
"""Settings that every price takes for granted with these values, as plans say them: experts' products and the like are one kernel
each, attention is a flash kernel. With another value they cost what the prediction does not know."""


def reading_of(f: Fields, kind: str, keys: dict[str, Any], setup: Setup, said: Mapping[str, str], **lists: Sequence[str]) -> Reading:
    """All that a file of this kind says. `said`: its settings by name, in its own words, of which those that nothing has read are listed by
    what they do; `lists`: more for the lists of a Reading."""
    left = {name: text for name, text in said.items() if name not in f.used and f.given.get(name) not in AS_PRICED.get(name, ())}
    found = listed((text, terms.kind("megatron_lm", name), name in AS_PRICED or f.given.get(name, True)) for name, text in left.items())
    found["unpriced"] += tuple(f.unpriced)
    found["slower"] += tuple(f.slower)
    return Reading(
        format=kind,
        keys=keys,
        setup=setup,
        weak=frozenset(f.weak),
        broken=tuple(f.broken),
        added=tuple(f.rules),
        assumed=(*lists.get("assumed", ()), *f.assumed),
        **{name: (*lines, *lists.get(name, ())) for name, lines in found.items()},  # type: ignore[arg-type]
    )


def training_keys(f: Fields, stack: str) -> dict[str, Any]:
    """The keys train.* of a recipe. Raises InputError for what is missing."""
    micro = int(f.get("micro_batch_size") or 1)
    batch = f.get("global_batch_size")
    of_ramp = _texts(f.get("rampup_batch_size") or ())
    numbers = [int(one) for one in of_ramp if one.isdecimal()]
    if len(numbers) == len(of_ramp) == 3 and min(numbers[:2]) > 0:
        start, step, samples = numbers
        if batch is not None and (start > int(batch) or (int(batch) - start) % step):
            f.broken.append(f"rampup_batch_size={start} {step}: from {start} to {batch} are no whole steps of {step} samples "
                            "(core/num_microbatches_calculator.py:425-433)")  # fmt: skip
        elif batch is not None:
            rounded = bool(f.get("decrease_batch_size_if_needed"))
            f.rules.append(ramp("rampup_batch_size", grown(start, step, samples, int(batch)), rounded))
    if of_ramp:
        f.assumed.append(f"rampup_batch_size: the batch at its end is priced, {batch}")
    if schedule := f.get("step_batch_size_schedule"):
        *before, batch = scheduled(_texts(schedule))
        f.rules = [ramp("step_batch_size_schedule", before)]
        f.assumed.append(f"step_batch_size_schedule={' '.join(_texts(schedule))}: the batch at its end is priced, {batch}")
    keys: dict[str, Any] = {"seq_length": int(f.get("seq_length") or f.get("encoder_seq_length") or f.need("max_position_embeddings"))}
    if batch is not None:
        keys["global_batch_size"] = int(batch)
    if stack == "t5":
        keys["decoder_seq_length"] = int(f.get("decoder_seq_length") or keys["seq_length"])
    keys |= _precision(f)
    optimizer = str(f.get("optimizer"))
    if optimizer not in words.OPTIMIZERS:
        f.assumed.append(f"optimizer={optimizer} is priced as Adam")
    keys["optimizer"] = words.OPTIMIZERS.get(optimizer, "adamw")
    said = f.read(*words.EPSILON, *words.SCHEDULE)
    if keys["optimizer"] == "muon":
        said |= f.read(*words.MUON)
    if "training.lr" in said:
        said["training.min_lr"] = min(said["training.min_lr"], said["training.lr"])
    else:
        del said["training.min_lr"]
    style = said["training.schedule"]
    decay = {name: said.pop(f"training.{name}", None) for name in ("decay", "decay_steps")}
    if style == "wsd":
        keys |= {"decay": decay["decay"] or "exponential"} | ({"decay_steps": decay["decay_steps"]} if decay["decay_steps"] else {})
    elif style not in ("cosine", "linear", "constant", "inverse_square_root"):
        said["training.schedule"] = "cosine"
        f.assumed.append(f"lr_decay_style={style} is kept as cosine: no time depends on it")
    keys |= _steps(f, int(batch or micro))
    keys["betas"] = [float(f.get("adam_beta1")), float(f.get("adam_beta2"))]
    aware = f.read(*words.PRECISION_AWARE)
    if aware["training.precision_aware_optimizer"]:
        said |= aware
    f.used |= {"main_params_dtype", "lr_decay_samples"}
    found = {f"train.{name}": value for name, value in keys.items()} | recipe_keys(said)
    if f.given.get("transformer_impl") == "local":
        f.used.add("transformer_impl")
        found["cluster.software.transformer_engine"] = False
    return found


WHOLE: Final = ("num_layers", "hidden_size", "num_attention_heads")
"""A file without one of these says a part of a model: overrides of a recipe that has the rest."""
SIMPLE: Final = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "vocab_size", "hidden_dropout",
                 "attention_dropout")  # fmt: skip
"""What is taken of the model from such a file: settings that a recipe has under the same name."""
SAID_BY: Final[dict[str, tuple[str, ...]]] = {
    "train.lr": ("lr",), "train.min_lr": ("lr",), "train.steps": ("train_iters", "train_samples"), "train.schedule": ("lr_decay_style",),
    "train.warmup": ("train_iters", "train_samples"), "train.betas": ("adam_beta1", "adam_beta2"), "train.eps": ("adam_eps",),
    "train.weight_decay": ("weight_decay",), "train.clip": ("clip_grad",), "train.optimizer": ("optimizer",), "seed": ("seed",),
    "train.seq_length": ("seq_length", "max_position_embeddings"),
}  # fmt: skip
"""Settings that a file of overrides leaves to its recipe, by what would say them."""
EXPERTS: Final = {"expert_model_parallel_size", *(term.theirs for term in words.EXPERT_PARALLEL[2:-1])}
"""Settings of a part of a model by which it has experts; not its permutation's, which NeMo-RL's files for dense models have too."""


def has_experts(given: Mapping[str, Any], said: Collection[str]) -> bool:
    """Whether settings, of which the file says those named in `said`, tell that the model has experts."""
    return bool(given.get("num_moe_experts")) or any(name in EXPERTS and given.get(name) not in (None, False, 1) for name in said)


def part_keys(f: Fields, stack: str, said: Collection[str]) -> dict[str, Any]:
    """The keys of a recipe where the settings do not say the whole model: those that they say (`said`: names, without what was made up)."""
    f.assumed.append("the model that you give: the file does not say its layers, width and heads")
    if has_experts(f.given, said):
        f.given["num_moe_experts"] = True
    f.given.setdefault("seq_length", 1)
    keys = {f"model.{name}": f.get(name) for name in SIMPLE if name in said}
    keys |= {name: value for name, value in training_keys(f, stack).items() if name not in SAID_BY or not {*said}.isdisjoint(SAID_BY[name])}
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    f.assumed += [f"{name}=1: the file does not say" for name in sizes if name not in said]
    return keys


def _texts(value: Any) -> list[str]:
    """The words of a text, or of a list of texts."""
    return str(value).split() if isinstance(value, str) else " ".join(map(str, value)).split()


def _precision(f: Fields) -> dict[str, Any]:
    kind = "bf16" if f.get("bf16") else "fp16" if f.get("fp16") else "fp32"
    fp8 = f.get("fp8")
    in_bf16, in_fp32 = f.get("grad_reduce_in_bf16"), f.get("accumulate_allreduce_grads_in_fp32")
    said = f.get("grad_reduce_in_fp32")
    reduce = kind if {"bf16": in_bf16 or said is False, "fp16": not in_fp32 and not said}.get(kind) else "fp32"
    keys: dict[str, Any] = {"grad_reduce_dtype": reduce, "grad_accum_dtype": reduce}
    f.used |= {"fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_interval", "params_dtype", "fp8_recipe"}
    if fp8:
        recipe = str(f.get("fp8_recipe"))
        if recipe not in ("delayed", "tensorwise", "blockwise", "mxfp8"):
            f.assumed.append(f"fp8_recipe={recipe} is priced as tensorwise")
            recipe = "tensorwise"
        return keys | {"precision": "fp8", "fp8_recipe": recipe}
    if f.get("fp4"):
        if f.get("fp4_recipe") not in (None, "nvfp4"):
            f.assumed.append(f"fp4_recipe={f.get('fp4_recipe')} is priced as nvfp4")
        return keys | {"precision": "nvfp4"}
    return keys | {"precision": kind}


def _steps(f: Fields, batch: int) -> dict[str, int]:
    """Steps and steps of warm-up, from iterations or samples of `batch` a step."""
    samples = f.get("train_samples")
    steps = int(f.get("train_iters") or (int(samples) // batch if samples else 0)) or 1
    decay = f.get("lr_decay_iters") or (int(f.get("lr_decay_samples")) // batch if f.get("lr_decay_samples") else steps)
    warmup = int(f.get("lr_warmup_iters") or 0) or int(f.get("lr_warmup_samples") or 0) // batch
    if f.get("lr_warmup_fraction"):
        warmup = round(float(f.get("lr_warmup_fraction")) * int(decay))
    if warmup >= int(decay) and (samples or f.get("train_iters")):
        f.broken.append(f"a warm-up of {warmup} steps must end before the rate's last, {decay} (core/optimizer_param_scheduler.py:157)")
    return {"steps": steps, "warmup": min(warmup, steps)}


# -------------------------------------------------------------------------------------------------------------------- setup


UNEVEN: Final = (
    Term("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_vp_stage", back=int),
    Term("decoder_first_pipeline_num_layers", "first_layers", back=int),
    Term("decoder_last_pipeline_num_layers", "last_layers", back=int),
)
LETTERS: Final = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Layers in a layout string by their names in a layout of lists."""
OFFLOADED: Final = "optimizer_offload_fraction"
"""The share of the optimizer's states that optimizer_cpu_offload keeps in host memory."""
NEEDED: Final = {
    **dict.fromkeys(("recompute_modules", "recompute_method", "recompute_num_layers"), "recompute_granularity"),
    **dict.fromkeys(("cuda_graph_modules", "cuda_graph_scope"), "cuda_graph_impl"),
    **dict.fromkeys(("fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo"), "fp8"),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"), "use_precision_aware_optimizer"),
    "data_parallel_sharding_strategy": "use_megatron_fsdp",
    "offload_modules": "fine_grained_activation_offloading",
    "optimizer_offload_fraction": "optimizer_cpu_offload",
    "moe_flex_dispatcher_backend": "moe_token_dispatcher_type=flex",
    "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor",
    "hierarchical_context_parallel_sizes": "cp_comm_type=a2a+p2p",
}  # fmt: skip
"""Settings of time and memory that Megatron asks for beside another one alone, and that one."""
DEFAULT_VALUES: Final[tuple[Any, ...]] = (
    None, False, 0, 1, 1.0, [], (), "", "full", ["full"], "core_attn", ["core_attn"], "no_shard", "delayed", "most_recent", "deepep",
    "float32", "fp32", "torch.float32", "none",
)  # fmt: skip
"""Values of those that a file may have without asking for anything: Megatron's own."""
ON_BY: Final = {"recompute_granularity": ("recompute_activations", "checkpoint_activations")}
"""Other settings that turn one on."""


def idle(f: Fields) -> list[str]:
    """The settings that do nothing, a sentence each: what they need is off."""
    found = []
    for name, needed in NEEDED.items():
        partner, _, value = needed.partition("=")
        has, said = f.given.get(partner), f.given.get(name)
        on = str(has) == value if value else has not in (None, False, "none", 0)
        if (said is True or said not in DEFAULT_VALUES) and not on and not any(f.given.get(other) for other in ON_BY.get(partner, ())):
            found.append(f"{name}={','.join(map(str, said)) if isinstance(said, list) else said} does nothing without {needed}")
    return found


def refused(f: Fields) -> list[str]:
    """The settings that Megatron refuses beside each other, a sentence each (training/arguments.py:597-601, 703 and 712, core_v0.16.1)."""
    on = {name for name, value in f.given.items() if value not in (None, False)}
    found = ["fp16 and bf16: Megatron takes one of them"] if {"fp16", "bf16"} <= on else []
    if "overlap_param_gather" in on:
        if not on & {"use_distributed_optimizer", "use_megatron_fsdp"} and f.given.get("optimizer") != "dist_muon":
            found.append("overlap_param_gather needs use_distributed_optimizer or use_megatron_fsdp")
        if "overlap_grad_reduce" not in on:
            found.append("overlap_param_gather needs overlap_grad_reduce")
    if recompute_granularity(f) == "selective" and (wrong := sorted({*recomputed(f)} - {*RECOMPUTED})):
        found.append(f"recompute_modules={','.join(wrong)}: Megatron recomputes {', '.join(RECOMPUTED)}")
    return found + (refused_of_experts(f) if f.given.get("num_moe_experts") else [])


WITH_CAPACITY: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Ways to balance experts that Megatron has beside moe_expert_capacity_factor (transformer_config.py:1104, core_v0.16.1)."""


def refused_of_experts(f: Fields) -> list[str]:
    """The settings of experts that Megatron refuses beside each other, a sentence each (transformer_config.py:1096-1213, core_v0.16.1)."""
    found, kinds, coefficients = [], f.given.get("moe_router_load_balancing_type"), f.given.get("moe_aux_loss_coeff")
    factor = f.given.get("moe_expert_capacity_factor")
    each = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds] if kinds else [])]
    if factor is not None and float(factor) >= 0 and (other := [kind for kind in each if kind not in WITH_CAPACITY]):
        found.append(f"moe_router_load_balancing_type={other[0]} with moe_expert_capacity_factor: Megatron has {', '.join(WITH_CAPACITY)}")
    if len(each) > 1 and len(coefficients if isinstance(coefficients, list) else [coefficients]) != len(each):
        found.append(f"moe_router_load_balancing_type has {len(each)} kinds: Megatron wants as many numbers in moe_aux_loss_coeff")
    if recompute_granularity(f) == "selective" and "moe_act" in recomputed(f) and not f.given.get("moe_grouped_gemm"):
        found.append("recompute_modules=moe_act needs moe_grouped_gemm")
    return found


def recompute_granularity(f: Fields) -> str | None:
    """ "full" or "selective"; None: nothing is recomputed by these settings."""
    said: str | None = f.get("recompute_granularity")
    return said or "selective" if f.get("recompute_activations") else said


def recomputed(f: Fields) -> list[str]:
    """The modules that selective recompute names, or Megatron's own choice."""
    modules = f.get("recompute_modules")
    return [str(one) for one in (modules.split(",") if isinstance(modules, str) else modules or ["core_attn"])]


NOT_BOTH: Final = {
    "train_iters": ("train_samples", "lr_decay_samples", "lr_warmup_samples", "rampup_batch_size"),
    "train_samples": ("lr_decay_iters", "lr_warmup_iters"),
    "step_batch_size_schedule": ("global_batch_size",),
}
"""Flags, and what Megatron refuses beside them (training/arguments.py:756-780, core_v0.16.1; the last :680, core_v0.19.0)."""
OF_FULL: Final = ("recompute_method", "recompute_num_layers")
"""Flags of full recompute, which needs them, alone (training/arguments.py:900, transformer_config.py:1166-1179, core_v0.16.1)."""


def not_both(f: Fields) -> list[str]:
    """The flags of a command line that Megatron's programs refuse beside each other, a sentence each.

    >>> not_both(Fields({"train_iters": 9, "lr_warmup_samples": 0, "lr_decay_samples": 7}))
    ['train_iters and lr_decay_samples: Megatron takes one of them']
    """
    pairs = ((name, other) for name, others in NOT_BOTH.items() for other in others)
    found = [f"{name} and {other}: Megatron takes one of them" for name, other in pairs if f.given.get(name) and f.given.get(other)]
    return found + of_full(f)


def of_full(f: Fields) -> list[str]:
    """The flags of full recompute that lack, or stand beside selective recompute, a sentence each."""
    if f.given.get("recompute_granularity") == "selective":
        return [f"{name} is of recompute_granularity=full: Megatron refuses it beside selective" for name in OF_FULL if f.given.get(name)]
    if f.given.get("recompute_granularity") == "full":
        return [f"recompute_granularity=full needs {name}: Megatron refuses it without" for name in OF_FULL if not f.given.get(name)]
    return []


def setup_of(f: Fields, engine: str) -> Setup:
    """Parallel sizes, stages, recompute and options as these settings choose them. Raises InputError for what is missing."""
    f.assumed += idle(f)
    f.broken += refused(f)
    if f.given.get(words.HYBRID_CP):
        f.assumed.append(f"{words.HYBRID_CP} {words.NO_HYBRID_CP}")
    said = f.read(*words.SIZES, *words.EXPERT_PARALLEL, *words.OPTIONS, *words.BATCH, *UNEVEN)
    if said["offload_optimizer"]:  # a part of it stays unpriced; the flag's own default is all (training/arguments.py:2061)
        fraction = float(f.given.get(OFFLOADED, 1.0))
        said["offload_optimizer"] = fraction == 1.0
        f.used |= {OFFLOADED} if fraction in (0.0, 1.0) else set()
    tp, pp, vpp = said["tp"] or 1, said["pp"] or 1, f.get("num_virtual_stages_per_pipeline_rank")
    per_chunk, layout = f.get("num_layers_per_virtual_pipeline_stage"), f.get("pipeline_model_parallel_layout")
    if per_chunk and not vpp:
        layers = int(f.need("num_layers"))
        vpp = max(1, layers // (pp * int(per_chunk)))
        if layers % (pp * int(per_chunk)):
            chunks = f"chunks of {per_chunk} on {pp} stages (num_layers_per_virtual_pipeline_stage)"
            f.broken.append(f"num_layers={layers}: does not divide into {chunks}")
    if layout:
        layout = layout if isinstance(layout, str) else "|".join("".join(LETTERS.get(str(part), "t") for part in chunk) for chunk in layout)
        vpp = max(1, len(expand(layout)) // pp)
    sizes = [len(chunk) for chunk in str(f.get("hybrid_layer_pattern") or "").split("|")]
    if len(sizes) > 1:
        vpp = max(1, len(sizes) // pp)
        if vpp == 1 and len({*sizes[1:-1]}) <= 1:
            said |= {"first_layers": sizes[0], "last_layers": sizes[-1]} if len({*sizes}) > 1 else {}
        elif len({*sizes}) > 1:
            layout = "E" + "|".join("t" * size for size in sizes) + "L"
    stage, fsdp = _zero(f)
    by_blocks = said["fp8_param_gather"] and f.get("fp8_recipe") == "mxfp8"
    if by_blocks and not f.get("reuse_grad_buf_for_mxfp8_param_ag") and not fsdp:
        f.broken.append("fp8_param_gather with fp8_recipe=mxfp8 needs reuse_grad_buf_for_mxfp8_param_ag: Transformer Engine keeps no MXFP8 "
                        "weight in a buffer of Megatron's (pytorch/tensor/utils.py, replace_raw_data)")  # fmt: skip
    mode, first = recompute_of(f)
    f.used |= {"hierarchical_context_parallel_sizes", "world_size", "data_parallel_size"}
    instances = int(f.get("num_distributed_optimizer_instances") or 1)
    if said.get("microbatch_group_size_per_vp_stage") == pp:
        del said["microbatch_group_size_per_vp_stage"]
    said.setdefault("etp", tp)  # of a model without experts the audit forgets it: a file of overrides does not say which it has
    if not f.given.get("num_moe_experts"):  # whose other settings mean nothing then
        said = {name: value for name, value in said.items() if name not in [term.ours for term in words.EXPERT_PARALLEL[2:]]}
    if said["tp_comm_overlap"] and f.given.get("multi_latent_attention"):
        said["tp_comm_overlap"] = False
        f.assumed.append("tp_comm_overlap does nothing with multi_latent_attention: Megatron turns it off (rule tp_comm_overlap)")
    return Setup(
        **said | {name: False for name in ("sequence_parallel", "tp_comm_overlap") if tp == 1},
        engine=engine,
        vpp=int(vpp or 1),
        experts=bool(f.given.get("num_moe_experts")),
        rank_order=PP_BEFORE_DP if f.get("use_tp_pp_dp_mapping") else RANK_ORDER,
        recompute=mode,
        recompute_layers=first,
        layout=layout,
        ends_count=(bool(f.get("account_for_embedding_in_pipeline_split")), bool(f.get("account_for_loss_in_pipeline_split"))),
        zero_stage=stage,  # type: ignore[arg-type]
        zero_shard_size=-instances if instances > 1 else None,
        **_cuda_graphs(f),
        offload_modules=_offload_modules(f),
        megatron_fsdp=fsdp,
    )  # fmt: skip


def _cuda_graphs(f: Fields) -> dict[str, Any]:
    """Who makes CUDA graphs and of what, as plans say it."""
    old = "local" if f.get("enable_cuda_graph") else "transformer_engine" if f.get("external_cuda_graph") else "none"
    impl, given = str(f.get("cuda_graph_impl") or old), f.get("cuda_graph_modules") or f.get("cuda_graph_scope") or ()
    named = {str(name) for name in (given.replace("+", ",").split(",") if isinstance(given, str) else given)} - {"full"}
    if impl == "none" or named == {"full_iteration"} or impl == "full_iteration":
        return {"cuda_graph_impl": "none" if impl == "none" else "full_iteration"}
    if impl == "local" and "moe_preprocess" in named:
        named.add("moe_router")  # which it takes together (transformer_config.py:1725)
    try:
        return {"cuda_graph_impl": impl, "cuda_graph_modules": modules_of(named)}
    except ValueError as why:
        f.broken.append(f"cuda_graph_modules={why}")
        return {"cuda_graph_impl": impl}


def _offload_modules(f: Fields) -> str | None:
    """The modules whose activations go to host memory, as plans say them."""
    given = f.get("offload_modules") or ()
    named = [str(name) for name in (given.replace("+", ",").split(",") if isinstance(given, str) else given)]
    if not f.get("fine_grained_activation_offloading"):
        return None
    if more := [name for name in named if name not in MODULES]:
        f.unpriced.append(f"offload_modules={' '.join(more)}")
    found = "+".join(name for name in MODULES if name in named)
    if not named:
        f.broken.append("fine_grained_activation_offloading needs offload_modules")
    return found or None


def _zero(f: Fields) -> tuple[int, bool]:
    """(ZeRO stage, whether Megatron's FSDP does it)."""
    strategy = f.get("data_parallel_sharding_strategy")
    distributed = f.get("use_distributed_optimizer") or f.get("optimizer") == "dist_muon"
    stage = words.FSDP_STRATEGIES.index(strategy) if strategy in words.FSDP_STRATEGIES else 0
    if f.get("use_megatron_fsdp"):
        if stage < 2:
            said = f"data_parallel_sharding_strategy={words.FSDP_STRATEGIES[stage]}"
            f.assumed.append(f"use_megatron_fsdp with {said} is priced as Megatron's own data parallelism with zero_stage={stage}")
        return stage, stage >= 2
    if f.get("use_torch_fsdp2"):
        f.assumed.append("use_torch_fsdp2 is priced as Megatron's own FSDP with the same sharding")
        return 3, True
    return (1 if distributed else 0), False


def _priced_modules(f: Fields, named: frozenset[str]) -> frozenset[str]:
    """The modules that Megatron recomputes as plans name them: "mlp" is all feed-forwards of a layer-by-layer schedule, and those of layers
    without experts in the combined one (transformer_layer.py:445, moe_layer.py:432, fine_grained_callables.py:509)."""
    plain = named - {"moe"}
    experts = bool(f.given.get("num_moe_experts"))
    if f.given.get("transformer_impl", "transformer_engine") != "local":
        if "layernorm" in named:  # which Transformer Engine keeps apart beside latent attention and before experts (gpt_layer_specs.py)
            apart = experts or f.given.get("multi_latent_attention")
            (f.unpriced if apart else f.assumed).append(f"recompute_modules=layernorm{'' if apart else NO_NORMS}")
        if len(named) > 1 and "core_attn" in named:  # flash attention keeps no scores: seconds alone
            f.slower.append("recompute_modules=core_attn")
        plain -= {"layernorm"} | ({"core_attn"} if len(named) > 1 else set())
    if not experts:
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
    granularity, named = recompute_granularity(f), recomputed(f)
    method, layers = f.get("recompute_method"), f.get("recompute_num_layers")
    if f.get("checkpoint_activations"):  # Megatron's before 2022, and Megatron-DeepSpeed's
        granularity, layers = "full", None
    f.used |= {"activations_checkpoint_method", "checkpoint_num_layers", "activations_checkpoint_num_layers"}
    if granularity == "selective":
        wanted = _priced_modules(f, frozenset(named))
        within = [(len(of), RECOMPUTE_ORDER.index(mode), mode) for mode, of in RECOMPUTE_MODULES.items() if wanted >= {*of}]
        mode: Recompute = max(within)[2] if within else "none"
        if left := sorted(wanted - {*RECOMPUTE_MODULES.get(mode, ())}):
            f.unpriced.append(f"recompute_modules={','.join(left)}")
        return mode, None
    if granularity == "full":
        if method == "uniform" and layers is not None and int(layers) > 1:
            f.assumed.append(f"recompute_method=uniform keeps one input for {layers} layers: priced as one for each")
        return "full", int(layers) if method == "block" and layers is not None else None
    return "none", None


# ----------------------------------------------------------------------------------------------------------------- flags again

STAGES: Final = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage",
)  # fmt: skip
RECOMPUTING: Final = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_activations",
    "checkpoint_activations", "checkpoint_num_layers",
)  # fmt: skip


def fields_changed(before: Setup, after: Setup) -> dict[str, Any]:
    """What must change for the second setup in place of the first, by the settings' names; None: it must not stand.

    >>> fields_changed(Setup(engine="megatron", tp=2), Setup(engine="megatron", tp=4, sequence_parallel=True))
    {'tensor_model_parallel_size': 4, 'sequence_parallel': True}
    """
    differing = differs((*words.SIZES, *words.EXPERT_PARALLEL, *words.OPTIONS, *words.BATCH), before, after)
    found = {name: None if value is NOTHING else value for name, value in differing.items()}
    if before.etp != after.etp and after.etp == after.tp:
        found["expert_tensor_parallel_size"] = None if before.etp == before.tp else after.etp
    if before.zero_stage != after.zero_stage:
        found["use_distributed_optimizer"] = True if after.zero_stage else None
    stages = ("vpp", "layout", "first_layers", "last_layers", "ends_count", "microbatch_group_size_per_vp_stage")
    if any(getattr(before, name) != getattr(after, name) for name in stages):
        found |= dict.fromkeys(STAGES) | {"microbatch_group_size_per_vp_stage": after.microbatch_group_size_per_vp_stage or None}
        found |= {name: getattr(after, of) for name, of in (term[:2] for term in UNEVEN[1:]) if getattr(after, of)}
        if after.layout is not None:
            found["pipeline_model_parallel_layout"] = after.layout
        elif after.vpp > 1:
            found["num_virtual_stages_per_pipeline_rank"] = after.vpp
    if (before.recompute, before.recompute_layers) != (after.recompute, after.recompute_layers):
        found |= dict.fromkeys(RECOMPUTING)
        if after.recompute == "full":
            block = after.recompute_layers is not None
            found |= {"recompute_granularity": "full", "recompute_method": "block" if block else "uniform",
                      "recompute_num_layers": after.recompute_layers if block else 1}  # fmt: skip
        elif after.recompute != "none":
            modules = list(RECOMPUTE_MODULES[after.recompute])
            both = after.experts and not after.overlap_moe_expert_parallel_comm and "mlp" in modules
            found |= {"recompute_granularity": "selective", "recompute_modules": [*modules, "moe"] if both else modules}
    return found


def flags_changed(before: Setup, after: Setup) -> dict[str, list[str] | None]:
    """Changes by flag: its values ([] for a switch), or None where it must not stand."""
    change: dict[str, list[str] | None] = {}
    for name, value in fields_changed(before, after).items():
        flag = flags().get(FLAG_OF.get(name, name), ("--" + name.replace("_", "-"),))[0]
        change[flag] = value if value is None else [] if value is True else list(map(str, value if isinstance(value, list) else [value]))
    return change
