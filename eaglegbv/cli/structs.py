"""Commands whose arguments are structs: each of their fields is an option.

A command's signature names the structs that it takes. An option has its field's name, type and
default, and its help is what the struct's docstring says of the field. What is asked for that no
struct has raises where the command is defined.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature, cleandoc, signature
from operator import methodcaller
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.models import ParameterInfo

from eaglegbv.cli.terminal import styled
from eaglegbv.errors import EagleGBVError, InvalidArgument, one_of, shown

Command = TypeVar("Command", bound=Callable[..., object])
Member = TypeVar("Member", bound=StrEnum)
Reading = Callable[[str, Any], object]  # makes a field's value of its name and what typer read
Making = Callable[[Mapping[str, Any]], object]  # makes a command's argument of all that typer read

NAMES: Mapping[str, Sequence[str]] = {
    "compile_backend": ["--compile"],
    "validation_prompts": ["--validate"],
    "model": ["--model", "-m"],
    "prompt": ["--prompt", "-p"],
    "max_tokens": ["--max-tokens", "-n"],
    "temperature": ["--temperature", "-t"],
    "quiet": ["--quiet", "-q"],
    "at_once": ["--at-once", "--batch"],
}
"""Options that are not called like their fields, or have a letter too."""

NUMBERS: Sequence[type[float]] = (int, float)
"""Types of numbers, which are read here: typer's own errors do not state the value."""

_BY_NAME = Parameter.KEYWORD_ONLY


class Fields:
    """Which fields of a struct are options, beside it in a command's signature.

    Args:
        only: Those alone, and those with ``defaults``; all if none is named.
        of: The struct, where the command takes a dictionary of what was asked for instead: its
            options have no other defaults than these, and what was not given is left out.
        without: Fields that are no options.
        shown: How help shows the defaults of the struct ``of``.
        defaults: Defaults other than the struct's. What is None here the command sets itself.
    """

    def __init__(
        self,
        *only: str,
        of: type[Any] | None = None,
        without: Collection[str] = (),
        shown: str = "{}",
        **defaults: object,
    ) -> None:
        self.of = of
        self._only = {*only, *defaults} if only else None
        self._without = without
        self._shown = shown
        self._defaults = defaults

    def options(self, struct: type[Any]) -> "dict[str, Option]":
        """Return the options by name.

        Raises:
            TypeError: The struct lacks a field that is named, or no option can have its values.
        """
        options: dict[str, Option] = {}
        unknown = {*(self._only or ()), *self._without, *self._defaults}
        for field in fields_of(struct):
            unknown.discard(field.name)
            if field.name in self._without or field.name in options:
                continue
            if self._only is None or field.name in self._only:
                options[field.name] = self._option(field, _title(struct))
        if unknown:
            raise TypeError(f"{struct.__name__} has no field {', '.join(sorted(unknown))}")
        return options

    def _option(self, field: "Field", group: str) -> "Option":
        shown: str | bool = True
        default = self._defaults.get(field.name, field.default)
        if self.of is not None and field.name not in self._defaults:
            usual = _text(field.default)
            shown = False if usual is None else self._shown.format(usual)
            default = None
        names = [*NAMES.get(field.name, ())]
        if not names and field.default is False:  # there is no --no-NAME
            names = [f"--{field.name.replace('_', '-')}"]
        note = typer.Option(*names, help=field.text, show_default=shown, rich_help_panel=group)
        return Option.of(field.name, field.kind, default, note)

    def make(self, struct: type[Any], names: Collection[str], values: Mapping[str, Any]) -> object:
        """Return what the command takes, given the values of all options that have one."""
        given = {name: values[name] for name in names if name in values}
        if self.of is not None:
            return given
        for name, default in self._defaults.items():
            if default is None:
                given.setdefault(name, None)
        return _made(struct, given)


class Option(NamedTuple):
    """An option, and how its value is read."""

    argument: Parameter  # what typer makes the option of
    read: Reading

    @classmethod
    def of(cls, name: str, kind: Any, default: object, *notes: object) -> Self:  # noqa: ANN401  a type
        """Return the option of an argument of a type, given typer's note on it."""
        kind = _without_none(kind)
        taken, read = reading_of(kind)
        shown = _text(default)
        if kind in NUMBERS:
            notes = tuple(_named(note, f"<{kind.__name__}>") for note in notes)
            shown = str(shown) if isinstance(shown, int | float) else shown
        elif is_choice(kind):
            notes = tuple(_named(note, "|".join(kind)) for note in notes)
        if shown is None:
            taken = taken | None
        noted: Any = Annotated[taken, *notes]
        return cls(Parameter(name, _BY_NAME, default=shown, annotation=noted), read)


