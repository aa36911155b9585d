"""Sharded weights, in a process group of one rank: FSDP divides and gathers as with several."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from gesso import build, families
from gesso.cluster import transfer
from gesso.cluster.placement import place
from gesso.config import MODELS, Lora
from gesso.families import classes
from gesso.learner.gradient_sum import FloatSum, gradient_sum
from gesso.track.checkpoints import Checkpoints, read_parts, record_shards, write_shards
from gesso.types import UserError, Which
from gesso.weights.layout import Layout, Sharding
from gesso.weights.policy import Policy
from gesso.weights.publish import digest, publish
from gesso.weights.shards import divided_like, is_sharded, local, whole

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("store") / "store"
    store = distributed.FileStore(str(file), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Network(nn.Module):
    """Two blocks, and parameters before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def policies(offload: bool = False) -> tuple[Policy, Policy]:
    """The same weights, whole and sharded."""
    torch.manual_seed(0)
    one, other = Network(), Network()
    other.load_state_dict(one.state_dict())
    plain, sharded = (Policy(network, None, [], 0) for network in (one, other))
    layout = Layout(ranks=1, within=1, offload=offload)
    sharded.shard(Sharding(other, list(other.blocks)), torch.device("cpu"), layout)
    return plain, sharded


def run(policy: Policy, which: Which = "current") -> Tensor:
    with torch.no_grad(), policy.using(which):
        return policy.module(X)


def change(policy: Policy) -> None:
    """As an optimizer step: in place."""
    with torch.no_grad():
        for parameter in policy.trainable.values():
            local(parameter.data).mul_(1.5)


@pytest.mark.parametrize("offload", [False, True])
def test_the_same_values_and_gradients(offload: bool) -> None:
    plain, sharded = policies(offload)
    assert all(is_sharded(p) for p in sharded.trainable.values())
    assert plain.trainable.keys() == sharded.trainable.keys()
    assert torch.equal(run(plain), run(sharded))
    for policy in (plain, sharded):
        for _ in range(2):  # two micro-batches
            policy.module(X).square().sum().backward()
    for name, parameter in plain.trainable.items():
        grad = sharded.trainable[name].grad
        assert parameter.grad is not None and grad is not None
        assert torch.equal(whole(grad), parameter.grad)


def test_whole_weights_are_freed() -> None:
    network = Network()
    policy = Policy(network, None, [], 0)
    before = [weakref.ref(p.untyped_storage()) for p in network.parameters()]
    layout = Layout(ranks=1, within=1, offload=False)
    policy.shard(Sharding(network, list(network.blocks)), torch.device("cpu"), layout)
    gc.collect()
    assert [ref for ref in before if ref() is not None] == []


def test_every_weight_is_that_of_the_copy() -> None:
    """FSDP ignores `parameter.data = …`, and would run the current weights. This includes weights
    outside of the blocks, which FSDP keeps gathered between passes by default."""
    plain, sharded = policies()
    for policy in (plain, sharded):
        policy.snapshot("old")
        change(policy)
    before = run(plain, "old")
    assert not torch.equal(before, run(plain))
    for which in ("current", "old", "current", "old"):
        expected = before if which == "old" else run(plain)
        assert torch.equal(run(sharded, which), expected)
    state = {name: whole(tensor) for name, tensor in sharded.tensors("old").items()}
    assert all(torch.equal(tensor, plain.tensors("old")[name]) for name, tensor in state.items())


def test_a_pass_with_a_copy_leaves_the_gradient_alone() -> None:
    plain, sharded = policies()
    for policy in (plain, sharded):
        policy.snapshot("old")
        change(policy)
        out = policy.module(X)
        reference = run(policy, "old")
        (out - reference).square().sum().backward()
    for name, parameter in plain.trainable.items():
        assert torch.equal(whole(sharded.trainable[name].grad), parameter.grad)


