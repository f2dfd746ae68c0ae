"""Entry point of the command line: parses arguments, prints errors, and returns exit codes.

The commands themselves belong to `smoothhess.cli.explain` and `smoothhess.cli.demo`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smoothhess.cli.early_interrupt import (
    INTERRUPTED,
    exit_during_imports,
    exit_on_interrupt,
    is_command_line,
    raise_on_interrupt,
)
from smoothhess.cli.explain.output_folder import Folder
from smoothhess.cli.printable_text import one_line, replace_unencodable

FAILED = 2  # exit code


def demo(*, out: Path = Path("smoothhess-demo"), seed: int = 0) -> None:
    """Train two small ReLU networks and show which features act together in them.

    Handwritten digits (8×8 pixels) and breast cancer (30 named columns), both from scikit-learn; nothing is downloaded.
    Prints the strongest pairs with 95 % intervals; saves an interactive page for each dataset, figures and results.
    Takes less than a minute.

    Args:
        out: Folder for pages (html), figures (png) and results (safetensors). Files of an earlier run are replaced,
            other files never.
        seed: Seed of the data split, the initial weights and the noise. The same seed gives the same numbers.
    """
    if seed < 0 or seed >= 2**32:
        raise ValueError(f"--seed must be between 0 and 2³² − 1, got {seed}.")
    Folder(out)  # raises if it is not a folder of explanations
    print("smoothhess demo: loading the data and training two small networks", flush=True)
    with exit_during_imports():
        from smoothhess.cli import demo as demonstration
    demonstration.run(out, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: The arguments; those of the process if None.
    """
    code = run(_application, arguments)
    if is_command_line():
        exit_on_interrupt()  # also while the interpreter shuts down
    return code


def run(application: Callable[[], Any], arguments: Sequence[str] | None, name: str = "smoothhess") -> int:
    """Run a cyclopts application and return the exit code.

    Args:
        application: Function that returns the cyclopts App.
        arguments: The arguments; those of the process if None.
        name: Name of the program in error messages.

    Returns:
        0 on success; 2 after an error, which is printed on one line (with --debug, after its traceback); 130 after an
        interruption.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    replace_unencodable()
    try:
        raise_on_interrupt()
        application()(tokens, exit_on_error=False, print_error=False, result_action="return_none")
    except KeyboardInterrupt:
        return _say(f"{name}: interrupted", INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _say(f"{name}: error: {_one_line(error)}", FAILED)
    return 0


def _application() -> Any:
    try:
        from cyclopts import App
    except ImportError as error:
        raise ImportError("the command line requires cyclopts: pip install 'smoothhess[cli]'") from error
    from smoothhess._version import __version__
    from smoothhess.cli.explain.explain_command import explain

    app = App(
        name="smoothhess",
        version=__version__,
        help="Find the pairs of features that act together in a neural network, with confidence intervals.",
        help_epilogue="With --debug, errors include a traceback. Exit codes: 0 success, 2 error, 130 interrupted.",
        suppress_keyboard_interrupt=False,
    )
    app.command(explain)
    app.command(demo)
    return app


def _say(words: str, code: int) -> int:
    print(words, file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    return one_line(" ".join(str(error).split())) or type(error).__name__
