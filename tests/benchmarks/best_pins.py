"""How far what nobody asked for is from the best plan that pins of single options find.

    python tests/benchmarks/best_pins.py recipes=deepseek_v3,gpt3_1t clusters=dgx_h100,dgx_b200 gpus=512 [more="train.precision=fp8"]

For each recipe and cluster: the plan without pins; the fastest one by price (search.prefer=fastest); and from there each value of each
option that the search leaves out (`tried`), on top of the best so far, as long as one gains half a percent: coordinate ascent, each step
of it a search of all meshes. A line each: recipe, cluster, GPUs, seconds of the three, the gain over the fastest, the pins, and what "Not
asked for" says of the first plan. The worst comes last. Recipes and clusters may be `largest`: the ten largest recipes; H100, B200, GB200.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache

from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.commands import arguments, command_of
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.planning import Planner, Space
from orchestrator.search.planner import faster
from orchestrator.search.unasked import seconds_of
from orchestrator.strategy.choices import shown
from orchestrator.strategy.offloading import MODULES
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, OFFERED

GAIN = 0.005
"""Share of a step that a pin must gain to be kept."""
LARGEST = (
    "gpt3_1t", "deepseek_v3", "llama3_405b", "qwen3_235b_a22b", "gpt3_175b", "gpt_oss_120b", "qwen3_next_80b_a3b", "llama3_70b",
    "llama2_70b", "mixtral_8x7b",
)  # fmt: skip
CLUSTERS = ("dgx_h100", "dgx_b200", "gb200_nvl72")
ONE_BY_ONE = (
    *(f"pin.{choice.pin}={shown(value)}" for choice, value in OFFERED if choice.name not in DEEPSPEED_OPTIONS),
    "pin.cuda_graph_modules=attn+moe_router+moe_preprocess", "pin.ddp_bucket_size=100000000", "pin.offload=true",
    "pin.offload_modules=core_attn+attn_proj", "pin.offload_modules=expert_fc1+moe_act", "train.precision_aware_optimizer=true",
)  # fmt: skip


def tried(taken: Sequence[str]) -> Iterator[str]:
    """Words with one option more than those that were taken; of the modules that are offloaded one more."""
    given = dict(word.split("=", 1) for word in taken)
    yield from (word for word in ONE_BY_ONE if word.partition("=")[0] not in given)
    before = given.get("pin.offload_modules", "").split("+")
    yield from (f"pin.offload_modules={'+'.join(filter(None, (*before, module)))}" for module in MODULES if module not in before)


@cache
def space(words: tuple[str, ...]) -> Space:
    """What is searched for these words."""
    return Planner(recipe.load([*words, "launch=none"], machine(), [*ENGINES])).space(top_k=1)


def pinned(words: Sequence[str], below_s: float) -> float | None:
    """Seconds of a step of the fastest plan for these words, where it takes less than so many; None: it does not, or there is none."""
    try:
        here = space(tuple(word for word in words if not word.startswith("pin.")))
        pins = recipe.load([*words, "launch=none"], machine(), [*ENGINES]).pins
        found = faster(here.workload, here.planned, replace(here.settings, pins=pins), below_s)
    except (OrchestratorError, InputError):
        return None
    return None if found is None else seconds_of(found)


def best(words: Sequence[str], least: float) -> tuple[float, list[str]]:
    """The least seconds that pins find, and these, in the order in which they were taken."""
    taken = list[str]()
    while True:
        step = ""
        for word in tried(taken):
            others = [other for other in taken if other.partition("=")[0] != word.partition("=")[0]]
            found = pinned([*words, *others, word], least * (1 - GAIN) if not step else least)
            if found is not None:
                least, step = found, word
        if not step:
            return least, taken
        taken = [*(other for other in taken if other.partition("=")[0] != step.partition("=")[0]), step]


def run(words: Sequence[str]) -> None:
    """Prints a line a case, and the worst."""
    given = arguments(words, ("recipes", "clusters", "gpus", "more"), required=("recipes", "clusters", "gpus"))
    worst = (0.0, "")
    for name in LARGEST if given["recipes"] == "largest" else given["recipes"].split(","):
        for cluster in CLUSTERS if given["clusters"] == "largest" else given["clusters"].split(","):
            asked = [f"recipe={name}", f"cluster={cluster}", f"gpus={given['gpus']}", *given.get("more", "").split()]
            try:
                found = Planner(recipe.load([*asked, "launch=none"], machine(), [*ENGINES])).searched()
            except OrchestratorError as error:
                print(f"{name}\t{cluster}\t{given['gpus']}\tno plan: {error}", flush=True)
                continue
            fastest = found.by_price or found.plan
            unasked, by_price = seconds_of(found.plan), seconds_of(fastest)
            least, taken = best(asked, by_price)
            said = " ".join(f"{one.key}:{seconds_of(one.plan) / unasked - 1:+.1%}" for one in found.unasked)
            line = f"{name}\t{cluster}\t{given['gpus']}\t{unasked:.4g}\t{by_price:.4g}\t{least:.4g}\t{by_price / least - 1:+.1%}\t"
            line += f"{' '.join(taken)}\t({said}; {fastest.candidate.label()})"
            print(line, flush=True)
            worst = max(worst, (by_price / least, line))
            space.cache_clear()
    print(f"worst: {worst[1]}")


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
