"""`exceptions_in` reads exceptions from a log, whatever a logger puts before each line."""

from pytest_kvconform.rigs.processes.logs import exceptions_in

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
