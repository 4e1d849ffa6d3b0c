"""The command line: the one place that reads arguments and the environment, writes to the terminal and sets up logging.

What needs torch is imported by the commands that use it, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import difflib
import errno
import importlib
import ipaddress
import itertools
import json
import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from vllm_mini import __version__
from vllm_mini.config import DTYPES, LOAD_FORMATS, ConfigError, EngineConfig
from vllm_mini.sequence import RequestError, SamplingParams

if TYPE_CHECKING:
    from vllm_mini.bench import Answer, Server
    from vllm_mini.engine import LLMEngine
    from vllm_mini.live_server import LiveSettings
    from vllm_mini.tokenizer import Tokenizer

__all__ = ["main"]

logger = logging.getLogger(__name__)

PROG = "vllm-mini"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
HOST_TIMEOUT = 2.0  # seconds that looking up a host name may take
BACKLOG = 2048  # connections that may wait to be accepted
MAX_OPEN_FILES = 65536  # and connections, which are files too
INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
TERMINAL_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}  # what the default model's card advises; the server's are OpenAI's
SAMPLING_OPTIONS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop",
                    "ignore_eos")
ENGINE_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
CHAT_HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class CommandError(Exception):
    """What ends a command with one line on stderr and exit code 1."""


class _Formatter(argparse.HelpFormatter):
    """Shows the default of every option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or "(default" in text or action.default in (None, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 for what went wrong (one line says what), 2 for how it was called."""
    arguments = _with_dashes(sys.argv[1:] if argv is None else argv)
    parser, commands = _build_parser()
    if arguments[:1] == ["demo"]:  # it reads its own arguments
        return importlib.import_module("vllm_mini.demo").main(arguments[1:]) or 0
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(commands[getattr(args, "full_command", args.command)], unknown)
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        with contextlib.suppress(AttributeError):  # whatever stands in for them
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CommandError, ConfigError, RequestError, OSError) as error:
        print(f"{PROG}: error: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


# ---- arguments ----


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Options may be written with underscores, as in Python."""
    tidy = []
    for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
        name, equals, value = argument.partition("=")
        tidy.append(name.replace("_", "-") + equals + value if re.fullmatch(r"--\w[\w-]*", name) else argument)
    return [*tidy, *arguments[len(tidy) :]]


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit 2 with a suggestion."""
    wrong = next((argument for argument in unknown if argument.startswith("-")), unknown[0])
    close = difflib.get_close_matches(wrong.partition("=")[0], re.findall(r"--[\w-]+", parser.format_help()), n=1)
    kind = "option" if wrong.startswith("-") else "argument"
    parser.error(f"unknown {kind} {wrong!r}" + (f"; did you mean {close[0]}?" if close else ""))


def _build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser and those of its commands."""
    parser = argparse.ArgumentParser(
        prog=PROG, formatter_class=_Formatter, allow_abbrev=False,
        description="A small LLM serving engine to learn from and to keep using.",
        epilog=f"'{PROG} COMMAND --help' shows a command's options, which may be written with dashes or underscores.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(run: Callable[[argparse.Namespace], int], name: str, arguments: str, text: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.",
                                        usage=f"{PROG} {name} {arguments}", formatter_class=_Formatter,
                                        allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    serve = add(_serve, "serve", "[MODEL] [options]", "serve a model over OpenAI's HTTP API")
    generate = add(_generate, "generate", "PROMPT [options]", "complete one prompt and show the text as it comes")
    generate.add_argument("prompt", metavar="PROMPT", help="the text to go on from; '-' reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="take the prompt as a chat message (default: off)")
    chat = add(_chat, "chat", "[MODEL] [options]", f"talk with a model; {CHAT_HELP}")
    chat.add_argument("--system", metavar="TEXT", help="a system message (default: the chat template's)")
    for command in (serve, chat):
        command.add_argument("model_argument", metavar="MODEL", nargs="?", help="another way to give --model")
    _add_server_options(serve.add_argument_group("server"))
    _add_access_options(serve.add_argument_group("access"))
    _add_limit_options(serve.add_argument_group("limits"))
    _add_live_options(serve.add_argument_group("live view"))
    _add_engine_options(serve.add_argument_group("engine"))
    for command in (generate, chat):
        _add_sampling_options(command.add_argument_group("sampling"))
    for command in (serve, generate, chat):
        _add_model_options(command.add_argument_group("model"))
    _add_live_commands(add)
    benchmarks = _add_bench_commands(subparsers)
    export = add(_export_hf, "export-hf", "OUT_DIR [options]", "write a model as a Hugging Face folder, for other engines")
    export.add_argument("folder", metavar="OUT_DIR", type=Path, help="a folder that does not exist or is empty")
    _add_model_option(export)
    export.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                        help="type of the weights")
    add(_fetch, "fetch", "", "download the default model and say where it is")
    subparsers.add_parser("demo", help="watch the scheduler and the block tables at work on a tiny model")
    return parser, {**subparsers.choices, **benchmarks}


def _add_live_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    replay = add(_replay, "replay", "FILE [options]", "show a trace that 'serve --trace' or the live page has saved")
    replay.add_argument("trace", metavar="FILE", type=Path, help="the trace")
    replay.add_argument("--perfetto", metavar="OUT", type=Path,
                        help="write it for Perfetto (or chrome://tracing) and do not serve it (default: serve it)")
    _add_address_options(replay)
    top = add(_top, "top", "[URL] [options]", "watch a running server's blocks and queues in the terminal")
    top.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="where it serves")
    top.add_argument("--api-key", type=_not_empty, metavar="KEY", help="its key (default: $VLLM_API_KEY, else none)")
    top.add_argument("--once", action="store_true", help="draw one picture and leave (default: off)")


def _add_bench_commands(commands: Any) -> dict[str, argparse.ArgumentParser]:
    text = "measure a server, or the engine without one, with the options and names of 'vllm bench'"
    bench = commands.add_parser("bench", help=text, formatter_class=_Formatter, allow_abbrev=False,
                                description=f"{text[0].upper()}{text[1:]}.")
    subparsers = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for run, name, text in ((_bench_serve, "serve", "send load to any server with OpenAI's API, and time its answers"),
                            (_bench_engine, "throughput", "time many prompts that are all there at once, without a server"),
                            (_bench_engine, "latency", "time one batch from prompts to last tokens, without a server")):
        command = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.",
                                        formatter_class=_Formatter, allow_abbrev=False)
        command.set_defaults(run=run, full_command=f"bench {name}")
    found = {f"bench {name}": command for name, command in subparsers.choices.items()}
    _add_bench_serve_options(found["bench serve"])
    latency, throughput = found["bench latency"], found["bench throughput"]
    throughput.add_argument("--num-prompts", type=_count, default=1000, metavar="N", help="prompts")
    latency.add_argument("--batch-size", type=_count, default=8, metavar="N", help="prompts at once")
    latency.add_argument("--num-iters-warmup", type=_number, default=10, metavar="N", help="runs that are not counted")
    latency.add_argument("--num-iters", type=_count, default=30, metavar="N", help="runs that are")
    for command, input_len in ((throughput, 1024), (latency, 32)):
        command.add_argument("--input-len", "--random-input-len", type=_count, default=input_len, metavar="TOKENS",
                             help="length of each prompt")
        command.add_argument("--output-len", "--random-output-len", type=_count, default=128, metavar="TOKENS",
                             help="length of each answer")
        command.add_argument("--output-json", type=Path, metavar="FILE", help="write the result there (default: nowhere)")
        _add_engine_options(command.add_argument_group("engine"))
        _add_model_options(command.add_argument_group("model"))
    latency.set_defaults(enable_prefix_caching=False)  # as in vLLM: each run has the same prompts
    return found


