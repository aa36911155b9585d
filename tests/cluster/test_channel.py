"""Messages between driver and workers arrive as they were sent."""

from __future__ import annotations

import socket

import pytest

from gesso.cluster.channel import Channel, pack_prompts, pack_spec, read_prompts, read_spec
from gesso.types import OnePass, Prompt, PromptImage, ResponseSpec, SampleSpec, Trajectory

PART = {"type": "text", "text": "how many?"}


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        [Prompt("a sign\nin two lines", "blurry", {"answer": 5}, "train.txt:1")],
        [
            Prompt("two", images=(PromptImage("a.png"), PromptImage("", b"\n\x00pixels"))),
            Prompt("none"),
            Prompt(
                "one",
                images=(PromptImage("b.png", b"\xff"),),
                messages=({"role": "user", "content": [PART]},),
            ),
        ],
    ],
)
def test_prompts(prompts: list[Prompt]) -> None:
    """An image in a file is sent as its path: the file need not exist."""
    assert read_prompts(pack_prompts(prompts)) == prompts


@pytest.mark.parametrize(
    "spec",
    [
        ResponseSpec(7, 0.0, "ema"),
        SampleSpec(steps=3, height=8, width=16, weights="old", solver="dpm2"),
        SampleSpec(
            steps=4,
            height=8,
            width=8,
            rule="cps",
            noise=0.5,
            stochastic=range(1, 3),
            trained=range(1, 3),
            guidance=4.5,
            same_noise=True,
            guidance_gradient="conditional",
            record=Trajectory(means=True),
        ),
        SampleSpec(steps=2, height=8, width=8, record=OnePass()),
    ],
)
def test_specs(spec: SampleSpec | ResponseSpec) -> None:
    assert read_spec(pack_spec(spec)) == spec


def test_frames_and_their_end() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    here.send({"task": "sample"}, b"", b"\n{}")
    here.send({"task": "forget"})
    assert there.receive() == ({"task": "sample"}, [b"", b"\n{}"])
    assert there.receive() == ({"task": "forget"}, [])
    here.shut()
    with pytest.raises(EOFError):
        there.receive()
