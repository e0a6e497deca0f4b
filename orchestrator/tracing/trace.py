"""One forward and backward pass on the meta device as a description: blocks and what lies between them, in the order in which they ran."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Final

import torch
import torch.fx.experimental._config
import transformers
from msgspec.structs import replace
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from orchestrator.errors import InputError
from orchestrator.model.layer import Edge, LayerRun, LayerSpec
from orchestrator.model.ops import Attention, Enter, Exit, Gemm, Op, Pointwise, Saved, Weight, WeightKind
from orchestrator.model.traced import Feed, Traced
from orchestrator.tracing import build, compared, feeds, partition
from orchestrator.tracing.attention import FusedAttention, transformers_attention
from orchestrator.tracing.blocks import find_blocks
from orchestrator.tracing.flow import storage
from orchestrator.tracing.partition import Partition, Roles
from orchestrator.tracing.recorder import Part, Recorder, ValueAskedError, floats, is_meta

DTYPES: Final = {2: torch.bfloat16, 4: torch.float32}
"""Data type by bytes of an activation's element."""
VOCABULARY: Final = 1
"""`pad_to` of a projection to the logits: the mark by which prices of the loss find it (model/hugging_face.py)."""
TRAINED_WITH: Final = ("sdpa", "eager")


def described(source: build.Source, seq_length: int | None, decoder_seq_length: int | None, itemsize: int) -> Traced:
    """The model at these lengths, recorded in 16 or 32 bits. Raises InputError, which names the module where the code can't be traced."""
    transformers.logging.set_verbosity_error()
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    dtype = DTYPES[itemsize]
    build.attend_by_name(transformers_attention(_record_nothing))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.config:
            build.check_same_everywhere(build.config_of(source.config))
        with torch.device("meta"):
            model, fed, attention = build.from_source(source, dtype, (build.DESCRIBED, "eager"))
        attention = "eager" if attention == "eager" else TRAINED_WITH[0]
        config = build.config_of(source.config) if source.config else None
        build.move_to_meta(model)
        if config is not None:
            fed = feeds.feeds_of(model, config, seq_length, decoder_seq_length)
        recorder = Recorder(model, itemsize, answer_values=not source.code)
        build.attend_by_name(transformers_attention(recorder.attention))
        logits, vocabulary = _run(model, fed, recorder, dtype, source)
        found = compared.checked(source, partition.find(model, recorder.flow), seq_length, decoder_seq_length)
    if vocabulary:  # the sample of a user's own code has a few of the ids
        fed = tuple(replace(feed, high=vocabulary) if feed.name == feeds.TOKENS and feed.high else feed for feed in fed)
    ends = (recorder.parts[0], recorder.parts[-1])  # there though nothing comes before the first block
    parts = [part for part in recorder.parts if part in ends or not part.empty]
    fixed = not feeds.takes_tokens(model) if config is not None else True
    runs = _runs(model, recorder, parts, logits, found)
    first = next((part for part in parts if part.path), parts[0])
    hidden = _hidden(model, config, first)
    text = config.get_text_config() if config is not None else None
    length = first.input_elements // max(1, hidden) if fixed or seq_length is None else seq_length
    gemms = [op for run in runs for op in run.layer.ops if isinstance(op, Gemm) and run.layer.recomputable]
    heads = [op for run in runs for op in run.layer.ops if isinstance(op, Attention)]
    return Traced(
        model_class=type(model).__name__,
        config=source.config,
        code=source.code,
        attention=attention,
        seq_length=length,
        decoder_seq_length=decoder_seq_length if any(feed.name == "decoder_input_ids" for feed in fed) else None,
        fixed_length=fixed,
        itemsize=itemsize,
        hidden_size=hidden,
        num_attention_heads=int(getattr(text, "num_attention_heads", 0) or (heads[0].heads if heads else 1)) if not _listed(text) else 1,
        num_query_groups=heads[0].kv_heads if heads and not _listed(text) else 1,
        ffn_hidden_size=max((op.n for op in gemms), default=hidden),
        vocab_size=int(getattr(text, "vocab_size", 0) or vocabulary or 1),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", 0) or length),
        biased_attention=recorder.biased,
        feeds=tuple(fed),
        runs=runs,
        edges=_edges(recorder, parts, runs),
        divided=found.divided,
        tp_divides=found.units,
        undivided=found.undivided,
        no_autotp=compared.unfit(source, model),
        assumed=tuple(f"{name} ({count})" for name, count in sorted(recorder.assumed.items())),
    )


