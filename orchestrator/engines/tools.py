"""A plan as a file of a program that people start around Megatron-core (words/tools.py): what it says there, what it can't, and what it
leaves to the program."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import yaml
from msgspec.structs import replace

from orchestrator.engines import megatron_parts
from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.engines.deepspeed.fsdp_files import settings_of
from orchestrator.engines.deepspeed.trainer_files import check_decoder, not_told
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.engines.megatron_args import one_connection, several_connections, shape, switches, why_not
from orchestrator.engines.megatron_versions import release_of
from orchestrator.engines.passthrough import flags_of
from orchestrator.engines.transformer_config import ARCHITECTURE, ENDS, PLAN, common_recompute, layer_counts, layout, settings
from orchestrator.errors import InputError
from orchestrator.job import File
from orchestrator.model.families import describe_for
from orchestrator.model.lora import ALL, MCORE_BRIDGE, MEGATRON_LINEARS, WRITTEN, Lora, linear_names
from orchestrator.model.ops import ROUTED, SHARED, Gemm
from orchestrator.plan import Plan
from orchestrator.strategy.spec import CHOICES
from orchestrator.values import Value
from orchestrator.words import megatron as words
from orchestrator.words.fsdp import SHARDED
from orchestrator.words.terms import NOTHING, names, nested
from orchestrator.words.tools import BALANCE, BRIDGE_FREEZES, OVERLAPS, RECOMPUTE, TOOLS
from orchestrator.words.trainer import AROUND

ENDS_OF_STAGES: Final = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
OFF: Final[Mapping[str, Any]] = {
    **dict.fromkeys((
        *RECOMPUTE.split(), *ENDS_OF_STAGES, "pipeline_model_parallel_layout", "fp8", "expert_tensor_parallel_size",
        "cuda_graph_modules"), None),
    **dict.fromkeys((
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "tp_comm_overlap", "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "optimizer_cpu_offload", "use_precision_aware_optimizer",
        "use_megatron_fsdp", "fp8_param"), False),
    "expert_model_parallel_size": 1, "num_distributed_optimizer_instances": 1, "cuda_graph_impl": "none",
}  # fmt: skip
"""What a plan leaves out, which the program's own recipe may have: said too, so that the file means the plan over any recipe."""
GRAPHS: Final = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope")
OF_MODEL: Final = {"make_vocab_size_divisible_by", *names(ARCHITECTURE, words.DROPOUT)} - {"seq_length"}
"""The program has the model, from its own recipe or from Hugging Face's configuration."""
OF_RESULT: Final = (names(words.SCHEDULE, words.BETAS, words.EPSILON, words.PRECISION_AWARE) | {
    "optimizer", "sgd_momentum", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "fp8", "fp8_recipe"}) - {"seed"}  # fmt: skip
"""What decides what is trained: nothing is written where one of these can't be said."""
OURS: Final = {term.theirs: term.ours for term in PLAN if term.ours} | {
    "transformer_impl": "cluster.software",
    "hybrid_layer_pattern": "stages",
    **dict.fromkeys(ENDS_OF_STAGES, "stages"),
}
DEFAULTS: Final = {
    term.theirs: term.default
    for table in (words.SCHEDULE, words.BETAS, words.EPSILON, words.OPTIONS, words.EXPERT_PARALLEL, words.PRECISION_AWARE)
    for term in table
} | {"transformer_impl": "transformer_engine"}
SWITCHES: Final = ("activation_checkpointing", "fp8_enabled")
"""NeMo-RL's, of what other programs say in one setting."""
PINS: Final = {choice.name: (choice.pin, choice.default) for choice in CHOICES} | {"stages.recompute": ("recompute", "full")}


PRECISIONS: Final = ("bf16", "fp16", "fp8")
SLIME_CORE: Final = "0.16.1"
"""The release whose flags slime's image has (Megatron-LM at 1dcf0da): those that it does not know it passes over."""
WHY_SLIME: Final = {"zero_stage": "use_distributed_optimizer=False", "moe_token_dispatcher_type": "moe_token_dispatcher_type=allgather",
                    "tp_comm_overlap": "tp_comm_overlap=True"}  # fmt: skip
