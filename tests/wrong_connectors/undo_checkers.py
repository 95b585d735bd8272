"""Undo one checker after the other, and see that our tests fail and say so.

    python -m tests.wrong_connectors.undo_checkers [-j 2] [CASE ...]

A CASE is "bytes/pool::attention_kv_arrives"; default: every case of the suite. In a copy of this checkout the
function of the case returns evidence at once. Then the cheapest test runs that proves the case: a record of
`tests/wrong_connectors`, or what `tests/wrong_connectors/elsewhere.py` names. It has to fail. One line is
printed for each case. Exit 1: a checker was undone, and its test passed. Exit 2: there is no such case.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.helpers.fixtures import ROOT
from tests.wrong_connectors.catalogue import RECORDS, RULES, THEMES, found_by
from tests.wrong_connectors.elsewhere import PROVED_BY

LIMIT_S = 900.0  # for one test
CATALOGUE = "tests/wrong_connectors/test_catalogue.py::test_a_connector_is_judged_as_its_record_says"
UNDONE = "from pytest_kvconform.result import Evidence as Undone; return Undone(looked_at=1, unit='undone')"


def undone(source: str, name: str) -> str:
    """The source of a module in which the function `name` returns evidence at once."""
    [function] = [one for one in ast.parse(source).body if getattr(one, "name", "") == name]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[bool(ast.get_docstring(function))]
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}{UNDONE}\n")
    return "".join(lines)


def proofs() -> dict[str, str]:
    """Case -> the test that fails without it, the cheapest first: as pytest names it."""
    found, names = dict(PROVED_BY), {id(record): name for name, _, record in RECORDS}
    for theme in sorted(THEMES, key=lambda theme: not theme.first):
        for record, cases in sorted(found_by(theme), key=lambda one: one[0].night):
            for case in cases:
                found.setdefault(case, f"{CATALOGUE}[{names[id(record)]}]")
    return {case: found[case] for case in RULES if case in found}


def run(checkout: Path, case: str, test: str) -> tuple[bool, str]:
    """Whether a test fails in a checkout without a case, and the first line that says why.

    Raises LookupError if there is no such test.
    """
    module, _, name = case.partition("::")
    file = checkout / "pytest_kvconform" / "suite" / f"{module}.py"
    before = file.read_text(encoding="utf-8")
    file.write_text(undone(before, name), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(
            command,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        file.write_text(before, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise LookupError(f"pytest ended with {done.returncode} for {test}: {done.stderr or done.stdout}")
    said = [line.removeprefix("E").strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return done.returncode == 1, (said or done.stdout.strip().splitlines()[-1:] or [""])[0][:160]


def checkouts(number: int, folder: Path) -> Iterator[Path]:
    """Copies of what git tracks here, and of what it does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for index in range(number):
        copy = folder / f"copy{index}" / "project"
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        if (shared := ROOT.parent / "shared").exists():
            (copy.parent / "shared").symlink_to(shared)
        yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("-j", type=int, default=2, help="so many side by side")
    given = parser.parse_args()
    known, passed = proofs(), 0
    if unknown := [case for case in given.cases if case not in known]:
        print(f"no case with a proof is called {unknown[0]}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.j) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in checkouts(given.j, Path(folder)):
            free.put(copy)

        def tried(case: str) -> tuple[bool, str]:
            checkout = free.get()
            try:
                return run(checkout, case, known[case])
            finally:
                free.put(checkout)

        cases = given.cases or list(known)
        for case, (fails, says) in zip(cases, pool.map(tried, cases), strict=True):
            passed += not fails
            word, test = "fails" if fails else "PASSES", known[case].rpartition("::")[2]
            print(f"{word}  {case}  {test}  {says}", flush=True)
    print(f"{len(cases)} checkers undone, one after the other; {passed} tests passed all the same")
    return bool(passed)


if __name__ == "__main__":
    sys.exit(main())