class Field(NamedTuple):
    """A field of a struct."""

    name: str
    kind: Any  # its type
    default: object  # `Parameter.empty` for none
    text: str  # what the docstring says of it


def fields_of(struct: type[Any]) -> Iterator[Field]:
    """Yield the fields of a struct, those of a struct within it in its place."""
    said = documented_fields(struct)
    kinds = get_type_hints(struct)
    for name, argument in signature(struct).parameters.items():
        if is_struct(kinds[name]):
            yield from fields_of(kinds[name])
        else:
            yield Field(name, kinds[name], argument.default, said.get(name, ""))


def is_struct(kind: object) -> bool:
    """Whether a type is a struct, whose fields can be options."""
    if not isinstance(kind, type):
        return False
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def is_choice(kind: object) -> bool:
    """Whether a type is an enumeration of names, one of which an option has."""
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _title(struct: type[Any]) -> str:
    """Return what help calls the options of a struct: its name, in words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", struct.__name__).capitalize()


def _made(struct: type[Any], values: Mapping[str, Any]) -> object:
    """Return a struct with those of the values that are its fields'."""
    made = {}
    kinds = get_type_hints(struct)
    for name in signature(struct).parameters:
        if is_struct(kinds[name]):
            made[name] = _made(kinds[name], values)
        elif name in values:
            made[name] = values[name]
    return struct(**made)


