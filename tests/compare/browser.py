"""A browser without a window, for what only a browser can tell of a page."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    # Chromium's own sandbox refuses to work for root.
    *(["--no-sandbox"] if os.getuid() == 0 else []),
]

TEXT_CONTRAST = Path(__file__).with_name("text_contrast.js").read_text(encoding="utf-8")


@contextmanager
def opened_browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
