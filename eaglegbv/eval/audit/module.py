"""A user's own verifiers, loaded from a Python file, in the same audit as the package's."""

import importlib.util
import sys
from abc import ABC, abstractmethod
from inspect import isabstract, isclass
from pathlib import Path
from types import ModuleType

from eaglegbv.config import DraftSampling
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.exact import Subject, exact_subject
from eaglegbv.eval.audit.sampled import sampled_subject
from eaglegbv.verifiers.base import Rule, Verifier
from eaglegbv.verifiers.proof.chooser import Chooser
from eaglegbv.verifiers.proof.enumeration import stateless
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.stateful import ModifiedTarget, StatefulVerifier, Step


class ReferenceVerifier(Rule, ABC):
    """A rule written for the audit: it judges one request, and the chooser makes all its choices.

    The audit walks all branches of the chooser, so its result is exact.
    """

    @abstractmethod
    def decide(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Judge one tree, as a pure function of the tree and the chooser's answers."""


class StatefulReferenceVerifier(Rule, ABC):
    """A :class:`ReferenceVerifier` that leaves a modified target for the next step."""

    @abstractmethod
    def decide(self, tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        """Judge one tree, given the target that earlier steps modified."""


DEFAULT_SAMPLES = 20_000  # default number of samples per problem for a batched verifier
Audited = ReferenceVerifier | StatefulReferenceVerifier | Verifier | StatefulVerifier


def load_verifiers(path: Path) -> list[Audited]:
    """Return an instance of every concrete verifier class that a Python file defines.

    Raises:
        InvalidArgument: The file does not exist or cannot be imported, or its classes lack
            attributes that every verifier has.
    """
    module = _load(path)
    bases = (ReferenceVerifier, StatefulReferenceVerifier, Verifier, StatefulVerifier)
    classes = [
        value
        for value in vars(module).values()
        if isclass(value)
        and issubclass(value, bases)
        and value.__module__ == module.__name__
        and not isabstract(value)
    ]
    if not classes:
        wanted = " or ".join(base.__name__ for base in bases)
        raise InvalidArgument("module", str(path), f"a file that defines a subclass of {wanted}")
    for cls in classes:
        _check(cls)
    return [cls() for cls in classes]


def as_subject(verifier: Audited, samples: int | None) -> Subject:
    """Return the audit's subject for a user's verifier: enumerated, or sampled if it is batched.

    Raises:
        InvalidArgument: ``samples`` is given for a verifier that is not batched.
    """
    if isinstance(verifier, Verifier | StatefulVerifier):
        return sampled_subject(verifier, DEFAULT_SAMPLES if samples is None else samples)
    if samples is not None:
        raise InvalidArgument("samples", samples, f"none: {verifier.name!r} is enumerated")
    if isinstance(verifier, ReferenceVerifier):
        return exact_subject(verifier, stateless(verifier.decide))
    return exact_subject(verifier, verifier.decide)


def _load(path: Path) -> ModuleType:
    name = f"audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidArgument("module", str(path), "a readable Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except (OSError, SyntaxError, ImportError, UnicodeDecodeError) as error:
        raise InvalidArgument("module", str(path), f"a file that imports ({error})") from error
    return module


def _check(cls: type[Rule]) -> None:
    try:
        name = cls.name
        samplings = cls.draft_samplings
    except AttributeError as error:
        expected = f"a class attribute of {cls.__name__}"
        raise InvalidArgument(str(error.name), None, expected) from None
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{cls.__name__}.name", name, "the verifier's name")
    if not isinstance(samplings, frozenset) or not samplings or not samplings <= set(DraftSampling):
        known = ", ".join(sorted(DraftSampling))
        raise InvalidArgument(
            f"{cls.__name__}.draft_samplings", samplings, f"a frozenset of {{{known}}}"
        )
