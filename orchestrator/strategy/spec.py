"""The values a search moves in: a mesh, a strategy on it, and the candidate that adds a schedule and a micro-batch size."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from msgspec.structs import replace

from orchestrator.model.training import Dtype
from orchestrator.strategy.choices import Choice, Offered, declared, getter, line
from orchestrator.strategy.offloading import read_modules
from orchestrator.values import Value

Recompute = Literal[
    "none", "layernorm", "selective", "core_attn+layernorm", "moe_act", "mla_up_proj", "mla_up_proj+moe_act",
    "mlp", "layernorm+mlp", "core_attn+mlp", "core_attn+layernorm+mlp", "mla_up_proj+mlp", "full",
]  # fmt: skip
"""What of a layer is computed again in backward: nothing, modules of it, or all. "selective" is core_attn, as in Korthikanti et al."""
ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal["1f1b", "interleaved", "deepspeed_1f1b"]
RECOMPUTE_ORDER: tuple[Recompute, ...] = get_args(Recompute)
"""Modes of recompute, weakest first; ties go to the weaker."""
RECOMPUTE_MODULES: dict[Recompute, tuple[str, ...]] = {
    mode: ("core_attn",) if mode == "selective" else tuple(mode.split("+")) for mode in RECOMPUTE_ORDER if mode not in ("none", "full")
}
"""Megatron's --recompute-modules of each mode that is one of modules (transformer_config.py:411-421)."""
WITHOUT_MLP: dict[Recompute, Recompute] = {
    mode: next((other for other, of in RECOMPUTE_MODULES.items() if of == rest), "none")
    for mode, modules in RECOMPUTE_MODULES.items()
    if "mlp" in modules
    for rest in [tuple(module for module in modules if module != "mlp")]
}
"""What each mode with feed-forwards leaves of itself in a layer whose feed-forward is not computed again."""
CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]
CudaGraphImpl = Literal["none", "local", "transformer_engine", "full_iteration"]
CudaGraphModules = Literal[
    "moe", "moe_router", "mamba", "mlp", "attn", "moe_router+moe_preprocess", "mamba+moe", "mamba+moe_router", "mlp+moe",
    "mlp+moe_router", "mlp+mamba", "attn+moe", "attn+moe_router", "attn+mamba", "attn+mlp", "mamba+moe_router+moe_preprocess",
    "mlp+moe_router+moe_preprocess", "mlp+mamba+moe", "mlp+mamba+moe_router", "attn+moe_router+moe_preprocess", "attn+mamba+moe",
    "attn+mamba+moe_router", "attn+mlp+moe", "attn+mlp+moe_router", "attn+mlp+mamba", "mlp+mamba+moe_router+moe_preprocess",
    "attn+mamba+moe_router+moe_preprocess", "attn+mlp+moe_router+moe_preprocess", "attn+mlp+mamba+moe", "attn+mlp+mamba+moe_router",
    "attn+mlp+mamba+moe_router+moe_preprocess",
]  # fmt: skip
"""Megatron's --cuda-graph-modules: attention, feed-forwards without experts, those with (as a whole, their router, or their router and what
comes before the exchange of tokens), state spaces."""
Dispatcher = Literal["alltoall", "allgather", "flex"]
RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
"""A mesh's `order` in one word, as megatron-core's initialize_model_parallel takes it."""
PIECES: Final = (8, 64)
"""Numbers of pieces of a sequence that are offered: more take less memory and a little longer."""
IN_THE_PROGRAM: Final = "needs calls of DeepSpeed's in the program that trains: ours makes them"
RANK_ORDER = ("tp", "cp", "ep", "dp", "pp")
"""The axes of a mesh in Megatron's default order: ranks of the first axis are adjacent."""
PP_BEFORE_DP = ("tp", "cp", "ep", "pp", "dp")
"""The axes in the order of Megatron's --use-tp-pp-dp-mapping: a pipeline's stages are near each other and its replicas far apart."""


