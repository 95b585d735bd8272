"""The scheduler host process: the configurations that cases of one cell share, and the fork of each case.

A case runs in a child with a pipe: see case_process.py. If a child dies or does not end in time, the finding
names the signal, the connector's hook that was running, and the last lines of the log.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import signal
import traceback
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from model_matrix import Geometry, load_geometries
from model_matrix import Side as Memory
from pytest_kvconform.case_outcome import CaseEnd, end_of
from pytest_kvconform.kv_config import with_folder
from pytest_kvconform.result import (
    Blocked,
    Cell,
    Finding,
    HarnessError,
    NotApplicable,
    ProcessKilled,
    Violation,
)
from pytest_kvconform.rigs.bytes.messages import PACKED, ByteEngineSpec
from pytest_kvconform.rigs.cluster.scripts.failures import DIES, NOT_SHOWN, RAISES
from pytest_kvconform.rigs.context import SubjectFacts
from pytest_kvconform.rigs.missing import waits_for_server
from pytest_kvconform.rigs.processes import linux
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.hangs import BUSY, DEVICE, QUIET, UNSTARTED, RunningHook
from pytest_kvconform.rigs.processes.logs import last_lines, text_since
from pytest_kvconform.rigs.processes.stacks import (
    COLLECTING,
    Frame,
    last_stacks,
    most_telling_stack,
    place_of_del,
    stack_of,
)
from pytest_kvconform.rigs.processes.zygote import GONE_S, has_ended
from pytest_kvconform.rigs.scheduler.case_process import serve_one_case
from pytest_kvconform.rigs.scheduler.rig import BLOCKS, first_block, longer
from pytest_kvconform.rigs.scheduler.violations import (
    DECLINING,
    death_of,
    hook_in,
    is_in_connector,
    waited_in_vain,
    write_stacks,
)
from pytest_kvconform.rigs.vllm_setup.engine_config import (
    adopt_kv_cache_config,
    geometry_config,
    kv_cache_configs,
)
from pytest_kvconform.rigs.vllm_setup.kv_cache_specs import NO_STATES, unified_in_vain
from pytest_kvconform.rigs.vllm_setup.overrides import keep_configured_limits
from pytest_kvconform.subject import Subject

REQUEST_TOKENS = 8192  # tokens of a request
LEAVE_S, LEAVE_AGAIN_S = 5.0, 0.2  # for the shutdown of a worker half; after one that did not end
WAITS = "an object waits in its __del__, such as a zmq.Context that shutdown() has not closed"


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases of one cell have in common."""

    cell: Cell
    subject: Subject
    tensor_parallel: dict[str, int]  # role -> ranks
    memory: dict[str, Memory]  # role -> block size, layout, dtype
    transfer: dict[str, dict[str, Any]]  # role -> fields of vLLM's KVTransferConfig
    # For VLLM_NIXL_SIDE_CHANNEL_PORT, one a side, and the last two of store_engine.spare_port. No process
    # listens while there is no worker half.
    ports: tuple[int, ...]
    folder: str  # under which a store may save
    facts: SubjectFacts
    timeout_scale: float  # of the waits inside a case; never less than 1


def serve(connection: Connection, spec: HostSpec) -> None:
    """Run the host in a child of the zygote. Sends ("ready", None) or ("failed", CaseEnd), then answers the
    arguments of each `Host.run` with what it returns, until the connection ends.
    """
    try:
        host = Host(spec)
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", _not_configured(spec, error)))
        return
    gc.freeze()
    # What this process wrote to is in small pages again: 0.4 s, and half of what a fork takes.
    linux.collapse_into_huge_pages()
    connection.send(("ready", None))
    while True:
        try:
            question = connection.recv()
        except EOFError:
            host.reap()  # the last case
            return
        connection.send(host.run(*question))


