"""What the whole training takes: time, GPU-hours, energy and money, from a plan's predicted step."""

from __future__ import annotations

from orchestrator.hardware.catalog import POWER_W
from orchestrator.hardware.spec import Cluster
from orchestrator.plan import Plan
from orchestrator.units import format_amount, format_count
from orchestrator.values import Value

HOUR_S, DAY_S = 3600.0, 86400.0


class Budget(Value, frozen=True, kw_only=True):
    """Of `steps` steps on `num_gpus` GPUs, restarts and failures not counted. `energy_kwh` None: the power of this GPU is not known."""

    steps: int
    tokens: int
    """An encoder's and a decoder's together."""
    seconds: float
    num_gpus: int
    power_w: float | None
    """Of one GPU by its datasheet."""
    price_per_gpu_hour: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY_S

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.seconds / HOUR_S

    @property
    def energy_kwh(self) -> float | None:
        """Of the GPUs alone, at their full power: hosts, network and cooling come on top, and a GPU that waits takes less."""
        return None if self.power_w is None else self.power_w * self.gpu_hours / 1000

    @property
    def cost(self) -> float | None:
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * self.gpu_hours


def budget(plan: Plan, price_per_gpu_hour: float | None = None) -> Budget:
    """Raises ValueError for a plan without prediction."""
    if plan.predicted is None:
        raise ValueError("the plan has no prediction")
    training = plan.training
    tokens = training.steps * training.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    return Budget(
        steps=training.steps,
        tokens=tokens,
        seconds=training.steps * plan.predicted.step_time_s,
        num_gpus=plan.world_size,
        power_w=_power_w(plan.cluster),
        price_per_gpu_hour=price_per_gpu_hour,
    )


def _power_w(cluster: Cluster) -> float | None:
    """Watts of a GPU, of several types in the mean; None where one's is not known."""
    parts = [(part.num_gpus, POWER_W.get(part.gpu.name)) for part in cluster.parts] or [(1, POWER_W.get(cluster.gpu.name))]
    known = [(many, watts) for many, watts in parts if watts is not None]
    return sum(many * watts for many, watts in known) / sum(many for many, _ in known) if len(known) == len(parts) else None


def format_time(seconds: float) -> str:
    """
    >>> format_time(90), format_time(7200), format_time(36.5 * 86400), format_time(7)
    ('1.5 minutes', '2 hours', '36.5 days', '7 s')
    """
    for size, name in ((2 * DAY_S, "days"), (HOUR_S, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{format_amount(seconds / min(size, DAY_S))} {name}"
    return f"{seconds:.3g} s"


def budget_text(of: Budget, rank: str = "GPU") -> str:
    """The line of a report.

    >>> budget_text(Budget(steps=1000, tokens=10**9, seconds=86400.0 * 3, num_gpus=8, power_w=700.0, price_per_gpu_hour=2.0))
    '1,000 steps, 1B tokens: 3 days, 576 GPU-hours, 403 kWh (at the 700 W a GPU of its datasheet), cost 1,152 (at 2 a GPU-hour)'
    """
    parts = [format_time(of.seconds), f"{format_amount(of.gpu_hours)} {rank}-hours"]
    energy, cost = of.energy_kwh, of.cost
    if energy is not None:
        amount = f"{format_amount(energy / 1000)} MWh" if energy >= 1000 else f"{format_amount(energy)} kWh"
        parts.append(f"{amount} (at the {of.power_w:.0f} W a GPU of its datasheet)")
    if cost is not None:
        parts.append(f"cost {format_amount(cost)} (at {of.price_per_gpu_hour:g} a GPU-hour)")
    return f"{of.steps:,} steps, {format_count(of.tokens)} tokens: {', '.join(parts)}"
