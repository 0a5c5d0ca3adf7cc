"""The fake driver asked directly, as any C program would: functions by cuGetProcAddress, structures by layout."""

from __future__ import annotations

from typing import Any

import pytest

from fake_driver.harness import FakeDriver

ASK = """
class Resource(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("hidden", ctypes.c_ubyte * 92), ("sm_count", ctypes.c_uint),
                ("minimum", ctypes.c_uint), ("alignment", ctypes.c_uint), ("flags", ctypes.c_uint),
                ("oversize", ctypes.c_ubyte * 24), ("next", ctypes.c_void_p)]
assert ctypes.sizeof(Resource) == 144

def find(name, version):
    address, found = ctypes.c_void_p(), ctypes.c_int()
    status = fake.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0),
                                      ctypes.byref(found))
    return status, found.value, address.value

def call(name, *arguments, version=12040):
    status, found, address = find(name, version)
    assert status == 0 and address, (name, status, found)
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments)

def whole(device=0):
    resource = Resource()
    assert call("cuDeviceGetDevResource", device, ctypes.byref(resource), 1) == 0
    return resource

def split(groups, minimum, flags=0, source=None):
    source = source or whole()
    made, results, remainder = ctypes.c_uint(groups), (Resource * groups)(), Resource()
    status = call("cuDevSmResourceSplitByCount", results, ctypes.byref(made), ctypes.byref(source),
                  ctypes.byref(remainder), flags, minimum)
    return status, list(results)[:made.value], remainder

def describe(*resources):
    array, descriptor = (Resource * len(resources))(*resources), ctypes.c_void_p()
    return call("cuDevResourceGenerateDesc", ctypes.byref(descriptor), array, len(resources)), descriptor

def green(descriptor, device=0, flags=1):
    context = ctypes.c_void_p()
    return call("cuGreenCtxCreate", ctypes.byref(context), descriptor, device, flags), context

def stream(context, flags=1):
    handle = ctypes.c_void_p()
    return call("cuGreenCtxStreamCreate", ctypes.byref(handle), context, flags, 0, version=12050), handle

assert call("cuInit", 0, version=2000) == 0
"""

# Adds the sized split of CUDA 13.1 and what work needs: a current context, memory, a kernel.
ASK_MORE = """
class Params(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint), ("coscheduled", ctypes.c_uint), ("preferred", ctypes.c_uint),
                ("flags", ctypes.c_uint), ("reserved", ctypes.c_uint * 12)]
assert ctypes.sizeof(Params) == 64
BACKFILL = 1

def sized(*wanted, results=True, flags=0, source=None):
    params, source, remainder = (Params * len(wanted))(*wanted), source or whole(), Resource()
    made = (Resource * len(wanted))() if results else None
    status = call("cuDevSmResourceSplit", made, len(wanted), ctypes.byref(source), ctypes.byref(remainder), flags,
                  params, version=13010)
    return [status, [one.count for one in params], [one.sm_count for one in made or []], remainder.sm_count]

def primary(device=0):
    context = ctypes.c_void_p()
    assert call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, version=7000) == 0
    return context

def push(context):
    return call("cuCtxPushCurrent", context, version=4000)

def pop():
    return call("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()), version=4000)

def allocate(size):
    memory = ctypes.c_uint64()
    return call("cuMemAlloc", ctypes.byref(memory), ctypes.c_size_t(size), version=3020), memory

def load(code):
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    assert call("cuLibraryLoadData", ctypes.byref(library), code, None, None, 0, None, None, 0, version=12000) == 0
    return call("cuLibraryGetKernel", ctypes.byref(kernel), library, b"mosaic_smid", version=12000), library, kernel

def launch(kernel, memory, words, stream, blocks=528, threads=1024, spin_ns=1000):
    arguments = [memory, ctypes.c_uint(words), ctypes.c_uint64(spin_ns)]
    array = (ctypes.c_void_p * 3)(*[ctypes.addressof(one) for one in arguments])
    return call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, array, None, version=4000)

def clear(memory, stream):
    return call("cuMemsetD32Async", memory, 0, ctypes.c_size_t(8), stream, version=3020)

def copy(words, memory, stream):
    return call("cuMemcpyDtoHAsync", words, memory, ctypes.c_size_t(32), stream, version=3020)

def wait(stream):
    return call("cuStreamSynchronize", stream, version=2000)

def sms_in(words):
    return [sm for sm in range(256) if words[sm // 32] >> sm % 32 & 1]
"""

# A kernel, memory for what it sees, and two streams on 8 SMs each.
READY = """
push(primary())
_, groups, _ = split(16, 8)
one, other = (stream(green(describe(group)[1])[1])[1] for group in (groups[0], groups[1]))
(_, library, kernel), (_, memory), words = load(b"... mosaic_smid ..."), allocate(32), (ctypes.c_uint * 8)()
"""

INVALID_VALUE, INVALID_TYPE, INVALID_CONFIGURATION = 1, 914, 915


def ask(fake_driver: FakeDriver, body: str, **settings: str | int) -> Any:
    """Runs a body that calls the library by itself; see ``FakeDriver.run``."""
    return fake_driver.run(ASK + ASK_MORE + body, **settings)


def rule(name: str, body: str, answer: Any, **settings: Any) -> Any:
    """A row of a test: what is asked, the answer, and the driver's settings."""
    return pytest.param(body, answer, settings, id=name)


def one(name: str, expression: str, answer: Any, **settings: Any) -> Any:
    """A row of one expression."""
    return rule(name, f"result = {expression}", answer, **settings)
