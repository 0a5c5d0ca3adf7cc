"""A cache of measurements in memory and in a folder, from which a killed run resumes.

One file holds one module and is named by its ``ModuleKey``. Files are replaced atomically. If two processes measure a
module at the same time, samples of one may be lost and are measured again later.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.artifact import StrictFile, fingerprint, load, save
from mosaic.backends.base import Backend
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.find.structure import tensors_in
from mosaic.hardware.find import available_cores
from mosaic.profile import Environment, ModuleMemory, PairSample, Sample
from mosaic.profiler.subject import Subject

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKey(StrictFile):
    """Everything that determines a module's time; modules with equal keys share measurements."""

    structure: str
    """See ``digest_of``."""
    inputs: str
    """See ``inputs_of``."""
    device: Device
    """Without memory, which does not affect times."""
    torch_version: str
    driver: str
    """Versions of the kernel driver and of CUDA; empty on the host."""
    threads: str = ""
    """Cores, inter-op threads and wait policy on the host; empty on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord(StrictFile):
    """Measurements of one module, alone and beside others; each point is unique."""

    SCHEMA_VERSION: ClassVar[int] = 4

    schema_version: Literal[4] = 4
    key: ModuleKey
    memory: ModuleMemory | None = None
    samples: tuple[Sample, ...] = ()
    """For degrees above 1, without communication."""
    pairs: tuple[tuple[ModuleKey, PairSample], ...] = ()
    """The other module, and the times beside it."""

    def updated(self, newer: ModuleRecord) -> ModuleRecord:
        """Merges two records; newer measurements replace older ones."""
        samples = {(each.degree, each.quota, each.phase): each for each in (*self.samples, *newer.samples)}
        pairs = {
            (other, pair.phase, pair.quota, pair.beside_quota): (other, pair)
            for other, pair in (*self.pairs, *newer.pairs)
        }
        memory = newer.memory or self.memory
        return replace(self, samples=tuple(samples.values()), pairs=tuple(pairs.values()), memory=memory)


class ProfileCache:
    """Measurements in a folder or in memory. Files of the folder may be deleted at any time.

    Args:
        folder: Created with the first measurement; None: in memory.
        reuse: Read the folder; False: measure everything again.
    """

    def __init__(self, folder: Path | None = None, *, reuse: bool = True) -> None:
        self.folder = folder
        self.reuse = reuse
        self._records: dict[ModuleKey, ModuleRecord] = {}
        self._warned = False

    def record(self, key: ModuleKey) -> ModuleRecord:
        """Returns the measurements of a module, with their recorded name."""
        if key not in self._records:
            self._records[key] = self._read(key) if self.reuse else ModuleRecord(key=key)
        return self._records[key]

    def pair(self, keys: Mapping[str, ModuleKey], quotas: Mapping[str, int]) -> tuple[PairSample, ...]:
        """Returns the measurements of two modules side by side, with their current names; both sides or none."""
        sides = [
            [
                replace(pair, module=name, beside=beside)
                for key, pair in self.record(keys[name]).pairs
                if (key, pair.quota, pair.beside_quota) == (keys[beside], quotas[name], quotas[beside])
            ]
            for name, beside in itertools.permutations(quotas, 2)
        ]
        return tuple(itertools.chain(*sides)) if all(sides) else ()

    def add_pairs(self, keys: Mapping[str, ModuleKey], pairs: Sequence[PairSample]) -> None:
        for pair in pairs:
            self.add(ModuleRecord(key=keys[pair.module], pairs=((keys[pair.beside], pair),)))

    def add(self, record: ModuleRecord) -> None:
        """Adds measurements of a module; newer ones replace older ones."""
        self._records[record.key] = self.record(record.key).updated(record)
        if self.folder is None:
            return
        try:
            save(self._read(record.key).updated(record), self._path(record.key))
        except MosaicError as error:
            if not self._warned:  # profiling continues without a cache
                warnings.warn(f"measurements are not cached: {error}", stacklevel=4)
            self._warned = True

    def _path(self, key: ModuleKey) -> Path:
        assert self.folder is not None
        return self.folder / f"module-{ModuleRecord.SCHEMA_VERSION}-{fingerprint(key)}.json"

    def _read(self, key: ModuleKey) -> ModuleRecord:
        if self.folder is not None and (path := self._path(key)).exists():
            try:
                record = load(ModuleRecord, path)
            except MosaicError as error:
                warnings.warn(f"{error}; its measurements are repeated", stacklevel=5)
            else:
                if record.key == key:
                    return record
        return ModuleRecord(key=key)


def open_cache(where: ProfileCache | str | Path | None) -> ProfileCache:
    """Returns a cache: in memory, for a folder, another cache, or the user's (``"user"``):
    ``$XDG_CACHE_HOME/mosaic/profiles`` or under ``~/.cache``."""
    if isinstance(where, ProfileCache):
        return ProfileCache(where.folder, reuse=where.reuse)
    if where != "user":
        return ProfileCache(None if where is None else Path(where))
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG specification ignores relative paths
    try:
        return ProfileCache((base if base.is_absolute() else Path.home() / ".cache") / "mosaic" / "profiles")
    except RuntimeError as error:  # pathlib raises it if there is no home folder
        warnings.warn(f"measurements are not cached: {error}; set XDG_CACHE_HOME, or pass cache", stacklevel=3)
        return ProfileCache()


def key_of(subject: Subject, backend: Backend, environment: Environment) -> ModuleKey:
    """Returns the key of a module's measurements on a backend."""
    threads = ""
    if backend.torch_device.type != "cuda":  # a lane has one thread per slot; threads may share cores
        waiting = os.environ.get("OMP_WAIT_POLICY", "").lower() or "default"
        threads = f"{len(available_cores())} cores, {torch.get_num_interop_threads()} inter-op, waiting {waiting}"
    return ModuleKey(
        structure=digest_of(subject.module),
        inputs=inputs_of(subject),
        device=replace(backend.device, memory_bytes=0),  # the reported memory may grow after boot
        torch_version=environment.torch_version,
        driver=" ".join(filter(None, (environment.driver, environment.driver_version, backend.sm_settings))),
        threads=threads,
    )