def _number(leaf: Any) -> bool:
    return is_meta(leaf) and leaf.is_floating_point()


def _record_nothing(*_: Any) -> None:
    """Records no attention, while the model is built and nothing is computed."""


def _listed(text: Any) -> bool:
    return not isinstance(getattr(text, "num_attention_heads", 1), int)


def _hidden(model: torch.nn.Module, config: Any, first: Part) -> int:
    """Width of what enters the first block."""
    width = getattr(first, "width", 0)
    return width or int(getattr(config, "hidden_size", 1))


# ------------------------------------------------------------------------------------------------ the run


def _run(model: torch.nn.Module, fed: Sequence[Feed], recorder: Recorder, dtype: torch.dtype, source: build.Source) -> tuple[int, int]:
    """Runs forward and backward under the recorder; returns (the elements of the logits, 0 where the model has no loss of its own; how many
    token ids a user's own code has rows and logits for, 0 where it looks them up in no table)."""
    path_of = {id(module): path for path, module in find_blocks(model).items()}
    if not path_of:
        raise InputError("model.hf_config" if not source.code else "model.code", type(model).__name__, "has no repeated blocks")
    names = {id(module): name for name, module in model.named_modules()}
    inside: list[str] = []
    handles: list[Any] = []
    boundary: list[int] = [0]  # storage of the last tensor that crossed between parts
    nested: list[str] = []

    def come(index: int) -> Callable[..., None]:
        """The gradient of what this part gives has been computed: backward is in it."""

        def hook(*_: Any) -> None:
            recorder.current = index

        return hook

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        nested.append(path_of[id(module)])
        if len(nested) > 1:
            return
        before = recorder.current
        carried = list(floats((args, kwargs)))
        main = carried[0] if carried else next(filter(_number, tree_leaves((args, kwargs))), None)
        if carried and storage(carried[0]) != boundary[0]:
            carried[0].register_hook(come(before))
        index = recorder.begin(path_of[id(module)])
        part = recorder.parts[index]
        if main is not None:
            recorder.parts[before].output_elements = main.numel()
            part.entered, part.input_elements = storage(main), main.numel()
            part.width = int(main.shape[-1])
            for extra in carried[1:]:
                maker = recorder.maker(extra)
                if maker is not None and maker != before:
                    part.edges.append((maker, extra.numel()))

    def leave(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        nested.pop()
        if nested:
            return
        main = next(floats(out), None)
        if main is not None:
            recorder.part.output_elements = main.numel()
            main.register_hook(come(recorder.current))
            boundary[0] = storage(main)
        following = recorder.begin(None)
        if main is not None:
            recorder.parts[following].entered, recorder.parts[following].input_elements = storage(main), main.numel()

    def deeper(module: Any, *_: Any) -> None:
        inside.append(names[id(module)])

    def out_again(module: Any, *_: Any) -> None:
        inside.pop()

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(deeper))
        if id(module) in path_of:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        handles.append(module.register_forward_hook(out_again))
    key = "model.code" if source.code else "model.hf_config"
    try:
        with recorder, FusedAttention(recorder.attention):
            with saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
                given = feeds.on_meta(fed, dtype)
                out = model(**given, **feeds.fixed_arguments(model))
            loss, built_in = _loss(out)
            recorder.backward = True
            loss.backward()
    except Exception as error:  # the model's own code raises what it likes
        where = inside[-1] if inside else ""
        module = f"{where or type(model).__name__} ({type(model.get_submodule(where)).__name__})"
        if isinstance(error, ValueAskedError):
            why = f"what it computes depends on the data ({error} of a tensor)"
        else:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        config = getattr(model, "config", None)
        if chosen := getattr(config, "index_topk", None):
            why += f"; an indexer chooses the keys of each token (index_topk={chosen}), which no engine here trains and no price knows"
            if getattr(config, "model_type", None) == "deepseek_v32":
                why += ": with model_type=deepseek_v3 the file is the same model with attention to all tokens"
        raise InputError(key, type(model).__name__, f"can't be traced: {module}: {why}") from error
    finally:
        recorder.flow.close()
        for handle in handles:
            handle.remove()
    if source.code and not built_in:
        why = "its forward gives no loss to train by: a tensor of one number, (loss, logits), or an output with .loss"
        raise InputError(key, source.code, why)
    logits = getattr(out, "logits", None)
    vocabulary = recorder.rows.get(storage(given[feeds.TOKENS]), 0) if source.code and feeds.TOKENS in given else 0
    if vocabulary and recorder.classes and any(feed.copies == feeds.TOKENS for feed in fed):
        vocabulary = min(vocabulary, recorder.classes)
    return logits.numel() if built_in and isinstance(logits, torch.Tensor) else 0, vocabulary


