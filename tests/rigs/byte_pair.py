"""P and D of the byte rig for tests, and the steps of a hand-over."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from pytest_kvconform.rigs.bytes.handle import ByteEngineHandle
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec, ByteRequest, Check
from pytest_kvconform.rigs.engine.messages import Output
from pytest_kvconform.rigs.processes.ports import free_port

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}
PATIENCE_S = 30.0
_names = itertools.count()


def prompt(length: int, seed: int = 0, shared: int = 0) -> tuple[int, ...]:
    """Prompts agree in the first `shared` tokens with the prompt of seed 0 and differ at the next."""
    return tuple(5 + (i * i + i * 7919 + (0 if i < shared else seed * 31)) % 480 for i in range(length))


class Pair:
    """P and D of one geometry. `requests` remembers who owns which prefix, as a run of the suite does."""

    def __init__(
        self,
        address: str,
        geometry: str,
        topology: tuple[int, int] = (1, 1),
        blocks: tuple[int, int] = (24, 30),
        **more: Any,
    ):
        roles = more.pop("roles", "PD")
        self.requests: list[tuple[int, ...]] = []
        self.engines = [
            ByteEngineHandle(
                address,
                f"byte-{side}-{next(_names)}",
                self._spec(role, side, geometry, tp, number, dict(more)),
                20.0,
                60.0,
            )
            for role, side, tp, number in zip(roles, "PD", topology, blocks, strict=True)
        ]
        self.p, self.d = self.engines
        for engine in self.engines:
            engine.wait_ready()

    def _spec(
        self, role: str, side: str, geometry: str, tp: int, number: int, more: dict[str, Any]
    ) -> ByteEngineSpec:
        transfer = {"kv_role": "kv_producer" if side == "P" else "kv_consumer"} | more.pop("transfer", NIXL)
        return ByteEngineSpec(
            role=role,
            geometry=geometry,
            tensor_parallel=tp,
            num_blocks=number,
            kv_transfer_config=transfer,
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            **({"block_size": 32, "max_model_len": 640} | more),
        )

    def request(
        self, tokens: tuple[int, ...], side: str, params: dict[str, Any] | None = None, max_tokens: int = 1
    ) -> ByteRequest:
        """A request with the owners of its tokens."""
        if tokens not in self.requests:
            self.requests.append(tokens)
        number = self.requests.index(tokens)
        owners = np.full(len(tokens), number)
        for other in reversed(range(number)):
            same = next(
                (i for i, (a, b) in enumerate(zip(tokens, self.requests[other], strict=False)) if a != b),
                None,
            )
            owners[: min(len(tokens), len(self.requests[other])) if same is None else same] = other
        name = f"{number}-{side}-{next(_names)}"
        return ByteRequest(
            id=name,
            tokens=tokens,
            max_tokens=max_tokens,
            kv_transfer_params=params,
            owners=owners,
            number=number,
            watch=side == "d",
        )

    def prefill(self, *prompts: tuple[int, ...]) -> list[dict[str, Any] | None]:
        """Let P compute prompts together. Returns what it hands over for each."""
        requests = [self.request(tokens, "p", PREFILL) for tokens in prompts]
        for request in requests:
            self.p.add(request)
        ends = self.run(self.p, [request.id for request in requests])
        return [ends[request.id].kv_transfer_params for request in requests]

    def decode(
        self, prompts: list[tuple[int, ...]], params: list[dict[str, Any] | None], max_tokens: int = 1
    ) -> list[str]:
        """Hand requests to D and let it answer them. Returns their ids."""
        requests = [
            self.request(tokens, "d", handed, max_tokens)
            for tokens, handed in zip(prompts, params, strict=True)
        ]
        for request in requests:
            self.d.add(request)
        self.run(self.d, [request.id for request in requests])
        return [request.id for request in requests]

    def run(self, engine: ByteEngineHandle, names: list[str]) -> dict[str, Output]:
        """Step both engines until these requests of one have ended."""
        ends: dict[str, Output] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(ends) < len(names):
            ends |= {output.id: output for output in engine.step().outputs if output.finish}
            next(other for other in self.engines if other is not engine).step()
            assert time.monotonic() < deadline, f"{sorted(set(names) - ends.keys())} did not end"
        return ends

    def hand_over(self, *prompts: tuple[int, ...]) -> list[tuple[Check, ...]]:
        """From prompts to checks, one tuple per request; then wait until no block is held."""
        names = self.decode(list(prompts), self.prefill(*prompts))
        checks = [self.d.pop_checks(name) for name in names]
        self.release()
        return checks

    def release(self) -> None:
        """Step both engines until neither holds a block."""
        deadline = time.monotonic() + PATIENCE_S
        while any(
            u.free_blocks != u.total_blocks or u.unfinished
            for u in [engine.usage() for engine in self.engines]
        ):
            for engine in self.engines:
                engine.step()
            assert time.monotonic() < deadline, [engine.usage() for engine in self.engines]

    def audit(self) -> list[Check]:
        """The checks of either pool that found something wrong."""
        return [check for engine in self.engines for check in engine.audit() if not check.clean]

    def end(self) -> None:
        for engine in self.engines:
            engine.end()
