"""What holds for every answer of a hook of the scheduler half: vLLM can use it, and it changes nothing."""

from __future__ import annotations

import pickle
from typing import Any

from pytest_kvconform.result import Finding, Violation, first_line, message_of, repr_of
from pytest_kvconform.rigs.history import Recorder
from pytest_kvconform.rigs.vllm_setup.answers import kept, params_after_the_way, unpacked, why_no_truth
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED

# types whose whole value repr shows; lists of block ids and tokens are long
_PLAIN = {int, str, bytes, float, bool, type(None)}


class CheckingRecorder(Recorder):
    """Records the calls of a scheduler half, and raises Violation at an answer before vLLM uses it."""

    def checked(self, hook: str, args: tuple[Any, ...], arguments: dict[str, Any], answer: Any) -> Any:
        """An answer as vLLM unpacks it. Raises Violation if vLLM cannot use it."""
        if hook == "get_num_new_matched_tokens":
            check_match(args[0], arguments["num_computed_tokens"], answer := unpacked(answer))
        elif hook in FINISHED:
            check_finished(hook, args[0], answer := unpacked(answer))
        elif hook == "build_connector_meta":
            check_metadata(answer, self._before, content(args[0]))
        return answer

    def _arguments(self, name: str, values: list[Any]) -> dict[str, Any]:
        if name == "build_connector_meta":
            self._before = content(values[0])
        return super()._arguments(name, values)

    def _keep(
        self, name: str, args: tuple[Any, ...], arguments: dict[str, Any], result: Any, took: float
    ) -> Any:
        return super()._keep(name, args, arguments, self.checked(name, args, arguments, result), took)


def content(scheduler_output: Any) -> dict[str, str]:
    """The fields of a SchedulerOutput, as text.

    Two fields are left out: one that the connector may change (new_block_ids_to_zero, see
    build_connector_meta in base.py), and one that is a function.
    """
    left_out = ("new_block_ids_to_zero", "kv_connector_block_state", "kv_connector_metadata")
    return {name: _text(value) for name, value in vars(scheduler_output).items() if name not in left_out}


def _text(value: Any) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return (
            repr([*value])
            if _PLAIN.issuperset(map(type, value))
            else "[" + ", ".join(map(_text, value)) + "]"
        )
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__ + _text(
            {name: getattr(value, name) for name in value.__dataclass_fields__}
        )
    return repr(value)


def check_match(request: Any, computed: int, answer: Any) -> None:
    """Raise Violation unless the answer of get_num_new_matched_tokens is one that vLLM can use."""
    asked = (
        f"get_num_new_matched_tokens(request of {request.num_tokens} tokens, {computed}) returned "
        f"{repr_of(answer)}"
    )
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _broken("KV-MATCH-001", f"{asked}, and vLLM unpacks (tokens or None, asynchronous)")
    tokens, asynchronous = answer
    if tokens is None:
        return  # vLLM skips the request in this step, and does not look at the second element
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise _broken(
            "KV-MATCH-001", f"{asked}: the first element is neither None nor an int that is 0 or more"
        )
    if wrong := why_no_truth(asynchronous):
        raise _broken("KV-MATCH-001", f"{asked}: vLLM tests the truth of the second element, which {wrong}")
    if tokens > request.num_tokens - computed:
        raise _broken(
            "KV-MATCH-002",
            f"{asked}: there are only {request.num_tokens - computed} tokens behind what is computed",
        )
    if tokens == 0 and asynchronous:
        raise _broken(
            "KV-MATCH-003", f"{asked}: an asynchronous load of nothing, whose end no worker would report"
        )


def check_metadata(metadata: Any, before: dict[str, str], after: dict[str, str]) -> None:
    """Raise Violation unless there is metadata that survives pickle, and the SchedulerOutput is unchanged."""
    if metadata is None:
        raise _broken(
            "KV-META-001", "build_connector_meta returned None, and the worker asserts that there is metadata"
        )
    try:
        pickle.loads(pickle.dumps(metadata))
    except Exception as error:
        raise _broken(
            "KV-META-001",
            f"a {type(metadata).__name__} of build_connector_meta does not survive pickle: "
            f"{type(error).__name__}: {first_line(error, 160)}",
        ) from None
    if before != after:
        field = next(name for name in after if before.get(name) != after[name])
        raise _broken(
            "KV-META-002",
            f"build_connector_meta changed scheduler_output.{field}",
            f"before {before.get(field, 'absent')[:120]}, after {after[field][:120]}",
        )


def check_finished(hook: str, request: Any, answer: Any) -> None:
    """Raise Violation unless vLLM can use the answer of request_finished, and its params survive JSON."""
    returned = f"{hook}({request.status.name}) returned {_short(answer)}"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _broken("KV-FINISH-001", f"{returned}, and vLLM unpacks (keep the blocks, params or None)")
    try:
        kept(answer[0])
    except TypeError as error:
        raise _broken(
            "KV-FINISH-001", f"{returned}: vLLM combines the first element with a bool: {message_of(error)}"
        ) from None
    params = answer[1]
    if params is None:
        return
    if not isinstance(params, dict):
        raise _broken(
            "KV-FINISH-002", f"{returned}: params are a {type(params).__name__}, and vLLM writes into a dict"
        )
    try:
        params_after_the_way(params)
    except (TypeError, ValueError) as error:
        raise _broken(
            "KV-FINISH-002",
            f"{returned}: they reach D through msgpack and JSON, which refuse them: {message_of(error)}",
        ) from None


def _short(value: Any) -> str:
    text = repr_of(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _broken(rule: str, happened: str, differs: str = "") -> Violation:
    return Violation(Finding(rule=rule, happened=happened, differs=differs))
