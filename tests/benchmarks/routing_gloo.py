"""A benchmark, not a test: is the priced slowdown of uneven routing the measured one? Two gloo ranks, each with half of the experts.

    python tests/benchmarks/routing_gloo.py [recipe=mixtral_tiny] [out=FOLDER] [steps=36] [keys='KEY=VALUE;KEY=VALUE']

In one training steps alternate between even routing, the router's own, and half of all tokens sent to the first rank's experts alone, so
that what else this machine does hits all three alike; nothing but the routing differs (the router's logits get a constant that no gradient
sees). The trace of each kind is what model.routing= prices.

Measured is the step's critical path in CPU seconds: ranks wait for each other in every exchange of tokens, so the path is, from one
exchange to the next, the rank that computed longest. On idle cores that is the step without its waiting for transfers; on a loaded machine
it is what the step would be on idle ones. Wall seconds stand beside it. Priced is the same ratio twice: by the shipped figures of a CPU
rank, and by the rate of an expert's product and of its activation that one rank measures first, what an even step takes beyond that being
the host's.

On 2026-11-22, 2 cores of an AMD EPYC, a load of 17 to 35 from other work, mixtral_tiny: own routing (1.20 of an even share) takes 1.045
times as long as even routing, priced 1.077 (1.103 as shipped); skewed (1.50) 1.213, priced 1.194 (1.258); an earlier run 1.046 and 1.147,
priced 1.108 and 1.258 as shipped. Shipped figures are too steep for so small a model: a product runs at 82 GFLOP/s where they say 45 (ranks
that share a core), and they know no time of the host, which is most of its step. With hidden size 256 and experts of 1,024 the experts are
most of it: own (1.55) 1.369, priced 1.405 as shipped; skewed 1.393, priced 1.366.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from orchestrator.commands import command, usage

KINDS: Final = ("even", "own", "skewed")
WARM: Final = 6
"""Steps that are not counted."""
FAR: Final = 100.0
"""What a logit gets so that its expert is chosen."""


# ------------------------------------------------------------------------------------------------------------- a rank


def rates(rows: int, hidden: int, width: int) -> dict[str, float]:
    """FLOP/s of an expert's product and bytes/s of its activation, by one thread, in CPU seconds: the best of many."""
    import torch

    tokens, weight = torch.randn(rows, hidden), torch.randn(hidden, width)
    product = tokens @ weight

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(60):
            begin = time.thread_time()
            work()
            found.append(time.thread_time() - begin)
        return quiet(found)

    multiplied = seconds(lambda: tokens @ weight)
    return {"flops": 2 * rows * hidden * width / multiplied, "bandwidth": 3 * 4 * rows * width / seconds(lambda: product * product)}


