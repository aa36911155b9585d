"""vLLM as an engine for language models, in the process and on the device of the learner, or of a
separate sampler.

The engine has a separate implementation of the model and a separate copy of the weights. It starts
without weights and loads them from the module before sampling, with adapters merged; nothing is
written to disk. On a GPU it sleeps while the learner updates: it frees its memory and drops its
weights. That of a separate sampler stays awake.

Each worker of a cluster that samples has an engine, or `tensor_parallel` consecutive ones have one
together. Each of them then runs a scheduler of its own, so that all must get the same requests in
the same order; the logits, and so the sampled tokens, are the same on all of them.

Prompts are passed as the token ids that the learner uses. Images are passed as features of our
vision tower, so there is no second image processor.

Each sample has a seed, but its tokens differ from those that the built-in sampler gives for that
seed. Log-probs of softmax(logits / temperature) are returned with the tokens, as in `decode.py`.
vLLM's kernels round them differently, by about 1e-6 in float32 and much more in half precision;
`algorithm.importance` corrects for this.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from gesso import config
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.rollout import Rollout
from gesso.samplers import responses
from gesso.samplers.base import Piece
from gesso.samplers.responses import EncodedPrompts, Response, ResponseRequest
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, ResponseSpec, UserError, Which
from gesso.weights.publish import HeldWeights, Publication

SUPPRESSED_BIAS = -100.0
"""Added to the logits of suppressed ids. vLLM accepts nothing lower, and in float32 e⁻¹⁰⁰ vanishes
next to any other probability."""
CPU_CACHE = 2**30
"""Bytes of the key-value cache on a CPU; VLLM_CPU_KVCACHE_SPACE, in GiB, overrides it."""
MAX_BATCHED_TOKENS = 8192
"""Tokens in one pass of the engine; a prompt with images must fit in it."""


class VllmSampler:
    def __init__(
        self, model: TransformerModel, settings: config.Sampler, longest: int, seed: int = 0
    ) -> None:
        """`longest`: tokens of the longest prompt plus the longest response."""
        self.model = model
        self.batch = settings.batch
        self.weights = HeldWeights(model.policy)
        self.sleeps = model.device.type == "cuda"
        self.loaded: tuple[int, Which] | None = None  # version and copy that the engine holds
        self.engine = _start(model, settings, longest, seed)
        self.awake = True
        self.rest()

    def accept(self, publication: Publication) -> None:
        """The engine loads the new version from the module in the next call."""
        self.weights.accept(publication)

    def prepare(self, which: Which) -> None:
        """Wakes the engine with these weights. It stays awake until `rest`."""
        if self.sleeps and not self.awake:
            torch.cuda.empty_cache()  # torch still reserves what the learner freed
            self.engine.wake_up(tags=["weights"])
        if self.loaded != (self.weights.version, which):
            with self.model.policy.plain(which) as weights:
                self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.loaded = self.weights.version, which
        if self.sleeps and not self.awake:
            self.engine.wake_up(tags=["kv_cache"])
        self.awake = True

    def rest(self) -> None:
        """Puts the engine on a GPU to sleep. Level 2 drops the weights instead of moving them to
        the host; the module has them."""
        if self.sleeps and self.awake:
            self.engine.sleep(level=2)
            self.loaded = None
        self.awake = False

    def shared(self, prompts: Sequence[Prompt], spec: ResponseSpec) -> EncodedPrompts:
        return EncodedPrompts(self.model, prompts)

    def sample(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: ResponseSpec,
        shared: EncodedPrompts | None = None,
        only: range | None = None,
    ) -> Generator[Piece[TokenTrace], None, None]:
        """One response to prompts[row[i]] from seeds[i] for every i, in pieces as they finish. If
        the generator is closed early, the remaining requests are aborted. An engine that was not
        prepared before rests afterwards."""
        encoded = shared or self.shared(prompts, spec)
        index = only or range(len(seeds))
        encoded.encode(row[i] for i in index)
        request = ResponseRequest(prompts, encoded, row, seeds, index)
        waiting: set[str] = set()  # request ids: the indices of their samples
        finished: list[Response] = []
        was_awake = self.awake
        self.prepare(spec.weights)
        self._clear_caches()
        try:
            self._submit(request, spec, waiting)
            while waiting:
                for output in self.engine.llm_engine.step():
                    finished.append(self._response(output, request))
                    waiting.remove(output.request_id)
                full = len(finished) >= responses.piece_size(self.batch)
                if full or (finished and not waiting):
                    yield request.piece(finished, self.model)
                    finished = []
        finally:
            self.engine.llm_engine.abort_request(sorted(waiting))  # if closed early
            if not was_awake:
                self.rest()

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return responses.describe(rollout)

    def close(self) -> None:
        """Releases the engine's memory. This sampler cannot be used afterwards."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.engine
        cleanup_dist_env_and_memory()

    def _clear_caches(self) -> None:
        """They may have been computed with other weights. With the same ones, a sample must not
        depend on the requests before it."""
        self.engine.reset_prefix_cache()
        self.engine.llm_engine.reset_encoder_cache()
        self.engine.reset_mm_cache()

    def _submit(self, request: ResponseRequest, spec: ResponseSpec, waiting: set[str]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        bias = dict.fromkeys(self.model.suppressed.tolist(), SUPPRESSED_BIAS)
        rows, seeds = request.rows_and_seeds
        prompts = {r: self._prompt(request.encoded[r], spec.weights) for r in dict.fromkeys(rows)}
        for i, (r, seed) in enumerate(zip(rows, seeds, strict=True)):
            params = SamplingParams(
                temperature=spec.temperature,
                seed=seed,
                max_tokens=spec.max_tokens,
                stop_token_ids=sorted(self.model.end),
                ignore_eos=True,  # only the ids above stop a response
                logit_bias=bias,
                logprobs=0,  # of the sampled token
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.llm_engine.add_request(str(i), prompts[r], params)
            waiting.add(str(i))

    def _prompt(self, prompt: TokenPrompt, which: Which) -> dict[str, Any]:
        if prompt.grid is None:
            return {"prompt_token_ids": prompt.ids.tolist()}
        assert isinstance(self.model, VisionLanguage)
        model = self.model
        with torch.no_grad(), model.policy.using(which), model.precision():
            layers = model.features(prompt)  # (1 + deep, tokens, D)
        features = torch.cat(list(layers), dim=-1).cpu()  # vLLM's layout for DeepStack
        images = {"image_embeds": features, "image_grid_thw": prompt.grid}
        ids = one_token_per_image(prompt, model.images.merge_size).tolist()
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    def _response(self, output: Any, request: ResponseRequest) -> Response:
        index, completion = int(output.request_id), output.outputs[0]
        prompt = request.encoded[request.row[request.index[index]]].ids.tolist()
        assert output.prompt_token_ids == prompt, "vLLM's prompt differs from the learner's"
        tokens = list(completion.token_ids)
        pairs = zip(completion.logprobs, tokens, strict=True)
        logp = [logprobs[token].logprob for logprobs, token in pairs]
        return Response(
            index,
            torch.tensor(tokens),
            torch.tensor(logp, dtype=torch.float32),
            cut=tokens[-1] not in self.model.end,
        )


def one_token_per_image(prompt: TokenPrompt, merge: int) -> Tensor:
    """The ids of a prompt with one token per image; vLLM repeats it for every feature."""
    assert prompt.grid is not None
    sizes = prompt.grid.prod(-1) // merge**2
    positions = prompt.kinds.nonzero()[:, 0]
    keep = prompt.kinds == 0
    keep[positions[sizes.cumsum(0) - sizes]] = True
    return prompt.ids[keep]


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'sampler.engine = "vllm", but vLLM is not installed; run pip install "gesso[vllm]" in '
            'a separate environment, or remove the key to use the engine "built-in"'
        )


def check_heads(query: int, key_value: int, parallel: int) -> None:
    """vLLM divides query heads; key-value heads it divides or, if there are fewer, repeats."""
    divides = key_value % parallel == 0 or parallel % key_value == 0
    if query % parallel or not divides:
        raise UserError(
            f"sampler.vllm.tensor_parallel = {parallel} does not divide the model's {query} "
            f"attention heads and {key_value} key-value heads; use a number that divides both"
        )


def _start(model: TransformerModel, settings: config.Sampler, longest: int, seed: int) -> Any:
    check_installed()
    if model.device.type not in ("cpu", "cuda") or model.device.index:
        raise UserError(
            f'sampler.engine = "vllm" runs only on a CPU or on the first GPU, got {model.device}; '
            "select another GPU with CUDA_VISIBLE_DEVICES"
        )
    max_positions = model.decoder.config.max_position_embeddings
    if longest > max_positions:
        raise UserError(
            f"model.max_prompt + algorithm.max_tokens = {longest}, but vLLM accepts at most the "
            f"model's max_position_embeddings of {max_positions} tokens; lower model.max_prompt"
        )
    parallel, text = settings.vllm.tensor_parallel, model.decoder.config
    check_heads(text.num_attention_heads, text.num_key_value_heads, parallel)
    on_gpu = model.device.type == "cuda"
    memory: dict[str, Any] = {"kv_cache_memory_bytes": CPU_CACHE, "enforce_eager": True}
    if on_gpu:
        memory = {
            "gpu_memory_utilization": settings.vllm.gpu_memory,
            "enforce_eager": settings.vllm.enforce_eager,
            "enable_sleep_mode": True,
        }
    try:
        with _process_state_restored():
            from vllm import LLM

            return LLM(
                model.source,
                dtype=str(model.dtype).removeprefix("torch."),
                load_format="dummy",  # weights are loaded from the module
                max_model_len=longest,
                max_num_seqs=settings.batch,
                max_num_batched_tokens=max(MAX_BATCHED_TOKENS, longest),
                logprobs_mode="processed_logprobs",  # after temperature and suppressed ids
                generation_config="vllm",  # no top-p or penalty from the checkpoint
                seed=seed % 2**32,
                tensor_parallel_size=parallel,
                distributed_executor_backend=_executor() if distributed.is_initialized() else None,
                disable_custom_all_reduce=True,  # it needs processes that see each other's GPUs
                **_image_options(model),
                **memory,
            )
    except (ValueError, RuntimeError, ImportError, AssertionError) as error:
        reason = " ".join(str(error).split())[:400] or repr(error)
        raise UserError(f"vLLM cannot run {model.source}: {reason}") from error


def _executor() -> type:
    """Runs this process as one rank of torch's process group, in which `tensor_parallel`
    consecutive ranks share a model and all others are independent.

    vLLM's "external_launcher" does this, too, but on a CPU all of its engines on a machine use the
    same name for shared memory, which an interrupted run leaves behind: the next one fails. Here
    the ranks have different names, and vLLM communicates by gloo instead."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    class WorkerExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            name, _, device = UniProcExecutor._distributed_args(self)
            return name, distributed.get_rank(), device

    return WorkerExecutor


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restores the process state that vLLM changes when it starts. vLLM is configured by
    environment variables and changes others, which subprocesses of the run, such as a judge's vLLM,
    would inherit. On a CPU it also replaces torch.set_num_threads, which the learner needs."""
    environment = dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, which has the weights
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # refuses ranks that each see one GPU only
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _image_options(model: TransformerModel) -> dict[str, Any]:
    """With a limit of 0 images vLLM loads no vision tower. DeepStack features require one."""
    if not isinstance(model, VisionLanguage):
        return {}
    limits = {"video": 0} if model.deep else {"video": 0, "image": 0}
    return {"enable_mm_embeds": True, "skip_mm_profiling": True, "limit_mm_per_prompt": limits}
