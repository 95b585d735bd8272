"""The copy engine in host memory copies in CUDA's order, and as late as CUDA may."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_kvconform.rigs.vllm_setup.stand_ins.device import (
    LATE,
    Event,
    Stream,
    batch_memcpy,
    copies_left,
    current_stream,
    swap_blocks_batch,
    use_stream,
)


class Copy:
    """A copy of 16 numbers, put into a stream with one of the two calls."""

    def __init__(self, stream: Stream, kernel: bool):
        self.source, self.target = np.arange(1, 17, dtype=np.int64), np.zeros(16, dtype=np.int64)
        addresses = [
            np.array([value], dtype=np.int64)
            for value in (self.source.ctypes.data, self.target.ctypes.data, self.source.nbytes)
        ]
        if kernel:
            with use_stream(stream):
                swap_blocks_batch(*addresses, is_src_access_order_any=False)
        else:
            source, target, size = (array.ctypes.data for array in addresses)
            assert batch_memcpy(target, source, size, 1, 0, 0, 1, 0, stream.cuda_stream) == 0
        self.event = Event(enable_timing=True)
        self.event.record(stream)

    @property
    def made(self) -> bool:
        return bool((self.target == self.source).all())


@pytest.fixture(params=[True, False], ids=["kernel", "driver"])
def kernel(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_copy_is_made_when_its_event_was_asked_for_often(kernel: bool) -> None:
    copy = Copy(Stream(), kernel)
    assert [copy.event.query() for _ in range(LATE)] == [False] * LATE
    assert not copy.made
    assert copy.event.query()
    assert copy.made


def test_a_copy_reads_what_its_source_holds_when_it_is_made(kernel: bool) -> None:
    copy = Copy(Stream(), kernel)
    copy.source[:] = 7  # as a request to which the blocks were given too early
    copy.event.synchronize()
    assert (copy.target == 7).all()


def test_copies_that_nobody_asks_for_are_counted(kernel: bool) -> None:
    before, copy = copies_left(), Copy(Stream(), kernel)
    assert copies_left() > before
    copy.event.synchronize()
    assert copies_left() == before


def test_whoever_waits_finds_the_copy_made(kernel: bool) -> None:
    stream, other = Stream(), Stream()
    copy = Copy(stream, kernel)
    other.wait_event(copy.event)
    behind = Copy(other, kernel)
    behind.event.synchronize()
    assert copy.made and behind.made
    third = Copy(stream, kernel)
    current_stream().wait_stream(stream)  # the computation goes on behind it
    assert third.made


def test_a_stream_keeps_its_order(kernel: bool) -> None:
    stream = Stream()
    first, second = Copy(stream, kernel), Copy(stream, kernel)
    first.event.synchronize()
    assert first.made and not second.made
    second.event.synchronize()
    assert second.made
    assert first.event.elapsed_time(second.event) >= 0


def test_the_computation_is_always_up_to_date() -> None:
    event = Event()
    event.record(current_stream())
    assert event.query()
    assert Event().query()  # never recorded, as CUDA's
