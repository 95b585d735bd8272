"""One background process for all tests of this folder."""

from functools import partial

from tests.engine.judged import Jury
from tests.juries import fixtures

GEOMETRIES = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b", "kimi_k2_5_eagle3")
jury, judge = fixtures(
    lambda: Jury("tests.interface.wrong_connectors", "interface", GEOMETRIES, "full"),
    lambda jury: partial(jury.judge, setup="b16"),
)
