"""Take pictures of pages in Chromium at the width of a desktop and of a phone.

    python research/scripts/screenshots.py OUT NAME=PAGE [NAME=PAGE ...] [--wait 3] [--widths 1280,390] [--script JS]
        [--choose "#PART LABEL=VALUE" ...] [--at SELECTOR] [--dark]

PAGE is an HTML file, a folder of a site (which is served on this machine while the picture is taken), or an
address. Writes OUT/NAME-WIDTH.png with at most 256 colours. ``--wait`` is for pages that load their
content with scripts, such as MLflow's; ``--script`` then runs in the page. ``--choose`` sets the control of a part of
the page that has this label, ``--at`` scrolls to an element, ``--dark`` asks for dark colours.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from browser import Browser  # noqa: E402
from built_site import served  # noqa: E402

HEIGHT = 900
HEADER = 70


@contextlib.contextmanager
def address_of(page: str) -> Iterator[str]:
    """The address under which a browser finds ``page`` while the context is open."""
    if "://" in page:
        yield page
        return
    path = Path(page).resolve()
    if path.is_file():
        yield path.as_uri()
        return
    # The site is the nearest folder above the page that holds the search index: its links begin there.
    site = next(parent for parent in (path, *path.parents) if (parent / "search").is_dir())
    with served(site) as root:
        inside = path.relative_to(site).as_posix()
        yield f"{root}/" if inside == "." else f"{root}/{inside}/"


def save(picture: bytes, file: Path) -> None:
    """Write a picture with at most 256 colours: a third of the bytes, and text stays sharp."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256)
    image.save(file, optimize=True)


def choose(browser: Browser, choice: str) -> None:
    """Set the control that ``#PART LABEL=VALUE`` names, as a reader does."""
    where, _, value = choice.partition("=")
    part, _, label = where.partition(" ")
    selector = json.dumps(f"{part} [aria-label='{label}']")
    browser.evaluate(
        f"(() => {{ const control = document.querySelector({selector}); control.value = {json.dumps(value)};"
        " control.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def scroll_to(browser: Browser, selector: str) -> None:
    """Put an element at the top of the picture, below the header that stays there."""
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView(); window.scrollBy(0, -{HEADER})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("pages", nargs="+", metavar="NAME=PAGE")
    parser.add_argument("--wait", type=float, default=0.5, help="seconds between loading and the picture")
    parser.add_argument("--widths", default="1280,390", help="in pixels; below 600 the page is shown as on a phone")
    parser.add_argument(
        "--script", default="", help="JavaScript that runs in the page half a second before its picture is taken"
    )
    parser.add_argument("--choose", action="append", default=[], metavar="'#PART LABEL=VALUE'", help="repeatable")
    parser.add_argument("--at", default="", metavar="SELECTOR", help="the element at the top of the picture")
    parser.add_argument("--dark", action="store_true", help="as a reader who prefers dark colours sees it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    widths = [int(width) for width in arguments.widths.split(",")]
    browser = Browser()
    if arguments.dark:
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        browser.ask("Emulation.setEmulatedMedia", features=[dark])
    try:
        for named in arguments.pages:
            name, _, page = named.partition("=")
            with address_of(page) as address:
                for width in widths:
                    # From an empty page: an address with a fragment alone would not load again.
                    browser.open("about:blank", width, HEIGHT)
                    browser.open(address, width, HEIGHT)
                    time.sleep(arguments.wait)
                    for choice in arguments.choose:
                        choose(browser, choice)
                    if arguments.at:
                        scroll_to(browser, arguments.at)
                        time.sleep(0.5)
                    if arguments.script:
                        browser.evaluate(arguments.script)
                        time.sleep(0.5)
                    file = arguments.out / f"{name}-{width}.png"
                    save(browser.picture(), file)
                    print(file)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
