"""The command ``turboquant``. `commands` has the parser; most subcommands have a module of their own."""

from .commands import main, make_parser

__all__ = ["main", "make_parser"]
