"""Items made ahead are the same items, and their thread does not outlive its use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from train.ahead import ahead


def workers() -> int:
    return sum(thread.name == "ahead" for thread in threading.enumerate())


def test_items_are_lost_or_swapped() -> None:
    assert list(ahead(range(50))) == list(range(50))
    assert list(ahead([])) == []
    assert workers() == 0


def test_failure_of_an_item_ends_the_iteration_quietly() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the third one")

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(OSError, match="third"):
        next(found)


def test_more_is_made_than_asked_for() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    found = ahead(items())
    next(found)
    found.close()
    assert len(made) <= 3
    assert workers() == 0
