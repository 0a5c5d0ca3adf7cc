"""Names of dtypes in safetensors files, and the bytes of tensors."""

from __future__ import annotations

import torch

from mosaic.checkpoint.safetensors_file import Entry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name."""
    return _DTYPES[name]


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """Describes a tensor as safetensors does; on the meta device, too.

    Raises:
        TypeError: It is in parts, quantized, sparse or of a dtype that such files do not know.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, and only whole tensors are saved; leave "
            "sharding of modules to Mosaic's plan, or save this model with torch.distributed.checkpoint"
        )
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name} is of dtype {tensor.dtype}, which safetensors does not know; cast it to another one")
    return Entry(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a flat tensor on the CPU, without a copy where it is there and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor as a file takes them."""
    return memoryview(raw(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12


def tensor_from(content: bytearray, entry: Entry) -> torch.Tensor:
    """Makes a tensor of bytes, which it shares."""
    if not content:
        return torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
    return torch.frombuffer(content, dtype=dtype_of(entry.dtype)).view(entry.shape)
