"""vLLM as an engine for models that write, in this process and on the learner's device.

The engine has its own code for the model and its own copy of the weights. It starts with none, and
takes them from the module before it samples, adapters folded in: nothing passes through a disk.
On a GPU it sleeps between two calls: its memory is the learner's then, and its weights are gone.

Prompts go in as token ids, the ones that the learner sees. Pictures go in as the features that our
own vision tower made of them, so no second image processor can see them differently.

Each sample has its own seed, yet not the tokens that the built-in sampler draws from it. Log-probs
come with the tokens, of softmax(logits / temperature) as in `decode.py`: other kernels round them
otherwise, by about 1e-6 in float32 and by far more in half precision. What that does to the ratio,
`algorithm.importance_cap` mends.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gesso import config
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.rollout import Rollout, TokenPrompt, TokenTrace
from gesso.samplers import responses as replies
from gesso.samplers.base import Piece
from gesso.samplers.responses import Asked, Reply
from gesso.types import Prompt, ReplySpec, UserError, Which
from gesso.weights.publish import HeldWeights, Publication

NEVER = -100.0
"""Added to the logit of an id that no reply holds: vLLM takes no less, and e⁻¹⁰⁰ is 0 in float32
beside any other."""
CPU_CACHE = 2**30
"""Bytes of keys and values on a CPU; vLLM's own VLLM_CPU_KVCACHE_SPACE, in GiB, stands over it."""
AT_ONCE = 8192
"""Tokens that one pass of the engine may hold; a prompt with pictures must fit in it."""


class VllmSampler:
    def __init__(
        self, model: TransformerModel, settings: config.Sampler, longest: int, seed: int = 0
    ) -> None:
        """`longest`: tokens of the longest prompt with the longest reply."""
        self.model = model
        self.batch = settings.batch
        self.weights = HeldWeights(model.policy)
        self.sleeps = model.device.type == "cuda"
        self.inside: Which | None = None  # the weights that the engine has, None: not the newest
        self.engine = _start(model, settings, longest, seed)
        if self.sleeps:
            self._sleep()

    def accept(self, publication: Publication) -> None:
        """The engine takes them from the module with the next call."""
        self.weights.accept(publication)
        self.inside = None

    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: ReplySpec
    ) -> Generator[Piece[TokenTrace], None, None]:
        """One reply to prompts[row[i]] from seeds[i] for every i, in pieces as they finish. Closed
        before its end, it takes back what is still asked for."""
        encoded = [self.model.encode(prompt) for prompt in prompts]
        asked = Asked(prompts, encoded, row, seeds)
        waiting: set[str] = set()  # requests, by the index of their sample
        done: list[Reply] = []
        self._wake(spec.weights)
        try:
            self._ask(asked, spec, waiting)
            while waiting:
                for output in self.engine.llm_engine.step():
                    done.append(self._reply(output, asked))
                    waiting.remove(output.request_id)
                if len(done) >= replies.piece_size(self.batch) or (done and not waiting):
                    yield asked.piece(done, self.model)
                    done = []
        finally:
            self.engine.llm_engine.abort_request(sorted(waiting))  # left over if nobody takes them
            if self.sleeps:
                self._sleep()

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return replies.describe(rollout)

    def close(self) -> None:
        """Give back the engine's memory. This sampler draws no more."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.engine
        cleanup_dist_env_and_memory()

    def _wake(self, which: Which) -> None:
        """Memory, then weights, then what was computed with other weights: none of it holds."""
        if self.sleeps:
            torch.cuda.empty_cache()  # what the learner has freed, torch still holds
            self.engine.wake_up(tags=["weights"])
        if self.inside != which:
            weights = self.model.policy.plain(which)
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.inside = which
        if self.sleeps:
            self.engine.wake_up(tags=["kv_cache"])
        self.engine.reset_prefix_cache()
        self.engine.llm_engine.reset_encoder_cache()
        self.engine.reset_mm_cache()

    def _sleep(self) -> None:
        """Level 2: weights are dropped, not kept in the host's memory; the module has them."""
        self.engine.sleep(level=2)
        self.inside = None

    def _ask(self, asked: Asked, spec: ReplySpec, waiting: set[str]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        never = dict.fromkeys(self.model.suppressed.tolist(), NEVER)
        given = {r: self._prompt(asked.encoded[r], spec.weights) for r in dict.fromkeys(asked.row)}
        for i, (r, seed) in enumerate(zip(asked.row, asked.seeds, strict=True)):
            params = SamplingParams(
                temperature=spec.temperature,
                seed=seed,
                max_tokens=spec.max_tokens,
                stop_token_ids=sorted(self.model.end),
                ignore_eos=True,  # the ids above are all there are
                logit_bias=never,
                logprobs=0,  # of the drawn token
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.llm_engine.add_request(str(i), given[r], params)
            waiting.add(str(i))

    def _prompt(self, prompt: TokenPrompt, which: Which) -> dict[str, Any]:
        if prompt.grid is None:
            return {"prompt_token_ids": prompt.ids.tolist()}
        assert isinstance(self.model, VisionLanguage)
        model = self.model
        with torch.no_grad(), model.policy.using(which), model.precision():
            layers = model.features(prompt)  # (1 + deep, tokens, D)
        features = torch.cat(list(layers), dim=-1).cpu()  # as vLLM takes DeepStack's
        pictures = {"image_embeds": features, "image_grid_thw": prompt.grid}
        ids = one_place_each(prompt, model.images.merge_size).tolist()
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}

    def _reply(self, output: Any, asked: Asked) -> Reply:
        index, made = int(output.request_id), output.outputs[0]
        read = asked.encoded[asked.row[index]].ids.tolist()
        assert output.prompt_token_ids == read, "vLLM has read another prompt than the learner will"
        tokens = list(made.token_ids)
        logp = [each[token].logprob for each, token in zip(made.logprobs, tokens, strict=True)]
        device = self.model.device
        return Reply(
            index,
            torch.tensor(tokens, device=device),
            torch.tensor(logp, dtype=torch.float32, device=device),
            cut=tokens[-1] not in self.model.end,
        )


def one_place_each(prompt: TokenPrompt, merge: int) -> Tensor:
    """A prompt's ids with one place for each picture; vLLM itself repeats it for every feature."""
    assert prompt.grid is not None
    sizes = prompt.grid.prod(-1) // merge**2
    places = prompt.kinds.nonzero()[:, 0]
    keep = prompt.kinds == 0
    keep[places[sizes.cumsum(0) - sizes]] = True
    return prompt.ids[keep]


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'sampler.engine = "vllm", but vLLM is not installed: pip install "gesso[vllm]" into an '
            'environment of its own, or leave the key out for the engine "built-in"'
        )


