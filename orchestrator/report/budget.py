"""What the whole training takes: time, GPU-hours, energy and money, and at what rate, from a plan's predicted step and its interval."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from orchestrator.hardware.catalog import POWER_W
from orchestrator.hardware.spec import Cluster
from orchestrator.plan import Plan
from orchestrator.units import format_amount, format_count
from orchestrator.values import Value

HOUR_S, DAY_S = 3600.0, 86400.0
FIGURES: Final = ("days", "gpu_hours", "energy_kwh", "cost", "tokens_per_s", "mfu")
"""Figures of a Budget that answers state."""
RATES: Final = ("tokens_per_s", "tokens_per_s_per_gpu", "flops_per_gpu", "mfu")
"""Figures that are the smaller the longer a step takes."""


class Budget(Value, frozen=True, kw_only=True):
    """What `steps` steps on `num_gpus` GPUs take: days, GPU-hours, energy and cost with failures where `goodput` is known, `seconds` and
    rates without. `energy_kwh` None: the power of this GPU is not known."""

    steps: int
    tokens: int
    """Tokens of these steps, an encoder's and a decoder's together."""
    seconds: float
    num_gpus: int
    power_w: float | None
    """Watts of one GPU by its datasheet; None: not known."""
    price_per_gpu_hour: float | None
    off: tuple[float, float] | None = None
    """The ends of the step's 90% interval over the predicted step; None: nothing like the plan was measured."""
    tokens_per_s_per_gpu: float = 0.0
    flops_per_gpu: float = 0.0
    """Model FLOP/s of one GPU."""
    peak_flops: float | None = None
    """FLOP/s of a GPU in this precision."""
    done: int = 0
    """Steps of the training before these, which a checkpoint has done."""
    goodput: float | None = None
    """The share of the time that trains, with saves and failures (report/failures.py); None: nobody said how often there are any."""
    save_every: int = 0
    """Steps between the saves that the goodput has."""

    @property
    def whole_s(self) -> float:
        """Seconds from the first step to the end of the last, with saves and failures where they are known."""
        return self.seconds / (1.0 if self.goodput is None else self.goodput)

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all GPUs together."""
        return self.tokens_per_s_per_gpu * self.num_gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s of a GPU over its peak; causal attention counts as half, recompute not at all (model/flops.py)."""
        return self.flops_per_gpu / self.peak_flops if self.peak_flops else None

    @property
    def days(self) -> float:
        return self.whole_s / DAY_S

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.whole_s / HOUR_S

    @property
    def energy_kwh(self) -> float | None:
        """Kilowatt-hours of the GPUs alone, at their full power: hosts, network and cooling come on top, and a GPU that waits takes less.
        None: the power is not known."""
        return None if self.power_w is None else self.power_w * self.gpu_hours / 1000

    @property
    def cost(self) -> float | None:
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * self.gpu_hours

    def interval(self, figure: str, times: float = 1.0) -> tuple[float, float] | None:
        """The 90% interval (low, high) of the figure with this name, `times` as much; None where the step has none, or it is not known.

        >>> Budget(steps=1, tokens=1, seconds=DAY_S, num_gpus=1, power_w=None, price_per_gpu_hour=None, off=(0.5, 2.0)).interval("days")
        (0.5, 2.0)
        """
        value = getattr(self, figure)
        if value is None or self.off is None:
            return None
        low, high = self.off
        return (value * times / high, value * times / low) if figure in RATES else (value * times * low, value * times * high)

    def words(self, figure: str, write: Callable[[float], str], times: float = 1.0) -> tuple[str, str]:
        """The figure, `times` as much, and its interval by three digits of what is written, without the unit where that is the same:
        ("60 s", "53 to 99"); or ("60 s", "").

        >>> of = Budget(steps=1, tokens=1, seconds=1234.5 * DAY_S, num_gpus=1, power_w=None, price_per_gpu_hour=None, off=(0.9, 1.5))
        >>> of.words("seconds", format_time)
        ('1,234 days', '1,110 to 1,850')
        """
        value, *ends = (write(each) for each in (getattr(self, figure) * times, *(self.interval(figure, times) or ())))
        ends = [_NUMBER.sub(lambda found: _three_digits(found[0]), end, count=1) for end in ends]
        alike = len({word.partition(" ")[2] for word in (value, *ends)}) == 1
        return value, " to ".join(end.partition(" ")[0] if alike else end for end in ends)

    def said(self, figure: str, write: Callable[[float], str], unit: str = "", times: float = 1.0) -> str:
        """The figure in one text: "60 s a step (90%: 53 to 99)", with `unit` " a step"."""
        value, ends = self.words(figure, write, times)
        return f"{value}{unit} (90%: {ends})" if ends else f"{value}{unit}"

    def figures(self) -> dict[str, Any]:
        """The figures as JSON has them: each by name, and its 90% interval as NAME_90; and the goodput, None where it is not known."""
        each = {name + end: get(name) for name in FIGURES for end, get in (("", self.__getattribute__), ("_90", self.interval))}
        return {**each, "goodput": self.goodput}


