"""Pieces of a batch, whoever drew them, and however it is cut."""

from __future__ import annotations

import pytest
import torch

from gesso import build
from gesso.algorithms.base import Prepared
from gesso.algorithms.flow import FlowTerms
from gesso.algorithms.noised import NoisedTerms
from gesso.config import Learner
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import Conditioning, FlowContext, FlowTrace, Layout, source_tokens
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, Score
from tests.conftest import PROMPTS
from tests.rollouts import SIZE, parts_of, rollout_of
from tests.typed import sure


@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_pieces_of_two_samplers_keep_their_own_conditioning(
    recipe_data: dict, gradient: str
) -> None:
    """Each sampler knows its own prompts only; replay gives the log-probs that each of them saw."""
    recipe_data["algorithm"] |= {"guidance": 3.0, "guidance_gradient": gradient}
    recipe = build.recipe_from(recipe_data)
    model, algorithm, learner = parts_of(recipe)
    spec = algorithm.spec(0, 0, SIZE)
    prompts = [Prompt(text) for text in PROMPTS]
    pieces = [
        piece
        for share in (prompts[:2], prompts[2:])
        for piece in DenoisingSampler(model, 2).sample(
            share, range(len(share)), [7 + PROMPTS.index(p.text) for p in share], spec
        )
    ]
    (whole,) = DenoisingSampler(model, 3).sample(prompts, [0, 1, 2], [7, 8, 9], spec)
    joined = FlowTrace.concat([piece.trace for piece in pieces])
    assert joined.row.tolist() == [0, 1, 2]
    for mine, expected in (
        (joined.context.cond, whole.trace.context.cond),
        (joined.context.negative, whole.trace.context.negative),
    ):
        assert mine is not None and expected is not None
        assert torch.equal(mine.rows(joined.row).embeds, expected.rows(whole.trace.row).embeds)
    torch.testing.assert_close(joined.clean, whole.trace.clean)  # other batches round otherwise
    assert (joined.negatives is not None) == (gradient == "conditional")
    rollout = Rollout(
        samples=[sample for piece in pieces for sample in piece.samples],
        group=torch.tensor([0, 0, 0]),
        trace=joined,
        logp=torch.cat([piece.logp for piece in pieces]),
        version=0,
        scores=[Score(float(i)) for i in range(3)],
        weights={"made-up": 1.0},
    )
    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/first_abs_dlogp_max"] < 1e-4


def test_pieces_of_one_call_share_their_context(recipe_data: dict) -> None:
    model, algorithm, _ = parts_of(build.recipe_from(recipe_data))
    trace = rollout_of(model, algorithm).flow_trace
    halves = [trace.rows(torch.arange(3)), trace.rows(torch.arange(3, 6))]
    assert FlowTrace.concat(halves).context is trace.context


def test_conditioning_that_only_some_prompts_have_is_an_error() -> None:
    embeds, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    for rows in ([Conditioning(embeds), Conditioning(embeds, mask=mask)],) * 2:
        with pytest.raises(AssertionError, match="some prompts lack a tensor"):
            Conditioning.stack(rows)
        rows.reverse()


def with_references(*layouts: Layout) -> Conditioning:
    """One row each; token k of the prompt's reference images has the value k + 1."""
    rows = []
    for i, layout in enumerate(layouts):
        tokens = torch.arange(1.0, source_tokens(layout) + 1)[None, :, None]
        rows.append(Conditioning(torch.full((1, 2, 3), i), source=tokens, layouts=(layout,)))
    return Conditioning.stack(rows)


