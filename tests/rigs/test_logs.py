"""Exceptions are read from logs, whatever a logger puts before them."""

from pytest_kvconform.rigs.processes.logs import exceptions_in

MARK = "(MainProcess pid=7) ERROR 11-21 05:26:27 [base_worker.py:1318] "
PLAIN = """Traceback (most recent call last):
  File "/x/y/worker.py", line 12, in add_agent
    assert heads == 2 and (
           ^^^^^^^^^^
AssertionError
"""


def test_a_message_is_kept_and_said_once():
    text = (
        "".join(
            MARK + line + "\n" for line in ["Traceback (most recent call last):", "ValueError: no block 7"]
        )
        * 2
    )
    assert exceptions_in("warming up\n" + text) == ("ValueError: no block 7",)


def test_without_a_message_the_place_is_said():
    assert exceptions_in(PLAIN) == ("AssertionError in add_agent (worker.py:12): assert heads == 2 and (",)
    marked = "".join(MARK + line + "\n" for line in PLAIN.splitlines())
    assert exceptions_in(marked) == exceptions_in(PLAIN)


def test_a_place_belongs_to_one_exception():
    assert exceptions_in(PLAIN + "KeyError\nmsgspec.ValidationError: bad\n") == (
        *exceptions_in(PLAIN),
        "KeyError",
        "ValidationError: bad",
    )


def test_what_is_no_exception():
    assert exceptions_in("Error: 5\nan error happened: ValueError\nERROR nothing\n  ValueErrors: no\n") == ()
    assert exceptions_in("") == ()


def test_what_cannot_be_printed_is_marked_and_what_is_long_is_cut():
    [said] = exceptions_in("OSError: a\x07b" + "c" * 1000)
    assert said.startswith("OSError: a·b") and len(said) == 240
