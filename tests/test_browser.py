"""The browser of the page tests does run scripts, does act on a page and does load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from browser import Browser

PAGE = """<!doctype html><title>t</title><p id=hover onmouseover="this.textContent = 'seen'">unseen</p><p id=out></p>
<img src="http://example.com/x.png" onerror="document.getElementById('out').textContent = 'not loaded'">
<script>document.title = 6 * 7</script>"""


def test_a_page_is_read_after_its_scripts_and_those_of_the_test_have_run(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    plain = browser.document(tmp_path / "page.html")
    assert "<title>42</title>" in plain
    assert ">unseen<" in plain
    assert ">not loaded<" in plain
    hovered = browser.document(
        tmp_path / "page.html", "document.getElementById('hover').dispatchEvent(new Event('mouseover'))"
    )
    assert ">seen<" in hovered


def test_a_screenshot_is_a_picture_of_the_size_asked_for(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    picture = browser.screenshot(tmp_path / "page.html", tmp_path / "page.png", width=640, height=480).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert (int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) == (640, 480)
