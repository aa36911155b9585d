"""A critic beside a policy: what it judges by, whose weights it moves, and what is saved of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso.types import UserError
from tests import tokens
from tests.responses import Parts, loss_and_gradient, moved, parts_of, plain_like, rollout_of
from tests.tokens import Tiny, padded_logits, padded_logp

LORA = {"rank": 4, "alpha": 12}
KINDS = {"copy": None, "copy-lora": LORA, "lora": LORA}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in ("qwen2", "qwen3", "qwen2.5-vl"):
        tokens.build(name, root / name)
    return root


@pytest.fixture(params=["qwen2", "qwen2.5-vl"])
def tiny(request: pytest.FixtureRequest, folders: Path) -> Tiny:
    return Tiny(request.param, folders / request.param)


@pytest.fixture(params=[("qwen2", "copy"), ("qwen2.5-vl", "copy-lora"), ("qwen2.5-vl", "lora")])
def either(request: pytest.FixtureRequest, folders: Path) -> tuple[Tiny, str]:
    """Every kind of critic once: for what takes long and does not depend on the model as well."""
    name, kind = request.param
    return Tiny(name, folders / name), kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def made(tiny: Tiny, kind: str, stir: bool = True, **options: Any) -> Parts:
    trunk = {"trunk": kind.partition("-")[0], "lr": 2e-3}
    sections = {key: options.pop(key) for key in ("learner", "seed") if key in options}
    model = {"lora": KINDS[kind]} | options.pop("model", {})
    found = parts_of(tiny, {"name": "ppo", "critic": trunk, **options}, model=model, **sections)
    if stir:
        moved(found.model.policy.trainable, 0.05)
        moved(found.critic.trained, 0.05, seed=11)
    return found


def flags(module: torch.nn.Module) -> dict[str, bool]:
    return {n: p.requires_grad for n, p in module.named_parameters()}


def worn(module: torch.nn.Module) -> set[str]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    return {name for layer in layers for name in layer.active_adapters}


@torch.no_grad()
def test_a_value_does_not_depend_on_the_token_it_judges(tiny: Tiny, kind: str) -> None:
    """But on all that comes before it, and on nothing of the neighbours."""
    parts = made(tiny, kind)
    trace = rollout_of(parts.model, tiny.prompts).token_trace
    before = parts.critic.values(trace)
    assert before.shape == trace.tokens.shape and before.dtype == torch.float32
    assert not before[~trace.mask].any() and before[trace.mask].std() > 0.1
    row = int(trace.mask.sum(1).argmax())
    length = int(trace.mask[row].sum())
    for t in (0, length // 2, length - 1):
        other = trace.tokens.clone()
        other[row, t] = (other[row, t] + 7) % len(tokens.LETTERS)
        gap = (parts.critic.values(replace(trace, tokens=other)) - before).abs()
        assert gap[row, : t + 1].max() <= 1e-6
        assert t == length - 1 or gap[row, t + 1 : length].max() > 1e-3
        gap[row] = 0
        assert gap.max() <= 1e-6


@torch.no_grad()
def test_values_are_a_linear_head_on_the_last_states(tiny: Tiny) -> None:
    parts = made(tiny, "copy")
    trace = rollout_of(parts.model, tiny.prompts).token_trace
    trunk = plain_like(tiny, parts.critic.trunk).float()
    trunk.lm_head = torch.nn.Identity()
    expected = padded_logits(trunk, trace, 0) @ parts.critic.head + parts.critic.bias
    found = parts.critic.values(trace)
    assert (found - expected)[trace.mask].abs().max() <= 1e-4


@torch.no_grad()
def test_a_trunk_of_adapters_is_the_base_with_the_critics_own(tiny: Tiny, tmp_path: Path) -> None:
    """With the policy's in their place it would be the policy's states."""
    from peft import PeftModel

    parts = made(tiny, "lora")
    trace = rollout_of(parts.model, tiny.prompts).token_trace
    found = parts.critic.values(trace)
    own = {n.replace(".critic.", ".default."): p for n, p in parts.critic.trained.items()}
    policy = {n: p.data.clone() for n, p in parts.model.policy.trainable.items()}
    parts.model.policy.load({n: own[n].data for n in policy})
    parts.model.save(tmp_path)
    parts.model.policy.load(policy)
    plain = PeftModel.from_pretrained(tiny.plain(), str(tmp_path))
    plain.base_model.model.lm_head = torch.nn.Identity()
    expected = padded_logits(plain, trace, 0) @ parts.critic.head + parts.critic.bias
    assert (found - expected)[trace.mask].abs().max() <= 1e-4
    theirs = parts.model.hidden(trace) @ parts.critic.head + parts.critic.bias
    assert (found - theirs)[trace.mask].abs().max() > 1e-2


def test_neither_loss_moves_the_others_weights(tiny: Tiny, kind: str) -> None:
    parts = made(tiny, kind)
    trace = rollout_of(parts.model, tiny.prompts).token_trace
    policy, critic = parts.model.policy.trainable, parts.critic.trained
    assert not {id(p) for p in policy.values()} & {id(p) for p in critic.values()}
    parts.critic.values(trace).square().sum().backward()
    assert all(p.grad is None for p in policy.values())
    assert all(p.grad is not None and p.grad.any() for n, p in critic.items() if not quiet(n))
    for p in critic.values():
        p.grad = None
    parts.model.logp(trace, 1.0).logp.sum().backward()
    assert all(p.grad is None for p in critic.values())
    assert all(p.grad is not None for p in policy.values())
    for p in policy.values():
        p.grad = None


def quiet(name: str) -> bool:
    """The bias of keys: attention does not see it."""
    return name.endswith("k_proj.bias")


def test_a_new_critic_changes_nothing_of_the_policy(tiny: Tiny) -> None:
    alone, beside = (
        parts_of(tiny, {"name": "grpo"}, model={"lora": LORA}),
        made(tiny, "lora", False),
    )
    names = alone.model.policy.trainable.keys()
    assert beside.model.policy.trainable.keys() == names
    trace = rollout_of(alone.model, tiny.prompts).token_trace
    for found in (alone, beside):
        moved(found.model.policy.trainable, 0.05)
    for weights in ("current", "reference"):
        with torch.no_grad():
            one, two = (p.model.logp(trace, 1.0, weights).logp for p in (alone, beside))
        assert torch.equal(one, two)
    with torch.no_grad():
        moved(beside.critic.trained)
        assert torch.equal(beside.model.logp(trace, 1.0).logp, alone.model.logp(trace, 1.0).logp)
        parts = [p.model.prefill([trace.prompts[0]])[0].state for p in (alone, beside)]
    assert torch.equal(*parts)  # what is sampled from


def test_using_adapter_restores_the_policys_adapter(tiny: Tiny) -> None:
    parts = made(tiny, "lora")
    policy, module = parts.model.policy, parts.model.module
    trained = flags(module)
    both = {id(p) for p in (policy.trainable | parts.critic.trained).values()}
    assert {n for n, on in trained.items() if on} == {
        n for n, p in module.named_parameters() if id(p) in both
    }
    with policy.using_adapter("critic"):
        assert worn(module) == {"critic"} and flags(module) == trained
    assert worn(module) == {"default"} and flags(module) == trained
    with pytest.raises(RuntimeError, match="midway"), policy.using_adapter("critic"):
        raise RuntimeError("midway")
    assert worn(module) == {"default"} and flags(module) == trained
    with policy.using("reference"):
        pass
    assert worn(module) == {"default"} and flags(module) == trained
    with pytest.raises(RuntimeError, match="midway"), policy.using("reference"):
        raise RuntimeError("midway")
    assert worn(module) == {"default"} and flags(module) == trained


def test_a_critic_learns_with_a_reference(either: tuple[Tiny, str]) -> None:
    """PEFT freezes adapters when others are switched off; the learner must not notice."""
    tiny, kind = either
    parts = made(tiny, kind, kl={"place": "reward", "estimator": "k1"})
    rollout = rollout_of(parts.model, tiny.prompts)
    _, found = loss_and_gradient(parts, rollout)
    assert {n.removeprefix("beside.") for n in found if n.startswith("beside.")} == set(
        parts.critic.trained
    )
    policy = {n: w.clone() for n, w in parts.learner.policy.tensors().items()}
    critic = {n: p.detach().clone() for n, p in parts.critic.trained.items()}
    errors = []
    for step in range(5):
        metrics = parts.learner.update(rollout, step).metrics
        errors.append(metrics["update/value_error"])
    assert errors[-1] < 0.9 * errors[0]
    assert any(not torch.equal(w, policy[n]) for n, w in parts.learner.policy.tensors().items())
    assert all(
        not torch.equal(p, critic[n]) for n, p in parts.critic.trained.items() if not quiet(n)
    )


def test_each_has_its_own_rate_and_its_own_limit_of_the_gradient(tiny: Tiny) -> None:
    parts = made(tiny, "copy")
    rollout = rollout_of(parts.model, tiny.prompts)
    limits = {"max_norm": 1e-2, "warmup": 2}
    parts.learner.schedule = parts.learner.schedule.model_copy(update=limits)
    norms: list[float] = []
    honest = parts.learner._step

    def step() -> None:
        for group in parts.learner.optimizer.param_groups:
            grads = [p.grad.flatten() for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(grads).norm()))
        honest()

    parts.learner._step = step  # type: ignore[method-assign]
    metrics = parts.learner.update(rollout, 0).metrics
    assert norms == pytest.approx([1e-2, 1e-2], rel=1e-3)  # a long one shortens itself alone
    assert metrics["update/grad_norm"] > 1e-2
    rates = [group["lr"] for group in parts.learner.optimizer.param_groups]
    assert rates == pytest.approx([0.5e-3, 1e-3]) and metrics["update/lr"] == rates[0]


@pytest.mark.parametrize("value", [float("inf"), 1e25])  # the loss, or but the gradient's norm
def test_a_critic_that_is_not_finite_stops_the_step(tiny: Tiny, value: float) -> None:
    parts = made(tiny, "copy")
    rollout = rollout_of(parts.model, tiny.prompts)
    parts.critic.bias.data.fill_(value)
    before = {n: w.clone() for n, w in parts.learner.policy.tensors().items()}
    assert parts.learner.update(rollout, 0).metrics["update/skipped"] == 1
    assert all(torch.equal(w, before[n]) for n, w in parts.learner.policy.tensors().items())


def test_a_checkpoint_holds_the_critic_and_its_adam(either: tuple[Tiny, str]) -> None:
    tiny, kind = either
    parts = made(tiny, kind, False, updates=3, learner={"ema": {"every": 1}})
    rollout = rollout_of(parts.model, tiny.prompts)
    parts.learner.update(rollout, 0)
    state = {name: t.clone() for name, t in parts.learner.state().items()}
    own = set(parts.critic.trained)
    for table in (
        "beside/",
        "adam.exp_avg/beside.",
        "adam.exp_avg_sq/beside.",
        "adam.step/beside.",
    ):
        assert {n.removeprefix(table) for n in state if n.startswith(table)} == own
    again = made(tiny, kind, False, updates=3, learner={"ema": {"every": 1}}, seed=3)
    again.learner.seed = parts.learner.seed
    if kind == "copy":  # a full fine-tune starts the same under any seed, but for the head
        assert not torch.equal(again.critic.head, parts.critic.head)
    again.learner.restore(state)
    expected, found = (p.learner.update(rollout, 1).metrics for p in (parts, again))
    timeless = [name for name in expected if not name.startswith("time/")]
    assert {n: expected[n] for n in timeless} == {n: found[n] for n in timeless}
    one, two = parts.learner.state(), again.learner.state()
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_a_parameter_that_had_no_gradient_is_restored_without_adam(folders: Path) -> None:
    """A vision tower that is trained, and prompts without pictures so far."""
    tiny = Tiny("qwen2.5-vl", folders / "qwen2.5-vl")
    options: dict[str, Any] = {"model": {"train_vision": True}}
    parts, again = (parts_of(tiny, {"name": "grpo"}, **options) for _ in range(2))
    blind = rollout_of(parts.model, tokens.prompts(sees=False))
    parts.learner.update(blind, 0)
    again.learner.restore({n: t.clone() for n, t in parts.learner.state().items()})
    seeing = rollout_of(parts.model, tiny.prompts)
    for found in (parts, again):
        found.learner.update(seeing, 1)
    one, two = parts.learner.state(), again.learner.state()
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_an_export_holds_the_policy_alone(tiny: Tiny, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    parts = made(tiny, "lora")
    trace = rollout_of(parts.model, tiny.prompts).token_trace
    with torch.no_grad():
        before = parts.model.logp(trace, 1.0).logp
    parts.model.save(tmp_path / "lora")
    files = {str(f.relative_to(tmp_path / "lora")) for f in (tmp_path / "lora").rglob("*")}
    assert not any("critic" in name for name in files)
    names = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert len(names) == len(parts.model.policy.trainable)
    assert not any("critic" in name or "value" in name for name in names)
    plain = PeftModel.from_pretrained(tiny.plain(), str(tmp_path / "lora"))
    parts.model.save(tmp_path / "merged", merged=True)
    whole = tiny.plain(tmp_path / "merged")
    with torch.no_grad():
        for other in (plain, whole):
            expected = padded_logp(other, trace, 1.0, parts.model.suppressed)
            assert (before - expected).abs().max() <= 1e-4
        assert torch.equal(parts.model.logp(trace, 1.0).logp, before)
    values = parts.critic.values(trace)  # it still works, after the layers were folded in
    assert values.requires_grad and worn(parts.model.module) == {"default"}


def test_a_copy_starts_as_the_policy_and_has_no_head_for_tokens(folders: Path) -> None:
    for name in ("qwen2", "qwen3"):  # whose head is the embedding, too, and whose is not
        parts = made(Tiny(name, folders / name), "copy", False)
        own = dict(parts.critic.trunk.policy.trainable)
        head = {n for n in own if n.startswith("lm_head")}
        assert set(parts.critic.trained) == set(own) - head | {"value.weight", "value.bias"}
        assert bool(head) is (name == "qwen3")
        policy = parts.model.policy.trainable
        assert all(torch.equal(p, policy[n]) for n, p in own.items())
        assert all(p.data_ptr() != policy[n].data_ptr() for n, p in own.items())
    same, other = (made(Tiny("qwen2", folders / "qwen2"), "copy", False, seed=s) for s in (0, 1))
    again = made(Tiny("qwen2", folders / "qwen2"), "copy", False, seed=0)
    assert torch.equal(same.critic.head, again.critic.head)
    assert not torch.equal(same.critic.head, other.critic.head)


def test_the_start_comes_from_the_seed_alone(folders: Path) -> None:
    tiny = Tiny("qwen2", folders / "qwen2")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one = made(tiny, "lora", False).critic.trained
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(6)
    two = made(tiny, "lora", False).critic.trained
    assert all(torch.equal(p, two[n]) for n, p in one.items())
    assert {p.dtype for p in one.values()} == {torch.float32}
    assert all(not p.any() for n, p in one.items() if "lora_B" in n)


def test_in_half_precision(either: tuple[Tiny, str]) -> None:
    tiny, kind = either
    parts = made(tiny, kind, model={"dtype": "bfloat16"})
    rollout = rollout_of(parts.model, tiny.prompts)
    values = parts.critic.values(rollout.token_trace)
    assert values.dtype == torch.float32
    assert {p.dtype for p in parts.critic.trained.values()} == {torch.float32}
    _, found = loss_and_gradient(parts, rollout)
    assert all(torch.isfinite(g).all() and g.dtype == torch.float32 for g in found.values())


def test_trunks_that_cannot_be(folders: Path) -> None:
    tiny = Tiny("qwen2", folders / "qwen2")
    shared = {"name": "ppo", "critic": {"trunk": "lora"}}
    with pytest.raises(UserError, match=r"set model.lora.rank, or use trunk = \"copy\"") as first:
        parts_of(tiny, shared)
    again = {"lora": LORA, "gradient_checkpointing": True}
    with pytest.raises(UserError, match=r"does not support model.gradient_check") as second:
        parts_of(tiny, shared, model=again)
    assert all("\n" not in str(e.value) for e in (first, second))
    alone = made(tiny, "copy", model={"gradient_checkpointing": True})
    plain = made(tiny, "copy")
    rollout = rollout_of(plain.model, tiny.prompts)
    one, two = (loss_and_gradient(p, rollout)[1] for p in (alone, plain))
    assert all(torch.allclose(one[n], g, atol=1e-6) for n, g in two.items())
