"""The constants of the cost model, with their units and reasons; nothing else in the room has any.

The defaults here come from datasheets and public measurements and price hardware that nobody has fitted. A calibration file
(`calibrations/<engine>-<gpu>.json`) replaces some of them for one engine on one GPU. It says for which traits of an engine its constants
were fitted; for an engine with other traits only those hold that the file, or `CARRIES_OVER`, names with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import fields, replace

from orchestrator.errors import InputError
from orchestrator.hardware.catalog import nearest, reached
from orchestrator.hardware.spec import Cluster, Gpu, is_cpu
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.layout import FittedOn
from orchestrator.units import GB, GIB, MIB, US
from orchestrator.values import Value


class Calibration(Value, frozen=True, kw_only=True):
    """Shares are of the datasheet's figure, 0..1; times in seconds; sizes in bytes.

    The defaults are those of an A100 (the GPU with most public measurements); `datasheet` changes what its generation needs.
    """

    name: str = "datasheet"
    fitted_on: str = ""
    """What the constants were fitted on; empty: nothing, they are the defaults below."""
    interval: tuple[float, float] | None = None
    """Measured over predicted step time: 5% and 95% quantile of the user's own runs, and always with 1 inside: the prediction itself. None:
    published runs tell (cost/uncertainty.py)."""
    fitted: FittedOn | None = None
    """What those runs had; None: the constants are the datasheet's, or another engine's."""
    own_peaks: bool = False
    """Whether `memory_margin` is by measured peaks of the user's own runs."""

    parts: tuple[Calibration, ...] = ()
    """The calibration of each GPU type, where the cluster has several (`joined`)."""

    # Matrix products
    gemm_efficiency: float = 0.77
    """Share of peak FLOP/s that a very large GEMM reaches in a training step. A100: 240 of 312 TFLOP/s (cuBLAS bf16 alone reaches 255;
    in a long run power lowers the clock). Between the SC21 table, which asks for 0.77, and FSDP runs, which ask for 0.72."""
    gemm_half_tokens: float = 80.0
    """Rows of a GEMM at which it reaches half of `gemm_efficiency`: tiles of 128 to 256 rows quantise, and 108 SMs fill in waves."""
    gemm_half_features: float = 80.0
    """Columns of a GEMM, and elements of its inner dimension, at which it reaches half of `gemm_efficiency` (prologue and epilogue of the
    main loop)."""
    misaligned_gemm: float = 2.0
    """Times as long for a 16-bit GEMM one of whose feature dimensions is no multiple of 8 elements, the 16 bytes that tensor cores load
    at once (NVIDIA, "Matrix Multiplication Background", section 3.1; nanoGPT's vocabulary of 50257 against 50304)."""
    attention_efficiency: float = 0.60
    """Share of peak that flash attention's forward reaches on long sequences. A100: FlashAttention-2 190 of 312 (2307.08691, fig. 5)."""
    attention_backward_efficiency: float = 0.52
    """Share of peak that flash attention's backward reaches on long sequences. A100: FlashAttention-2 170 of 312 (2307.08691, fig. 6)."""
    attention_half_length: float = 256.0
    """Length of the shorter sequence at which attention reaches half of its efficiency: fewer tiles of 128 rows than SMs."""
    unfused_forward_bytes: float = 11.0
    """Bytes moved per score by unfused attention beside its two batched GEMMs: write 2, scaled masked softmax 2+2, dropout 2+2+1 (mask)."""
    unfused_backward_bytes: float = 15.0
    """Bytes moved per score by the backward of unfused attention: dropout 2+1+2, softmax 2+2+2 (reads output and gradient), and a copy of
    the scores' gradient 2+2."""

    # Memory-bound operations
    memory_efficiency: float = 0.80
    """Share of the memory bandwidth that elementwise kernels and norms reach (STREAM-like kernels reach 85 to 92%; short ones less)."""
    scan_efficiency: float = 0.48
    """Share of the memory bandwidth that mamba-ssm's Triton kernels reach: those of 184 layers and micro-batches of Nemotron-3 Nano take
    .393 s on GH200 for 4.4 GB each, convolutions included (torch's profile in Geodesic's Nano-30B campaign at 3b764d6, E-036)."""
    pointwise_backward: float = 1.75
    """Bytes that a memory-bound operation's backward moves, against its forward: reads the gradient and the saved input, writes one."""
    optimizer_efficiency: float = 0.70
    """Share of the memory bandwidth that the fused multi-tensor Adam reaches."""

    pointwise_factor: float = 1.0
    """Bytes that the engine's memory-bound operations move against the fused ones that the model counts (unfused activations, norms, casts:
    above 1)."""
    loss_factor: float = 1.0
    """Bytes that the engine's loss moves against mcore's unfused cross-entropy (a fused kernel: a fifth)."""
    fp8_efficiency: float = 0.83
    """FP8 GEMMs' share of their peak, against `gemm_efficiency`: a peak that power keeps out of reach (NVIDIA's published pairs of bf16 and
    FP8 runs on H100). Casts are counted apart (compute.py)."""
    mxfp8_slowdown: float = 1.06
    """Seconds of a step's products with MXFP8 against one scale a tensor, on Blackwell, where the efficiency above is mostly MXFP8's: 4% of
    the step in NVIDIA's five published pairs of Llama-3-8B (FP8-CS against FP8-MX on B200, GB200, GB300)."""
    fp8_saved_bytes: float = 1.0
    """Bytes per element that an FP8 product keeps of its input for backward: Transformer Engine quantises it, torchao keeps bf16 (2.0)."""
    tp_overlap: float = -1.0
    """Share of tensor-parallel traffic behind GEMMs, inside the innermost network level; below 0: the engine's `Traits.tp_overlap`."""

    user_buffers_overlap: float = 0.85
    """Share of tensor-parallel traffic behind GEMMs where the user asks for Transformer Engine's overlap (tp_comm_overlap): as for NeMo's
    recipes, which use it."""

    # Overheads
    op_overhead_s: float = 12 * US
    """Host seconds to launch one operation of the layer in forward (PyTorch's dispatch of a module and its kernels, 5 to 20 us); a
    stage is never faster than its launches. Backward: twice."""
    collective_launch_s: float = 30 * US
    """Host seconds to launch a collective of a layer (process group, stream and event), part of the same floor."""
    graph_launch_s: float = 50 * US
    """Host seconds to replay one layer's pass as a CUDA graph: cudaGraphLaunch takes about 10 us, megatron-core's replay node, which copies
    the inputs into the graph's, the rest (an estimate: nothing that was published tells it apart)."""
    microbatch_overhead_s: float = 300 * US
    """Host seconds per micro-batch and stage: the schedule's Python, the data, the loss."""
    layer_floor_s: float = 0.0
    """Seconds that forward and backward of one transformer layer take together at least: an engine whose Python is slower than its
    launches."""
    grouped_launch_s: float = 9 * US
    """Host seconds to launch one expert's product: Transformer Engine's grouped linear starts one cuBLAS call an expert (nvte_multi_stream_
    cublas_gemm). On B200 36 of 36 shapes with little work took 8.6 to 11 us an expert (SimuMax, configs/system/b200_bf16_ceperm.json)."""
    expert_sync_s: float = 2e-3
    """Host seconds, per layer of experts and pass, to launch what follows a dispatch, beside `expert_quantise_s`. In forward the host must
    know how many tokens every expert got before it can launch that (mcore moe/token_dispatcher.py:672, maybe_dtoh_and_synchronize), so
    that the device has nothing queued and takes this long at least from the dispatch to the end of the pass. 0: the host runs ahead, as
    where a whole iteration is one CUDA graph or experts take a fixed number of tokens. On H100 the device idles for .62 ms a layer behind
    1.4 ms of experts and exchange (Nsight, 24.7 s less 22.8 active in Megatron-Bridge's skills/nemo-mbridge-perf-moe-comm-overlap)."""
    expert_quantise_s: float = 1.6e-3
    """Host seconds, per layer of experts and pass, that are added where experts compute in FP8: Transformer Engine's grouped linear splits
    its input by experts, and quantises and launches one after the other from the host (pytorch/module/grouped_linear.py,
    tex.split_quantize). By layer and not by expert: so 26.02's run on H100 with 16 experts a rank, which wasn't fitted, is priced 8% too
    long; by expert it was 48%."""
    delayed_wgrad_s: float = 7e-3
    """Host seconds, per layer of experts, beside those two, of weight gradients that are computed later than the rest of backward, in FP8
    (delay_wgrad_compute), where attention is in no graph: one that has it has its late gradients too (_BackwardDWWrapper in
    models/common/utils.py of mcore 0.19). For each layer and micro-batch Bridge 26.02's Qwen3-30B on 16 H100 takes 16.7 ms without
    graphs, and its cards on GB200 16.1 with graphs of routers alone, of which this is not in the others. With attention in graphs there
    is no room for it: 11.3 in all on B200 (Megatron-Bridge 5356), and 7.3 for the 235B on GB200 (Megatron-LM 5728)."""
    expert_overlap: float = 1.0
    """Share of an exchange of tokens that runs beside the passes of another micro-batch, of what has enough of them beside it
    (passes.hidden_shares)."""
    grouped_bytes_exposed: float = 1.0
    """Share of the bytes of one expert's product which the other experts' products don't hide (compute.grouped_seconds)."""
    expert_efficiency: float = 1.0
    """Share of what one product of the same shape reaches, for the experts' grouped ones."""
    step_overhead_s: float = 5e-3
    """Seconds of a step beside its passes and its update: clipping's global norm, learning rate, logging, timers."""

    core_share: float = 1.0
    """Share of what a rank would have alone that is left where all ranks compute at once: 1 on devices of their own. Ranks that share
    cores leave them to the others while they wait in a pipeline, so that its bubble costs nothing as long as somebody has work."""

    # Network
    inner_efficiency: float = 0.80
    """Share of the innermost level's bandwidth that large collectives reach (nccl-tests: A100 NVSwitch about 230 to 240 of 300 GB/s)."""
    outer_efficiency: float = 0.80
    """Share of a further level's bandwidth that two of its domains reach."""
    outer_scaling: float = 0.10
    """Loss with scale: a group over n domains gets (n/2)^-outer_scaling of that (congestion, slower rings)."""
    p2p_efficiency: float = 0.70
    """Share that one point-to-point message reaches: one channel pair, no ring."""
    latency_factor: float = 2.0
    """A hop in practice against the hop of NCCL's tables: launch, synchronisation and the slowest rank."""
    collective_overhead_s: float = 10 * US
    """Seconds per collective, whatever its size: launch and rendezvous of the ranks."""
    handed_on_s: float = 200 * US
    """Seconds that an exchange of tokens takes more between nodes whose ranks hand them on inside (DeepEP, HybridEP): routing maps, staged
    copies and barriers. Nsight's 8.25 s of 12,288 exchanges in a step on two nodes of H100 are .67 ms each, their bytes .43 (as
    `expert_sync_s`)."""
    layers_per_message: float = 1.0
    """Layers whose gradients or weights travel in one message of the once-a-step traffic (buckets), so that latency counts once."""
    overlap_efficiency: float = 0.80
    """Share of the compute beside which traffic can hide."""
    overlap_slowdown: float = 0.15
    """Seconds of compute lost per second of hidden traffic: NCCL's kernels take SMs and memory bandwidth (Galvatron measures 1.3)."""

    # Host
    host_efficiency: float = 0.80
    """Share of the host link's bandwidth that pinned copies reach."""
    host_adam_bandwidth: float = 20 * GB
    """Bytes/s of optimizer state that the host's Adam updates, per GPU (a share of the socket's memory bandwidth)."""

    # Memory
    context_bytes: float = 0.9 * GIB
    """Bytes of CUDA context, cuBLAS and cuDNN workspaces outside the allocator (published tools assume 0.5 to 1.5 GB; nvidia-smi, empty
    process)."""
    communicator_bytes: float = 120.0 * MIB
    """Bytes of NCCL buffers per communicator of more than one rank (channels x 4 MiB buffers; 0.2 to 1 GB in all)."""
    workspace_bytes: float = 64 * MIB
    """Bytes of GEMM workspaces inside the allocator (cuBLASLt asks 32 MiB on Hopper; Transformer Engine as much)."""
    allocator_slack: float = 0.03
    """Share of activations and transients lost to fragmentation of the caching allocator's blocks."""
    memory_margin: float = 0.07
    """Share of a peak that its prediction lacks, at most, in 95% of the engine's measured runs (of all engines' where there are fewer than
    twenty): what a plan keeps free of a GPU's memory unless it is told otherwise."""
    transient_activations: float = 2.0
    """Gradients of activations alive at once in backward, in units of the layer's largest saved tensor: one arrives, one leaves."""


