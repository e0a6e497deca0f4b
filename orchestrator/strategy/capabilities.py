"""What an engine mode can run and how it behaves, as values that the engines room makes and the search is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, Literal

import msgspec

from orchestrator.strategy.spec import LAST_RESORTS, Candidate, Recompute, ZeroStage
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class Rule(Value, frozen=True, kw_only=True):
    """An engine's rule. `check` returns None where the candidate keeps it, else the reason in numbers
    ("16 does not divide num_attention_heads=24"). `needs` names the fields that it reads, outermost first, so that the decision tree
    can cut as soon as they are fixed: model (nothing of the candidate), then tp, pp, cp, ep, dp, vpp, zero_stage, ..."""

    id: str
    engine_rule: str
    """The engine's own rule: its id in the rule table, file and line."""
    check: Callable[[Candidate, Workload], str | None]
    needs: tuple[str, ...]
    only_with: str = ""
    """The option at whose default the rule forbids nothing, where there is one."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A function, which pickle takes by its name, is a rule there (engines/rules/rule.py)."""
        check = f"{self.check.__module__}:{self.check.__qualname__}" if isinstance(self.check, FunctionType) else self.check
        return _named, (check, self.id, self.engine_rule, self.needs, self.only_with)


def _named(check: str | Callable[[Candidate, Workload], str | None], id: str, engine_rule: str, needs: tuple[str, ...], only: str) -> Rule:
    made = resolve_name(check).check if isinstance(check, str) else check
    return Rule(id=id, engine_rule=engine_rule, check=made, needs=needs, only_with=only)


class Capabilities(Value, frozen=True, kw_only=True):
    """Which axes an engine mode offers, and what may differ from layer to layer."""

    engine: str
    parts: tuple[str, ...] | None
    """What its models may be made of, in the words of `Architecture.features`; None: anything that is described."""
    beyond_parts: str = ""
    """How a model with other parts may be trained all the same, in the words that follow the refusal."""
    planned_parts: Mapping[str, str] = {}
    """Parts beside `parts`, and "lora", that are planned and priced though our worker can't train them, each with what is lacking."""
    axes: tuple[str, ...]
    """The axes that it has, of tp, pp, vpp, cp, ep, dp; another axis has degree 1."""
    least_sequence_part: int = 1
    """Tokens of a sequence that a rank must hold for cp to be searched; a pin takes any part."""
    zero_stages: tuple[ZeroStage, ...]
    zero_stages_with_pipeline: tuple[ZeroStage, ...]
    sequence_parallel: bool
    recompute: tuple[Recompute, ...]
    pinned_recompute: tuple[Recompute, ...] = ()
    """The modes of `recompute` that only a pin takes: what they drop is less than any prediction of memory is good for."""
    recompute_varies: Literal["never", "job", "stage", "layer"]
    """How recompute modes may differ. never: not at all; job: in one way for the whole job (the same first so many layers of every chunk in
    full, the others not: Megatron's --recompute-num-layers); stage: from stage to stage, in full also within one; layer: from layer to
    layer."""
    recompute_by_layer: tuple[str, ...] = ()
    """Schedules under which each layer has a mode of its own, where otherwise a stage has one."""
    uneven_stages: bool
    even_between: Mapping[str, str] = {}
    """Parts of models (as in `parts`) of which every stage has a layer, and all stages between the first and the last as many; with the
    engine's own rule."""
    schedules: tuple[str, ...]
    microbatch_groups: bool = False
    """Whether interleaving may take more than pp micro-batches through a chunk at a time."""
    offload_optimizer: bool
    options: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    """The values that it has of further searched options, by name, in the order in which ties are kept; without an entry: the default."""
    pinned_values: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    """Further values of `options` that only a pin takes: they need what nobody said is on the nodes."""
    zero_shard_groups: bool = False
    """Whether ZeRO-3 may have a second copy of the weights inside each inner network level (DeepSpeed's hpZ, arXiv 2306.10209)."""
    zero_shard_stages: tuple[ZeroStage, ...] = ()
    """The stages that a `Strategy.zero_shard_size` may be pinned with."""
    fsdp_zero_stages: tuple[ZeroStage, ...] = ()
    """ZeRO stages of which `Strategy.megatron_fsdp` has a strategy."""
    later_releases: tuple[str, ...] = ()
    """Releases of megatron-core behind the one that this is of, for which rules are known, oldest first."""
    pinned_options: tuple[str, ...] = ()
    """The options of `spec.PINNED_ONLY` that it has; the others stay at their defaults."""
    off_with: dict[str, str] = msgspec.field(default_factory=dict)
    """The one of them that an optimizer has to be without, by the optimizer's name: off where it is not pinned."""
    precision_aware_optimizer: bool = False
    """Whether `Training.precision_aware_optimizer` means something to it."""
    tasks: tuple[str, ...] = ("pretrain",)
    """What it trains on (`Training.task`)."""
    lora: bool = False
    """Whether it trains LoRA's adapters (`Training.lora`)."""
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    rank_orders: tuple[tuple[str, ...], ...]
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """The engine's own rule (file and line) where it says what a field here says, by the name of the rule that follows from the field
    (strategy/legality.py)."""
    rules: tuple[Rule, ...]
    """The engine's rules that no field here can say."""

    def beside(self, modes: tuple[Recompute, ...]) -> list[tuple[Recompute, ...]]:
        """The modes in groups, of which a plan has one: where they may differ, all; never: each alone; in a job, layers that are recomputed
        in full have others beside them that aren't."""
        if self.recompute_varies in ("stage", "layer"):
            return [modes]
        together = tuple(mode for mode in modes if self.recompute_varies == "job" and mode in ("none", "full"))
        return [*filter(None, [together]), *((mode,) for mode in modes if mode not in together)]

    def with_last_resorts(self) -> Capabilities:
        """The capabilities with the options that save memory among those that are searched; the same value where there are none."""
        has = [choice for choice in LAST_RESORTS if choice.name in self.pinned_options]
        return msgspec.structs.replace(self, options=self.options | {choice.name: choice.values_tried for choice in has}) if has else self

    def recomputes_by_layer(self, schedule: str) -> bool:
        """Whether any layer may be recomputed in any mode, whatever its neighbours do."""
        return self.recompute_varies == "layer" or schedule in self.recompute_by_layer


