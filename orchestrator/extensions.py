"""What other packages add: engines, families and GPUs that they declare as entry points.

An installed package names in its metadata what it has, and under which name it is asked for (pyproject.toml):

    [project.entry-points."orchestrator.engines"]
    ddp = "ddp_engine:ENGINE"

Nothing of it is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from orchestrator.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Extensible(Mapping[str, T], Generic[T]):
    """Our own by name, then those of the entry points in `group`, sorted by name: each is loaded when it is first asked for, and must be a
    `kind`.

    Raises InputError, naming the package, where two have one name, or one can't be loaded or is something else.
    """

    def __init__(self, group: str, kind: type[T], own: Mapping[str, T]) -> None:
        self.group, self.kind, self.own = group, kind, own
        self._loaded: dict[str, T] = dict(own)

    @cached_property
    def _found(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # 40 ms that only who asks for names pays

        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _package(point))):
            if point.name in self.own:
                raise InputError(self.group, point.name, f"of package {_package(point)} has the name of one of ours")
            other = found.setdefault(point.name, point)
            if other != point:
                raise InputError(self.group, point.name, f"is what both {_package(other)} and {_package(point)} declare")
        return found

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = self._load(self._found[name])
        return self._loaded[name]

    def _load(self, point: EntryPoint) -> T:
        try:
            value = point.load()
        except Exception as error:  # another's module raises what it likes
            why = f"of package {_package(point)} can't be loaded: {type(error).__name__}: {error}"
            raise InputError(self.group, point.name, why) from error
        if not isinstance(value, self.kind):
            raise InputError(self.group, point.name, f"of package {_package(point)}: {point.value} is no {self.kind.__name__}")
        calls_itself = getattr(value, "name", point.name)
        if calls_itself != point.name:
            raise InputError(self.group, point.name, f"of package {_package(point)}: {point.value} calls itself {calls_itself}")
        return value

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self._found

    def __len__(self) -> int:
        return len(self.own) + len(self._found)

    def __contains__(self, name: object) -> bool:
        """Whether there is an entry of this name; does not load it."""
        return name in self.own or name in self._found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "without a name"
