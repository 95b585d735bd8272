"""What D loaded of prompts that P has computed, and what D had to compute. Every rig counts this in the
scheduler's own output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pytest_kvconform.result import Evidence, Finding, NotApplicable, Violation, blocked_by
from pytest_kvconform.rigs.context import declared_amount
from pytest_kvconform.rigs.engine.messages import EngineFacts
from pytest_kvconform.subject import Subject
from pytest_kvconform.suite._load_amount import HandedOver, due_end, load_is_due

RULE, ALL_WHOLE_BLOCKS = "KV-HANDOVER-002", "KV-HANDOVER-003"
STORE_CHECK = (
    "do lookup and save use one key, also if the prompt ends one token after a block?",
    "is the whole prompt saved, also if it was computed in chunks?",
    "are blocks kept (request_finished returns True) until a background save ends?",
)


class Loads:
    """The loads of one hand-over, and what they are compared with."""

    def __init__(
        self,
        subject: Subject,
        requests: Sequence[HandedOver],
        engines: tuple[EngineFacts, EngineFacts],
        loads_longer: Callable[[], bool],
        remark: str = "",
        drafts: bool = False,
    ):
        """`engines`: P and D. `loads_longer`: whether D loads something of the cell's longest prompt.
        `remark`: what is unusual about the cell, for the diagnosis where D loads nothing. `drafts`: whether
        the engines have a draft model. A store may drop the last block then, see `due_end_of`.
        """
        self.subject, self.requests, self.loads_longer = subject, requests, loads_longer
        self.remark = remark and f"; {remark}"
        self.sizes = engines[0].block_size, engines[1].block_size
        self.store = subject.is_store
        self.drops = self.store and drafts

    @property
    def block(self) -> int:
        """Tokens of a block of D."""
        return self.sizes[1]

    def check(self) -> None:
        """Check KV-HANDOVER-002. Raises Violation."""
        for r in self.requests:
            if r.decode.external_tokens:
                self._check_load(r)
            elif load_is_due(self.subject, r, self.block, self.drops) and (
                declared_amount(self.subject) or not self.loads_longer()
            ):
                raise Violation(self._nothing(r))
            check_computed_once(r)

    def are_due(self, r: HandedOver) -> bool:
        """Whether D should load something of a prompt."""
        return load_is_due(self.subject, r, self.block, self.drops)

    def _lacks_a_block(self, r: HandedOver) -> bool:
        return self._whole_blocks(r, self.block) > r.decode.local_tokens

    def _whole_blocks(self, r: HandedOver, size: int) -> int:
        """Return how many tokens of a prompt are in whole blocks that D should load or have."""
        return whole_blocks(r.length, size) - self.drops * size

    def _too_short(self, r: HandedOver) -> str:
        """Return in words why it is no mistake that D loaded nothing for a request."""
        declared = declared_amount(self.subject)
        if not self._lacks_a_block(r):
            has = "D has every whole block" if r.decode.local_tokens else "there is no whole block"
            return f"D loaded nothing of the {r.length} tokens of {r.name}: {has} before the last token"
        if declared and not load_is_due(self.subject, r, self.block, self.drops):
            return f"{r.name} of {r.length} tokens is too short for a load: {declared} is declared"
        return (
            f"D loaded nothing for {r.name} of {r.length} tokens, {r.decode.local_tokens} of them in D's own "
            f"cache, and computed it, but D loads longer prompts: see {ALL_WHOLE_BLOCKS}"
        )

    def require_some(self) -> None:
        """Raise NotApplicable if D loaded nothing. `check` has shown that this is right."""
        if not any(r.decode.external_tokens for r in self.requests):
            due = [r for r in self.requests if self._lacks_a_block(r)]
            refused = bool(due) and not declared_amount(self.subject)
            raise NotApplicable(self._too_short((due or self.requests)[0]), refused=refused)

    def evidence(self, bytes_moved: int) -> Evidence:
        """Return what was counted. Raises NotApplicable if D lacks whole blocks and loaded nothing, which is
        right.
        """
        if any(map(self._lacks_a_block, self.requests)):
            self.require_some()
        return Evidence(
            looked_at=sum(r.length for r in self.requests),
            unit="tokens",
            bytes_moved=bytes_moved,
            external_tokens=sum(r.decode.external_tokens for r in self.requests),
            computed_tokens=sum(r.decode.computed_tokens for r in self.requests),
        )

    def check_all_whole_blocks(self, case: str) -> None:
        """Check KV-HANDOVER-003. `case`: the case that checks KV-HANDOVER-002. Raises Violation; Blocked if
        that case fails; NotApplicable if the connector declares how much it loads.
        """
        if declared := declared_amount(self.subject):
            raise NotApplicable(f"{declared} is declared, and {RULE} holds the connector to it")
        try:
            self.check()
        except Violation as broken:
            raise blocked_by(case, refused=bool(broken.finding.declined)) from None
        size = math.lcm(*self.sizes)
        for r in self.requests:
            if r.decode.first_computed < (due := self._whole_blocks(r, size)):
                raise Violation(self._less(r, due, size))

    # ---- findings ------------------------------------------------------------------------------------------

    def _check_load(self, r: HandedOver) -> None:
        first, local = r.decode.first_computed, r.decode.local_tokens
        if first >= r.length - 1:
            return
        if first < min(local + r.decode.external_tokens, whole_blocks(r.length, self.block)):
            then = "recomputed the prompt" if first >= 0 else "computed nothing"
            raise Violation(self._finding(r, f"the load failed and D {then}", declined=False))
        declared = declared_amount(self.subject)
        if declared and first < (due := due_end(self.subject, r, self.block, self.drops)):
            raise Violation(
                self._finding(
                    r,
                    f"get_num_new_matched_tokens announced less than the connector declares: {declared}",
                    f"D should compute no token before token {due}",
                )
            )
        step = self.subject.load_granularity
        if step and first < whole_blocks(r.length, self.block) and first % step and (first - local) % step:
            diagnosis = f"the load is no multiple of what the connector declares: {declared}"
            ends = f"the load ended before token {first}, which is no multiple of {step}"
            raise Violation(self._finding(r, diagnosis, ends, declined=False))

    def _nothing(self, r: HandedOver) -> Finding:
        # in a rendezvous nobody gets what P returned
        if not self.store and self.subject.handover != "rendezvous" and not r.prefill.handed_over:
            return Finding(
                rule=RULE,
                happened=f"P finished {r.name} and returned no kv_transfer_params",
                diagnosis="request_finished returned None for its params, so D does not know where the KV is",
                declined="P handed nothing over",
            )
        due = due_end(self.subject, r, self.block, self.drops)
        differs = f"D should compute no token before token {due}"
        if declared := declared_amount(self.subject):
            differs += f": {declared} is declared"
        diagnosis = (
            "get_num_new_matched_tokens announced nothing of a prompt that was saved"
            if self.store
            else "D recomputed the prompt: get_num_new_matched_tokens announced nothing"
        )
        return self._finding(r, diagnosis + self.remark, differs)

    def _less(self, r: HandedOver, due: int, size: int) -> Finding:
        whole = "the whole blocks that were saved" if self.store else "P had"
        nothing = not r.decode.external_tokens
        return self._finding(
            r,
            f"get_num_new_matched_tokens announced {'nothing' if nothing else f'less than {whole}'}",
            f"D should compute no token before token {due}, the end of the last "
            f"{'but one ' if self.drops else ''}whole block of {size} tokens",
            rule=ALL_WHOLE_BLOCKS,
        )

    def _finding(
        self, r: HandedOver, diagnosis: str, differs: str = "", declined: bool = True, rule: str = RULE
    ) -> Finding:
        """Describe what D computed of one request. `declined`: D used no wrong bytes."""
        gave = r.decode.external_tokens
        saved = ": P had computed and saved the same prompt" if self.store else ""
        how = f"D loaded {gave} tokens" if gave else "D loaded nothing"
        return Finding(
            rule=rule,
            happened=f"D computed {r.decode.computed_tokens} of {r.length} prompt tokens of {r.name}, from "
            f"token {r.decode.first_computed} on{saved}; {gave} tokens came from the "
            f"{'store' if self.store else 'connector'} and {r.decode.local_tokens} from D's own cache",
            differs=differs,
            diagnosis=diagnosis,
            check=STORE_CHECK if self.store else (),
            signature="D recomputed what P had",
            declined=f"{how}, and computed the rest of the prompt" if declined else "",
        )


def whole_blocks(length: int, block_size: int) -> int:
    """Return how many tokens of a prompt are in whole blocks before the last token, from which D samples."""
    return (length - 1) // block_size * block_size


def check_computed_once(r: HandedOver) -> None:
    """Raise Violation unless D computed each token of the prompt's rest once.

    The rest begins with the first token that D computed, and ends with the prompt.
    """
    if r.decode.computed_tokens != r.length - r.decode.first_computed:
        raise Violation(
            Finding(
                rule=RULE,
                happened=f"D computed {r.decode.computed_tokens} prompt tokens of {r.name} "
                f"from token {r.decode.first_computed} on, of {r.length} tokens: some of them twice",
            )
        )