def _add_bench_serve_options(command: argparse.ArgumentParser) -> None:
    where = command.add_argument_group("server")
    where.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="where it serves")
    where.add_argument("--backend", choices=("openai", "openai-chat", "vllm"), default="openai",
                       help="openai-chat: another way to say --endpoint /v1/chat/completions")
    where.add_argument("--endpoint", metavar="PATH", help="path of the requests (default: /v1/completions)")
    where.add_argument("--model", help="name of the model there (default: the first that it lists)")
    where.add_argument("--tokenizer", metavar="MODEL", help="to make prompts with: a folder, a .gguf file or 'dummy' "
                       f"(default: the model if it is one, else that of {DEFAULT_MODEL_NAME})")
    where.add_argument("--api-key", type=_not_empty, metavar="KEY",
                       help="its key (default: $OPENAI_API_KEY, else $VLLM_API_KEY, else none)")
    load = command.add_argument_group("load")
    load.add_argument("--dataset-name", choices=("random",), default="random", help="what to send")
    load.add_argument("--num-prompts", type=_count, default=1000, metavar="N", help="requests")
    load.add_argument("--request-rate", type=_positive, default=float("inf"), metavar="X",
                      help="requests a second; inf: all at once")
    load.add_argument("--burstiness", type=_positive, default=1.0, metavar="X",
                      help="1: requests come as a Poisson process; less: in bursts; more: evenly")
    load.add_argument("--max-concurrency", type=_count, metavar="N", help="requests at a time (default: no limit)")
    load.add_argument("--num-warmups", type=_number, default=0, metavar="N", help="requests before, not counted")
    for name, default, text in (("input", 1024, "tokens of a prompt"), ("output", 128, "tokens to ask for")):
        load.add_argument(f"--random-{name}-len", f"--{name}-len", type=_count, default=default, metavar="TOKENS", help=text)
    load.add_argument("--random-prefix-len", type=_number, default=0, metavar="TOKENS",
                      help="tokens before them that all prompts share")
    load.add_argument("--random-range-ratio", type=_share, default=0.0, metavar="SHARE",
                      help="lengths are drawn from so much below to so much above")
    load.add_argument("--ignore-eos", action="store_true", help="answers go on to their full length (default: off)")
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of the requests")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    result = command.add_argument_group("result")
    result.add_argument("--percentile-metrics", type=_metrics, default="ttft,tpot,itl", metavar="NAMES",
                        help="what to print, of ttft, tpot, itl and e2el")
    result.add_argument("--metric-percentiles", type=_percentiles, default="99", metavar="NUMBERS",
                        help="percentiles, such as 50,99")
    result.add_argument("--goodput", type=_goodput, nargs="+", metavar="NAME:MS",
                        help="limits that a request has to keep to be good, such as ttft:500 tpot:50 (default: none)")
    result.add_argument("--save-result", action="store_true", help="write a JSON file (default: off)")
    result.add_argument("--save-detailed", action="store_true", help="with every request's times (default: off)")
    result.add_argument("--result-dir", type=Path, default=Path("."), metavar="FOLDER", help="folder for the file")
    result.add_argument("--result-filename", metavar="NAME", help="its name (default: made of rate, model and time)")


