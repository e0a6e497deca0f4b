"""Configurations of programs whose trainers shard by torch's FSDP2 (words/fsdp.py): read as the ds_config that shares the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit.document import File, Given, named_model, resolved
from orchestrator.audit.hugging_face import as_ds, sorted_out
from orchestrator.audit.reading import Reading, Setup, Source, changes
from orchestrator.audit.rollouts import of_a_policy, otherwise
from orchestrator.words import deepspeed as ds_words
from orchestrator.words.fsdp import NEMO_RL, UNPADDED_LOGITS, VERL, VERL_SFT, Sharded
from orchestrator.words.terms import Term, decided, kinds, nested, section

MEGATRONS: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
OF_VERL: Final = {"train_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"}
FROZEN: Final = "model_dtype (frozen weights are in fp32 unless it says else, priced as 16 bits)"
OPTIMIZER: Final = "policy.optimizer.name"


def program_of(content: Mapping[str, Any]) -> Sharded | None:
    """The program of a file that shards by FSDP, told by its sections; None: it trains by Megatron, or is none of these."""
    actor = section(content, "actor_rollout_ref.actor")
    if "actor_rollout_ref" in content:
        return None if "megatron" in actor or content.get("model_engine") == "megatron" else VERL
    engine = content.get("engine")
    if "optim" in content and OF_VERL & {*section(content, "data")} and (engine is None or isinstance(engine, str | dict)):
        return None if engine == "megatron" or (isinstance(engine, dict) and {*engine} & {*MEGATRONS}) else VERL_SFT
    if section(content, "policy.dtensor_cfg"):
        return None if section(content, "policy.megatron_cfg").get("enabled") else NEMO_RL
    return None


def read(file: File, program: Sharded) -> Source:
    """What the file says, and how it is edited. Raises InputError."""
    content = file.content
    given = Given(resolved(content))
    given.take(*program.others, program.recompute, program.steps, *program.length, program.samples, *program.nodes)
    if isinstance(content.get("engine"), str):
        given.used.add("engine")
    # Weights are fp32 in shards, cast for each layer, and gradients are summed in fp32 (both programs' MixedPrecisionPolicy).
    ds: dict[str, Any] = {"zero_optimization.stage": 3, "bf16.enabled": True, "communication_data_type": "fp32",
                          "data_types.grad_accum_dtype": "fp32"}  # fmt: skip
    for term in program.table:
        if (value := given.get(term.theirs)) is not None:
            ds[term.ours] = term.back(value)
    samples = given.number(program.samples) if program.samples else None
    if samples and "train_batch_size" in ds:  # of prompts, of which each has so many responses
        ds["train_batch_size"] = int(ds["train_batch_size"]) * samples
    lengths = [given.number(path) for path in program.length]
    switch, most = program.tokens
    own_lengths = all(lengths) and bool(program.unpadded[0]) and given.truth(program.unpadded[0], True)
    logits = UNPADDED_LOGITS if own_lengths and not given.values.get(program.unpadded[1]) and ds.get("bf16.enabled", False) else None
    longest = " + ".join(program.length) if own_lengths else ""
    if switch and given.truth(switch, program.by_tokens) and (tokens := given.number(most)) and all(lengths):
        samples_of_tokens = max(1, tokens * int(ds.get("sequence_parallel_size", 1)) // sum(lengths))
        ds["train_micro_batch_size_per_gpu"] = 1 << samples_of_tokens.bit_length() - 1  # a power of two divides batches
        longest = ""  # the tokens of a pass are what they are
    assumed = [
        *file.notes,
        *of_a_policy(content),
        f"FSDP2 is priced as DeepSpeed's ZeRO-{ds['zero_optimization.stage']}, which shares the same between ranks",
    ]
    if longest:
        of = program.unpadded[0].rpartition(".")[2]
        assumed.append(f"every sequence has {longest} = {sum(map(int, filter(None, lengths)))} tokens ({of}: shorter ones take less)")
    reading = as_ds(nested(ds), {}, program.kind, None, assumed)
    keys = dict(reading.keys)
    if all(lengths):
        keys["train.seq_length"] = sum(lengths)
    if steps := given.number(program.steps):
        keys["train.steps"] = steps
    nodes, gpus = (given.number(path) for path in program.nodes)
    if gpus:
        keys["gpus"] = gpus * (nodes or 1)
    mode = "full" if given.truth(program.recompute, program.recomputes) else "none"
    about = tuple(line for line in reading.assumed if not line.startswith("recompute="))
    reading = replace(
        reading,
        keys=keys,
        setup=replace(reading.setup, recompute=mode),
        assumed=about,
        steps=None,
        longest=longest,
        logits_bytes=logits,
        fsdp=True,
        model=named_model(given.values),
        otherwise=otherwise(content),
    )
    if program.model:
        reading = _with_adapters(given, program.model, reading)
    if not str(optimizer := given.get(OPTIMIZER, "AdamW")).endswith("AdamW"):
        reading = replace(reading, unpriced=(f"{OPTIMIZER}={optimizer}", *reading.unpriced))
    reading = sorted_out(given, kinds("verl", "nemo_rl"), reading, (program.model,))

    def values(before: Setup, after: Setup, gpus: int) -> dict[str, Any] | None:
        to_ds = {term.theirs: term for term in ds_words.PLAN if term not in ds_words.OTHERWISE}
        table = [
            Term(term.theirs, to_ds[term.ours].ours, of=partial(_theirs, term, to_ds[term.ours]))
            for term in program.table
            if term.ours in to_ds and to_ds[term.ours].ours in Setup.__struct_fields__ and term.theirs in given.values
        ]
        table.append(Term(program.recompute, "recompute", to=lambda mode: mode == "full"))
        return changes(table, before, after) if after.recompute in ("none", "full") and after.zero_stage in (2, 3) else None

    return Source(file.text, reading, values, file.change)


def _with_adapters(given: Given, section: str, reading: Reading) -> Reading:
    """The reading with the adapters that verl's section of the model has. Frozen weights stay in the type in which they are loaded, fp32
    (workers/engine/fsdp/transformer_impl.py, model_dtype), where the price has 16 bits. Raises InputError."""
    rank = given.number(f"{section}.lora_rank")
    if not rank:
        return reading
    targets = given.get(f"{section}.target_modules", "all-linear")
    keys = {"lora.rank": rank, "lora.targets": ",".join(map(str, targets)) if isinstance(targets, list) else str(targets)}
    if alpha := given.number(f"{section}.lora_alpha", float):
        keys["lora.alpha"] = alpha
    return replace(reading, keys={**reading.keys, **keys}, unpriced=(FROZEN, *reading.unpriced))


def _theirs(term: Term, ours: Term, setup: Setup) -> Any:
    """What a setting of the file is for a setup, whose ds_config has it by `ours`."""
    return term.to(decided([ours], ours.theirs, setup))
