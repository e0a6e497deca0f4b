"""A benchmark, not a test: is the priced slowdown of uneven routing the measured one? Two gloo ranks, each with half of the experts.

    python tests/benchmarks/routing_gloo.py [recipe=mixtral_tiny] [out=FOLDER] [steps=36] [keys=train.seq_length=128,...]

In one training steps alternate between even routing, the router's own, and half of all tokens sent to the first rank's experts alone, so
that what else this machine does hits all three alike; nothing but the routing differs (the router's logits get a constant that no gradient
sees). The trace of each kind is what model.routing= prices.

Measured is the step's critical path in CPU seconds: ranks wait for each other in every exchange of tokens, so the path is, from one
exchange to the next, the rank that computed longest. On idle cores that is the step without its waiting for transfers; on a loaded machine
it is what the step would be on idle ones. Wall seconds stand beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

KINDS: Final = ("even", "own", "skewed")
WARM: Final = 6
"""Steps that are not counted."""
FAR: Final = 100.0
"""What a logit gets so that its expert is chosen."""


# ------------------------------------------------------------------------------------------------------------- a rank


def rank_main() -> None:
    """The worker of engine=megatron with other routing in two of three steps, and a clock at every exchange of tokens."""
    import torch
    import torch.distributed as dist

    from orchestrator.workers import eager  # noqa: F401  # isort: skip  (before megatron-core)
    from megatron.core.transformer.moe.router import TopKRouter

    from orchestrator.workers import loop, megatron

    torch.set_num_threads(1)
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


def main(words: Sequence[str]) -> int:
    from orchestrator import planning, recipe
    from orchestrator.commands import arguments
    from orchestrator.detect import machine
    from orchestrator.engines import ENGINES
    from orchestrator.folder import write_folder
    from orchestrator.job import File
    from orchestrator.model.routing import times as times_of
    from orchestrator.plan import to_json

    given = arguments(words, ("recipe", "out", "steps", "keys"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="routing_gloo_"))
    folder.mkdir(parents=True, exist_ok=True)
    keys = [f"recipe={given.get('recipe', 'mixtral_tiny')}", "gpus=2", "engine=megatron", "pin.ep=2", "pin.tp=1", "pin.pp=1", "pin.cp=1"]
    keys += ["pin.recompute=none", *filter(None, given.get("keys", "").split(";"))]

    def found(*more: str) -> planning.Found:
        return planning.fastest(recipe.load((*keys, *more), machine({}), tuple(ENGINES)))

    plan = found("train.trace_routing=true", f"train.steps={given.get('steps', '36')}").plan
    out = folder / "run"
    write_folder(out, [File(path="plan.json", content=to_json(plan)), *ENGINES["megatron"].translate(plan).files])
    times = folder / "times.jsonl"
    environment = {**os.environ, "ROUTING_OUT": str(times), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, __file__, "rank", "--plan", str(out / "plan.json"), "--out", str(out)], check=True, env=environment)

    rows = [json.loads(line) for line in times.read_text().splitlines()][WARM:]
    trace = [json.loads(line) for line in (out / "routing.jsonl").read_text().splitlines()]
    seconds = {kind: {key: quiet(row[key] for row in rows if row["kind"] == kind) for key in ("path_s", "wall_s")} for kind in KINDS}
    even = seconds["even"]
    print(f"{plan.candidate.label()}: even routing {even['path_s']:.3f} CPU s a step, {even['wall_s']:.3f} s by the clock")
    for kind in KINDS[1:]:
        steps = {row["step"] for row in rows if row["kind"] == kind}
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in trace if row["step"] in steps))
        uneven = found(f"model.routing={path}")
        assert uneven.asked is not None
        (engine,) = uneven.asked.planned
        cost = planning.unevenness(uneven.plan, engine.traits, engine.calibration)
        assert cost is not None
        skew = times_of(cost.routing.busiest, cost.parts)
        measured = {key: seconds[kind][key] / even[key] for key in even}
        said = f"measured {measured['path_s']:.3f} ({measured['wall_s']:.3f} by the clock) of even routing"
        print(f"{kind}: the busier rank has {skew:.2f} of an even share; {said}, priced {cost.step_s / cost.even_s:.3f}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        rank_main()
    else:
        sys.exit(main(sys.argv[1:]))
