"""Services in whole runs of pytest: real processes, and the small suite as cases."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pytest_kvconform.rigs.processes.linux import has_gone, listening_sockets
from tests.small_suite.runs import HERE, Run, declare

SERVER = Path(__file__).with_name("server.py")
CONFIG = '--kv-config={"kv_connector_extra_config": {"port": "{services.store.port}"}}'
ENDS_S = 20.0  # for what a run has started to end
ASKS = {"arrive*": "ask the service", "window*": "ask the service"}


def service(*arguments: str, port: str = "{port}", more: str = "", command: list[str] | None = None) -> str:
    """The table of a service."""
    words = command or [sys.executable, str(SERVER), port, *arguments]
    return f"[services.store]\ncommand = {json.dumps(words)}\n{more}"


@pytest.fixture
def run(kv, pytester):
    """Run the small suite with a service: run(table, *arguments, deeds=...)."""

    def run(table: str, *arguments: str, **more) -> Run:
        declared = pytester.path / "with_service.toml"
        declare(declared, {})
        declared.write_text(f"{table}\n{declared.read_text()}")
        return kv(f"--kv-declare={declared}", CONFIG, *arguments, **more)

    return run


def of_run(run_folder: Path) -> list[int]:
    """Living processes of the services of pytest's run in this folder."""
    mark = f"PWD_OF_TEST={run_folder}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environ and any(word.startswith(b"_KVCONFORM_SERVICES=") for word in environ):
            found.append(int(name))
    return [pid for pid in found if not has_gone(pid)]


@pytest.fixture(autouse=True)
def nothing_is_left(pytester, monkeypatch):
    monkeypatch.setenv("PWD_OF_TEST", str(pytester.path))
    with tempfile.TemporaryDirectory(prefix="kv-") as temporary:  # no other test's folders are in it
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield
        none_is_left(pytester.path, Path(temporary))


def none_is_left(run_folder: Path, temporary: Path) -> None:
    """Wait until no process of a service is there, and look for their folders."""
    deadline = time.monotonic() + ENDS_S
    while left := of_run(run_folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [*temporary.glob("kvconform-services-*")] == []


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_a_run_has_one_service(run, workers):
    name = f"kvconform-test-{os.getpid()}"
    found = run(
        service("--child", "--shared-memory", name, more="engine_environment = {STORE = 'at {port}'}"),
        *workers,
        deeds=ASKS,
    )
    assert (found.code, found.word) == (0, "CONFORMS"), found.text
    [started] = [line for line in found.log if line.startswith("zygote started")]
    port = int(started.split("at ")[1].split("'")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not Path("/dev/shm", name).exists()
    assert (found.path.parent / "services" / "store.log").read_text() == "listening\n"
    # ports differ from run to run, and so the report has what was declared
    extra = found.report["subject"]["config"]["kv_connector_extra_config"]
    assert extra == {"port": "{services.store.port}"}
    assert found.report["subject"]["services"][0]["command"][-4] == "{port}"


def test_files_of_a_service_are_there_before_it_starts(run):
    show = f"cat {{folder}}/at.json; echo; exec {shlex.join([sys.executable, str(SERVER)])} {{port}}"
    found = run(service(command=["sh", "-c", show], more="""files = {"at.json" = '{"at": {port}}'}"""))
    assert (found.code, found.word) == (0, "CONFORMS"), found.text
    written, says = (found.path.parent / "services" / "store.log").read_text().splitlines()
    assert (json.loads(written)["at"] > 1024, says) == (True, "listening")


def test_nothing_starts_that_no_case_needs(run):
    for arguments in (["--collect-only"], ["-k", "nothing_has_this_name"]):
        found = run(service(), *arguments)
        assert not (found.path.parent / "services").exists()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (service(command=["no-such-server", "{port}"]), "there is no command 'no-such-server'"),
        (service(command=["/", "{port}"]), "'/' cannot be run: Permission denied"),
        (
            service("--exit", "3"),
            r"its process ended with exit code 3; .*; its log ends with: the licence has expired \(.*e.log\)",
        ),
        (
            service(port="0", more="ready = 'tcp://127.0.0.1:{port}'\ndeadline = 3"),
            r"nobody listened on 127.0.0.1:\d+ within 3 s; it listens on 127.0.0.1:\d+; its command",
        ),
        (
            service(more="ready = 'line:at your service'\ndeadline = 3"),
            "it did not write 'at your service' within 3 s; its command is: .*; its log ends with: list",
        ),
        (
            service(more="ready = 'http://127.0.0.1:{port}/health'\ndeadline = 3"),
            r"http://127.0.0.1:\d+/health did not answer within 3 s; it listens on",
        ),
    ],
)
def test_a_service_that_does_not_come_up_blocks_every_case(run, table, says):
    found = run(table)
    assert (found.code, found.word) == (10, "INCOMPLETE")
    assert set(found.outcomes.values()) == {"BLOCKED"}
    [reason] = {result["reason"] for result in found.report["results"]}
    assert re.match(f"the service store did not come up: {says}", reason), reason
    assert "\n" not in reason
    assert not any(line.startswith("probe") for line in found.log)  # nobody waits for vLLM


