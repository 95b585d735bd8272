"""Mistakes of peers and of ranks. Each cell waits about eight seconds, whatever is wrong."""

from __future__ import annotations

import functools

from tests.helpers.wrong import ANY, Right, Theme, Wrong, on

MODULE = "tests.wrong_connectors.peers"
MODULES = tuple(f"protocol/peers/{name}" for name in ("unreachable", "lease", "rank_reports", "unread"))
# Seconds. The suite gives NixlConnector itself a lease.
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": SECONDS}}'
LEASE_S = 4  # a second more than the suite's own: tests run beside one another
# Leases of a connector whose mistake must show, one after the other, while the machine is too slow to tell.
# The suite makes a lease longer itself where the user has not given it one, as these tests do.
LONGER = (LEASE_S, *[2 * LEASE_S] * 4)
# Not applicable: NixlConnector loads the one token after the whole blocks that D's own cache has.
LOADS_ONE = "p_is_freed_without_a_load[whole]"
QUEUED, LOADING = (f"blocks_are_kept_while_d_waits[{how}_past_lease]" for how in ("queued", "loading"))
SHORT = 0.4  # of deadlines, where one of them has to be waited for
mistake_of_rank = functools.partial(Wrong, topology="P1D2")

UNREACHABLE = (
    "unreachable_peer_fails_only_its_request[unreachable_peer] "
    "unreachable_peer_fails_only_its_request[silent_peer]"
)
OTHER_LOADS = (
    "unreachable_peer_delays_no_other_load[unreachable_peer] "
    "unreachable_peer_delays_no_other_load[silent_peer]"
)
OTHERS = (
    "unreachable_peer_delays_no_other_request[unreachable_peer] "
    f"unreachable_peer_delays_no_other_request[silent_peer] {OTHER_LOADS}"
)
BROKEN = (
    "broken_connection_fails_only_its_request[accepted] broken_connection_fails_only_its_request[answering]"
)
TOO_LATE = (
    "load_after_the_lease_is_detected[lease_ends_before_load] "
    "load_after_the_lease_is_detected[lease_ends_during_load]"
)
STOOD_THERE = "loaded what P had written there since, and ended without an error"
HELD_UP = "delays requests that have nothing to do with it"
# cases of scenarios that come after the first aborts
LATER = (
    "aborted_load_waits_for_the_last_rank abort_before_the_load_frees_p[waiting] "
    "abort_before_the_load_frees_p[asked] p_is_freed_without_a_load[dropped] "
    "abort_at_the_end_of_a_load_frees_blocks[reported] abort_at_the_end_of_a_load_frees_blocks[known] "
    "abort_at_the_end_of_a_load_frees_blocks[computed]"
)
WRONG = [
    Wrong(
        "NeverGivesUp",
        on(UNREACHABLE, r"did not end within 12 s.*\n.*without a deadline")
        | on(BROKEN, r"was reset .* did not end within 12 s\n.*waits for an answer that cannot come"),
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "RaisesWhenUnreachable",
        on(
            f"{UNREACHABLE} {BROKEN} restarted_peer_is_a_new_engine[stranger]",
            "D raised RuntimeError .*every peer can be reached",
        ),
        blocked=f"{OTHERS} restarted_peer_is_a_new_engine[met] load_ends_when_p_dies".split(),
    ),
    Wrong("HoldsAllBack", on(OTHER_LOADS, HELD_UP), night=True),
    Wrong("OneAtATime", on("unreachable_peer_delays_no_other_load[silent_peer]", HELD_UP), night=True),
    Wrong(
        "WaitsForPeers",
        on(OTHERS, HELD_UP)
        | on("start_load_kv_does_not_wait_for_p[meeting]", r"start_load_kv of D took \d\.\d\d s"),
    ),
    Wrong(
        "WaitsForReads",
        on("start_load_kv_does_not_wait_for_p[reading]", r"start_load_kv of D took \d\.\d\d s"),
    ),
    Wrong(
        "TakesAnybody",
        on(
            "restarted_peer_is_a_new_engine[stranger]",
            "KV of the old engine loaded something that no engine has any more",
        )
        | on(TOO_LATE, STOOD_THERE),
    ),
    Wrong(
        "RemembersAddresses",
        on("restarted_peer_is_a_new_engine[met]", "for KV of the new engine ended with an error")
        | on("load_ends_when_p_dies", "the next request of D, from a new P, ended with an error"),
    ),
    Wrong("GivesUpForGood", on(BROKEN, "a later request, without resets, ended with an error")),
    Wrong("TrustsLeases", on(TOO_LATE, STOOD_THERE), night=True),
    Wrong(
        "LooksBefore", on("load_after_the_lease_is_detected[lease_ends_during_load]", STOOD_THERE), night=True
    ),
    Wrong(
        "NeverExpires",
        on("expired_lease_frees_blocks", "without a deadline"),
        blocked=f"{TOO_LATE} late_notification_is_ignored".split(),
        scale=SHORT,
        night=True,
    ),
    Wrong(
        "ExpiresEarly",
        on(
            "expired_lease_frees_blocks",
            r"request ([23]\.\d\d s after .*lease is 4|[5-7]\.\d\d s after .*lease is 8) s",
        ),
    ),
    Wrong(
        "HearsLateReaders",
        on("late_notification_is_ignored", "P raised AssertionError in _update_from_kv_xfer_finished"),
        blocked=f"{TOO_LATE} expired_lease_frees_blocks".split(),
    ),
    Wrong(
        "NoHeartbeats",
        on(
            f"{QUEUED} {LOADING}",
            "loaded what P had written into the blocks since",
        ),
        rules="KV-BYTES-001",  # and not KV-LEASE-004, a SHOULD
        night=True,
    ),
    Wrong("SpeaksWhenScheduled", on(QUEUED, "before it was scheduled"), night=True),
    Wrong("SpeaksUntilScheduled", on(LOADING, "for its load to end")),
    Wrong(
        "BelievesEveryMessage",
        on(
            "listener_survives_garbage_messages",
            r"a request of a new D ended with an error\nP logged \w+Error",
        ),
    ),
    mistake_of_rank(
        "WaitsForTheDrain",
        on(
            "abort_at_the_end_of_a_load_frees_blocks[known]",
            r"when the scheduler of D knew that its load had ended, and .* D still holds 4 blocks",
        ),
        blocked=["abort_at_the_end_of_a_load_frees_blocks[computed]"],
        scale=SHORT,
    ),
    mistake_of_rank(
        "SilentAtTheEnd",
        on(
            "abort_before_the_load_frees_p[waiting] abort_before_the_load_frees_p[asked]",
            "D aborted a request .* P still holds its blocks",
        ),
        scale=SHORT,
    ),
    mistake_of_rank(
        "SilentWithoutALoad",
        on(
            "p_is_freed_without_a_load[dropped]",
            "must not read the prefix cache, .* P still holds its blocks",
        ),
    ),
    mistake_of_rank(
        "RepeatsItself",
        on("each_rank_reports_once", "rank 1 of D named request .* 2 times in finished_recving"),
    ),
    mistake_of_rank(
        "ForgetsToSay",
        on("each_rank_reports_once", "rank 1 of D never named request"),
        scale=SHORT,
        night=True,
    ),
    mistake_of_rank(
        "NamesWhatItGaveUp",
        on("only_waiting_requests_are_reported[D]", "in finished_recving: it never waited for a load"),
        blocked=("failed_load_is_reported_once aborted_load_is_reported_at_its_end " + LATER).split(),
    ),
    mistake_of_rank(
        "NamesEveryEnd",
        on(
            "only_waiting_requests_are_reported[P]",
            "in finished_sending: request_finished did not ask to keep its blocks",
        ),
        blocked=(
            "each_rank_reports_once only_waiting_requests_are_reported[D] failed_load_is_reported_once "
            "load_ends_in_idle_steps aborted_load_is_reported_at_its_end " + LATER
        ).split(),
    ),
    mistake_of_rank(
        "RepeatsFailures", on("failed_load_is_reported_once", r"rank 1 reported block \d+ \d+ times")
    ),
    mistake_of_rank(
        "NeedsForward", on("load_ends_in_idle_steps", "it ended when D had something to compute")
    ),
    mistake_of_rank(
        "ForgetsAborted",
        on("aborted_load_is_reported_at_its_end", "ranks 0, 1 of D did not report it")
        | on("aborted_load_waits_for_the_last_rank", "rank 1 of D did not report it"),
        scale=SHORT,
    ),
    mistake_of_rank(
        "DropsAborted",
        on(
            "aborted_load_is_reported_at_its_end aborted_load_waits_for_the_last_rank",
            "reported it before its transfers had ended",
        ),
    ),
    *(Right("Right", topology=topology, night=topology == "P2D1") for topology in ("P1D1", "P1D2", "P2D1")),
    Right("NixlConnector", topology="P1D2"),
]

