"""The command line: in this process where that is enough, as a real one where signals, ports or time are the point."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
from checkpoints import write_byte_tokenizer, write_checkpoint
from server import parse_events, receive_until, serve_process, wait_until

from vllm_mini import cli

CHAT = "/v1/chat/completions"
BODY = {"model": "dummy", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "seed": 1,
        "ignore_eos": True}


def run(*args, stdin="", **kwargs):
    """A command as a process: (exit code, stdout, stderr, seconds)."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "vllm_mini", *args], input=stdin, capture_output=True, text=True,
                          timeout=60, **kwargs)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def usage_error(capsys, *args):
    """What is said about a command that exits with 2."""
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    return capsys.readouterr().err


def one_line_error(capsys, *args):
    """The one line on stderr of a command that exits with 1."""
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("vllm-mini: error: ")
    return err


# ---- help and mistakes ----


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["generate", "--help"], ["chat", "--help"],
                                  ["--version"], []])
def test_CL_05_help_is_quick_and_needs_no_torch(args, tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(30)")
    code, out, err, seconds = run(*args, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert code == (0 if args else 2) and (out or err).startswith(("usage:", "vllm-mini "))
    assert seconds < 3  # under 1 on an idle machine


def test_CL_05_every_option_shows_its_default():
    for name, command in cli._build_parser()[1].items():
        for action in command._actions:
            if action.option_strings and action.dest != "help" and name != "demo":
                assert "default" in cli._Formatter("x")._get_help_string(action), f"{name} {action.option_strings}"


def test_CL_05_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    version = capsys.readouterr().out.split()[-1]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not installed, only on the path
        assert version == importlib.metadata.version("vllm-mini-engine")


@pytest.mark.parametrize(("args", "suggestion"), [
    (["serve", "dummy", "--max-model-length", "5"], "--max-model-len"), (["serve", "--modle", "dummy"], "--model"),
    (["serve", "--max_num_seq=5"], "--max-num-seqs"), (["serve", "--gpu-memory-utilisation", "1"],
                                                       "--gpu-memory-utilization"),
    (["generate", "x", "--temprature", "1"], "--temperature"), (["generate", "x", "--temp", "1"], ""),
    (["serv"], "serve"),
    (["serve", "dummy", "extra"], "extra"), (["chat", "--port", "1"], "--port"),
])
def test_CL_02_a_typing_error_exits_2_with_a_suggestion(capsys, args, suggestion):
    assert suggestion in usage_error(capsys, *args)


@pytest.mark.parametrize("args", [
    ["--port", "99999"], ["--port", "x"], ["--port", "-1"], ["--kv-cache-memory", "lots"], ["--kv-cache-memory", "-5"],
    ["--api-key", ""], ["--max-waiting", "0"], ["--max-waiting", "x"], ["--request-timeout", "0"],
    ["--request-timeout", "soon"],
    ["--dtype", "int3"], ["--drain-timeout", "-1"], ["--drain-timeout", "nan"], ["--max-num-seqs", "many"],
])
def test_a_value_that_cannot_be_exits_2_and_names_the_option(capsys, args):
    assert args[0] in usage_error(capsys, "serve", "dummy", *args)


@pytest.mark.parametrize(("text", "num_bytes"), [
    ("512MB", 512 * 10**6), ("2GiB", 2 * 2**30), ("1000", 1000), ("1.5G", 1_500_000_000), ("3kib", 3072),
    ("1 TB", 10**12), ("7b", 7),
])
def test_sizes_of_memory_are_read_in_both_systems(text, num_bytes):
    assert cli._memory(text) == num_bytes


def test_options_may_be_written_with_underscores_but_values_stay(capsys):
    assert cli._with_dashes(["serve", "--max_model_len=6_4", "--chat-template", "a_b", "--", "--x_y"]) == [
        "serve", "--max-model-len=6_4", "--chat-template", "a_b", "--", "--x_y"]


def test_CL_02_two_different_models_are_a_mistake_and_one_given_twice_is_not(capsys):
    assert "two models" in usage_error(capsys, "serve", "dummy", "--model", "other")
    args = cli._build_parser()[0].parse_args(["serve", "dummy", "--model", "dummy"])
    assert cli._choose_model(args) == "dummy"
    assert cli._choose_model(cli._build_parser()[0].parse_args(["serve"])) is None


def test_CL_02_the_options_reach_the_engines_settings():
    args = cli._build_parser()[0].parse_args([
        "serve", "--model", "dummy", "--max-model-len", "64", "--num-gpu-blocks-override", "9",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill", "--preemption-mode", "swap", "--num-host-blocks", "3", "--kv-cache-memory",
        "1MiB"])
    config = cli._engine_config(args, "dummy")
    assert (config.model, config.max_model_len, config.num_kv_blocks, config.num_host_blocks) == ("dummy", 64, 9, 3)
    assert not config.enable_prefix_caching and not config.enable_chunked_prefill
    assert config.preemption_mode == "swap" and config.kv_cache_memory == 2**20


@pytest.mark.parametrize(("args", "words"), [
    (["serve", "/no/such"], "does not exist"), (["serve", "dummy", "--max-model-len", "99999"], "2048"),
    (["serve", "dummy", "--block-size", "0"], "block_size"), (["serve", "dummy", "--chat-template", "/no/such"],
                                                              "/no/such"),
    (["generate", "x", "--model", "dummy", "--temperature", "9"], "temperature"),
    (["chat", "dummy", "--max-tokens", "0"], "max_tokens"),
    (["generate", "", "--model", "dummy"], "empty"), (["serve", "dummy", "--num-kv-blocks", "-1"], "num_kv_blocks"),
    (["serve", "dummy", "--gpu-memory-utilization", "7"], "gpu_memory_utilization"),
    (["serve", "dummy", "--device", "abacus"], "abacus"),
])
def test_what_goes_wrong_is_said_in_one_line(capsys, args, words):
    port = ["--port", "0"] if args[0] == "serve" else []
    assert words in one_line_error(capsys, *args, *port)


def test_keys_come_from_options_a_file_or_the_environment(monkeypatch, tmp_path):
    def keys(*arguments):
        return cli._api_keys(cli._build_parser()[0].parse_args(["serve", *arguments]))

    path = tmp_path / "keys"
    path.write_text("three\n\n  four  \n")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys() is None
    monkeypatch.setenv("VLLM_API_KEY", "environment")
    assert keys() == ["environment"]
    assert keys("--api-key", "one", "--api-key", "two") == ["one", "two"]
    assert keys("--api-key", "one", "--api-key-file", str(path)) == ["one", "three", "four"]


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\xfe\x00"])
def test_a_bad_file_of_keys_is_said_in_one_line_and_serves_nobody(capsys, tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in one_line_error(capsys, "serve", "dummy", "--api-key-file", str(path))


@pytest.mark.parametrize(("given", "origins"), [
    ([], None), (["https://a.org", "https://b.org"], ["https://a.org", "https://b.org"]), (["*"], ["*"]),
    (['["https://a.org", "*"]'], ["https://a.org", "*"]),
])
def test_origins_are_taken_one_by_one_or_as_vllm_takes_them(given, origins):
    args = cli._build_parser()[0].parse_args(["serve", *(["--allowed-origins", *given] if given else [])])
    assert cli._origins(args.allowed_origins) == origins


def test_origins_that_are_no_list_are_said_in_one_line(capsys):
    for bad in ('["https://a.org"', "[1]"):
        assert "--allowed-origins" in one_line_error(capsys, "serve", "dummy", "--allowed-origins", bad)


def test_keys_and_limits_reach_the_server_and_no_key_reaches_the_log():
    with serve_process("dummy", "--api-key", "first-key", "--api-key", "second-key", "--request-timeout", "0.2",
                       "--max-waiting", "3", "--uvicorn-log-level", "debug", VLLM_API_KEY="third-key") as process:
        server = process.connect()
        with server.client:
            for key, status in (("first-key", 504), ("second-key", 504), ("third-key", 401)):
                headers = {"authorization": f"Bearer {key}"}
                assert server.post(CHAT, {**BODY, "max_tokens": 1900}, headers=headers).status_code == status
            too_many = server.post(CHAT, {**BODY, "n": 4}, headers={"authorization": "Bearer first-key"})
            assert too_many.status_code in (400, 429)
        assert "-key" not in process.log


def test_CL_06_what_is_no_model_is_said_in_one_line(capsys, tmp_path):
    (tmp_path / "README.md").write_text("# no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    for name in ("README.md", "empty", "absent"):
        start = time.monotonic()
        one_line_error(capsys, "serve", str(tmp_path / name), "--port", "0")
        assert time.monotonic() - start < 5
    for name in ("bad.jinja", "latin.jinja"):  # TK-04: found at the start
        one_line_error(capsys, "serve", "dummy", "--port", "0", "--chat-template", str(tmp_path / name))


def test_a_failed_fetch_is_said_in_one_line(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    for command in (["serve", "--port", "0"], ["fetch"], ["chat"], ["generate", "x"]):
        code, _, err, _ = run(*command, env=environment)
        assert code == 1 and "Traceback" not in err and err.splitlines()[-1].startswith("vllm-mini: error: ")
        assert "fetching" in err.splitlines()[0]


# ---- the port ----


def test_CL_01_a_busy_port_is_found_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err, seconds = run("serve", "/no/such/model", "--port", str(port))
    assert code == 1 and err.count("\n") == 1 and "in use" in err and str(port) in err
    assert seconds < 3


def test_CL_01_a_second_server_finds_the_port_busy_while_the_first_still_loads():
    listener = cli._listen("127.0.0.1", 0)
    with listener, pytest.raises(cli.CommandError, match="in use"):
        cli._listen("127.0.0.1", listener.getsockname()[1])


def test_CL_01_a_privileged_port_and_an_unknown_host_are_said_in_one_line(capsys, monkeypatch):
    start = time.monotonic()
    for host in ("no.such.host.invalid", "x" * 300, "256.1.1.1", "8.8.8.8", "a b"):
        assert "cannot listen on" in one_line_error(capsys, "serve", "/no/such", "--host", host)
    assert time.monotonic() - start < 12

    def refuse(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)  # tests may run as root, who may
    assert "administrator" in one_line_error(capsys, "serve", "/no/such", "--port", "80")


def test_a_host_name_that_nobody_resolves_is_given_up_in_time(capsys, monkeypatch):
    answer_at_the_end = threading.Event()
    monkeypatch.setattr(cli, "HOST_TIMEOUT", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [answer_at_the_end.wait(30)])
    assert "cannot listen on" in one_line_error(capsys, "serve", "/no/such", "--host", "example.com")
    answer_at_the_end.set()


# ---- serve ----


def test_CL_02_serve_says_what_it_is_and_takes_both_model_forms(tmp_path):
    with serve_process("dummy", "--model", "dummy", "--max_model_len", "64", "--served-model-name", "one", "two",
                       "--num-kv-blocks", "32") as process:
        server = process.connect()
        with server.client:
            assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["one", "two"]
            assert server.client.get("/v1/models/two").json()["max_model_len"] == 64
            assert server.chat(model="two").json()["model"] == "two"
            assert server.chat(model="dummy").json()["model"] == "one"
        for words in ("dtype", "device cpu", "32 blocks of 16 = 512 tokens of KV cache", "CPU threads"):
            assert words in process.log


def test_CL_06_a_path_with_spaces_and_other_letters_works_and_gives_the_name(tmp_path):
    folder = tmp_path / "mein Modell ü"
    write_checkpoint(folder)
    write_byte_tokenizer(folder)
    with serve_process(str(folder), VLLM_API_KEY="secret") as process:
        server = process.connect()
        with server.client:
            assert server.client.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert server.client.get("/v1/models", headers=headers).json()["data"][0]["id"] == folder.name
            assert server.chat("Hi", model=str(folder)).status_code == 401
            assert server.post(CHAT, {**BODY, "model": str(folder), "max_tokens": 2},
                               headers=headers).status_code == 200


def open_streams(server, number, **fields):
    """Connections with streams that have begun."""
    connections = [server.connect(CHAT, {**BODY, "stream": True, **fields}) for _ in range(number)]
    for connection in connections:
        receive_until(connection, b"data: ")
    return connections


def read_rest(connection):
    """What is left of a stream: the rest of its events, whole."""
    with connection:
        rest = receive_until(connection, b"[DONE]\n\n")
    events = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    return parse_events(b"".join(events))


def test_AB_10_at_sigterm_running_streams_finish_and_new_requests_are_refused():
    with serve_process("dummy", "--drain-timeout", "30") as process:
        server = process.connect()
        with server.client:
            connections = open_streams(server, 4, max_tokens=400)
            process.signal()
            wait_until(lambda: "shutting down" in process.log)
            refused = server.chat()
            assert refused.status_code == 503 and refused.json()["error"]["type"] == "service_unavailable"
            assert server.client.get("/health").status_code == 503
            for connection in connections:
                assert read_rest(connection)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(5) == 0
        assert "Traceback" not in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_AB_10_what_does_not_finish_in_time_gets_an_error_event(number):
    with serve_process("dummy", "--drain-timeout", "0.2") as process:
        server = process.connect()
        with server.client:
            connections = open_streams(server, 4, max_tokens=1900)
            start = time.monotonic()
            process.signal(number)
            for connection in connections:
                assert read_rest(connection)[-1]["error"]["type"] == "service_unavailable"
        assert process.wait(5) == 0
        assert time.monotonic() - start < 3


def test_a_killed_server_leaves_nobody_waiting_and_its_port_to_the_next():
    with serve_process("dummy") as process:
        server = process.connect()
        with server.client:
            connections = open_streams(server, 4, max_tokens=1900)
            process.signal(signal.SIGKILL)
            for connection in connections:
                with contextlib.suppress(ConnectionResetError):
                    assert b"[DONE]" not in receive_until(connection, b"")
                connection.close()
        assert process.wait(5) == -signal.SIGKILL
    with serve_process("dummy", "--port", server.url.rpartition(":")[2]) as process:
        server = process.connect()
        with server.client:
            assert server.chat().status_code == 200


def test_AB_10_a_second_signal_ends_it_at_once_and_the_port_is_free():
    with serve_process("dummy", "--drain-timeout", "60") as process:
        server = process.connect()
        with server.client:
            connections = open_streams(server, 2, max_tokens=1900)
            process.signal()
            wait_until(lambda: "shutting down" in process.log)
            process.signal()
            for connection in connections:
                assert read_rest(connection)[-1]["error"]["type"] == "service_unavailable"
            assert process.wait(3) == 1
        cli._listen("127.0.0.1", int(server.url.rpartition(":")[2])).close()


def test_AB_10_a_second_signal_ends_it_even_if_a_step_hangs():
    prelude = """
import time
import vllm_mini.worker as worker
execute = worker.Worker.execute
def hang(self, output):
    if output.step_id > 30:
        time.sleep(60)
    return execute(self, output)
worker.Worker.execute = hang
"""
    with serve_process("dummy", "--drain-timeout", "60", prelude=prelude) as process:
        server = process.connect()
        with server.client:
            (connection,) = open_streams(server, 1, max_tokens=500)
            assert server.client.get("/health").status_code == 200
            process.signal()
            wait_until(lambda: "shutting down" in process.log)
            process.signal()
            assert read_rest(connection)[-1]["error"]["type"] == "service_unavailable"
            assert process.wait(4) == 1


def test_CL_07_ctrl_c_after_cancelled_streams_leaves_nothing_behind():
    with serve_process("dummy") as process:
        server = process.connect()
        with server.client:
            for connection in open_streams(server, 5, max_tokens=1900):
                connection.close()
            process.signal(signal.SIGINT)
            assert process.wait(5) == 0
        cli._listen("127.0.0.1", int(server.url.rpartition(":")[2])).close()


def test_CL_07_ctrl_c_during_the_load_ends_it(smollm2_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def is_listening():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    with serve_process(str(smollm2_path), "--port", str(port)) as process:
        wait_until(is_listening)
        process.signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert "Traceback" not in process.log


def test_a_dead_engine_ends_the_process_with_an_error_for_everybody():
    prelude = """
import vllm_mini.worker as worker
execute = worker.Worker.execute
def die_later(self, output):
    if output.step_id > 30:
        raise SystemExit(0)
    return execute(self, output)
worker.Worker.execute = die_later
"""
    with serve_process("dummy", prelude=prelude) as process:
        server = process.connect()
        with server.client:
            (connection,) = open_streams(server, 1, max_tokens=500)
            assert read_rest(connection)[-1]["error"]["type"] == "internal_error"
        assert process.wait(5) == 1


def test_the_real_model_is_served_within_seconds_of_a_second_start(smollm2_path):
    for _ in range(2):
        start = time.monotonic()
        with serve_process() as process:
            server = process.connect()
            with server.client:
                assert server.client.get("/health").status_code == 200
                seconds = time.monotonic() - start
                assert server.client.get("/v1/models").json()["data"][0]["id"] == "SmolLM2-135M-Instruct"
    assert seconds < 10  # under 5 on an idle machine


# ---- generate and chat ----


def test_generate_streams_the_text_that_the_engine_gives(capsys, monkeypatch):
    args = ["generate", "--model", "dummy", "--temperature", "0", "--max-tokens", "30", "--dtype", "float32"]
    assert cli.main([*args, "Hello"]) == 0
    text = capsys.readouterr().out
    assert len(text) > 10
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert cli.main([*args, "-"]) == 0
    assert capsys.readouterr().out == text
    assert cli.main([*args, "--stop", text[5], "Hello"]) == 0
    assert capsys.readouterr().out == text[: text.index(text[5])] + "\n"
    assert cli.main([*args, "--chat", "Hello"]) == 0
    assert capsys.readouterr().out != text


def test_generate_into_a_closed_pipe_ends_quietly():
    process = subprocess.Popen([sys.executable, "-m", "vllm_mini", "generate", "x", "--model", "dummy", "--ignore-eos"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(5)
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait(10) == 1


def test_chat_reads_lines_from_a_pipe_and_remembers_until_reset():
    args = ["chat", "dummy", "--temperature", "0", "--max-tokens", "5", "--dtype", "float32"]
    code, out, err, _ = run(*args, stdin="hello\n\n/reset\nhello\n/nonsense\nhello\n/exit\nnever\n", encoding="utf-8")
    assert code == 0 and "/nonsense is not a command" in err
    first = run(*args, stdin="hello\n", encoding="utf-8")[1]
    assert out.startswith(first + first) and len(out) > len(first) * 2


def test_chat_goes_on_after_a_message_that_does_not_fit():
    code, out, err, _ = run("chat", "dummy", "--max-model-len", "64", stdin="x" * 100 + "\nhello\n")
    assert code == 0 and out and "maximum context length" in err and "/reset" in err


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *args):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "vllm_mini", *args]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # the end, on Linux
            while part := os.read(self.master, 65536):
                self.output += part

    def wait_for(self, text, start=0):
        """Where the output ends once `text` is in it; fails with the program."""
        wait_until(lambda: text in self.output[start:] or self.process.poll() is not None,
                   what=f"{text!r} in {self.output!r}")
        assert text in self.output[start:], self.output
        return len(self.output)

    def type(self, text):
        os.write(self.master, text)

    def wait_for_input(self):
        """Until it waits for input: a signal that comes between the prompt and that is lost on Python's readline."""
        program = psutil.Process(self.process.pid)

        def is_asleep():
            time.sleep(0.05)
            return program.status() == psutil.STATUS_SLEEPING

        wait_until(lambda: all(is_asleep() for _ in range(4)), what="asleep")

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self.master)


@pytest.fixture
def terminal():
    terminal = Terminal("chat", "dummy", "--ignore-eos", "--temperature", "0")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(terminal):
    at = terminal.wait_for(b"> ")
    for _ in range(2):
        terminal.type(b"hello\n")
        wait_until(lambda at=at: len(terminal.output) > at + 40)  # it answers
        terminal.process.send_signal(signal.SIGINT)
        at = terminal.wait_for(b"\n> ", at)
    assert terminal.process.poll() is None
    terminal.wait_for_input()
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(5) == 0


def test_ctrl_d_and_exit_leave_the_chat_and_no_control_character_reaches_the_terminal(terminal):
    at = terminal.wait_for(b"> ")
    terminal.type(b"hello\n")
    wait_until(lambda: len(terminal.output) > at + 400)
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.wait_for(b"\n> ", at)
    answer = terminal.output.split(b"hello")[-1].rpartition(b"\r\n")[0]
    assert not set(answer) & {*range(9), *range(11, 13), *range(14, 32), 127}
    terminal.type(b"\x04")
    assert terminal.process.wait(5) == 0


@pytest.mark.parametrize(("of_the_model", "given", "expected"), [
    ({}, {}, (0.2, 0.9)), ({"temperature": 0.6}, {}, (0.6, 0.9)),
    ({"temperature": 0.6}, {"temperature": 0, "top_p": 1}, (0, 1)),
])
def test_the_terminal_samples_as_given_else_as_the_model_says_else_with_its_own_defaults(of_the_model, given, expected):
    engine = types.SimpleNamespace(default_params=of_the_model)
    params = cli._params(engine, given)
    assert (params.temperature, params.top_p) == expected


def test_fetch_shows_where_the_model_is(capsys, smollm2_path):
    assert cli.main(["fetch"]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2_path)


def test_demo_gets_its_own_arguments(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--help"])
    assert caught.value.code == 0 and "--real" in capsys.readouterr().out
