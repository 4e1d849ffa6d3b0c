"""The engine for scripts: a list of prompts in, a list of answers out, in the same order. Does not know HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_mini.config import EngineConfig
from vllm_mini.engine import LLMEngine, StepSnapshot, TokenOutput
from vllm_mini.sequence import RequestError, SamplingParams, TokenLogprobs

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

Prompt = str | SequenceOf[int]


@dataclass
class CompletionOutput:
    """One choice of an answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None  # one for each token, where asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The answer to one prompt."""

    prompt: str | None  # None when ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens whose K/V was found in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, output: TokenOutput) -> None:
        """Take in what one step added."""
        choice = self.outputs[output.index]
        choice.text += output.text
        choice.token_ids += output.token_ids
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        if choice.logprobs is not None:
            choice.logprobs += output.logprobs
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self.prompt_logprobs = list(output.prompt_logprobs)


class LLM:
    """`LLM(model).generate(prompts, params)`. Keyword settings are those of EngineConfig; an unknown one is a TypeError."""

    def __init__(
        self, model: str, *, on_step: Callable[[StepSnapshot], None] | None = None, **settings: Any
    ) -> None:
        self.engine = LLMEngine.from_config(EngineConfig(model=model, **settings), on_step=on_step)
        self._request_ids = itertools.count()

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None, *, progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt (text or token ids) or many; one set of parameters for all, or one for each.

        Raises RequestError for the first prompt that cannot be served, before anything runs. Whatever ends it early,
        an error or Ctrl-C, leaves no request behind.
        """
        batch = _as_batch(prompts)
        params = self._params_for(sampling_params, len(batch))
        request_ids = [f"llm-{next(self._request_ids)}" for _ in batch]
        results: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, one in zip(request_ids, batch, params):
                results[request_id] = self._submit(request_id, prompt, one)
            self._run(results, sum(one.n for one in params), progress=progress)
        finally:
            for request_id in request_ids:
                self.engine.abort_request(request_id)  # does nothing to those that are done
        return list(results.values())

    def chat(
        self, messages: SequenceOf[Any], sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *, progress: bool = True, **template_settings: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of conversations, through the chat template."""
        if self.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it cannot chat", param="messages")
        conversations = [messages] if not messages or isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts = [tokenizer.encode_chat(list(conversation), **template_settings) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def _submit(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        token_ids = self.engine.encode(prompt)
        self.engine.add_request(request_id, token_ids, params)
        choices = [CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)]
        return RequestOutput(prompt if isinstance(prompt, str) else None, token_ids, choices)

    def _run(self, results: dict[str, RequestOutput], num_choices: int, *, progress: bool) -> None:
        with _progress_bar(num_choices, enabled=progress) as report:
            while self.engine.has_unfinished():
                outputs = self.engine.step()
                for output in outputs:
                    results[output.request_id].add(output)
                report(outputs)

    def _params_for(
        self, params: SamplingParams | SequenceOf[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.engine.default_params)
        if isinstance(params, SamplingParams):
            return [self.engine.prepare(params)] * num_prompts
        if len(params) != num_prompts:
            raise RequestError(f"got {len(params)} sampling_params for {num_prompts} prompts", param="sampling_params")
        return list(params)


def _as_batch(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one text, or the token ids of one
    return list(prompts)  # type: ignore[arg-type]


@contextmanager
def _progress_bar(num_choices: int, *, enabled: bool) -> Iterator[Callable[[list[TokenOutput]], None]]:
    """A bar on the terminal: answers done, prompt and output tokens per second."""
    columns = (TextColumn("Answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("prompt {task.fields[prompt]:.0f} tok/s, output {task.fields[output]:.0f} tok/s"))
    num_prompt_tokens = num_output_tokens = 0
    with Progress(*columns, disable=not enabled or not num_choices) as bar:
        task_id = bar.add_task("", total=num_choices, prompt=0.0, output=0.0)

        def report(outputs: list[TokenOutput]) -> None:
            nonlocal num_prompt_tokens, num_output_tokens
            for output in outputs:
                num_output_tokens += len(output.token_ids)
                if output.num_output_tokens == 1 and output.index == 0:
                    num_prompt_tokens += output.num_prompt_tokens
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task_id, advance=sum(output.finish_reason is not None for output in outputs),
                       prompt=num_prompt_tokens / elapsed, output=num_output_tokens / elapsed)

        yield report
