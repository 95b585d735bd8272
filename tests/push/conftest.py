"""One zygote for the tests of this folder that are about bytes."""

from functools import partial

from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.push.mistakes", "bytes", ("llama3_1_8b",), "quick"),
    lambda case_runner: partial(case_runner.run, setup="b16", declared={"lease": "kv_lease_duration"}),
)