# Connectors that read over connections of their own to the port that P's params name; and one that takes
# every error of NIXL for progress, of which more cases fail on a busy machine.
AFTER_A_FAILURE = (
    "restarted_peer_is_a_new_engine[met] restarted_peer_is_a_new_engine[stranger] load_ends_when_p_dies"
)
TOGETHER = "unreachable_peer_fails_only_its_request[unreachable_peer]"
RESET = "load_ends_when_p_dies broken_connection_fails_only_its_request[answering]"
BREAKS = [
    Wrong(
        "WaitsForTheGone",
        on("load_ends_when_p_dies", r"the request did not end within 12 s\n.*for a peer that is gone"),
        scale=SHORT,
        night=True,
    ),
    Wrong("DiesOfAReset", on(RESET, "the request did not end within 12 s"), scale=SHORT, night=True),
    Wrong("TakesResetForTheEnd", on(RESET, "the request loaded wrong bytes"), night=True),
    Wrong("LooksUpFirst", on("load_ends_when_p_dies", "the request loaded wrong bytes"), night=True),
    # After a failure D may compute for a while what a new engine has, and not for ever.
    Wrong(
        "LeavesAloneForGood", on(AFTER_A_FAILURE, "was computed by D, although P had computed it"), night=True
    ),
    # Each of two loads that fail together is reported.
    Wrong(
        "ReportsOneFailure",
        on(
            TOGETHER,
            "a request of D loaded something, and no process listens.*ends one of them alone as failed",
        ),
    ),
    Right("Reference", passes=TOGETHER),
    Right("TcpPull", passes=f"{BROKEN} load_ends_when_p_dies {TOGETHER}", night=True),
]

