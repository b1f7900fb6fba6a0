"""The command line: parse, call one function of the library, print.

Exit status: 0 success, 1 defects found by `verify`, 2 wrong input, 130 interrupted. Every wrong input is one
line on standard error that begins with `stage: error:`; a traceback is a mistake of ours.
"""

import os
import re
import sys
from collections.abc import Sequence

from stage.errors import StageError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of one run of `stage` with these arguments (those of the process by default)."""
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except StageError as err:
        return _fail(str(err))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not raise again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as err:
        path = f"{err.filename}: " if err.filename is not None else ""
        return _fail(
            f"{path}{err.strerror or err}; check the path, its permissions and the space on its disk"
        )
    return status


def _run(args: list[str]) -> int:
    import typer

    from stage.cli.app import app

    try:
        status = app(args, prog_name="stage", standalone_mode=False)
    except typer.TyperException as err:
        commands = [command.name for command in app.registered_commands]
        command = f"stage {args[0]}" if args and args[0] in commands else "stage"
        return _fail(f"{_found(err.format_message(), args)}; see `{command} --help`")
    except SystemExit as stop:  # shell completion ends so, and so does a pipe that its reader closed
        status = stop.code
    return status if isinstance(status, int) else 0


def _found(message: str, args: Sequence[str]) -> str:
    """The message of a usage error with the value that was found, which the parser leaves out of some."""
    message = message.removesuffix(".").replace("Value error, ", "")
    named = re.match(r"Invalid value for '(--[a-z-]+)'", message)
    if named is None or named[1] not in args[:-1]:
        return message
    return f"{message} (found '{args[args.index(named[1]) + 1]}')"


def _fail(message: str) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    sys.stderr.write(f"stage: error: {line}\n")
    return 2