def budget(plan: Plan, price_per_gpu_hour: float | None = None, done: int = 0) -> Budget:
    """What the whole training takes, or what is left of it after `done` steps where anything is. Raises ValueError for a plan without
    prediction."""
    predicted, training = plan.prediction, plan.training
    done = done if done < training.steps else 0
    steps = training.steps - done
    tokens = steps * training.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    ends = predicted.interval
    return Budget(
        steps=steps,
        tokens=tokens,
        seconds=steps * predicted.step_time_s,
        num_gpus=plan.world_size,
        power_w=_power_w(plan.cluster),
        price_per_gpu_hour=price_per_gpu_hour,
        off=(ends[0] / predicted.step_time_s, ends[1] / predicted.step_time_s) if ends else None,
        tokens_per_s_per_gpu=predicted.tokens_per_s_per_gpu,
        flops_per_gpu=predicted.model_flops_per_gpu,
        peak_flops=plan.cluster.peak_flops(training.precision),
        done=done,
    )


_NUMBER: Final = re.compile(r"[0-9][0-9,.]*")


def _three_digits(number: str) -> str:
    """The written number with three digits and the commas that it had.

    >>> _three_digits("1,079"), _three_digits("8654"), _three_digits("53.1")
    ('1,080', '8650', '53.1')
    """
    rounded = float(f"{float(number.replace(',', '')):.3g}")
    return number if rounded < 1000 else f"{rounded:,.0f}" if "," in number else f"{rounded:.0f}"


def _power_w(cluster: Cluster) -> float | None:
    """Watts of a GPU, of several types in the mean; None where one's is not known."""
    parts = [(part.num_gpus, POWER_W.get(part.gpu.name)) for part in cluster.parts] or [(1, POWER_W.get(cluster.gpu.name))]
    known = [(many, watts) for many, watts in parts if watts is not None]
    return sum(many * watts for many, watts in known) / sum(many for many, _ in known) if len(known) == len(parts) else None


def format_time(seconds: float) -> str:
    """Seconds in the largest unit that keeps the number readable, up to days.

    >>> format_time(90), format_time(7200), format_time(36.5 * 86400), format_time(7)
    ('1.5 minutes', '2 hours', '36.5 days', '7 s')
    """
    for size, name in ((2 * DAY_S, "days"), (HOUR_S, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{format_amount(seconds / min(size, DAY_S))} {name}"
    return f"{seconds:.3g} s"


def budget_text(of: Budget, rank: str = "GPU", *, brief: bool = False) -> str:
    """The line of a report; `brief`: without the energy.

    >>> budget_text(Budget(steps=1000, tokens=10**9, seconds=86400.0 * 3, num_gpus=8, power_w=700.0, price_per_gpu_hour=2.0))
    '1,000 steps, 1B tokens: 3 days, 576 GPU-hours, 403 kWh (at the 700 W a GPU of its datasheet), cost 1,152 (at 2 a GPU-hour)'
    """
    failing = (
        "" if of.goodput is None else f" with failures and train.save_every={of.save_every} ({100 * of.goodput:.1f}% of the time trains)"
    )
    parts = [of.said("whole_s", format_time) + failing, of.said("gpu_hours", format_amount, f" {rank}-hours")]
    if of.energy_kwh is not None and not brief:
        parts.append(f"{of.said('energy_kwh', format_energy)} (at the {of.power_w:.0f} W a GPU of its datasheet)")
    if of.cost is not None:
        parts.append(f"cost {of.said('cost', format_amount)} (at {of.price_per_gpu_hour:g} a GPU-hour)")
    left = f" left of {of.steps + of.done:,}" if of.done else ""
    return f"{of.steps:,} steps{left}, {format_count(of.tokens)} tokens: {', '.join(parts)}"


def format_energy(kwh: float) -> str:
    """An amount of energy in kWh, from 1,000 on in MWh.

    >>> format_energy(403.2), format_energy(2000)
    ('403 kWh', '2 MWh')
    """
    return f"{format_amount(kwh / 1000)} MWh" if kwh >= 1000 else f"{format_amount(kwh)} kWh"
