"""``python -m turboquant``: see `turboquant.cli`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
