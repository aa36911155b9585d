"""Settings and measurements of the host: network, threads, malloc, peak memory."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def peak_memory(device: torch.device) -> float:
    """GB (10⁹ bytes): on a GPU the peak of allocated tensors since the last call; on a CPU the peak
    of this process; NaN where the system does not report it."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    if sys.platform == "win32":
        return math.nan
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # bytes there, KiB elsewhere


@contextmanager
def sharing_cores(device: torch.device, workers: int) -> Iterator[None]:
    """While reward workers run on the same cores, waiting torch threads must not spin. If they do
    (torch was imported before gesso), leave one core per worker: more spinning threads than cores
    run many times slower."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    on_cpu = device.type == "cpu"
    if on_cpu:
        keep_freed_memory()
    if passive or not on_cpu:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def keep_freed_memory() -> None:
    """On a CPU every forward pass frees and allocates the same hundred megabytes. By default glibc
    returns them to the system in between, and the page faults take a tenth of an iteration; with
    these settings it keeps them. Other C libraries neither have nor need such settings."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)


GLOO = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


def listen_at(address: str) -> None:
    """Gloo listens where this IPv4 address is; by default where the name of the host resolves to,
    which may be another network or loopback."""
    if GLOO not in os.environ and (name := _interface(address)) is not None:
        os.environ[GLOO] = name


def _interface(address: str) -> str | None:
    """None: unknown, as outside Linux."""
    if sys.platform != "linux":
        return None
    from fcntl import ioctl

    if address.startswith("127."):
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = ioctl(any_socket.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
