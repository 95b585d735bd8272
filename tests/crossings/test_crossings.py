"""Objects of a connector on the way between processes: none ends as an error of the suite."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pytest_kvconform.case_outcome import run_case
from pytest_kvconform.result import Evidence, Finding, Outcome, Violation, message_of, repr_of
from pytest_kvconform.rigs.processes.linux import threads
from pytest_kvconform.rigs.scheduler.violations import is_of_suite
from pytest_kvconform.rigs.vllm_setup.answers import pickled, that_travels
from tests.helpers.fixtures import ROOT

# ---- parts -------------------------------------------------------------------------------------------------


def test_a_finding_is_text_that_a_report_can_hold() -> None:
    def body() -> Evidence:
        raise Violation(Finding(rule="KV-A-001", happened="\udcff", log=("a\ud800",), diagnosis="ä"))

    end = run_case(body, "a")
    assert end.outcome is Outcome.FAIL
    assert end.finding == Finding(rule="KV-A-001", happened=r"\udcff", log=(r"a\ud800",), diagnosis="ä")
    noted = run_case(lambda: Evidence(looked_at=1, unit="a", notes={"k\udcff": "v\udcff"}), "a")
    assert noted.evidence is not None
    assert noted.evidence.notes == {r"k\udcff": r"v\udcff"}
    reason = run_case(lambda: (_ for _ in ()).throw(RuntimeError("\udcff")), "a").reason
    assert reason == r"RuntimeError: \udcff"
    msgspec.json.encode([end, noted])


def test_what_pickle_refuses_is_named_with_its_hook() -> None:
    output = SimpleNamespace(kv_connector_stats=None, invalid_block_ids={threading.Lock()})
    message = SimpleNamespace(kv_connector_output=output, sampled=[1])
    with pytest.raises(
        pickle.PicklingError, match=r"^a set of get_block_ids_with_load_errors does not survive"
    ):
        pickled(message)
    with pytest.raises(pickle.PicklingError, match=r"^a lock does not survive pickle"):
        pickled(threading.Lock())
    assert pickle.loads(pickled({"a": 1})) == {"a": 1}


def test_an_exception_keeps_its_name_and_message() -> None:
    class Local(ValueError):
        def __init__(self, text: str):
            super().__init__(text)
            self.lock = threading.Lock()

    sent = that_travels(Local("why"))
    assert (type(sent).__name__, str(sent)) == ("Local", "why")
    same = KeyError("a")
    assert that_travels(same) is same


def test_texts_of_foreign_objects_never_raise() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("a")

        __repr__ = __str__

    assert message_of(Broken()) == "(KeyError in Broken.__str__)"
    assert repr_of(Broken()) == "a Broken, whose repr raises KeyError"


def test_what_an_object_raises_that_vllm_called_is_not_the_suites() -> None:
    def raised_in(*files: str) -> BaseException:
        scope: dict[str, Any] = {}
        for n, file in enumerate(files):
            last = n == len(files) - 1
            exec(compile(f"def f{n}():\n    {'1 / 0' if last else f'f{n + 1}()'}", file, "exec"), scope)
        try:
            scope["f0"]()
        except ZeroDivisionError as error:
            return error
        raise AssertionError

    ours = str(ROOT / "pytest_kvconform" / "rigs" / "a.py")
    vllm, connector, library = (
        "/site-packages/vllm/b.py",
        "/opt/pytest_kvconform/c.py",
        "/site-packages/n.py",
    )
    assert not is_of_suite(raised_in(ours, vllm, connector))
    assert not is_of_suite(raised_in(ours, vllm, connector, library))
    assert not is_of_suite(raised_in(ours, vllm))
    assert is_of_suite(raised_in(ours, vllm, ours, library))
    assert is_of_suite(raised_in(ours, library))


def test_threads_may_have_any_name() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="a\udcffb", daemon=True)
    thread.start()
    try:
        assert "a\udcffb" in threads().values()
    finally:
        end.set()
        thread.join()