def test_a_port_that_is_taken(run):
    run(service())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = run(service(port=str(port), more=f"ready = 'tcp://127.0.0.1:{port}'"))
    [reason] = {result["reason"] for result in found.report["results"]}
    assert found.code == 10
    assert f"did not come up: another process listens on 127.0.0.1:{port} already; its command" in reason
    assert "its log is empty" in reason  # and not that of the run before


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_a_service_that_dies_in_the_middle(run, workers):
    deeds = {"arrive(gemma3-P1D1-n63)": "ask the service to end"}
    found = run(
        service(),
        *workers,
        "-v",
        "--kv-topology=P1D1",
        deeds={k.replace(")", "*"): v for k, v in deeds.items()},
    )
    assert (found.code, found.word) == (10, "INCOMPLETE"), found.text
    assert "FAIL" not in found.outcomes.values()
    assert found.outcomes["engine/bytes::arrive[gemma3-P1D1-n63]"] == "BLOCKED"
    blocked = {result["reason"] for result in found.report["results"] if result["outcome"] == "BLOCKED"}
    [reason] = blocked
    assert reason.startswith("the service store ended in the middle of the run (exit code 7); its command is")
    assert "its log ends with: listening | asked to end (" in reason
    if not workers:
        ids = [id.removeprefix("kv::") for id in found.ran]
        later = ids[ids.index("engine/bytes::arrive[gemma3-P1D1-n63]") :]
        assert len(later) > 1
        assert {found.outcomes[id] for id in later} == {"BLOCKED"}


@pytest.mark.parametrize("workers", [[], ["-n2"]])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_pytest_ends_the_service(pytester, monkeypatch, workers, number):
    declared = pytester.path / "with_service.toml"
    name = f"kvconform-test-{os.getpid()}"
    declare(declared, {})
    declared.write_text(f"{service('--child', '--shared-memory', name)}\n{declared.read_text()}")
    plugins = ["-p", "pytest_kvconform.plugin", *(["-p", "xdist.plugin", *workers] if workers else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, "--kv-connector=m:C", f"--kv-declare={declared}", CONFIG],
        env={
            **os.environ,
            "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
            "_KVCONFORM_TEST_PACKAGE": "fakekv",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "FAKEKV": json.dumps({"arrive*": "wait"}),
        },
        stdout=(output := pytester.path / "output").open("wb"),
        stderr=subprocess.STDOUT,
        # `nohup` and jobs in the background ignore it, and so would the run
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log = pytester.path / "kv-report" / "services" / "store.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "listening" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None, output.read_text()
        time.sleep(0.05)
    time.sleep(1.5)  # a case waits, and the guard has looked at shared memory
    pids = of_run(pytester.path)
    assert len(pids) == 3  # guard, server, and the child of the server in a session of its own
    [address] = {one for pid in pids for one in listening_sockets(pid)}
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + ENDS_S
    while of_run(pytester.path) or Path("/dev/shm", name).exists():
        assert time.monotonic() < deadline, of_run(pytester.path)
        time.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.partition(":")[2])))


def test_a_guard_that_is_killed(run, monkeypatch, pytester):
    """Somebody ends the guard: the run says so, and leaves nothing."""
    words = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(1000)"
    found = run(service("--child", command=[sys.executable, "-c", words, "{port}"]))
    assert found.code == 10
    assert {result["reason"] for result in found.report["results"]} == {
        "the guard (the process that keeps the services) is gone; did somebody kill it?"
    }