def test_gathered_weights_can_be_read_outside_of_a_pass() -> None:
    plain, sharded = policies()
    for policy in (plain, sharded):
        policy.snapshot("old")
        change(policy)
    for which in ("old", "current"):
        expected = run(plain, which)
        sharded.gather(which)
        weight = sharded.module.get_submodule("blocks.1").weight
        assert isinstance(weight, Tensor) and not is_sharded(weight)
        assert torch.equal(weight, plain.tensors(which)["blocks.1.weight"])
        for _ in range(2):
            assert torch.equal(run(sharded, which), expected)
        with pytest.raises(AssertionError, match="other weights are gathered"):
            run(sharded, "current" if which == "old" else "old")
    sharded.release()
    assert is_sharded(next(iter(sharded.module.parameters())))
    assert torch.equal(run(sharded), run(plain)) and torch.equal(
        run(sharded, "old"), run(plain, "old")
    )


def test_weights_are_loaded_strictly() -> None:
    plain, sharded = policies()
    sharded.snapshot("ema")
    weights = {name: tensor + 1 for name, tensor in plain.tensors().items()}
    sharded.load(weights, "ema")
    plain.load(weights)
    assert torch.equal(run(sharded, "ema"), run(plain))
    weights.pop("last.bias")
    with pytest.raises(ValueError, match=r'1 tensor is missing, first "last\.bias"'):
        sharded.load(weights)


def test_adapters_stay_whole(tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4,
    )  # fmt: skip
    policy = Policy(network, Lora(rank=2, alpha=4), ["to_q"], 0)
    layout = Layout(ranks=1, within=1, offload=False)
    parts = Sharding(network, list(network.transformer_blocks))
    policy.shard(parts, torch.device("cpu"), layout)
    assert policy.trainable and not any(is_sharded(p) for p in policy.trainable.values())
    frozen = [p for p in network.parameters() if not p.requires_grad]
    assert all(is_sharded(p) for p in frozen)


def test_sharded_gradients_are_left_to_fsdp() -> None:
    _, sharded = policies()
    total = gradient_sum(list(sharded.trainable.values()))
    assert isinstance(total, FloatSum)
    sharded.module(X).sum().backward()
    total.add()
    assert list(total.buffers()) == [] and total.write()
    assert all(p.grad is not None for p in sharded.trainable.values())


def test_a_whole_tensor_is_divided_like_another() -> None:
    _, sharded = policies()
    parameter = sharded.trainable["last.weight"]
    values = torch.arange(8.0).view(2, 4)
    divided = divided_like(values, parameter)
    assert is_sharded(divided) and torch.equal(whole(divided), values)
    assert divided_like(values, values) is values and whole(values) is values


LORA = "model.lora.rank=4"


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["cluster.sharding=base", LORA], 'requires cluster.workers; set it to a number or "auto"'),
        (
            ["cluster.workers=2", "cluster.sharding=base"],
            'does not fit a full fine-tune; use "all"',
        ),
        (["cluster.workers=2", "cluster.sharding=all", LORA], 'does not fit a LoRA; use "base"'),
        (["cluster.offload=true"], "cluster.offload requires cluster.sharding"),
        (["cluster.shard_within=2"], "cluster.shard_within requires cluster.sharding"),
        (
            ["cluster.workers=2", "cluster.sharding=base", LORA, "model.fold=true"],
            "does not support model.fold = true",
        ),
        (
            ["cluster.workers=2", "cluster.sharding=base", LORA, "model.quantize=nf4"],
            "does not support model.quantize",
        ),
        (
            ["cluster.workers=3", "cluster.sharding=all", "cluster.shard_within=2"],
            "cluster.shard_within = 2 must divide the 3 workers",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        recipe = build.recipe("demo", overrides)
        place(recipe, build.algorithm(recipe))


class Unsharded:
    """A user's model without the parameter `sharded`."""

    def __init__(self, settings: Any, seed: int = 0) -> None: ...


def test_a_custom_model_that_cannot_be_sharded_is_refused() -> None:
    recipe = build.recipe("demo", ["cluster.workers=2", "cluster.sharding=all"])
    with pytest.raises(UserError, match="its class has no parameter `sharded`"):
        classes.built(Unsharded, recipe)


class Parent:
    def __init__(self, settings: Any, seed: int = 0, sharded: bool = False) -> None:
        self.sharded = sharded


class Passing(Parent):
    def __init__(self, settings: Any, **options: Any) -> None:
        super().__init__(settings, **options)


class Dropping(Parent):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments)