_BY_GENERATION: Final[dict[str, dict[str, float]]] = {
    # V100: cuBLAS fp16 about 95 to 105 of 125 TFLOP/s; no FlashAttention-2; NVLink 2 busbw about 130 of 150 GB/s.
    "7": {"gemm_efficiency": 0.78, "attention_efficiency": 0.40, "attention_backward_efficiency": 0.35},
    # H100: power-limited: 650 to 750 of 989 TFLOP/s (cuBLAS bf16, large); FlashAttention-3 / cuDNN 600 forward, 550 backward.
    "9": {
        "gemm_efficiency": 0.70,
        "gemm_half_tokens": 128.0,
        "gemm_half_features": 128.0,
        "attention_efficiency": 0.55,
        "attention_backward_efficiency": 0.48,
        "attention_half_length": 384.0,
        "op_overhead_s": 10 * US,
        # Nsight's kernels of Qwen3-30B-A3B on 16 H100, with and without the overlap: 3.96 of 10.8 s of communication beside products and
        # attention (Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap at 067f987d). On Blackwell only replayed iterations say it.
        "expert_overlap": 0.37,
        # Qwen3.5-35B-A3B on 16 H100: 8.7 s of experts' and other linear kernels in a step (qwen35-h100-campaign.md of the same project),
        # 10.1 s so and 11.6 with all bytes; without its exchange the run above computes for 14.6 s: 15.0 so, 16.9 with them.
        "grouped_bytes_exposed": 0.0,
    },
    # B200 in a long run, where power bounds the clock: 1000 to 1150 of 2250 TFLOP/s (SimuMax measured 514 shapes of large models' products
    # one by one, configs/system/b200_bf16_ceperm.json at 4dcaae5: these three constants are within 6% of them in the median; a single cold
    # product reaches 1500 to 1700); cuDNN attention about 1200.
    "10": {
        "gemm_efficiency": 0.51,
        "gemm_half_tokens": 88.0,
        "gemm_half_features": 91.0,
        "attention_efficiency": 0.50,
        "attention_backward_efficiency": 0.42,
        "attention_half_length": 512.0,
        "op_overhead_s": 9 * US,
        # gathers and scatters among 8 B200 in the same file: .67 of 900 GB/s (all-reduce .74, all-to-all .60)
        "inner_efficiency": 0.67,
    },
    # MI300X and its like: hipBLASLt reaches about 620 of 1307 TFLOP/s in bf16 and 990 of 2615 in FP8 on a training's shapes (SemiAnalysis,
    # "MI300X vs H100 vs H200 Benchmark Part 1", December 2024); attention about 420 forward and 330 backward (an estimate). RCCL's
    # all-reduce over a node's eight reaches 346 of 448 GB/s (rccl-tests, 256 MiB, in the samples of ROCm's cluster validation suite).
    "amd9": {
        "gemm_efficiency": 0.47,
        "gemm_half_tokens": 128.0,
        "gemm_half_features": 128.0,
        "fp8_efficiency": 0.80,
        "attention_efficiency": 0.32,
        "attention_backward_efficiency": 0.25,
        "attention_half_length": 384.0,
        "inner_efficiency": 0.77,
    },
}
"""What differs by `Gpu.generation` (8, Ampere, is the default of the class)."""

