"""The split of a model, from one run of a sample that follows its tensors.

A list of layers is a ``ModuleList``, ``Sequential`` or ``ModuleDict`` whose elements (or theirs, without a forward) run
once, in order, each with what the one before returned. Other sites are the outermost modules that hold no layers. A
site that reads one list runs with the last layer called before, another one with the layer that needs it.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import extract_tb, walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mosaic.errors import MosaicError, UnsplittableError, said_by
from mosaic.find.random_numbers import Generator, forked, python_state
from mosaic.find.restore import Objects, restored_objects
from mosaic.find.structure import tensors_in
from mosaic.find.trace import NUMBER_READS, Operation, Tracer, caller
from mosaic.parts.blank import BlankResults, Forward, ModuleCall, hidden_of, is_kept_by_selection, replaced_forwards
from mosaic.parts.parted_model import kind_of
from mosaic.parts.split import ModelSplit, Site, SplitModule, Value, check_model, copied
from mosaic.parts.weights import StandIns, device_of, meta_buffer

Modules = Mapping[str, nn.Module]  # by their names in the model
Owner = tuple[str, int]  # name of a list, and index of a layer
Label = tuple[str, Any]
"""A source of a tensor: ``value`` and a ``Value``; ``parameter``, ``buffer`` or ``input`` and a name; or ``inside`` and
the call that made the tensor and did not return it; ``random`` and the line that drew between sites."""
Labels = frozenset[Label]


def find_split(
    model: nn.Module,
    sample: Mapping[str, Any],
    *,
    modules: Mapping[str, str] | None = None,
    loss: Callable[[Any], Any] = lambda output: output,
) -> ModelSplit:
    """Runs a microbatch once, without gradients, and returns the split of the model; or raises UnsplittableError.

    The model's state stays unchanged; layers on the meta device do not run. A module that ``sample`` does not reach
    cannot be cut. The last chunk makes the leaves of the output that ``loss`` reads, by default all.
    """
    check_model(model)
    lists = _find_lists(model, modules)
    layers = {name: layer for each in lists.values() for name, layer in each.items()}
    scopes = {path: each for path, each in model.named_modules() if any(_is_inside(layer, path) for layer in layers)}
    sites = {
        path: module
        for path, module in model.named_modules()
        if path in layers
        or (path and path not in scopes and (isinstance(module, _DropoutNd) or [*module.parameters()]))
    }
    device = device_of(model, sample)
    stand_ins = StandIns(model, inside=layers.values(), device=device)
    blank = BlankResults(device) if any(parameter.is_meta for parameter in model.parameters()) else None
    if blank is not None:
        _check_runs_without_data(model, sites)
    with restored_objects(model) as before, forked(device):
        with stand_ins.placed():
            tensors = copied(dict(sample))
            parameters = dict(model.named_parameters()) | stand_ins.by_name
            named = {"buffer": dict(model.named_buffers()), "parameter": parameters, "input": tensors}
            labelled: dict[Label, Any] = {("tensor", "among the model's attributes"): before.tensors}
            labelled |= {(kind, name): value for kind, values in named.items() for name, value in values.items()}
            flow = _Dataflow(labelled, blank)
            output = flow.follow(lambda: model(**tensors), loss, sites, scopes)
        _check_state(model, before)

    chains = _chains(lists, flow.calls, by_hand=modules is not None)
    owners, order = _assign_owners(flow.calls, chains)
    for labels in output.values():  # leaves that the last chunk makes, though the loss may not read them
        if {owners[value.site] for value in sources(labels, "value")} == {owners[-1]}:
            flow.calls[-1].labels |= labels
    names = {path: name for name, path in modules.items()} if modules is not None else _names([*chains])
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    inputs: defaultdict[str, set[str]] = defaultdict(set)
    for scope, read in flow.scoped_inputs.items():
        if len(inside := [path for path in order if _is_inside(path, scope)]) == 1:
            inputs[inside[0]] |= read
    for call, (path, layer) in zip(flow.calls, owners, strict=True):
        inputs[path] |= sources(call.labels, "input")
        own = sites[call.site.path].parameters() if call.site.path else ()
        call.site = replace(
            call.site,
            module=names[path],
            layer=layer,
            is_layer=call.site.path == [*chains[path]][layer],
            needs=frozenset(call.values),
            parameters=frozenset(sources(call.labels, "parameter") | {first_names[id(each)] for each in own}),
            may_select=call.site.may_select and not call.site.has_effects,
        )
    split_sites = tuple(call.site for call in flow.calls)
    reached = frozenset[str]().union(*(site.parameters for site in split_sites))
    return ModelSplit(
        kind=kind_of(sample, read_inputs := tuple(sorted(flow.read_inputs))),
        read_inputs=read_inputs,
        shaping_inputs=frozenset(flow.shaping_inputs),
        modules=tuple(
            SplitModule(
                name=names[path],
                path=path,
                count=len(chains[path]),
                inputs=tuple(name for name in sample if name in inputs[path]),
                own_inputs=tuple(name for name in sample if [p for p in order if name in inputs[p]] == [path]),
            )
            for path in order
        ),
        sites=split_sites,
        output_leaves=tuple(name for name, labels in output.items() if labels <= flow.calls[-1].labels),
        written_inputs=tuple(sorted(flow.written_inputs)),
        idle_parameters={name: names[order[-1]] for name in first_names.values() if name not in reached},
    )


def _is_inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def _find_lists(model: nn.Module, chosen: Mapping[str, str] | None) -> dict[str, Modules]:
    """Returns the chosen lists; or the outermost of several modules of one class with parameters, otherwise of any."""
    kinds = nn.ModuleList | nn.Sequential | nn.ModuleDict
    lists = {path: each for path, each in model.named_modules() if isinstance(each, kinds) and len(each)}
    if chosen is not None:
        if missing := [path for path in chosen.values() if path not in lists]:
            raise UnsplittableError(f"modules= has {missing[0]!r}, which is no list of layers; see named_modules()")
        return {path: _layers_of(path, lists[path]) for path in chosen.values()}
    # Keys of layers differ in numbers alone, other than those of towers.
    several = {p: e for p, e in lists.items() if len({re.sub(r"\d+", "", key) for key in e._modules}) == 1 < len(e)}
    same = {path: each for path, each in several.items() if len({*map(type, each.children())}) == 1}
    candidates = {p: e for p, e in same.items() if all([*layer.parameters()] for layer in e.children())} or several
    outermost = [p for p in candidates if not any(_is_inside(p, other) for other in candidates if other != p)]
    return {path: _layers_of(path, candidates[path]) for path in outermost}


def _layers_of(path: str, container: nn.Module) -> Modules:
    layers: dict[str, nn.Module] = {}
    for key, each in container.named_children():
        name = f"{path}.{key}" if path else key
        layers |= _layers_of(name, each) if type(each).forward is nn.Module.forward else {name: each}
    return layers


def _chains(lists: Mapping[str, Modules], calls: Sequence[_Call], *, by_hand: bool) -> dict[str, Modules]:
    """Returns the lists that run once, in order; others are no lists, unless they have most of the weights."""
    first: dict[str, int] = {}
    sizes = {path: sum(p.numel() for e in each.values() for p in e.parameters()) for path, each in lists.items()}
    for path, layers in lists.items():
        own = [(site, call) for site, call in enumerate(calls) if call.site.path in layers]
        links = [any(v.site == before for v in call.values) for (before, _), (_, call) in itertools.pairwise(own)]
        if not by_hand and 2 * sum(links) < max(1, len(links)):
            continue
        indices = [[*layers].index(call.site.path) for _, call in own]
        if indices == list(range(len(layers))):
            first[path] = own[0][0]
        elif by_hand or 2 * sizes[path] >= sum(sizes.values()):
            lines = [call.line for place, (_, call) in enumerate(own) if indices[place] != place]
            raise UnsplittableError(
                f"the {len(layers)} layers of {path or 'the model'!r} run in the order {', '.join(map(str, indices))} "
                f"({[*lines, 'and no more'][0]}); each has to run once, in order: give each call a layer of its own, "
                "sort the list, take out what does not run, or name other lists by modules="
            )
    if not first:
        raise UnsplittableError(
            "no list of layers was found: a ModuleList, Sequential or ModuleDict whose elements run once, in turn, "
            "each with what the one before returned; name it by modules={'text': 'model.layers'}"
        )
    return {path: lists[path] for path in sorted(first, key=lambda path: first[path])}


def _names(paths: list[str]) -> dict[str, str]:
    """Returns a name for each list: the first word in which paths differ, or the module that holds it."""
    words = [path.split(".") if len(paths) > 1 else ["model", *path.split(".")[:-1]] for path in paths]
    common = sum(1 for _ in itertools.takewhile(lambda each: len({*each}) == 1, zip(*words, strict=False)))
    short = [each[min(common, len(each) - 1)] for each in words]
    return dict(zip(paths, short if len({*short}) == len(paths) else paths, strict=True))


def _assign_owners(calls: Sequence[_Call], chains: Mapping[str, Modules]) -> tuple[list[Owner], list[str]]:
    """Returns the owner of each call, and the lists in topological order, otherwise in the order of calls.

    A site that reads one list, and no input of others through sites that wait, runs with the last layer called before;
    others wait for the call that needs them. The model ends, with those that still wait, in the list that was called
    last and feeds no other.
    """
    layers = {name: (path, index) for path, each in chains.items() for index, name in enumerate(each)}
    owners: dict[int, Owner] = {}
    reads: dict[int, set[str]] = {}
    latest: dict[str, Owner] = {}
    inputs: list[set[str]] = []  # of each site and of those before it that wait
    taken: defaultdict[str, set[str]] = defaultdict(set)  # by the sites of each list
    for site, call in enumerate(calls[:-1]):
        foreign = set[str]().union(*(inputs[value.site] for value in call.values if value.site not in owners))
        inputs.append(foreign | sources(call.labels, "input"))
        reads[site] = set().union(*({owners[v.site][0]} if v.site in owners else reads[v.site] for v in call.values))
        own = min(reads[site]) if len(reads[site]) == 1 else None
        last_owner = None if own is None or foreign - taken[own] else latest[own]
        if (owner := layers.get(call.site.path, last_owner)) is None:
            continue
        latest[owner[0]] = owner
        taken[owner[0]] |= inputs[site]
        waiting = [site]
        while waiting:
            owners[waiting[-1]] = owner
            waiting += [value.site for value in calls[waiting.pop()].values if value.site not in owners]
    feeds = {(owners[value.site][0], owner[0]) for site, owner in owners.items() for value in calls[site].values}
    order: list[str] = []
    while rest := [path for path in chains if path not in order]:
        ready = [path for path in rest if not any((other, path) in feeds for other in rest if other != path)]
        if not ready:
            raise UnsplittableError(
                f"modules feed each other in a circle: {', '.join(rest)}; where a loop takes elements of several, as "
                "zip() does, make one list whose layers hold and call an element of each, or name others by modules="
            )
        order.append(ready[0])
    last_calls = {path: site for site, (path, _) in sorted(owners.items())}
    last = max(set(order) - {source for source, target in feeds if source != target}, key=lambda path: last_calls[path])
    order.append(order.pop(order.index(last)))
    return [owners.get(site, (last, len(chains[last]) - 1)) for site in range(len(calls))], order


def _check_runs_without_data(model: nn.Module, sites: Modules) -> None:
    """Raises UnsplittableError if a buffer between sites is on the meta device, or a hook keeps what a site makes."""
    inner = {id(each) for site in sites.values() for each in site.modules() if each is not site}
    for path, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise _kept_inside(path or "the model", "output_router_logits=True of its configuration")
        if id(module) in inner and module._forward_hooks:
            raise _kept_inside(path, "a forward hook inside of a layer, which does not run without weights")
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and id(module) not in inner and path not in sites:
                raise meta_buffer(f"{path}.{name}")


def _check_state(model: nn.Module, before: Objects) -> None:
    """Raises UnsplittableError if a run changed a module's attributes, other than by a tensor, a hook or a switch."""
    homes: dict[int, tuple[str, str]] = {}
    for path, module in model.named_modules():
        homes |= {id(value): (path, name) for name, value in vars(module).items()} | {id(vars(module)): (path, "")}
    for container, key, old, new in before.differences():
        path, attribute = homes.get(id(container), ("", None))
        harmless = (bool, str, torch.dtype, torch.Tensor) if attribute == "" else (bool, str, torch.dtype)
        is_counted = isinstance(old, int | float) and isinstance(new, int | float)  # by an object among attributes
        is_changed = new is not None and not callable(new) and not isinstance(new, harmless)
        is_changed &= key not in ("_flat_weights", "_flat_weight_refs")  # recurrent modules renew these with weights
        if is_changed and (attribute is not None or is_counted or isinstance(new, Generator)):
            what = key if attribute in ("", "_buffers", None) else attribute
            raise UnsplittableError(
                f"{path or 'the model'} changes its {what} when it is called, and chunks "
                "call it more often and in another order: let the loop change it"
            )


