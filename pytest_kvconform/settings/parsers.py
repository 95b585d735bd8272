"""Parsers of settings: from a text, or from a value of pyproject.toml, to the setting.

Texts come from the command line or the environment.

A parser raises ValueError with a message that names what is valid. Like the table of settings, this module is
imported by every pytest run, and imports only the cheap part of the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

MOST_TOKENS = 2**31 - 1
MOST_REQUESTS = 5_000
MOST_SECONDS = 4  # a case of the tier protocol waits up to 14 times; KV-MANY-002 waits once in each round
SMALLEST_FACTOR, LARGEST_FACTOR = 0.001, 100_000


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return a hint for an error message, `` (did you mean quick?)``; "" if no valid word is near.

    Case does not count, and the beginning of a word is near it.
    """
    import difflib

    known = {one.casefold(): one for one in valid}
    given = word.casefold()
    short = sorted((one for one in known if given and one.startswith(given)), key=len)
    near = difflib.get_close_matches(given, known, n=1) or short
    return f" (did you mean {known[near[0]]}?)" if near else ""


def parse_text(value: Any) -> str:
    """Return a text that UTF-8 can hold."""
    if not isinstance(value, str) or "\0" in value or value.encode("utf-8", "replace").decode() != value:
        # Neither a path nor a report can hold null bytes or halves of characters.
        raise ValueError(f"expected a text, got {value!r}")
    return value


def parse_url(value: Any) -> str:
    """Return the address of a server, `http://host:port`, without a slash at its end."""
    from urllib.parse import urlsplit

    text = parse_text(value).rstrip("/")
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid or parts.path or parts.query:
        raise ValueError(f"expected an address such as http://127.0.0.1:8000, got {value!r}")
    return text


def parse_words(value: Any) -> tuple[str, ...]:
    """Return the words of one text with commas, or of a list of texts: each once, in the order given.

    Raises ValueError for a text without a word: an empty variable of a shell would select everything.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a text or a list of texts, got {value!r}")
    if any(not text.replace(",", "").strip() for text in texts):
        raise ValueError("it names nothing: give a word, or leave it out")
    return tuple(
        dict.fromkeys(word.strip() for text in texts for word in parse_text(text).split(",") if word.strip())
    )


def parse_headers(value: Any) -> tuple[str, ...]:
    """Return headers of HTTP, each `Name: value`, from one text with a line for each, or a list of texts.

    No message shows what was given: it may hold a key.
    """
    texts = [value] if isinstance(value, str) else value
    headers = [("", "")]  # which is none
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        pairs = (line.partition(":") for text in texts for line in text.splitlines() or [""])
        headers = [(name.strip(), content.strip()) for name, _, content in pairs]
    if not all(_is_header(*one) for one in headers):
        raise ValueError("expected the name of a header and its value, such as 'X-Api-Key: ...'")
    return tuple(f"{name}: {content}" for name, content in headers)


def _is_header(name: str, content: str) -> bool:
    """Whether HTTP can carry a header (RFC 9110, 5.1 and 5.5), in ASCII alone."""
    letters = name.replace("-", "").replace("_", "")
    return (
        letters.isascii()
        and letters.isalnum()
        and bool(content)
        and content.isascii()
        and content.isprintable()
    )


def words_and_those_before(*valid: str) -> Callable[[Any], tuple[str, ...]]:
    """Return a parser of some of these words. It returns the last one that is named, and all before it."""

    def parse(value: Any) -> tuple[str, ...]:
        words = parse_words(value)
        for word in words:
            if word not in valid:
                raise ValueError(f"{word!r} is none of {', '.join(valid)}{did_you_mean(word, valid)}")
        return valid[: max(map(valid.index, words), default=-1) + 1]

    return parse


def one_of(*valid: str) -> Callable[[Any], str]:
    """Return a parser that accepts these words alone."""

    def parse(value: Any) -> str:
        if value not in valid:
            raise ValueError(f"expected {' or '.join(valid)}, got {value!r}{did_you_mean(str(value), valid)}")
        return str(value)

    return parse


def word_or_function(*valid: str) -> Callable[[Any], str]:
    """Return a parser that accepts these words, and the name of a function, `module:function`."""

    def parse(value: Any) -> str:
        module, colon, function = value.partition(":") if isinstance(value, str) else ("", "", "")
        if colon and function.isidentifier() and all(word.isidentifier() for word in module.split(".")):
            return f"{module}:{function}"
        if value not in valid:
            raise ValueError(
                f"expected {' or '.join(valid)} or MODULE:FUNCTION, got "
                f"{value!r}{did_you_mean(str(value), valid)}"
            )
        return str(value)

    return parse


def parse_tokens(value: Any, most: int = MOST_TOKENS, unit: str = "tokens") -> int:
    """Return a number of tokens: 0 or more. The largest is far beyond every prompt."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"expected a number of {unit} from 0 to {most}, got {value!r}")
    return value


def parse_requests(value: Any) -> int:
    """Return a number of requests: 0 or more. So many requests come and end within one case."""
    return parse_tokens(value, MOST_REQUESTS, "requests")


def parse_seconds(value: Any) -> float:
    """Return a number of seconds, 0 or more: each store case waits for as long."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_SECONDS:
        raise ValueError(f"expected a number of seconds from 0 to {MOST_SECONDS}, got {value!r}")
    return float(value)


def parse_factor(value: Any) -> float:
    """Return a number above 0, of a size with which deadlines can be reckoned."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"expected a number above 0, got {value!r}")
    if not SMALLEST_FACTOR <= number <= LARGEST_FACTOR:
        raise ValueError(f"expected a number from {SMALLEST_FACTOR} to {LARGEST_FACTOR}, got {value!r}")
    return number


def parse_seed(value: Any) -> int | str:
    """Return a whole number from 0 on, or the word "last"."""
    if value == "last":
        return "last"
    try:
        number = -1 if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ValueError(f"expected a whole number from 0 on, or last, got {value!r}")
    return number


def parse_shard(value: Any) -> str:
    """Return `i/n` with 1 <= i <= n, without leading zeros."""
    number, slash, of = value.partition("/") if isinstance(value, str) else ("", "", "")
    # at most four digits: no run has ten thousand cells
    if not (slash and all(part.isascii() and part.isdigit() and len(part) <= 4 for part in (number, of))):
        raise ValueError(f"expected I/N, such as 2/4, got {value!r}")
    if not 1 <= int(number) <= int(of):
        raise ValueError(f"expected I/N with I from 1 to N, such as 2/4, got {value!r}")
    return f"{int(number)}/{int(of)}"


def parse_switch(value: Any) -> bool:
    """Return a boolean, which an environment variable writes as 1, true, yes, 0, false or no."""
    if value in (True, "1", "true", "yes"):
        return True
    if value in (False, "0", "false", "no"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def tables_as_json(kind: type) -> Callable[[Any], str]:
    """Return a parser of a table (dict) or a list of tables into JSON, with dates as texts.

    See declaration.py.
    """

    def parse(value: Any) -> str:
        if not isinstance(value, kind):
            raise ValueError(f"expected {'a table' if kind is dict else 'a list of tables'}, got {value!r}")
        return json.dumps(value, default=str)

    return parse


def object_or_path(value: Any) -> str:
    """Return a TOML table as JSON, and a text unchanged; `subject.resolve` reads both."""
    try:
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else parse_text(value)
    except TypeError:  # TOML has dates, JSON has none
        raise ValueError(f"expected values that JSON can hold, got {value!r}") from None
