"""Merges the pieces of several texts into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all sources as they come, each with its source's index.

    A source is asked for its next item once the one before is taken. All sources are closed at the end, and at the
    first error of one of them.
    """
    asked = {_ask(source): index for index, source in enumerate(sources)}
    try:
        while asked:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in asked if task.done()]:
                index, item = asked.pop(task), task.result()
                if item is not None:
                    yield index, item
                    asked[_ask(sources[index])] = index
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _ask(source: AsyncGenerator[Item, None]) -> "asyncio.Future[Item | None]":
    """The next item, None after the last."""
    return asyncio.ensure_future(anext(source, None))
