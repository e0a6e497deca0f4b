"""usage: python -m orchestrator completion bash|zsh

The words that make a shell complete commands, keys and the names of recipes and clusters; nothing is installed.

  eval "$(python -m orchestrator completion bash)"          in ~/.bashrc
  eval "$(python -m orchestrator completion zsh)"           in ~/.zshrc
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final, get_args

from orchestrator.commands import COMMANDS, command_of
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.key import options_of
from orchestrator.recipe import KEYS, stored

SHELLS: Final = ("bash", "zsh")
BASH: Final = """\
_orchestrator() {
    local current=${COMP_WORDS[COMP_CWORD]} before=
    # A word with = is three to readline: key, = and value.
    if [[ $current == = ]]; then before=${COMP_WORDS[COMP_CWORD-1]}; current=
    elif [[ ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    case $before in
%(cases)s
    "") COMPREPLY=($(compgen -W "$([[ $COMP_CWORD == 1 ]] && echo %(commands)s) %(keys)s --help --json" -- "$current"))
        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace;;
    *) COMPREPLY=($(compgen -f -- "$current"));;
    esac
}
complete -o default -F _orchestrator orchestrator
"""


def _completion(words: Sequence[str]) -> None:
    if len(words) != 1 or words[0] not in SHELLS:
        raise InputError("completion", " ".join(words) or None, "needs a shell", SHELLS)
    print(script(words[0]), end="")


def values() -> dict[str, list[str]]:
    """The words that a key may have, of keys that have few."""
    found = {"recipe": stored("models"), "cluster": stored("clusters"), "engine": ["auto", *ENGINES]}
    for name, key in KEYS.items():
        words = [word for option in (key.type, *options_of(key.type)) for word in get_args(option) if isinstance(word, str)]
        if words and name not in found:
            found[name] = list(dict.fromkeys(words))
        elif bool in options_of(key.type):
            found[name] = ["true", "false"]
    return {name: list(words) for name, words in found.items()}


def script(shell: str) -> str:
    """The text that makes this shell complete words."""
    cases = "\n".join(
        f'    {name}) COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$current"));;' for name, words in values().items()
    )
    text = BASH % {"cases": cases, "commands": " ".join(COMMANDS), "keys": " ".join(f"{name}=" for name in KEYS)}
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


main = command_of(__doc__, _completion)