CPU: Final = Calibration(
    name="datasheet",
    gemm_efficiency=0.9,
    gemm_half_tokens=16.0,
    gemm_half_features=16.0,
    attention_efficiency=0.5,
    attention_backward_efficiency=0.5,
    attention_half_length=32.0,
    memory_efficiency=0.5,
    optimizer_efficiency=0.5,
    op_overhead_s=25 * US,
    microbatch_overhead_s=2e-3,
    step_overhead_s=10e-3,
    core_share=0.5,
    expert_sync_s=0.0,
    expert_quantise_s=0.0,
    delayed_wgrad_s=0.0,
    inner_efficiency=1.0,
    outer_efficiency=1.0,
    p2p_efficiency=1.0,
    latency_factor=1.0,
    collective_overhead_s=500 * US,
    collective_launch_s=0.0,
    overlap_efficiency=0.0,
    overlap_slowdown=0.0,
    context_bytes=0.5 * GIB,
    communicator_bytes=2.0 * MIB,
    workspace_bytes=0.0,
)
"""gloo ranks, two to a core of one machine: torch's Python and autograd cost 12 to 22 us an operation beside its computing (four profiles
of two ranks on two cores, 2026-11-29; 15 to 43 where their fit begins at 60), a gloo collective 200 us to 1 ms when ranks share cores;
traffic runs on the same cores, so nothing hides. Beside its
tensors a rank held 358 (megatron), 385 (megatron_deepspeed) and 442 to 640 MiB (deepspeed, the more with models described by their code) on
2026-11-23 with torch 2.13's CPU build; with its CUDA build some 280 MiB more."""


