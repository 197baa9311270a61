"""The command `tableside`, and `python -m tableside`: sets signals before the imports."""

import signal
import sys


def main() -> int:
    """Runs one command; returns its exit code. During imports SIGINT ends the process without a traceback,
    and a starting server ignores signals that ask for something else."""
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
