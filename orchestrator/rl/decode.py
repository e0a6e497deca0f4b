"""Seconds of one step of generation, which makes a token of every running sequence, and the room that their keys and values take.

A step reads the weights (of experts those that some token goes to) and each sequence's keys and values once, at the memory's rate; where it
makes many tokens at once their products take longer than that, by FLOPs. Tensor parallelism adds an all-reduce after each part of a layer,
experts over data-parallel ranks an exchange before and after. The host's part, scheduling and sampling, comes on top, some of it for each
sequence.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.network import Network
from orchestrator.hardware.collectives import all_reduce, all_to_all
from orchestrator.hardware.spec import Cluster
from orchestrator.model.families import describe
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.part import Nothing
from orchestrator.model.spec import Architecture, Attention, DeltaRule, Exit, Gemm, LayerSpec, Scan
from orchestrator.rl.job import Measured
from orchestrator.strategy.capabilities import Traits
from orchestrator.units import GIB, MS, US
from orchestrator.values import Value

ITEMSIZE: Final = 2
"""Bytes of an element of weights, keys and values: generation is in 16 bits."""
STATE_ITEMSIZE: Final = 4
"""Bytes of an element of a recurrent state (vLLM's mamba_ssm_cache_dtype is the checkpoint's, fp32 in Nemotron-H and Qwen3-Next)."""


class EngineConstants(Value, frozen=True, kw_only=True):
    """How an engine of generation behaves, on any GPU."""

    weight_efficiency: float = 0.80
    """Share of the memory's rate at which products with few rows read their weights: one sequence of Llama 3.1 8B takes 13.3 ms a token on
    an A100 with 40 GB, 77% of that rate if nothing else took time (johnmusgrave.com, vllm-throughput-latency-sweep-on); 14.2 here."""
    cache_efficiency: float = 0.65
    """Share of the memory's rate at which attention reads keys and values by pages."""
    step_s: float = 2.0 * MS
    """Seconds of the host a step: scheduling, launching CUDA graphs; with the former."""
    experts_s: float = 80 * US
    """Seconds that a layer's routing, sorting and grouped products take at least, beside the reading of their weights: one sequence of
    Qwen3-30B-A3B takes 9.6 ms a token on an A100 (github:tenstorrent/tt-inference-server issue 340); 9.5 here."""
    sequence_s: float = 50 * US
    """Seconds of the host and of sampling for each running sequence of a step. Fitted: to verl's generation of Qwen2.5-7B on 8 to 32 H100;
    with NeMo RL, which has the log-probability of each token returned, to its steps of 0.3 and 0.4 on H100 (rl/README.md)."""
    across_s: float = 70 * US
    """Seconds that an all-reduce or exchange over several nodes takes more than its bytes and hops: there an engine has no kernel of its
    own. Fitted: to Qwen3-235B's steps at tp=16 on 128 and 256 H100 (NeMo RL 0.6); DeepSeek-R1 on two nodes of H100 takes 15 ms a token
    more than on one (github:tenstorrent/tt-inference-server issue 356), 124 us for each of its 122."""
    prefill_efficiency: float = 0.7
    """Share of what training's products reach that prefill reaches: prompts come in chunks beside decoding."""
    eager: bool = False
    """Whether the host launches kernels one by one, without CUDA graphs."""
    workspace: float = 4 * GIB
    """Bytes of a GPU for activations, CUDA graphs and communicators beside weights and cache."""


LAUNCH_S: Final = 0.2 * MS
"""Seconds of the host to launch a layer's kernels one by one. That of Qwen2.5-7B's 28 layers on 32 H100 shows no more than this (verl)."""
LAUNCH_EXPERTS_S: Final = 0.46 * MS
"""Seconds more of a layer with experts: routing, sorting and grouped products. Fitted: to verl's generation of Qwen3-30B-A3B on 32 H100 at
tp=2 (rl/README.md)."""
UNTUNED: Final = {"10": 0.5}
"""Share of the two efficiencies that kernels reach on newer GPUs, by the major number of their compute capability. Fitted: to the steps of
NeMo RL 0.5 on GB200 (rl/README.md)."""


class Layout(Value, frozen=True, kw_only=True, order=True):
    """An engine of generation on `tp` x `dp` GPUs; with dp above 1 each data-parallel rank has sequences of its own, and experts are
    divided over all of the GPUs."""

    tp: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