def sources(labels: Iterable[Label], kind: str) -> set[Any]:
    return {source for each, source in labels if each == kind}


@dataclass(kw_only=True, eq=False)
class _Call:
    """One call of a site, whose owner is not known yet; of the output for the last one."""

    site: Site
    line: str = ""  # file and line that called it
    labels: set[Label] = field(default_factory=set)  # sources of what it reads
    numbers: set[Label] = field(default_factory=set)  # those that its Python reads as numbers

    @property
    def values(self) -> set[Value]:
        return sources(self.labels, "value")


class _Dataflow(Tracer[Labels]):
    """Follows tensors from site to site, from the labelled ones on; with ``blank``, sites do not run."""

    def __init__(self, labelled: Mapping[Label, Any], blank: BlankResults | None) -> None:
        super().__init__(frozenset())
        self.calls: list[_Call] = []
        self.scoped_inputs: defaultdict[str, set[str]] = defaultdict(set)  # by the innermost module that holds layers
        self.written_inputs: set[str] = set()
        self.read_inputs: set[str] = set()  # those that Python reads between sites
        self.shaping_inputs: set[str] = set()  # those whose values may determine shapes between sites
        self._here: _Call | None = None
        self._decided: set[Label] = set()  # of numbers that Python read between sites: all later calls depend on them
        self._rows = ""  # line where values of sites determined a number of rows
        self._blank = blank
        self._kept: dict[int, _Call] = {}  # memory of results that selective recomputation keeps
        self._homes: dict[int, Label] = {}
        for label, value in labelled.items():
            for tensor in tensors_in(value):
                self._homes[self.memory(tensor)] = label
                self.mark(tensor, frozenset([label]))

    def begin(self, operation: Operation) -> None:
        for tensor in operation.written:
            kind, name = self._homes.get(self.memory(tensor), ("", ""))
            is_own = self._here is not None and name.startswith(f"{self._here.site.path}.")
            if kind == "input":
                self.written_inputs.add(name)
            elif kind in ("parameter", "tensor") or (kind == "buffer" and not is_own):
                raise UnsplittableError(
                    f"{kind} {name} is written into at {caller()}; other ranks would not see it: let the loop write "
                    "it, behind the optimizer's step, or a buffer the module that holds it"
                )
            if (maker := self._kept.get(self.memory(tensor))) is not None:
                maker.site = replace(maker.site, may_select=False)
            if self._here is not None and ("inside", self._here) not in self.labels([tensor]):
                self._here.site = replace(self._here.site, has_effects=True)

    def end(self, operation: Operation, labels: Labels) -> Labels:
        here, tags = self._here, getattr(operation.operator, "tags", ())
        is_mask = operation.name in ("index", "masked_select")
        rows = tensors_in(operation.args[1:] if is_mask else operation.args)
        if is_mask:  # numbers of rows as indices choose no number of rows
            rows = [tensor for tensor in rows if tensor.dtype in (torch.bool, torch.uint8)]
        makes_rows = torch.Tag.dynamic_output_shape in tags and bool(rows)
        self._read(labels, numbers_of=[] if operation.results else operation.inputs)
        if here is not None or sources(labels, "value"):
            BlankResults.refuse_draws_by_value(operation.name, caller() if here is None else here.site.path)
        if here is not None:
            here.numbers |= labels if makes_rows else set()
            if is_kept_by_selection(operation.operator, operation.args, operation.kwargs):
                self._kept |= dict.fromkeys(map(self.memory, operation.created), here)
            return labels | {("inside", here)}
        if makes_rows and operation.name != "_ctc_loss":  # its loss has a row for each row
            if any(kind in ("value", "random") for kind, _ in self.labels(rows)):
                self._rows = caller()
            self.shaping_inputs |= sources(self.labels(rows), "input")
        elif torch.Tag.nondeterministic_seeded in tags:
            return labels | {("random", caller())}
        return labels

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.autograd.grad and self._here is None:
            raise UnsplittableError(
                f"gradients are computed between layers at {caller()}, across ranks: do so in one layer, or in the loss"
            )
        if name in NUMBER_READS:
            self._read(self.labels(tensors_in(args)), numbers_of=tensors_in(args))
        return func(*args, **kwargs)

    def _read(self, labels: Labels, *, numbers_of: Sequence[torch.Tensor] = ()) -> None:
        """Records a read by the running call and the module around it; ``numbers_of``: tensors that Python reads."""
        for call in sources(labels, "inside"):
            if self._here is None or call.site.path != self._here.site.path:
                raise _kept_inside(call.site.path, caller())
        if self._here is not None:
            self._here.labels |= labels
            self._here.numbers |= labels if numbers_of else set()
        elif numbers_of:
            self._decided |= {each for each in labels if each[0] in ("value", "parameter")}
            self.read_inputs |= sources(labels, "input")
            if any(each.dtype != torch.bool for each in numbers_of):
                self.shaping_inputs |= sources(labels, "input")
        if self.running:
            self.scoped_inputs[self.running[-1]] |= sources(labels, "input")

    def follow(self, run: Forward, loss: Forward, sites: Modules, scopes: Modules) -> dict[str, Labels]:
        """Returns the labels of the output's tensors; the last call is the output, and reads what the loss does."""
        forwards = {module: self._site(path, module) for path, module in sites.items()}
        try:
            with replaced_forwards(forwards), torch.no_grad(), self.following(scopes):
                result = run()
                leaves, tree = pytree.tree_flatten_with_path(result)
                if tree.is_leaf() and not isinstance(result, torch.Tensor):
                    raise UnsplittableError(
                        f"the model returns a {type(result).__name__}, in which ranks cannot find tensors: return a "
                        "tensor, a dict or a tuple, or register a dataclass by torch.utils._pytree.register_dataclass"
                    )
                output = {
                    pytree.keystr(at): self.labels([leaf]) for at, leaf in leaves if isinstance(leaf, torch.Tensor)
                }
                self._here = _Call(site=Site(path="", module="", layer=0, may_select=True), labels={*self._decided})
                self.calls.append(self._here)
                self._read(self.labels(tensors_in(loss(result))))
        except MosaicError:
            raise
        except Exception as error:  # of any kind: it is the user's code that runs
            frames = [f for f in extract_tb(error.__traceback__) if not re.search("/(torch|mosaic)/", f.filename)]
            line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "in torch"
            raise UnsplittableError(
                f"the model cannot be followed: with the sample it raises {said_by(error)} ({line}); see that it runs "
                "under torch.no_grad(), and that its layers take plain tensors"
            ) from error
        return output

    def _site(self, path: str, module: nn.Module) -> Forward:
        forward: Forward = module.forward
        weights, numbers, around = [*map(id, module.parameters())], itertools.count(), Objects(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._here is not None:
                return forward(*args, **kwargs)
            callers = {frame.f_globals.get("__name__") for frame, _ in walk_stack(None)}
            if "torch.utils.checkpoint" in callers or [*map(id, module.parameters())] != weights:
                raise UnsplittableError(
                    f"{path} is called by torch.utils.checkpoint, or with other weights than its own, at {caller()}; a "
                    "rank that runs it again would not find them: give strategies, or change weights within the layer"
                )
            if self._rows:
                raise UnsplittableError(
                    f"the number of rows follows from values or draws at {self._rows}, and {path} is called later, on "
                    "ranks that have to know it before: choose by inputs, weigh others by 0, or name lists by modules="
                )
            site = Site(path=path, call=next(numbers), module="", layer=0, may_select=True)
            call = self._here = _Call(site=site, line=caller(), labels={*self._decided})
            self.calls.append(call)
            with _disable_current_modes():  # what the model sets for a call is gone when the call is made again
                changes = {k: new for _, k, _, new in around.differences() if isinstance(k, str) and k != "forward"}
            before, bound = python_state(), ModuleCall(module, forward, args, kwargs)
            noted = bound.writable()
            try:
                blank = self._blank
                result = forward(*args, **kwargs) if blank is None else self._zeros(call, blank, bound, changes)
                with _disable_current_modes():
                    place = bound.refilled(noted, result, caller=f"{path}, called at {call.line}")
                if changes or place is not None or not before.is_same(python_state()):
                    call.site = replace(call.site, refills=place, has_effects=True)
                self._note_result(call, result, hidden_of(args, kwargs))
            finally:
                self._here = None
            return result

        return run

    def _zeros(self, call: _Call, blank: BlankResults, module_call: ModuleCall, attributes: Mapping[str, Any]) -> Any:
        self._read(self.labels(tensors_in((module_call.args, module_call.kwargs, [*attributes.values()]))))
        with _disable_current_modes():
            foreseen = blank.of(module_call)
            leaves, tree = blank.zeros(module_call)
        call.site = replace(call.site, has_effects=foreseen.has_effects, may_select=foreseen.may_select)
        result = pytree.tree_unflatten(leaves, tree)
        return result if foreseen.refills is None else module_call.refill(foreseen.refills, result)

    def _note_result(self, call: _Call, result: Any, hidden: torch.Tensor | None) -> None:
        leaves, tree = pytree.tree_flatten(result)
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        for leaf in tensors.values():
            if ("inside", call) in self.labels([leaf]):
                self.mark(leaf, frozenset(), anew=True)
            self._read(self.labels([leaf]))  # an argument or its view, as from a dropout of rate 0
        for number, leaf in tensors.items():
            self.mark(leaf, frozenset([("value", Value(len(self.calls) - 1, number))]))
        has_numbers = bool(call.numbers) and any(isinstance(leaf, int | float) for leaf in leaves)
        if has_numbers and {"value", "parameter"} & {kind for kind, _ in call.numbers}:
            raise UnsplittableError(
                f"{call.site.path}, called at {call.line}, returns a number that other ranks lack: return a tensor"
            )
        first, alike, in_place = tensors.get(0), False, False
        if first is not None and hidden is not None and not has_numbers:
            alike = (first.shape, first.dtype) == (hidden.shape, hidden.dtype)
            in_place = alike and call.site.has_effects and self.memory(first) == self.memory(hidden)
        form = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree
        call.site = replace(call.site, form=form, keeps_shape=alike and len(tensors) == 1, in_place=in_place)


def _kept_inside(path: str, reader: str) -> UnsplittableError:
    return UnsplittableError(
        f"a tensor made inside of {path} is used outside of it at {reader}, other than as its result; other ranks lack "
        "it: return it, in a tuple, a dict or a dataclass of torch.utils._pytree.register_dataclass, or switch off "
        "what keeps it, such as output_router_logits"
    )
