"""The frame of an HTML page that shows responses of a model, which nobody should trust."""

import html

# Content security policy. The texts of a page are escaped already; in addition to that, the browser runs no script and
# loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def head(title: str, style: str) -> str:
    """Everything before the contents of the page. title is escaped, style is not."""
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            # Without it, a phone shows the page as wide as a desktop's, and tiny.
            '<meta name=viewport content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{html.escape(title)}</title><style>{style}</style>",
        ]
    )
