"""One zygote for all tests of this folder."""

from functools import partial

from tests.helpers.case_runner import CaseRunner
from tests.helpers.fixtures import fixtures

GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "gpt_oss_20b", "kimi_k2_5_eagle3", "qwen3_5_35b_a3b")
case_runner, run_cases = fixtures(
    lambda: CaseRunner("tests.wrong_connectors.bytes.transfers", "bytes", GEOMETRIES, "full"),
    lambda case_runner: partial(case_runner.run, setup="b16"),
)
