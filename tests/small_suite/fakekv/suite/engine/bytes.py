from fakekv import act

from pytest_kvconform.case import case


@case(
    "KV-BYTES-001",
    variants=lambda cell, matrix: ("n16", "n63") if cell.family == "llama" else ("n16", "n63", "n95"),
)
def arrive(bench, variant):
    return act(bench, "KV-BYTES-001", "arrive", variant, moved=1000)


@case("KV-BYTES-002", applies=lambda cell: cell.family == "gemma3")
def window(bench, variant):
    return act(bench, "KV-BYTES-002", "window", variant, moved=10)


def not_a_case(bench, variant):
    raise AssertionError("has no @case")
