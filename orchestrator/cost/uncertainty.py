"""How far a prediction may be off: intervals of step time, and the chance that a peak is above the memory there is.

Split conformal prediction with whole sources left out (V. Vovk, "Cross-conformal predictors", 2015; R. Barber and others, "Predictive
inference with the jackknife+", 2021): every measured run is predicted by constants that no run of its own source was fitted to, and the
ratios of measured to predicted are kept (`errors.json`; `python -m tests.validation.fitting errors=FILE` makes it). An interval is between
two quantiles of these ratios, each weighted by how near its run is to what is predicted now (localised as in L. Guan, "Localized conformal
prediction", 2023): the same generation of GPU, experts or none, the same width of products, layers of the same kind, adapters or whole
training, and as far beyond what the constants were fitted on. Where nothing near was measured all ratios weigh nearly alike, and the
interval is as wide as whole sources differ.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from statistics import median
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.hardware.spec import Cluster
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training
from orchestrator.strategy.layout import FittedOn
from orchestrator.values import Value

Beyond = Literal["engine", "gpu", "experts", "linear attention", "adapters", "precision", "scale", "sequence length", "size"]
BEYOND: Final[dict[Beyond, str]] = {
    "engine": "no run of this engine on this GPU was fitted",
    "gpu": "no run of any engine on this GPU was seen",
    "experts": "no run with experts was fitted",
    "linear attention": "no run with layers of linear attention or of a state space was fitted",
    "adapters": "no run that trains adapters (LoRA) was fitted",
    "precision": "no run with products of this precision was fitted",
    "scale": "more than twice the GPUs of any run that was fitted",
    "sequence length": "more than twice the tokens a sequence of any run that was fitted",
    "size": "a model of more than twice, or less than half, the parameters of any of your runs",
}
"""Kinds of extrapolation, in words."""
FAR: Final = 2
"""Times the largest number of GPUs, length of sequences, or size of models, that constants were fitted on: above this it is
extrapolation."""
TAIL: Final = 0.0175
"""Share of the ratios that is left out at either end of a 90% interval. Not .05: sources differ more from each other than runs of one
source do. With this 91% of all runs are held when their source is left out, and at least 80% of those of each table with more than ten
(but 17 of the 22 of NVIDIA's verification cards, which alone have LoRA on a stock stack and linear attention on GB200); with .018 another
one has 74.6%."""
POOR: Final = 0.15
"""Median error of a generation's published runs above which a plan says so."""
STEADY: Final = 20
"""Runs of a cell at which it has half the weight that it would have with very many."""


class Pairs(Value, frozen=True, kw_only=True):
    """How far off the predicted ratio of two steps is, as a logarithm: at most `half` in half of the pairs of published runs, and `most` in
    nine of ten."""

    half: float
    most: float


DENSE_PAIRS: Final = Pairs(half=0.033, most=0.122)
"""95 pairs of one training on the same GPUs, divided differently (tests/validation/pairs.py; calibrate's README)."""
EXPERT_PAIRS: Final = Pairs(half=0.068, most=0.373)
"""Differences of predicted ratios in 74 pairs of models with experts, divided differently."""


def pairs_of(architecture: Architecture) -> Pairs:
    """What is known of differences between plans of a model."""
    return EXPERT_PAIRS if architecture.experts else DENSE_PAIRS


class Situation(Value, frozen=True, kw_only=True):
    """What a prediction's trust depends on."""

    generation: str
    """`Gpu.generation`; "" on the CPU."""
    experts: bool
    eight_bit: bool
    """Whether matrix products are FP8, or less."""
    transformers: bool = False
    """Whether the layers are Hugging Face transformers' own modules, run operation by operation, not an engine's with fused kernels."""
    stock: bool = False
    """Whether nobody set the nodes' software up (hardware.spec.Stack)."""
    beyond: tuple[Beyond, ...] = ()
    """How what is predicted lies outside of what its constants were fitted on."""


class Cell(Value, frozen=True, kw_only=True):
    """Runs of one source in one situation, by constants that know nothing of that source: measured over predicted, sorted."""

    situation: Situation
    seconds: tuple[float, ...] = ()
    """Ratios of measured to predicted step time, sorted."""
    bytes: tuple[float, ...] = ()
    """Ratios of measured to predicted peak memory, sorted."""


class Errors(Value, frozen=True, kw_only=True):
    """Errors of the published runs in cells, and the GPUs that those runs were made on."""

    gpus: tuple[str, ...]
    cells: tuple[Cell, ...]


@cache
def known() -> Errors:
    """The errors of the published runs."""
    return msgspec.json.decode(files("orchestrator.cost").joinpath("errors.json").read_bytes(), type=Errors)


BITS: Final = {"fp8": 8, "nvfp4": 4}
"""Bits of the products' inputs, by precision; 16 where it is not listed (fp32 on GPUs is TF32 or slower, which no published run is)."""


LINEAR: Final = "linear attention"
"""The word in `FittedOn.kinds` that says that a run had layers of linear attention."""
ADAPTERS: Final = "adapters"
"""The word in `FittedOn.kinds` that says that a run trained LoRA's adapters alone."""


def is_linear(architecture: Architecture) -> bool:
    """Whether some layers keep a state in place of keys and values: their kernels are other programs than attention's."""
    return any(isinstance(layer.mixer, Mamba2 | GatedDeltaNet) for layer in architecture.kinds_of_layers())


def trained_as(experts: bool, precision: str) -> str:
    """The name of a kind of run in `FittedOn.kinds`.

    >>> trained_as(True, "bf16"), trained_as(False, "nvfp4")
    ('experts 16-bit', 'dense 4-bit')
    """
    return f"{'experts' if experts else 'dense'} {BITS.get(precision, 16)}-bit"


def beyond(
    fitted: FittedOn | None,
    cluster: Cluster,
    training: Training,
    experts: bool,
    gpus: Iterable[str],
    *,
    linear: bool = False,
    parameters: int = 0,
) -> tuple[Beyond, ...]:
    """How this lies outside of what constants were fitted on; `gpus`: those that any source measured; `linear`: whether the model has
    layers of linear attention; `parameters`: how many it has."""
    kinds = () if fitted is None else fitted.kinds
    had: dict[Beyond, bool] = {LINEAR: linear, ADAPTERS: training.lora is not None}
    found: list[Beyond] = [kind for kind, has in had.items() if has and kind not in kinds]
    if fitted is None:
        return ("engine", *found) if cluster.gpu.name in gpus else ("engine", "gpu", *found)
    kind = "experts" if experts else "dense"
    if not any(name.startswith(kind) for name in fitted.kinds):
        found.append("experts" if experts else "precision")
    elif trained_as(experts, training.precision) not in fitted.kinds:
        found.append("precision")
    if cluster.num_gpus > FAR * fitted.num_gpus:
        found.append("scale")
    if training.seq_length > FAR * fitted.seq_length:
        found.append("sequence length")
    if fitted.parameters is not None and not fitted.parameters[0] / FAR <= parameters <= fitted.parameters[1] * FAR:
        found.append("size")
    return tuple(found)


def situation(
    model: ModelSpec,
    training: Training,
    cluster: Cluster,
    calibration: Calibration,
    gpus: Iterable[str] | None = None,
    *,
    transformers: bool = False,
) -> Situation:
    """The situation of this workload under these constants; the same for every plan of an engine. `gpus`: those that were measured
    (`known`); `transformers`: whether the engine's layers are transformers' own (Traits.layers)."""
    experts = bool(model.architecture.experts)
    return Situation(
        generation="" if cluster.is_cpu else cluster.gpu.generation,
        experts=experts,
        eight_bit=training.precision in BITS,
        transformers=transformers,
        stock=cluster.stack == "stock" and not cluster.is_cpu,
        beyond=beyond(
            calibration.fitted,
            cluster,
            training,
            experts,
            known().gpus if gpus is None else gpus,
            linear=is_linear(model.architecture),
            parameters=model.parameters,
        ),
    )


def weight(a: Situation, b: Situation) -> float:
    """How much of its weight a run in situation `a` has for a prediction in `b`: each difference halves it, that of the GPU's generation
    and that of whose layers they are twice: published runs of transformers' modules took .7 to 8 times as long as predicted, of engines'
    own layers three in four were within 20%. Adapters are one difference: were they two, or LoRA's runs not counted for whole training,
    75% of V100's runs and 78 to 80% of nanotron's would be held (`TAIL`), not 81 and 82.

    >>> h100 = Situation(generation="9", experts=False, eight_bit=False)
    >>> weight(h100, h100), weight(h100, msgspec.structs.replace(h100, generation="8", beyond=("scale",)))
    (1.0, 0.125)
    """
    twice = (a.generation != b.generation) + (a.transformers != b.transformers)
    once = (a.experts != b.experts) + (a.eight_bit != b.eight_bit) + (a.stock != b.stock) + len({*a.beyond} ^ {*b.beyond})
    return 0.5 ** (2 * twice + once)


class Ratios:
    """Measured over predicted, weighted by nearness.

    >>> four = Ratios([(1.0, 1.0), (0.9, 1.0), (1.3, 1.0), (1.1, 1.0)])
    >>> four.quantile(0.5), four.quantile(0.0), four.quantile(1.0), round(four.share_above(1.2), 2)
    (1.05, 0.9, 1.3, 0.25)
    """

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self.values = [value for value, _ in ordered]
        self._weights = [weight for _, weight in ordered]
        self._reached = list(accumulate(self._weights))
        self._middles = [reached - weight / 2 for reached, weight in zip(self._reached, self._weights, strict=True)]

    def quantile(self, share: float) -> float:
        """The value below which this share of the weight lies, linear between the middles of the values' weights."""
        target = share * self._reached[-1]
        after = bisect_left(self._middles, target)
        if after in (0, len(self.values)):
            return self.values[min(after, len(self.values) - 1)]
        low, high = self._middles[after - 1], self._middles[after]
        return self.values[after - 1] + (target - low) / (high - low) * (self.values[after] - self.values[after - 1])

    def share_above(self, value: float) -> float:
        """Share of the weight that values of at least `value` have; never below one run of all, which the next may be."""
        below = bisect_left(self.values, value)
        share = 1 - (self._reached[below - 1] if below else 0.0) / self._reached[-1]
        return min(1.0, max(share, 1 / (len(self.values) + 1)))


def _of_peaks(situation: Situation) -> Situation:
    """The situation as far as peaks depend on it. Adapters are left out: a frozen layer's tensors are counted as a trained one's are, and
    30 of the 36 published peaks of transformers' modules are of LoRA, so that for whole training of these nothing nearer was measured."""
    return replace(situation, beyond=tuple(kind for kind in situation.beyond if kind != ADAPTERS))


def _near(now: Situation, cells: Sequence[Cell], what: Literal["seconds", "bytes"]) -> Ratios:
    pairs = []
    seen = _of_peaks if what == "bytes" else lambda situation: situation
    for cell in cells:
        ratios: tuple[float, ...] = getattr(cell, what)
        each = weight(seen(cell.situation), seen(now)) / (len(ratios) + STEADY)
        pairs += [(ratio, each) for ratio in ratios]
    return Ratios(pairs)


@cache
def ratios(now: Situation, what: Literal["seconds", "bytes"]) -> Ratios:
    """Measured over predicted step times, or peaks, of all published runs, as near as they are to this."""
    return _near(now, known().cells, what)


def interval(now: Situation, calibration: Calibration, cells: Sequence[Cell] | None = None) -> tuple[float, float] | None:
    """Measured over predicted step time: (low, high) of a 90% interval, with the prediction itself, 1, inside. A user's own calibration
    brings that of its own runs; beyond these it is at least as wide as that of published runs as far from theirs. None on the CPU, of
    which nothing is published, without a calibration. `cells`: without some source."""
    own = calibration.interval
    if not now.generation or (own is not None and (not now.beyond or calibration.fitted is None)):
        return own
    near = ratios(now, "seconds") if cells is None else _near(now, cells, "seconds")
    if not near.values:
        return own
    low, high = own or (1.0, 1.0)
    return min(low, near.quantile(TAIL)), max(high, near.quantile(1 - TAIL))


@cache
def poorly_predicted(now: Situation) -> str:
    """What a plan says of GPUs of whose generation published runs were predicted badly by constants that knew nothing of them: how far off
    they were in the median; "" for the others."""
    said = []
    for what, words in (("seconds", "took {:.2g} times as long as predicted"), ("bytes", "had peaks {:.2g} times as high")):
        values = [ratio for cell in known().cells if cell.situation.generation == now.generation for ratio in getattr(cell, what)]
        if len(values) >= STEADY and median(abs(1 / ratio - 1) for ratio in values) > POOR:
            said.append(words.format(median(values)))
    if not said or not now.generation:
        return ""
    return f"published runs on GPUs of this generation {' and '.join(said)}, in the median: measure (tune=5, orchestrator.profile)"


def chance_of_not_fitting(peak_bytes: float, limit_bytes: float, now: Situation, cells: Sequence[Cell] | None = None) -> float:
    """The chance that a rank whose peak is predicted at `peak_bytes` takes more than `limit_bytes` (all that the GPU has, nothing kept
    free), 0 to 1: the weight of the published runs, near this situation, whose measured peak was so much above the prediction. Never 0:
    nobody has measured that. `now`: `situation(model, training, cluster, calibration)`."""
    near = ratios(now, "bytes") if cells is None else _near(now, cells, "bytes")
    return near.share_above(limit_bytes / peak_bytes)


def kept_free(risk: float, now: Situation) -> float:
    """The share of a GPU's memory that a predicted peak has to leave free so that its chance of not fitting is at most `risk` (0 to 1):
    the inverse of `chance_of_not_fitting`. Raises ValueError for a risk below what so many runs can tell."""
    near = ratios(now, "bytes")
    least = 1 / (len(near.values) + 1)
    if not least <= risk < 1:
        raise ValueError(f"a risk of {risk:g} can't be told from {len(near.values)} measured peaks: at least {least:.2g}, below 1")
    candidates = [1.0, *near.values[bisect_right(near.values, 1.0) :]]
    first = bisect_left(candidates, True, key=lambda ratio: near.share_above(ratio * (1 + 1e-9)) <= risk)
    return 1 - 1 / (candidates[first] * (1 + 1e-9))