STOCK_HOST: Final = 8.0
"""Times as long as on a tuned stack the host takes to launch an operation or a collective of a layer on a stock one: no rank is pinned to
cores, and what else runs on the node has them too. Qwen3-8B with tp 8 takes 4.2 to 4.4 ms for each layer and micro-batch of 4,096 tokens on
16 H100 with Megatron-Bridge as it comes, on one node as over two, and 4.5 with tp 4; its 13 operations and 4 all-reduces are 4.1 ms so
(a third party's campaign with Megatron-Bridge 0.1.0rc4). nanotron's runs on AWS ask for 4.1 ms a layer too (its `layer_floor_s`).
How much of it is Python's, and would be there on a tuned stack without CUDA graphs, no published run tells: those are bound by the GPU."""
STOCK: Final = ("op_overhead_s", "collective_launch_s")
"""The constants that are `STOCK_HOST` times as large on a stock stack."""


def datasheet(cluster: Cluster, traits: Traits) -> Calibration:
    """The zero-shot constants of this cluster's GPU under its stack: no run of it has been seen."""
    if cluster.is_cpu:
        return CPU if traits.layers == "hugging_face" else replace(CPU, context_bytes=0.4 * GIB)
    tuned = replace(Calibration(), **{**_BY_GENERATION.get(cluster.gpu.generation, {}), **traits.constants})
    return tuned if cluster.stack == "tuned" else replace(tuned, **{name: STOCK_HOST * getattr(tuned, name) for name in STOCK})


