"""The command `tableside`, and `python -m tableside`: what signals do before the command line takes them."""

import signal
import sys


def main() -> int:
    """Runs one command; returns its exit code.

    While modules are imported SIGINT ends the process without a traceback, and what asks a server for
    something else than its end does not end one that starts.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["serve"]:
        for sig in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
    try:
        from tableside.serving.cli.cli import main as run
    except ImportError as error:
        print(f"tableside: {error}", file=sys.stderr)
        return 1

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