class Mesh(Value, frozen=True, kw_only=True, cache_hash=True):
    """Dense axes tp x cp x dp x pp; experts fold ep x etp x expert_dp over tp x cp x dp.

    >>> Mesh(tp=2, pp=2, dp=4).world_size
    16
    >>> Mesh(tp=2, dp=4, ep=4, etp=1).expert_dp
    2
    """

    tp: Annotated[int, Choice(doc="tensor parallelism: ranks that share every layer", unit="ranks", searched=True, always_said=True)] = 1
    pp: Annotated[int, Choice(doc="pipeline stages", unit="stages", searched=True, always_said=True, in_layer_price=False)] = 1
    cp: Annotated[int, Choice(doc="context parallelism: ranks that share a sequence", unit="ranks", searched=True)] = 1
    ep: Annotated[int, Choice(doc="expert parallelism: ranks that share a layer's experts", unit="ranks", searched=True)] = 1
    etp: Annotated[int, Choice(doc="tensor parallelism of one expert", unit="ranks", searched=True, seen=0)] = 1
    dp: Annotated[
        int, Choice(doc="data parallelism: copies of the model", unit="copies", searched=True, always_said=True, in_layer_price=False)
    ] = 1
    order: Annotated[tuple[str, ...], Choice(
        name="rank_order", doc="which ranks are neighbours; tp-cp-ep-pp-dp is Megatron's --use-tp-pp-dp-mapping (megatron)", searched=True,
        in_layer_price=False, pin_type=RankOrder, seen=0)] = RANK_ORDER  # fmt: skip

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def degree(self, axis: str) -> int:
        """The size of an axis by its name."""
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance between neighbouring ranks of this axis' groups.

        >>> Mesh(tp=4, dp=2, pp=2).stride("dp"), Mesh(tp=4, dp=2, pp=2).stride("pp")
        (4, 8)
        """
        stride = 1
        for name in self.order:
            if name == axis:
                return stride
            if name != "ep":
                stride *= self.degree(name)
        raise KeyError(axis)


class Options(Value, frozen=True, kw_only=True):
    """The choices that all layers share beside the mesh: fields of strategies and of plans."""

    zero_stage: Annotated[
        ZeroStage, Choice(doc="which states data parallelism divides (ZeRO)", searched=True, always_said=True, in_layer_price=False)
    ] = 0
    zero_shard_size: Annotated[int | None, Choice(
        doc="ranks that share a copy of the states (Megatron; HSDP under its FSDP), or hpZ's copy of the weights", unit="ranks",
        searched=True, in_layer_price=False, seen=17, offered=Offered(values=(8, 64), asks="no published run has it"))] = None  # fmt: skip
    sequence_parallel: Annotated[bool, Choice(doc="Megatron's: norms and dropout on parts of the sequence", searched=True, short="sp")] = (
        False
    )
    offload_optimizer: Annotated[
        bool, Choice(doc="optimizer states in host memory", searched=True, in_layer_price=False, short="offload", pin="offload", seen=6)
    ] = False
    overlap_grad_reduce: Annotated[bool, Choice(doc="gradients reduced beside the backward pass (megatron)", in_layer_price=False)] = True
    overlap_param_gather: Annotated[
        bool, Choice(doc="weights gathered beside the forward pass (megatron, ZeRO-1)", in_layer_price=False)
    ] = True
    reduce_scatter_with_fp32_accumulation: Annotated[bool, Choice(
        doc="gradients exchanged and summed in fp32, in place of a reduce-scatter (megatron, ZeRO-1)", in_layer_price=False,
        offered=Offered(values=(True,), asks="needs room for a second copy of a bucket's gradients"))] = False  # fmt: skip
    ddp_bucket_size: Annotated[int | None, Choice(
        doc="parameters whose gradients travel in one message beside backward; unset: Megatron's own size (megatron)", unit="parameters",
        in_layer_price=False)] = None  # fmt: skip
    fp8_param_gather: Annotated[bool, Choice(
        doc="the linears' weights in FP8 alone, kept and gathered without bf16 ones (megatron, train.precision=fp8, ZeRO)",
        in_layer_price=False,
        offered=Offered(values=(True,), asks="keeps no bf16 copy of the weights, only FP8 and the optimizer's own"))] = False  # fmt: skip
    keep_fp8_transpose_cache: Annotated[bool, Choice(
        doc="the transposed copies of FP8 weights kept whole from one pass to the next (megatron_fsdp, fp8_param_gather, zero_stage=3)",
        in_layer_price=False)] = False  # fmt: skip
    tp_comm_overlap: Annotated[bool, Choice(
        doc="tensor-parallel traffic beside the products (megatron, sequence parallelism, Transformer Engine's user buffers)",
        searched=True, short="ub",
        offered=Offered(values=(True,), asks="needs Transformer Engine's user buffers, before Hopper by CUDA IPC"))] = False  # fmt: skip
    cross_entropy_loss_fusion: Annotated[bool, Choice(doc="the loss in one kernel (megatron)")] = False
    cuda_graph_impl: Annotated[CudaGraphImpl, Choice(
        doc="CUDA graphs: of each layer's passes, Megatron's own or Transformer Engine's, or of all passes of a step (megatron)",
        in_layer_price=False, offered=Offered(
            values=("transformer_engine", "full_iteration"),
            asks="needs Megatron's own loop, memory for the graphs, and steps of one shape"))] = "none"  # fmt: skip
    cuda_graph_modules: Annotated[CudaGraphModules | None, Choice(
        doc="what of a layer its graphs hold; unset: all that can be a graph (megatron)", in_layer_price=False)] = None  # fmt: skip
    offload_modules: Annotated[str | None, Choice(
        doc="what these modules of a layer keep for backward goes to host memory: core_attn+attn_proj+moe_act, say (megatron, "
        "--fine-grained-activation-offloading)", read=read_modules, offered=Offered(
            values=("core_attn", "expert_fc1+moe_act"), frees=True,
            asks="needs Megatron's own program; its time rests on the host's link, which no published run checks"))] = None  # fmt: skip
    cp_comm_type: Annotated[
        CpCommType, Choice(doc="how context parallelism exchanges keys and values (megatron)", searched=True, after="cp", seen=7)
    ] = "p2p"
    moe_token_dispatcher_type: Annotated[Dispatcher, Choice(
        doc="how tokens reach their experts; flex is DeepEP or HybridEP (megatron)", searched=True, short="dispatcher", seen=0,
        usual=("flex",), offered=Offered(values=("flex",), asks="needs DeepEP installed on every node"))] = "alltoall"  # fmt: skip
    moe_shared_expert_overlap: Annotated[
        bool, Choice(doc="the shared experts beside the exchange of tokens, wherever that is legal (megatron)", searched=True)
    ] = False
    overlap_moe_expert_parallel_comm: Annotated[bool, Choice(
        doc="the experts' exchange of tokens beside the computing of another micro-batch, forward beside backward (megatron)",
        instead_of="moe_shared_expert_overlap", offered=Offered(
            values=(True,),
            asks="needs memory for a layer of a second micro-batch; Megatron-core before 0.16 held most of one"))] = False  # fmt: skip
    delay_wgrad_compute: Annotated[bool, Choice(
        doc="with it, the experts' weight gradients behind their inputs' ones, beside the exchange (megatron, Transformer Engine)",
        offered=Offered(values=(True,), asks="comes with overlap_moe_expert_parallel_comm"))] = False  # fmt: skip
    moe_permute_fusion: Annotated[
        bool, Choice(doc="tokens put in their experts' order, and their copies summed, in one kernel each (megatron, Transformer Engine)")
    ] = True
    megatron_fsdp: Annotated[bool, Choice(
        doc="ZeRO-2 or 3 by Megatron's own FSDP (--data-parallel-sharding-strategy optim_grads...)", in_layer_price=False, offered=Offered(
            values=(True,), saves_memory=True, own_program=True,
            asks="needs Megatron's own program (its loop of 0.19, or entry=): our worker has no Megatron-FSDP"))] = False  # fmt: skip
    tiled_mlp: Annotated[int, Choice(
        doc="MLPs one piece of a sequence at a time, again in backward (deepspeed)", unit="pieces",
        offered=Offered(values=PIECES, asks=IN_THE_PROGRAM, saves_memory=True, last_resort=True))] = 1  # fmt: skip
    tiled_logits: Annotated[int, Choice(
        doc="logits and loss one piece of a sequence at a time, again in backward (deepspeed)", unit="pieces",
        offered=Offered(values=PIECES, asks=IN_THE_PROGRAM, saves_memory=True, last_resort=True))] = 1  # fmt: skip
    offload_activations: Annotated[bool, Choice(
        doc="activation checkpoints in host memory: the layers' inputs under full recompute (deepspeed)",
        offered=Offered(values=(True,), asks=IN_THE_PROGRAM, saves_memory=True, last_resort=True))] = False  # fmt: skip


class Strategy(Options, frozen=True, kw_only=True, cache_hash=True):
    """How one layer is computed and its states are kept."""

    mesh: Mesh
    recompute: Annotated[
        Recompute, Choice(doc="what of a layer backward computes again", searched=True, in_layer_price=False, after="sequence_parallel")
    ] = "none"
    grad_reduce_dtype: Dtype = "fp32"


class Candidate(Value, frozen=True, kw_only=True, cache_hash=True):
    """An outer choice: everything but the split of layers over stages and their recompute. `strategy.recompute` is then the
    strongest mode that the inner search may use."""

    engine: str
    strategy: Strategy
    micro_batch_size: Annotated[
        int, Choice(doc="samples of a pass", unit="samples", searched=True, always_said=True, short="mbs", in_layer_price=False)
    ]
    num_microbatches: int
    vpp: Annotated[int, Choice(doc="virtual pipeline stages of a rank", unit="chunks", searched=True, in_layer_price=False, after="pp")] = 1
    microbatch_group_size_per_vp_stage: Annotated[int | None, Choice(
        doc="micro-batches that interleaving takes through a chunk before the next chunk's turn; unset: pp (megatron)",
        unit="micro-batches", searched=True, short="microbatch_group", seen=0, in_layer_price=False, after="vpp")] = None  # fmt: skip
    schedule: Annotated[Schedule, Choice(
        doc="the pipeline's order of passes", fixed_with="vpp", in_layer_price=False, after="dp",
        words=(("1f1b", ""), ("interleaved", ""), ("deepspeed_1f1b", "deepspeed_1f1b")))] = "1f1b"  # fmt: skip

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    def label(self) -> str:
        """One line for tables and messages; `strategy.recompute` is no part of it.

        >>> Candidate(engine="megatron", strategy=Strategy(mesh=Mesh(tp=2, pp=2, dp=4), zero_stage=1), micro_batch_size=1,
        ...           num_microbatches=8).label()
        'megatron tp=2 pp=2 dp=4 zero_stage=1 mbs=1'
        """
        return " ".join([self.engine, *line(OUTER_CHOICES, OUTER_VALUES(self))])


CHOICES: Final = declared(("strategy.mesh.", Mesh), ("strategy.", Strategy), ("", Candidate))
"""Everything that can be chosen, but for which layers a stage has."""
DEFAULTS: Final = {choice.name: choice.default for choice in CHOICES}
"""Each choice's value where nobody says one, by its name."""
OUTER_CHOICES: Final = tuple(choice for choice in CHOICES if choice.name != "recompute")
"""The choices that are the same for all layers, and so fields of a plan by these names."""
OUTER_VALUES: Final = getter(choice.path for choice in OUTER_CHOICES)
"""A candidate's values of `OUTER_CHOICES`, in their order."""
PINNED_ONLY: Final = tuple(choice for choice in CHOICES if not choice.searched and not choice.fixed_with)
"""Options of the engines that the search takes as they are pinned."""
OFFERED: Final = tuple((choice, value) for choice in CHOICES if choice.offered is not None for value in choice.offered.values)
"""What only a pin gives, with each of its values."""
LAST_RESORTS: Final = tuple(choice for choice in PINNED_ONLY if choice.offered is not None and choice.offered.last_resort)
"""The options of `PINNED_ONLY` that the search tries where nothing fits without."""
ENGINE_OPTIONS: Final = tuple(choice.name for choice in PINNED_ONLY)
TILED: Final = ("tiled_mlp", "tiled_logits")
"""Pieces of a sequence, of DeepSpeed's ALST (arXiv 2506.13996)."""
DEEPSPEED_OPTIONS: Final = (*TILED, "offload_activations")
"""Names of the options that are DeepSpeed's."""
MEGATRON_OPTIONS: Final = tuple(name for name in ENGINE_OPTIONS if name not in DEEPSPEED_OPTIONS)
"""Names of the options that are Megatron's, by Megatron's names."""
_OPTIONS: Final = tuple(Options.__struct_fields__)
_LAYER_PRICE = getter(
    choice.path.removeprefix("strategy.") for choice in CHOICES if choice.in_layer_price and choice.path.startswith("strategy.")
)


