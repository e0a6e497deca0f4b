"""Supervised samples by themselves: what a line of a jsonl holds, and where its answers lie once a chat template has written it.

Ranks encode by transformers' template and tokenizer (workers/sft.py); before anything is planned `reader` does the same by jinja2 and
tokenizers alone, without torch (tests/workers/test_chats.py holds them together). Both go through `encoded`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.errors import InputError
from orchestrator.key import NO_TEXT, is_text, shown

KINDS: Final = ('{"messages": [{"role": "user", "content": "..."}, ...]}', '{"prompt": "...", "completion": "..."}')
ANSWERS: Final = "assistant"
MOST_BYTES: Final = 5_000_000
"""Bytes that a line may have. A tokenizer takes some 190 bytes of memory for each."""
COLUMNS: Final = ("messages", "prompt", "completion", "tools", "chat_template_kwargs", "images", "image")
"""What of a line is read; TRL's names (trl/trainer/sft_trainer.py, tokenize_fn)."""
LABELS: Final = {"id", "uid", "uuid", "idx", "index", "source", "dataset", "split", "metadata", "meta", "tool_call_id", "name", "type"}
"""Columns, and fields of messages, that say where something comes from: nobody expects them to be trained on."""
GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKS: Final = ("\ufdd0", "\ufdd1")
"""Unicode's noncharacters, which no text has, for where what the model writes begins and ends."""
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; transformers gives templates the first two of them (utils/chat_template_utils.py,
_alias_reasoning_fields)."""


class Chat(NamedTuple):
    """A conversation. `learnt`: which of its messages have a loss; `keywords`: what the template is given beside them."""

    messages: list[dict[str, Any]]
    learnt: tuple[int, ...]
    keywords: dict[str, Any]


class Pair(NamedTuple):
    prompt: str
    completion: str


Encoded = tuple[list[int], list[bool]]
"""Ids, and whether each is of an answer."""
Tokens = Callable[[str, Sequence[tuple[int, int]]], Encoded]
"""Ids of a text whose answers are from one character to another; a token is of an answer where it has a character of one."""
Render = Callable[..., str]
"""A template: its text of messages, by add_generation_prompt= and `Chat.keywords`."""
Blocks = list[tuple[int, int]]
Mark = Callable[..., tuple[str, Blocks] | None]
"""A template's text of messages, and where its {% generation %} blocks are there (characters from, to); None: it has no such blocks."""


def sample_of(line: bytes, where: str) -> Chat | Pair:
    """The sample of a line. Raises InputError for what is none or has nothing to learn, with its place `where`.

    >>> sample_of(b'{"prompt": "2+2=", "completion": "4"}', "a.jsonl:1")
    Pair(prompt='2+2=', completion='4')
    """
    if len(line) > MOST_BYTES:
        raise InputError("data", where, f"is a line of more than {MOST_BYTES:,} bytes; a sample of a million tokens has fewer")
    try:
        sample = json.loads(line)
        whole = json.dumps(sample, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InputError("data", where, f"is not JSON: {error}") from None
    if not is_text(whole):
        raise InputError("data", where, NO_TEXT)
    if isinstance(sample, dict):
        messages: Any
        messages, prompt, completion = (sample.get(name) for name in ("messages", "prompt", "completion"))
        if _are_messages(messages):
            return _chat(sample, messages, 0, where)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Pair(prompt, completion)
        if _are_messages(prompt) and _are_messages(completion):  # TRL's conversational form
            before = list(prompt or ())
            return _chat(sample, [*before, *(completion or ())], len(before), where)
    raise InputError("data", where, "is no sample of task=sft", KINDS)


def _are_messages(found: Any) -> bool:
    """Whether it is a list of messages, and of one at least."""
    each = found if isinstance(found, list) else []
    return bool(each) and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in each)


def _chat(sample: Mapping[str, Any], messages: list[dict[str, Any]], first: int, where: str) -> Chat:
    """The chat of these messages, of which those from `first` on may be learnt. Raises InputError."""
    turns = [index for index, message in enumerate(messages) if message["role"] == ANSWERS]
    if not any(turn >= first for turn in turns):
        raise InputError("data", where, "has no message of the assistant: nothing to learn")
    for index, message in enumerate(messages):
        weight, who = message.get("weight"), f"message {index + 1}"
        if index in turns and all(value is None for name, value in message.items() if name not in ("role", "weight")):
            raise InputError("data", where, f"{who} is the assistant's and says nothing")
        if weight not in (None, 0, 1):
            raise InputError("data", where, f"{who} has weight {shown(json.dumps(weight))}; 0 (no loss) and 1 are taken")
        if weight and index not in turns:
            raise InputError("data", where, f"{who} has weight 1 and is the {message['role']}'s: answers alone have a loss")
    learnt = tuple(turn for turn in turns if turn >= first and messages[turn].get("weight") in (None, 1))
    if not learnt:
        raise InputError("data", where, "has weight 0 at every answer: nothing to learn")
    tools, more = sample.get("tools"), sample.get("chat_template_kwargs")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except ValueError as error:
        raise InputError("data", where, f"its tools are no JSON: {error}") from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError("data", where, "its tools are no list of JSON objects, nor the text of one")
    if more is not None and not isinstance(more, dict):
        raise InputError("data", where, "its chat_template_kwargs is no JSON object")
    given = {"tools": tools} if tools else {}  # of [] Llama's template would write something: trl/data_utils.py
    return Chat(messages, learnt, given | (more or {}))


