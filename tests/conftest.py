"""What tests of every room share: fixtures that need more than Python."""

from __future__ import annotations

import pytest
from browser import MISSING, Browser


@pytest.fixture(scope="session")
def browser() -> Browser:
    """Headless Chromium, or a skip that names the package."""
    found = Browser.installed()
    if found is None:
        pytest.skip(MISSING)
    return found
