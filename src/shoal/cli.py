"""The `shoal` command.

Knows nothing but where the commands are, so that a missing extra is answered in
words and not with a traceback.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    try:
        from shoal._compare.commands import app
    except ModuleNotFoundError as exc:
        if exc.name not in {"rich", "typer"}:
            raise
        sys.exit(f"The command line needs {exc.name}. Install it: pip install 'shoal[cli]'")
    app()