def unused(line: bytes, template: str | None) -> set[str]:
    """What a line has that nothing is done with: columns, and where the `template` is known what of messages it never names. Labels are
    no such thing.

    >>> sorted(unused(b'{"prompt": "a", "completion": "b", "functions": [1], "id": 3}', None))
    ['functions']
    """
    sample: dict[str, Any] = json.loads(line)
    pair = isinstance(sample.get("prompt"), str) and not sample.get("messages")
    read = ("prompt", "completion") if pair else COLUMNS if not sample.get("messages") else (COLUMNS[0], *COLUMNS[3:])
    found = {name for name, value in sample.items() if name not in read and name not in LABELS and not name.endswith("_id") and value}
    if template is None or pair:
        return found
    messages = [message for name in COLUMNS[:3] for message in sample.get(name) or () if isinstance(message, dict)]
    fields = {name for message in messages for name, value in message.items() if value not in (None, "", [])}
    if any(name in template for name in REASONING[:2]):
        fields -= {*REASONING}
    found |= {f"messages.{name}" for name in fields - LABELS - {"role", "content", "weight"} if name not in template}
    given = [name for name in ("tools",) if sample.get(name)] + [*(sample.get("chat_template_kwargs") or ())]
    return found | {name for name in given if name not in template and name != "chat_template"}


def encoded(
    sample: Chat | Pair, render: Render | None, tokens: Tokens | None, eod: int, where: str, mark: Mark | None = None
) -> list[Encoded]:
    """The samples that a line makes. Of a pair they are the ids of prompt, completion and the end of the document, which is learnt too:
    bytes without `tokens`. A chat is written by the template; where that writes earlier turns otherwise once others follow (it leaves out
    old reasoning, say), each answer is a sample of its own, behind what the model would have seen then. An answer is all that the template
    writes behind its generation prompt, with the line break behind its end: so do TRL's own templates for it (trl/chat_templates,
    qwen3_training.jinja) and LLaMA-Factory (data/template.py, qwen3); Axolotl's ends before it. Where the template marks what the model
    writes ({% generation %}), what it marks of an answer is learnt and no more: TRL's assistant_only_loss. Raises InputError."""
    if isinstance(sample, Pair):
        before, whole = sample.prompt, sample.prompt + sample.completion
        if tokens is None:
            ids, size = [*whole.encode()], len(before.encode())
            return [([*ids, eod], [at >= size for at in range(len(ids) + 1)])]
        ids, answer = tokens(whole, [(len(before), len(whole))])
        return [([*ids, eod], [*answer, True])]
    if render is None or tokens is None:
        raise InputError("tokenizer", None, f"has no chat template, which {where} needs")

    def written(upto: int, by: Callable[..., Any], *, prompt: bool = False) -> Any:
        try:
            return by(sample.messages[:upto], add_generation_prompt=prompt, **sample.keywords)
        except Exception as error:  # jinja2's, and what the template raises itself
            raise InputError("data", where, f"the tokenizer's chat template does not take it: {error}") from None

    whole, found = str(written(len(sample.messages), render)), []
    for turn in sample.learnt:
        after = str(written(turn + 1, render))
        marks = written(turn + 1, mark) if mark else None
        before = str(written(turn, render, prompt=marks is None)) if turn else ""
        if not after.startswith(before) or (marks is not None and marks[0] != after):
            why = "begin an answer with its own generation prompt" if marks is None else "write what is before an answer as without it"
            raise InputError("tokenizer", where, f"its chat template does not {why}")
        blocks = [(len(before), len(after))] if marks is None else marks[1]
        found.append((after, [(begin, end) for begin, end in blocks if len(before) <= begin < end]))
    if not any(answers for _, answers in found):
        raise InputError("tokenizer", where, "its chat template marks nothing of the answers by {% generation %}: nothing to learn")
    if all(whole.startswith(after) for after, _ in found):
        return [tokens(whole, [one for _, answers in found for one in answers])]
    return [tokens(after, answers) for after, answers in found if answers]


