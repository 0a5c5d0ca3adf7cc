"""Tensors made inside calls, not returned, and read elsewhere: by hooks, which chunks can call, or otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.follow import Followed
from mosaic.parts.finding.seen_call import SeenCall
from mosaic.parts.split import Value

_Read = tuple[Collection[Value], Collection[SeenCall]]
"""Values that were read, and calls whose inner tensors were read."""


def check_hooked(seen: Followed, blank: Followed) -> Followed:
    """Returns the run without data if its hooks kept the same tensors as the real run.

    Args:
        seen: A run in which a tensor made inside a site, and not returned, was read.
        blank: The run without data: only hooks of modules inside sites were called there.

    Raises:
        UnsplittableError: A tensor is kept other than by such hooks.
    """
    assert seen.kept is not None
    is_alike = [call.path for call in seen.calls] == [call.path for call in blank.calls] and blank.kept is None
    if not is_alike or not all(map(_Alike(seen, blank), _reads(seen), _reads(blank))):
        raise kept_inside(*seen.kept)
    return blank


def kept_inside(path: str, line: str) -> UnsplittableError:
    """Returns the error of a tensor made inside a call and read at a line: other ranks do not have it."""
    return UnsplittableError(
        f"a tensor made inside of {path} is used outside of it at {line}, other than as its result (an attribute keeps "
        "it, or a hook something else than what its module returns); on another rank it is not there: return it, or "
        "switch off what uses it"
    )


def _reads(followed: Followed) -> Iterator[_Read]:
    for call in (*followed.calls, *(() if followed.loss is None else (followed.loss,))):
        yield call.values, call.kept
    if followed.loss is None:
        for leaf in followed.output.values():
            yield leaf.values, leaf.inside


class _Alike:
    def __init__(self, seen: Followed, blank: Followed) -> None:
        self._seen, self._blank = seen.calls, blank.calls

    def __call__(self, read: _Read, blank_read: _Read) -> bool:
        returned = {value for value in blank_read[0] if value.leaf < self._blank[value.site].num_leaves}
        hooked_sites = {value.site for value in set(blank_read[0]) - returned}
        return set(read[0]) == returned and hooked_sites == {self._seen.index(call) for call in read[1]}
