"""What each transformer computes once in a step is in the columns of its row."""

from __future__ import annotations

import pytest

from tests.zoo.once import find_missing


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_no_row_lacks_what_is_computed_once() -> None:
    """A failure means that patches compute again what the first one of a step has computed."""
    assert find_missing() == {}
