"""Merge the pieces of several texts into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all sources as they come, each with its source's index.

    The next item of a source is requested once the previous item is consumed. At the end, and at
    the first error in a source, all sources are closed.
    """
    tasks = {_next_item(source): index for index, source in enumerate(sources)}
    try:
        while tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task.done()]:
                index, item = tasks.pop(task), task.result()
                if item is not None:
                    yield index, item
                    tasks[_next_item(sources[index])] = index
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _next_item(source: AsyncGenerator[Item, None]) -> "asyncio.Future[Item | None]":
    """Start to wait for the next item, which is None after the last."""
    return asyncio.ensure_future(anext(source, None))
