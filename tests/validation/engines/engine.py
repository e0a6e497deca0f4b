"""What is known of an engine that published runs were made with, in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Architecture
from orchestrator.model.hugging_face import activated
from orchestrator.model.spec import LayerSpec, ModelSpec, Op, Pointwise
from orchestrator.model.training import Dtype, Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import Candidate, CpCommType, Dispatcher, Schedule, ZeroStage
from orchestrator.values import Value

MemoryOf = Literal["first", "last", "max"]
Linears = Literal["transformers", "megatron-core"]
Split = tuple[tuple[int, ...], int, bool]
"""Layers per stage, the head's stage, and whether every stage holds something."""


class MeasuredEngine(Value, frozen=True, kw_only=True):
    """An engine, in the version that was measured: what it is priced by, and what a blank in its tables stands for.

    No planned engine has its name, and none is priced by it: what carries over to one is named in `groups`, constant by constant.
    """

    traits: Traits
    """`traits.engine` is its name; `traits.constants` what its source code says of the cost model's constants on any GPU."""
    printed: tuple[str, ...] = ()
    """Words, in lower case, of the name that tables print for it. The first engine of `ENGINES` of which one fits is taken."""
    not_printed: tuple[str, ...] = ()
    """Words that say that it is another one after all."""
    resembles: str = ""
    """The planned engine that its runs say most of; empty: none."""
    constants_of: str = ""
    """The planned engine whose constants it is priced with, being the program that those were carried over from; empty: its own."""
    dispatcher: Dispatcher = "alltoall"
    """What a blank dispatcher stands for."""
    transformers: bool = False
    """Whether its layers are Hugging Face transformers' own modules, in whichever way they are priced."""
    zero_stage: ZeroStage | None = None
    """What a blank zero_stage stands for; None: a row must say it."""
    sequence_parallel: bool = False
    """Whether a blank stands for sequence parallelism where tp > 1."""
    says_recompute: bool = False
    """Whether its recipes say so where they recompute, so that a blank is none; otherwise a blank leaves memory open."""
    reduce_dtype: Dtype = "fp32"
    """Data type of gradients on the network, where a row says nothing else."""
    accumulate_dtype: Dtype = "fp32"
    schedule: Schedule = "1f1b"
    """Schedule of a pipeline that is not interleaved."""
    cp_comm_type: CpCommType = "p2p"
    """How context parallelism brings keys and values together, where a row says nothing."""
    memory_of: MemoryOf = "max"
    """The rank whose memory its tables show, where they don't say."""
    variant: Callable[[Mapping[str, str], Precision], str] | None = None
    """The name of the engine that a row was really made with, of several that print one name."""
    layers: Callable[[ModelSpec], ModelSpec] | None = None
    """The model as its own kernels compute it."""
    split: Callable[[Architecture, int, int], Split] | None = None
    """Returns how this engine splits that many layers over that many stages; None: even (`layout.even_counts`)."""
    constants_in: Callable[[Candidate, Cluster, Calibration], Calibration] | None = None
    """Returns this engine's constants in one run, where they depend on how that is split over the cluster; None: everywhere the same."""
    adapts: Linears | None = None
    """The program whose names for linears say what its LoRA adapts; None: none of its rows of LoRA are priced."""
    tunes_full_lengths: bool = False
    """Whether its rows of full fine-tuning are of samples that all have the length they name, so that they are priced as pretraining."""
    lora_dropout: float = 0.0
    """Dropout of its adapters' inputs, where a row says nothing."""
    cost_in: Callable[[Mapping[str, str]], type[CostModel]] | None = None
    """Returns the class that prices a row's run, where that depends on the release; None: `cost` does."""
    cost: type[CostModel] = CostModel
    """The class that prices it: the core's, or one with a peculiarity of this engine."""

    @property
    def name(self) -> str:
        return self.traits.engine


def all_stages(mixed: StateBytes, fp32: StateBytes) -> dict[str, StateBytes]:
    """`Traits.states` of an engine whose bytes per parameter, before sharding, are the same at every ZeRO stage."""
    return {f"{precision}/{stage}": state for precision, state in (("mixed", mixed), ("fp32", fp32)) for stage in range(4)}


MEGATRON_STATES: Final = StateBytes(weight=2, gradient=4, master=4, moments=8)
"""Megatron-LM, mixed precision: 2 weights, 4 main gradients, 4 master weights, 8 Adam = 18 (theoretical_memory_usage.py:182);
the distributed optimizer shards the last 12."""
FP32_STATES: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
TORCH_LOGITS: Final = 14.0
"""Bytes per logit of torch's cross_entropy on `logits.float()`: bf16 2, fp32 4, log-softmax 4, gradient 4."""
EAGER: Final = {"pointwise_factor": 1.8}
"""Norms, rotary, gates, residuals and casts as kernels of their own: nearly twice the memory passes of fused ones. nanotron's fit says
1.9, Composer's on A100 1.4, its H100 the same in slower products."""

HOPPERS_FLASH_2: Final = {"attention_efficiency": 0.35, "attention_backward_efficiency": 0.3}
"""FlashAttention-2 on Hopper: its kernels, written for Ampere, reach 35% of an H100's peak (FlashAttention-3, arXiv 2407.08608, abstract),
and backward a sixth less, as those of FlashAttention-3 and cuDNN do against their forward."""


def with_separate_gate(model: ModelSpec) -> ModelSpec:
    """The model with `act(gate) * up` as two of torch's kernels: the product keeps the activated gate too."""
    if not model.architecture.gated:
        return model

    def changed(op: Op) -> Op:
        return replace(op, saves=(*op.saves, activated(op))) if isinstance(op, Pointwise) and op.role == "activation" else op

    def layer(spec: LayerSpec) -> LayerSpec:
        return replace(spec, ops=tuple(map(changed, spec.ops)))

    return replace(model, runs=tuple(replace(run, layer=layer(run.layer)) for run in model.runs))
