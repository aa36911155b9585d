"""A worker process that is forked after all imports."""

from __future__ import annotations

import socket

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from diffusers import StableDiffusion3Pipeline  # noqa: F401
from transformers import Qwen2ForCausalLM  # noqa: F401

from gesso.cluster.channel import Channel, end_with_the_driver
from gesso.worker import serve


def main(connection: socket.socket, life: socket.socket) -> None:
    torch.set_num_threads(1)
    end_with_the_driver(life)
    serve(Channel(connection))
