"""A browser beside the built site, for the tests that look at its pages."""

import pytest

from browser import Browser
from built_site import served, whole_site


@pytest.fixture(scope="module")
def site():
    """The folder of the built site."""
    return whole_site()


@pytest.fixture(scope="module")
def address(site):
    """The URL under which the site is served on this machine."""
    with served(site) as url:
        yield url


@pytest.fixture(scope="module")
def tab():
    """One page of a browser, which the tests of a module share: a start takes seconds."""
    browser = Browser()
    yield browser
    browser.close()