FREES = "expired_lease_frees_blocks"
COPIES = f"{FREES} {TOO_LATE} {QUEUED}"  # what a P that hands over a copy must pass
LEASES = [
    Wrong(
        "RenewsTooSlowly",
        on(
            f"{QUEUED} {LOADING}",
            "D does not renew the lease in time, or P does not keep the blocks although D does",
        ),
    ),
    # frees its blocks at once, and has no copy
    Wrong(
        "tests.right_connectors.amount:CopiesNothing",
        on(FREES, "P freed the blocks of a request")
        | on("load_after_the_lease_is_detected[lease_ends_during_load]", ""),
        unsure={"late_notification_is_ignored", "load_after_the_lease_is_detected[lease_ends_before_load]"}
        | {QUEUED, LOADING},
    ),
    Right("Reference", passes=f"{COPIES} {LOADING}"),
    Right(
        "tests.right_connectors.amount:StagesCopies",
        passes=COPIES,
        unsure={"late_notification_is_ignored", LOADING},
    ),
]
cell = {"setup": "b16", "matrix": "full", "config": LEASE}
THEMES = (
    Theme(
        "peers",
        MODULE,
        "protocol",
        WRONG,
        cell=cell,
        modules=MODULES,
        runs="about by day",
        others="PASS",
        unsure={LOADS_ONE},
        own_rules=True,
        leases=LONGER,
        first=False,
    ),
    Theme(
        "breaks",
        MODULE,
        "protocol",
        BREAKS,
        cell=cell,
        modules=("protocol/peers/unreachable",),
        others=ANY,
        leases=LONGER,
        first=False,
    ),
    Theme(
        "leases",
        MODULE,
        "protocol",
        LEASES,
        cell=cell,
        modules=("protocol/peers/lease",),
        others="PASS",
        own_rules=True,
        leases=LONGER,
        first=False,
    ),
    Theme(
        "alone_for_a_while",
        MODULE,
        "protocol",
        [Right("LeavesAlone", passes=AFTER_A_FAILURE, night=True)],
        cell=cell,
        modules=("protocol/peers/unreachable",),
        others="PASS",
        leases=LONGER,
        first=False,
    ),
)