PUBLISHED: Final = 1714
"""The published runs with a measured time that `python -m tests.validation` read on 2026-11-25."""
UNUSUAL: Final = tuple(choice for choice in CHOICES if choice.seen is not None)


def unusual(candidate: Candidate) -> tuple[Choice, ...]:
    """The choices in which a candidate is unlike nearly all published runs, by which prices are checked.

    >>> ring = Strategy(mesh=Mesh(tp=2, cp=2), cp_comm_type="a2a")
    >>> [choice.name for choice in unusual(Candidate(engine="megatron", strategy=ring, micro_batch_size=1, num_microbatches=8))]
    ['cp_comm_type']
    """
    return tuple(choice for choice in UNUSUAL if choice.of(candidate) not in (choice.default, *choice.usual))


def twins(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates are the same or differ in nothing but the ZeRO stage where there is one replica, whose states nobody shares:
    where an engine treats them alike they are one plan.

    >>> plain = Candidate(engine="megatron", strategy=Strategy(mesh=Mesh(pp=2)), micro_batch_size=1, num_microbatches=8)
    >>> zero_1 = replace(plain, strategy=replace(plain.strategy, zero_stage=1))
    >>> twins(plain, zero_1), twins(plain, replace(zero_1, micro_batch_size=2))
    (True, False)
    """
    if one.mesh.dp * one.mesh.cp == 1:
        one = replace(one, strategy=replace(one.strategy, zero_stage=other.strategy.zero_stage))
    return one == other


def price_key(strategy: Strategy) -> tuple[Any, ...]:
    """All of a strategy that a layer's compute, activations and traffic within a micro-batch may depend on, but for `recompute` and the
    distances between the ranks of a group (`Mesh.stride`): what a kept price of a layer is found by.

    >>> strategy = Strategy(mesh=Mesh(tp=2, dp=4), zero_stage=1)
    >>> price_key(strategy) == price_key(Strategy(mesh=Mesh(tp=2, dp=8), zero_stage=2))
    True
    >>> price_key(strategy) == price_key(Strategy(mesh=Mesh(tp=2, dp=4), zero_stage=1, tp_comm_overlap=True))
    False
    """
    return _LAYER_PRICE(strategy)


def options_of(value: Options) -> dict[str, Any]:
    """The options of a strategy or a plan, by name.

    >>> options_of(Strategy(mesh=Mesh(), tp_comm_overlap=True))["tp_comm_overlap"]
    True
    """
    return {name: getattr(value, name) for name in _OPTIONS}


def option_words(value: Options) -> list[str]:
    """The options of `PINNED_ONLY` that differ from their defaults, each as name=value.

    >>> option_words(Strategy(mesh=Mesh(), cuda_graph_impl="local", overlap_param_gather=False))
    ['overlap_param_gather=false', 'cuda_graph_impl=local']
    """
    return line(PINNED_ONLY, [getattr(value, choice.name) for choice in PINNED_ONLY])
