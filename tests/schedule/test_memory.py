"""Test the memory that calls of one type share."""

import gc
import threading
import weakref

import pytest
from torch.nn import Identity

from hf_speculate.schedule import (
    AdaptiveSchedule,
    MemoryStore,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    ScheduleMemory,
)

DRAFT = Identity()


def test_types_and_drafts_have_separate_memories():
    store = MemoryStore()
    memory = store.get(DRAFT, "a", ScheduleMemory)
    assert store.get(DRAFT, "a", ScheduleMemory) is memory
    others = [store.get(DRAFT, "b", ScheduleMemory), store.get(None, "a", ScheduleMemory)]
    others.append(store.get(Identity(), "a", ScheduleMemory))
    assert all(other is not memory for other in others)


def test_memory_of_a_target_is_found_again():
    target = Identity()
    assert MemoryStore.of(target) is MemoryStore.of(target)
    assert MemoryStore.of(target) is not MemoryStore.of(Identity())


def test_memory_goes_with_its_draft():
    store, draft = MemoryStore(), Identity()
    memory = weakref.ref(store.get(draft, "a", ScheduleMemory))
    del draft
    gc.collect()
    assert memory() is None


def test_store_keeps_the_64_types_used_last():
    store = MemoryStore()
    memories = [store.get(DRAFT, call_type, ScheduleMemory) for call_type in range(64)]
    assert store.get(DRAFT, 0, ScheduleMemory) is memories[0]  # now the newest
    store.get(DRAFT, 64, ScheduleMemory)
    assert store.get(DRAFT, 0, ScheduleMemory) is memories[0]
    assert store.get(DRAFT, 2, ScheduleMemory) is memories[2]
    assert store.get(DRAFT, 1, ScheduleMemory) is not memories[1]


@pytest.mark.parametrize("num_threads", [4])
def test_threads_share_a_memory(num_threads):
    memory, errors = ScheduleMemory(), []

    def decode() -> None:
        try:
            schedule = AdaptiveSchedule(memory, 10)
            schedule.begin(4.0, 64)
            for number in range(200):
                choice = schedule.choose([RowAhead(0, 300 - number)], 1, 10)
                num = choice.num_draft_tokens
                rows = [RowOutcome(0, num, num // 2, num // 2 + 1)]
                schedule.update(
                    RoundOutcome(
                        rows,
                        1,
                        num,
                        choice.num_model_tokens,
                        1 if num else 0,
                        0.1 * num,
                        1 + 0.01 * num,
                    )
                )
        except Exception as error:  # noqa: BLE001 - any of them fails the test
            errors.append(error)

    threads = [threading.Thread(target=decode) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert memory.costs.plain_s(1) == pytest.approx(1.0)