def _add_address_options(group: argparse._ActionsContainer) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    group.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 for any free one")


def _add_live_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--live", action=argparse.BooleanOptionalAction, default=None,
                       help="show blocks and queues at / (default: on where only this machine can connect)")
    group.add_argument("--live-hide-text", action="store_true",
                       help="keep the text of prompts and answers out of the live view and the trace (default: off)")
    group.add_argument("--trace", metavar="FILE", type=Path,
                       help="write every step there, for 'replay' (default: no trace)")


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    _add_address_options(group)
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="one or more names for clients to use "
                       "(default: the model as given; of a path its last part)")
    group.add_argument("--drain-timeout", type=_seconds, default=5.0, metavar="SECONDS",
                       help="time that running requests get to finish on SIGTERM or Ctrl-C")
    group.add_argument("--uvicorn-log-level", default="info", choices=("critical", "error", "warning", "info", "debug"),
                       help="how much the HTTP server logs")


def _add_access_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", type=_not_empty, action="append", metavar="KEY",
                       help="what clients must send; repeatable (default: $VLLM_API_KEY, else nothing)")
    group.add_argument("--api-key-file", metavar="FILE", help="a file of keys, one a line (default: none)")
    group.add_argument("--allowed-origins", nargs="+", metavar="ORIGIN", help="whose pages may use the server in a browser, "
                       "such as https://example.org, or '*' (default: pages of this machine)")


def _add_limit_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-waiting", type=_count, default=2048, metavar="N",
                       help="requests, each of n choices one, that may wait for their turn; more are refused with 429")
    group.add_argument("--request-timeout", type=_time_limit, metavar="SECONDS",
                       help="time for one request, after which it ends with an error: status 504, or an event in a stream "
                       "that has begun (default: no limit)")


