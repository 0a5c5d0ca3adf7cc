"""What a plan was made from, in words: measurements of now, of earlier runs, or both."""

from __future__ import annotations

from mosaic.profile import Profile


def source_of(profile: Profile) -> str:
    """Says when the samples of a profile were taken, and which of them were reused."""
    reused, total = profile.reused, len(profile.samples)
    if not reused:
        return f"planned from {total} samples measured {_minute(profile.environment.created)}"
    dates = sorted(sample.measured for sample in reused)
    first, last = _minute(dates[0]), _minute(dates[-1])
    when = first if first == last else f"{first} to {last}"
    if len(reused) == total:
        return f"planned from a profile of {when}, reused: nothing was measured again"
    return f"planned from {total} samples, of which {len(reused)} reused from {when} and {total - len(reused)} new"


def _minute(date: str) -> str:
    """A date of ISO 8601 to the minute, as people read it."""
    return f"{date[:16].replace('T', ' ')} UTC"
