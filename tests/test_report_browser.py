"""The benchmark's report as a browser shows it: on a phone, on a desktop, light, dark, on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_bucket.bench.report import write_report
from tests.test_report import bare, example

pytestmark = pytest.mark.browser
SIZES = {"phone": (360, 800), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(example(), tmp_path_factory.mktemp("report") / "smollm2.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        found = next(filter(None, map(shutil.which, (*names, own))), None)
        if found is None:
            pytest.skip(f"there is no browser: none of {', '.join(names)}, nor playwright's own")
        opened = started.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def opened(request: pytest.FixtureRequest, browser: Any, scheme: str, written: list[Path]) -> Any:
    """The page as a phone or a desktop shows it, with what its console and network said."""
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("requestfailed", lambda request: page.said.append(request.url[:80]))
    page.goto(written[0].as_uri())
    yield page
    context.close()


def test_the_page_never_scrolls_sideways(opened):
    root = "document.documentElement"
    assert opened.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")


def test_every_picture_is_shown_in_the_pages_own_theme(opened, scheme):
    pictures = opened.evaluate(
        """Promise.all([...document.images].map(async image => {
             await image.decode();
             const dark = image.previousElementSibling.srcset;
             return [image.naturalWidth, image.currentSrc === dark ? "dark" : "light"];
           }))"""
    )
    assert len(pictures) == 4
    assert all(width > 0 and theme == scheme for width, theme in pictures)


def test_the_page_loads_without_a_complaint(opened):
    assert opened.said == []


def test_dark_and_light_have_different_backgrounds(opened, scheme):
    colour = "getComputedStyle(document.body).backgroundColor"
    shown = opened.evaluate(colour)
    opened.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    assert opened.evaluate(colour) != shown


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    width, height = SIZES["phone"]
    page = browser.new_page(viewport={"width": width, "height": height})
    yield page
    page.close()


def test_a_phone_scrolls_the_table_and_not_the_page(phone, written):
    phone.goto(written[0].as_uri())
    box = "document.querySelector('.scroll')"
    assert phone.evaluate(f"{box}.scrollWidth > {box}.clientWidth")


def test_words_wider_than_a_phone_are_broken(phone, tmp_path):
    long = "x" * 200
    first = replace(bare().measured[0], backend=long, strategy=long)
    result = replace(bare(), model=long, workload=long, date=long, measured=(first,))
    phone.goto(
        write_report(replace(result, environment={long: long}), tmp_path / "long.html")[0].as_uri()
    )
    root = "document.documentElement"
    assert phone.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")


def test_a_printed_page_is_light_and_its_table_whole(browser, written):
    page = browser.new_page(viewport={"width": 1032, "height": 720}, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(written[0].as_uri())
    table = page.evaluate("document.querySelector('table').getBoundingClientRect().right")
    assert table <= 1032
    assert page.evaluate("document.images[0].currentSrc === document.images[0].src")
    page.close()