class Constant(Value, frozen=True, kw_only=True):
    """A fitted constant as the file keeps it. `origin`: "fitted", or how it was read off the measurements."""

    value: float
    unit: str
    origin: str
    spread: float = 0.0
    """Half of the range of its values in a profile's rounds, as a share; 0: there were no rounds."""


AT_ITS_BOUND: Final = "fitted, at its bound"
"""How the `origin` of a constant begins that ended where it can't be: some cost is missing in what it was fitted to."""


def digest(traits: Traits) -> str:
    """A short name of an engine's traits, whatever the engine is called: the first 12 hexadecimal digits of the SHA-256 of those that are
    not the default, as JSON with sorted keys. A new field of `Traits` with a default changes none."""
    plain = msgspec.convert(msgspec.to_builtins(traits), Traits)  # whole numbers where a field is a float are floats
    told = {}
    for field in fields(Traits):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        value = getattr(plain, field.name)
        if field.name != "engine" and value != default:
            told[field.name] = value
    return sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:12]


SHARES: Final = frozenset(
    name
    for name in Calibration.__struct_fields__
    if name.endswith(("_efficiency", "_overlap")) or name in ("allocator_slack", "core_share", "memory_margin")
)
"""Constants that are shares: 0 to 1 (`most`). (`tp_overlap` below 0 in `Calibration` says that no file has it.)"""
UNITS: Final[Mapping[str, str]] = {
    "gemm_half_tokens": "rows",
    "gemm_half_features": "columns",
    "attention_half_length": "tokens",
    "outer_scaling": "exponent",
    "layers_per_message": "layers",
    "transient_activations": "tensors",
}
"""Units of the constants that are neither shares, seconds, bytes nor ratios."""
DIVISORS: Final = frozenset(
    {name for name in SHARES if name.endswith("_efficiency")} - {"overlap_efficiency"}
    | {"core_share", "host_adam_bandwidth", "layers_per_message"}
)
"""Constants that times are divided by."""
LEAST_DIVISOR: Final = 1e-6
MOST_OF_ANY: Final = 1e15
"""The largest value that any constant may have: the largest there is, a host's bandwidth, is 10^11 bytes/s."""
MOST_OF_A_CPU: Final = 20.0
"""The largest share of a CPU's speeds: the catalogue's are one machine's, measured, and no datasheet's peak; others' are higher."""


def most(name: str, gpu: str) -> float:
    """The largest value that a constant of this GPU may have.

    >>> most("gemm_efficiency", "H100-SXM-80GB"), most("gemm_efficiency", "cpu"), most("core_share", "cpu")
    (1.0, 20.0, 1.0)
    """
    if name not in SHARES:
        return MOST_OF_ANY
    return MOST_OF_A_CPU if is_cpu(gpu) and name in DIVISORS and name != "core_share" else 1.0


def unit(name: str) -> str:
    """The unit of a constant.

    >>> unit("layer_floor_s"), unit("gemm_efficiency"), unit("context_bytes"), unit("latency_factor")
    ('s', 'share', 'bytes', 'ratio')
    """
    if name in SHARES:
        return "share"
    return UNITS.get(name) or ("s" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else "ratio")