def _loss(out: Any) -> tuple[torch.Tensor, bool]:
    """The model's own loss, or a mean of what it gives."""
    loss = build.loss_of(out)
    if loss is not None:
        return loss, True
    if isinstance(out, torch.Tensor):
        return out.float().mean(), False
    main = next(floats(tree_leaves(out)), None)
    if main is None:
        raise ValueError("its output has no loss, and no tensor that gradients flow through")
    return main.float().mean(), False


# ------------------------------------------------------------------------------------------------ parts become layers


def _runs(model: torch.nn.Module, recorder: Recorder, parts: Sequence[Part], logits: int, found: Partition) -> tuple[LayerRun, ...]:
    """Parts that cost the same are one kind; those that follow each other one run."""
    kinds = _kinds(model)
    for name in recorder.of_name:  # never used in this pass: held, and updated, all the same
        if name not in recorder.owner:
            recorder.use(name, recorder.parts.index(parts[0]))
    known: dict[tuple[Any, ...], LayerSpec] = {}
    taken: dict[str, int] = {}
    runs: list[LayerRun] = []
    last = len(parts) - 1
    roles = Roles(found.divided)
    specs = [_layer(part, kinds, logits if index == last else 0, roles) for index, part in enumerate(parts)]
    ratios = _backward_ratios(parts, specs)
    for index, part in enumerate(parts):
        spec = specs[index]
        moved = (replace(op, moved_backward=op.moved * ratios[spec]) if isinstance(op, Pointwise) else op for op in spec.ops)
        spec = replace(spec, ops=tuple(moved))
        base = _label(model, part, first=index == 0, last=index == last)
        key = (base, spec.weights, spec.ops, spec.input_elements, spec.output_elements)
        if key not in known:
            taken[base] = taken.get(base, 0) + 1
            known[key] = replace(spec, kind=base if taken[base] == 1 else f"{base}_{taken[base]}")
        spec = known[key]
        if runs and runs[-1].layer is spec:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(layer=spec, count=1))
    return tuple(runs)


def _label(model: torch.nn.Module, part: Part, *, first: bool, last: bool) -> str:
    if part.path is not None:
        return type(model.get_submodule(part.path)).__name__
    return "embedding" if first else "head" if last else "between"


def _kinds(model: torch.nn.Module) -> dict[str, WeightKind]:
    """The kind of each parameter, by its name."""
    found: dict[str, WeightKind] = {}
    for path, module in model.named_modules():
        name = type(module).__name__
        kind: WeightKind = "embedding" if "Embedding" in name else "norm" if "Norm" in name else "dense"
        for own, _ in module.named_parameters(recurse=False):
            found[f"{path}.{own}" if path else own] = kind
    return found


def _backward_ratios(parts: Sequence[Part], specs: Sequence[LayerSpec]) -> dict[LayerSpec, float]:
    """Bytes that memory-bound operations move in backward for each of forward's: of all equal parts together, since what accumulates at a
    block's border is counted in one or the other."""
    forward: Counter[LayerSpec] = Counter()
    backward: Counter[LayerSpec] = Counter()
    for part, spec in zip(parts, specs, strict=True):
        forward[spec] += part.forward_bytes
        backward[spec] += part.backward_bytes
    return {spec: backward[spec] / nbytes if nbytes else 0.0 for spec, nbytes in forward.items()}


