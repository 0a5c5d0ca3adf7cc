"""What is made inside of calls, not returned, and read elsewhere: by hooks, which chunks can call, or otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mosaic.errors import UnsplittableError
from mosaic.parts.finding.follow import Followed
from mosaic.parts.finding.seen_call import SeenCall
from mosaic.parts.split import Value

_Read = tuple[Collection[Value], Collection[SeenCall]]
"""Values that were read, and calls inside of which something was made that was read."""


def check_hooked(seen: Followed, blank: Followed) -> Followed:
    """Returns what a run showed in which nothing inside of sites ran, if hooks kept there what they keep otherwise.

    Args:
        seen: A run in which something was read that was made inside of a site, and not returned.
        blank: The same without data: hooks of modules inside of sites were called, and nothing else there.

    Raises:
        UnsplittableError: Something is kept other than by such hooks.
    """
    assert seen.kept is not None
    is_alike = [call.path for call in seen.calls] == [call.path for call in blank.calls] and blank.kept is None
    if not is_alike or not all(map(_Alike(seen, blank), _reads(seen), _reads(blank))):
        raise kept_inside(*seen.kept)
    return blank


def kept_inside(path: str, line: str) -> UnsplittableError:
    """Returns the error that something made inside of a call is read at a line, and is not there on other ranks."""
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

    def __call__(self, one: _Read, other: _Read) -> bool:
        returned = {value for value in other[0] if value.leaf < self._blank[value.site].num_leaves}
        kept = {value.site for value in set(other[0]) - returned}
        return set(one[0]) == returned and kept == {self._seen.index(call) for call in one[1]}