def _start(model: TransformerModel, settings: config.Sampler, longest: int, seed: int) -> Any:
    check_installed()
    if model.device.type not in ("cpu", "cuda") or model.device.index:
        raise UserError(
            f'sampler.engine = "vllm" runs on a CPU or on the first GPU, not on {model.device}; '
            "choose another GPU by CUDA_VISIBLE_DEVICES"
        )
    places = model.decoder.config.max_position_embeddings
    if longest > places:
        raise UserError(
            f"model.max_prompt + algorithm.max_tokens = {longest}, but the model was made for "
            f"{places} tokens, and vLLM takes no more; lower model.max_prompt"
        )
    on_gpu = model.device.type == "cuda"
    place: dict[str, Any] = {"kv_cache_memory_bytes": CPU_CACHE, "enforce_eager": True}
    if on_gpu:
        place = {
            "gpu_memory_utilization": settings.vllm.gpu_memory,
            "enforce_eager": settings.vllm.enforce_eager,
            "enable_sleep_mode": True,
        }
    try:
        with _process_kept():
            from vllm import LLM

            return LLM(
                model.source,
                dtype=str(model.dtype).removeprefix("torch."),
                load_format="dummy",  # weights come from the module
                max_model_len=longest,
                max_num_seqs=settings.batch,
                max_num_batched_tokens=max(AT_ONCE, longest),
                logprobs_mode="processed_logprobs",  # after temperature and forbidden ids
                generation_config="vllm",  # no top-p or penalty of the checkpoint's own
                seed=seed % 2**32,
                **_seeing(model),
                **place,
            )
    except (ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"vLLM cannot run {model.source}: {reason}") from error


@contextmanager
def _process_kept() -> Iterator[None]:
    """vLLM is told by the environment, and while it starts it changes more of it. All of that would
    pass on to the processes that a run starts, a judge's vLLM among them. On a CPU it also takes
    torch.set_num_threads away, which the learner needs."""
    environment = dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _seeing(model: TransformerModel) -> dict[str, Any]:
    """vLLM leaves out a vision tower that it may show nothing. DeepStack's features, though, it
    takes only beside one."""
    if not isinstance(model, VisionLanguage):
        return {}
    limits = {"video": 0} if model.deep else {"video": 0, "image": 0}
    return {"enable_mm_embeds": True, "skip_mm_profiling": True, "limit_mm_per_prompt": limits}
