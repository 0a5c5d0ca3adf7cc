"""Tools around a model: compilers, threads, processes, wrappers, transforms, torch's modes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.sweep.device import device, moved
from bench.sweep.nets.pieces import Two, batch, between, loop, models, sgd, squared, tower, towers, train_step
from bench.sweep.session import Session


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@towers(net=lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
def jacobian_within_a_tower(self, x):
    slopes = torch.func.vmap(torch.func.jacrev(self.net))(x)
    return self.net(x) + slopes.square().sum((1, 2))[:, None]


@between()
def threads_of_the_user_call_towers(self, x, y):
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(self.a, x), pool.submit(self.b, y)
        return a.result() * b.result()


@loop
def model_called_from_another_thread(session: Session):
    model = Two()
    session.colocate(model, batch(0))
    optimizer = sgd(model)
    for index in range(4):
        thread = threading.Thread(target=train_step, args=(session, model, optimizer, index))
        thread.start()
        thread.join()


@loop
def loader_of_several_processes(session: Session):
    model = Two()
    session.colocate(model, batch(0))
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(*(part.cpu() for part in batch(0, 96))), 32, shuffle=True, num_workers=2)
    for _ in range(2):
        for inputs in loader:
            optimizer.zero_grad()
            loss = squared(model, moved(inputs))
            loss.backward()
            optimizer.step()
            session.note(loss.item())


CASES = {
    "compiled_tower_as_a_wrapper": models(lambda: Two(torch.compile(tower(), backend="eager"))),
    "scripted_tower": models(lambda: Two(torch.jit.script(tower()))),
    "exported_tower": models(lambda: Two(torch.export.export(tower().to(device()), batch(0)[:1]).module())),
    "wrapper_that_hides_its_module": models(lambda: _Wrapper(Two(_Wrapper(tower()), _Wrapper(tower())))),
    "module_kept_outside_of_the_tree": between(hidden=lambda: [tower().to(device())])(
        lambda self, x, y: self.a(x) * self.b(y) + self.hidden[0](x)
    ),
    "towers_mapped_by_the_model": between()(lambda self, x, y: torch.func.vmap(self.a)(x) * torch.func.vmap(self.b)(y)),
}