def _not_configured(spec: HostSpec, error: Exception) -> CaseEnd:
    """The end of every case of a cell for which vLLM builds no configuration with this connector."""
    message = end_of(error).reason[:300]  # its class and first line
    if not spec.facts.supports_hma and unified_in_vain(stack_of(error)):
        return end_of(NotApplicable(f"{spec.subject.connector} {NO_STATES}: {message}"))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if spec.subject.module and any(spec.subject.module.rpartition(".")[2] in file for file in files):
        happened = f"vLLM builds no configuration with this connector: {message}"
        declined = message if isinstance(error, DECLINING) else ""
        return end_of(Violation(Finding(rule=RAISES, happened=happened, declined=declined)))
    return end_of(HarnessError(f"vLLM's configuration for {spec.cell} could not be built: {message}"))


class Host:
    """Configurations and KV cache layouts of a cell, for both roles, and the fork of each case."""

    def __init__(self, spec: HostSpec):
        from vllm.v1.structured_output import StructuredOutputManager

        self.spec = spec
        self.hook = RunningHook()
        self._configs: dict[tuple[str, bool], Any] = {}
        self._specs: dict[tuple[str, bool], dict[str, Any]] = {}
        self._kv_configs: dict[tuple[str, bool, int], tuple[Any, Any, int]] = {}
        self._spare: tuple[int, Connection] | None = None  # a child that waits for the next case
        self._killed: list[int] = []  # children that are still to be reaped
        self._leaving: list[tuple[int, Deadline]] = []  # children that shut their worker half down
        self._leave_s = LEAVE_S
        self._waited = False  # a case has waited in vain for the end of something
        keep_configured_limits(everywhere=True)
        for role in "PD":
            self._make(role, True)
            for index in range(3):  # as the first, second or third side, which a fork inherits
                blocks = first_block(spec.subject, index) + BLOCKS * longer(spec.subject) + 1
                self.kv_config(role, self.vllm_config(role, max_seqs=1), blocks)
        self.structured_output = StructuredOutputManager(self._configs["D", True])  # no request uses it

    # ---- what sides are made of ----------------------------------------------------------------------------

    def vllm_config(
        self,
        role: str,
        policy: str = "fail",
        max_seqs: int = 16,
        prefix_caching: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Any:
        """A VllmConfig of its own for one side: copied where sides differ, shared where they do not."""
        from vllm.config import KVTransferConfig

        self._make(role, prefix_caching)
        config = copy.copy(self._configs[role, prefix_caching])
        config.cache_config = copy.copy(config.cache_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.scheduler_config.max_num_seqs = max_seqs
        config.kv_transfer_config = KVTransferConfig(**self.transfer(role, policy, extra))
        return config

    def transfer(
        self, role: str, policy: str = "fail", extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The fields of a KVTransferConfig of this case. `extra`: further keys of its extra config."""
        ours = self.spec.folder  # each case has a folder of its own
        fields = with_folder(self.spec.transfer[role], ours, f"{ours}-{os.getpid()}")
        fields |= {"kv_load_failure_policy": policy}
        more = fields.get("kv_connector_extra_config", {}) | dict(extra or {})
        return fields | ({"kv_connector_extra_config": more} if more else {})

    def single_rank_config(self, role: str, geometry: Geometry | None = None) -> Any:
        """A VllmConfig of one rank. `geometry`: None: that of the cell."""
        geometry = geometry or load_geometries()[self.spec.cell.family]
        return configuration(geometry, self.spec.memory[role], 1, self.transfer(role), True)

    def kv_config(self, role: str, config: Any, num_blocks: int) -> Any:
        """The KVCacheConfig of a scheduler with so many blocks, the null block included.

        Source: v1/core/kv_cache_utils.py.
        """
        prefix_caching, tp = config.cache_config.enable_prefix_caching, self.spec.tensor_parallel[role]
        config.cache_config.num_gpu_blocks_override = num_blocks
        key = role, prefix_caching, num_blocks
        if key not in self._kv_configs:
            fitted = copy.copy(config)
            fitted.cache_config = copy.copy(config.cache_config)
            fitted.model_config = copy.copy(config.model_config)
            fitted.model_config.original_max_model_len = -1  # vLLM: as many tokens as the pool holds
            made, of_rank = kv_cache_configs(fitted, self._specs[role, prefix_caching], tp)
            if tp == 1:
                adopt_kv_cache_config(fitted.cache_config, of_rank)
            self._kv_configs[key] = made, fitted.cache_config, fitted.model_config.max_model_len
        kv_config, cache_config, max_model_len = self._kv_configs[key]
        config.cache_config, config.model_config = copy.copy(cache_config), copy.copy(config.model_config)
        config.model_config.max_model_len = max_model_len
        return kv_config

    def note_running_hook(self, hook: str) -> None:
        """Note which hook of the connector runs now; "": none."""
        self.hook.note(hook)

    def running_hook(self) -> str:
        """The hook of the connector that runs now, in the process of a case or of an engine; "": none."""
        return self.hook.name().removeprefix(DEVICE)

    def _make(self, role: str, prefix_caching: bool) -> None:
        from pytest_kvconform.rigs.bytes.layers import specs_of_rank

        if (role, prefix_caching) in self._configs:
            return
        geometry, tp = load_geometries()[self.spec.cell.family], self.spec.tensor_parallel[role]
        memory = self.spec.memory[role]
        config = configuration(geometry, memory, tp, self.spec.transfer[role], prefix_caching)
        self._configs[role, prefix_caching] = config
        # with one rank the worker and the scheduler share the configuration, as in vLLM
        of_worker = config if tp == 1 else copy.deepcopy(config)
        self._specs[role, prefix_caching] = specs_of_rank(
            of_worker, geometry, engine_spec(self.spec, role, of_worker)
        )

    # ---- cases ---------------------------------------------------------------------------------------------

    def run(
        self, question: tuple[str, str, str, Any, Any], own_reports: bool, deadline_s: float, start_s: float
    ) -> tuple[CaseEnd, str]:
        """Run one case in a child: see case_process.py. Returns its end, and how it was late: see
        RunningHook.wait.
        """
        module, *_ = question
        importlib.import_module(module)  # so that the next child has it
        self.reap()
        pid, line = self._spare or self._fork()
        log_from = os.lseek(2, 0, os.SEEK_END)
        self.note_running_hook("")
        self.hook.judge()
        with contextlib.suppress(OSError):
            line.send((*question, self._waited, own_reports))
        self._spare, self._killed = self._fork(), [pid]  # the next child, while this one works
        limits = deadline_s, (pid, os.getpid()), start_s
        end, leaves, (late, waited_s) = None, False, self.hook.wait(line, *limits)
        if not late:
            with contextlib.suppress(Exception):  # the child has ended, or its message cannot be read
                end, leaves = line.recv()
        else:
            log_from = write_stacks(self.hook, pid, log_from, self.spec.facts)
        line.close()
        self._waited |= end is not None and waited_in_vain(end, own_reports)
        if leaves:
            assert end is not None
            self._killed, self._leaving = [], [(pid, Deadline(self._leave_s, (pid,)))]
            return end, late
        hangs = end is None and not late and not has_ended(pid, Deadline(GONE_S, (pid,)))
        _kill(pid)
        if end is not None:
            return end, late
        self._killed, status = [], os.waitpid(pid, 0)[1]
        if not late and status == signal.SIGKILL and not hangs:
            return end_of(ProcessKilled(f"the process of a case of {self.spec.cell}", pid)), late
        if late in (QUIET, UNSTARTED) and self.hook.is_start() and waits_for_server(_last_stack(log_from)):
            waits = "its start waits for a server: start it, or configure its address"
            return end_of(Blocked(f"{self.spec.subject.connector} cannot start here: {waits}")), late
        if late == BUSY:
            hooks = "the case still calls hooks of the connector: try --kv-timeout-scale"
            return end_of(Blocked(f"after {waited_s:g} s {hooks}")), late
        how = death_of(status) if not late else f"did not end within {waited_s:g} s"
        if late and self.hook.name() == DEVICE:
            return end_of(Blocked(f"vLLM's worker {how}, in {DEVICE}: try fewer workers with -n")), BUSY
        found, text = self._died(how, log_from, bool(late)), text_since(log_from)
        if late and not is_in_connector(text, self.running_hook(), self.spec.facts):
            return end_of(Blocked(f"{found.happened}{NOT_SHOWN}")), BUSY
        return end_of(Violation(found)), late

    def reap(self) -> None:
        """Wait for the ends of earlier children.

        A worker half that is being shut down may hold the port that the next case needs.
        """
        for pid, deadline in self._leaving:
            if not has_ended(pid, deadline):
                self._leave_s = LEAVE_AGAIN_S
            _kill(pid)
            self._killed.append(pid)
        self._leaving = []
        for pid in self._killed:
            os.waitpid(pid, 0)
        self._killed = []

    def _fork(self) -> tuple[int, Connection]:
        """A child that waits for one case: its pid, and the line to it."""
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            ours.close()
            serve_one_case(self, theirs)
        theirs.close()
        return pid, ours

    def _died(self, how: str, log_from: int, hangs: bool) -> Finding:
        text = text_since(log_from)
        hook = hook_in(text, self.running_hook())
        ours = f"{os.sep}pytest_kvconform{os.sep}"
        # of the thread that died or hangs: other threads of a connector may only wait
        frame = next(((file, line) for file, line, _ in last_stacks(text) if ours not in file), None)
        where = f" ({frame[0].rpartition('/')[2]}:{frame[1]})" if frame else ""
        in_del = place_of_del(text)
        place, diagnosis = in_del or "outside of any hook", WAITS if in_del and hangs else ""
        if hook and in_del != COLLECTING:
            place, diagnosis = f"in {hook}", f"the connector's {hook} ends or stops the engine's process"
        process = (hangs and self.hook.judged()) or "the process of vLLM's scheduler"
        happened = f"{process} {how}, {place}{where}"
        return Finding(rule=DIES, happened=happened, diagnosis=diagnosis, log=last_lines(text))


def configuration(
    geometry: Geometry,
    memory: Memory,
    tp: int,
    transfer: dict[str, Any],
    prefix_caching: bool,
) -> Any:
    """vLLM's configuration of one engine, as an engine of the byte rig has it (see bytes/process.py)."""
    config = geometry_config(
        geometry,
        block_size=memory.block,
        conv_layout=memory.conv,
        cache_dtype=memory.dtype,
        max_model_len=REQUEST_TOKENS,
        max_batched_tokens=REQUEST_TOKENS,
        max_seqs=16,
        tensor_parallel=tp,
        kv_transfer=transfer,
        prefix_caching=prefix_caching,
    )
    config.cache_config.kv_cache_layout = memory.layout or None  # vLLM chooses one if none is there
    return config


def engine_spec(spec: HostSpec, role: str, config: Any) -> ByteEngineSpec:
    """What the stand-ins for the layers of an engine's worker are made of. `config`: its VllmConfig."""
    memory = spec.memory[role]
    return ByteEngineSpec(
        role=role,
        geometry=spec.cell.family,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        block_size=memory.block,
        num_blocks=0,  # the configuration has it
        kv_transfer_config={},
        environment={},
        max_model_len=config.model_config.max_model_len,
        cache_dtype=memory.dtype,
        conv_layout=memory.conv,
        prefix_caching=config.cache_config.enable_prefix_caching,
        content=PACKED,
        kernel_block=memory.kernel,
        device=spec.facts.device,
    )


def _kill(pid: int) -> None:
    """Kill a child with the processes that the connector has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # the child does not lead a group yet


def _last_stack(since: int) -> tuple[Frame, ...]:
    """The last stack that the child wrote, innermost first."""
    return most_telling_stack(text_since(since), ("__init__",))