def _add_model_option(group: argparse._ActionsContainer) -> None:
    group.add_argument("--model", help="a folder, a .gguf file, a Hugging Face name or 'dummy' "
                       f"(default: {DEFAULT_MODEL_NAME}, fetched on first use)")


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    _add_model_option(group)
    _add_setting(group, "dtype", choices=DTYPES, help="type of weights and KV cache")
    _add_setting(group, "device", help="auto, cpu or cuda")
    _add_setting(group, "load_format", choices=LOAD_FORMATS, help="how to read the weights; dummy: random ones")
    _add_setting(group, "max_model_len", type=int, metavar="TOKENS",
                 help="context length (default: what the model was trained for)")
    _add_setting(group, "allow_long_max_model_len", action="store_true", help="accept a longer context (default: off)")
    _add_setting(group, "chat_template", metavar="FILE", help="a chat template to use (default: the model's own)")
    _add_setting(group, "generation_config", choices=("auto", "none"),
                 help="auto: the model's generation_config.json gives sampling defaults; none: it is ignored")
    _add_setting(group, "num_threads", type=int, metavar="N", help="CPU threads (default: those this process may use)")
    _add_setting(group, "seed", type=int, metavar="N", help="of random weights and of requests that bring none")


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    _add_setting(group, "max_num_seqs", type=int, metavar="N", help="sequences that may run at once")
    _add_setting(group, "max_num_batched_tokens", type=int, metavar="TOKENS",
                 help="tokens that one step may compute (default: 512 on a CPU, 2048 on a GPU)")
    _add_setting(group, "block_size", type=int, metavar="TOKENS", help="tokens in a KV block")
    _add_setting(group, "kv_cache_memory", type=_memory, metavar="SIZE",
                 help="KV cache on a CPU, such as 512MB or 2GiB (default: a quarter of free memory, 4 GiB at most)")
    _add_setting(group, "gpu_memory_utilization", type=float, metavar="SHARE", help="share of a GPU's memory to use")
    group.add_argument("--num-kv-blocks", "--num-gpu-blocks-override", type=int, metavar="N",
                       help="KV blocks (default: as many as the memory above holds)")
    _add_setting(group, "preemption_mode", choices=("recompute", "swap"),
                 help="what becomes of the KV of a sequence that has to make way")
    _add_setting(group, "num_host_blocks", type=int, metavar="N", help="KV blocks in host memory, to swap to")
    for name in ("prefix_caching", "chunked_prefill"):
        group.add_argument(f"--enable-{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=True,
                           help=f"{name.replace('_', ' ')} (default: on)")


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    own = "(default: the model's own, else {})"
    defaults = {**TERMINAL_DEFAULTS, "top_k": "all", "min_p": 0.0, "repetition_penalty": 1.0}
    for name, default in defaults.items():
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{name} {own.format(default)}", metavar="X")
    group.add_argument("--max-tokens", type=int, metavar="N",
                       help="length of the answer (default: until the model ends it or the context is full)")
    group.add_argument("--min-tokens", type=int, metavar="N", help="not to end before so many (default: 0)")
    group.add_argument("--stop", action="append", metavar="TEXT",
                       help="end before this text; repeatable (default: none)")
    group.add_argument("--ignore-eos", action="store_true", default=None,
                       help="go on where the model would end (default: off)")


