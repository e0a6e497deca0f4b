"""How far what nobody asked for is from the best plan that pins of single options find.

    python tests/benchmarks/best_pins.py recipes=deepseek_v3,gpt3_1t clusters=dgx_h100,dgx_b200 gpus=512 [more="train.precision=fp8"]

For each recipe and cluster: the plan without pins, then with each value of each option that the search leaves out or offers
(`strategy/spec.py`, OFFERED, and offloads by module), one by one on top of the best so far, as long as one gains half a percent. A line
each: recipe, cluster, GPUs, seconds without pins and with the best ones, the ratio, the pins. The worst comes last. Some ten to thirty
searches a line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator import recipe
from orchestrator.commands import arguments, command_of
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import OrchestratorError
from orchestrator.planning import Planner
from orchestrator.strategy.choices import shown
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, OFFERED

GAIN = 0.005
"""Share of a step that a pin must gain to be kept."""
TRIED = (
    *(f"pin.{choice.pin}={shown(value)}" for choice, value in OFFERED if choice.name not in DEEPSPEED_OPTIONS),
    *(f"pin.offload_modules={modules}" for modules in ("qkv_linear", "core_attn+attn_proj", "moe_act", "expert_fc1+moe_act")),
    "pin.cross_entropy_loss_fusion=true", "train.precision_aware_optimizer=true",
)  # fmt: skip


def seconds(words: Sequence[str]) -> float | None:
    """Seconds of a step of the fastest plan for these words; None: there is none."""
    try:
        found = Planner(recipe.load([*words, "launch=none", "engine=megatron"], machine(), [*ENGINES])).searched()
    except OrchestratorError:
        return None
    return None if found.plan.predicted is None else found.plan.predicted.step_time_s


def best(words: Sequence[str], unasked: float) -> tuple[float, list[str]]:
    """The least seconds that pins find, and these, in the order in which they were taken."""
    least, taken = unasked, list[str]()
    while True:
        names = {pin.partition("=")[0] for pin in taken}
        open_pins = [pin for pin in TRIED if pin.partition("=")[0] not in names]
        timed = [(found, pin) for pin in open_pins if (found := seconds([*words, *taken, pin])) is not None]
        found, pin = min(timed, default=(least, ""))
        if found > least * (1 - GAIN):
            return least, taken
        least, taken = found, [*taken, pin]


def run(words: Sequence[str]) -> None:
    """Prints a line a case, and the worst."""
    given = arguments(words, ("recipes", "clusters", "gpus", "more"), required=("recipes", "clusters", "gpus"))
    worst = (0.0, "")
    for name in given["recipes"].split(","):
        for cluster in given["clusters"].split(","):
            asked = [f"recipe={name}", f"cluster={cluster}", f"gpus={given['gpus']}", *given.get("more", "").split()]
            unasked = seconds(asked)
            if unasked is None:
                print(f"{name}\t{cluster}\t{given['gpus']}\tno plan", flush=True)
                continue
            least, taken = best(asked, unasked)
            line = f"{name}\t{cluster}\t{given['gpus']}\t{unasked:.4g}\t{least:.4g}\t{unasked / least - 1:+.1%}\t{' '.join(taken)}"
            print(line, flush=True)
            worst = max(worst, (unasked / least, line))
    print(f"worst: {worst[1]}")


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