class CalibrationFile(Value, frozen=True, kw_only=True):
    """Constants of one engine on one GPU, what they were fitted on, and their error there and on runs kept out.

    Raises ValueError for a share that is none, and for an interval without the prediction itself in it.
    """

    engine: str
    """The engine whose constants these are; `ANY_ENGINE`: whichever engine has no file of its own."""
    gpu: str
    traits: str
    """Digest of the traits that the constants were fitted for (`digest`)."""
    carried_from: str = ""
    """The measured engine that they were fitted for, where that is another one: every constant's `origin` says why it carries over, the
    others are the datasheet's, and errors and interval are those of that engine's runs with the carried constants alone. Empty: none."""
    fitted_on: str
    constants: dict[str, Constant]
    fitted_runs: int
    fitted_median_error: float
    held_out_runs: int
    held_out_median_error: float | None
    interval: tuple[float, float] | None
    """Measured over predicted step time, 5% and 95% quantile of the user's own runs (`Calibration.interval`); None in our own files."""
    measured: FittedOn | None = None

    def __post_init__(self) -> None:
        for name, constant in self.constants.items():
            largest = most(name, self.gpu)
            if name in SHARES and not 0 <= constant.value <= largest:
                raise ValueError(f"{name} is {constant.value:g}, a share is between 0 and {largest:g}")
            if name in DIVISORS and constant.value < LEAST_DIVISOR:
                raise ValueError(f"{name} is {constant.value:g}, and times are divided by it: at least {LEAST_DIVISOR:g}")
            if not 0 <= constant.value <= largest:
                raise ValueError(f"{name} is {constant.value:g}, must be from 0 to {largest:g}")
        if self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]:
            raise ValueError(f"interval {self.interval[0]:g} to {self.interval[1]:g} does not hold the prediction itself, which is 1")

    def values(self) -> dict[str, float]:
        """Values of the constants by name."""
        return {name: constant.value for name, constant in self.constants.items()}

    def calibration(self, base: Calibration) -> Calibration:
        """`base` with these constants in place of its own."""
        name = f"{self.engine}-{self.gpu}"
        if self.engine == ANY_ENGINE:
            name = f"datasheet with matrix products carried over from {self.carried_from}"
        elif self.carried_from:
            name += f" (carried over from {self.carried_from})"
        return kept(base, name, self.fitted_on, self.values(), self.interval, self.measured)


def kept(
    base: Calibration,
    name: str,
    fitted_on: str,
    constants: Mapping[str, float],
    interval: tuple[float, float] | None,
    measured: FittedOn | None = None,
) -> Calibration:
    """`base` with constants that were kept by name, and what they were fitted on. Raises InputError for one that is not known."""
    unknown = sorted(constants.keys() - {*Calibration.__struct_fields__})
    if unknown:
        raise InputError("calibration", name, f"has constants that are not known: {', '.join(unknown)}")
    own_peaks = interval is not None and "memory_margin" in constants
    return replace(base, name=name, fitted_on=fitted_on, interval=interval, fitted=measured, own_peaks=own_peaks, **constants)


THE_GPUS: Final = "the GPU's: its library's matrix products, whichever engine starts them"
THE_NETWORKS: Final = "the network's and NCCL's, whichever engine asks for the collective"
CARRIES_OVER: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gemm_efficiency", "gemm_half_tokens", "gemm_half_features", "fp8_efficiency"), THE_GPUS),
    **dict.fromkeys(("memory_efficiency", "optimizer_efficiency"), "the GPU's memory bandwidth"),
    **dict.fromkeys(("inner_efficiency", "outer_efficiency", "outer_scaling", "p2p_efficiency", "latency_factor"), THE_NETWORKS),
    **dict.fromkeys(("host_efficiency", "host_adam_bandwidth"), "the host's"),
    "core_share": "the machine's",
}
"""Constants that say nothing of an engine, with the reason: those of a user's file that hold when the engine's traits have changed since
it was fitted (another version, Transformer Engine installed)."""

SHIPPED: Final = "shipped"
DATASHEET: Final = "datasheet"
CHOICES: Final = (SHIPPED, DATASHEET, "a file", "a folder")
"""What calibration= may be, beside the name of a file of the package."""


@cache
def shipped(engine: str, gpu: str) -> CalibrationFile | None:
    """The file of the package for this engine and GPU; None: there is none."""
    file = files("orchestrator.cost").joinpath("calibrations", f"{engine}-{gpu}.json")
    return msgspec.json.decode(file.read_bytes(), type=CalibrationFile) if file.is_file() else None


ANY_ENGINE: Final = "any_engine"
PRODUCTS: Final = ("gemm_efficiency", "fp8_efficiency")
"""What the package's files of `ANY_ENGINE` have. Were one engine priced with the datasheet's share of the peak and another with its own
runs', a search over both would compare these, not the engines."""


