"""The fastest layer-wise plan of one (stages, micro-batches) as a mixed-integer linear program, for instances too large to enumerate.

It shares nothing with search/ but the prices of a layer (`Prices.ways`, `switch`, `hop_s`, `fixed_bytes`), and nothing with the cost
model's simulation of the schedule:

* A binary variable says that layer layer is in stage p, computed in this way; stages are layers in a row, memory is a sum and a maximum, a
  change of tp between neighbours of a stage is a product of two sums of binary variables.
* The schedule is the longest path through its passes, as in milp.py, whose orders of passes it takes; a stage's seconds are linear in the
  binary variables.

HiGHS solves it (scipy.optimize.milp).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from milp import orders
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from orchestrator.search.layerwise import Outer, Prices
from orchestrator.strategy.layout import ENDS

GAP = 1e-7
"""Relative, at which HiGHS stops."""


class LayerwiseProgram:
    """`unit`: seconds that a step takes about, and `usable`: bytes that a rank has; both scale the program, as HiGHS's tolerances are
    absolute."""

    def __init__(self, prices: Prices, outer: Outer, usable: float, unit: float) -> None:
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        kinds = [kind for kind, count in prices.runs for _ in range(count)]
        pp, m, layers = outer.pp, outer.num_microbatches, len(kinds)
        self.scale = 1000 / unit
        ways = [prices.ways(kind, outer) for kind in kinds]
        x = {(layer, p, i): self.variable(1, whole=True) for layer in range(layers) for p in range(pp) for i in range(len(ways[layer]))}

        def held(layer: int, p: int) -> dict[int, float]:
            return {x[layer, p, i]: 1.0 for i in range(len(ways[layer]))}

        for layer, kind in enumerate(kinds):
            self.row({k: 1.0 for p in range(pp) for k in held(layer, p)}, 1, 1)
            if kind in ENDS:
                self.row(held(layer, 0 if layer == 0 else pp - 1), 1, 1)
            for p in range(pp if layer else 0):  # no layer is in an earlier stage than the one before it
                before = {k: 1.0 for q in range(p + 1) for k in held(layer - 1, q)}
                self.row({**before, **{k: -1.0 for q in range(p + 1) for k in held(layer, q)}}, 0, np.inf)
        for p in range(pp):
            self.row({k: 1.0 for layer, kind in enumerate(kinds) if kind not in ENDS for k in held(layer, p)}, 1, np.inf)
        slow, hides = prices.slowdown, (1 - prices.slowdown) * prices.hidden_share
        overhead, once = prices.overheads_s()
        forward, backward, exposed = ([self.variable() for _ in range(pp)] for _ in range(3))
        optimizer, end = self.variable(), self.variable()
        flights = [min(m, pp - p) for p in range(pp)]
        for p in range(pp):
            sums: dict[str, dict[int, float]] = defaultdict(dict)
            transient = self.variable()
            for layer in range(layers):
                for i, way in enumerate(ways[layer]):
                    key = x[layer, p, i]
                    sums["forward"][key], sums["backward"][key] = way.forward_s * self.scale, way.backward_s * self.scale
                    sums["sync"][key], sums["optimizer"][key] = way.sync_s * self.scale, way.optimizer_s * self.scale
                    sums["bytes"][key] = (way.static_bytes + (1 + prices.slack) * flights[p] * way.saved_bytes) / usable
                least = {x[layer, p, i]: -way.transient_bytes / usable for i, way in enumerate(ways[layer])}
                self.row({transient: 1.0, **least}, 0, np.inf)
            for layer in range(1, layers):
                for a in {way.choice.tp for way in ways[layer - 1]}:
                    for b in {way.choice.tp for way in ways[layer]} - {a}:
                        both = self.variable(1)
                        first = {x[layer - 1, p, i]: -1.0 for i, way in enumerate(ways[layer - 1]) if way.choice.tp == a}
                        second = {x[layer, p, i]: -1.0 for i, way in enumerate(ways[layer]) if way.choice.tp == b}
                        self.row({both: 1.0, **first, **second}, -1, np.inf)
                        f, back = prices.switch(kinds[layer], a, b, outer)
                        sums["forward"][both], sums["backward"][both] = f * self.scale, back * self.scale
            half = overhead / 2 * self.scale
            self.row({forward[p]: 1.0, **negative(sums["forward"])}, half, half)
            self.row({backward[p]: 1.0, **negative(sums["backward"])}, half, half)
            self.row({exposed[p]: 1.0, **{k: -slow * value for k, value in sums["sync"].items()}}, 0, np.inf)
            self.row({exposed[p]: 1.0, backward[p]: hides, **negative(sums["sync"])}, 0, np.inf)
            self.row({optimizer: 1.0, **negative(sums["optimizer"])}, 0, np.inf)
            room = 1 - prices.fixed_bytes(outer, p, flights[p]) / usable
            self.row({**sums["bytes"], transient: 1 + prices.slack}, -np.inf, room)
        hop = prices.hop_s(outer) * self.scale
        lines = orders(pp, m, 1)
        ends = {one: self.variable() for one in dict.fromkeys(one for line in lines for one in line)}
        for p, line in enumerate(lines):
            for i, one in enumerate(line):
                after = {ends[line[i - 1]]: -1.0} if i else {}
                spent = {"forward": {forward[p]: -1.0}, "backward": {backward[p]: -1.0}, "transfer": {}}[one[0]]
                self.row({ends[one]: 1.0, **spent, **after}, hop if one[0] == "transfer" else 0, np.inf)
            self.row({end: 1.0, ends[line[-1]]: -1.0, exposed[p]: -1.0}, 0, np.inf)
        self.goal = {end: 1.0, optimizer: 1.0}
        self.once = once

    def variable(self, upper: float = np.inf, *, whole: bool = False) -> int:
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.upper) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append((terms, low, high))

    def solve(self, limit_s: float) -> tuple[float, float] | None:
        """(seconds of the best plan found, seconds that none undercuts); None: nothing fits."""
        cost = np.zeros(len(self.upper))
        for key, value in self.goal.items():
            cost[key] = value
        entries = [(r, k, value) for r, (terms, _, _) in enumerate(self.rows) for k, value in terms.items()]
        matrix = csr_matrix(([e[2] for e in entries], ([e[0] for e in entries], [e[1] for e in entries])), (len(self.rows), len(cost)))
        result = milp(
            cost,
            integrality=np.array(self.whole, dtype=int),
            bounds=Bounds(0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]),
            options={"mip_rel_gap": GAP, "time_limit": limit_s},
        )
        if result.status == 2:
            return None
        assert result.x is not None, result.message
        return result.fun / self.scale + self.once, result.mip_dual_bound / self.scale + self.once


def negative(terms: dict[int, float]) -> dict[int, float]:
    return {key: -value for key, value in terms.items()}
