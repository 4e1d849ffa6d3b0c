"""One step of everything: requests in, schedule, execute, update, text out. Does not know HTTP, clocks or the terminal."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_mini.block_manager import BlockEvent, BlockManager
from vllm_mini.config import ConfigError, EngineConfig, SchedulerConfig, token_id_tuple
from vllm_mini.detokenizer import OutputText
from vllm_mini.loader import load_config, load_generation_config, resolve_model
from vllm_mini.paged_attention import Block
from vllm_mini.scheduler import Scheduler, SchedulerOutput, SequenceOutput
from vllm_mini.sequence import RequestError, SamplingParams, Sequence, TokenLogprobs
from vllm_mini.structured import GrammarCompiler, GrammarError
from vllm_mini.tokenizer import Tokenizer
from vllm_mini.worker import Worker, choose_device

__all__ = ["LLMEngine", "StepError", "StepSnapshot", "TokenOutput"]

logger = logging.getLogger(__name__)

MAX_CHARACTERS_PER_TOKEN = 64  # of a prompt, for each token of the context: text beyond that is not even tokenized

# generation_config.json's names for what a request may leave open, and ours
GENERATION_DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                       "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to one choice of a request."""

    request_id: str
    index: int
    text: str  # may be empty: half a character, or what may become a stop string, is held back
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of this choice so far
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with a choice's first token, where asked for
    is_end_hidden: bool = False  # its last token only ended it, and has no text


@dataclass(frozen=True)
class StepSnapshot:
    """One step as an observer sees it, after it was carried out."""

    schedule: SchedulerOutput
    events: tuple[BlockEvent, ...]
    outputs: tuple[TokenOutput, ...]
    finished: tuple[Sequence, ...]


