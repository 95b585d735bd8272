"""One zygote for all tests of this folder."""

from functools import partial

from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

MODULES = ("bytes/handover", "bytes/pool", "bytes/blocks")
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.multi.children", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(
        case_runner.run,
        family="llama3_1_8b",
        setup="b16",
        variants="n17 n55 two_at_once",
        only=lambda planned: planned.module in MODULES,
    ),
)
