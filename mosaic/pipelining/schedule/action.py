"""One action of a row of a pipeline, and its text.

``2F0.1`` is chunk 2's forward of microbatch 0, piece 1; the first piece is left out, ``2F0``. Messages go from one task
to another: ``SEND(2F0.1>5F0)`` and ``RECV(2F0.1>5F0)`` post one on both sides, ``SENT(2F0.1>5F0)`` waits until its
buffer is free again, and ``GOT(2F0.1>5F0)`` until it arrives. ``FREE(2F0.1)`` frees the activations of a forward, and
``REDUCE(2)`` sums a chunk's gradients over its data-parallel ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.compiled import ActionKind
from mosaic.pipelining.tasks import Task


class Verb(StrEnum):
    """Actions of a row beside computation."""

    SEND = "SEND"
    RECEIVE = "RECV"
    AWAIT_SENT = "SENT"
    AWAIT_RECEIVED = "GOT"
    FREE = "FREE"
    REDUCE = "REDUCE"


_NUMBER = r"(?:0|[1-9]\d*)"
_TASK = re.compile(rf"({_NUMBER})([FBW])({_NUMBER})(?:\.([1-9]\d*))?")
_ONE = rf"{_NUMBER}[FBW]{_NUMBER}(?:\.[1-9]\d*)?"
_CELL = re.compile(rf"{_ONE}|(?:SEND|RECV|SENT|GOT)\({_ONE}>{_ONE}\)|FREE\({_ONE}\)|REDUCE\({_NUMBER}\)")


@dataclass(frozen=True, slots=True)
class TaskName:
    """Name of a task of a step; ``str`` gives ``2F0.1``."""

    chunk: int
    """Index in the partition."""
    kind: ActionKind
    """Its phase."""
    microbatch: int
    """Index in the step."""
    piece: int = 0
    """Index of its sub-microbatch."""

    @classmethod
    def of(cls, task: Task) -> TaskName:
        """Returns a task's name."""
        return cls(task.chunk, task.kind, task.microbatch, task.piece)

    @classmethod
    def parse(cls, text: str) -> TaskName:
        """Reads the text of ``str``.

        Raises:
            InvalidScheduleError: It is not the name of a task.
        """
        match = _TASK.fullmatch(text)
        if match is None:
            raise _no_action(text)
        chunk, kind, microbatch, piece = match.groups()
        return cls(int(chunk), ActionKind(kind), int(microbatch), int(piece or 0))

    def __str__(self) -> str:
        piece = f".{self.piece}" if self.piece else ""
        return f"{self.chunk}{self.kind.value}{self.microbatch}{piece}"


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One action of a row; ``str`` and ``parse`` convert it to text and back."""

    verb: Verb | None = None
    """None: computes ``task``."""
    task: TaskName | None = None
    """The computed task, the sender, or the forward whose activations are freed."""
    target: TaskName | None = None
    """The receiver of a message."""
    chunk: int | None = None
    """The chunk whose gradients are reduced."""

    def __str__(self) -> str:
        if self.verb is None:
            return str(self.task)
        if self.verb is Verb.REDUCE:
            return f"{self.verb}({self.chunk})"
        return f"{self.verb}({self.task}>{self.target})" if self.target else f"{self.verb}({self.task})"

    @classmethod
    def parse(cls, text: str) -> PipelineAction:
        """Reads the text of ``str``.

        Raises:
            InvalidScheduleError: It is not an action.
        """
        check_cell(text)
        verb, parenthesis, inner = text.rstrip(")").partition("(")
        if not parenthesis:
            return cls(task=TaskName.parse(text))
        if verb == Verb.REDUCE:
            return cls(Verb.REDUCE, chunk=int(inner))
        task, arrow, target = inner.partition(">")
        return cls(Verb(verb), TaskName.parse(task), TaskName.parse(target) if arrow else None)


def check_cell(text: str) -> None:
    """Raises InvalidScheduleError unless a text is an action in its canonical form."""
    if _CELL.fullmatch(text) is None:
        raise _no_action(text)


def _no_action(text: str) -> InvalidScheduleError:
    return InvalidScheduleError(
        f"{text!r} is no action of a pipeline; write 2F0.1, SEND(2F0.1>5F0), RECV, SENT or GOT of the same, "
        "FREE(2F0.1) or REDUCE(2)"
    )