BY_POWER: Final = frozenset(("gemm_efficiency", "attention_efficiency", "attention_backward_efficiency"))
"""Shares of a peak that a GPU's clock bounds."""


@cache
def fitted_gpus(engine: str) -> tuple[str, ...]:
    """The GPUs that the package has a file of this engine for."""
    names = (file.name for file in files("orchestrator.cost").joinpath("calibrations").iterdir())
    return tuple(sorted(name.removeprefix(f"{engine}-").removesuffix(".json") for name in names if name.startswith(f"{engine}-")))


def packaged(engine: str, gpu: Gpu) -> Calibrated | None:
    """The package's constants for this engine and GPU, or for any engine on it, or those of the nearest GPU that has them; None: the
    datasheet's."""
    for name in (engine, ANY_ENGINE):
        if (file := shipped(name, gpu.name)) is not None:
            return Calibrated(file)
    for name in (engine, ANY_ENGINE):
        if (near := nearest(gpu, fitted_gpus(name))) is not None and (file := shipped(name, near.name)) is not None:
            return Calibrated(moved(file, near, gpu))
    return None


def moved(file: CalibrationFile, near: Gpu, gpu: Gpu) -> CalibrationFile:
    """A file's constants on a GPU that nobody measured, from those of one near it: shares of the datasheet's rates stay, but what power
    bounds is as `catalog.reached` says. What was fitted to a bound stands for a cost that is missing there and is left out. `measured` is
    None: no run was on this GPU."""
    share = reached(gpu, near)
    constants = {name: constant for name, constant in file.constants.items() if not constant.origin.startswith(AT_ITS_BOUND)}
    if share != 1:
        for name in BY_POWER & constants.keys():
            value = float(f"{min(1.0, constants[name].value * share):.6g}")
            constants[name] = replace(constants[name], value=value, origin=f"{constants[name].origin}; by power from {near.name}")
    origin = file.carried_from or file.engine
    return replace(file, gpu=gpu.name, carried_from=f"{origin} on {near.name}", constants=constants, interval=None, measured=None)


def held(file: CalibrationFile, traits: Traits) -> CalibrationFile:
    """What of an engine's file holds for these traits of it: all, where it was fitted for them or says itself what carries over; otherwise
    the constants of `CARRIES_OVER`, without an interval of their own."""
    now = digest(traits)
    if file.carried_from or file.traits == now:
        return file
    constants = {name: constant for name, constant in file.constants.items() if name in CARRIES_OVER}
    left = sorted(file.constants.keys() - constants.keys())
    note = f"; carried over from other traits of {file.engine} ({file.traits}, here {now}) without {', '.join(left) or 'its interval'}"
    return replace(
        file,
        carried_from=f"other traits of {file.engine}",
        fitted_on=file.fitted_on + note,
        constants=constants,
        interval=None,
        measured=None,
    )


def read_file(path: Path) -> CalibrationFile:
    """A calibration file. Raises InputError for one that can't be read or is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CalibrationFile)
    except OSError as error:
        raise InputError("calibration", path, f"can't be read: {error.strerror}", CHOICES) from None
    except msgspec.MsgspecError as error:
        old = "; it is older than files that name their traits: calibrate again" if "required field `traits`" in str(error) else ""
        raise InputError("calibration", path, f"is no calibration: {error}{old}") from None


def own(folder: Path, traits: Traits, gpu: str) -> Calibrated | None:
    """The user's file for this engine and GPU in a folder; None: there is none. Raises InputError for one that can't be read."""
    path = folder / f"{traits.engine}-{gpu}.json"
    return Calibrated(held(read_file(path), traits), str(path)) if path.is_file() else None


class Calibrated(NamedTuple):
    """A calibration file and where it was; `source` empty: the package's. `parts`: of a cluster of several types of GPU what each has,
    None: the datasheet's; `file` is then the first that there is."""

    file: CalibrationFile
    source: str = ""
    parts: tuple[Calibrated | None, ...] = ()