def test_reference_images_of_different_sizes_are_padded_and_cut_again() -> None:
    small, large, both = ((1, 2),), ((2, 2),), ((1, 2), (2, 2))
    cond = with_references(small, large, both, (), small)
    assert cond.source is not None and cond.source.shape == (5, 6, 1)
    assert cond.source[0, :, 0].tolist() == [1, 2, 0, 0, 0, 0]
    selected = cond.rows(torch.tensor([4, 0]))
    assert selected.layout == small and selected.source is not None
    assert selected.source[:, :, 0].tolist() == [[1, 2], [1, 2]]
    assert selected.to(torch.device("cpu")).layouts == (small, small)
    none = cond.rows(torch.tensor([3]))
    assert none.layout == () and none.source is not None and none.source.shape == (1, 0, 1)
    with pytest.raises(ValueError, match="too many values"):
        _ = cond.rows(torch.tensor([0, 1])).layout
    with pytest.raises(AssertionError, match="some prompts lack a tensor"):
        Conditioning.stack([cond, Conditioning(torch.zeros(1, 2, 3))])


def test_batches_have_one_layout_of_reference_images() -> None:
    small, large = ((1, 2),), ((2, 2),)
    cond = with_references(small, large, small)
    row = torch.tensor([2, 1, 0, 0, 1, 2])
    assert [index.tolist() for index in cond.alike(row)] == [[0, 2, 3, 5], [1, 4]]
    terms = FlowTerms(6, FlowContext(torch.tensor([1.0, 0.0]), cond, None), row)
    parts = terms.micro_batches(Learner(micro_batch=3))
    assert [part.tolist() for part in parts] == [[0, 2, 3], [5], [1, 4]]
    assert [i.tolist() for i in with_references(small, small).alike(row[2:4])] == [[0, 1]]


def piece_of(prompts: list[TokenPrompt], row: list[int], length: int) -> TokenTrace:
    tokens = torch.arange(len(row) * length).view(len(row), length)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return TokenTrace(prompts, torch.tensor(row), tokens, mask, torch.zeros(len(row)).bool())


def test_responses_of_two_samplers_keep_their_own_prompts() -> None:
    prompts = [TokenPrompt(torch.tensor([i]), torch.tensor([0])) for i in range(3)]
    first, second = prompts[:2], prompts[2:]
    joined = TokenTrace.concat(
        [piece_of(first, [1, 0], 2), piece_of(second, [0], 4), piece_of(first, [1], 3)]
    )
    assert [int(joined.prompts[r].ids) for r in joined.row.tolist()] == [1, 0, 2, 1]
    assert joined.tokens.shape == (4, 4) and joined.mask.sum(1).tolist() == [2, 2, 4, 3]
    one = TokenTrace.concat([piece_of(first, [0], 2), piece_of(first, [1], 2)])
    assert one.prompts is first


def test_what_nft_noises_does_not_depend_on_how_a_batch_is_cut(recipe_data: dict) -> None:
    recipe_data["algorithm"] = {"name": "diffusion-nft", "group": 3, "steps": 4, "times": 2}
    model, algorithm, _ = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)

    def terms(rows: list[int]) -> NoisedTerms:
        part = rollout.rows(torch.tensor(rows))
        return sure(NoisedTerms, algorithm.terms(part, Prepared(torch.ones(len(rows)))))

    whole = terms([0, 1, 2, 3, 4, 5])
    assert len(whole.noise.flatten(1).unique(dim=0)) == 12  # each of its own
    for rows in ([4], [5, 0], [3, 1, 2]):
        part = terms(rows)
        index = torch.tensor([2 * row + k for row in rows for k in (0, 1)])
        assert torch.equal(part.noise, whole.noise[index])
        assert torch.equal(part.t, whole.t[index])


def test_micro_batches_are_indices_that_cover_every_term_once(recipe_data: dict) -> None:
    recipe_data["learner"] = {"micro_batch": 5}
    recipe = build.recipe_from(recipe_data)
    model, algorithm, _ = parts_of(recipe)
    rollout = rollout_of(model, algorithm)
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    parts = terms.micro_batches(recipe.learner)
    assert [len(part) for part in parts] == [5, 5, 5, len(terms) - 15]
    assert torch.cat(list(parts)).tolist() == list(range(len(terms)))
    none = algorithm.terms(rollout, Prepared(torch.zeros(6)))
    assert len(none) == 0 and not none.micro_batches(recipe.learner)