class StateBytes(Value, frozen=True, kw_only=True):
    """Bytes per parameter before sharding. `step` is allocated during the optimizer step only, on the optimizer's shard."""

    weight: float
    gradient: float
    master: float
    moments: float
    step: float = 0.0
    backward: float = 0.0
    """Bytes of a parameter that are allocated during backward beside `gradient` (a transient .grad)."""


SHARDED_FROM_STAGE = {"optimizer": 1, "gradient": 2, "weight": 3}
"""ZeRO (arXiv 1910.02054): the stage from which a state is divided over the data-parallel group."""


class Traits(Value, frozen=True, kw_only=True):
    """What pricing must know of an engine without importing it."""

    engine: str
    states: dict[str, StateBytes]
    """Bytes of a weight and its states, by "<precision class>/<zero stage>": precision class "mixed" (bf16, fp16, fp8) or "fp32", stage
    "0".."3"."""
    gradient_bytes_on_wire: Literal["grad_reduce_dtype", "grad_accum_dtype", "weight"]
    gradient_buffer: Literal["fixed", "grad_reduce_dtype", "grad_accum_dtype"] = "fixed"
    """The setting whose data type the kept gradients have where that is one of 16 bits (`cost.states.state_bytes`); fixed: they take what
    `states` say."""
    reduce_scatter_from_stage: int
    """The first ZeRO stage that reduce-scatters gradients; below it, and at stage 0, they are all-reduced."""
    reduces_every_microbatch_from_stage: int = 2
    weight_gathers_per_microbatch: int = 2
    """How often each micro-batch gathers the weights at stage 3: once in forward, once in backward."""
    adam_step: float = 0.0
    """Bytes per parameter of the optimizer's shard that Adam's own kernels allocate in a step on a GPU, beside what `states` say."""
    tp_overlap: float = 0.0
    """Share of tensor-parallel traffic hidden behind GEMMs."""
    overlaps_input_gradient: bool = False
    """Whether a column-parallel linear's backward pass gathers its input beside the product for the input's gradient, and sums that beside
    the one for the weight's (mcore tensor_parallel/layers.py:478-549)."""
    bucket_elements: int = 0
    bucket_copies: int = 0
    live_parameter_elements: int = 0
    """Elements of gathered parameters, in full precision, that ZeRO-3 keeps live beside the current layer (prefetch)."""
    overlaps_grad_reduce: bool = True
    """Whether gradient reduction can run beside the backward pass (the strategy's `overlap_grad_reduce` asks for it)."""
    overlaps_param_gather: bool = True
    """Whether the gathering of weights can run beside compute: Megatron's --overlap-param-gather hides ZeRO-1's behind the next forward,
    DeepSpeed's stage 3 prefetches; DeepSpeed's stages 1 and 2 gather inside `step`: False there."""
    bucket_itemsize: int = 2
    """Bytes of an element in the reduction buckets (`bucket_elements` x `bucket_copies`)."""
    message_parameters: tuple[int, int] = (0, 0)
    """Parameters whose gradients, or weights, travel in one message of the once-a-step traffic: at least the first, or the second for each
    data-parallel rank where that is more. 0: as `Calibration.layers_per_message` says."""
    flash_attention: bool = True
    logits_bytes: float = 8.0
    """Bytes per local logit at the loss's peak: compute-dtype logits, fp32 copy and the saved softmax."""
    fp32_gradient_fusion: bool = True
    layers: Literal["megatron", "hugging_face"] = "megatron"
    """How the engine's layers compute: as model/describe.py has them, or as model.hugging_face changes that."""
    fp8_weight_copies: bool = False
    """Whether FP8 copies of the linears' weights are kept from micro-batch to micro-batch beside the weights (Transformer Engine)."""
    fused_norms: bool = False
    """Whether norms are part of the linears that follow them (Transformer Engine): recompute of the MLP then begins with its norm."""
    fused_permutations: bool = True
    """Whether it has kernels that put tokens in their experts' order and sum their copies (Transformer Engine), `moe_permute_fusion`."""
    gathers_few_query_groups: bool = False
    """Whether every rank gathers queries, keys and values of the whole layer where there are fewer query groups than tp ranks
    (megatron-core, transformer/attention.py:1398-1416)."""
    unfused_attention: tuple[str, ...] = ()
    """Parts (as in `Capabilities.parts`) with which attention materialises the scores even where `flash_attention` is on."""
    context_parallel: Literal["ring", "all_to_all"] = "ring"
    """What cp is: keys and values around a ring, or Ulysses' exchange of sequence shards for heads (arXiv 2309.14509)."""
    tower_first: bool = False
    """Whether what looks at images is a part of the embedding, on the first stage (model/describe.py, `with_tower_first`)."""
    constants: dict[str, float] = msgspec.field(default_factory=dict)
    """The engine's own among the cost model's constants, on any GPU (cost.calibration): passes of unfused kernels, its Python."""

    def state_bytes(self, precision: str, zero_stage: int) -> StateBytes:
        """Bytes per parameter for this precision and ZeRO stage. Raises KeyError for one that the engine has not."""
        return self.states[f"{'fp32' if precision == 'fp32' else 'mixed'}/{zero_stage}"]
