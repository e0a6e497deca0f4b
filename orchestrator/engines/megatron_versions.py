"""The releases of Megatron-core and Megatron-LM that plans are made for, and all in which they differ, as data.

`RELEASES` says what each has; known.json has the fields and flags of the first, and known_<release>.json what a later one has otherwise:
"gone", "new" (with those whose values changed) and "defaults" (the first's and its own). tests/megatron_lm/flags.py writes the flags of a
checkout's parser, tests/engines/known_names.py the fields of the installed classes; tests compare both with these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.hardware.spec import Gpu
from orchestrator.values import Value

NUMBER: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[a-z.+].*)?\Z")
"""A version of Megatron-core: 0.16.1, 0.19.0rc0, 0.19.2+local."""


class Release(Value, frozen=True, kw_only=True):
    """`version`: of the megatron-core that plans are checked with; `also`: others of the same release that ran the same checks. `tag`: of
    Megatron-LM's programs. `names`: the file of what differs from the first release; None: the first. `programs`: by kind of model, in
    that checkout. `modules`: what megatron.core imports at its start, beside torch, by the name of its distribution."""

    version: str
    also: tuple[str, ...] = ()
    tag: str
    names: str | None = None
    programs: dict[str, str]
    modules: tuple[str, ...] = ()
    overlaps_shared_experts_with_flex: bool = False
    """Whether it computes shared experts beside flex' exchange of tokens too."""
    overlap_of_prediction_needs_pipeline: bool = True
    """Whether the experts' exchange beside another micro-batch needs pp above 1 in a model with a prediction head."""
    overlaps_experts_with_fsdp: bool = False
    """Whether its own FSDP has that overlap too."""
    overlap_needs_several_experts: bool = True
    """Whether that overlap gives the tokens' memory back too early where a rank has one expert: the exchange's own output is then what the
    expert's product keeps for backward (models/gpt/fine_grained_callables.py:76; our worker's test shows it)."""
    pads_inference_in_graphs: bool = True
    """Whether its programs assert that inference pads experts on several ranks where graphs are its own, in a training too."""
    overlaps_experts_in_any_graph: bool = False
    """Whether the experts' exchange beside another micro-batch goes with graphs other than Transformer Engine's."""
    has_rank_capacity: bool = False
    """Whether a rank's experts can compute a buffer of one size."""
    divides_muon: bool = False
    """Whether its distributed optimizer and its overlaps take Muon."""
    full_iteration_is_an_impl: bool = False
    """Whether graphs of whole steps are a value of cuda_graph_impl, beside cuda_graph_modules, and not one of cuda_graph_scope."""
    offloads_beside_graphs: bool = False
    """Whether modules' activations may go to host memory inside of graphs."""
    delta_net_divides_sequences: bool = False
    """Whether its gated delta net takes shards of sequences."""
    lays_out_hybrids: bool = False
    """Whether the pattern of a model whose layers have one part says which of them a stage has, by `|`."""
    lacks: Mapping[str, str] = {}
    """Parts of models that our worker trains under the others (megatron_parts.OWN_LOOP), and what is lacking here."""


RELEASES: Final = (
    Release(
        version="0.16.1",
        tag="core_v0.16.1",
        programs={"decoder": "pretrain_gpt.py", "encoder": "pretrain_bert.py", "encoder_decoder": "pretrain_t5.py"},
    ),
    Release(
        version="0.19.2",
        also=("0.19.0", "0.19.1"),  # the tag says 0.19.1 of itself
        tag="core_v0.19.0",
        names="known_0.19.json",
        programs={
            "decoder": "pretrain_gpt.py",
            "encoder": "examples/bert/pretrain_bert.py",
            "encoder_decoder": "examples/t5/pretrain_t5.py",
        },
        overlaps_shared_experts_with_flex=True,  # transformer/transformer_config.py:1644
        overlap_of_prediction_needs_pipeline=False,  # transformer/transformer_config.py:2709, which no longer asks for one
        overlap_needs_several_experts=False,  # models/common/utils.py:45, should_free_input
        overlaps_experts_with_fsdp=True,  # distributed/fsdp/mcore_fsdp_adapter.py:100
        pads_inference_in_graphs=False,  # core/inference/text_generation_controllers/text_generation_controller.py:279 asserts it
        overlaps_experts_in_any_graph=True,  # transformer/transformer_config.py:2738
        has_rank_capacity=True,  # transformer/transformer_config.py:977
        divides_muon=True,  # training/arguments.py:1680
        full_iteration_is_an_impl=True,  # transformer/transformer_config.py:1032
        offloads_beside_graphs=True,  # transformer/transformer_config.py:2596
        delta_net_divides_sequences=True,  # ssm/gated_delta_net/gdn.py:135
        lays_out_hybrids=True,  # models/hybrid/hybrid_layer_allocation.py:24
        modules=("triton",),  # transformer/moe/ops/paged_stash.py, also without a GPU
        lacks={
            # transformer/mla_qk_norm_config.py:148
            "full_rank_queries": "Megatron-core 0.19 norms what full-rank queries are projected from, which is another model; 0.16 does not"
        },
    ),
)
"""The releases of Megatron-core that are planned for, from old to new."""