"""What slime does otherwise than its flags say, by the pin that keeps a plan from it."""


class Written(Value, frozen=True, kw_only=True):
    """A plan in a tool's words: its settings by path. `unsaid`: settings of Megatron's that change time or memory and have no place there,
    "name=value"; `left`: names of such as decide nothing of the plan; `pins`: what holds a search to plans that can be said whole."""

    tool: str
    settings: dict[str, Any]
    unsaid: tuple[str, ...]
    left: tuple[str, ...]
    pins: dict[str, Any]


NAMES: Final = tuple(dict.fromkeys((*TOOLS, *AROUND)))
"""Programs for which a plan is written."""


def written(plan: Plan, name: str) -> Written:
    """The plan in the words of the tool of this name. Raises InputError for a plan that it can't train, and where a setting has no place
    that decides what is trained."""
    if not ((plan.engine == DEEPSPEED and name in SHARDED) or (plan.engine == MEGATRON and name in TOOLS)):
        able = [engine for engine, names in ((MEGATRON, TOOLS), (DEEPSPEED, (*AROUND, *SHARDED))) if name in names]
        raise InputError("write", name, f"can't be told a plan for engine={plan.engine}", [f"engine={engine}" for engine in able])
    check_decoder(plan, name, sees=name == "bridge")
    if plan.engine == DEEPSPEED:
        said_there, unsaid_there, pins_there = settings_of(plan, name)
        return Written(tool=name, settings=said_there, unsaid=unsaid_there, left=(), pins=pins_there)
    tool = TOOLS[name]
    if (lora := plan.training.lora) is not None and name != lora.write:
        other = next((bridge for bridge, tool in WRITTEN.items() if tool == name), None)
        why = f"; lora.bridge={other} plans its own" if other else f"; write={lora.write} is"
        raise InputError("write", name, f"is not told adapters here (lora.rank={lora.rank}){why}", [lora.write])
    if plan.training.precision not in PRECISIONS:
        raise InputError("write", name, f"can't be told train.precision={plan.training.precision}", PRECISIONS)
    if common_recompute(plan) is None:
        modes = [f"pin.recompute={mode}" for mode in ("none", plan.strategy.recompute)]
        raise InputError("write", name, "has one recompute setting for all stages, and the plan's differ", modes)
    if name == "slime":
        plan = replace(plan, cluster=plan.cluster.with_megatron(SLIME_CORE))
        if (reason := why_not(plan)) is not None:
            raise InputError("write", name, f"takes Megatron-LM's flags: {reason}")
        # What it sets itself (slime/backends/megatron_utils/arguments.py, _set_default_megatron_args and validate_args).
        pins: dict[str, Any] = {"zero_stage": 1} if not plan.zero_stage else {}
        if plan.model.experts and plan.moe_token_dispatcher_type == "allgather":
            pins["moe_token_dispatcher_type"] = "alltoall"
        pins |= {"tp_comm_overlap": False} if plan.tp_comm_overlap else {}  # whose buffers are of one length
        plan = replace(plan, tp_comm_overlap=False)
        can_t = tuple(WHY_SLIME[pin] for pin in pins)
        return Written(tool=name, settings=settings(plan), unsaid=can_t, left=(), pins=pins)
    said: dict[str, Any] = {}
    unsaid: dict[str, Any] = {}
    left: list[str] = []
    wanted = _settings(plan, own_release=name == "bridge")
    # Bridge's utils/cuda_graph.py refuses Megatron's own graphs of layers; NeMo 2's Megatron-core has no modules and no whole iteration.
    impl, modules = wanted["cuda_graph_impl"], wanted.get("cuda_graph_scope") or wanted["cuda_graph_modules"]
    if (name == "bridge" and impl == "local") or (name == "nemo" and (modules or impl == "full_iteration")):
        unsaid = {graphs: wanted.pop(graphs) for graphs in GRAPHS if wanted.get(graphs)}
        wanted |= {graphs: OFF[graphs] for graphs in GRAPHS if graphs in OFF}
    # Bridge makes user buffers (training/initialize.py) and feeds them what they are for; ms-swift's are of seq_length alone
    # (megatron/utils/megatron_lm_utils.py:634), and whether its batches and NeMo's are as long is not known.
    if name != "bridge" and wanted["tp_comm_overlap"]:
        unsaid["tp_comm_overlap"], wanted["tp_comm_overlap"] = True, False
    for field, value in wanted.items():
        there = False
        for term in tool.terms(field):
            if (theirs := tool.off.get(field) if value is None else term.to(value)) is not NOTHING:
                said[term.theirs] = said.get(term.theirs, {}) | theirs if isinstance(theirs, dict) else theirs
                there = True
        if field == "hybrid_override_pattern" or (field == "hybrid_layer_pattern" and layout(plan) is None):
            continue  # what is the model's own
        if there or value in (None, False, "uniform") or value == tool.made.get(field, DEFAULTS.get(field, NOTHING)):
            continue
        if field in OF_RESULT:
            raise InputError("write", name, f"has no place for {field}={value}, which changes what is trained")
        if field in SWITCHES:
            continue
        if field not in OURS or OFF.get(field, NOTHING) == value or field in ("seq_length", "seed"):
            left.append(field)
        else:
            unsaid[field] = value
    if name == "bridge" and plan.training.task == "sft":
        said |= _bridge_tunes(plan) if plan.model.vision is None else {"dataset.enable_in_batch_packing": False}
    if name == "bridge" and plan.run.init_from is not None:  # a folder of Hugging Face's is taken too (checkpoint_utils.py:211)
        said["checkpoint.pretrained_checkpoint"] = plan.run.init_from
    if lora is not None:
        of = adapters(plan, lora)[1]
        named = {"dim": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"}  # ms-swift's
        said |= {f"peft.{field}" if name == "bridge" else named.get(field, field): value for field, value in of.items()}
        said |= {"tuner_type": "lora"} if name != "bridge" else {}
    if plan.model.vision is not None:
        # Bridge's recipes that pretrain Qwen3-VL freeze all but the projector (recipes/qwen_vl/h100/qwen3_vl.py:56); its model asserts that
        # no rotary embedding is fused (models/qwen_vl/modelling_qwen3_vl/rope.py:477).
        said |= {path: part in plan.training.freeze for path, part in BRIDGE_FREEZES.items()}
        said |= {"model.apply_rope_fusion": False}
    said |= {**tool.beside, **dict(zip(tool.nodes, shape(plan), strict=True))} if tool.nodes else tool.beside
    held = dict.fromkeys(PINS[OURS[field]] for field in unsaid if OURS[field] in PINS)
    return Written(
        tool=name,
        settings={
            path: [value[i] for i in sorted(value)] if isinstance(value, dict) else value
            for path, value in said.items()
            if value is not None or tool.nulls
        },
        unsaid=tuple(f"{field}={value}" for field, value in unsaid.items()),
        left=tuple(left),
        pins={pin: "-".join(value) if isinstance(value, tuple) else value for pin, value in held if value is not None},
    )


def adapters(plan: Plan, lora: Lora) -> tuple[str, dict[str, Any]]:
    """The class of Megatron-Bridge for these adapters, and its fields (peft/lora.py; canonical_lora.py for linears that are one in
    megatron-core and several in transformers). Raises InputError for adapters that neither has."""
    a, alpha = plan.model, lora.scaling * lora.rank
    spec = describe_for(a, plan.training)
    roles = dict.fromkeys(op.role for run in spec.runs for op in run.layer.ops if isinstance(op, Gemm) and op.role in MEGATRON_LINEARS)
    linears = {MEGATRON_LINEARS[role]: linear_names(a).get(role, (MEGATRON_LINEARS[role],)) for role in roles if role not in EXPERTS}
    targets = [*(lora.fused or (lora.targets if lora.bridge == MCORE_BRIDGE else ()))]
    for known, ours in () if targets else linears.items():
        several = CANONICAL.get(known, ()) if len(ours) > 1 else (known,)
        targets += [theirs for theirs, name in zip(several, ours, strict=True) if lora.adapts(name)]
    canonical = not {*targets} <= {ALL, *MEGATRON_LINEARS.values()}
    if canonical and "linear_fc1" in targets:
        raise InputError("lora.targets", ",".join(lora.targets), "Megatron-Bridge's CanonicalLoRA has a gate beside linear_fc1", [*linears])
    fields = {"target_modules": targets, "dim": lora.rank, "alpha": int(alpha) if alpha == int(alpha) else alpha, "dropout": lora.dropout}
    return ("CanonicalLoRA" if canonical else "LoRA"), fields


CANONICAL: Final = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""CanonicalLoRA's names for the sides of Megatron's linears, in transformers' order."""
EXPERTS: Final = ROUTED | SHARED
"""Roles of experts' linears, which Bridge's names take with those of dense layers."""


def _bridge_tunes(plan: Plan) -> dict[str, Any]:
    """What Megatron-Bridge is told of fine-tuning: how its data set packs samples (data/packing/config.py), as its recipes do where they
    are not told otherwise, and what it asks for under context parallelism (training/config.py, ConfigContainer.validate)."""
    packs: dict[str, Any] = {"enable_offline_packing": False, "offline_packing_specs": None}
    if plan.training.packing:
        packs = {
            "offline_packing_specs.packed_sequence_size": plan.training.seq_length,
            "offline_packing_specs.pad_seq_to_mult": plan.sample_multiple,
        }
    parts = {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False} if plan.cp > 1 else {}
    return {f"dataset.{field}": value for field, value in packs.items()} | parts


def _settings(plan: Plan, *, own_release: bool) -> dict[str, Any]:
    """What Megatron is told of the plan but for its model, and what it is not told because it is off. `own_release`: the program has a
    Megatron-core of its own that lays out hybrids by their pattern, whatever the plan's."""
    of_model = OF_MODEL | set(megatron_parts.config_fields(plan.model)) - {*BALANCE.split()}
    found = {**OFF, **{name: value for name, value in settings(plan).items() if name not in of_model}}
    found["num_virtual_stages_per_pipeline_rank"] = plan.vpp if plan.vpp > 1 else None  # which mpu is told beside a layout too
    if all(span.recompute == "full" for stage in plan.stages for span in stage.layers if span.kind not in ENDS):
        found |= {"recompute_method": "uniform", "recompute_num_layers": 1}  # every layer by itself, as "block" with all of them
    if "single_part_layers" in plan.model.features():
        found |= {"pipeline_model_parallel_layout": None, **hybrid_fields(plan, own_release=own_release)}
    found |= {"activation_checkpointing": found["recompute_granularity"] is not None, "fp8_enabled": found["fp8"] is not None}
    return found


def hybrid_fields(plan: Plan, *, own_release: bool) -> dict[str, Any]:
    """The layers of a model whose layers have one part, a letter each, and the plan's stages: from 0.19 on by `|` in the pattern, beside
    which a layout is refused (training/arguments.py:799); in 0.16.1 by the sizes of the first and the last (ssm/mamba_block.py:178-221).
    Bridge's recipes have the pattern by its new name, beside which it takes no older one (models/hybrid/hybrid_provider.py:183; `|` goes to
    the Megatron-core that it comes with)."""
    letter = {kinds: letter for letter, kinds in words.LETTERS.items()}
    tags = ((layer.mixer.__struct_config__.tag, layer.feed_forward.__struct_config__.tag) for layer in plan.model.each_layer())
    letters = (letter[kinds] for kinds in tags)  # type: ignore[index]
    sizes = [count for row in layer_counts(plan) for count in row]
    if own_release or release_of(plan.cluster.software.megatron_core).lays_out_hybrids:
        return {"hybrid_layer_pattern": "|".join("".join(islice(letters, count)) for count in sizes)}
    ends = (None, None) if len({*sizes}) == 1 else (sizes[0], sizes[-1])
    return {"hybrid_override_pattern": "".join(letters), **dict(zip(ENDS_OF_STAGES, ends, strict=True))}


def files(plan: Plan, found: Written, more: Sequence[str] = ()) -> list[File]:
    """The tool's files. `more`: what a search says of the plan, lines of the header."""
    head = "".join(f"# {line}\n" for line in (*_heading(plan, found), *more))
    if found.tool == "slime":
        return [File(path="slime.sh", content="#!/usr/bin/env bash\n" + head + _flags(plan, found))]
    if found.tool in PYTHON:
        # What makes an object comes before what sets its fields.
        lines = [_assigned(path, value) for path, value in sorted(found.settings.items(), key=lambda one: not one[0].endswith("._target_"))]
        kind = "" if plan.training.lora is None else adapters(plan, plan.training.lora)[0]
        begin = PYTHON[found.tool].format(
            precision="fp16_mixed" if plan.training.precision == "fp16" else "bf16_mixed",
            peft=f"from megatron.bridge.peft.{'lora' if kind == 'LoRA' else 'canonical_lora'} import {kind}\n" if kind else "",
            adapters=f"    recipe.peft = {kind}()\n" if kind else "",
        )
        code = File(path=f"{found.tool}.py", content=head + begin + "".join(f"    {line}\n" for line in lines) + "    return recipe\n")
        return [code, File(path="bridge.sh", content=_command(head, plan, found))] if found.tool == "bridge" else [code]
    return [File(path=f"{found.tool}.yaml", content=head + yaml.safe_dump(nested(found.settings), sort_keys=False, width=10**6))]


def is_around(plan: Plan, name: str) -> bool:
    """Whether the program of this name trains such a plan by the Trainer, whose file has all of it or is refused."""
    return plan.engine == DEEPSPEED and name in AROUND


def _environment(plan: Plan) -> list[str]:
    """What the plan needs in a rank's environment, where programs have other values or none, as NAME=value."""
    queues = "1" if one_connection(plan) else "32" if several_connections(plan) else None  # ms-swift's and slime's own default is 1
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}
    return [f"{name}={value}" for name, value in (more | switches(plan)).items()]


