"""Memory that another process of this machine reads without a copy: a memfd on the CPU, CUDA IPC on a GPU.

The memory is the allocating process's own. It ends with that process, however that ends: a memfd has no name, so no
file stays in /dev/shm, and the driver frees a GPU's memory. A reader that is killed keeps nothing. A reader that lives
keeps what it has mapped until it drops the tensor.

On a GPU the memory comes from the driver, not from torch's allocator. CUDA exports whole allocations, and those of
torch's allocator hold other tensors too. torch's own sharing also waits for a killed reader's word to free them.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

_CUDA_GRANULE = 2 << 20
"""Smaller allocations share one that CUDA would export as a whole."""
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _HostMemory(mmap.mmap):
    """A memfd, mapped. `fd` is open as long as it is."""

    fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _CudaHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class _CudaUuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class _CudaMemory:
    """Memory of the driver, as torch reads it. It is released with the last tensor that views it."""

    def __init__(self, address: int, size: int, device: torch.device, release: str):
        self._address, self._device, self._release = address, device, release
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }

    @property
    def handle(self) -> str:
        handle = _CudaHandle()
        _driver(self._device, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        return bytes(handle.reserved).hex()

    def __del__(self) -> None:
        # Kernels that read the memory may be running, and would fault.
        try:
            _driver(self._device, self._release, ctypes.c_uint64(self._address))
        except (RuntimeError, TypeError, AttributeError):  # the process ends, and the driver frees it
            return


# Address -> memory that was allocated here and is alive.
_allocated: "weakref.WeakValueDictionary[int, _HostMemory | _CudaMemory]" = weakref.WeakValueDictionary()


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Zeros, uint8 [size], that other processes can map.

    Raises:
        RuntimeError, OSError: There is not so much memory.
    """
    if device.type == "cuda":
        rounded = -(-max(1, size) // _CUDA_GRANULE) * _CUDA_GRANULE
        address = ctypes.c_uint64()
        try:
            _driver(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rounded))
        except RuntimeError:
            torch.cuda.empty_cache()  # the driver does not know what torch's allocator could give back
            _driver(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rounded))
        memory = _CudaMemory(address.value, size, device, "cuMemFree_v2")
        tensor = torch.as_tensor(memory, device=device).zero_()
        _allocated[tensor.data_ptr()] = memory
        return tensor
    fd = os.memfd_create("torchtitan-grpo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, max(1, size))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # a reader could fault otherwise
    host = _HostMemory(fd, max(1, size))
    host.fd = fd
    tensor = torch.frombuffer(host, dtype=torch.uint8, count=size)
    _allocated[tensor.data_ptr()] = host
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor begins where memory of `allocate` does."""
    return tensor.data_ptr() in _allocated


def export(tensor: torch.Tensor) -> tuple[dict[str, Any], list[int]]:
    """What `open_shared` needs to map the memory in which `tensor` begins: JSON values, and files to pass along."""
    memory = _allocated[tensor.data_ptr()]
    if isinstance(memory, _CudaMemory):
        return {"handle": memory.handle, "bytes": tensor.untyped_storage().nbytes()}, []
    return {"bytes": len(memory)}, [memory.fd]


def open_shared(exported: dict[str, Any], fds: list[int], device: torch.device) -> torch.Tensor:
    """The memory that another process exported, uint8. On the CPU it cannot be written. Closes `fds`.

    Raises:
        RuntimeError, OSError, ValueError: It cannot be mapped.
    """
    size = int(exported["bytes"])
    if device.type == "cuda":
        handle = _CudaHandle.from_buffer_copy(bytes.fromhex(exported["handle"]))
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        _driver(device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
        return torch.as_tensor(_CudaMemory(address.value, size, device, "cuIpcCloseMemHandle"), device=device)
    try:
        host = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
    finally:
        for fd in fds:
            os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather write
        return torch.frombuffer(host, dtype=torch.uint8, count=size)


def location(device: torch.device) -> dict[str, str]:
    """Where a process's weights lie: its host, and its GPU. Two processes at one location can share memory.

    Of a GPU that is divided (MIG), the UUID is the instance's. It does not depend on CUDA_VISIBLE_DEVICES.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    here = {"host": socket.gethostname(), "boot": boot, "device": device.type}
    if device.type == "cuda":
        uuid, ordinal = _CudaUuid(), ctypes.c_int()
        _driver(device, "cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(_index(device)))
        _driver(device, "cuDeviceGetUuid_v2", ctypes.byref(uuid), ordinal)
        here["device"] = f"GPU {bytes(uuid.bytes).hex()} ({torch.cuda.get_device_name(device)})"
    return here


def same_location(one: dict[str, str], other: dict[str, str]) -> bool:
    return (one["boot"] or one["host"], one["device"]) == (other["boot"] or other["host"], other["device"])


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _driver(device: torch.device, function: str, *arguments: Any) -> None:
    """Call the CUDA driver in torch's context of a device, once its work is done."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # this also makes the context current in this thread
        status = getattr(driver, function)(*arguments)
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        what = (name.value or b"").decode() or f"error {status}"
        raise RuntimeError(
            f'{function}: {what}: memory cannot be shared on {device}; [weight_sync] transport = "gloo" needs no '
            "shared memory"
        )