def rank_main() -> None:
    """The worker of engine=megatron with other routing in two of three steps, and a clock at every exchange of tokens."""
    import torch
    import torch.distributed as dist

    from orchestrator.cpu import eager  # noqa: F401  # isort: skip  (before megatron-core)
    from megatron.core.transformer.moe.router import TopKRouter

    from orchestrator.workers import loop, megatron

    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        Path(os.environ["ROUTING_OUT"]).with_name("rates.json").write_text(json.dumps(rates(*json.loads(os.environ["ROUTING_SHAPE"]))))
    marks: list[float] = []
    exchange = dist.all_to_all_single

    def marked(*given: Any, **named: Any) -> Any:
        marks.append(time.thread_time())
        return exchange(*given, **named)

    torch.distributed.all_to_all_single = marked
    state = {"kind": KINDS[0]}

    def wanted(tokens: int, experts: int, topk: int) -> torch.Tensor:
        """(tokens, topk) the experts of each token: as many of either half; skewed, every second token's are all in the first."""
        half = experts // 2
        turn = torch.arange(tokens)[:, None] * ((topk + 1) // 2) + torch.arange(topk) // 2
        side = torch.arange(topk).expand(tokens, topk).clone() % 2
        chosen = turn % half + side * half
        if state["kind"] == "skewed":
            chosen[::2] = (torch.arange(0, tokens, 2)[:, None] * topk // 2 + torch.arange(topk)) % half
        return chosen

    def directed(router: TopKRouter) -> None:
        gating = router.gating

        def biased(hidden: torch.Tensor) -> torch.Tensor:
            logits = gating(hidden)
            if state["kind"] == "own":
                return logits
            flat = logits.reshape(-1, logits.shape[-1])
            constant = torch.zeros_like(flat).scatter_(1, wanted(len(flat), flat.shape[1], router.topk), FAR)
            return logits + constant.reshape(logits.shape)

        router.gating = biased  # type: ignore[method-assign]

    def build(plan: Any, engine: dict[str, Any], device: torch.device) -> Any:
        trainer = megatron.build(plan, engine, device)
        for chunk in trainer.chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    directed(module)
        passes, update, seen = trainer.forward_backward, trainer.update, {"step": 0, "begin": 0.0}

        def forward_backward(microbatches: Any) -> Any:
            state["kind"] = KINDS[seen["step"] % len(KINDS)]
            dist.barrier()
            seen["begin"] = time.perf_counter()
            marks[:] = [time.thread_time()]
            return passes(microbatches)

        def updated(lr: float) -> Any:
            result = update(lr)
            marks.append(time.thread_time())
            mine = [after - before for before, after in pairwise(marks)]
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, (time.perf_counter() - seen["begin"], mine))
            seen["step"] += 1
            if dist.get_rank() == 0:
                path = sum(max(parts) for parts in zip(*(found for _, found in every), strict=True))
                row = {"step": seen["step"], "kind": state["kind"], "path_s": path, "wall_s": max(wall for wall, _ in every)}
                with Path(os.environ["ROUTING_OUT"]).open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
            return result

        trainer.forward_backward, trainer.update = forward_backward, updated
        return trainer

    loop.main(build)


# ------------------------------------------------------------------------------------------------------------- the judge


def quiet(seconds: Iterable[float]) -> float:
    """The lower quartile: other work on the machine only ever adds."""
    return statistics.quantiles(seconds, n=4)[0]


def step_here(found: Any, known: dict[str, float]) -> float:
    """Seconds of the plan's step by the rates that were measured beside it, with transfers that take no time: a path in CPU seconds has
    none."""
    from msgspec.structs import replace

    from orchestrator.cost.price import CostModel

    assert found.space is not None
    (engine,), workload = found.space.planned, found.space.workload
    c, cluster = engine.calibration, workload.cluster
    bandwidth = known["bandwidth"] / c.memory_efficiency
    gpu = replace(cluster.gpu, peak_flops={"fp32": known["flops"] / c.gemm_efficiency}, memory_bandwidth=bandwidth)
    levels = tuple(replace(level, bandwidth=1e18, latency=0.0) for level in cluster.levels)
    here = replace(workload, cluster=replace(cluster, gpu=gpu, levels=levels))
    return CostModel(here, engine.traits, replace(c, step_overhead_s=0.0)).price(found.plan.candidate, found.plan.stages).step_time_s


def main(words: Sequence[str]) -> int:
    from orchestrator import planning, recipe
    from orchestrator.commands import arguments
    from orchestrator.detect import machine
    from orchestrator.engines import ENGINES
    from orchestrator.folder import write_folder
    from orchestrator.job import File
    from orchestrator.model.routing import times as times_of
    from orchestrator.plan import to_json
    from orchestrator.planning import Planner

    given = arguments(words, ("recipe", "out", "steps", "keys"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="routing_gloo_"))
    folder.mkdir(parents=True, exist_ok=True)
    keys = [f"recipe={given.get('recipe', 'mixtral_tiny')}", "gpus=2", "engine=megatron", "pin.ep=2", "pin.tp=1", "pin.pp=1", "pin.cp=1"]
    keys += ["pin.recompute=none", *filter(None, given.get("keys", "").split(";"))]

    def found(*more: str) -> planning.Found:
        return Planner(recipe.load((*keys, *more), machine({}), tuple(ENGINES))).fastest()

    plan = found("train.trace_routing=true", f"train.steps={given.get('steps', '36')}").plan
    out = folder / "run"
    write_folder(out, [File(path="plan.json", content=to_json(plan)), *ENGINES["megatron"].translate(plan).files])
    times = folder / "times.jsonl"
    (experts,) = plan.model.experts
    rows_each = plan.micro_batch_size * plan.training.seq_length * experts.topk * 2 // experts.num_experts
    shape = [rows_each, plan.model.hidden_size, 2 * experts.ffn_hidden_size]
    environment = {**os.environ, "ROUTING_OUT": str(times), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    environment["ROUTING_SHAPE"] = json.dumps(shape)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, __file__, "rank", "--plan", str(out / "plan.json"), "--out", str(out)], check=True, env=environment)

    rows = [json.loads(line) for line in times.read_text().splitlines()][WARM:]
    trace = [json.loads(line) for line in (out / "routing.jsonl").read_text().splitlines()]
    seconds = {kind: {key: quiet(row[key] for row in rows if row["kind"] == kind) for key in ("path_s", "wall_s")} for kind in KINDS}
    even = seconds["even"]
    print(f"{plan.candidate.label()}: even routing {even['path_s']:.3f} CPU s a step, {even['wall_s']:.3f} s by the clock")
    known, plain = json.loads((folder / "rates.json").read_text()), found()
    print(f"an expert's product {known['flops'] / 1e9:.0f} GFLOP/s, its activation {known['bandwidth'] / 1e9:.1f} GB/s")
    for kind in KINDS[1:]:
        steps = {row["step"] for row in rows if row["kind"] == kind}
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in trace if row["step"] in steps))
        uneven = found(f"model.routing={path}")
        assert uneven.space is not None
        cost = uneven.space.prices[0].unevenness(uneven.plan)
        assert cost is not None
        here = step_here(uneven, known), step_here(plain, known)
        skew = times_of(cost.routing.busiest, cost.parts)
        measured = {key: seconds[kind][key] / even[key] for key in even}
        said = f"measured {measured['path_s']:.3f} ({measured['wall_s']:.3f} by the clock) of even routing"
        rest = even["path_s"] - here[1]  # what an even step takes beside its layers: the host's, whatever the routing
        priced = (here[0] + rest) / (here[1] + rest)
        print(f"{kind}: the busier rank has {skew:.2f} of an even share; {said}, priced {priced:.3f}", end=" ")
        print(f"with this machine's rates, {cost.step_s / cost.even_s:.3f} as shipped")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        rank_main()
    else:
        sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
