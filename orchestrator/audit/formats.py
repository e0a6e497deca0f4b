"""Which of the formats that can be audited a file has, told by its name and its keys; then that format's own reader reads it."""

from __future__ import annotations

from functools import partial

from orchestrator.audit import accelerate, code, deepspeed, flags_yaml, fsdp, megatron_yaml, own, script, trainer
from orchestrator.audit.document import File, changed, is_json, opened, over_defaults
from orchestrator.audit.reading import READ, Source
from orchestrator.errors import InputError


def read(text: str, name: str) -> Source:
    """The file `name` with this text: what it says, and how it is edited. Raises InputError for a file that no reader takes."""
    if not text.strip():
        raise InputError("audit", name, "is empty")
    if name.endswith(".py"):
        return _code(text, name)
    if not is_json(text, name) and not name.endswith((".yaml", ".yml")):
        return script.read(text, name)
    try:
        file = opened(text, name)
    except InputError:
        if (relaxed := deepspeed.by_hjson(text)) is None:
            raise
        file = File(text, name, relaxed, partial(changed, text, name))
    content = file.content
    if own.is_engine_json(content):
        return own.read(file)
    if accelerate.is_accelerate(content):
        return accelerate.read(file)
    if trainer.is_trainer(content):
        return trainer.read(file)
    if deepspeed.is_ds_config(content):
        return deepspeed.read(file)
    if (section := flags_yaml.section_of(content)) is not None:
        return flags_yaml.read(file, section)
    whole, notes = over_defaults(content, name)
    file = file._replace(content=whole, notes=notes)
    if (program := fsdp.program_of(whole)) is not None:
        return fsdp.read(file, program)
    if (tool := megatron_yaml.tool_of(whole)) is not None:
        return megatron_yaml.read(file, tool)
    if "recipe" in content or "cluster" in content or isinstance(content.get("train"), dict):
        raise InputError("audit", name, "is a recipe of this planner: orchestrator plan recipe=FILE plans for it")
    if is_json(text, name):
        raise InputError("audit", name, f"is no ds_config: it has none of {', '.join(deepspeed.SIGNS)}, nor the Trainer's arguments")
    raise InputError("audit", name, f"has nothing by which it is known as {READ}")


def _code(text: str, name: str) -> Source:
    """A Python file that sets the fields of a recipe of Megatron-Bridge or NeMo 2. Raises InputError."""
    content, notes = code.content_of(text, name)
    tool = megatron_yaml.tool_of(content)
    if tool is None:
        raise InputError("audit", name, "sets no fields of Megatron-Bridge's or NeMo's configuration")
    return megatron_yaml.read(File(text, name, content, partial(code.changed, text, name), notes, code.called(text)), tool)
