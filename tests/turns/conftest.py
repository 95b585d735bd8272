"""One zygote for all tests of this folder."""

from functools import partial

from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.turns.mistakes", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(case_runner.run, family="llama3_1_8b", setup="b16"),
)