def _add_setting(group: argparse._ArgumentGroup, name: str, **kwargs: Any) -> None:
    """An option for a field of EngineConfig, with the field's default."""
    group.add_argument(f"--{name.replace('_', '-')}", default=ENGINE_DEFAULTS[name], **kwargs)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def _time_limit(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError("it must be more than 0 seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _number(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up to, but not, 1")


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= {"ttft", "tpot", "itl", "e2el"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ttft, tpot, itl and e2el")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        values = tuple(map(float, text.split(",")))
        if all(0 <= value <= 100 for value in values):
            return values
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentiles such as 50,99")


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft, tpot or e2el with its milliseconds, such as ttft:500")
    return name, _positive(limit)


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _memory(text: str) -> int:
    """Bytes: 512MB is 512 * 1000**2, 2GiB is 2 * 1024**3."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 536870912, 512MB or 2GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** UNITS[unit.lower()])


# ---- models ----


def _choose_model(args: argparse.Namespace) -> str | None:
    """The model that was asked for, in one style or the other; None for the default."""
    given = {model for model in (getattr(args, "model_argument", None), args.model) if model is not None}
    if len(given) > 1:
        _build_parser()[1][args.command].error(
            f"two models are given, {args.model_argument!r} and --model {args.model!r}: give one")
    return given.pop() if given else None


def _default_model() -> str:
    """The default model's file, fetched if need be."""
    from vllm_mini.fetch import FetchError, cached_default_model, fetch_default_model

    if cached_default_model() is None:
        print(f"{DEFAULT_MODEL_NAME} is not here yet: fetching it, once (93 MB)", file=sys.stderr)
    try:
        return str(fetch_default_model())
    except FetchError as error:
        raise CommandError(str(error)) from error


def _engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    settings = {name: value for name, value in vars(args).items() if name in ENGINE_DEFAULTS}
    if args.chat_template is not None:
        try:
            settings["chat_template"] = Path(args.chat_template).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CommandError(f"{args.chat_template}: not a text file in UTF-8") from error
    return EngineConfig(**{**settings, "model": model})


def _load_engine(config: EngineConfig) -> LLMEngine:
    """Import torch and read the weights. Ctrl-C ends the process, even where libraries would swallow the exception."""
    earlier = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        from vllm_mini.engine import LLMEngine

        return LLMEngine.from_config(config)
    finally:
        signal.signal(signal.SIGINT, earlier)


# ---- serve ----


def _serve(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    model = _choose_model(args)
    api_key, allowed_origins = _api_keys(args), _origins(args.allowed_origins)
    _allow_many_connections()
    # Before torch is imported. By default OpenMP's threads spin while they wait for each other, and where there are no more
    # cores than threads, any other work (the HTTP loop, a client) then costs whole time slices: on 2 cores decoding swung
    # between 2 and 30 tokens/s, and with passive waiting it stays at 20.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _listen(args.host, args.port) as listener:
        path = _default_model() if model is None else model
        engine = _load_engine(_engine_config(args, path))

        import torch

        from vllm_mini.api_server import run_server

        logger.info("%d CPU threads", torch.get_num_threads())
        live = _live_settings(args, listener, has_key=api_key is not None)
        names = args.served_model_name or [DEFAULT_MODEL_NAME if model is None else _served_name(model)]
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        page = f"; watch it at {url.removesuffix('v1')}" if live.page else ""
        return asyncio.run(run_server(
            engine, listener, drain_timeout=args.drain_timeout, log_level=args.uvicorn_log_level,
            on_ready=lambda: logger.info("model %s, serving at %s%s", ", ".join(names), url, page),
            served_model_names=names, api_key=api_key, model_path=path, live=live,
            max_waiting=args.max_waiting, request_timeout=args.request_timeout, allowed_origins=allowed_origins))


def _api_keys(args: argparse.Namespace) -> list[str] | None:
    """The keys that clients may send; None: they need none. Raises CommandError or OSError for a bad file of keys."""
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CommandError(f"{args.api_key_file}: not a text file in UTF-8") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise CommandError(f"{args.api_key_file}: it holds no key")
        keys += found
    from_environment = os.environ.get("VLLM_API_KEY")
    return keys or ([from_environment] if from_environment else None)


def _origins(given: list[str] | None) -> list[str] | None:
    """Origins one by one, or as vLLM takes them: a list in JSON."""
    if given is None or len(given) != 1 or not given[0].startswith("["):
        return given
    with contextlib.suppress(ValueError):
        origins = json.loads(given[0])
        if all(isinstance(origin, str) for origin in origins):
            return origins
    raise CommandError(f"--allowed-origins {given[0]}: not a list of strings in JSON")


def _allow_many_connections() -> None:
    """Raise the limit on open files, which is often 1024, as far as this process may."""
    try:
        resource = importlib.import_module("resource")  # not on Windows, which has no such limit
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ImportError, OSError, ValueError) as error:
        logger.warning("the limit on open files, and so on connections, stays as it is: %s", error)


def _live_settings(args: argparse.Namespace, listener: socket.socket, *, has_key: bool) -> LiveSettings:
    from vllm_mini.live_server import LiveSettings

    is_local = _is_loopback(listener)
    live = LiveSettings(page=is_local if args.live is None else args.live, hide_text=args.live_hide_text,
                        may_set_pace=is_local or has_key, is_local=is_local, trace=args.trace)
    if live.page and not is_local and not has_key and not live.hide_text:
        logger.warning("the live page shows all prompts to whoever can reach this server: --no-live, --live-hide-text or "
                       "--api-key would prevent it")
    return live


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _served_name(model: str) -> str:
    """A hub name as it is; of a path the last part."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is done. Raises CommandError."""
    try:
        family, kind, protocol, _, address = _look_up(host, port)
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would let two servers share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        reasons = {errno.EADDRINUSE: "the port is in use", errno.EACCES: "only an administrator may use this port"}
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise CommandError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def _look_up(host: str, port: int) -> Any:
    """The first address of a host. OSError for an unknown one, soon: a resolver without a network can take long."""
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0])
        except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
            answer.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        found = answer.get(timeout=HOST_TIMEOUT)
    except queue.Empty:
        raise OSError("the host name was not found in time") from None
    if isinstance(found, UnicodeError):
        raise OSError("this is not a host name") from found
    if isinstance(found, OSError):
        raise found
    return found


