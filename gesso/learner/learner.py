"""One update of the policy from one rollout, for any algorithm.

A mini-batch is a set of samples and gives one optimizer step; it is processed in micro-batches of
terms. Losses are summed and divided by the number of terms of the whole mini-batch, so that 1, 2 or
8 micro-batches give the same gradient. A critic is trained with the policy, at a separate learning
rate.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gesso import config
from gesso.algorithms.base import Algorithm, Terms
from gesso.formulas import advantages as adv
from gesso.formulas import averages
from gesso.learner.gradient_sum import gradient_sum
from gesso.models.repeatable import deterministic_algorithms
from gesso.ranks import ALONE, Ranks, deal
from gesso.rollout import Rollout
from gesso.track.progress import SILENT, Progress
from gesso.types import UNSCALED, Scales, TeacherName, UserError, Weights, Which, seed_of
from gesso.weights.copies import differences
from gesso.weights.policy import Policy
from gesso.weights.publish import digest
from gesso.weights.shards import divided_like, is_sharded, whole

MAX_REPORTED = {"abs_dlogp", "sampler_gap"}  # the maximum is reported in addition to the mean


class Trainable(Protocol):
    """The part of a model that the learner uses."""

    @property
    def policy(self) -> Policy: ...


@dataclass(frozen=True)
class Update:
    """The result of one iteration of updates."""

    metrics: dict[str, float]
    advantages: list[float]  # per sample; for per-token advantages, the mean over the tokens


class ExtraParameters(Protocol):
    """Parameters that are trained with the policy but are not part of it, such as a critic's."""

    trained: dict[str, nn.Parameter]
    lr: float


EXTRA = "beside"  # table of parameters that are trained with the policy's, such as a critic's
TEACHERS = "teachers"  # table of the teachers' digests