def _heading(plan: Plan, found: Written) -> Iterator[str]:
    tool = TOOLS[found.tool] if plan.engine == MEGATRON else SHARDED[found.tool]
    yield f"{plan.model.name} on {plan.world_size} GPUs, a plan for engine={plan.engine}, for {tool.release}."
    yield f"Start: {tool.start}."
    if plan.engine == MEGATRON and (needed := _environment(plan)):
        yield f"Environment of every rank: {' '.join(needed)}."
    yield "The model is the recipe's or the checkpoint's own. What is off is said too, in place of what a recipe has there."
    if plan.training.packing:
        padded = f", each padded to a multiple of {plan.sample_multiple} tokens" if plan.sample_multiple > 1 else ""
        where = "for a recipe whose data set packs them" if found.tool == "bridge" else "the settings of your data set say it there"
        yield f"The plan packs samples{padded}: {where}."
    if plan.training.lora is not None and found.tool == "bridge":
        if plan.run.init_from is None:
            yield "Adapters need checkpoint.pretrained_checkpoint, the weights that they are beside: model.init_from= names them here."
        yield "checkpoint.also_save_hf_checkpoint=true writes adapters as peft's, examples/peft/merge_lora.py adds them to the weights."
    if (images := plan.training.images) is not None:
        yield f"The images are those of the recipe's data set: the plan is for {images} of {plan.training.image_tokens} tokens a sample."
    yield from not_told(plan, names_weights=found.tool == "bridge")
    if found.unsaid:
        yield f"Can't be said there: {', '.join(found.unsaid)}."
    if found.left:
        yield f"Left to its defaults: {', '.join(found.left)}."


