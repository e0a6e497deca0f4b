"""Which changes of a configuration gain most: every choice changed alone, each value of it priced, and the best three together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit.build import Judge, Judged
from orchestrator.audit.reading import Setup, differing
from orchestrator.errors import InputError
from orchestrator.strategy.megatron_layout import compress, transformer_layers
from orchestrator.strategy.spec import Recompute

SHOWN: Final = 3
WORTH: Final = 0.005
"""Share of the step that a change must gain."""
MOST_TP, MOST_MICRO_BATCH = 16, 64
RECOMPUTE: Final = ("recompute", "recompute_layers", "stage_recompute")
ROUNDS: Final = 2
"""Rounds of trying every value of the three choices again, from what they are together."""
RANK: Final = attrgetter("rank")
NO_LAYOUT: Final[dict[str, Any]] = dict.fromkeys(("layout", "first_layers", "last_layers", "stage_recompute")) | {
    "ends_count": (False, False)
}


def powers(most: int) -> list[int]:
    """The powers of 2 up to `most`, from 1 on.

    >>> powers(9)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(max(1, most).bit_length())]


def alternatives(setup: Setup, judge: Judge) -> dict[str, list[Setup]]:
    """Setups with other values of each choice, by the choice's name; what must follow from a value changes with it."""
    caps, cluster = judge.engine.capabilities, judge.settings.cluster
    layers, world, axes, experts = transformer_layers(judge.model), cluster.num_gpus, caps.axes, judge.settings.architecture.experts
    found: dict[str, list[Setup]] = {}
    if "tp" in axes:
        degrees = powers(min(MOST_TP, world, max(cluster.gpus_per_node, setup.tp)))
        found["tp"] = [with_tp(setup, tp, caps.sequence_parallel, bool(experts)) for tp in degrees]
    if "pp" in axes:
        degrees = [pp for pp in range(1, min(layers, world) + 1) if layers % pp == 0 and world % pp == 0]
        found["pp"] = [with_pp(setup, pp) for pp in degrees]
    if "vpp" in axes and setup.pp > 1:
        per = layers // setup.pp
        found["vpp"] = [replace(setup, **NO_LAYOUT, vpp=vpp, microbatch_group_size_per_vp_stage=None)
                        for vpp in range(1, per + 1) if per % vpp == 0]  # fmt: skip
    if "cp" in axes and judge.settings.training.seq_length >= 2 * caps.least_sequence_part:
        found["cp"] = [replace(setup, cp=cp) for cp in powers(min(world, 16))]
    if experts and "ep" in axes:
        found["ep"] = [replace(setup, ep=ep) for ep in powers(min(world, experts[0].num_experts))]
        found["etp"] = [replace(setup, etp=etp) for etp in dict.fromkeys((1, setup.tp))]
    found["micro_batch_size"] = [replace(setup, micro_batch_size=size) for size in powers(MOST_MICRO_BATCH)]
    chunk = max(1, layers // (setup.pp * setup.vpp))
    modes: list[tuple[Recompute, int | None]] = [(mode, None) for mode in caps.recompute if mode not in caps.pinned_recompute]
    if caps.recompute_varies != "never":
        step = max(1, -(-chunk // 8))  # at most eight numbers of layers
        modes += [("full", count) for count in range(step, chunk, step)]
    found["recompute"] = [replace(setup, recompute=mode, recompute_layers=count, stage_recompute=None) for mode, count in modes]
    if not setup.megatron_fsdp:
        stages = caps.zero_stages if setup.pp == 1 else caps.zero_stages_with_pipeline
        found["zero_stage"] = [replace(setup, zero_stage=stage, zero_shard_size=None) for stage in stages]
    if caps.sequence_parallel and setup.tp > 1:
        found["sequence_parallel"] = [replace(setup, sequence_parallel=on) for on in (False, True)]
    if "overlap_grad_reduce" in caps.pinned_options:
        found["overlap_grad_reduce"] = [replace(setup, overlap_grad_reduce=True, overlap_param_gather=setup.zero_stage > 0)]
    if "moe_permute_fusion" in caps.pinned_options:
        found["moe_permute_fusion"] = [replace(setup, moe_permute_fusion=True)]
    if True in caps.options.get("tp_comm_overlap", ()) and setup.tp > 1 and setup.sequence_parallel:
        found["tp_comm_overlap"] = [replace(setup, tp_comm_overlap=True)]
    if caps.offload_optimizer:
        found["offload_optimizer"] = [replace(setup, offload_optimizer=on) for on in (False, True)]
    if setup.cp > 1 and "cp_comm_type" in caps.options:
        found["cp_comm_type"] = [replace(setup, cp_comm_type=kind) for kind in caps.options["cp_comm_type"]]
    a = judge.settings.architecture
    by_layout = a.stack == "decoder" and "single_part_layers" not in a.features()
    if caps.uneven_stages and setup.pp > 1 and not setup.by_deepspeed_pipeline and by_layout:
        heads = a.mtp_num_layers
        found["layout"] = [replace(setup, **(NO_LAYOUT | {"layout": text})) for text in layouts(layers, setup.pp * setup.vpp, heads)]
    return {name: [one for one in dict.fromkeys(others) if one != setup] for name, others in found.items()}


def with_tp(setup: Setup, tp: int, sequence_parallel: bool, with_experts: bool) -> Setup:
    """The setup with this tp. Experts keep their own degree unless that was tp's; sequence parallelism comes with the first tp."""
    on = (setup.sequence_parallel or setup.tp == 1) and sequence_parallel and tp > 1
    return replace(setup, tp=tp, etp=tp if setup.etp == setup.tp and with_experts else setup.etp, sequence_parallel=on,
                   tp_comm_overlap=setup.tp_comm_overlap and on)  # fmt: skip


def with_pp(setup: Setup, pp: int) -> Setup:
    """The setup with `pp` stages, whose layers are divided evenly, without interleaving."""
    by_deepspeed = setup.by_deepspeed_pipeline and pp > 1
    return replace(setup, **NO_LAYOUT, pp=pp, vpp=1, microbatch_group_size_per_vp_stage=None, by_deepspeed_pipeline=by_deepspeed)


def layouts(layers: int, chunks: int, prediction_heads: int) -> Iterator[str]:
    """Layouts whose first and last chunk have up to two layers fewer than the others.

    >>> list(layouts(6, 4, 0))
    ['Et*2|t*2|t*2|L', 'Et|t*2|t*2|tL', 'E|t*2|t*2|t*2L']
    """
    done = set()
    for fewer in range(1, 4):
        for last in range(min(fewer, 2), -1, -1):
            first = fewer - last
            if first > 2:
                continue
            counted = layers + first + last
            sizes = [counted // chunks + (index < counted % chunks) for index in range(chunks)]
            sizes[0], sizes[-1] = sizes[0] - first, sizes[-1] - last
            if min(sizes) < 0 or tuple(sizes) in done:
                continue
            done.add(tuple(sizes))
            letters = ["t" * size for size in sizes]
            letters[0], letters[-1] = "E" + letters[0], letters[-1] + "m" * prediction_heads + "L"
            yield compress(letters)


def legal_setups(judge: Judge, setups: Iterable[Setup]) -> Iterator[Judged]:
    """The setups that are plans at all and break no rule, each with its price."""
    for setup in setups:
        with suppress(InputError):
            if not (found := judge.judged(setup)).rule:
                yield found


def is_better(judged: Judged, base: Judged | None) -> bool:
    """Whether the change is worth saying: it mends a rule, makes the plan fit or lack less, or gains time while it fits."""
    if base is None or base.rule:
        return not judged.rule
    if base.lacking_bytes:
        return judged.lacking_bytes < base.lacking_bytes
    return not judged.lacking_bytes and judged.step_time_s < base.step_time_s * (1 - WORTH)


def best_changes(setup: Setup, base: Judged | None, judge: Judge) -> tuple[tuple[Judged, ...], Judged | None]:
    """The three choices whose change alone gains most (all, where there is no legal `base` to gain on), and the best that the three give
    together; None where one is all there is."""
    by_choice = {
        name: [judged for judged in legal_setups(judge, others) if is_better(judged, base)]
        for name, others in alternatives(setup, judge).items()
    }
    bests = sorted(((name, min(found, key=RANK)) for name, found in by_choice.items() if found), key=lambda best: best[1].rank)
    top, found = dict(bests[:SHOWN]), bests if base is None else bests[:SHOWN]
    return tuple(judged for _, judged in found), together(setup, top, judge) if len(top) > 1 else None


def together(setup: Setup, top: Mapping[str, Judged], judge: Judge) -> Judged | None:
    """The best setup of several choices together: from the best one alone, the others' changes over it where they help, then every value of
    these choices again. None: it is no better than the best one alone."""
    alone, *others = top.values()
    best = alone
    for other in others:
        changed = {name: getattr(other.setup, name) for name in differing(setup, other.setup)}
        best = min([best, *legal_setups(judge, [replace(best.setup, **changed)])], key=RANK)
    for _ in range(ROUNDS):
        before = best
        for name in top:
            best = min([best, *legal_setups(judge, alternatives(best.setup, judge).get(name, []))], key=RANK)
        if best is before:
            break
    return best if best.rank < alone.rank else None


def said(before: Setup, after: Setup) -> str:
    """What differs, as a reader says it.

    >>> said(Setup(engine="megatron", tp=2), Setup(engine="megatron", tp=4, sequence_parallel=True))
    'sequence_parallel off -> on, tp 2 -> 4'
    """
    differ = [name for name in Setup.__struct_fields__ if name in differing(before, after) - {"recompute_layers", "recompute"}]
    parts = [f"{name} {_word(name, getattr(before, name))} -> {_word(name, getattr(after, name))}" for name in differ]
    one, other = recompute_text(before), recompute_text(after)
    if one != other:
        parts.append(f"recompute {one} -> {other}")
    return ", ".join(parts)


def recompute_text(setup: Setup) -> str:
    """The recompute of a setup in words: "full(4 of a chunk)", "selective", "none"."""
    return f"full({setup.recompute_layers} of a chunk)" if setup.recompute == "full" and setup.recompute_layers else setup.recompute


def choice_text(name: str, setup: Setup) -> str:
    """One choice of a setup in words.

    >>> choice_text("tp", Setup(engine="megatron", tp=2)), choice_text("recompute_layers", Setup(engine="megatron", recompute="full"))
    ('tp=2', 'recompute=full')
    """
    if name in RECOMPUTE:
        return f"recompute={recompute_text(setup)}"
    return f"{name}={_word(name, getattr(setup, name))}"


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "-".join(str(part) for part in value)
    return str(value) if value is not None else "even" if name in NO_LAYOUT else "none"
