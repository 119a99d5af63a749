"""A user's error on the command line: one line on stderr and exit code 2, no traceback.

in: a main function -> out: its exit code.
MINIRL_DEBUG=1 shows the traceback. verl: none, it shows the traceback of the Ray task
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

# what a setting, a file or the numbers can cause; anything else is a bug and keeps its traceback
USER_ERRORS = (ValueError, OSError, FloatingPointError)


def run(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """main(argv), with user errors turned into one line. argv: the process's own arguments when None."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = main(arguments)
        sys.stdout.flush()  # here, so that a reader who has left is noticed here
        return code
    except BrokenPipeError:  # the reader of a pipe has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("MINIRL_DEBUG") == "1" or not (
            isinstance(error, USER_ERRORS) or _out_of_memory(error)
        ):
            raise
        _print_below_progress(f"error: {one_line(error)}")
        return 2
    except KeyboardInterrupt:
        _print_below_progress("error: interrupted")
        return 130


def one_line(error: BaseException) -> str:
    """The message on one line; the kind of error where there is no message."""
    if _out_of_memory(error):
        return "out of GPU memory: lower *_micro_batch_size_per_gpu or *_max_token_len_per_gpu"
    return " ".join(str(error).split()) or type(error).__name__


def _print_below_progress(line: str) -> None:
    """On a line of its own on stderr, also where a progress bar has not been closed."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        print(line, file=sys.stderr)
    else:
        tqdm.tqdm.write(line, file=sys.stderr)


def _out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # a command that needs no torch does not wait for its import
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


class OneLineParser(ArgumentParser):
    """Raises ValueError instead of printing its usage over several lines."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")
