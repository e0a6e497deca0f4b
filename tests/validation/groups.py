"""Which constants of which engine on which GPU the published runs settle, and what is read off them without a fit.

GEMM, attention and memory-bound operations are the GPU's and the kernels' of an engine's time; network constants its fabric's; overheads
and floors the engine's. A group's runs share one set of constants. What of a measured engine's constants carries over to a planned one is
named in `CARRIED`, constant by constant, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from orchestrator.cost.calibration import ANY_ENGINE, CARRIES_OVER, PRODUCTS
from orchestrator.units import GIB, MIB
from tests.validation.runs import NVFP4, Run


@dataclass(frozen=True, kw_only=True)
class FitGroup:
    """Runs that share one set of constants: of these engines on these GPUs. `names`: constants that are fitted to them; `read`: constants
    that are not, each with its value and where that comes from."""

    engines: tuple[str, ...]
    gpus: tuple[str, ...]
    names: tuple[str, ...]
    read: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    kind: Literal["dense", "moe"] = "dense"
    """The runs that it is fitted on. A group of experts comes after the dense one of the same GPUs and adds to its constants."""
    base: tuple[str, ...] = ()
    """GPUs of which any has that dense group, where its own have none."""

    in_16_bits: tuple[str, ...] = ()
    """Those of `names` that stay the datasheet's where every run's products are in 8 bits, which tell their rate and not of what it is a
    share."""

    def has(self, run: Run) -> bool:
        """Whether the constants are fitted to this run."""
        if run.precision == NVFP4:
            return False  # priced by what FP8's runs say, and judged as kept out
        ran = (run.experts.graph, run.experts.overlaps)
        known = run.kind == "dense" or ran != (None, None)  # without that nobody can say what its host waited for
        return run.engine.name in self.engines and run.gpu in self.gpus and run.kind == self.kind and known


A100, A100_40, H100 = "A100-SXM-80GB", "A100-SXM-40GB", "H100-SXM-80GB"
V100S: Final = ("V100-SXM2-32GB", "V100-SXM2-16GB")
FIRST: Final = ("B200", "GB200")
ULTRA: Final = ("B300", "GB300")
"""Blackwell Ultra may draw 1,100 and 1,400 W where Blackwell has 1,000 and 1,200 (NVIDIA's HGX and NVL72 datasheets): in a long run power
bounds the clock, so that its products are faster though its peaks are the same."""
BLACKWELL: Final = (*FIRST, *ULTRA)
KERNELS = ("gemm_efficiency", "gemm_half_features", "attention_efficiency", "attention_backward_efficiency", "pointwise_factor")
EXPERTS = ("expert_quantise_s",)

H100_LATENCY: Final = (1.06, "as on H100: NCCL's, over the same adapters")
"""`latency_factor` of nemo's runs on H100: next to 1, which is NCCL's own table of hops. Too few runs on Blackwell have large groups."""

GROUPS: Final[tuple[FitGroup, ...]] = (
    FitGroup(
        engines=("nanotron",),
        gpus=(H100,),
        names=(
            *("gemm_efficiency", "gemm_half_features", "gemm_half_tokens", "attention_efficiency", "pointwise_factor", "loss_factor"),
            *("layer_floor_s", "inner_efficiency", "outer_efficiency", "outer_scaling", "overlap_efficiency"),
            *("p2p_efficiency", "latency_factor", "overlap_slowdown", "layers_per_message"),
        ),
        read={
            "collective_launch_s": (0.0, "inside layer_floor_s"),
            "allocator_slack": (0.16, "peaks against saved tensors: 1.13 of them with tp=1, 1.17 with more"),
            "workspace_bytes": (200 * MIB, "peaks of a few GiB against tensors: cuBLAS workspaces of every stream, small segments"),
            "transient_activations": (0.0, "inside allocator_slack"),
        },
    ),
    FitGroup(
        engines=("nemo",),
        gpus=(H100,),
        names=(
            *("gemm_efficiency", "fp8_efficiency", "tp_overlap", "pointwise_factor", "latency_factor"),
            *("attention_efficiency", "attention_backward_efficiency"),
        ),
        in_16_bits=("gemm_efficiency",),
    ),
    FitGroup(
        engines=("nemo", "nemo_megatron_fsdp"),
        gpus=FIRST,
        names=("fp8_efficiency", "attention_efficiency", "pointwise_factor", "overlap_efficiency"),
        read={
            "tp_overlap": (0.85, "as on H100"),
            "latency_factor": H100_LATENCY,
            "gemm_efficiency": (0.51, "SimuMax's measurements of 514 products on B200: no run in bf16 is among those that are fitted"),
        },
    ),
    FitGroup(
        engines=("nemo", "nemo_megatron_fsdp"),
        gpus=ULTRA,
        names=("gemm_efficiency", "fp8_efficiency", "attention_efficiency", "pointwise_factor", "overlap_efficiency"),
        read={"tp_overlap": (0.85, "as on H100"), "latency_factor": H100_LATENCY},
    ),
    FitGroup(engines=("nemo",), gpus=(H100,), names=EXPERTS, kind="moe"),
    *(FitGroup(engines=("nemo",), gpus=(gpu,), names=EXPERTS, kind="moe") for gpu in FIRST),  # hosts of x86, and of Grace
    *(
        # Its runs that replay whole iterations have other kernels too, which a fit would take for the host's time.
        FitGroup(
            engines=("nemo",), gpus=(gpu,), names=(), read={EXPERTS[0]: (seconds, f"as on {host}: the same hosts")}, kind="moe", base=ULTRA
        )
        for gpu, host, seconds in (("B300", "B200", 1.6e-3), ("GB300", "GB200", 2.1e-3))
    ),
    FitGroup(engines=("nemo_megatron_fsdp",), gpus=(H100,), names=("gemm_efficiency", "attention_efficiency")),
    FitGroup(
        engines=("megatron_lm_2021", "megatron_lm_2022"),
        gpus=(A100,),
        names=("gemm_efficiency", "pointwise_factor", "inner_efficiency"),
    ),
    FitGroup(
        engines=("bigscience_2022", "bigscience_2022_bf16"),
        gpus=(A100,),
        names=("microbatch_overhead_s", "inner_efficiency", "latency_factor", "p2p_efficiency", "overlap_efficiency"),
        read={
            "gemm_efficiency": (0.764381, "as megatron_lm_2021's runs on A100 say: the same kernels; fitted apart it is .83"),
            "context_bytes": (2.5 * GIB, "nvidia-smi's figures against tensors"),
            "communicator_bytes": (600 * MIB, "nvidia-smi's figures against tensors"),
            "allocator_slack": (0.12, "peaks at micro-batch 1 to 8"),
        },
    ),
    FitGroup(
        engines=("bigscience_2022",),
        gpus=V100S,
        names=("microbatch_overhead_s", "outer_efficiency"),
        read={
            "gemm_efficiency": (0.696531, "as Megatron-LM's runs on V100 say: the same kernels"),
            "inner_efficiency": (0.251484, "as Megatron-LM's runs on V100 say: the same nodes"),
            "collective_overhead_s": (0.9e-3, "the 1.3B takes 53 and 39 s with tp=2 (6 and 4 all-reduces a layer), 29 and 23 with tp=1"),
            "allocator_slack": (0.12, "as on A100"),
            "context_bytes": (2.5 * GIB, "as on A100: 1.1 of it are the context (printed), the rest is missing from peaks with pp=1"),
            "communicator_bytes": (600 * MIB, "as on A100"),
        },
    ),
    FitGroup(
        engines=("megatron_lm_bigscience",),
        gpus=V100S,
        names=("gemm_efficiency", "microbatch_overhead_s", "outer_efficiency", "inner_efficiency"),
        read={
            "allocator_slack": (0.12, "as on A100"),
            "context_bytes": (2.5 * GIB, "as BigScience's"),
            "communicator_bytes": (600 * MIB, "as on A100"),
        },
    ),
    FitGroup(
        engines=("hf_trainer_deepspeed_unfused",),
        gpus=("V100-SXM2-32GB",),
        names=(),  # two to four times as slow as its network and kernels explain: no constant of theirs is fitted to that
        read={"context_bytes": (1.1 * GIB, "printed by the source")},
    ),
    FitGroup(engines=("fsdp_composer",), gpus=(A100, A100_40), names=(*KERNELS, "loss_factor")),
    FitGroup(engines=("fsdp_composer",), gpus=(H100,), names=(*KERNELS, "loss_factor", "fp8_efficiency")),
    FitGroup(engines=("fsdp_torchtitan",), gpus=(A100,), names=("gemm_efficiency", "pointwise_factor")),
    FitGroup(
        engines=("fsdp_torchtitan",),
        gpus=("H100-SXM-96GB",),
        names=("gemm_efficiency", "attention_efficiency", "pointwise_factor", "fp8_efficiency"),
    ),
    FitGroup(
        engines=("internevo",),
        gpus=(A100,),
        names=("gemm_efficiency", "pointwise_factor", "outer_efficiency", "overlap_efficiency", "outer_scaling"),
    ),
)
"""What `python -m orchestrator.calibrate` fits from the published tables; other runs get `calibrate.DEFAULT_NAMES`."""

SAME_LAYERS: Final = "the same program: NeMo's recipes run Megatron-core's layers and their fused kernels"
SAME_LIBRARIES: Final = "PyTorch's allocator, CUDA's context and NCCL's buffers, of older versions, which held more: the safe side"


@dataclass(frozen=True, kw_only=True)
class CarryOver:
    """Constants of a measured engine that hold for a planned one (or for any) on these GPUs, each with why it holds there too."""

    source: str
    to: str
    gpus: tuple[str, ...]
    why: Mapping[str, str]


PRODUCTS_ALONE: Final = {name: CARRIES_OVER[name] for name in PRODUCTS}
CARRIED: Final[tuple[CarryOver, ...]] = (
    CarryOver(
        source="nemo",
        to="megatron",
        gpus=(H100, *BLACKWELL),
        why={
            **PRODUCTS_ALONE,
            "attention_efficiency": SAME_LAYERS,
            "attention_backward_efficiency": SAME_LAYERS,
            "pointwise_factor": SAME_LAYERS,
            "latency_factor": CARRIES_OVER["latency_factor"],
            "overlap_efficiency": "the same program: Megatron-core's buckets beside its backward pass",
            **dict.fromkeys(EXPERTS, "the same program: Megatron-core's experts"),
        },
    ),
    CarryOver(
        source="megatron_lm_2021",
        to="megatron",
        gpus=(A100,),
        why={
            **PRODUCTS_ALONE,
            "pointwise_factor": "the same program: Megatron's fused kernels",
            "inner_efficiency": CARRIES_OVER["inner_efficiency"],
        },
    ),
    CarryOver(
        source="bigscience_2022",
        to="megatron_deepspeed",
        gpus=(A100, V100S[0]),
        why={**PRODUCTS_ALONE, **dict.fromkeys(("context_bytes", "communicator_bytes", "allocator_slack"), SAME_LIBRARIES)},
    ),
    CarryOver(source="nemo", to=ANY_ENGINE, gpus=(H100, *BLACKWELL), why=PRODUCTS_ALONE),
    CarryOver(source="megatron_lm_2021", to=ANY_ENGINE, gpus=(A100,), why=PRODUCTS_ALONE),
    CarryOver(source="megatron_lm_bigscience", to=ANY_ENGINE, gpus=(V100S[0],), why=PRODUCTS_ALONE),
)
"""What a planned engine has of the measured ones, and nothing else: not BigScience's 17 ms a micro-batch (its pipeline's Python of 2022),
nor its fabric's share for pipeline messages, nor NeMo's overlap of tensor-parallel traffic (user buffers, which a plan has where
tp_comm_overlap is pinned), nor V100's network constants (one lies at its bound)."""