def structures_of(subjects: Iterable[Subject]) -> dict[str, str]:
    """Returns digests of modules, to compare profiles."""
    return {subject.name: digest_of(subject.module) for subject in subjects}


def digest_of(module: nn.Module) -> str:
    """Returns 16 hexadecimal digits that identify what determines a module's time.

    These are the classes of its submodules, their settings, the bytecode of methods outside torch, and parameters and
    buffers without values. Functions and globals that methods use are not included.
    """
    visited: set[type] = set()
    parts = []
    for path, part in module.named_modules():
        settings = sorted(
            (name, value)
            for name, value in vars(part).items()
            if not name.startswith("_") and isinstance(value, _PLAIN)  # such as a number of heads
        )
        parts.append(f"{path}: {type(part).__module__}.{type(part).__qualname__}({part.extra_repr()}) {settings!r}")
        for base in type(part).__mro__:
            if base not in visited and base is not object and base.__module__.split(".")[0] != "torch":
                visited.add(base)
                parts += _code_of(base)
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        parts.append(f"{path}: {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
    return _hashed(parts)


def inputs_of(subject: Subject) -> str:
    """Returns 16 hexadecimal digits that identify shapes, dtypes and plain values of a call, and autocast."""
    value = subject.args, subject.kwargs
    parts = [f"{tuple(t.shape)} {tuple(t.stride())} {t.dtype} {t.requires_grad}" for t in tensors_in(value)]
    parts += [repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__ for leaf in pytree.tree_leaves(value)]
    # thread settings that change every operator
    parts.append(f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}")
    if subject.settings is not None:
        with subject.settings():
            cast = [f"{k} {torch.is_autocast_enabled(k)} {torch.get_autocast_dtype(k)}" for k in ("cpu", "cuda")]
            parts.append(f"{torch.is_grad_enabled()} {' '.join(cast)}")
    return _hashed(parts)


def _hashed(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code_of(kind: type) -> Iterator[str]:
    """Returns the class's own methods, without line numbers."""
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType):
            defaults = [repr(value) for value in function.__defaults__ or () if isinstance(value, _PLAIN)]
            yield f"{kind.__qualname__}.{name}: {defaults} {_text_of(function.__code__)}"


def _text_of(value: object) -> str:
    """Returns a text of a compiled function or constant that is equal in all processes."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {[_text_of(v) for v in value.co_consts]}"
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))  # set order differs between processes
    return repr(value)
