"""Modules of plain numbers for the tests of pipelines, and hypothesis's models and steps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from bench.papers.data_sets import Microbatch
from mosaic.pipelining.cuts import partition_by
from mosaic.pipelining.layers import Feed, Layer, PipelineModel, Strategy
from mosaic.pipelining.partition import Partition, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Layers whose times are numbers of milliseconds a unit, with a fixed part; backward and weights as forward."""

    name: str
    unit_ms: tuple[float, ...]
    trains: tuple[bool, ...]
    counts: str = "images"
    fixed_ms: float = 0.0
    kept: int = 100
    workspace: int = 10
    boundary: int = 1000

    def num_parameters(self, first: int, count: int) -> int:
        return 10 * count

    def state_bytes(self, first: int, count: int) -> int:
        return sum(8 if trains else 1 for trains in self.trains[first : first + count])

    def units(self, microbatch: Microbatch) -> int:
        return int(getattr(microbatch, self.counts)) if self.counts != "all" else 1

    def layers(self, microbatch: Microbatch, units: int) -> tuple[Layer, ...]:
        found = []
        for own in self.unit_ms:
            time = self.fixed_ms + own * units
            keep = Strategy(name="keep", kept_bytes=self.kept * units)
            again = Strategy(name="recompute", kept_bytes=units, extra_backward_ms=time)
            found.append(
                Layer(
                    forward_ms=time,
                    backward_ms=time,
                    weights_ms=time,
                    strategies=(keep, again),
                    workspace_bytes=self.workspace,
                )
            )
        return tuple(found)

    def boundary_bytes(self, microbatch: Microbatch, units: int) -> int:
        return self.boundary * units

    output_bytes = boundary_bytes


def plain(
    name: str, layers: int, unit_ms: float = 1.0, *, trains: bool = True, counts: str = "images", **more
) -> Plain:
    return Plain(name=name, unit_ms=(unit_ms,) * layers, trains=(trains,) * layers, counts=counts, **more)


def vision_and_text(vision: int = 8, text: int = 8, *, text_ms: float = 4.0, **more) -> PipelineModel:
    """A vision encoder before a text model that every microbatch passes through."""
    return PipelineModel(
        modules=(plain("vision", vision, **more), plain("text", text, text_ms, counts="all")),
        feeds=(Feed(source="vision", target="text"),),
    )


def two_encoders() -> PipelineModel:
    return PipelineModel(
        modules=(plain("vision", 6), plain("audio", 4, 0.5, counts="audio_s"), plain("text", 8, 4.0, counts="all")),
        feeds=(Feed(source="vision", target="text"), Feed(source="audio", target="text")),
    )


def images(*counts: int) -> tuple[Microbatch, ...]:
    return tuple(Microbatch(text_tokens=100, images=count) for count in counts)


def cut_in_pieces(name: str, request: Request, sizes: Mapping[str, int]) -> Partition:
    """Cuts a model by a method; those that cut microbatches have these sizes."""
    partition = partition_by(name, request)
    return replace(partition, sizes=sizes) if name in ("separated", "colocated") else partition


def chain(layers: int, unit_ms: float = 1.0) -> PipelineModel:
    """One module of equal layers."""
    return PipelineModel(modules=(plain("text", layers, unit_ms, counts="all"),))


@st.composite
def steps(draw: st.DrawFn, max_microbatches: int = 5) -> tuple[Microbatch, ...]:
    one = st.builds(
        Microbatch,
        text_tokens=st.integers(1, 100),
        images=st.integers(0, 5),
        audio_s=st.sampled_from([0.0, 1.0, 3.0]),
    )
    return tuple(draw(st.lists(one, min_size=1, max_size=max_microbatches)))


@st.composite
def models(draw: st.DrawFn, min_layers: int = 1) -> PipelineModel:
    """One or two encoders before a text model, or not; any layers of them frozen."""

    def module(name: str, counts: str) -> Plain:
        layers = draw(st.integers(min_layers, min_layers + 4))
        times = tuple(draw(st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=layers, max_size=layers)))
        trains = tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers)))
        return Plain(name=name, unit_ms=times, trains=trains, counts=counts)

    encoders: Sequence[Plain] = [
        module(*one) for one in (("vision", "images"), ("audio", "audio_s")) if draw(st.booleans())
    ]
    return PipelineModel(
        modules=(*encoders, module("text", "all")),
        feeds=tuple(Feed(source=encoder.name, target="text") for encoder in encoders),
    )