HYBRID_EP: Final = 10.0
"""First compute capability where HybridEP is what flex takes: an NVLink domain there may be larger than DeepEP's nodes of eight, and all
that NVIDIA published of Blackwell with flex has it (Megatron-Bridge's recipes)."""


def flex_backend(gpu: Gpu) -> str:
    """What Megatron's "flex" sends tokens by on this GPU: its moe_flex_dispatcher_backend."""
    return "hybridep" if float(gpu.compute_capability) >= HYBRID_EP else "deepep"


def number(version: str) -> tuple[int, int, int]:
    """(major, minor, patch). Raises InputError for a text that is no version.

    >>> number("0.19.2"), number("0.18"), number("0.19.0rc0")
    ((0, 19, 2), (0, 18, 0), (0, 19, 0))
    """
    found = NUMBER.match(version)
    if found is None:
        raise InputError("software.megatron_core", version, "is no version, as in 0.16.1")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch or 0)


@cache
def release_of(version: str) -> Release:
    """The release that has this version, or the nearest.

    >>> [release_of(version).version for version in ("0.16.0", "0.17.1", "0.18.2", "0.19.1", "1.0.0")]
    ['0.16.1', '0.16.1', '0.19.2', '0.19.2', '0.19.2']
    """
    return min(RELEASES, key=lambda release: abs(_place(release.version) - _place(version)))


def later(version: str) -> tuple[str, ...]:
    """The releases behind the one that has this version, oldest first.

    >>> later("0.16.1"), later("0.19.2")
    (('0.19.2',), ())
    """
    return tuple(release.version for release in RELEASES[RELEASES.index(release_of(version)) + 1 :])


def _place(version: str) -> int:
    """A number for the version, in which any minor number is further than all patches, and any major number than all minor ones."""
    major, minor, patch = number(version)
    return (major * 1000 + minor) * 1000 + patch


def unknown(version: str) -> str | None:
    """What to say of a version that no release has; None: one has it.

    >>> unknown("0.19.2") is None, unknown("0.18.2")
    (True, 'Megatron-core 0.18.2 is not known here (0.16.1, 0.19.0, 0.19.1, 0.19.2 are): planned by what 0.19.2 has.')
    """
    known = [name for release in RELEASES for name in (*release.also, release.version)]
    if version.partition("+")[0] in known:
        return None
    return f"Megatron-core {version} is not known here ({', '.join(known)} are): planned by what {release_of(version).version} has."


def by_name(kinds: dict[str, str]) -> dict[str, str]:
    """Kinds by name of a table of names by kind.

    >>> by_name({"int": "pp tp", "bool": "fp16"})
    {'pp': 'int', 'tp': 'int', 'fp16': 'bool'}
    """
    return {name: kind for kind, names in kinds.items() for name in names.split()}


@cache
def content(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("orchestrator.engines").joinpath(name).read_text())
    return found


@cache
def names(section: str, version: str) -> dict[str, str]:
    """Fields of a class ("transformer_config", "ddp", "optimizer") or flags ("flags": destination, or destination=flag) with their kinds,
    as this release has them."""
    release = release_of(version)
    found = by_name(content("known.json")[section])
    if release.names is None:
        return found
    differs = content(release.names)
    new = by_name(differs["new"][section])
    replaced = {*differs["gone"][section].split(), *(name.partition("=")[0] for name in new)}
    return {name: kind for name, kind in found.items() if name.partition("=")[0] not in replaced} | new
