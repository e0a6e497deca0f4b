"""engine.json, which this planner writes beside every plan for its own workers: read back into a setup. Planning makes it anew, so that no
change of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit import deepspeed, megatron
from orchestrator.audit.document import File
from orchestrator.audit.reading import Reading, Source
from orchestrator.errors import InputError
from orchestrator.words.tools import activation_of

NAMES: Final = {"max_sequence_length": "max_position_embeddings"}


def is_engine_json(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is what the workers read."""
    return isinstance(content.get("transformer_config"), dict) and "engine" in content and "per_stage" in content


def read(file: File) -> Source:
    """The reading of an engine.json of ours. Raises InputError."""
    content = file.content
    parts = [content[name] for name in ("transformer_config", "model", "ddp", "optimizer") if isinstance(content.get(name), dict)]
    given = {NAMES.get(name, name): value for part in parts for name, value in part.items() if value is not None}
    if "num_layers" not in given:
        raise InputError("audit", "transformer_config", "says no num_layers")
    given["activation"] = activation_of(given.pop("activation_func", ""), bool(given.pop("gated_linear_unit", False)))
    f = megatron.Fields({name: value for name, value in given.items() if value is not None})
    setup = megatron.setup_of(f, str(content["engine"]))
    each = [given | {name: value for name, value in one.items() if value is not None} for one in content["per_stage"] or ()]
    stages = [megatron.recompute_of(megatron.Fields(one)) for one in each]
    if len(set(stages)) == 1:
        setup = replace(setup, recompute=stages[0][0], recompute_layers=stages[0][1])
    elif stages:
        setup = replace(setup, stage_recompute=tuple(stages))
    stack = "t5" if given.get("decoder_num_layers") or given.get("encoder_num_layers") else ""
    f.given.setdefault("seq_length", given.get("max_position_embeddings"))
    keys = megatron.model_keys(f, stack)
    unknown, unpriced = tuple[str, ...](), tuple[str, ...]()
    if isinstance(ds := content.get("ds_config"), dict):
        by_ds = deepspeed.reading_of(ds)
        keys |= by_ds.keys
        of = {name: getattr(by_ds.setup, name) for name in ("micro_batch_size", "zero_stage", "offload_optimizer", "zero_shard_size")}
        setup = replace(setup, **of, by_deepspeed_pipeline=setup.pp > 1, overlap_grad_reduce=True, overlap_param_gather=True)
        unknown, unpriced = (tuple(f"ds_config.{one}" for one in lines) for lines in (by_ds.unknown, by_ds.unpriced))
        about = "DeepSpeed's PipelineModule runs the stages, and recomputes nothing: plan.json beside it says so or not"
        f.assumed += [about] if setup.pp > 1 else []
    f.assumed.append("what plan.json beside it says of micro-batches and data is not in this file")
    reading = Reading(
        format="engine.json of this planner",
        keys=keys,
        setup=setup,
        weak=frozenset(f.weak),
        assumed=tuple(f.assumed),
        beside=tuple(f"{name}={given[name]}" for name in given if name not in f.used),
        unknown=unknown,
        unpriced=(*f.unpriced, *unpriced),
    )
    return Source(file.text, reading, lambda before, after, gpus: {} if before == after else None, file.change)