def documented_fields(struct: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a struct and of its bases say of each field, without markup."""
    said: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        _, _, section = cleandoc(base.__doc__ or "").partition("Attributes:\n")
        section, *_ = re.split(r"\n(?=\S)", section)
        for entry in re.split(r"\n(?= {4}\w)", f"\n{section}"):
            name, _, text = entry.partition(":")
            plain = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", " ".join(text.split()))
            said[name.strip()] = plain.replace("``", "")
    return said


def reading_of(kind: Any) -> tuple[Any, Reading]:  # noqa: ANN401  a type
    """Return the type that typer reads for a field's, and what makes the field's value of that."""
    if is_choice(kind):
        members = kind
        return str, lambda name, value: member(name, value, members)
    if get_origin(kind) in (tuple, list, Sequence):
        entry = get_args(kind)[0]
        if entry in (int, float):
            return str, lambda name, value: tuple(entries(name, value, entry))
        return list[entry], lambda _, values: tuple(values)  # type: ignore[valid-type]
    if kind in NUMBERS:
        return str, lambda name, text: _read_number(name, text, kind)
    if kind in (str, bool, Path):
        return kind, _as_it_is
    raise TypeError(f"no option has values of type {kind}")


def _without_none(kind: Any) -> Any:  # noqa: ANN401  a type
    if get_origin(kind) in (Union, UnionType):
        return next(one for one in get_args(kind) if one is not NoneType)
    return kind


def _named(note: object, metavar: str) -> object:
    """Return a note of typer's that calls an option's value so, unless it has another name."""
    note = copy(note)
    if isinstance(note, ParameterInfo):
        note.metavar = note.metavar or metavar
    return note


def _read_number(name: str, text: str, kind: type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise InvalidArgument(name, text, expected) from None


def _as_it_is(name: str, value: object) -> object:
    del name
    return value


def entries(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Return the entries of a list separated by commas, or of integers as in 3x2x2x1."""
    separator = "[,x]" if kind is int else ","
    parts = [part.strip() for part in re.split(separator, text)]
    try:
        if all(parts):
            return [kind(part) for part in parts]
    except ValueError:
        pass
    wanted = "integers" if kind is int else "numbers" if kind is float else "names"
    raise InvalidArgument(option, text, f"{wanted} separated by commas")


def member(option: str, name: str, kind: type[Member]) -> Member:
    """Return the member of ``kind`` that an option names."""
    if name not in set(kind):
        raise InvalidArgument(option, name, one_of(kind, name))
    return kind(name)


def _text(default: object) -> object:
    """Return a default as an option has it: numbers separated by commas, None for nothing."""
    if isinstance(default, tuple):
        return ",".join(f"{number:g}" for number in default) or None
    return default


def with_options(command: Callable[..., object]) -> Callable[..., object]:
    """Return a command for typer, whose arguments are options and make those of ``command``."""
    options: dict[str, Option] = {}
    makers: dict[str, Making] = {}
    for name, argument in signature(command).parameters.items():
        kind = argument.annotation
        notes: list[object] = []
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
        fields = next((note for note in notes if isinstance(note, Fields)), Fields())
        struct = fields.of or kind
        if is_struct(struct):
            of_struct = fields.options(struct)
            options = options | of_struct | options  # a field that two structs have is one option
            makers[name] = partial(fields.make, struct, of_struct.keys())
            continue
        makers[name] = methodcaller("get", name)
        if any(isinstance(note, ParameterInfo) for note in notes):
            options[name] = Option.of(name, kind, argument.default, *notes)
        else:  # what typer itself gives, such as its context
            options[name] = Option(Parameter(name, _BY_NAME, annotation=kind), _as_it_is)

    @wraps(command)
    def run(**given: object) -> object:
        values = {
            name: options[name].read(name, value)
            for name, value in given.items()
            if value is not None
        }
        return command(**{name: make(values) for name, make in makers.items()})

    arguments = [option.argument for option in options.values()]
    run.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    run.__annotations__ = {argument.name: argument.annotation for argument in arguments}
    return run


class GroupedCommand(TyperCommand):
    """A command whose help has its options in groups, each under a heading."""

    def group(self, option: TyperOption) -> str:
        """Return the heading of an option's group, by default its struct's."""
        return option.rich_help_panel or "Options"

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  click's
        """Write the groups."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None:
                groups.setdefault(heading_of(self, param), []).append(row)
        for heading, rows in groups.items():
            if rows:
                with formatter.section(styled(heading, bold=True)):
                    formatter.write_dl(rows)


def heading_of(command: object, param: Any) -> str:  # noqa: ANN401  click's
    """Return the heading under which help has an argument or an option."""
    if isinstance(command, GroupedCommand) and isinstance(param, TyperOption):
        return command.group(param)
    return "Arguments" if param.param_type_name == "argument" else "Options"


class App(typer.Typer):
    """An application whose commands take structs; see :class:`typer.Typer`."""

    def __call__(self, words: Sequence[str] | None = None, **how: Any) -> Any:  # noqa: ANN401
        """Run a command line; what is wrong is said with the names of options for arguments."""
        words = sys.argv[1:] if words is None else words
        try:
            return super().__call__(words, **how)
        except InvalidArgument as error:
            command = typer.main.get_command(self)
            raise EagleGBVError(_in_options_terms(error, command, words)) from error

    def command(self, *names: Any, **how: Any) -> Callable[[Command], Command]:  # noqa: ANN401
        """Return a decorator that adds a command."""
        how.setdefault("cls", GroupedCommand)
        return _expanding(super().command(*names, **how))

    def callback(self, *names: Any, **how: Any) -> Callable[[Command], Command]:  # noqa: ANN401
        """Return a decorator that adds what runs before the commands."""
        return _expanding(super().callback(*names, **how))


def _in_options_terms(error: InvalidArgument, command: Any, words: Sequence[str]) -> str:  # noqa: ANN401
    """Return what ``error`` says, with the names of the given command's options for arguments."""
    if isinstance(command, TyperGroup):
        given = [command.commands[word] for word in words if word in command.commands]
        command = given[0] if given else command
    options = {name for param in command.params for name in param.opts}

    def option(match: re.Match[str]) -> str:
        name = "--" + match[0].replace("_", "-")
        known = (name, name.removesuffix("s"), name.removesuffix("-backend"))
        return next((one for one in known if one in options), match[0])

    argument = re.sub(r"^[a-z_-]+$", option, error.argument)
    expected = re.sub(r"\b[a-z]+(_[a-z]+)+\b", option, error.expected)
    missing = error.value is None and argument.startswith("--")
    value = f"no {argument}" if missing else f"{argument}={shown(error.value)}"
    return f"{value}: expected {expected}"


def _expanding(add: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def added(command: Command) -> Command:
        add(with_options(command))
        return command

    return added
