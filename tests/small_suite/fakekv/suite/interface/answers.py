from fakekv import act
from fakekv.suite.engine.bytes import arrive  # noqa: F401 - an imported case is not a case of this module

from pytest_kvconform.case import case


@case("KV-ANSWER-001", rig="engine")
def hello(bench, variant):
    return act(bench, "KV-ANSWER-001", "hello", variant, moved=0)