def ends_inside_token(sample: Pair, tokens: Tokens) -> bool:
    """Whether the prompt alone has other ids than before its completion: a model that is trained on " red" behind "colour:" generates
    from "colour: ", which ends in a token of the space alone. TRL warns of it too (trl 1.16, trainer/sft_trainer.py:1354)."""
    alone, _ = tokens(sample.prompt, ())
    whole, _ = tokens(sample.prompt + sample.completion, ())
    return whole[: len(alone)] != alone


def overlapping(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token, which is from one character to another, has one of an answer: so transformers masks (processing_utils.py,
    _adjust_assistant_masks_indices). The first may begin before it, as " red" does behind "Answer: "."""
    return [any(max(first, begin) < min(last, end) for begin, end in answers) for first, last in offsets]


# ------------------------------------------------------------------------------------------------------- without transformers


class Reader(NamedTuple):
    """A tokenizer's folder as it can be read without transformers. `source`: its template's text; None: it has none that can be used."""

    tokens: Tokens
    render: Render | None
    source: str | None
    mark: Mark | None = None


def reader(folder: str) -> Reader | None:
    """What counts tokens by the folder's own tokenizer.json; None where that or the package `tokenizers` is not there. Raises InputError
    for a tokenizer.json that can't be read."""
    path = Path(folder) / "tokenizer.json"
    if find_spec("tokenizers") is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise InputError("tokenizer", shown(folder), f"its tokenizer.json can't be read: {error}") from None
    known.no_truncation()
    known.no_padding()

    def tokens(text: str, answers: Sequence[tuple[int, int]]) -> Encoded:
        found = known.encode(text, add_special_tokens=False)
        return found.ids, overlapping(found.offsets, answers)

    settings = _settings(folder)
    templates = _templates(folder, settings)
    if not templates or find_spec("jinja2") is None:
        return Reader(tokens, None, None)
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items() if name.endswith("_token")
    }
    special = {name: value for name, value in texts.items() if isinstance(value, str)}
    return Reader(tokens, partial(_rendered, templates, special), "\n".join(templates.values()), partial(marked, templates, special))


def _settings(folder: str) -> dict[str, Any]:
    """special_tokens_map.json, and tokenizer_config.json over it."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = json.loads((Path(folder) / name).read_text())
        except (OSError, ValueError):
            continue
        found |= content if isinstance(content, dict) else {}
    return found


def _templates(folder: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, as transformers finds them: chat_template.jinja goes before tokenizer_config.json's."""
    alone = Path(folder) / "chat_template.jinja"
    if alone.is_file():
        more = {path.stem: path.read_text() for path in sorted((Path(folder) / "additional_chat_templates").glob("*.jinja"))}
        return more | {"default": alone.read_text()}
    said = settings.get("chat_template")
    if isinstance(said, str):
        return {"default": said}
    named = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
    return {str(one.get("name")): str(one.get("template")) for one in named}


def _source(templates: Mapping[str, str], keywords: Mapping[str, Any]) -> str:
    """The template that is taken of a tokenizer's, by name, for these arguments."""
    named = "tool_use" if keywords.get("tools") is not None and "tool_use" in templates else "default"
    return str(keywords.get("chat_template", templates.get(named)))


def marked(
    templates: Mapping[str, str], special: Mapping[str, str], messages: Sequence[Mapping[str, Any]], **keywords: Any
) -> tuple[str, Blocks] | None:
    """What `_rendered` writes, and where its {% generation %} blocks are there (characters from, to); None: the template has none."""
    if not GENERATION.search(_source(templates, keywords)):
        return None
    text, begun, found = "", 0, []
    for part in re.split(f"([{''.join(MARKS)}])", _rendered(templates, special, messages, marks=True, **keywords)):
        if part == MARKS[0]:
            begun = len(text)
        elif part == MARKS[1]:
            found.append((begun, len(text)))
        else:
            text += part
    return text, found


def _rendered(
    templates: Mapping[str, str], special: Mapping[str, str], messages: Sequence[Mapping[str, Any]], *, marks: bool = False, **keywords: Any
) -> str:
    """What transformers' apply_chat_template writes (utils/chat_template_utils.py, render_jinja_template). `marks`: with `MARKS` around
    what the model writes."""
    source = _source(templates, keywords)
    keywords.pop("chat_template", None)
    said = []
    for message in messages:
        reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
        more = {} if reasoning is None else {"reasoning_content": reasoning}
        said.append({**({"thinking": reasoning} if more else {}), **message, **more})
    return str(_compiled(source, marks).render(**{"tools": None, "documents": None, **special, "messages": said, **keywords}))


@cache
def _compiled(source: str, marks: bool) -> Any:
    """A template of jinja2, in a sandbox with transformers' functions."""
    from datetime import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks what the model writes, and writes nothing but `MARKS` where they are asked for."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marks:
                begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in MARKS)
                body = [begin, *body, end]
            return jinja2.nodes.Scope(body).set_lineno(line)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda text: datetime.now().strftime(text)}
    return environment.from_string(source)