# ---- generate and chat ----


def _generate(args: argparse.Namespace) -> int:
    _log_warnings_only()
    given = _given_params(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    engine = _load_engine(_engine_config(args, _choose_model(args) or _default_model()))
    messages = [{"role": "user", "content": prompt}]
    token_ids = _encode_chat(engine, messages) if args.chat else engine.encode(prompt)
    answer = _Answer(engine, token_ids, _params(engine, given))
    answer.show(sys.stdout)
    print(flush=True)
    return INTERRUPTED if answer.was_interrupted else 0


def _chat(args: argparse.Namespace) -> int:
    _log_warnings_only()
    given = _given_params(args)
    engine = _load_engine(_engine_config(args, _choose_model(args) or _default_model()))
    conversation = _Conversation(engine, _params(engine, given), args.system)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() arrow keys and a history
        print(CHAT_HELP, file=sys.stderr)
    conversation.run()
    return 0


def _log_warnings_only() -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{PROG}: %(message)s", stream=sys.stderr)


def _given_params(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given. RequestError for a bad one, before the model is loaded."""
    given = {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name) is not None}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _params(engine: LLMEngine, given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **TERMINAL_DEFAULTS, **engine.default_params, **given})


def _encode_chat(engine: LLMEngine, messages: list[dict[str, str]]) -> list[int]:
    if engine.tokenizer is None:
        raise CommandError("this model has no tokenizer, so it cannot chat")
    return engine.tokenizer.encode_chat(messages)


class _Answer:
    """One answer, shown as it comes. Ctrl-C ends it between two steps, so that the engine stays whole."""

    REQUEST_ID = "terminal"

    def __init__(self, engine: LLMEngine, token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError when it cannot be served."""
        self.text = ""
        self.finish_reason: str | None = None
        self.was_interrupted = False
        self._engine = engine
        engine.add_request(self.REQUEST_ID, token_ids, params)

    def show(self, out: TextIO) -> None:
        """Run it to its end. Raises CommandError when the engine fails."""
        from vllm_mini.engine import StepError

        earlier = signal.signal(signal.SIGINT, self._interrupt)
        try:
            while self._engine.has_unfinished() and not self.was_interrupted:
                for output in self._engine.step():
                    self.text += output.text
                    self.finish_reason = output.finish_reason
                    out.write(output.text.translate(CONTROL_CHARACTERS) if out.isatty() else output.text)
                    out.flush()
        except StepError as error:
            raise CommandError(str(error)) from error
        finally:
            self._engine.abort_request(self.REQUEST_ID)
            signal.signal(signal.SIGINT, earlier)
        if self.finish_reason == "error":
            raise CommandError("the model computed something that is not a number")

    def _interrupt(self, *_: Any) -> None:
        if self.was_interrupted:  # and the step did not end
            raise KeyboardInterrupt
        self.was_interrupted = True


class _Conversation:
    """A chat on the terminal, or with lines from a pipe."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        """Raises RequestError for a model that cannot chat."""
        self._engine = engine
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._num_interrupts = 0  # since the last line
        _encode_chat(engine, [*self._system, {"role": "user", "content": "Hi"}])

    def run(self) -> None:
        """Read and answer until the user leaves."""
        while (line := self._read()) is not None and line != "/exit":
            if line == "/reset":
                self._messages = list(self._system)
            elif line.startswith("/"):
                print(f"{line.split()[0]} is not a command; {CHAT_HELP}", file=sys.stderr)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line; None on Ctrl-D and on the second Ctrl-C in a row, one that stopped an answer included."""
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._num_interrupts += 1
                if self._num_interrupts > 1 or not is_terminal:
                    return None
                print("\nCtrl-C again leaves", file=sys.stderr)
            else:
                self._num_interrupts = 0
                return line

    def _answer(self, line: str) -> None:
        """Answer one message. A stopped answer stays in the conversation, a refused message does not."""
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            answer = _Answer(self._engine, _encode_chat(self._engine, messages), self._params)
        except RequestError as error:
            print(f"{error}. /reset begins a new conversation", file=sys.stderr)
            return
        answer.show(sys.stdout)
        print(flush=True)
        self._num_interrupts = int(answer.was_interrupted)
        if answer.finish_reason == "length":
            print("(cut off: the length limit was reached)", file=sys.stderr)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


# ---- the live view from elsewhere ----


def _replay(args: argparse.Namespace) -> int:
    if args.perfetto is not None:
        from vllm_mini.trace import read_trace, to_perfetto

        args.perfetto.write_text(json.dumps(to_perfetto(read_trace(args.trace))), encoding="utf-8")
        return 0
    with _listen(args.host, args.port) as listener:
        import uvicorn

        from vllm_mini.replay import build_replay_app

        app = build_replay_app(args.trace, is_local=_is_loopback(listener))
        host, port = listener.getsockname()[:2]
        print(f"{args.trace} at http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends it)", file=sys.stderr)
        uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)).run(sockets=[listener])
    return 0


