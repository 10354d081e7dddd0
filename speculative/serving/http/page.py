"""The page at `/`: chat with a model in a browser. One static file (page.html), which loads nothing from other hosts.

The page requests `speculation` (token_sources.py), to mark the tokens that came from the draft.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse

HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hash_of(element: str) -> str:
    """The source expression of an inline element in a Content-Security-Policy."""
    match = re.search(f"<{element}>(.*?)</{element}>", HTML, re.DOTALL)
    assert match
    return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"


HEADERS = {
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script')}",
            f"style-src {_hash_of('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def page() -> HTMLResponse:
    return HTMLResponse(HTML, headers=HEADERS)
