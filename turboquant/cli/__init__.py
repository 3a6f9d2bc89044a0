"""The command ``turboquant``. `commands` has the parser, and what a subcommand does is in a module of its own."""

from .commands import main, make_parser

__all__ = ["main", "make_parser"]
