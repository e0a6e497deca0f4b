"""The candidates that a page draws, kept in the page itself: a later report of the same plan, with what was measured, needs no search."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from typing import Final

import msgspec

from orchestrator.plan import Plan
from orchestrator.values import Value

Point = tuple[str, float, float, str, str]
"""(choice, seconds, bytes, kind, why not)."""
ELEMENT: Final = re.compile(r'<script type="application/octet-stream" id="candidates">(.*?)</script>', re.DOTALL)


class Drawn(Value, frozen=True, kw_only=True):
    """Candidates as a page draws them. `plan`: whose candidates they are, and at which price; `total`: candidates of the search; `ruled`:
    (engine, rule, branches that it cut)."""

    plan: str
    total: int
    points: tuple[Point, ...]
    ruled: tuple[tuple[str, str, int], ...]


def digest(plan: Plan) -> str:
    """SHA-256 of the plan, of what it is for, and of its price: with other prices the candidates have others too."""
    about = (plan.engine, plan.candidate, plan.stages, plan.model, plan.training, plan.cluster, plan.prediction.step_time_s)
    return hashlib.sha256(msgspec.json.encode(about, order="deterministic")).hexdigest()


def element(drawn: Drawn) -> str:
    """The candidates as the page's element: compressed, a tenth of the JSON."""
    text = base64.b64encode(zlib.compress(msgspec.json.encode(drawn))).decode()
    return f'<script type="application/octet-stream" id="candidates">{text}</script>'


def drawn_in(page: str, plan: Plan) -> Drawn | None:
    """What a page keeps of this plan's candidates; None: nothing, or those of another plan or price."""
    found = ELEMENT.search(page)
    if found is None:
        return None
    try:
        drawn = msgspec.json.decode(zlib.decompress(base64.b64decode(found.group(1), validate=True)), type=Drawn)
    except (ValueError, zlib.error):
        return None
    return drawn if drawn.plan == digest(plan) else None