class Unrelated:
    def __init__(self, settings: Any, **options: Any) -> None: ...


def test_options_that_a_constructor_passes_on() -> None:
    assert classes.accepts(Parent, "sharded") and classes.accepts(Passing, "sharded")
    assert not classes.accepts(Passing, "sizes") and not classes.accepts(Unrelated, "sharded")
    recipe = build.recipe("demo", ["cluster.workers=2", "cluster.sharding=all"])
    with pytest.raises(UserError, match="does not pass the parameter `sharded`"):
        classes.built(Dropping, recipe)


@pytest.mark.parametrize("name", MODELS)
def test_bundled_models_can_be_sharded_and_compiled_for_fixed_sizes(name: str) -> None:
    """Also those whose constructor passes its arguments on."""
    family = MODELS[name].family
    kind = classes.load(families.BY_NAME[family], name)
    assert classes.accepts(kind, "sharded")
    assert classes.accepts(kind, "sizes") == (family == "flow")


def test_a_checkpoint_of_one_rank(tmp_path: Path) -> None:
    """Its only file has a name and a format of its own."""
    _, sharded = policies()
    state = {f"current/{name}": tensor for name, tensor in sharded.tensors().items()}
    checkpoints = Checkpoints(tmp_path)

    def write(folder: Path) -> None:
        record_shards(folder, write_shards(folder, state, rank=0, ranks=1))

    checkpoints.save(3, write, {"seed": 0}, keep=1)
    found, meta = checkpoints.load(3)
    assert meta == {"step": 3, "seed": 0, "ranks": 1, "verified": True}
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, whole(state[name])) for name, tensor in found.items())

    def parameter(name: str) -> Tensor:
        return sharded.trainable[name.removeprefix("current/")]

    parts = read_parts(checkpoints.path(3), parameter, rank=0, ranks=1)
    assert all(is_sharded(part) and not part.requires_grad for part in parts.values())
    assert all(torch.equal(local(part), local(state[name])) for name, part in parts.items())


def test_weights_are_gathered_and_sent_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket holds the two largest tensors. What was sent before is gone."""
    plain, sharded = policies()
    for policy in (plain, sharded):
        policy.snapshot("old")
        change(policy)
    found: list[weakref.ref[Tensor]] = []
    held: list[int] = []  # bytes of all gathered tensors, whenever there is another one
    sent: list[int] = []
    honest = transfer.gathered

    def gathered(tensor: Tensor) -> Tensor:
        made = honest(tensor)
        found.append(weakref.ref(made))
        held.append(sum(t.nbytes for each in found if (t := each()) is not None))
        return made

    def spread(self: transfer.Transfers, buffer: Tensor) -> None:
        sent.append(buffer.nbytes)

    monkeypatch.setattr(transfer, "BUCKET", 128)
    monkeypatch.setattr(transfer, "gathered", gathered)
    monkeypatch.setattr(transfer.Transfers, "_spread", spread)
    copies: list[Which] = ["current", "old"]
    sending = transfer.Transfers(0, torch.device("cpu"), None, None).send_weights(
        publish(sharded, copies, 1).copies
    )
    expected = publish(plain, copies, 1).copies
    size = sum(tensor.nbytes for named in expected.values() for tensor in named.values())
    answer = sending.answer()
    assert answer["digest"] == digest(expected) and answer["bytes"] == size
    assert len(sent) > 4 and sum(sent) == answer["bytes"]
    assert max(held) <= 128
