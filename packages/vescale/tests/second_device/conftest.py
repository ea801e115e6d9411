"""The second device is compiled before any test begins that waits for it within a bound."""

import pytest

from vescale_testkit.second import library


@pytest.fixture(scope="session", autouse=True)
def built():
    library()