class StepError(RuntimeError):
    """A step failed; `outputs` ends every choice that it took down. What was waiting is untouched."""

    def __init__(self, message: str, outputs: list[TokenOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class Device(Protocol):
    """What the engine needs of a worker."""

    def execute(self, output: SchedulerOutput) -> list[SequenceOutput]: ...


@dataclass
class _Request:
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_strings: dict[int, str]  # special tokens that the user named as stop strings
    num_open: int  # choices not yet finished
    texts: dict[int, OutputText] = field(default_factory=dict)  # by choice


class LLMEngine:
    """Scheduler, worker and text, one step at a time. Not thread-safe: one thread owns it."""

    def __init__(
        self, scheduler: Scheduler, worker: Device, tokenizer: Tokenizer | None, *, vocab_size: int,
        eos_token_ids: SequenceOf[int] = (), default_params: dict[str, Any] | None = None, seed: int = 0,
        on_step: Callable[[StepSnapshot], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self.default_params = default_params or {}  # what the model's generation_config.json sets
        self.observers = [] if on_step is None else [on_step]  # each is shown every step; what they raise ends the step
        self._grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=self.eos_token_ids)
        self._requests: dict[str, _Request] = {}
        self._next_seq_id = 0
        self._random = random.Random(seed)

    @classmethod
    def from_config(cls, config: EngineConfig, *, on_step: Callable[[StepSnapshot], None] | None = None) -> LLMEngine:
        """Load everything that `config` names. Raises ConfigError; checks what it can before it reads weights."""
        path = resolve_model(config.model)
        model_config = load_config(path)
        max_model_len = config.resolve_max_model_len(model_config.max_position_embeddings)
        if max_model_len > model_config.max_position_embeddings:
            logger.warning("max_model_len %d is beyond the %d positions the model was trained for: expect nonsense there",
                           max_model_len, model_config.max_position_embeddings)
        device = choose_device(config.device)
        scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.resolve_token_budget(device.type, max_model_len),
            max_model_len=max_model_len, enable_chunked_prefill=config.enable_chunked_prefill,
            enable_continuous_batching=config.enable_continuous_batching, preemption_mode=config.preemption_mode)
        tokenizer = Tokenizer.from_model(path, chat_template=config.chat_template)
        vocab_size = min(model_config.vocab_size, tokenizer.vocab_size if tokenizer else model_config.vocab_size)
        generation_config = load_generation_config(path)
        eos_token_ids = {*model_config.eos_token_ids, *token_id_tuple(generation_config.get("eos_token_id")),
                         *(tokenizer.eos_token_ids if tokenizer else ())}
        default_params = _default_params(generation_config) if config.generation_config == "auto" else {}
        worker = Worker(config, model_config, path, device=device, vocab_size=vocab_size,
                        max_num_batched_tokens=scheduler_config.max_num_batched_tokens)
        block_manager = BlockManager(worker.num_blocks, config.block_size, num_host_blocks=config.num_host_blocks,
                                     enable_prefix_caching=config.enable_prefix_caching)
        engine = cls(Scheduler(scheduler_config, block_manager), worker, tokenizer, vocab_size=vocab_size,
                     eos_token_ids=sorted(eos_token_ids), default_params=default_params, seed=config.seed, on_step=on_step)
        engine._log_what_it_is(config, worker)
        return engine

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt + output) of one request: the context, or the whole KV cache where that is smaller."""
        return self.scheduler.max_num_tokens

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def block(self, block_id: int) -> Block:
        """A window on one physical block of a real worker."""
        assert isinstance(self.worker, Worker)
        return Block(block_id, self.scheduler.block_manager, self.worker.kv_cache)

    def encode(self, prompt: str | SequenceOf[int], *, add_special_tokens: bool = True) -> list[int]:
        """A prompt as token ids; ids are taken as they are. Raises RequestError for an empty or unknown one."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer, so prompts must be lists of token ids", param="prompt")
            self._check_length(prompt)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: at least 1 token is needed", param="prompt")
        for token_id in token_ids:
            self._check_token_id("prompt", token_id)
        return token_ids

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """The parameters with their grammar compiled, which may take a second. Callable from any thread.

        Raises RequestError for a grammar that cannot be used and for tokens that the vocabulary does not have.
        """
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in (getattr(params, name) or ()):
                self._check_token_id(name, token_id)
        for token_id in params.logit_bias:
            self._check_token_id(f"logit_bias.{token_id}", token_id)
        if params.structured_outputs is None or params.constraint is not None:
            return params
        return params.clone(constraint=self._grammars.compile(params.structured_outputs))

    def add_request(self, request_id: str, prompt: str | SequenceOf[int], params: SamplingParams) -> None:
        """Queue a request. Raises RequestError, and keeps nothing of it, when it cannot be served."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        token_ids = self.encode(prompt)
        params = self.prepare(params)
        self.scheduler.check_fits(len(token_ids))
        room = self.scheduler.max_num_tokens - len(token_ids)
        stop_strings = self._special_stop_strings(params)
        seq = Sequence(
            seq_id=self._next_seq_id,
            request_id=request_id,
            token_ids=token_ids,
            params=params,
            seed=params.seed if params.seed is not None else self._random.getrandbits(64),
            max_num_tokens=len(token_ids) + min(room, params.max_tokens or room),
            stop_ids=frozenset((*(() if params.ignore_eos else self.eos_token_ids), *(params.stop_token_ids or ()),
                                *stop_strings)),
            num_forks=params.n - 1,
            constraint=None if params.constraint is None else params.constraint.fork(),
            bad_words=self._bad_words(params),
        )
        self.scheduler.add(seq)
        self._next_seq_id += params.n
        self._requests[request_id] = _Request(list(token_ids), params, stop_strings, params.n)

    def abort_request(self, request_id: str) -> None:
        """End all choices of a request and take their blocks back; an unknown or finished one is left alone."""
        if self._requests.pop(request_id, None) is not None:
            for seq in [seq for seq in self.scheduler.unfinished() if seq.request_id == request_id]:
                self.scheduler.finish(seq, "abort")

    def step(self) -> list[TokenOutput]:
        """One iteration. StepError when the device failed; the engine has then let go of all that the step touched."""
        try:
            schedule = self.scheduler.schedule()
            results = self.worker.execute(schedule)
            advanced = self.scheduler.update(schedule, results)
        except Exception as error:
            logger.exception("a step failed")
            raise StepError(f"the step failed: {error}", self._abandon_step()) from error
        except BaseException:  # the user's Ctrl-C: nobody waits for the outputs, but nothing may be left half-done
            self._abandon_step()
            raise
        outputs = [self._deliver(seq) for seq in advanced]
        events = self.scheduler.block_manager.take_events()
        if self.observers:
            finished = tuple(seq for seq in advanced if seq.is_finished)
            snapshot = StepSnapshot(schedule, events, tuple(outputs), finished)
            for observe in self.observers:
                observe(snapshot)
        return outputs

    def _deliver(self, seq: Sequence) -> TokenOutput:
        """What the newest token of `seq` adds to its text; ends it when that completes a stop string or its grammar."""
        request = self._requests[seq.request_id]
        has_token = seq.finish_reason != "error"
        is_end_hidden = self._is_hidden(seq)
        is_complete = has_token and self._completes_grammar(seq)
        text, stopped_by = self._read(seq, request, has_token=has_token, hide=is_end_hidden)
        if stopped_by is not None or is_complete:
            self.scheduler.finish(seq, "stop", stopped_by)
        elif seq.finish_reason == "stop":
            stopped_by = request.stop_strings.get(seq.token_ids[-1])
        if seq.is_finished:
            self._close(seq.request_id)
        first = seq.num_output_tokens == 1
        return TokenOutput(
            request_id=seq.request_id,
            index=seq.index,
            text=text,
            token_ids=(seq.token_ids[-1],) if has_token else (),
            logprobs=(seq.logprobs[-1],) if has_token else (),
            finish_reason="stop" if stopped_by is not None or is_complete else seq.finish_reason,
            stop_reason=stopped_by if stopped_by is not None else seq.stop_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=seq.num_output_tokens,
            prompt_logprobs=tuple(seq.prompt_logprobs) if first else (),
            is_end_hidden=is_end_hidden,
        )

    def _read(self, seq: Sequence, request: _Request, *, has_token: bool, hide: bool) -> tuple[str, str | None]:
        """The text that became safe to show, and the stop string that the newest token completed."""
        if self.tokenizer is None:
            return "", None
        stream = request.texts.get(seq.index) or self._open_text(seq, request)
        text = stream.push(seq.token_ids[-1], hide=hide) if has_token else ""
        is_last = seq.is_finished or (seq.constraint is not None and seq.constraint.is_complete)
        if is_last and stream.stopped_by is None:
            text += stream.flush()
        return text, stream.stopped_by

    def _completes_grammar(self, seq: Sequence) -> bool:
        """Move its grammar on by its newest token; whether nothing may follow. Ends it where nothing can be found to."""
        if seq.constraint is None or seq.finish_reason == "stop":
            return False
        try:
            seq.constraint.accept(seq.token_ids[-1])
        except GrammarError as error:
            logger.warning("request %s ends with an error: its grammar: %s", seq.request_id, error)
            self.scheduler.finish(seq, "error")
        return seq.constraint.is_complete

    def _open_text(self, seq: Sequence, request: _Request) -> OutputText:
        assert self.tokenizer is not None
        params = request.params
        stop = tuple(text for text in (params.stop or ()) if text not in request.stop_strings.values())
        stream = request.texts[seq.index] = OutputText(
            self.tokenizer, request.prompt_token_ids, stop=stop, min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output)
        return stream

    def _is_hidden(self, seq: Sequence) -> bool:
        """Whether its newest token ended it and is not to be shown."""
        if seq.finish_reason != "stop" or seq.params.include_stop_str_in_output:
            return False
        return seq.params.skip_special_tokens or seq.token_ids[-1] not in self.eos_token_ids

    def _special_stop_strings(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are one special token: never part of the text, so they have to be matched as tokens."""
        if self.tokenizer is None:
            return {}
        found = {self.tokenizer.special_token_id(text): text for text in (params.stop or ())}
        return {token_id: text for token_id, text in found.items() if token_id is not None}

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as token ids, as it is and, as vLLM does, with a space before it."""
        if params.bad_words and self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so bad_words cannot be understood", param="bad_words")
        texts = [text for word in (params.bad_words or ()) for text in (word, f" {word.lstrip()}")]
        found = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts if self.tokenizer]
        return tuple(ids for ids in dict.fromkeys(found) if ids and max(ids) < self.vocab_size)

    def _close(self, request_id: str) -> None:
        request = self._requests[request_id]
        request.num_open -= 1
        if request.num_open == 0:
            del self._requests[request_id]

    def _abandon_step(self) -> list[TokenOutput]:
        """End all that runs or is swapped out: their K/V may be half-written. What only waits has nothing to lose."""
        outputs = []
        for seq in [*self.scheduler.running, *self.scheduler.swapped]:
            num_choices = 1 + seq.num_forks
            self.scheduler.finish(seq, "error")
            for index in range(seq.index, seq.index + num_choices):
                self._close(seq.request_id)
                outputs.append(TokenOutput(seq.request_id, index, "", (), (), "error", None, seq.num_prompt_tokens,
                                           seq.num_cached_tokens, seq.num_output_tokens))
        self.scheduler.block_manager.forget_prefixes()
        return outputs

    def _check_length(self, text: str) -> None:
        """RequestError for a text that is out of all proportion to the context."""
        max_model_len = self.scheduler.config.max_model_len
        if len(text) > MAX_CHARACTERS_PER_TOKEN * max_model_len:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {len(text)} "
                f"characters, more than {MAX_CHARACTERS_PER_TOKEN} for each of them; please shorten it",
                param="prompt", code="context_length_exceeded")

    def _check_token_id(self, name: str, token_id: Any) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise RequestError(f"{name}: token id {token_id!r:.40} is not in the vocabulary of {self.vocab_size} tokens",
                               param=name)

    def _log_what_it_is(self, config: EngineConfig, worker: Worker) -> None:
        blocks = self.scheduler.block_manager
        logger.info("model %s, dtype %s, device %s", config.model, str(worker.dtype).removeprefix("torch."), worker.device)
        logger.info("%d blocks of %d = %d tokens of KV cache", blocks.num_blocks, blocks.block_size,
                    blocks.num_blocks * blocks.block_size)
        if self.max_model_len < self.scheduler.config.max_model_len:
            logger.warning("the KV cache is smaller than the context of %d tokens: requests are limited to %d tokens",
                           self.scheduler.config.max_model_len, self.max_model_len)
        if self.default_params:
            logger.info("defaults from generation_config.json: %s; a request's own values win", self.default_params)


def _default_params(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults that a model ships. Raises ConfigError for values that no request could have."""
    found = {ours: generation_config[theirs] for theirs, ours in GENERATION_DEFAULTS.items()
             if generation_config.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}; fix it, or ignore it with generation_config='none'") from error
    return found