PYTHON: Final = {
    "bridge": """
from __future__ import annotations

import torch
{peft}from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.mixed_precision import get_mixed_precision_config


def override(recipe):
{adapters}    recipe.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    recipe.mixed_precision = get_mixed_precision_config("{precision}")
""",
    "nemo": """
from __future__ import annotations

import nemo_run as run
import torch
from nemo.collections.llm.recipes.precision.mixed_precision import {precision}
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler


def override(recipe):
    recipe.trainer.plugins = {precision}()
""",
}
"""The beginning of a Python file, with what has to be there before its fields are set."""


def _assigned(path: str, value: Any) -> str:
    """A setting as a line of Python. A type of torch, and a class that a configuration is for, are names there."""
    if path.endswith("._target_"):
        return f"recipe.{path.removesuffix('._target_')} = run.Config({value})"
    return f"recipe.{path} = {value if str(value).startswith('torch.') else repr(value)}"


def _flags(plan: Plan, found: Written) -> str:
    """The command of slime, whose actors train."""
    nodes, ranks = shape(plan)
    flags = [f"--actor-num-nodes {nodes}", f"--actor-num-gpus-per-node {ranks}"]
    flags += [" ".join(map(shlex.quote, flag)) for flag in flags_of(found.settings, SLIME_CORE)]
    return " \\\n  ".join(["python3 train.py", *flags, f"--vocab-size {plan.model.vocab_size}", '"$@"']) + "\n"