def _layer(part: Part, kinds: dict[str, WeightKind], logits: int, roles: Roles) -> LayerSpec:
    """A part with its names made relative to its block, so that equal blocks are equal."""
    prefix = f"{part.path}." if part.path else ""

    def local(name: str) -> str:
        return name.removeprefix(prefix)

    def weight(name: str, parameter: torch.nn.Parameter, *, tied: bool) -> Weight:
        shape = tuple(parameter.shape) or (1,)
        by = roles.of_linear(name.rpartition(".")[0])
        split = 0 if by == "column" else 1 if by == "row" and len(shape) > 1 else None
        return Weight(name=local(name), shape=shape, split=split, kind=kinds[name], tied=tied)

    own = [weight(name, p, tied=False) for name, p in part.parameters.items()]
    tied = [weight(name, p, tied=True) for name, p in part.again.items() if prod(p.shape) > 1]
    kept = [(place, _divided(saved, roles, sources)) for (place, saved), sources in zip(part.saves, part.saved_sources, strict=True)]
    projection = _projection(part, logits)
    if projection is not None:  # `Traits.logits_bytes` has what the loss keeps
        kept = [(place, saved) for place, saved in kept if place <= projection or saved.elements < 0.9 * logits]
    ops: list[Op] = []
    for index, (op, sources) in enumerate(zip(part.ops, part.sources, strict=True)):
        if isinstance(op, Gemm):
            name = op.name.removesuffix(".weight")
            by = roles.of_linear(name)
            changed = replace(op, name=local(name), split=by)
            if by == "column":  # each linear all-reduces the gradient of its input by itself (deepspeed/module_inject/layers.py:973)
                ops.append(Enter(elements=op.tokens * op.k))
            ops.append(replace(changed, pad_to=VOCABULARY) if index == projection else changed)
            if by == "row":
                ops.append(Exit(elements=op.tokens * op.n))
        elif isinstance(op, Pointwise):
            of_loss = projection is not None and index > projection
            held = replace(op, shard="tp") if roles.inside(sources) else op
            ops.append(replace(held, name="cross_entropy") if of_loss else held)
        elif isinstance(op, Attention):
            saves = tuple(_divided(saved, roles, sources) for saved in op.saves)
            ops.append(replace(op, saves=saves, whole=not roles.inside(sources)))
        else:
            ops.append(op)
    if kept:
        saves = tuple(replace(saved, name=f"saved_{index}") for index, (_, saved) in enumerate(kept))
        if not ops or not isinstance(ops[0], Gemm | Pointwise):
            ops.insert(0, Pointwise(name="kept", elements=0, moved=0.0, shard="none"))
        first = ops[0]
        assert isinstance(first, Gemm | Pointwise)
        ops[0] = replace(first, saves=saves)
    return LayerSpec(
        kind="",
        weights=(*own, *tied),
        ops=tuple(ops),
        input_elements=part.input_elements,
        output_elements=part.output_elements,
        recomputable=part.path is not None,
    )


def _divided(saved: Saved, roles: Roles, sources: Iterable[str]) -> Saved:
    return replace(saved, shard="tp") if roles.inside(sources) else saved


def _projection(part: Part, logits: int) -> int | None:
    """Which operation of the head makes the logits."""
    if not logits:
        return None
    found = [index for index, op in enumerate(part.ops) if isinstance(op, Gemm) and op.tokens * op.n == logits]
    return found[-1] if found else None


def _edges(recorder: Recorder, parts: Sequence[Part], runs: Sequence[LayerRun]) -> tuple[Edge, ...]:
    """Tensors that enter a block beside what the block before it gives."""
    kinds = [run.layer.kind for run in runs for _ in range(run.count)]
    kind_of = {recorder.parts.index(part): kind for part, kind in zip(parts, kinds, strict=True)}
    found: dict[tuple[str, str, int], None] = {}
    for part in parts:
        target = kind_of[recorder.parts.index(part)]
        for maker, elements in part.edges:
            if maker in kind_of and kind_of[maker] != target:
                found[kind_of[maker], target, elements] = None
    return tuple(Edge(name=f"{source}_to_{target}", source=source, target=target, elements=elements) for source, target, elements in found)