def _top(args: argparse.Namespace) -> int:
    from vllm_mini.top import run_top

    run_top(args.url, args.api_key or os.environ.get("VLLM_API_KEY") or None, once=args.once)
    return 0


# ---- bench ----


def _bench_serve(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from vllm_mini.bench import Load, PromptMaker, Server, bench_serve

    endpoint = args.endpoint or ("/v1/chat/completions" if args.backend == "openai-chat" else "/v1/completions")
    key = args.api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or None
    fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {})}
    server = Server(args.base_url, endpoint, args.model or "", key, fields=fields)
    load = Load(request_rate=args.request_rate, burstiness=args.burstiness, max_concurrency=args.max_concurrency,
                num_warmups=args.num_warmups, seed=args.seed)
    if args.save_result and not args.result_dir.is_dir():
        raise CommandError(f"--result-dir {args.result_dir}: there is no such folder")
    prompts = PromptMaker(_bench_tokenizer(args), args.seed).prompts(
        1 + args.num_warmups + args.num_prompts, args.random_input_len, args.random_output_len,
        range_ratio=args.random_range_ratio, prefix_len=args.random_prefix_len)
    _allow_many_connections()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task_id = bar.add_task("Requests", total=args.num_prompts)
        server, answers, duration = asyncio.run(
            bench_serve(server, prompts, load, lambda _: bar.update(task_id, advance=1)))
    return _show_bench_serve(args, server, answers, duration)


def _bench_tokenizer(args: argparse.Namespace) -> Tokenizer:
    from vllm_mini.tokenizer import Tokenizer

    path = args.tokenizer or (args.model if args.model and (args.model == "dummy" or Path(args.model).exists()) else None)
    tokenizer = Tokenizer.from_model(path or _default_model())
    if tokenizer is None:
        raise CommandError(f"{path} has no tokenizer to make prompts with")
    if path is None and args.model not in (None, DEFAULT_MODEL_NAME):
        print(f"{PROG}: prompts are made with the tokenizer of {DEFAULT_MODEL_NAME}; --tokenizer names another",
              file=sys.stderr)
    return tokenizer