class Learner:
    def __init__(
        self,
        model: Trainable,
        algorithm: Algorithm,
        optimizer: config.Optimizer,
        settings: config.Learner,
        seed: int,
        extra: ExtraParameters | None = None,
        progress: Progress = SILENT,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.model = model
        self.policy = model.policy
        self.algorithm = algorithm
        self.settings = settings
        self.schedule = optimizer
        self.seed = seed
        self.extra = extra
        self.progress = progress
        self._clipped = [list(self.policy.trainable.values())]  # together, by their norm
        rates = [optimizer.lr]
        if extra is not None:
            self._clipped.append(list(extra.trained.values()))
            rates.append(extra.lr)
        groups: list[dict[str, Any]] = [
            {"params": alike, "peak": rate}
            for parameters, rate in zip(self._clipped, rates, strict=True)
            for alike in _alike(parameters)
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.optimizer_steps = 0
        self._lr_scale = 1.0
        self._teachers: dict[TeacherName, Tensor] = {}  # digests of their weights
        for copy in sorted(algorithm.needs):
            self.policy.snapshot(copy)
        if settings.ema:
            self.policy.snapshot("ema")

    def teach(self, name: TeacherName, weights: Weights) -> None:
        """Gives a copy that the algorithm needs the weights of a teacher. They never change:
        checkpoints have only their digest, and are not restored with other weights."""
        try:
            self.policy.load(weights, name)
        except ValueError as error:
            raise UserError(
                f"{name}: {error}; expected a model with the architecture of the student"
            ) from error
        self._teachers[name] = torch.tensor(list(bytes.fromhex(digest({name: weights}))))

    def update(self, rollout: Rollout, step: int, scales: Scales = UNSCALED) -> Update:
        """All optimizer steps of iteration `step` (from 0). Every sample must have a score."""
        unscaled, self._lr_scale = self.algorithm, scales.lr
        if scales.kl != 1:
            scaled = unscaled.with_kl(scales.kl)
            assert scaled is not None, "build.py refuses raise_kl without a KL"
            self.algorithm = scaled
        if scales.share is not None:
            self.algorithm = self.algorithm.with_share(scales.share)
        if scales.renew:
            self.policy.snapshot("renewed")
        try:
            update = self._update(rollout, step)
        finally:
            self.algorithm = unscaled
        if scales.renew is not None:
            update.metrics["update/renewed"] = float(scales.renew)
        return update

    def _update(self, rollout: Rollout, step: int) -> Update:
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(seed_of(self.seed, "update", step))
        self.progress.phase("preparing the update")
        with deterministic_algorithms(self.model):
            prepared = self.algorithm.prepare(self.model, rollout, self.settings, self.ranks)
        advantages = prepared.advantages
        inside = advantages if advantages.ndim == 1 else advantages[rollout.mask]
        kept = self.algorithm.advantage.kept(rollout, self.algorithm.updates)
        passes = self.algorithm.epochs * self.algorithm.terms_a_sample
        used = kept if prepared.picked is None else kept[prepared.picked[kept]]
        self.progress.phase("updating", len(used) * passes)
        stats: dict[str, list[Tensor]] = defaultdict(list)
        norms: list[float] = []
        skipped = 0
        first: dict[str, float] = {}  # before the first optimizer step
        fresh = rollout.version == step  # sampled with the current weights
        for rows in self._mini_batches(kept, rollout.group, generator):
            mini_batch = rollout.rows(rows) if fresh else rollout.rows(rows).aged()
            terms = self.algorithm.terms(mini_batch, prepared.rows(rows))
            if not len(terms):  # no sample of it has a gradient
                continue
            norm = self._accumulate(terms, stats)
            if "abs_dlogp" in stats and not first:
                first["first_abs_dlogp_max"] = float(torch.cat(stats["abs_dlogp"]).max())
                first["first_clipped"] = float(torch.cat(stats["clipped"]).mean())
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
                self._step()
                fresh = False
        self.optimizer.zero_grad(set_to_none=True)
        self.algorithm.finish(self.policy, self.optimizer_steps)
        norms += [] if norms or skipped else [0.0]  # all groups are flat: there is no gradient
        metrics = {f"update/{name}": float(torch.cat(v).mean()) for name, v in stats.items()}
        for name in MAX_REPORTED & stats.keys():
            metrics[f"update/{name}_max"] = float(torch.cat(stats[name]).max())
        if first:
            metrics |= {f"update/{name}": value for name, value in first.items()}
        metrics |= prepared.metrics
        metrics |= {
            "update/grad_norm": sum(norms) / len(norms) if norms else float("nan"),
            "update/skipped": float(skipped),
            "update/lr": self.optimizer.param_groups[0]["lr"],
            "advantage/abs_mean": float(inside.abs().mean()),
            "advantage/flat_groups": adv.flat_groups(rollout.rewards, rollout.group),
            "advantage/used": len(used) / len(advantages),
            "time/update": time.perf_counter() - started,
        }
        return Update(metrics, _by_sample(advantages, rollout))

    def _mini_batches(
        self, kept: Tensor, group: Tensor, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Rows of a rollout, reshuffled for every epoch: single samples or whole groups."""
        units = [kept[i : i + 1] for i in range(len(kept))]
        if self.algorithm.whole_groups:
            units = [kept[group[kept] == one] for one in group[kept].unique()]
        for _ in range(self.algorithm.epochs):
            order = torch.randperm(len(units), generator=generator)
            if len(order):
                for part in order.tensor_split(min(self.algorithm.updates, len(order))):
                    yield torch.cat([units[i] for i in part.tolist()])

    def _accumulate(self, terms: Terms, stats: dict[str, list[Tensor]]) -> float | None:
        """Accumulates the gradient of the mini-batch's mean loss in .grad. Returns its norm, or
        None if the loss or the gradient is not finite: such a step is skipped."""
        self.optimizer.zero_grad(set_to_none=True)
        with deterministic_algorithms(self.model):
            terms = self.algorithm.complete(self.model, terms, self.settings, self.ranks)
        parts = terms.micro_batches(self.settings)
        dealt = deal([terms.cost(index) for index in parts], self.ranks)
        total = gradient_sum(list(self._all.values()))
        mine: dict[int, dict[str, Tensor]] = {}
        losses = []  # checked at the end, since reading a value synchronizes with the device
        with self.policy.folded(), deterministic_algorithms(self.model):
            for i, index in enumerate(parts):
                if i in dealt.mine:
                    result = self.algorithm.loss(self.model, terms.rows(index))
                    loss = result.loss.sum() / terms.total
                    losses.append(loss.detach())
                    loss.backward()
                    total.add()
                    mine[i] = dict(result.stats)
                self.progress.advance(len(index))
            for _ in range(dealt.spare):
                (0 * self.algorithm.loss(self.model, terms.rows(parts[0])).loss.sum()).backward()
                total.add()
        for values in self.ranks.merge(mine, dealt.owners):
            for name, value in values.items():
                stats[name].append(value)
        device = next(iter(self._all.values())).device
        not_finite = sum(~loss.isfinite() for loss in losses) + torch.zeros((), device=device)
        if self.ranks.count > 1:
            self.ranks.sum([*total.buffers(), not_finite])
        finite = total.write() and not not_finite
        norms = [_clip(parameters, self.schedule.max_norm) for parameters in self._clipped]
        return norms[0] if finite and max(norms) < float("inf") else None

    def _step(self) -> None:
        assert not self.policy.is_folded, (
            "a sampler in the middle of a batch would continue with older weights"
        )
        warmup = self.schedule.warmup
        rise = min(1.0, (self.optimizer_steps + 1) / warmup) if warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rise * self._lr_scale
        self.optimizer.step()
        self.optimizer_steps += 1
        ema = self.settings.ema
        if ema and self.optimizer_steps % ema.every == 0:
            decay = averages.ema_decay(self.optimizer_steps, ema.decay)
            averages.blend_(self.policy.copies["ema"], self.policy.tensors(), decay)

    def state(self) -> dict[str, Tensor]:
        """Everything that an exact resume needs, as a flat mapping of names to tensors."""
        state = {f"current/{name}": p.data for name, p in self.policy.trainable.items()}
        for copy in self._saved_copies:
            tensors = self.policy.copies[copy]
            state |= {f"{copy}/{name}": tensor for name, tensor in tensors.items()}
        state |= {f"{TEACHERS}/{name}": found for name, found in self._teachers.items()}
        if self.extra is not None:
            state |= {f"{EXTRA}/{name}": p.data for name, p in self.extra.trained.items()}
        for name, p in self._all.items():
            for key, value in self.optimizer.state[p].items():
                state[f"adam.{key}/{name}"] = torch.as_tensor(value)
        return state | {"optimizer_steps": torch.tensor(self.optimizer_steps)}

    @property
    def _saved_copies(self) -> list[Which]:
        """All but those of teachers, which are loaded again when a run is resumed."""
        return [copy for copy in self.policy.copies if copy not in self._teachers]

    @property
    def _all(self) -> dict[str, nn.Parameter]:
        """Every trained parameter by its name in a checkpoint."""
        extra = self.extra.trained if self.extra is not None else {}
        return self.policy.trainable | {f"{EXTRA}.{name}": p for name, p in extra.items()}

    @property
    def sharded(self) -> dict[str, nn.Parameter]:
        """The trained parameters of which every rank has a part."""
        return {name: p for name, p in self._all.items() if is_sharded(p)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Strict: raises a ValueError that lists missing tensors, unexpected tensors and wrong
        shapes, and changes nothing in that case."""
        expected = {k: t.shape for k, t in self.state().items() if not k.startswith("adam.")}
        for name, p in self._all.items():
            moments = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
            shapes = {f"adam.{key}/{name}": shape for key, shape in moments.items()}
            if shapes.keys() & state.keys():  # Adam has no state before the first gradient
                expected |= shapes
        if differ := differences(expected, {key: t.shape for key, t in state.items()}):
            raise ValueError(differ)
        tables: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in state.items():
            table, _, name = key.partition("/")
            tables[table][name] = tensor
        for teacher, found in self._teachers.items():
            if not torch.equal(found, tables[TEACHERS][teacher]):
                raise UserError(
                    f"the weights of {teacher} have changed since this run started; restore its "
                    "folder, or start a new run with an export as the teacher, which further "
                    "training does not change"
                )
        self.policy.load(tables["current"])
        for copy in self._saved_copies:
            self.policy.load(tables[copy], copy)
        if self.extra is not None:
            for name, p in self.extra.trained.items():
                p.data.copy_(tables[EXTRA][name])
        for name, p in self._all.items():
            self.optimizer.state[p] = {
                key: _moment(key, tensors[name], p)
                for table, tensors in tables.items()
                if (key := table.removeprefix("adam.")) != table and name in tensors
            }
        self.optimizer_steps = int(state["optimizer_steps"])


def _alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sharded and other parameters, which torch cannot process in one call."""
    sharded = [p for p in parameters if is_sharded(p)]
    others = [p for p in parameters if not is_sharded(p)]
    return [kind for kind in (sharded, others) if kind]


def _clip(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clips gradients by the norm of all of them, which is returned."""
    kinds = _alike([p for p in parameters if p.grad is not None])
    norms = [whole(get_total_norm([p.grad for p in kind])) for kind in kinds]
    if not norms:
        return 0.0
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, norm)
    return float(norm)


def _moment(key: str, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A part of Adam's state, where the parameter is."""
    copy = tensor.clone()
    return copy.to(parameter.device) if key == "step" else divided_like(copy, parameter)


def _by_sample(advantages: Tensor, rollout: Rollout) -> list[float]:
    """(N,): for per-token advantages (N, S), the mean over each response."""
    if advantages.ndim == 2:
        mask = rollout.mask.to(advantages)
        advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    return advantages.detach().float().tolist()
