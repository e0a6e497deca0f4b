"""The estimates of Galvatron's VLDB 2023 artifact (Hsword/Hetu at 3757771, tools/Galvatron/utils/cost_model.py and the searches beside
it), restated: what its calibration files imply for a plan on 8 GPUs.

Per layer, with b samples on a rank, x the seconds of its backward pass and d those of its weights' all-reduce:

* forward b f / tp, backward twice that; an all-reduce of n bytes over g ranks takes 2 (g-1)/g n at the measured ms/MiB of such a group;
* tensor parallelism reduces the output 4 times a sample (6 times in a decoder that attends to an encoder);
* what of backward and all-reduce runs side by side makes both `slowdown` times as long: max(x, d) + (slowdown - 1) min(x, d) together;
* sharded data parallelism gathers the weights once more: half an all-reduce;
* a pipeline of p stages and m micro-batches (a fixed function of b, not a choice) stretches compute by (p + m - 1) / (p m);
* the sum of all layers, 10% added. Changes between layers of different tp are left out (they are below a millisecond there).
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.units import MIB

MARGIN = 1.1
"""Their `coe` is 0.0011 for milliseconds."""
MILLISECOND = 1e-3


class Layer(NamedTuple):
    """`forward_s` of one sample; bytes of the weights and of a sample's output; `overhead_s`: added where dp > 1 (T5)."""

    forward_s: float
    weight_bytes: float
    output_bytes: float
    decoder: bool = False
    overhead_s: float = 0.0


class Choice(NamedTuple):
    """`tp_adjacent`: whether tp takes adjacent ranks and dp those apart."""

    tp: int
    dp: int
    sharded: bool = False
    tp_adjacent: bool = True


class Formulas:
    """`allreduce`: ms per MiB by "pp_ranks_adjacent" (their allreduce_bandwidth file). `slowdown`: their overlap coefficient."""

    def __init__(self, allreduce: dict[str, float], slowdown: float) -> None:
        self.allreduce, self.slowdown = allreduce, slowdown

    def _per_byte(self, pp: int, ranks: int, *, adjacent: bool) -> float:
        return 0.0 if ranks == 1 else self.allreduce[f"{pp}_{ranks}_{int(adjacent)}"] * MILLISECOND / MIB

    def _together(self, x: float, d: float) -> float:
        return max(x, d) + (self.slowdown - 1) * min(x, d)

    def layer_s(self, layer: Layer, pp: int, choice: Choice, samples: float, m: float) -> float:
        """Seconds that a layer adds to the step; `samples`: of the whole step on one rank.

        >>> round(48 * Formulas({}, 1.3).layer_s(Layer(2.29166666e-3, 0, 0), 8, Choice(1, 1), 8, 3), 6)  # BERT-48 at 12 GB
        1.21
        """
        tp, dp, decoder = choice.tp, choice.dp, layer.decoder
        alone = tp == 1 or dp == 1
        forward = layer.forward_s * samples / tp
        backward = 2 * forward
        reduced = 2 * (tp - 1) / tp * (6 if decoder else 4) * layer.output_bytes * samples
        reduced *= self._per_byte(pp, tp, adjacent=alone or choice.tp_adjacent)
        carried = 2 * (dp - 1) / dp * layer.weight_bytes / tp * self._per_byte(pp, dp, adjacent=alone or not choice.tp_adjacent)
        compute = forward + backward
        if tp == 1:
            beside = 1.0
        elif decoder and pp == 1:
            beside = 2 / 3
        else:
            beside = 1.0 if (pp, tp) == (1, 2) else 1 / 2
        if dp == 1:
            whole = compute + reduced
        else:
            whole = forward + (1 - beside) * backward + self._together(beside * backward, carried) + reduced
            if pp > 1 and tp == 1 and carried > backward and not choice.sharded:  # the rest is sent by all stages at once
                whole = forward + self.slowdown * backward + (carried - backward) / pp
        if pp > 1:
            spread = compute + reduced
            whole = spread * (pp + m - 1) / (pp * m) + whole - spread
        if choice.sharded:
            whole += carried / 2
        return MARGIN * (whole + (layer.overhead_s if dp > 1 else 0.0))


def micro_batches(samples: float, pp: int, tp: int, *, t5: bool) -> float:
    """Their `optimal_chunk_func`, which need not be whole. `samples`: of the step on one rank."""
    if pp == 1:
        return 1.0
    if t5:
        return 1.0 if samples == 2 else 3.0 if pp == 8 else 2.0
    if (pp, tp) in ((2, 4), (4, 2)):
        return samples / 4
    return samples / 2 if samples < 6 else samples / 8 + 2