def layout_refused(a: Architecture, layout: Layout) -> str | None:
    """Why an engine can't have this layout, in numbers; None: it can. Heads are divided evenly, and keys and values of fewer groups than
    ranks are copied (vllm/config/model.py, verify_with_parallel_config; layers/linear.py, QKVParallelLinear)."""
    if a.num_attention_heads % layout.tp:
        return f"tp={layout.tp} does not divide num_attention_heads={a.num_attention_heads}"
    groups = a.query_groups
    if groups % layout.tp and layout.tp % groups and not isinstance(a.common_layer.mixer, LatentAttention):
        return f"tp={layout.tp} neither divides num_query_groups={groups} nor is a multiple of it"
    for part in a.experts:
        if part.ffn_hidden_size % layout.tp and layout.dp == 1:
            return f"tp={layout.tp} does not divide the experts' ffn_hidden_size={part.ffn_hidden_size}"
        if part.num_experts % layout.gpus and layout.dp > 1:
            return f"{layout.gpus} GPUs of an engine do not divide num_experts={part.num_experts}"
    if layout.dp > 1 and not a.experts:
        return f"dp={layout.dp} divides experts, and the model has none: engines side by side do the same"
    return None


class Decoder:
    """Prices of a model's generation by one layout on one cluster."""

    def __init__(
        self, a: Architecture, cluster: Cluster, calibration: Calibration, traits: Traits, layout: Layout, engine: EngineConstants
    ) -> None:
        a = replace(a, mtp_num_layers=0)  # what only training has
        self.architecture, self.cluster, self.layout, self.engine, self.calibration = a, cluster, layout, engine, calibration
        self._network = Network(cluster, calibration, traits)
        self._steps: dict[int, float] = {}
        self._rate = cluster.gpu.memory_bandwidth * UNTUNED.get(cluster.gpu.compute_capability.partition(".")[0], 1.0)
        spec = describe(a, 1)
        self._layers: list[tuple[LayerSpec, int]] = [(run.layer, run.count) for run in spec.runs if run.layer.kind != "embedding"]
        self._looked_up = spec.runs[0].layer.parameters - (a.vocab_size * a.hidden_size if a.tie_embeddings else 0)

    # ---- bytes

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on one GPU."""
        dense, experts = self._dense_weights, sum(nbytes for nbytes, *_ in self._experts)
        return (dense + ITEMSIZE * self._looked_up) / self.layout.tp + experts / self.layout.gpus

    @cached_property
    def model_bytes(self) -> float:
        """Bytes of all weights of the model."""
        return self._dense_weights + ITEMSIZE * self._looked_up + sum(nbytes for nbytes, *_ in self._experts)

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of keys and values of one token on one GPU, where all tokens are kept."""
        return sum(nbytes for nbytes, window in self._caches if not window)

    @cached_property
    def _caches(self) -> list[tuple[float, int]]:
        """(bytes of a token on one GPU, tokens of the window or 0) by layer with attention."""
        found = []
        a = self.architecture
        for layer, count in a.layer_runs():
            if isinstance(layer.mixer, LatentAttention):  # the latent vector is cached, whole on every rank (arXiv 2405.04434, 2.1.2)
                width = layer.mixer.kv_lora_rank + layer.mixer.qk_rope_head_dim
                found.append((ITEMSIZE * count * float(width), 0))
                continue
            for op in () if isinstance(layer.mixer, Nothing) else layer.mixer.part(a, 1, causal=True).ops:
                if isinstance(op, Attention):
                    window = op.window or int(getattr(layer.mixer, "window", None) or getattr(layer.mixer, "chunk", None) or 0)
                    heads = op.kv_heads / min(self.layout.tp, op.kv_heads)
                    found.append((2 * ITEMSIZE * count * heads * op.head_dim, window))
        return found

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the recurrent states of one sequence on one GPU."""
        total = 0.0
        for layer, count in self._layers:
            for op in layer.ops:
                if isinstance(op, Scan):
                    total += count * op.heads * op.head_dim * op.state
                elif isinstance(op, DeltaRule):
                    total += count * op.heads * op.key_dim * op.value_dim
        return STATE_ITEMSIZE * total / self.layout.tp

    def sequence_bytes(self, tokens: float) -> float:
        """Bytes of one sequence with so many tokens on one GPU."""
        return self.state_bytes + sum(nbytes * min(tokens, window or tokens) for nbytes, window in self._caches)

    # ---- seconds

    def step_seconds(self, running: int, tokens: float) -> float:
        """Seconds of a step in which `running` sequences of a data-parallel rank, with `tokens` tokens in the mean, get one token each."""
        fixed = self._steps.get(running)
        if fixed is None:
            fixed = self._steps[running] = self._fixed(running)
        return fixed + running * self.cache_seconds(tokens)

    def cache_seconds(self, tokens: float) -> float:
        """Seconds to read what one sequence with so many tokens has cached."""
        return self.sequence_bytes(tokens) / (self._rate * self.engine.cache_efficiency)

    def _fixed(self, running: int) -> float:
        """Seconds of a step but for its keys and values."""
        rate = self._rate * self.engine.weight_efficiency
        seconds = self._traffic(running) + max(
            self._dense_weights / self.layout.tp / rate, self._products(running * self._dense_flops / self.layout.tp)
        )
        rows = running * self.layout.dp
        for nbytes, flops, experts, topk, layers in self._experts:
            seconds += layers * self.engine.experts_s
            touched = 1 - (1 - topk / experts) ** rows
            seconds += max(nbytes * touched / self.layout.gpus / rate, self._products(rows * flops / self.layout.gpus))
        launched = LAUNCH_S * sum(count for _, count in self._layers) + LAUNCH_EXPERTS_S * sum(layers for *_, layers in self._experts)
        return self.engine.step_s + running * self.engine.sequence_s + max(seconds, launched if self.engine.eager else 0.0)

    def _products(self, flops: float) -> float:
        """Seconds of so many FLOPs in large products."""
        peaks = self.cluster.gpu.peak_flops
        return flops / (peaks.get("bf16", peaks["fp16"]) * self.calibration.gemm_efficiency)

    def _traffic(self, running: int) -> float:
        """Seconds of a step's collectives, which its CUDA graphs launch."""
        layout, nbytes = self.layout, float(ITEMSIZE * running * self.architecture.hidden_size)
        inside = self.cluster.levels[0].size
        reduced = 0.0
        if layout.tp > 1:
            reduced = all_reduce(nbytes, layout.tp, self._network.link(layout.tp, 1)) + (
                self.engine.across_s if layout.tp > inside else 0.0
            )
        seconds = 0.0
        for layer, count in self._layers:
            routed = next((op for op in layer.ops if isinstance(op, Gemm) and op.experts), None)
            over_tp = sum(isinstance(op, Exit) for op in layer.ops) + (routed is not None and layout.dp == 1)
            seconds += count * over_tp * reduced
            if routed is not None and layout.dp > 1:
                sent = nbytes * min(routed.tokens, layout.gpus) / layout.tp
                exchanged = all_to_all(sent, layout.gpus, self._network.exchange(layout.gpus, 1))
                seconds += count * 2 * (exchanged + (self.engine.across_s if layout.gpus > inside else 0.0))
        return seconds

    def prefill_seconds(self, tokens: float) -> float:
        """Seconds to read prompts of so many tokens in all, by one engine."""
        flops = tokens * (self._dense_flops + sum(flops for _, flops, *_ in self._experts)) / self.layout.gpus
        return self._products(flops) / self.engine.prefill_efficiency

    # ---- the model, by token

    @cached_property
    def _dense_weights(self) -> float:
        """Bytes of what each step reads of the whole model: all weights but the embedding's and the experts'."""
        each = ((count, weight) for layer, count in self._layers for weight in layer.weights if weight.kind != "expert")
        return float(ITEMSIZE * sum(count * prod(weight.shape) for count, weight in each))

    @cached_property
    def _dense_flops(self) -> float:
        """FLOPs of one token in products that every token takes part in."""
        each = ((count, op) for layer, count in self._layers for op in layer.ops if isinstance(op, Gemm) and not op.experts)
        return float(sum(count * 2 * op.tokens * op.k * op.n for count, op in each))

    @cached_property
    def _experts(self) -> list[tuple[float, float, int, int, int]]:
        """(bytes of all experts' weights, FLOPs of a token, experts, experts of a token, layers) by kind of layer, its layers together."""
        found = []
        for layer, count in self._layers:
            routed = [op for op in layer.ops if isinstance(op, Gemm) and op.experts]
            if routed:
                nbytes = ITEMSIZE * count * sum(prod(weight.shape) for weight in layer.weights if weight.kind == "expert")
                flops = count * sum(2 * op.tokens * op.k * op.n for op in routed)
                found.append((float(nbytes), float(flops), routed[0].experts, routed[0].tokens, count))
        return found


class MeasuredDecoder(Decoder):
    """Prices by a user's own three numbers: the step's fixed part is a line through the two measured steps, in which caches were short."""

    def __init__(self, decoder: Decoder, measured: Measured) -> None:
        self.__dict__.update(decoder.__dict__)
        self.measured = measured
        self._steps = {}

    def _fixed(self, running: int) -> float:
        m = self.measured
        return m.alone_s + (m.full_s - m.alone_s) * (running - 1) / (m.running - 1)

    def prefill_seconds(self, tokens: float) -> float:
        return tokens / self.measured.prefill