def found(choice: str | None, cluster: Cluster, all_traits: Sequence[Traits], folder: Path | None) -> list[Calibrated | None]:
    """The calibration file of each of these engines on this cluster's GPU; None: datasheet constants.

    `choice`: a file or folder of the user's, "shipped", "datasheet", or the name of a file of the package; None: `folder`, where there
    is one, then what is shipped. A file is for its own engine and GPU, and holds for the traits that it was fitted for (`held`); the other
    engines keep what is shipped, but for the matrix products. Raises InputError for one that is for none of these engines, or not for
    this GPU.
    """
    if cluster.parts:
        by_type = [found(choice, view, all_traits, folder) for view in cluster.views()]
        of_engines = zip(*by_type, strict=True)
        return [next((one._replace(parts=each) for one in each if one is not None), None) for each in of_engines]
    gpu = cluster.gpu.name
    ours = [packaged(traits.engine, cluster.gpu) for traits in all_traits]
    if choice == DATASHEET:
        return [None] * len(all_traits)
    if choice == SHIPPED or (choice is None and folder is None):
        return ours
    where = folder if choice is None else Path(choice)
    assert where is not None
    if choice is None or where.is_dir():
        mine = [own(where, traits, gpu) for traits in all_traits]
        if choice is not None and not any(mine):
            names = ", ".join(f"{traits.engine}-{gpu}.json" for traits in all_traits)
            raise InputError("calibration", choice, f"holds none of {names}")
        return _same_products([users or package for users, package in zip(mine, ours, strict=True)])
    one = Calibrated(file_named(choice) or read_file(where))
    if not file_named(choice):
        one = one._replace(source=choice)
    if one.file.gpu != gpu or one.file.engine not in {traits.engine for traits in all_traits}:
        engines = [traits.engine for traits in all_traits]
        raise InputError("calibration", choice, f"is for {one.file.engine} on {one.file.gpu}; this plans {' or '.join(engines)} on {gpu}")
    files = [
        one._replace(file=held(one.file, traits)) if traits.engine == one.file.engine else package
        for traits, package in zip(all_traits, ours, strict=True)
    ]
    return _same_products(files)


def _same_products(files: list[Calibrated | None]) -> list[Calibrated | None]:
    """The files with the matrix products of the user's first file in every engine's that is not the user's (`PRODUCTS` says why)."""
    mine = next((known for known in files if known is not None and known.source), None)
    if mine is None:
        return files
    products = {name: constant for name, constant in mine.file.constants.items() if name in PRODUCTS}
    alone = replace(mine.file, engine=ANY_ENGINE, carried_from=mine.file.engine, constants=products, interval=None, measured=None)
    with_them: list[Calibrated | None] = []
    for known in files:
        if known is None or known.source:
            with_them.append(known or Calibrated(alone, mine.source))
            continue
        with_them.append(Calibrated(replace(known.file, constants={**known.file.constants, **products}), mine.source))
    return with_them


def file_named(name: str) -> CalibrationFile | None:
    """The file of the package of this name, with or without its .json."""
    engine, _, gpu = name.removesuffix(".json").partition("-")
    return shipped(engine, gpu) if gpu and "/" not in name else None


def priced(cluster: Cluster, traits: Traits, known: Calibrated | None) -> Calibration:
    """The constants of this engine on this cluster with this file, or the datasheet's."""
    if cluster.parts:
        files = (None,) * len(cluster.parts) if known is None else known.parts
        return joined([priced(view, traits, file) for view, file in zip(cluster.views(), files, strict=True)])
    base = datasheet(cluster, traits)
    return base if known is None else known.file.calibration(base)


MOST: Final = ("step_overhead_s", "collective_overhead_s", "latency_factor", "memory_margin", "overlap_efficiency")
LEAST: Final = (
    *("p2p_efficiency", "inner_efficiency", "outer_efficiency", "microbatch_overhead_s", "overlap_slowdown", "allocator_slack"),
    *("context_bytes", "communicator_bytes", "workspace_bytes"),
)


def joined(parts: Sequence[Calibration]) -> Calibration:
    """The constants of a cluster whose GPUs of several types have these: a stage is priced by its own type's. What is between types or of
    all is the worse one's (network, step); what only lower bounds read is the better one's (overlap, launches, bytes of every rank)."""
    first = parts[0]
    most = {name: max(getattr(part, name) for part in parts) for name in MOST}
    least = {name: min(getattr(part, name) for part in parts) for name in LEAST}
    names = " + ".join(dict.fromkeys(part.name for part in parts))
    fitted = first.fitted if all(part.fitted is not None for part in parts) else None
    on = "; ".join(dict.fromkeys(part.fitted_on for part in parts if part.fitted_on))
    own = {"interval": None, "own_peaks": False}
    return replace(first, name=names, fitted_on=on, fitted=fitted, parts=tuple(parts), **own, **most, **least)


def calibrated(cluster: Cluster, traits: Traits) -> Calibration:
    """The constants that come with the package for this engine on this GPU, or the datasheet's."""
    return priced(cluster, traits, found(SHIPPED, cluster, [traits], None)[0])
