"""`exceptions_in` reads exceptions from a log, whatever a logger puts before each line."""

from pytest_kvconform.rigs.processes.logs import exceptions_in, reason_of_start

MARK = "(MainProcess pid=7) ERROR 11-21 05:26:27 [base_worker.py:1318] "
PLAIN = """Traceback (most recent call last):
  File "/x/y/worker.py", line 12, in add_agent
    assert heads == 2 and (
           ^^^^^^^^^^
AssertionError
"""


def test_an_exception_with_a_message_is_reported_once():
    text = (
        "".join(
            MARK + line + "\n" for line in ["Traceback (most recent call last):", "ValueError: no block 7"]
        )
        * 2
    )
    assert exceptions_in("warming up\n" + text) == ("ValueError: no block 7",)


def test_an_exception_without_a_message_has_its_place():
    assert exceptions_in(PLAIN) == ("AssertionError in add_agent (worker.py:12): assert heads == 2 and (",)
    marked = "".join(MARK + line + "\n" for line in PLAIN.splitlines())
    assert exceptions_in(marked) == exceptions_in(PLAIN)


def test_a_place_belongs_to_one_exception():
    assert exceptions_in(PLAIN + "KeyError\nmsgspec.ValidationError: bad\n") == (
        *exceptions_in(PLAIN),
        "KeyError",
        "ValidationError: bad",
    )


def test_lines_that_are_no_exceptions():
    assert exceptions_in("Error: 5\nan error happened: ValueError\nERROR nothing\n  ValueErrors: no\n") == ()
    assert exceptions_in("") == ()


def test_unprintable_characters_are_marked_and_long_messages_cut():
    [found] = exceptions_in("OSError: a\x07b" + "c" * 1000)
    assert found.startswith("OSError: a·b") and len(found) == 240


def logged(who: str, where: str, text: str) -> str:
    """A text as vLLM's logger writes it: a prefix for each line."""
    return "".join(f"({who} pid=7) ERROR 11-21 05:26:27 [{where}] {line}\n" for line in text.splitlines())


SURVIVED = logged("EngineCore", "registry.py:9", "Traceback:\nImportError: flash_attn is not installed")
CHAIN = """EngineCore failed to start.
Traceback (most recent call last):
ModuleNotFoundError: No module named 'fast_copy'
During handling of the above exception, another exception occurred:
ValueError: blocks of 16 tokens are not supported"""
AFTER = "Process EngineCore:\nRuntimeError: Engine core initialization failed. See root cause above.\n"


def test_the_reason_of_a_start_is_the_exception_that_vllm_names():
    log = SURVIVED + logged("EngineCore", "core.py:1510", CHAIN) + AFTER
    assert reason_of_start(log) == "ValueError: blocks of 16 tokens are not supported"
    assert reason_of_start(SURVIVED + AFTER) == reason_of_start("") == ""


def test_the_reason_of_a_rank_comes_before_that_of_its_engine_core():
    rank = logged(
        "Worker_TP1", "multiproc_executor.py:953", "WorkerProc failed to start.\nTraceback:\nOSError: no"
    )
    assert reason_of_start(rank + logged("EngineCore", "core.py:1510", CHAIN)) == "OSError: no"
