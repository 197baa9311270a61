"""Commands that run in this process."""

from tableside.serving.cli.cli import main


def code_of(*arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    try:
        return main([*arguments])
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code