def _show_bench_serve(args: argparse.Namespace, server: Server, answers: list[Answer], duration: float) -> int:
    from vllm_mini.bench import summarize

    percentiles = args.metric_percentiles
    result = summarize(answers, duration, percentiles=percentiles, goodput=dict(args.goodput or ()))
    rows = {"Successful requests": "completed", "Failed requests": "failed", "Benchmark duration (s)": "duration",
            "Total input tokens": "total_input_tokens", "Total generated tokens": "total_output_tokens",
            "Request throughput (req/s)": "request_throughput", "Request goodput (req/s)": "request_goodput",
            "Output token throughput (tok/s)": "output_throughput",
            "Total token throughput (tok/s)": "total_token_throughput"}
    for name in args.percentile_metrics:
        kinds = {"Mean": "mean", "Median": "median", "Std": "std", **{f"P{value:g}": f"p{value:g}" for value in percentiles}}
        rows |= {f"{label} {name.upper()} (ms)": f"{key}_{name}_ms" for label, key in kinds.items()}
    print("Serving benchmark result".center(50, "="))
    for label, key in rows.items():
        if key in result:
            value = result[key]
            print(f"{label + ':':<40}{value:<10.2f}" if isinstance(value, float) else f"{label + ':':<40}{value:<10}")
    print("=" * 50)
    if result["counted_by"] == "chunks":
        print(f"{PROG}: the server tells no usage: tokens are counted by chunks of the stream, and may be more",
              file=sys.stderr)
    if not server.sends_ids and not server.is_chat:
        print(f"{PROG}: the server takes no token ids: prompts were sent as text", file=sys.stderr)
    if args.save_result:
        print(f"Saved to {_save_bench_serve(args, server, answers, result)}")
    for error, count in result["errors"].items():
        print(f"{PROG}: error: {count} of {len(answers)} requests failed: {error}", file=sys.stderr)
    return 1 if result["failed"] else 0


def _save_bench_serve(args: argparse.Namespace, server: Server, answers: list[Answer], result: dict[str, Any]) -> Path:
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    date = time.strftime("%Y%m%d-%H%M%S")
    saved = {"date": date, "backend": args.backend, "model_id": server.model, "endpoint": server.endpoint,
             "num_prompts": args.num_prompts, "request_rate": rate, "burstiness": args.burstiness,
             "max_concurrency": args.max_concurrency, "random_input_len": args.random_input_len,
             "random_output_len": args.random_output_len, "random_prefix_len": args.random_prefix_len,
             "random_range_ratio": args.random_range_ratio, "seed": args.seed, **result}
    if args.save_detailed:
        saved |= {"input_lens": [one.prompt_len for one in answers], "output_lens": [one.output_len for one in answers],
                  "ttfts": [one.ttft for one in answers], "itls": [one.itls for one in answers],
                  "e2els": [one.latency for one in answers], "request_errors": [one.error for one in answers]}
    model = re.sub(r"[^\w.-]", "_", server.model)
    path: Path = args.result_dir / (args.result_filename or f"openai-{rate}qps-{model}-{date}.json")
    path.write_text(json.dumps(saved), encoding="utf-8")
    return path


def _bench_engine(args: argparse.Namespace) -> int:
    """`bench throughput` and `bench latency`."""
    _log_warnings_only()
    config = _engine_config(args, _choose_model(args) or _default_model())

    from vllm_mini.bench import PromptMaker, bench_latency, bench_throughput
    from vllm_mini.llm import LLM

    llm = LLM(**dataclasses.asdict(config))
    if llm.engine.tokenizer is None:
        raise CommandError("this model has no tokenizer to make prompts with")
    is_latency = args.benchmark == "latency"
    prompts = PromptMaker(llm.engine.tokenizer, args.seed).prompts(
        args.batch_size if is_latency else args.num_prompts, args.input_len, args.output_len)
    llm.engine.scheduler.check_fits(args.input_len, args.output_len)
    if is_latency:
        result = bench_latency(llm, prompts, num_warmups=args.num_iters_warmup, num_iters=args.num_iters)
        print(f"Avg latency: {result['avg_latency']:.4f} seconds")
        for percent, seconds in result["percentiles"].items():
            print(f"{percent}% percentile latency: {seconds:.4f} seconds")
    else:
        result = bench_throughput(llm, prompts, progress=sys.stdout.isatty())
        print(f"Throughput: {result['requests_per_second']:.2f} requests/s, "
              f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s")
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


# ---- the rest ----


def _export_hf(args: argparse.Namespace) -> int:
    from vllm_mini.export import export_hf

    print(export_hf(_choose_model(args) or _default_model(), args.folder.expanduser().absolute(), dtype=args.dtype))
    return 0


def _fetch(args: argparse.Namespace) -> int:
    print(_default_model())
    return 0
