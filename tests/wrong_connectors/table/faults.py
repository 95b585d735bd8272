"""Mistakes that a bad transport shows: of connectors that hand over, and of stores."""

from __future__ import annotations

from tests.helpers.wrong import STORE, Right, Theme, Wrong, on

MODULES = ("bytes/transport_faults", "bytes/each_transfer")
# Seconds. The suite gives NixlConnector itself a lease.
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": 2}}'
LEAVING = "tests.wrong_connectors.peers.unreachable"
SHORT = 0.2  # of deadlines, where one of them has to be waited for
LLAMA, GPT, KIMI = "llama3_1_8b", "gpt_oss_20b", "kimi_linear_48b"


def in_transfers(transfers: str, case: str, says: str) -> dict[str, str]:
    return {f"{case}[{transfer}]": says for transfer in transfers.split()}


STOPPED = {
    "attention_kv_arrives",
    "nothing_is_written_after_a_failed_load",
    "all_blocks_are_freed",
    "next_transfer_is_right",
}
OVERWRITTEN = "were read, but after they had been freed and overwritten"
NO_STATE = "reported as if it had been made: no byte of convolution Q .* was written"
WRONG = [
    Wrong(
        "ForgetsFailure",
        in_transfers(
            "failed not_begun",
            "every_request_ends",
            "a transfer that failed is reported as if it had been made: ",
        )
        | in_transfers("failed not_begun", "attention_kv_arrives", "no byte of .* was written"),
        variants="failed not_begun slow",
    ),
    Wrong(
        "ForgetsLaterFailures",
        in_transfers("later", "each_transfer_may_fail", "reported as if it had been made: "),
        variants="failed_handle slow_handle later",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "HidesFailure",
        in_transfers("failed", "every_request_ends", "neither as finished nor as failed"),
        variants="failed",
        blocked=STOPPED,
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "RaisesOnFailure",
        in_transfers("failed", "every_request_ends", "D raised RuntimeError.*no transfer ever fails"),
        variants="failed",
        blocked=STOPPED,
    ),
    Wrong(
        "FailsAll",
        in_transfers("failed", "every_request_ends", "the failure of one request ends others, too"),
        variants="failed",
        blocked={"attention_kv_arrives"},
    ),
    Wrong(
        "FailsTheHit",
        in_transfers("not_begun", "every_request_ends", "D also ended a running request with an error"),
        variants="failed not_begun slow",
    ),
    Wrong(
        "IgnoresRelease",
        in_transfers(
            "lingers",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed lingers",
    ),
    Wrong(
        "ClearsLater",
        in_transfers(
            "failed",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed",
    ),
    Wrong(
        "LeavesSiblings",
        in_transfers(
            "failed_handle",
            "nothing_is_written_after_a_failed_load",
            "while one of its transfers was still under way",
        ),
        variants="failed_handle slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "BearsGrudge",
        in_transfers("failed", "next_transfer_is_right", "the next request of D did not end well"),
        variants="failed",
    ),
    Wrong(
        "NotifiesAtOnce",
        in_transfers("slow_handle", "p_keeps_blocks_until_the_last_read", OVERWRITTEN),
        variants="slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "CountsOneReader",
        in_transfers("slow_rank", "p_keeps_blocks_until_the_last_read", OVERWRITTEN),
        variants="slow_rank reversed",
        topology="P1D2",
    ),
    Wrong(
        "KnowsEveryRequest",
        in_transfers("twice", "every_request_ends", r"P raised KeyError"),
        variants="twice notified_late",
        blocked={f"{case}[twice]" for case in STOPPED},
    ),
    Wrong(
        "NeverExpires",
        in_transfers(
            "failed not_notified", "all_blocks_are_freed", r"P waits for a notification that will not come"
        ),
        variants="failed not_notified twice",
        scale=SHORT,
    ),
    Wrong(
        "EndsWithTheFirst",
        in_transfers(
            "slow_handle",
            "p_keeps_blocks_until_the_last_read",
            r"rank 0 of D reported its load as finished when \d of the \d transfers that it had begun",
        )
        | on("load_ends_with_its_last_transfer", "as soon as one of its transfers has"),
        variants="slow_handle",
        topology="P2D1",
        family=GPT,
    ),
    Wrong(
        "EndsWithTheBegin",
        in_transfers("slow", "attention_kv_arrives", r"when none of the \d transfers that it had begun had")
        | on("load_ends_with_its_last_transfer", "as soon as its transfers have begun"),
        variants="slow",
    ),
    # recurrent states, in transfers of their own
    Wrong(
        "ForgetsSlowState",
        on("load_ends_with_its_last_transfer", "as soon as one of its transfers has")
        | in_transfers("later", "each_transfer_may_fail", NO_STATE),
        variants="later",
        family=KIMI,
        setup="mla64",
        night=True,
    ),
    Wrong(
        "ForgetsFailedState",
        in_transfers("later", "each_transfer_may_fail", NO_STATE),
        variants="later",
        family=KIMI,
        setup="mla64",
    ),
    # a transport of its own, and a fault hook
    Wrong(
        "TcpForgetsFailure",
        in_transfers("failed", "every_request_ends", "reported as if it had been made: ")
        | in_transfers("failed", "attention_kv_arrives", "no byte of .* was written")
        | in_transfers("later", "each_transfer_may_fail", "reported as if it had been made: "),
        variants="failed slow later",
    ),
    Wrong(
        "TcpHidesFailure",
        in_transfers("failed", "every_request_ends", "neither as finished nor as failed"),
        variants="failed",
        blocked=STOPPED,
        scale=SHORT,
    ),
    Wrong(
        "TcpEndsWithTheFirst",
        on("load_ends_with_its_last_transfer", "while a transfer was late"),
        variants="none",
    ),
    Wrong(
        "TcpNeverExpires",
        in_transfers("not_notified", "all_blocks_are_freed", "P waits for a notification that will not come"),
        variants="not_notified",
        scale=SHORT,
    ),
    # Upstream counts messages, not readers.
    Wrong(
        "Upstream",
        in_transfers("twice_slow_rank", "repeated_notification_counts_once", OVERWRITTEN),
        variants="slow_rank twice_slow_rank",
        topology="P1D2",
    ),
    # D may compute for a while after a failure.
    Wrong(
        f"{LEAVING}:LeavesAloneForGood",
        in_transfers("failed not_begun", "next_transfer_is_right", "loaded nothing"),
        variants="failed slow not_begun",
        night=True,
    ),
    Right(f"{LEAVING}:LeavesAlone", variants="failed slow not_begun"),
    # The load that fails may be the only one.
    Right(
        "tests.right_connectors.answers:ComputesWhenBusy",
        variants="failed slow",
        not_applicable={"attention_kv_arrives[failed]"},
    ),
    Right("Right"),
    Right("Right", topology="P1D2"),
    Right("Right", family=GPT, topology="P2D1"),
]

RECOMPUTED = "recomputed"  # a load that fails under kv_load_failure_policy=recompute
CASES = (
    "every_request_ends",
    "attention_kv_arrives",
    "nothing_is_written_after_a_failed_load",
    "all_blocks_are_freed",
    "next_transfer_is_right",
)


def served(*transfers: str) -> dict[str, str]:
    """What is found of loads that have failed and are reported as if they had not."""
    return {
        f"{case}[{transfer}]": says
        for transfer in transfers
        for case, says in (
            ("every_request_ends", "a transfer that failed is reported as if it had been made: no byte of "),
            ("attention_kv_arrives", "no byte of .* was written"),
        )
    }


WRITTEN_LATE = {
    "nothing_is_written_after_a_failed_load[failed]": "while one of its transfers was still under way"
}
STORES = [
    Wrong("ServesWhatFailed", served("failed", RECOMPUTED), variants=f"failed {RECOMPUTED} slow"),
    Wrong(
        "ServesWhatFailedInMemory",
        served("failed", RECOMPUTED),
        variants=f"failed {RECOMPUTED} slow",
        profile="same-engine",
    ),
    Wrong("ReportsSuccess", served("failed"), variants="failed slow"),
    Wrong(
        "ReportsNothing",
        {"every_request_ends[failed]": "reported a load neither as finished nor as failed"},
        variants="failed",
        scale=0.2,  # the request is waited for
        blocked=CASES[1:],
    ),
    Wrong(
        "FailsTheOthers",
        {"every_request_ends[failed]": "the failure of one request ends others, too"},
        variants="failed slow",
    ),
    Wrong("WritesAfterFailure", WRITTEN_LATE, variants="failed slow"),
    Wrong("WritesIntoFreedBlocks", WRITTEN_LATE, variants="failed slow"),
    Wrong(
        "NeverEndsASave",
        {
            f"all_blocks_are_freed[{transfer}]": "never reported the end of a save"
            for transfer in ("failed", "slow")
        },
        variants="failed slow",
        scale=0.2,
    ),
]

cell = {"setup": "b16", "matrix": "full"}
THEMES = (
    Theme(
        "stores_and_faults",
        "tests.wrong_connectors.faults.stores",
        "bytes",
        STORES,
        (LLAMA, GPT),
        cell | {"profile": "store", "config": STORE},
        MODULES,
    ),
    Theme(
        "faults",
        "tests.wrong_connectors.faults.transfers",
        "bytes",
        WRONG,
        (LLAMA, GPT, KIMI),
        cell | {"config": LEASE},
        MODULES,
        others="PASS",
    ),
)