def _command(head: str, plan: Plan, found: Written) -> str:
    """Bridge's settings as words of a command line. Recipes have a precision's name in place of its fields there, and some no comm_overlap,
    which no word can make: its settings are the model's and ddp's there, with what it would set by itself."""
    fields = {path: value for path, value in found.settings.items() if path.startswith("mixed_precision.")}
    said = {path: value for path, value in found.settings.items() if not path.startswith(("mixed_precision.", "comm_overlap."))}
    several = said["model.virtual_pipeline_model_parallel_size"] is not None
    said |= {"comm_overlap": None, "model.overlap_p2p_comm": several, "model.batch_p2p_comm": not several}
    said["ddp.align_param_gather"] = several
    said |= {f"model.{name}": found.settings[f"comm_overlap.{name}"] for name in OVERLAPS.split()}
    name = "bf16_mixed" if fields["mixed_precision.bf16"] else "fp16_mixed"
    said["mixed_precision"] = name
    other = [f"{path}={value}" for path, value in fields.items() if value not in (None, False) and path not in NAMED[name]]
    if not fields["mixed_precision.grad_reduce_in_fp32"]:
        other.append("mixed_precision.grad_reduce_in_fp32=false")
    if not {*said.get("peft.target_modules", ())} <= {*MEGATRON_LINEARS.values()}:  # a recipe's own adapters are LoRA's
        said = {path: value for path, value in said.items() if not path.startswith("peft.")}
        other.append("peft=CanonicalLoRA(...)")
    only = f"# bridge.py alone can say: {', '.join(other)}.\n" if other else ""
    nodes, ranks = shape(plan)
    run = f'torchrun --nproc_per_node="${{RANKS_PER_NODE:-{ranks}}}"'
    if nodes > 1:
        only += f"# On every node: RECIPE=NAME NODE_RANK=<0..{nodes - 1}> MASTER_ADDR=<host of node 0> bash bridge.sh\n"
        run = f'{run} --nnodes="${{NNODES:-{nodes}}}" {RENDEZVOUS}'
    parts = [run, RUN_RECIPE, *(shlex.quote(f"{path}={word(value)}") for path, value in said.items()), '"$@"']
    return "#!/usr/bin/env bash\n" + head + only + " \\\n  ".join(parts) + "\n"


RUN_RECIPE: Final = 'scripts/training/run_recipe.py --recipe "$RECIPE"'
RENDEZVOUS: Final = (
    '--node_rank="${NODE_RANK:-${SLURM_NODEID:?NODE_RANK is not set: the number of this node, from 0}}" '
    '--master_addr="${MASTER_ADDR:?is not set: the address of node 0}" --master_port="${MASTER_PORT:-29500}"'
)
"""How the nodes find each other, by the variables of launch.sh."""
NAMED: Final = {name: (f"mixed_precision.{name[:4]}", "mixed_precision.grad_reduce_in_fp32") for name in ("bf16_mixed", "fp16_mixed")}
"""What a precision's name stands for (training/mixed_precision.py)."""


def word(value: Any) -> str:
    """The value as Hydra reads it on a command line.

    >>> word(None), word(True), word(["core_attn", "mlp"]), word("Et*2|t*2L")
    ('null', 'true', '[core_attn,mlp]', '"Et*2|t*2L"')
    """
    if isinstance(value, list):
        return f"[{','.join(map(word, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value):
        return json.dumps(value)
    return value if isinstance(value, str) else json.dumps(value)
