"""An audit as a person reads it."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from typing import Final, TextIO, cast

from rich.console import Console

from orchestrator.audit.audit import Audit, Change
from orchestrator.audit.build import Judged
from orchestrator.audit.reading import differing
from orchestrator.report import text
from orchestrator.screen import FILE_WIDTH, Trimmed
from orchestrator.strategy.spec import CHOICES
from orchestrator.units import format_amount, format_bytes, format_seconds

SHOWN_LENGTH = 90
"""Characters of a setting beside; --json has all of it."""
MOST_LISTED: Final = 24
"""Settings without memory of one kind that are listed; of more their number is said."""
SEARCHED: Final = "over every choice that needs no pin"
LISTED: Final = {
    "slower": "with time of which the prediction knows nothing, and no memory",
    "result": "of what is trained, without time or memory",
    "beside": "of data, logs and checkpoints",
}
"""What is said of a list of settings."""


class PrintedAudit(Audit):
    """An audit whose text is what the command prints."""

    def __repr__(self) -> str:
        said = {True: "fits", False: "does not fit", None: "may not fit"}[self.fits] if not self.problem else "is not legal"
        return f"<Audit of {self.name}: {said}>"

    def __str__(self) -> str:
        written = io.StringIO()
        show(Console(file=cast(TextIO, Trimmed(written)), width=FILE_WIDTH), self)
        return written.getvalue()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def show(console: Console, audit: Audit) -> None:
    """What the file is, whether it would run, what it would take, and what gains most."""

    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    reading, judged = audit.reading, audit.judged
    say(f"{audit.name}: {reading.format}")
    say(audit.settings.why_cluster)
    if reading.otherwise:
        say(f"otherwise  {reading.otherwise}: its seconds are too few, its memory may not do, and no change is proposed")
    but = ", but for what is unknown here" if reading.unknown else ""
    verdict = f"can't be told: {audit.untold}" if audit.untold else f"NO: {audit.problem}" if audit.problem else f"yes{but}"
    say(f"legal      {verdict}")
    if judged is not None:
        say(f"memory     {fits_text(audit, judged)}")
    for line in (*left_lines(audit), *(f"remark     {remark}" for remark in audit.remarks)):
        say(line)
    if judged is not None:
        brief = not audit.settings.verbose
        console.print(text.plan_table(judged.plan, audit.judge.model, judged.limit, brief=brief))
        console.print(text.price_table(judged.plan, judged.limit, brief=brief))
    for line in change_lines(audit):
        say(line)


def fits_text(audit: Audit, judged: Judged) -> str:
    """The tightest rank against what a GPU has for it, and the chance that it runs out."""
    stage = audit.tightest_stage or 0
    where = f"ranks of stage {stage} ({text.ranks_of(judged.plan, stage)})" if judged.plan.pp > 1 else "every rank"
    need = f"{format_bytes(judged.peak_memory_bytes)} of {format_bytes(judged.limit.usable)} usable, {where}"
    if audit.fits:
        return f"fits: {need}{chance_text(judged)}"
    if not judged.lacking_bytes:
        unknown = audit.heavier[0].partition("=")[0].split()[0] if audit.heavier else ""
        by = f"a price that knows nothing of {unknown}" if unknown else "the price of a part of it"
        return f"can't be told: {need}, by {by}"
    lacks = f"lacks {format_bytes(judged.lacking_bytes)}: {need}{chance_text(judged)}"
    if audit.fits is False:
        return f"DOES NOT FIT, {lacks}"
    if (longest := audit.reading.longest) and not audit.not_priced:
        length = judged.plan.training.seq_length
        return f"can't be told: with samples that all have the {length} tokens of {longest} it {lacks}; train.seq_length= says their own"
    if not audit.not_priced:
        return f"may not fit, {lacks}"
    first, *others = (one.split()[0] for one in audit.not_priced)
    settings = f"{first} and {_counted(others, 'more setting')}" if others else first
    return f"can't be told: by a price that knows nothing of {settings} it {lacks}"


def chance_text(judged: Judged) -> str:
    """The chance of running out of memory, as what follows the bytes that are needed."""
    return "" if judged.chance is None else f"; {format_amount(100 * judged.chance, 2)}% chance of running out"


def left_lines(audit: Audit) -> Iterator[str]:
    """What of the file is not in the plan, and what was assumed; long lists that change no memory as their number."""
    reading = audit.reading
    for flag in reading.unknown:
        yield f"unknown    {flag}"
    for what in reading.assumed:
        yield f"assumed    {what}"
    for flags in by_section(reading.unpriced):
        yield f"unpriced   {flags}: the prediction knows nothing of {'them' if ', ' in flags else 'it'}"
    for title, found in (("slower", reading.slower), ("result", reading.result), ("beside", reading.beside)):
        if found:
            listed = ", ".join(map(_short, found)) if len(found) <= MOST_LISTED else "--json lists them"
            yield f"{title:<10} {_counted(found, 'setting')} {LISTED[title]}: {listed}"


def by_section(flags: Iterable[str]) -> list[str]:
    """The settings, those of one section of a file after its name.

    >>> by_section(['zero.offload.device="cpu"', "bf16.x=1", "zero.offload.size=1e8", "swiglu", "seed=1.5"])
    ['zero.offload: device="cpu", size=1e8', 'bf16.x=1', 'swiglu, seed=1.5']
    """
    sections: dict[str, list[str]] = {}
    for flag in flags:
        path, equals, value = flag.partition("=")
        section, _, name = path.rpartition(".")
        sections.setdefault(section, []).append(_short(f"{name}{equals}{value}"))
    joined = {section: ", ".join(names) for section, names in sections.items()}
    return [f"{section}{': ' if len(sections[section]) > 1 else '.'}{flags}" if section else flags for section, flags in joined.items()]


def _short(flag: str) -> str:
    return flag if len(flag) <= SHOWN_LENGTH else f"{flag[:SHOWN_LENGTH]}..."


def _counted(found: Sized, what: str) -> str:
    """How many there are, in words."""
    return f"{len(found)} {what}{'s' if len(found) != 1 else ''}"


def change_lines(audit: Audit) -> Iterator[str]:
    """The changes that gain most, each alone, then together, with the file's diff."""
    if audit.reading.otherwise:
        return
    if not audit.changes:
        yield (
            "No change of one choice is worth half a percent."
            if not audit.problem
            else "Nothing near mends it: no change of one choice is legal."
        )
    for number, change in enumerate(audit.changes, 1):
        yield from _change(f"{number}. alone", audit, change)
    if audit.together is not None:
        yield from _change("together", audit, audit.together)
    fastest = audit.fastest
    if fastest is None:
        yield f"A search of all engines {SEARCHED} finds none that fits."
    else:
        seconds = format_seconds(fastest.prediction.step_time_s)
        yield f"A search of all engines {SEARCHED}: {seconds} a step: {fastest.engine} {text.choice(fastest)}"
    if audit.searched is not None:
        yield from _change(f"A search of {audit.setup.engine} {SEARCHED}", audit, audit.searched)


def _change(title: str, audit: Audit, change: Change) -> Iterator[str]:
    judged, base = change.judged, audit.judged
    gain = ""
    if base is not None and not base.rule:
        gain = f", {100 * (judged.step_time_s / base.step_time_s - 1):+.1f}%"
    need = format_bytes(judged.peak_memory_bytes)
    room = f"{need} at the peak" if not judged.lacking_bytes else f"still lacks {format_bytes(judged.lacking_bytes)}"
    yield ""
    yield f"{title}: {change.what}: {format_seconds(judged.step_time_s)} a step{gain}, {room}{chance_text(judged)}"
    changed = differing(audit.setup, judged.setup)
    for choice in CHOICES:
        if choice.name in changed and choice.offered is not None and getattr(judged.setup, choice.name) in choice.offered.values:
            yield f"  ({choice.name} {choice.offered.asks})"
    if change.text is None:
        yield "  (the file has no place where this could be said by changing a word)"
    yield from (f"  {line}" for line in change.diff.splitlines())
    if change.elsewhere:
        yield f"  ({change.elsewhere})"
